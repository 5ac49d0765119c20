"""The portable decode kernel (`portable.py`): one step of its online softmax, over tokens that are codes or rows of a 16-bit tail.

Keys and values of the tail enter products in TF32, which holds them exactly. They add up with codes:
    out = sum_t w_t UNIT v_t,   w_t = p_t / UNIT (and over the scale of a whole tensor),
and the largest |v| of a row takes the place of a token's scale in the running maximum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.common.codes import exponent, nearest
from halfbyte.kernels.decode.kv_args import MAX_EXPONENT, MIN_EXPONENT, KVArgs

LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))


@triton.jit
def products(q, sums, parts, factor, offset, x: KVArgs):
    """q . x / UNIT for rows q (parts [M, WORDS], their sums / UNIT [M]) and tokens: fp32 [M, N]."""
    q += q  # for the parts that rounding left over, if there are any
    s = tl.dot(q[0], tl.trans(parts[0]), input_precision=x.PRECISION)
    for j in tl.static_range(1, len(parts)):
        s = tl.dot(q[j], tl.trans(parts[j]), s, input_precision=x.PRECISION)
    if x.FACTOR:
        s *= factor[None, :]
    if x.OFFSET:
        s += sums[:, None] * offset[None, :]
    return s


@triton.jit
def operand(a, x: KVArgs):
    """fp32 numbers, rounded to nearest, for a product with parts of x. TF32 would cut their low bits off."""
    if x.PRECISION == "tf32":
        a = nearest(a, 13)
    return a.to(x.DOT)


@triton.jit
def _tanh(x):
    """tanh in fp32, good to 1e-6 of itself everywhere: a softcap may be much larger than the scores."""
    y = x * x
    small = x * (1 + y * (-1 / 3 + y * (2 / 15 - y * (17 / 315))))
    return tl.where(tl.abs(x) < 0.15, small, 1 - 2 / (1 + tl.exp2(x * (2 * LOG2E))))


@triton.jit
def scores(s, token, seen, position, low, high, slope, softcap, SINGLE: tl.constexpr):
    """Softcap, ALiBi and mask over scaled products s [M, N], in units of log 2 afterwards."""
    if softcap is not None:
        s = _tanh(s / softcap) * (softcap * LOG2E)
    if slope is not None:
        s += slope[:, None] * (token[None, :] - position[:, None]).to(tl.float32)
    visible = seen[None, :]
    if not SINGLE:
        visible = (token[None, :] >= low[:, None]) & (token[None, :] < high[:, None])
    return tl.where(visible, s, -INF)


@triton.jit
def accumulate(s, state, value, x: KVArgs):
    """One step of the online softmax over scores s [M, N] and the values of the same tokens, as `read` gives them."""
    peak, total, shift, acc = state
    parts, factor, offset = value
    ranked = s
    if x.FACTOR:
        ranked = s + tl.maximum(tl.minimum(exponent(factor), MAX_EXPONENT), MIN_EXPONENT).to(tl.float32)[None, :]
    rise = tl.maximum(peak, tl.max(ranked, 1))
    finite = tl.where(rise == -INF, 0.0, rise)  # -inf - -inf would be NaN
    keep = tl.exp2(peak - finite)
    p = tl.exp2(s - finite[:, None])
    total = total * keep + tl.sum(p, 1)
    w = p
    if x.FACTOR:
        w = p * factor[None, :]
    w = operand(w, x)
    if x.OFFSET:
        shift = shift * keep + tl.sum(p * offset[None, :], 1)
    new = ()
    for j in tl.static_range(x.PARTS):
        new += (tl.dot(w, parts[j], acc[j] * keep[:, None], input_precision=x.PRECISION),)
    return rise, total, shift, new


# --------------------------------------------------------------------------------------- rows of the tail


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
def accumulate_tail(s, state, row, seen, sequence, head, x: KVArgs):
    """`accumulate` over rows [N] of the tail of values: as tokens whose f is near their largest number, c being their numbers."""
    peak, total, shift, acc = state
    largest = tl.max(tl.abs(_tail_part(row, seen, sequence, head, 0, x)), 1)
    for j in tl.static_range(1, x.PARTS):
        largest = tl.maximum(largest, tl.max(tl.abs(_tail_part(row, seen, sequence, head, j, x)), 1))
    unit = x.UNIT
    if x.F.spread == "tensor":
        scale = tl.load(x.scales).to(tl.float32)
        unit = tl.where(scale == 0, 1.0, scale) * x.UNIT  # 0 as long as there were only zeros
    ranked = s + tl.maximum(tl.minimum(exponent(largest / unit * x.UNIT), MAX_EXPONENT), MIN_EXPONENT).to(tl.float32)[None, :]
    rise = tl.maximum(peak, tl.max(ranked, 1))
    finite = tl.where(rise == -INF, 0.0, rise)
    keep = tl.exp2(peak - finite)
    p = tl.exp2(s - finite[:, None])
    w = nearest(p / unit, 13)
    new = ()
    for j in tl.static_range(x.PARTS):
        v = _tail_part(row, seen, sequence, head, j, x)
        added = tl.dot(w, v, acc[j] * keep[:, None], input_precision="tf32")
        if x.F.spread == "tensor":  # a quotient has more digits than TF32: 2^-11 of the one token that a query sees would be lost
            added = tl.dot(nearest(p / unit - w, 13), v, added, input_precision="tf32")
        new += (added,)
    return rise, total * keep + tl.sum(p, 1), shift * keep, new
