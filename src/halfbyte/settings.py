"""Environment flags, at most five. Each is read when it is needed, typed, and a bad value raises and lists what is allowed."""

from __future__ import annotations

import os

from halfbyte.errors import InvalidArgument

IMPLS = ("auto", "reference", "cpu")


def default_impl() -> str:
    """HALFBYTE_IMPL: the implementation that `impl="auto"` means, one of `IMPLS`; unset or empty is "auto", the best that runs."""
    return _choice("HALFBYTE_IMPL", IMPLS, "auto")


def _choice(variable: str, allowed: tuple[str, ...], default: str) -> str:
    value = os.environ.get(variable, "") or default
    if value not in allowed:
        raise InvalidArgument(f"environment variable {variable}={value!r}; choose one of: {', '.join(allowed)}, or unset it")
    return value
