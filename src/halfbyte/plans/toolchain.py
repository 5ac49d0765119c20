"""What the installed Triton cannot compile."""

from __future__ import annotations

from halfbyte.device import triton_version

#: Reinterprets shared memory as another type and shape only in equal parts of all of it. Other versions may leave a rest.
_EQUAL_PARTS = (3, 8)


def takes_any_part() -> bool:
    """Whether kernels may reinterpret shared memory as equal parts of another type and shape that leave a rest at its end."""
    return triton_version() != _EQUAL_PARTS
