"""`experts_linear` on the levels of every device, against a loop over pairs in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import halfbyte as hb
from experts_cases import CALLS, OAI, Mixture, both_in_one, normal, routed, stack
from halfbyte.cpu.experts import experts_linear as cpu
from halfbyte.device import H200
from halfbyte.errors import HalfbyteError, InvalidArgument, Unsupported
from halfbyte.experts import QuantExperts, mlp
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.ops import _linear_on_gpu
from halfbyte.ops import experts_linear as one
from halfbyte.ops import experts_mlp as mlp_op
from halfbyte.ops.experts_linear import EXPERTS, experts_of_parts
from halfbyte.ops.experts_mlp import EXPERTS_MLP, MlpCall, Projection, experts_mlp
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.reference.experts import Activation, ExpertsCall
from halfbyte.reference.experts import experts_linear as reference
from halfbyte.tensors import QuantTensor, expected_parts
from watched import watched

pytestmark = pytest.mark.usefixtures("poisoned_memory")
LEVELS = {"cpu": cpu, "reference": reference}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CALLS)
def test_every_call(name: str, level: str) -> None:
    CALLS[name]().check(LEVELS[level])


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_a_stack_is_its_matrices(name: str) -> None:
    """Quantized together or one by one: the same values; double quantization alone knows all matrices at once."""
    x = normal(3, 16, 256)
    together = hb.quantize(x, name)
    assert together.nbytes == together.format.nbytes((3, 16, 256))
    if together.nested is None:
        assert torch.equal(together.dequantize(), torch.stack([hb.quantize(m, name).dequantize() for m in x]))
    searched = hb.quantize(x, name, clip="search").dequantize()
    assert (searched - x).norm() <= (together.dequantize() - x).norm() * 1.001


def test_a_number_that_is_no_expert() -> None:
    """An error on a CPU; where nothing raises (the levels themselves, a GPU), zeros, whatever the gate is."""
    weight, ids = stack("int4_g32", 4, 8, 64), torch.tensor([[0, -1], [4, 2**40]])
    for bad in (-1, 4):
        with pytest.raises(InvalidArgument, match=f"ids holds {bad}; the weight has experts 0 to 3"):
            hb.experts_linear(normal(1, 64), weight, torch.tensor([[0, bad]]))
    for level in LEVELS.values():
        for gates in (None, torch.tensor([[0.5, torch.nan], [torch.nan, torch.inf]])):
            out = level(Mixture(normal(2, 64), weight, ids, gates, normal(4, 8), OAI))
            assert out.isfinite().all()
            assert not out[1].any()


@pytest.mark.parametrize("level", ["auto", *LEVELS])
def test_nothing_to_do(level: str) -> None:
    weight, none = stack("int4_g32", 4, 8, 64), torch.zeros(0, 2, dtype=torch.long)
    assert hb.experts_linear(normal(0, 64), weight, none, impl=level).shape == (0, 2, 8)
    assert hb.experts_linear(normal(0, 64), weight, none, torch.rand(0, 2), activation="silu", impl=level).shape == (0, 4)
    nobody = torch.zeros(3, 0, dtype=torch.long)
    assert torch.equal(hb.experts_linear(normal(3, 64), weight, nobody, torch.rand(3, 0), impl=level), torch.zeros(3, 8))
    assert hb.experts_linear(normal(3, 64), weight, nobody, impl=level).shape == (3, 0, 8)


@pytest.mark.parametrize("level", LEVELS)
def test_float64_is_computed_in_float64(level: str) -> None:
    case = Mixture(normal(3, 64).double(), stack("int4_g32", 4, 8, 64), routed(3, 2, 4))
    torch.testing.assert_close(LEVELS[level](case), case.expected(torch.float64), rtol=1e-12, atol=1e-12)


def test_strides_and_integers_of_any_kind() -> None:
    weight, ids = stack("int4_g64", 4, 8, 128), routed(6, 2, 4)
    x = normal(128, 6).mT
    expected = hb.experts_linear(x.contiguous(), weight, ids)
    assert torch.equal(hb.experts_linear(x, weight, ids.mT.contiguous().mT.int()), expected)
    parts = {name: part.transpose(1, 2).contiguous().transpose(1, 2) for name, part in weight.parts().items()}
    assert torch.equal(hb.experts_linear(x, replace(weight, **parts), ids), expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["int4_g32", "nf4_dq", "nvfp4"])
def test_opcheck(name: str, level: str) -> None:
    call = ExpertsCall(normal(3, 64), stack(name, 4, 8, 64), routed(3, 2, 4), impl=level)
    for one_call in (call, call._replace(gates=torch.rand(3, 2), bias=normal(4, 8), activation=Activation("silu"))):
        torch.library.opcheck(torch.ops.halfbyte.experts_linear.default, EXPERTS.flat(one_call))


def test_compiled_is_eager() -> None:
    torch._dynamo.reset()
    weight, ids, x = stack("mxfp4", 4, 8, 64), routed(3, 2, 4), normal(3, 64)
    parts = list(weight.parts().values())

    def layer(x: torch.Tensor) -> torch.Tensor:
        return experts_of_parts(x, parts, ids, None, None, "mxfp4", OAI) * 2

    expected = hb.experts_linear(x, weight, ids, activation=OAI) * 2
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), expected)


def both(name: str = "mxfp4", *, act_order: bool = False) -> tuple[Projection, Projection]:
    """Gate and up of 4 experts, and down."""
    up, down = stack(name, 4, 128, 64, act_order=act_order), stack(name, 4, 64, 64, act_order=act_order)
    return Projection([*up.parts().values()], name, normal(4, 128)), Projection([*down.parts().values()], name, normal(4, 64))


@pytest.mark.parametrize("name", ["int4_g32", "mxfp4", "nf4_dq"])
def test_both_projections_are_one_after_the_other(name: str) -> None:
    for act_order in (False, True):
        up, down = both(name, act_order=act_order)
        x, ids, gates = normal(5, 64).bfloat16(), routed(5, 2, 4), torch.rand(5, 2)
        inner = hb.experts_linear(x, up.weight(), ids, bias=up.bias, activation=OAI)
        assert torch.equal(
            experts_mlp(x, up, down, ids, gates, OAI), hb.experts_linear(inner, down.weight(), ids, gates, bias=down.bias)
        )


def test_both_projections_in_words_and_in_graphs() -> None:
    (up, down), x, ids, gates = both(), normal(5, 64).bfloat16(), routed(5, 2, 4), torch.rand(5, 2)
    call = MlpCall(x, up, down._replace(bias=None), ids, gates, Activation("silu"), "cpu")
    torch.library.opcheck(torch.ops.halfbyte.experts_mlp.default, EXPERTS_MLP.flat(call))
    fewer = Projection([part[:3] for part in down.parts], "mxfp4")
    with pytest.raises(InvalidArgument, match="down has 3 experts; up has 4"):
        experts_mlp(x, up, fewer, ids, gates, OAI)
    with pytest.raises(InvalidArgument, match="down takes 64 columns; expected 32, half of the rows of up"):
        experts_mlp(x, down, down, ids, gates, OAI)
    with pytest.raises(InvalidArgument, match="gates has shape"):
        experts_mlp(x, up, down, ids, gates[:, :1], OAI)
    with pytest.raises(InvalidArgument, match=r"the bias of down has shape \[3, 64\]; expected \[4, 64\]"):
        experts_mlp(x, up, down._replace(bias=normal(3, 64)), ids, gates, OAI)
    with pytest.raises(InvalidArgument, match="ids holds 4; the weight has experts 0 to 3"):
        experts_mlp(x, up, down, ids + 1, gates, OAI)


def unstored(name: str, *shape: int, act_order: bool = False) -> QuantTensor:
    """A stack without memory."""
    parts = expected_parts(WEIGHT_FORMATS[name], shape, act_order=act_order)
    return QuantTensor(WEIGHT_FORMATS[name], shape, **{n: torch.empty(*s, dtype=d, device="meta") for n, (s, d) in parts.items()})


@pytest.mark.parametrize(
    ("first", "last", "tokens", "half", "ran"),
    [
        ("int4_g128", "int4_g128", 16384, torch.bfloat16, ["both", "codes", "codes"]),
        ("int4_g128", "int4_g32", 4096, torch.float16, ["both", "codes", "codes"]),
        ("int4_g128", "nf4", 1792, torch.bfloat16, ["one", "codes", "one", "codes"]),  # in blocks of 128 and of 256 pairs
        ("int4_g128", "nf4", 128, torch.bfloat16, ["one", "codes", "one", "codes"]),  # in blocks of 32, but by two kernels
        ("int4_g128", "int4_g32", 128, torch.bfloat16, ["both", "codes", "codes"]),
        ("int4_g128", "nf4_dq", 4096, torch.bfloat16, ["both", "codes", "values"]),  # codes that the tuned kernel does not read
        ("nf4_dq", "nf4_dq", 4096, torch.bfloat16, ["both", "values", "values"]),
        ("int4_g64 act-order", "int4_g64 act-order", 4096, torch.bfloat16, ["both", "values", "values"]),
        ("int4_g64 act-order", "int4_g64 act-order", 1024, torch.bfloat16, ["one", "codes", "one", "codes"]),
    ],
)
def test_what_runs_the_prompts_of_an_h200(
    first: str, last: str, tokens: int, half: torch.dtype, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes are multiplied as they are wherever `experts_linear` does so, also where one call cannot take both projections."""
    seen: list[str] = []
    monkeypatch.setattr(one, "gpu", lambda _: H200)
    monkeypatch.setattr(_linear_on_gpu, "gpu", lambda _: H200)
    monkeypatch.setattr(_linear_on_gpu, "_plan", _linear_on_gpu._plan.__wrapped__)

    def kinds(*ways: GemmPlan | int) -> list[str]:
        return ["codes" if isinstance(way, GemmPlan) else "values" for way in ways]

    monkeypatch.setattr(one._experts_prompt, "run", lambda _, way, out: seen.extend(["one", *kinds(way)]))
    monkeypatch.setattr(one._experts_prompt, "both", lambda up, down, ways, out: seen.extend(["both", *kinds(*ways)]) or [])
    x, ids = (torch.empty(tokens, n, dtype=dtype, device="meta") for n, dtype in ((256, half), (8, torch.int64)))
    up = unstored(first.split()[0], 128, 512, 256, act_order="act" in first)
    down = unstored(last.split()[0], 128, 256, 256, act_order="act" in last)
    mlp_op.run(both_in_one(ExpertsCall(x, up, ids, None, None, OAI), ExpertsCall(x, down, ids, ids.to(half))))
    assert seen == ran


def test_the_second_projection_reads_ids_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are contiguous ahead of the first: no launch in between may write what the second reads before it waits."""
    early: list[bool] = []
    ids: list[torch.Tensor] = []

    def run(call: ExpertsCall, ids_early: bool) -> torch.Tensor:
        early.append(ids_early)
        ids.append(call.ids)
        return call.new_result()

    monkeypatch.setattr(one, "_run_on_gpu", run)
    monkeypatch.setattr(one, "gpu", lambda _: H200)
    x, gates, given = normal(3, 64).half(), torch.rand(3, 2), routed(3, 2, 4).T.contiguous().T
    up, down = stack("int4_g32", 4, 128, 64), stack("int4_g32", 4, 12, 64)
    call = both_in_one(ExpertsCall(x, up, given, None, None, OAI), ExpertsCall(x, down, given, gates))
    assert mlp_op.run(call).shape == (3, 12)
    assert early == [False, True]
    assert ids[0] is ids[1]
    assert ids[0].is_contiguous()


def test_act_order_takes_some_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, ids, right = stack("int4_g32", 4, 12, 64, act_order=True), routed(7, 2, 4), torch.gather
    assert weight.perm is not None
    monkeypatch.setattr(one, "_INDICES", 3 * 2 * 64)
    sizes = watched(monkeypatch, torch, "gather", lambda x, *_, **options: len(x))
    for x in (normal(7, 64), normal(7, 2, 64)):
        rows = x.unsqueeze(1) if x.ndim == 2 else x
        expected = right(rows.expand(7, 2, 64), 2, weight.perm.long()[ids])
        assert torch.equal(one._dense(ExpertsCall(x, weight, ids)).x, expected)
    assert sizes == [3, 3, 1] * 2


def test_modules_that_are_watched_are_called() -> None:
    """By a hook, or as accelerate replaces forwards; and those without an activation of their own."""
    up, down = (QuantExperts(p.weight(), p.bias) for p in both())
    up.activation = OAI
    x, ids, gates = normal(5, 64).bfloat16(), routed(5, 2, 4), torch.rand(5, 2)
    expected, seen = mlp(up, down, x, ids, gates), list[object]()
    handle = down.register_forward_hook(lambda *given: seen.append(given))
    assert torch.equal(mlp(up, down, x, ids, gates), expected)
    handle.remove()
    forward = up.forward
    up.forward = lambda *given: seen.append(given) or forward(*given)  # type: ignore[func-returns-value,method-assign]
    assert torch.equal(mlp(up, down, x, ids, gates), expected)
    assert len(seen) == 2


def test_gradients_and_missing_gpus_are_refused() -> None:
    weight, ids = stack("int4_g32", 4, 8, 64), routed(2, 2, 4)
    with pytest.raises(HalfbyteError, match="no gradient"):
        hb.experts_linear(normal(2, 64).requires_grad_(), weight, ids).sum().backward()
    with pytest.raises(Unsupported, match="impl='triton' of experts_linear runs on an NVIDIA GPU"):
        hb.experts_linear(normal(2, 64), weight, ids, impl="triton")


def test_the_same_bits_each_time() -> None:
    case = Mixture(normal(9, 64).half(), stack("int4_g32", 4, 8, 64), routed(9, 3, 4), torch.rand(9, 3), activation=OAI)
    first = cpu(case)
    assert all(torch.equal(cpu(case), first) for _ in range(20))
