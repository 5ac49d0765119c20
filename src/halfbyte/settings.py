"""Environment flags, at most five. Each is read when it is needed, typed, and a bad value raises and lists what is allowed."""

from __future__ import annotations

import os

from halfbyte.errors import InvalidArgument

IMPLS = ("auto", "reference", "cpu", "triton", "gluon")


def default_impl() -> str:
    """HALFBYTE_IMPL: the implementation that `impl="auto"` means, one of `IMPLS`; unset or empty is "auto", the best that runs."""
    return _choice("HALFBYTE_IMPL", IMPLS, "auto")


def pair_launches() -> bool:
    """HALFBYTE_PDL: whether a kernel may start while its predecessor ends (programmatic dependent launch), where the GPU can."""
    return _choice("HALFBYTE_PDL", ("0", "1"), "1") == "1"


def interpreted() -> bool:
    """TRITON_INTERPRET, Triton's own flag: its kernels run on a CPU, slowly and for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on")


def _choice(variable: str, allowed: tuple[str, ...], default: str) -> str:
    value = os.environ.get(variable, "") or default
    if value not in allowed:
        raise InvalidArgument(f"environment variable {variable}={value!r}; choose one of: {', '.join(allowed)}, or unset it")
    return value
