"""Kernels in Triton's interpreter, on a CPU. It has to be asked for before triton is imported, so these tests run by themselves."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from types import SimpleNamespace
from typing import Any

import numpy
import triton.language as tl
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang
#: A function that sees the language and, as Triton's own device functions do, its core.
_SEES_ALL = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})


def _patch_lang_once(fn: object) -> object:
    """Triton patches its language for a launch, and again for each call of a device function in it: 40 % of the time."""
    return _patch_lang(_SEES_ALL) if tl.core.is_builtin(tl.load) else interpreter._LangPatchScope()


interpreter._patch_lang = _patch_lang_once


class _Numpy:
    """NumPy, whose products are summed in fp64: in fp32 the bits of a row depend on its place, with some CPUs' BLAS."""

    def __getattr__(self, name: str) -> Any:
        return getattr(numpy, name)

    def matmul(self, a: Any, b: Any, dtype: Any) -> Any:
        return numpy.matmul(a, b, dtype=numpy.float64 if dtype == numpy.float32 else dtype).astype(dtype)


interpreter.np = _Numpy()
