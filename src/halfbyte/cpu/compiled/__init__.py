"""Loops that numba compiles on the user's machine, for its CPU. Import them only where `cpu.threads.compiler_works` says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

#: What loops are compiled from: any of these files, since they call each other's.
_SOURCES = tuple(sorted((file.stat().st_mtime_ns, file.stat().st_size) for file in Path(__file__).parent.glob("*.py")))


def loop(function: Callable[..., None]) -> Any:
    """A loop that runs without the GIL; compiled once, and kept on disk if there is a folder that can be written to.

    numba compiles anew what it kept if the function's own file has changed; here if any of `_SOURCES` has.
    """
    options = {"nogil": True, "error_model": "numpy"}
    try:
        compiled = njit(cache=True, **options)(function)
        compiled._cache._cache_file._source_stamp = _SOURCES
    except (RuntimeError, AttributeError):  # no such folder, or a numba whose cache is another
        return njit(**options)(function)
    return compiled
