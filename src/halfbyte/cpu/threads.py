"""Compiled loops on several threads: few, large pieces of work, each of which outweighs the cost of waking a thread."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import platform
import sys
from collections.abc import Callable

import torch

from halfbyte.errors import warn_once
from halfbyte.threads import pool

#: Steps of a loop (one multiplication each) that are worth another thread: some 50 microseconds, what waking one takes.
STEPS = 1 << 19
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
    if count == 1:
        loop(*args, 0, rows)
        return
    edges = [rows * i // count for i in range(count + 1)]
    own, *others = itertools.pairwise(edges)
    futures = [pool().submit(loop, *args, *part) for part in others]
    loop(*args, *own)
    for future in futures:
        future.result()
