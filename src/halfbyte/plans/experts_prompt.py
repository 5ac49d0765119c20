"""When `experts_linear` dequantizes experts for a 16-bit grouped GEMM: a pure function of the problem and the device."""

from __future__ import annotations

from halfbyte.device import Capability
from halfbyte.plans.linear_spec import ExpertsProblem

#: Pairs of a token and an expert, for each expert, from which on this is faster than the portable kernel. Measured: at 32 and 64 in
#: some projections, at 128 in all but one (docs/internals/log/linear.md).
_PAIRS = 96
#: Bytes of dequantized weights at a time, and rows of each expert at least.
SCRATCH_BYTES, _FEWEST_ROWS = 512 << 20, 128
#: Generations of GPUs whose grouped GEMM (`torch.nn.functional.grouped_mm`, bf16) reads its groups on the device.
_GROUPED = (9, 10)


def dequantized_rows(p: ExpertsProblem, capability: Capability) -> int:
    """Rows of each expert to dequantize at a time; 0: the codes are multiplied as they are.

    Dequantized weights are written and read once, which pays from some tokens an expert on. All experts count: the ids are on the
    device.
    """
    experts, features, width = p.stack
    if p.half != "bf16" or capability[0] not in _GROUPED or width % 8 or p.pairs < _PAIRS * experts:
        return 0
    rows = SCRATCH_BYTES // (2 * experts * width) // _FEWEST_ROWS * _FEWEST_ROWS
    return min(features, max(_FEWEST_ROWS, rows))
