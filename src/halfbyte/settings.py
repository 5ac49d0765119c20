"""Defaults: the formats of a model, and environment flags.

There are at most five flags. Each is typed and read when it is needed; a bad value raises and lists what is allowed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from halfbyte.errors import InvalidArgument, check

#: Formats of a model where none are named, in `hf.quantize`, `hf.HalfbyteConfig`, on the command line and in every recommendation.
#: The cache is safe on a real model (docs/performance/evidence.md) and on all outlier variants of the shipped one
#: (docs/performance/quality-per-bit.md); of weights with 4.5 bits nvfp4 has the least KL divergence
#: there, and unclipped more than nf4.
WEIGHTS, CLIP, KEYS, VALUES = "nvfp4", "search", "int8_channel", "int8"
#: Weights of a model on a CPU, where none are named: they have the same divergence at 4.75 bits, and a GEMM takes less time
#: (docs/performance/cpu.md), as does the search for their clips.
CPU_WEIGHTS = "int4_g32"

#: 16-bit types of what is not quantized; the first where none is named on the command line.
HALVES = ("bf16", "fp16")

IMPLS = ("auto", "reference", "cpu", "triton", "gluon")


def check_half(dtype: str) -> str:
    """`dtype`, if it is one of `HALVES`."""
    check(dtype in HALVES, f"dtype={dtype!r}; choose {' or '.join(HALVES)}")
    return dtype


def default_impl() -> str:
    """HALFBYTE_IMPL: the implementation that `impl="auto"` means, one of `IMPLS`; default `auto`, the best that runs."""
    return _choice("HALFBYTE_IMPL", IMPLS, "auto")


#: Whether ops of this thread run torch code on a GPU, too.
_TORCH_CODE: ContextVar[bool] = ContextVar("_TORCH_CODE", default=False)


@contextmanager
def torch_code() -> Iterator[None]:
    """In this block ops of this thread run no kernel, whose compilation would take longer than the call: "auto" is torch code."""
    before = _TORCH_CODE.set(True)
    try:
        yield
    finally:
        _TORCH_CODE.reset(before)


def runs_torch_code() -> bool:
    """Whether this thread is in a block of `torch_code`."""
    return _TORCH_CODE.get()


def pair_launches() -> bool:
    """HALFBYTE_PDL: 0 turns programmatic dependent launch off: a kernel then starts after its predecessor has ended; default 1."""
    return _choice("HALFBYTE_PDL", ("0", "1"), "1") == "1"


#: The dictionary behind os.environ. Every call looks for two or three variables, and os.environ raises and catches a KeyError for
#: each that is not there: 1.4 of the 17 us that a cached call on a GPU takes.
_environment: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_IMPL, _PDL = (name if _environment is os.environ else os.environ.encodekey(name) for name in ("HALFBYTE_IMPL", "HALFBYTE_PDL"))


def as_set() -> tuple[object, object]:
    """HALFBYTE_IMPL and HALFBYTE_PDL as they stand in the environment, unchecked: equal means that nothing has changed."""
    return _environment.get(_IMPL), _environment.get(_PDL)


@functools.cache
def _key(variable: str) -> Any:
    """A variable's name as the environment holds it."""
    return os.environ.encodekey(variable)


def _value(variable: str) -> str:
    """An environment variable; "" where there is none."""
    if _environment is os.environ:
        return os.environ.get(variable, "")
    raw = _environment.get(_key(variable))
    return "" if raw is None else str(os.environ.decodevalue(raw))


def stored_plans() -> str:
    """HALFBYTE_PLANS: a file to take measured plans from, and from no other; 0: from none; unset: those stored for this GPU.
    Read when a problem is planned for the first time.
    """
    value = os.environ.get("HALFBYTE_PLANS", "")
    if value not in ("", "0") and not os.path.isfile(value):
        raise InvalidArgument(
            f"environment variable HALFBYTE_PLANS={value!r}; give a file that `python -m halfbyte_lab tune` wrote, or 0 for none"
        )
    return value


def self_checks() -> bool:
    """HALFBYTE_CHECK: 0 lets tuned kernels run unchecked on a GPU that halfbyte was not tested on; default 1: the first use of each
    is compared with the reference on a small case, and the portable kernel runs instead of one that differs.
    """
    return _choice("HALFBYTE_CHECK", ("0", "1"), "1") == "1"


def interpreted() -> bool:
    """TRITON_INTERPRET, Triton's own flag: 1 runs Triton's kernels in its interpreter on a CPU; slow, for tests."""
    return _value("TRITON_INTERPRET") in ("1", "true", "on")


def _choice(variable: str, allowed: tuple[str, ...], default: str) -> str:
    value = _value(variable) or default
    if value not in allowed:
        raise InvalidArgument(f"environment variable {variable}={value!r}; choose one of: {', '.join(allowed)}, or unset it")
    return value
