"""Loops that numba compiles on the user's machine, for its CPU. Import them only where `cpu.threads.compiler_works` says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def loop(function: Callable[..., None]) -> Any:
    """A loop that runs without the GIL; compiled once, and kept on disk if there is a folder that can be written to."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no such folder
        return njit(**options)(function)
