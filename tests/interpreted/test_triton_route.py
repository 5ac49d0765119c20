"""The router of a mixture, interpreted: against float64 by hand, and bit for bit in what it chooses against the reference."""

from __future__ import annotations

import pytest
import torch

from halfbyte.errors import InvalidArgument
from halfbyte.kernels.block.route import launch
from halfbyte.ops.route import route
from halfbyte.reference.route import RouteCall, Routing
from route_cases import PUBLISHED, by_hand, draw

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN, INF = torch.nan, torch.inf
PLAIN, SCORED = Routing(3, "softmax", 1e-20), Routing(3, "sigmoid", 1e-20)


def poisoned(call: RouteCall) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel writes into memory that held other numbers, and nothing around it."""
    tokens, top_k = len(call.logits), call.routing.top_k
    ids = torch.full((tokens + 2, top_k), -7)
    gates = torch.full((tokens + 2, top_k), NAN, dtype=getattr(torch, call.dtype))
    launch(call, ids[1:-1], gates[1:-1], False)
    assert ids[:: tokens + 1].eq(-7).all()
    assert gates[:: tokens + 1].isnan().all()
    return ids[1:-1], gates[1:-1]


def both(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's result; the reference, in fp32, chooses the same."""
    ids, gates = route(logits, routing, bias, impl="triton")
    expected, weights = route(logits, routing, bias, impl="reference")
    assert torch.equal(ids, expected)
    torch.testing.assert_close(gates, weights, rtol=1e-5, atol=1e-7, equal_nan=True)
    return ids, gates


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_routers(name: str, dtype: torch.dtype) -> None:
    experts, routing, has_bias = PUBLISHED[name]
    logits, bias = draw(experts, has_bias, dtype)
    wanted, weights = by_hand(logits, routing, bias)
    for kind in DTYPES:
        ids, gates = poisoned(RouteCall(logits, routing, bias, str(kind).removeprefix("torch.")))
        assert torch.equal(ids, wanted)
        assert gates.dtype is kind
        unit = torch.finfo(kind).eps if kind is not torch.float32 else 4e-6
        torch.testing.assert_close(gates.double(), weights, rtol=unit, atol=2.0**-25)


@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 7, 10])
@pytest.mark.parametrize("experts", [4, 12, 60, 160, 512])
def test_any_number_of_experts(experts: int, top_k: int) -> None:
    routing = Routing(min(top_k, experts), "sigmoid", None, 0.5)
    logits, bias = draw(experts, True, torch.float32, seed=top_k)
    ids, gates = both(logits, routing, bias)
    wanted, weights = by_hand(logits, routing, bias)
    assert torch.equal(ids, wanted)
    torch.testing.assert_close(gates.double(), weights, rtol=4e-6, atol=0)


@pytest.mark.parametrize("groups", [2, 3, 5, 15])
@pytest.mark.parametrize("best", [1, 2, 4])
@pytest.mark.parametrize("has_bias", [False, True])
def test_groups(groups: int, best: int, has_bias: bool) -> None:
    """All experts of those that are open may be chosen, and none of others."""
    for open_groups in (1, groups):
        routing = Routing(min(16, 60 // groups * open_groups), "sigmoid", 1e-6, 2.5, groups, open_groups, best)
        logits, bias = draw(60, has_bias, torch.bfloat16, seed=groups)
        ids, gates = both(logits, routing, bias)
        wanted, weights = by_hand(logits, routing, bias)
        assert torch.equal(ids, wanted)
        torch.testing.assert_close(gates.double(), weights, rtol=4e-6, atol=0)
        assert all(len(set(row)) == routing.top_k for row in ids.tolist())


def test_of_equal_numbers_the_first() -> None:
    ids, gates = both(torch.zeros(2, 6), PLAIN)
    assert ids.tolist() == [[0, 1, 2]] * 2
    assert torch.allclose(gates, torch.full((2, 3), 1 / 3))
    assert both(torch.tensor([[0.0, 2, -0.0, 2, 1, 2]]), PLAIN._replace(top_k=5))[0].tolist() == [[1, 3, 5, 4, 0]]
    grouped = Routing(2, "sigmoid", None, 1.0, 3, 2, 2)
    assert both(torch.tensor([[1.0, 1, 1, 1, 1, 1]]), grouped)[0].tolist() == [[0, 1]]
    assert both(torch.tensor([[0.0, 0, 1, 1, 1, 1]]), grouped)[0].tolist() == [[2, 3]]
    assert both(torch.zeros(1, 6), SCORED, torch.tensor([0.0, 0, 1, 0, 1, 0]))[0].tolist() == [[2, 4, 0]]


def test_scores_that_round_to_one_number_are_told_from_each_other() -> None:
    """By their logits, where nothing is added to them: in fp32 each sigmoid is 1, and each softmax but one is 0."""
    for logits in (torch.tensor([[20.0, 30.0, 25.0, 40.0]]), torch.tensor([[-300.0, -200.0, -250.0, 0.0]])):
        for routing in (PLAIN, SCORED):
            assert both(logits, routing)[0].tolist() == [[3, 1, 2]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("routing", [PLAIN, SCORED, Routing(3, "softmax"), Routing(3, "sigmoid", None, 2.0, 2, 1, 2)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("value", [NAN, -NAN, INF, -INF])
def test_ids_are_experts_whatever_the_logits_are(routing: Routing, has_bias: bool, value: float) -> None:
    """Gates of NaN are NaN, as those of torch are: nothing is covered up."""
    logits, bias = draw(8, has_bias, torch.float32, tokens=3)
    logits[0], logits[1, 5], logits[2, 1:] = value, value, value
    for kind in DTYPES:
        ids, gates = both(logits.to(kind), routing, bias)
        assert all(sorted(set(row)) == sorted(row) and 0 <= min(row) <= max(row) < 8 for row in ids.tolist())
        if value != value:
            is_everywhere = has_bias and routing.score == "softmax"  # in the scores of all experts
            assert ids[1, 0] == (0 if is_everywhere else 5)
            assert gates[1, 0].isnan()


def test_rows_with_gaps_and_biases_of_other_types() -> None:
    wide = draw(24, False, torch.bfloat16, tokens=6)[0]
    both(wide[::2, 4:12], PLAIN)
    both(wide[:, ::2], PLAIN)
    bias = torch.randn(24, 2, generator=torch.Generator().manual_seed(1))
    both(wide, SCORED, bias[:, 0])
    both(wide, SCORED, bias[:, 0].half())


def test_what_is_refused() -> None:
    logits = torch.zeros(2, 12)
    ids, gates = route(torch.zeros(0, 12), PLAIN, impl="triton")
    assert ids.shape == gates.shape == (0, 3)
    for bad, name in (
        ((logits.long(), PLAIN), "logits"),
        ((logits[0], PLAIN), "logits"),
        ((logits, PLAIN, torch.zeros(11)), "bias"),
        ((logits, PLAIN._replace(top_k=0)), "routing.top_k"),
        ((logits, PLAIN._replace(top_k=13)), "routing.top_k"),
        ((logits, PLAIN._replace(top_k=7, groups=2)), "routing.top_k"),
        ((logits, PLAIN._replace(score="tanh")), "routing.score"),  # type: ignore[arg-type]
        ((logits, PLAIN._replace(eps=-1.0)), "routing.eps"),
        ((logits, PLAIN._replace(scale=NAN)), "routing.scale"),
        ((logits, PLAIN._replace(groups=5)), "routing.groups"),
        ((logits, PLAIN._replace(groups=4, top_groups=5)), "routing.top_groups"),
        ((logits, PLAIN._replace(groups=4, best=4)), "routing.best"),
    ):
        with pytest.raises(InvalidArgument, match=name):
            route(*bad)
    with pytest.raises(InvalidArgument, match="dtype"):
        route(logits, PLAIN, dtype=torch.int64)
    for wrong in (torch.zeros(1, 1025), torch.zeros(1, 12).double()):
        with pytest.raises(InvalidArgument, match="use impl='auto'"):
            route(wrong, PLAIN, impl="triton")
        route(wrong, PLAIN)
