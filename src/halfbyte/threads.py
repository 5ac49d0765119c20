"""Threads besides the caller's, which sleep in between; torch's own spin while they wait for each other.

Spinning is fast on idle cores. Next to another busy program, a thread that has work waits for one that spins: small operators, of
which a search has thousands, then take a hundred times as long.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")
U = TypeVar("U")


class _Thread(threading.local):
    """What a thread may use: `threads` are for `each`, inside of `alone`; None elsewhere."""

    threads: int | None = None


_THREAD = _Thread()


@contextmanager
def alone(threads: int | None = None) -> Iterator[None]:
    """In this block the calling thread runs torch's operators by itself, and `each` has the other threads, or so many.

    `torch.set_num_threads` would also set MKL, and what other threads begin with.
    """
    before = torch.get_num_threads()  # a thread's first call reads the default, and must not do so in the block
    set_threads = None if before == 1 or torch.compiler.is_compiling() else _set_threads()
    if set_threads is None:
        yield
        return
    outside, _THREAD.threads = _THREAD.threads, before if threads is None else threads
    set_threads(1)
    try:
        yield
    finally:
        set_threads(before)
        _THREAD.threads = outside


def each(function: Callable[[T], U], pieces: Sequence[T]) -> list[U]:
    """What `function`, which calls torch, gives for each piece, in order: on as many threads as torch may use, each `alone`."""
    results: dict[int, U] = {}
    left = iter(range(len(pieces)))

    def work() -> None:
        with alone(threads=1):
            for i in left:
                results[i] = function(pieces[i])

    count = 1 if torch.compiler.is_compiling() or _set_threads() is None else _THREAD.threads or torch.get_num_threads()
    futures = [pool().submit(work) for _ in range(min(count, len(pieces)) - 1)]
    work()
    for future in futures:
        future.result()
    return [results[i] for i in range(len(pieces))]


@functools.cache
def _set_threads() -> Callable[[int], None] | None:
    """OpenMP's `omp_set_num_threads` of torch's own library, which is about the calling thread; None where it is not found."""
    before = torch.get_num_threads()
    try:
        set_threads: Any = ctypes.CDLL(torch._C.__file__).omp_set_num_threads
    except (OSError, AttributeError):  # such as a torch with threads of another kind
        return None
    set_threads.argtypes, set_threads.restype = [ctypes.c_int], None
    set_threads(before + 1)
    works = torch.get_num_threads() == before + 1
    set_threads(before)
    return set_threads if works else None


@functools.cache
def pool() -> ThreadPoolExecutor:
    """Threads besides the caller's."""
    return ThreadPoolExecutor(os.cpu_count(), "halfbyte")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.cache_clear)  # a forked process has none of the threads
