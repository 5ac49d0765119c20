"""The kernel of the gated delta rule, interpreted, against float64 and against what the modules round to."""

from __future__ import annotations

import pytest
import torch

from delta_cases import SHAPES, Case, Shape, drawn, error, truth
from halfbyte.errors import InvalidArgument
from halfbyte.kernels.block.gated_delta import launch
from halfbyte.reference.gated_delta import DeltaCall

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    #: numpy warns of what a GPU computes silently, and as meant: exp of a large number.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check(case: Case, exact: float) -> None:
    """No further from the truth than the reference, whose bits nearly all results have; tokens are stored as they are."""
    expected = truth(case)
    found, reference = case.run("triton"), case.run("reference")
    for one, other, wanted in zip(found, reference, expected, strict=True):
        assert error(one, wanted) <= 1.1 * error(other, wanted) + 1e-6
    assert torch.equal(found[1], reference[1])
    assert (found[0] == reference[0]).float().mean() >= exact
    near = torch.isclose(found[2], reference[2], rtol=1e-5, atol=1e-5)
    assert near.float().mean() > 0.98  # but for a value that the convolution rounds the other way


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_of_each_sequence(shape: Shape, dtype: torch.dtype) -> None:
    check(drawn(shape, dtype), 0.0 if dtype is torch.float32 else 0.95)


def test_published_sizes() -> None:
    """Heads of 128, two value heads a key head, and weights that stay in fp32."""
    case = drawn(Shape(1, 1, 2, 128, 128), torch.bfloat16, beta_scale=2.0)
    wide = case.weights._replace(a_log=case.weights.a_log.float(), dt_bias=case.weights.dt_bias.float())
    check(case._replace(weights=wide), 0.95)
    fp32 = wide._replace(conv=case.weights.conv.float(), norm=case.weights.norm.float())
    check(case._replace(weights=fp32), 0.95)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_in_16_bits(dtype: torch.dtype) -> None:
    case = drawn(SHAPES[2], dtype)
    case = case._replace(state=case.state.to(dtype))
    found, reference = case.run("triton"), case.run("reference")
    assert found[2].dtype is dtype
    assert (found[2] == reference[2]).float().mean() > 0.99


@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[3]])
def test_each_sequence_has_the_bits_that_it_has_alone(shape: Shape) -> None:
    case = drawn(shape, torch.bfloat16)
    whole = case.run("triton")
    for row in range(shape.batch):
        for one, other in zip(whole, case.row(row).run("triton"), strict=True):
            assert torch.equal(one[row : row + 1], other)


@pytest.mark.parametrize("place", [*range(6), "conv_state", "state"])
def test_nan_stays_in_its_sequence(place: int | str) -> None:
    case = drawn(SHAPES[3], torch.bfloat16)
    clean = case.run("triton")
    damaged = case.projections[place] if isinstance(place, int) else getattr(case, place)
    damaged[1] = torch.nan
    found = case.run("triton")
    assert bool(found[0][1].isnan().all())
    for one, other in zip(found, clean, strict=True):
        assert torch.equal(one[[0, 2, 3, 4]], other[[0, 2, 3, 4]])


def test_gates_of_any_size() -> None:
    """A state that is forgotten, and one that stays: log(1 + exp(x)) of large and of very small numbers."""
    case = drawn(Shape(5, 1, 1, 16, 16), torch.float32)
    weights = case.weights._replace(a_log=torch.zeros(1), dt_bias=torch.zeros(1))
    case.projections[5][:, 0, 0] = torch.tensor([-100.0, -17.5, -3.0, 60.0, 200.0])
    check(case._replace(weights=weights), 0.0)


def test_counters_are_zero_again_and_nothing_else_is_written() -> None:
    shape = SHAPES[2]
    case = drawn(shape, torch.bfloat16)
    width = shape.key_heads * shape.group * shape.dv
    tensors = (case.conv_state, case.state, torch.full((shape.batch, width), torch.nan, dtype=torch.bfloat16))
    memory = [torch.full((t.numel() + 64,), torch.nan, dtype=t.dtype) for t in tensors]
    conv_state, state, out = (m[32:-32].view(t.shape).copy_(t) for m, t in zip(memory, tensors, strict=True))
    counters = torch.zeros(shape.batch * shape.key_heads, dtype=torch.int32)
    for _ in range(2):
        launch(DeltaCall(*case.projections, case.weights, conv_state, state, out), counters, False)  # type: ignore[misc,arg-type]
        assert not counters.any()
    for m in memory:
        assert bool(m[:32].isnan().all())
        assert bool(m[-32:].isnan().all())
        assert bool(m[32:-32].isfinite().all())


def test_states_that_do_not_fit_are_refused_by_name() -> None:
    case = drawn(Shape(1, 1, 1, 256, 256), torch.bfloat16)
    with pytest.raises(InvalidArgument, match=r"impl='triton': a state of 256 x 256 has more than the 32768 numbers"):
        case.run("triton")
    double = drawn(SHAPES[0], torch.float64)
    with pytest.raises(InvalidArgument, match=r"gated_delta has a kernel for float16, bfloat16 and float32"):
        double.run("triton")
