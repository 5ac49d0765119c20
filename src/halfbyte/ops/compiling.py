"""Kernels compiled before they are needed, by calls of ops whose launches only compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_active = False


def active() -> bool:
    """Whether launches only compile: nothing may be kept of them."""
    return _active


@contextmanager
def compiling_only(threads: int) -> Iterator[None]:
    """In this block kernels are compiled, so many at once, and not run: results hold anything. It ends when all are compiled.

    Triton keeps them, in this process and on disk, so that a later launch of the same variant compiles nothing.
    """
    from halfbyte.kernels.common.compile_only import compile_only

    global _active
    with compile_only(threads):
        _active = True
        try:
            yield
        finally:
            _active = False
