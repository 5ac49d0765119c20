"""The portable decode kernel's rows of the 16-bit tail: keys of an unfinished block, sink tokens and recent tokens.

A row k or v enters products in TF32, which holds it exactly. Values add up with codes: with those of a token whose scale is one,
    out = sum_t w_t v_t UNIT / sum_t p_t,   w_t = p_t / UNIT,
and the largest |v| of the row takes the place of its scale in the running maximum (`portable.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.common.codes import exponent, nearest
from halfbyte.kernels.decode.kv_args import MAX_EXPONENT, MIN_EXPONENT, KVArgs


@triton.jit
def _tail_part(row, seen, sequence, head, PART: tl.constexpr, x: KVArgs):
    """Part PART of rows [N] of the tail in fp32, [N, WORDS]; 0 where `seen` is false."""
    d = tl.arange(0, x.WORDS).to(tl.int64) * x.PARTS + PART
    at = x.tail + sequence * x.tail0 + head * x.tail1 + row.to(tl.int64)[:, None] * x.tail2 + d[None, :] * x.tail3
    return tl.load(at, mask=seen[:, None] & (d < x.DIM)[None, :], other=0).to(tl.float32)


@triton.jit
def tail_products(q, row, seen, sequence, head, M: tl.constexpr, N: tl.constexpr, x: KVArgs):
    """q . k for rows q and rows [N] of the tail of keys, fp32 [M, N]."""
    s = tl.zeros([M, N], tl.float32)
    for j in tl.static_range(x.PARTS):
        k = _tail_part(row, seen, sequence, head, j, x)
        s = tl.dot(q[j].to(tl.float32), tl.trans(k), s, input_precision="tf32")
    return s


@triton.jit
def accumulate_tail(s, peak, total, shift, acc, row, seen, sequence, head, x: KVArgs):
    """`_accumulate` over rows [N] of the tail of values: as tokens whose f is near their largest number, c being their numbers."""
    largest = tl.max(tl.abs(_tail_part(row, seen, sequence, head, 0, x)), 1)
    for j in tl.static_range(1, x.PARTS):
        largest = tl.maximum(largest, tl.max(tl.abs(_tail_part(row, seen, sequence, head, j, x)), 1))
    unit = x.UNIT
    if x.F.spread == "tensor":
        scale = tl.load(x.scales).to(tl.float32)
        unit = tl.where(scale == 0, 1.0, scale) * x.UNIT  # 0 as long as there were only zeros
    ranked = s + tl.maximum(tl.minimum(exponent(largest / unit * x.UNIT), MAX_EXPONENT), MIN_EXPONENT).to(tl.float32)[None, :]
    rise = tl.maximum(peak, tl.max(ranked, 1))
    finite = tl.where(rise == -float("inf"), 0.0, rise)
    keep = tl.exp2(peak - finite)
    p = tl.exp2(s - finite[:, None])
    w = nearest(p / unit, 13)
    new = ()
    for j in tl.static_range(x.PARTS):
        v = _tail_part(row, seen, sequence, head, j, x)
        new += (tl.dot(w, v, acc[j] * keep[:, None], input_precision="tf32"),)
    return rise, total * keep + tl.sum(p, 1), shift * keep, new
