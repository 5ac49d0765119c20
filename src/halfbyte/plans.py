"""Which level of an op runs, and why: pure functions of the request and the device, testable without a GPU.

`reference` is the specification, `cpu` the blocked torch code that runs on any device. `impl="auto"` picks; an explicit request
never falls back.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.errors import InvalidArgument

#: The levels that exist, op by op, the preferred one first.
LEVELS: dict[str, tuple[str, ...]] = {
    "decode_attention": ("cpu", "reference"),
    "append": ("reference",),
    "linear": ("cpu", "reference"),
    "qkv_projection": ("cpu", "reference"),
}


@dataclass(frozen=True)
class Plan:
    """The level that will run an op, and the reason in words."""

    op: str
    level: str
    why: str


def plan(op: str, impl: str, device_type: str) -> Plan:
    """The plan for `op` on a device of this type ("cpu", "cuda"). Raises on a level that does not exist."""
    levels = LEVELS[op]
    if impl != "auto":
        if impl not in levels:
            raise InvalidArgument(f"impl={impl!r} does not exist for {op}; choose auto or one of: {', '.join(levels)}")
        return Plan(op, impl, "asked for")
    if device_type == "cpu":
        return Plan(op, levels[0], "the fastest level without a GPU")
    return Plan(op, levels[0], f"no {device_type} kernel of {op} exists yet: blocked torch code runs on the {device_type} device")
