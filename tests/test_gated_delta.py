"""`gated_delta`: the reference against float64, number by number; what the op refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from delta_cases import SHAPES, Shape, drawn, error, truth
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.ops.gated_delta import GATED_DELTA, gated_delta
from halfbyte.reference.gated_delta import DeltaCall
from test_ops import opcheck

pytestmark = pytest.mark.usefixtures("poisoned_memory")
#: Rounded at about ten places to so many digits.
CLOSE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_in_float64(shape: Shape, dtype: torch.dtype) -> None:
    for beta_scale in (1.0, 2.0):
        case = drawn(shape, dtype, beta_scale=beta_scale)
        if dtype is torch.float64:
            case = case._replace(state=case.state.double())
        for found, expected in zip(case.run("auto"), truth(case), strict=True):
            assert error(found, expected) < CLOSE[dtype]


def test_tokens_one_after_the_other() -> None:
    """States in place, which the next token reads; those of 16 bits are rounded once a token."""
    case = drawn(SHAPES[0], torch.float32)
    for state in (case.state.clone(), case.state.bfloat16()):
        conv_state, expected = case.conv_state.clone(), case
        for _ in range(6):
            out = gated_delta(*case.projections, case.weights, conv_state, state)
            wanted, *states = truth(expected)
            assert error(out, wanted) < (2e-6 if state.dtype is torch.float32 else 2e-2)
            expected = case._replace(conv_state=states[0], state=states[1])
        assert torch.equal(conv_state, conv_state[..., -1:].expand_as(conv_state))


def flat(shape: Shape = SHAPES[3], **changes: Any) -> DeltaCall:
    case = drawn(shape, torch.bfloat16)
    out = torch.empty(shape.batch, case.projections[2].shape[1:].numel(), dtype=torch.bfloat16)
    return DeltaCall(*case.projections, *case[1:], out, "reference")._replace(**changes)  # type: ignore[arg-type,misc]


@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_opcheck(shape: Shape) -> None:
    opcheck(GATED_DELTA, flat(shape))


def test_no_sequences() -> None:
    case = drawn(SHAPES[0], torch.float32)
    none = case._replace(projections=tuple(t[:0] for t in case.projections), conv_state=case.conv_state[:0], state=case.state[:0])
    assert none.run("auto")[0].shape == (0, 64)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("k", lambda t: t[:, :1], "k has shape"),
        ("v", lambda t: t[..., 0], "v has shape"),
        ("z", lambda t: t.float(), "z is torch.float32 and q torch.bfloat16"),
        ("b", lambda t: t[:1], "b has shape"),
        ("conv_state", lambda t: t[:, 1:], "conv_state has shape"),
        ("state", lambda t: t.mT.contiguous().mT, "state has strides"),
        ("norm", lambda t: t[1:], "weights.norm has shape"),
        ("conv", lambda t: t[:, 1:], "weights.conv has shape"),
        ("a_log", lambda t: t.repeat(2)[::2], "weights.a_log has strides"),
    ],
)
def test_what_is_refused(name: str, change: Any, says: str) -> None:
    call = flat()
    if name in call._fields:
        call = call._replace(**{name: change(getattr(call, name))})
    else:
        call = call._replace(weights=call.weights._replace(**{name: change(getattr(call.weights, name))}))
    with pytest.raises(InvalidArgument, match=says):
        gated_delta(*call[:9])


def test_levels_that_cannot_run() -> None:
    with pytest.raises(Unsupported, match="impl='triton' of gated_delta runs on an NVIDIA GPU"):
        gated_delta(*flat()[:9], impl="triton")
