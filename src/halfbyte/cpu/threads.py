"""Compiled loops on several threads.

`over_rows` takes few, large pieces of work, each of which outweighs the cost of waking a thread. A step of a model has hundreds of
small ones behind one another: they are `Bound`, and run on torch's own threads, which spin from one to the next.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import itertools
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from halfbyte.errors import warn_once
from halfbyte.threads import pool

#: Steps of a loop (one multiplication each) that are worth another thread: some 50 microseconds, what waking one takes.
STEPS = 1 << 19
#: Steps that pay for a barrier of two threads that spin, some 5 microseconds; each doubling of the threads takes as many more.
SPUN_STEPS = 1 << 16
#: A region that takes more seconds a step than this has waited for cores that others use; so many regions are then left out.
LATE, LEFT_OUT = 4e-9, 500
#: CPUs that loops are compiled for, as operating systems call them.
MACHINES = ("x86_64", "AMD64", "aarch64", "arm64")


@functools.cache
def compiler_works() -> bool:
    """Whether loops can be compiled: numba is there (`pip install halfbyte[cpu]`), and on x86 the CPU has AVX2.

    Not in a process that runs vLLM: once numba is imported there, vLLM 0.32 cannot start another engine, because its scan of
    modules for Triton kernels fails on a wrapper of llvmlite.
    """
    if platform.machine() not in MACHINES or importlib.util.find_spec("numba") is None:
        return False
    if "vllm" in sys.modules and "numba" not in sys.modules:
        return False
    try:
        importlib.import_module("numba")
    except ImportError as error:  # such as a NumPy that is newer than numba knows
        warn_once(f"numba is installed and cannot be imported ({error}), so this CPU runs plain torch code, which is slower")
        return False
    return torch.backends.cpu.get_cpu_capability() != "DEFAULT" or platform.machine() not in ("x86_64", "AMD64")


def over_rows(loop: Callable[..., None], rows: int, steps: int, *args: object) -> None:
    """Call loop(*args, first, last) for parts of `rows` rows, on as many threads as torch may use and `steps` are worth."""
    count = max(1, min(torch.get_num_threads(), rows, steps // STEPS))
    edges = [rows * i // count for i in range(count + 1)]
    _on_threads(loop, [(*args, *part) for part in itertools.pairwise(edges)])


def _on_threads(loop: Callable[..., None], parts: Sequence[Sequence[object]]) -> None:
    """Call a loop with each of these arguments, the first here, the others on threads that are woken for it."""
    own, *others = parts
    futures = [pool().submit(loop, *part) for part in others]
    loop(*own)
    for future in futures:
        future.result()


class Bound:
    """Loops, each with its arguments and a count of rows, to be run one after the other; arrays stay where they are."""

    def __init__(self, loops: Sequence[tuple[Any, Sequence[Any], int]]) -> None:
        from halfbyte.cpu.compiled import bound

        bindings = [(*bound.bind(loop, arguments), rows) for loop, arguments, rows in loops]
        entries = np.array([(address, words.ctypes.data, rows) for address, words, rows in bindings], np.int64)
        self.parallel, *questions = _openmp()
        self.words = np.array([entries.ctypes.data, len(loops), *questions], np.int64)
        self.held, self.loops, self.place = (loops, bindings, entries), bound, (entries.ctypes.data, len(loops))

    def __call__(self, steps: int) -> None:
        """Run them: on torch's threads if `steps` are worth it, or, if these have just waited for cores, as `over_rows` does."""
        threads = torch.get_num_threads()
        if threads == 1 or steps < threads.bit_length() * SPUN_STEPS:
            self.loops.share(*self.place, 0, 1)
        elif not _regions_pay():
            count = max(1, min(threads, steps // STEPS))
            _on_threads(self.loops.share, [(*self.place, part, count) for part in range(count)])
        else:
            began = time.perf_counter()
            self.loops.region(self.parallel, self.loops.BODY, self.words.ctypes.data)
            if time.perf_counter() - began > steps * LATE:
                _Regions.left_out = LEFT_OUT


class _Regions:
    """Regions of torch's threads: how many are still left out, because one of them waited for cores."""

    left_out = 0
    is_forked = False


def _regions_pay() -> bool:
    if _Regions.left_out > 0:
        _Regions.left_out -= 1
        return False
    return not _Regions.is_forked and _openmp()[0] != 0


@functools.cache
def _openmp() -> tuple[int, int, int]:
    """The addresses of `GOMP_parallel`, `omp_get_thread_num` and `omp_get_num_threads`; zeros where torch's OpenMP is not GNU's."""
    try:
        library = ctypes.CDLL(torch._C.__file__)
        names = library.GOMP_parallel, library.omp_get_thread_num, library.omp_get_num_threads
    except (OSError, AttributeError):
        return 0, 0, 0
    parallel, number, count = (ctypes.cast(name, ctypes.c_void_p).value or 0 for name in names)
    return parallel, number, count


def _in_child() -> None:
    _Regions.is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)  # which has none of the threads, and would wait for them
