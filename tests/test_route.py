"""`route`, the reference: against float64 by hand, and as an op. The kernel is in `interpreted/test_triton_route.py`."""

from __future__ import annotations

import pytest
import torch

from halfbyte.errors import Unsupported
from halfbyte.ops.route import ROUTE, route
from halfbyte.reference.route import RouteCall, Routing
from route_cases import PUBLISHED, by_hand, draw


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_routers(name: str, dtype: torch.dtype) -> None:
    experts, routing, has_bias = PUBLISHED[name]
    logits, bias = draw(experts, has_bias, dtype)
    wanted, weights = by_hand(logits, routing, bias)
    ids, gates = route(logits, routing, bias, dtype=torch.float64)
    assert torch.equal(ids, wanted)
    rtol = 1e-12 if dtype is torch.float64 else 4e-6
    torch.testing.assert_close(gates, weights, rtol=rtol, atol=0)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
def test_opcheck(has_bias: bool, groups: int) -> None:
    logits, bias = draw(16, has_bias, torch.bfloat16)
    call = RouteCall(
        logits, Routing(4, "sigmoid", 1e-20, 2.5, groups, min(groups, 2), min(groups, 2)), bias, "bfloat16", "reference"
    )
    torch.library.opcheck(torch.ops.halfbyte.route.default, ROUTE.flat(call))


def test_experts_of_a_group_come_before_infinity_elsewhere() -> None:
    """Groups decide which experts may be chosen at all: even one whose score is -inf is, before any of another group."""
    bias = torch.tensor([5.0, -torch.inf, 4.0, 0.0])
    ids, gates = route(torch.zeros(1, 4), Routing(2, "sigmoid", None, 1.0, 2, 1, 1), bias)
    assert ids.tolist() == [[0, 1]]
    assert gates.tolist() == [[0.5, 0.5]]


def test_no_gradient_and_no_tokens() -> None:
    logits = torch.zeros(3, 8, requires_grad=True)
    with pytest.raises(Unsupported, match="no gradient"):
        route(logits, Routing(2))[1].sum().backward()
    ids, gates = route(torch.zeros(0, 8), Routing(2), dtype=torch.bfloat16)
    assert ids.shape == gates.shape == (0, 2)
    assert (ids.dtype, gates.dtype) == (torch.int64, torch.bfloat16)


def test_a_compiled_call() -> None:
    logits, bias = draw(16, True, torch.float32)
    routing = Routing(4, "sigmoid", 1e-20)
    compiled = torch.compile(lambda x: route(x, routing, bias), backend="eager", fullgraph=True)
    for ours, eager in zip(compiled(logits), route(logits, routing, bias), strict=True):
        assert torch.equal(ours, eager)
