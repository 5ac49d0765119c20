"""What the Triton that is installed cannot compile."""

from __future__ import annotations

from halfbyte.device import triton_version

#: Sees shared memory as another type and shape only whole, which may be many equal parts. For others an end may be left out.
_EQUAL_PARTS = (3, 8)


def takes_any_part() -> bool:
    """Whether kernels may see shared memory as equal parts of another type and shape, whatever is left at its end."""
    return triton_version() != _EQUAL_PARTS
