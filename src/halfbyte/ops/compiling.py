"""Kernels compiled before they are needed, by calls of ops whose launches only compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_active = False


def active() -> bool:
    """Whether launches only compile: nothing may be kept of them."""
    return _active


def cache_folder() -> str:
    """Where Triton keeps compiled kernels."""
    from halfbyte.kernels.compiling.parallel import folder

    return str(folder())


@contextmanager
def compiling_only(wait: bool = True) -> Iterator[None]:
    """In this block kernels are compiled, many at once, and not run: results hold anything. It ends when all are compiled.

    Triton keeps them on disk, so that a later launch of the same variant compiles nothing. wait=False: other processes go on
    compiling behind the end, and the next such block waits for them.
    """
    from halfbyte.kernels.compiling.parallel import compile_only

    global _active
    with compile_only(wait):
        _active = True
        try:
            yield
        finally:
            _active = False
