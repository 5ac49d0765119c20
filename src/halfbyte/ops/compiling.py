"""Kernels compiled before they are needed, by calls of ops whose launches only compile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfbyte.kernels.compiling.parallel import Ahead

_ACTIVE: ContextVar[bool] = ContextVar("_ACTIVE", default=False)


def active() -> bool:
    """Whether launches of this thread only compile: nothing may be kept of them."""
    return _ACTIVE.get()


def cache_folder() -> str:
    """Where Triton keeps compiled kernels."""
    from halfbyte.kernels.compiling.parallel import folder

    return str(folder())


def cores() -> int:
    """Processes that compile at once; 1: launches compile."""
    from halfbyte.kernels.compiling import parallel

    return parallel.cores()


def stamp_of(*facts: object) -> Path:
    """The file of `compiling_only` for what these facts, the GPU, this library and its settings stand for."""
    from halfbyte.kernels.compiling import parallel

    return parallel.stamp_of(*facts)


@contextmanager
def compiling_only(wait: bool = True, stamp: Path | None = None) -> Iterator[Ahead]:
    """In this block kernels are compiled, many at once, and not run: results hold anything. It ends when all are compiled.

    Triton keeps them on disk, so that a later launch of the same variant compiles nothing. wait=False: other processes go on
    compiling behind the end, and the next such block waits for them. stamp: a file that is made when all are compiled.
    """
    from halfbyte.kernels.compiling.parallel import compile_only

    with compile_only(wait, stamp) as ahead:
        before = _ACTIVE.set(True)
        try:
            yield ahead
        finally:
            _ACTIVE.reset(before)


def counts(most: int, few: int) -> Iterator[int]:
    """Numbers for which kernels are compiled, of sequences for instance: all few, and powers of two."""
    yield from range(1, min(most, few) + 1)
    yield from (1 << n for n in range(few.bit_length(), most.bit_length()))
    if most > few:
        yield most
