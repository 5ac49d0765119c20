"""What is not the same, or not public, in all of Triton 3.6 to 3.9, bridged here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton import knobs
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

#: cp.async of a tensor of pointers into shared memory.
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
#: All warps of the block meet here.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
#: Shared memory seen as another type and shape; `reinterpret` of a descriptor, `_reinterpret` up to Triton 3.8.
_DESCRIPTOR = gl.shared_memory_descriptor
reinterpret = getattr(_DESCRIPTOR, "reinterpret", None) or _DESCRIPTOR._reinterpret


def launcher(compiled: Any, grid: tuple[int, int, int]) -> Callable[..., None]:
    """What launches a compiled kernel again, given the stream's number and all arguments; addresses may be integers.

    It does what `compiled[grid]` does without asking for hooks, which take as long as the launch. Where a profiler has set
    one, it is called.
    """
    hooked, run = compiled[grid], compiled.run
    function, metadata = compiled.function, compiled.packed_metadata

    def launch(stream: int, *arguments: Any) -> None:
        if _set(knobs.runtime.launch_enter_hook) or _set(knobs.runtime.launch_exit_hook):
            hooked(*arguments, stream=stream)
        else:
            run(*grid, stream, function, metadata, None, None, None, *arguments)

    return launch


def _set(hook: Any) -> bool:
    """Whether a hook does anything: Triton's own chain may be empty, and somebody may have put a function in its place."""
    return bool(getattr(hook, "calls", hook))
