"""Loops that numba compiles on the user's machine, for its CPU. Import them only where `cpu.threads.compiler_works` says so."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import cfunc, njit

#: Of all files of this package, into which loops are inlined.
_DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()[:12]


def loop(function: Callable[..., Any], signature: Any = None) -> Any:
    """A loop that runs without the GIL; compiled once, and kept on disk if there is a folder that can be written to.

    With a signature arguments are converted to its types: arrays with any strides need no code of their own.
    """
    return _kept(njit, function, signature, nogil=True, error_model="numpy")


def callback(function: Callable[..., Any], signature: Any) -> Any:
    """A function that code in C calls by its `address`, kept as a loop is."""
    return _kept(cfunc, function, signature)


def _kept(compiler: Callable[..., Any], function: Callable[..., Any], signature: Any, **options: Any) -> Any:
    # numba reads a stored loop again if the file of the loop is as it was, and looks at no file that the loop calls.
    function.__qualname__ = f"{function.__name__}_{_DIGEST}"
    try:
        return compiler(signature, cache=True, **options)(function)
    except RuntimeError:  # no such folder
        return compiler(signature, **options)(function)
