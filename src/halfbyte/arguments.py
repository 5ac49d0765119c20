"""Argument checks, whose errors name the argument, what was given and what was expected; and marks of the fields of calls."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from halfbyte.errors import InvalidArgument, check

Kind = Literal["floating", "integer"]
_INTEGERS = (torch.int32, torch.int64)


class Mark(enum.Enum):
    """What an `Annotated` field of a call says besides its type, for `halfbyte.ops.declare`."""

    WRITTEN = "the op writes this tensor, or those of this buffer"
    RESULT = "a tensor that the op allocates and writes: no part of a call's signature"
    COMPILED = "a number that kernels are compiled for"
    DIFFERENTIABLE = "torch may want a gradient of this tensor, so that the dispatcher must see the call"


class Without(NamedTuple):
    """The same: the op does not take this field of a nested object."""

    field: str


def check_tensor(
    name: str, t: Any, shape: Sequence[int | str], kind: Kind = "floating", device: torch.device | None = None
) -> None:
    """Raise unless `t` is a tensor of this shape (strings match any size), kind and device. FP8 and bool are neither kind."""
    kinds = "int32 or int64" if kind == "integer" else "fp16, bf16, fp32 or float64"
    if not isinstance(t, torch.Tensor):
        raise InvalidArgument(f"{name} is a {type(t).__name__}; expected a tensor of {kinds}")
    # Messages are built only when raised: this runs once per layer and step, and formatting would dominate.
    if not torch.compiler.is_compiling() and (t.layout is not torch.strided or t.is_neg()):  # memory holds other numbers
        how = "negated when it is read; pass resolve_neg() of it" if t.layout is torch.strided else f"{t.layout}; pass a dense one"
        raise InvalidArgument(f"{name} is {how}")
    fits = t.shape == shape or (t.ndim == len(shape) and all(map(_fits, t.shape, shape)))
    if not fits:
        raise InvalidArgument(f"{name} has shape {list(t.shape)}; expected [{', '.join(map(str, shape))}]")
    right = t.dtype in _INTEGERS if kind == "integer" else t.is_floating_point() and t.dtype.itemsize > 1
    if not right:
        raise InvalidArgument(f"{name} is {t.dtype}; expected {kinds}")
    if device is not None and t.device != device:
        raise InvalidArgument(f"{name} is on {t.device}; expected it on {device}: move one of them")


def _fits(size: int, expected: int | str) -> bool:
    return isinstance(expected, str) or size == expected


def as_int32(t: torch.Tensor) -> torch.Tensor:
    """An integer tensor as int32; values that do not fit saturate, so that they stay out of range."""
    return t if t.dtype is torch.int32 else t.clamp(-(2**31), 2**31 - 1).to(torch.int32)


def number(name: str, value: Any, low: float, high: float, what: str) -> float:
    """A finite number in [low, high] as a float."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high
    check(good, f"{name}={value!r}; expected {what}")
    return float(value)


def integer(name: str, value: Any, low: int, high: int, what: str) -> int:
    """An integer in [low, high]."""
    good = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    check(good, f"{name}={value!r}; expected {what}")
    return int(value)


def check_sizes(**sizes: int) -> None:
    """Raise unless each size is an int32 of at least 1, like lengths; `batch` may be 0."""
    for name, size in sizes.items():
        least = 0 if name == "batch" else 1
        integer(name, size, least, 2**31 - 1, f"an integer of at least {least} and below 2^31")


def device_of(value: Any) -> torch.device:
    """`value` as a torch device. Raises `InvalidArgument` if this machine does not have it."""
    try:
        return torch.empty(0, device=value).device
    except (RuntimeError, TypeError, AssertionError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidArgument(f"device={value!r} cannot be used here ({reason}); expected cpu, cuda or cuda:N") from error
