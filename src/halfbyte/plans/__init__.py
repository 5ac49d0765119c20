"""Which level of an op runs, and why: pure functions of the request and the device, testable without a GPU.

`reference` is the specification, `cpu` the blocked torch code that runs on any device, `triton` the portable GPU kernel, `gluon`
the tuned one. `impl="auto"` picks; an explicit request never falls back.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from halfbyte.errors import InvalidArgument, Unsupported

#: The levels of each op, the preferred one first: those of a GPU, then those of every device.
LEVELS: dict[str, tuple[str, ...]] = {
    "decode_attention": ("gluon", "triton", "cpu", "reference"),
    "merge_states": ("triton", "reference"),
    "append": ("triton", "cpu", "reference"),
    "unpack_pages": ("triton", "reference"),
    "transform_heads": ("triton", "reference"),
    "linear": ("gluon", "triton", "cpu", "reference"),
    "qkv_projection": ("gluon", "triton", "cpu", "reference"),
    "experts_linear": ("gluon", "triton", "cpu", "reference"),
    "add_norm": ("triton", "reference"),
    "norm_rows": ("triton", "reference"),
    "gated": ("triton", "reference"),
    "greedy": ("triton", "reference"),
    "route": ("triton", "reference"),
    "gated_delta": ("triton", "reference"),
}
#: Levels that need a GPU (the portable ones also run in Triton's interpreter).
GPU_LEVELS = ("gluon", "triton")


@dataclass(frozen=True)
class Plan:
    """The level that will run an op, and the reason in words."""

    op: str
    level: str
    why: str


@functools.cache
def plan(op: str, impl: str, device_type: str, interpreted: bool = False) -> Plan:
    """The plan for `op` on a device of this type ("cpu", "cuda"). Raises on a level that does not exist, or cannot run there.

    `interpreted`: Triton's interpreter executes kernels, so that `triton` can be requested on the CPU.
    """
    levels = LEVELS[op]
    if impl != "auto":
        if impl not in levels:
            raise InvalidArgument(f"impl={impl!r} does not exist for {op}; choose auto or one of: {', '.join(levels)}")
        if impl in GPU_LEVELS and device_type != "cuda" and not (impl == "triton" and interpreted):
            raise Unsupported(
                f"impl={impl!r} of {op} runs on an NVIDIA GPU and the tensors are on {device_type}; use impl='auto', or move them"
            )
        return Plan(op, impl, "requested")
    portable = tuple(name for name in levels if name not in GPU_LEVELS)
    if device_type == "cpu":
        return Plan(op, portable[0], "the fastest level without a GPU")
    if levels != portable:
        return Plan(op, levels[0], f"the fastest kernel on {device_type}")
    return Plan(op, levels[0], f"no {device_type} kernel of {op} exists yet: blocked torch code runs on the {device_type} device")
