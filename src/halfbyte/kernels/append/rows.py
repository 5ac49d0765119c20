"""Rows of an append: new tokens read from k or v (rotary embedding, Hadamard rotation), and written into a KV buffer."""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.common.codes import INTERPRETED
from halfbyte.kernels.common.encode import (
    INF,
    MIN,
    as_dtype,
    beyond,
    encode,
    f16_scale,
    float_of,
    measure,
    nearest,
    quotient,
)

_INTERPRETED = tl.constexpr(INTERPRETED)

# ------------------------------------------------------------------------------------------------------- reading new tokens


@triton.jit
def new_tokens(sequences, lengths_stride, b, tokens, capacity):
    """Of sequence b: its length, its new tokens, and how many of them there is room for."""
    length = tl.load(sequences.lengths + b * lengths_stride)
    new = tokens
    if sequences.counts is not None:
        new = tl.minimum(tl.maximum(tl.load(sequences.counts + b), 0), tokens)
    room = tl.where(length < 0, 0, tl.maximum(capacity - length.to(tl.int64), 0))
    return length, new, tl.minimum(room, new).to(tl.int32)


@triton.jit
def _within_thread(x, STEP: tl.constexpr):
    """Sums and differences of elements at a distance of STEP in the last axis of x [R, N, E], by registers."""
    pairs = tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // (2 * STEP), 2, STEP])
    a, b = tl.split(tl.permute(pairs, (0, 1, 2, 4, 3)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 2, 4, 3)), x.shape)


@triton.jit
def _across_lanes(x, STEP: tl.constexpr):
    """The same in axis 1. Gathered, so that every element stays with its thread: a warp that has whole rows shuffles."""
    n = tl.arange(0, x.shape[1])[None, :, None]
    other = tl.gather(x, tl.broadcast_to(n ^ STEP, x.shape), 1)
    return other + tl.where(n & STEP == 0, x, -x)


@triton.jit
def rotate(x, LOG: tl.constexpr, FACTOR: tl.constexpr):
    """Hadamard blocks of 2^LOG along the last axis of x [R, D], in the order of `reference.hadamard.rotate`."""
    LANES: tl.constexpr = 32 if x.shape[1] > 32 else x.shape[1]
    EACH: tl.constexpr = x.shape[1] // LANES
    y = tl.reshape(x, [x.shape[0], LANES, EACH])
    for i in tl.static_range(LOG):
        y = _within_thread(y, 1 << i) if 1 << i < EACH else _across_lanes(y, (1 << i) // EACH)
    return tl.reshape(y, x.shape) * FACTOR


@triton.jit
def normalized(x, scale, d, rope, dtype: tl.constexpr, HEAD: tl.constexpr):
    """f32 elements d [D] of rows `x` [R, D] times the `scale` [R] of their rows and their weights, rounded as the module does."""
    weight = rope.q_weight if HEAD.queries else rope.k_weight
    w = tl.load(weight + d, mask=(d >= 0) & (d < HEAD.dim), other=0.0).to(tl.float32)
    if HEAD.norm == "offset":
        w += 1.0
    y = x * scale[:, None]
    if HEAD.norm == "rounded" and dtype.primitive_bitwidth == 16:
        y = as_dtype(y, dtype).to(tl.float32)
    y *= w[None, :]
    if dtype.primitive_bitwidth == 16:
        y = as_dtype(y, dtype).to(tl.float32)
    return y


@triton.jit
def rotate_by_position(x, rows, stride, t, b, rope, rope_stride, mask, scale, HEAD: tl.constexpr):
    """f32 `x` [R, D] at `rows` [R] rotated by position: its other half is read once more, and normalized by `scale` [R]."""
    HALF: tl.constexpr = HEAD.rotary // 2
    ALIGNED: tl.constexpr = HEAD.aligned
    d = tl.arange(0, HEAD.padded)
    first = d < HALF
    if HEAD.rotary < HEAD.dim:
        mask = mask & (d < HEAD.rotary)[None, :]
    other = tl.max_contiguous(tl.multiple_of(tl.where(first, d + HALF, d - HALF), ALIGNED), ALIGNED)
    angle = tl.max_contiguous(tl.multiple_of(tl.where(first, d, d - HALF), ALIGNED), ALIGNED)
    loaded = tl.load(rows[:, None] + other.to(tl.int64)[None, :] * stride, mask=mask, other=0.0)
    partner = loaded.to(tl.float32)
    if HEAD.norm != "":
        partner = normalized(partner, scale, other, rope, loaded.dtype, HEAD)
    at = (b * rope_stride + t.to(tl.int64) * HALF)[:, None] + angle[None, :]
    c, s = tl.load(rope.cos + at, mask=mask, other=0.0), tl.load(rope.sin + at, mask=mask, other=0.0)
    rotated = tl.where(first[None, :], x * c - partner * s, x * c + partner * s)
    if HEAD.rotary < HEAD.dim:
        rotated = tl.where((d < HEAD.rotary)[None, :], rotated, x)
    return rotated


@triton.jit
def rotate_neighbors(x, t, b, rope, rope_stride, wanted, HEAD: tl.constexpr):
    """f32 `x` [R, D] rotated by position in pairs of neighbors; `wanted` [R]."""
    HALF: tl.constexpr = HEAD.rotary // 2
    i = tl.arange(0, HEAD.padded // 2)
    rotates = (i < HALF)[None, :]
    mask = wanted[:, None] & rotates
    at = (b * rope_stride + t.to(tl.int64) * HALF)[:, None] + i[None, :]
    c, s = tl.load(rope.cos + at, mask=mask, other=0.0), tl.load(rope.sin + at, mask=mask, other=0.0)
    first, second = tl.split(tl.reshape(x, [x.shape[0], HEAD.padded // 2, 2]))
    low, high = first * c - second * s, second * c + first * s
    return tl.reshape(tl.join(tl.where(rotates, low, first), tl.where(rotates, high, second)), x.shape)


@triton.jit
def load_matrix(matrix, kv, HEAD: tl.constexpr):
    """The matrix [padded, padded] of KV head `kv`, zero beyond D."""
    d = tl.arange(0, HEAD.padded)
    inside = (d < HEAD.dim)[:, None] & (d < HEAD.dim)[None, :]
    return tl.load(matrix + kv * HEAD.dim * HEAD.dim + d[:, None] * HEAD.dim + d[None, :], mask=inside, other=0.0)


@triton.jit
def times_matrix(x, m):
    """f32 rows `x` [R, padded] of numbers in the type of `m` [padded, padded], times it."""
    if x.shape[0] == 1:  # nothing goes through shared memory but a row
        y = tl.sum(tl.reshape(x, [x.shape[1], 1]) * m.to(tl.float32), 0)[None, :]
    elif _INTERPRETED:
        y = tl.dot(x, m.to(tl.float32))
    else:
        y = tl.dot(x.to(m.dtype), m)
    return y


@triton.jit
def load_rows(x, s, b, t, h, wanted, rope, rope_stride, HEAD: tl.constexpr, m=None):
    """f32 rows [R, padded] of token t [R], head h [R], zero where not `wanted` [R] and beyond D: normalized, RoPE, the rotation.

    m: a matrix [padded, padded] between the last two, of keys of one head h.
    """
    d = tl.arange(0, HEAD.padded)
    rows = x + (b * s[0] + h.to(tl.int64) * s[1] + t.to(tl.int64) * s[2])
    mask = wanted[:, None] & (d < HEAD.dim)[None, :]
    value = tl.load(rows[:, None] + d.to(tl.int64)[None, :] * s[3], mask=mask, other=0.0)
    result = value.to(tl.float32)
    scale = None
    if HEAD.norm != "":
        scale = tl.rsqrt(tl.sum(result * result, 1) * (1 / HEAD.dim) + HEAD.eps)
        result = normalized(result, scale, d, rope, value.dtype, HEAD)
    if HEAD.rotary > 0:
        if HEAD.interleaved:
            result = rotate_neighbors(result, t, b, rope, rope_stride, wanted, HEAD)
        else:
            result = rotate_by_position(result, rows, s[3], t, b, rope, rope_stride, mask, scale, HEAD)
        if value.dtype == tl.float16 or value.dtype == tl.bfloat16:
            result = as_dtype(result, value.dtype).to(tl.float32)
    if m is not None:
        result = times_matrix(result, m)
        if rope.shift is not None:
            result += tl.load(rope.shift + h * HEAD.dim + d, mask=d < HEAD.dim, other=0.0)[None, :]
    if HEAD.hadamard > 0:
        result = rotate(result, HEAD.hadamard, HEAD.factor)
    return result


@triton.jit
def rotate_queries(q, s, out, tile, batch, L, H, rope, rope_stride, R: tl.constexpr, HEAD: tl.constexpr, kv=None, heads=0, m=None):
    """R rows of q [B, H, L, D], the heads of a token one after the other, rotated by position into `out`, contiguous.

    m: then times a matrix, of KV head `kv` of `heads`, whose queries the rows are.
    """
    r = tile * R + tl.arange(0, R)
    if m is None:
        b, t, h = (r // H // L).to(tl.int64), r // H % L, r % H
        ok = r < batch * L * H
        x = load_rows(q, s, b, t, h, ok, rope, rope_stride, HEAD)
    else:
        group = H // heads
        b, t, h = (r // group // L).to(tl.int64), r // group % L, kv * group + r % group
        ok = r < batch * L * group
        x = times_matrix(load_rows(q, s, b, t, h, ok, rope, rope_stride, HEAD), m)
    d = tl.arange(0, HEAD.padded)
    rows = out + ((b * H + h) * L + t) * HEAD.dim
    tl.store(rows[:, None] + d[None, :], as_dtype(x, out.dtype.element_ty), mask=ok[:, None] & (d < HEAD.dim)[None, :])


# ------------------------------------------------------------------------------------------------------- writing a buffer


@triton.jit
def slot(b, position, wanted, page_table, stride_b, stride_p, pages, PAGE: tl.constexpr):
    """(sequence or page, row, whether it may be written) of each position. Pages without a table: positions are slots."""
    where, row = b + position * 0, position
    if PAGE > 0:
        if page_table is None:
            where = position // PAGE
        else:
            where = tl.load(page_table + b * stride_b + (position // PAGE) * stride_p, mask=wanted, other=-1).to(tl.int64)
        row = position % PAGE
        wanted = wanted & (where >= 0) & (where < pages)
    return where, row, wanted


@triton.jit
def store_codes(q, rows, s_d, ok, D: tl.constexpr, F: tl.constexpr):
    """int32 codes [R, PAD] to `rows` [R], as many a byte as the format has."""
    for i in tl.static_range(F.per_byte // 2):  # 1, 2 or 4 a byte: neighbours are joined never, once or twice
        low, high = tl.split(tl.reshape(q, [q.shape[0], q.shape[1] // 2, 2]))
        q = low | (high << (F.bits << i))
    d = tl.arange(0, q.shape[1])
    mask = ok[:, None] & (d < D // F.per_byte)[None, :]
    tl.store(rows[:, None] + d.to(tl.int64)[None, :] * s_d, q.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def tensor_scale(scales, amax, WHICH: tl.constexpr, pid, F: tl.constexpr):
    """The scale of the whole tensor; one of 0 is measured on what is new, and every program finds the same."""
    s = tl.load(scales)
    if amax is not None:
        top = float_of(tl.load(amax + WHICH))
        s = tl.where(s == 0, tl.where(top > 0, f16_scale(top, False, F), 0.0), s).to(tl.float16)
        if pid == 0:
            tl.store(scales, s)
    return tl.where(s.to(tl.float32) < MIN, MIN, s.to(tl.float32))


@triton.jit
def spread_out(x, TIMES: tl.constexpr):
    """[R, N] as [R, N * TIMES], each number TIMES times in a row."""
    R: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, :, None], [R, N, TIMES]), [R, N * TIMES])


@triton.jit
def store_scaled(x, where, row, h, ok, top, scale, buffer, strides, D: tl.constexpr, F: tl.constexpr):
    """Quantize f32 rows `x` [R, PAD] and write them where `ok`; `where`: sequence or page.

    top    [R, 1] the bits of each token's largest magnitude, where its heads share a scale
    scale  the number that a whole tensor shares
    """
    R: tl.constexpr = x.shape[0]
    PAD: tl.constexpr = x.shape[1]
    inside = tl.arange(0, PAD) < D
    s = strides
    rows = buffer.codes + (where * s.codes_b + h * s.codes_h + row * s.codes_t)
    if F.spread == "tensor":
        unit = quotient(x, scale)
        store_codes(nearest(unit, F), rows, s.codes_d, ok, D, F)
        if buffer.saturated is not None:
            count = tl.sum((beyond(unit, F.reach) & ok[:, None] & inside[None, :]).to(tl.int32))
            tl.atomic_add(buffer.saturated, count.to(tl.int64), mask=count > 0, sem="relaxed")
    else:
        GROUP: tl.constexpr = F.group if F.group > 0 else PAD
        GROUPS: tl.constexpr = PAD // GROUP
        blocks = tl.reshape(x, [R, GROUPS, GROUP])
        if F.spread == "token":
            broken = top >= INF
            factor = f16_scale(float_of(top), broken, F)
            offset, zero = factor, broken
        else:
            valid = tl.broadcast_to(tl.reshape(inside, [1, GROUPS, GROUP]), [R, GROUPS, GROUP])
            factor, offset, zero = measure(blocks, valid, 2, F)  # [R, GROUPS]
        q = encode(blocks, factor[:, :, None], offset[:, :, None], zero[:, :, None], F)
        store_codes(tl.reshape(q, [R, PAD]), rows, s.codes_d, ok, D, F)
        # Each number 32 / GROUPS times in a row: where a warp has one row, nothing moves between warps.
        EACH: tl.constexpr = 32 // GROUPS if GROUPS < 32 else 1
        i = tl.arange(0, GROUPS * EACH)
        g = (i // EACH).to(tl.int64)
        mask = ok[:, None] & ((i % EACH == 0) & (g < (D // GROUP if D > GROUP else 1)))[None, :]
        if F.spread == "token":
            mask = mask & (h == 0)[:, None]
        at_scales = buffer.scales + (where * s.scales_b + h * s.scales_h + row * s.scales_t)
        tl.store(at_scales[:, None] + (g * s.scales_d + i % EACH)[None, :], spread_out(factor, EACH), mask=mask)
        if F.offset:
            at_offsets = buffer.offsets + (where * s.offsets_b + h * s.offsets_h + row * s.offsets_t)
            tl.store(at_offsets[:, None] + (g * s.offsets_d + i % EACH)[None, :], spread_out(offset, EACH), mask=mask)


@triton.jit
def store_rows(x, where, row, h, ok, top, scale, buffer, strides, D: tl.constexpr, F: tl.constexpr):
    """Write f32 rows `x` [R, PAD] into a KV buffer: rounded to 16 bits, or quantized."""
    if F.scaled:
        store_scaled(x, where, row, h, ok, top, scale, buffer, strides, D, F)
    else:
        d = tl.arange(0, x.shape[1])
        rows = buffer.codes + (where * strides.codes_b + h * strides.codes_h + row * strides.codes_t)
        target = rows[:, None] + d.to(tl.int64)[None, :] * strides.codes_d
        tl.store(target, as_dtype(x, buffer.codes.dtype.element_ty), mask=ok[:, None] & (d < D)[None, :])
