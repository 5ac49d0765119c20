"""When `experts_linear` dequantizes experts for a 16-bit grouped GEMM: a pure function of the problem and the device."""

from __future__ import annotations

from halfbyte.formats import Format
from halfbyte.plans.linear_portable import expanded

#: Bytes of dequantized weights at a time, and rows of each expert at least.
SCRATCH_BYTES, _FEWEST_ROWS = 512 << 20, 128
#: Generations of GPUs whose grouped GEMM (`torch.nn.functional.grouped_mm`, bf16) reads its groups on the device.
_GROUPED = (9, 10)


def dequantized_rows(
    fmt: Format, experts: int, features: int, width: int, *, tokens: int, top_k: int, dtype: str, capability: tuple[int, int]
) -> int:
    """Rows of each expert of a stack [experts, features, width] to dequantize at a time; 0: the codes are multiplied as they are.

    Dequantized weights are written and read once, so an expert needs about as many tokens as `linear` does. All experts count:
    the ids are on the device.
    """
    if dtype != "bf16" or capability[0] not in _GROUPED or width % 8 or not expanded([fmt], tokens * top_k // experts, width):
        return 0
    rows = SCRATCH_BYTES // (2 * experts * width) // _FEWEST_ROWS * _FEWEST_ROWS
    return min(features, max(_FEWEST_ROWS, rows))
