"""What is not the same, or not public, in all of Triton 3.6 to 3.9, bridged here and nowhere else."""

# ruff: noqa: RET505, RUF005
# Triton compiles a part of Python: an `else` after a return is how a branch is left out of what it compiles.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from halfbyte.device import triton_version

#: cp.async of a tensor of pointers into shared memory.
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
#: All warps of the block meet here.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_DESCRIPTOR = gl.shared_memory_descriptor
_reinterpret = getattr(_DESCRIPTOR, "reinterpret", None) or _DESCRIPTOR._reinterpret
#: How a part of shared memory is had. Triton 3.8 knows parts of equal size alone, those before do not look at sizes.
_PARTS = gl.constexpr({(3, 6): "any", (3, 7): "any", (3, 8): "equal"}.get(triton_version(), "slices"))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def view(memory, at: gl.constexpr, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Shared memory, from `at` bytes on, as another type and shape; `at` and the view are whole multiples of 16 bytes."""
    size: gl.constexpr = _bytes(dtype, shape)
    whole: gl.constexpr = _bytes(memory.dtype, memory.shape)
    if whole == size:
        return _reinterpret(memory, dtype, shape, layout)
    elif _PARTS == "equal":
        gl.static_assert(whole % size == 0 and at % size == 0, "Triton 3.8 has no such view")
        parts: gl.constexpr = [whole // size] + shape
        return _reinterpret(memory, dtype, parts, layout).index(at // size)
    else:
        flat = _reinterpret(memory, gl.int32, [whole // 16, 4], _PLAIN)
        part = flat.slice(at // 16, size // 16) if _PARTS == "slices" else flat.index(at // 16)
        return _reinterpret(part, dtype, shape, layout)


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
