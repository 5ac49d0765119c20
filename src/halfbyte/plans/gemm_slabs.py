"""GEMMs with so many rows that weights are dequantized first, some rows at a time, for a 16-bit GEMM: when, and in which parts."""

from __future__ import annotations

from collections.abc import Sequence

from halfbyte.device import Capability
from halfbyte.plans.gemm_problem import GemmProblem

#: From this M on, it is faster to dequantize slabs of a weight for cuBLAS: in general, and with group_size 16, which costs the
#: portable kernel most. And bytes of a slab: smaller ones, although L2 holds them, were up to 50 % slower, because cuBLAS fills
#: the GPU with fewer tiles.
_EXPANDED_ROWS, _EXPANDED_ROWS_16, _SLAB_BYTES = 257, 128, 128 << 20
#: With routing: pairs of a token and an expert, for each expert, from which on a dequantized GEMM is faster than the portable
#: kernel: on an H200 from 32 in some projections, from 128 in all but one. And bytes of a slab, and rows of each expert at least.
_PAIRS, SCRATCH_BYTES, _FEWEST_ROWS = 96, 512 << 20, 128
#: Generations of GPUs whose grouped GEMM (`torch.nn.functional.grouped_mm`, bf16) reads its groups on the device.
_GROUPED = (9, 10)


def dequantized_rows(p: GemmProblem, capability: Capability) -> int:
    """Rows of a weight, or of each expert, to dequantize at a time; 0: the codes are multiplied as they are.

    Dequantized weights are written and read once, which pays from some M, or tokens an expert, on. All experts count: the ids are
    on the device.
    """
    if p.routing is None:
        return slab_rows(p.width) if expanded(p) else 0
    experts, features = p.routing.experts, p.features[0]
    if p.half != "bf16" or capability[0] not in _GROUPED or p.width % 8 or p.pairs < _PAIRS * experts:
        return 0
    rows = SCRATCH_BYTES // (2 * experts * p.width) // _FEWEST_ROWS * _FEWEST_ROWS
    return min(features, max(_FEWEST_ROWS, rows))


def expanded(p: GemmProblem) -> bool:
    """Whether M is so large that dequantizing slabs of the weights first is faster."""
    fine = any(fmt.group_size(p.width) < 32 for fmt, _ in p.weights)
    return p.rows >= (_EXPANDED_ROWS_16 if fine else _EXPANDED_ROWS)


def slab_rows(width: int) -> int:
    """Rows of a weight that are dequantized at a time: about `_SLAB_BYTES`, and a multiple of 256 for cuBLAS."""
    return max(256, _SLAB_BYTES // (2 * width) // 256 * 256)


def slab_shares(features: Sequence[int], first: int, count: int) -> list[tuple[int, int]]:
    """(first row, rows) that each weight adds to rows first ... first + count of all of them, one below the other."""
    shares, above = [], 0
    for n in features:
        start = min(max(first - above, 0), n)
        shares.append((start, min(max(first + count - above, 0), n) - start))
        above += n
    return shares


def describe_slabs(p: GemmProblem) -> dict[str, str]:
    """A GEMM by dequantized slabs of the weights in words, as `halfbyte explain` prints it."""
    step, total = slab_rows(p.width), sum(p.features)
    slabs = range(0, total, step)
    products = sum(rows > 0 for first in slabs for _, rows in slab_shares(p.features, first, step))
    launches, buffer = len(slabs) + products, 2 * min(step, total) * p.width
    return {
        "kernel": "cuBLAS, over parts of the weights that another kernel dequantizes",
        "parts": f"{len(slabs)} of at most {step} output channels, {launches} launches; {buffer / 1e6:.1f} MB of buffer",
        "schedule": f"M = {p.rows}: compute-bound, so dequantizing first is faster",
        "otherwise": "row_invariant and torch.use_deterministic_algorithms take the portable kernel",
    }
