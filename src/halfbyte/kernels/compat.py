"""The few Gluon names that differ between Triton 3.6 and 3.9, bridged here and nowhere else."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

#: cp.async of a tensor of pointers into shared memory.
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
#: All warps of the block meet here.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
#: Shared memory seen as another type and shape; `reinterpret` of a descriptor, `_reinterpret` up to Triton 3.8.
_DESCRIPTOR = gl.shared_memory_descriptor
reinterpret = getattr(_DESCRIPTOR, "reinterpret", None) or _DESCRIPTOR._reinterpret
