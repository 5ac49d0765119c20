"""What the Triton that is installed cannot compile."""

from __future__ import annotations

from halfbyte.device import triton_version

#: Sees a part of shared memory only as one of equal parts. Those before do not look, and those after it take any part.
_EQUAL_PARTS = (3, 8)
#: Why plans say that there is no tuned kernel.
EQUAL_PARTS = "Triton 3.8 (torch 2.14) cannot compile this tuned kernel; the portable one is slower: take torch 2.13 or 2.15"


def takes_any_part() -> bool:
    """Whether kernels may use any part of their shared memory as another type and shape."""
    return triton_version() != _EQUAL_PARTS
