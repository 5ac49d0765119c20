"""What is not the same, or not public, in all of Triton 3.6 to 3.9, bridged here and nowhere else."""

# ruff: noqa: RUF005
# Triton compiles a part of Python: lists are joined with `+`.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

#: cp.async of a tensor of pointers into shared memory.
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
#: TMA of a box of a described tensor into shared memory.
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
#: All warps of the block meet here.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_DESCRIPTOR = gl.shared_memory_descriptor
_reinterpret = getattr(_DESCRIPTOR, "reinterpret", None) or _DESCRIPTOR._reinterpret


@gluon.jit
def view(memory, part, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Part number `part` of an allocation of shared memory, seen as parts of this type and shape.

    Triton 3.8 wants them to fill the allocation; the others leave out what is left at its end.
    """
    parts: gl.constexpr = [_bytes(memory.dtype, memory.shape) // _bytes(dtype, shape)] + shape
    return _reinterpret(memory, dtype, parts, layout).index(part)


@gluon.constexpr_function
def _bytes(dtype, shape):
    return math.prod(shape) * dtype.primitive_bitwidth // 8


def launcher(compiled: Any, grid: tuple[int, int, int]) -> Callable[..., None]:
    """What launches a compiled kernel again, given the stream's number and all arguments; addresses may be integers.

    It does what `compiled[grid]` does without asking for hooks, which take as long as the launch. Where a profiler has set
    one, it is called.
    """
    hooked, run = compiled[grid], compiled.run
    fixed = (compiled.function, compiled.packed_metadata, None, None, None)

    def launch(stream: int, *arguments: Any) -> None:
        if _set(knobs.runtime.launch_enter_hook) or _set(knobs.runtime.launch_exit_hook):
            hooked(*arguments, stream=stream)
        else:
            run(*grid, stream, *fixed, *arguments)

    return launch


def _set(hook: Any) -> bool:
    """Whether a hook does anything: Triton's own chain may be empty, and somebody may have put a function in its place."""
    return bool(getattr(hook, "calls", hook))
