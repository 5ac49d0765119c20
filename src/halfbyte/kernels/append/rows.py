"""Rows of an append: new tokens read from k or v (rotary embedding, Hadamard rotation), and written into a plane."""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.common.encode import (
    INF,
    MAGNITUDE,
    MIN,
    as_dtype,
    beyond,
    bits_of,
    encode,
    f16_scale,
    float_of,
    measure,
    nearest,
    quotient,
)

# ------------------------------------------------------------------------------------------------------- reading new tokens


@triton.jit
def fresh(lengths, s_lengths, counts, b, L, capacity):
    """Of sequence b: its length, its new tokens, and how many of them there is room for."""
    length = tl.load(lengths + b * s_lengths)
    new = L
    if counts is not None:
        new = tl.minimum(tl.maximum(tl.load(counts + b), 0), L)
    room = tl.where(length < 0, 0, tl.maximum(capacity - length.to(tl.int64), 0))
    return length, new, tl.minimum(room, new).to(tl.int32)


@triton.jit
def butterfly(x, STEP: tl.constexpr):
    """Sums and differences of the elements STEP apart in the last axis of x [R, D]."""
    pairs = tl.reshape(x, [x.shape[0], x.shape[1] // (2 * STEP), 2, STEP])
    a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), x.shape)


@triton.jit
def rotate(x, LOG: tl.constexpr, FACTOR: tl.constexpr):
    """Hadamard blocks of 2^LOG along the last axis, in the order of `reference.hadamard.rotate`."""
    for i in tl.static_range(LOG):
        x = butterfly(x, 1 << i)
    return x * FACTOR


@triton.jit
def rope(x, rows, s_d, t, b, cos, sin, s_rope, mask, D: tl.constexpr, PAD: tl.constexpr, ALIGN: tl.constexpr):
    """f32 `x` [R, D] at `rows` [R] rotated by position: its other half is read once more."""
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, PAD)
    first = d < HALF
    other = tl.max_contiguous(tl.multiple_of(tl.where(first, d + HALF, d - HALF), ALIGN), ALIGN)
    angle = tl.max_contiguous(tl.multiple_of(tl.where(first, d, d - HALF), ALIGN), ALIGN)
    partner = tl.load(rows[:, None] + other.to(tl.int64)[None, :] * s_d, mask=mask, other=0.0).to(tl.float32)
    at = (b * s_rope + t.to(tl.int64) * HALF)[:, None] + angle[None, :]
    c, s = tl.load(cos + at, mask=mask, other=0.0), tl.load(sin + at, mask=mask, other=0.0)
    return tl.where(first[None, :], x * c - partner * s, x * c + partner * s)


@triton.jit
def load_rows(
    x, s, b, t, h, wanted, cos, sin, s_rope,
    LOG: tl.constexpr, FACTOR: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """f32 rows [R, PAD] of token t [R], head h [R], zero where not `wanted` [R] and beyond D; RoPE, then the rotation."""
    d = tl.arange(0, PAD)
    rows = x + (b * s[0] + h.to(tl.int64) * s[1] + t.to(tl.int64) * s[2])
    mask = wanted[:, None] & (d < D)[None, :]
    value = tl.load(rows[:, None] + d.to(tl.int64)[None, :] * s[3], mask=mask, other=0.0)
    result = value.to(tl.float32)
    if cos is not None:
        result = rope(result, rows, s[3], t, b, cos, sin, s_rope, mask, D, PAD, ALIGN)
        if value.dtype == tl.float16 or value.dtype == tl.bfloat16:
            result = as_dtype(result, value.dtype).to(tl.float32)
    if LOG > 0:
        result = rotate(result, LOG, FACTOR)
    return result


@triton.jit
def top_of_tokens(
    x, s, b, t, head, limit, H, cos, sin, s_rope,
    LOG: tl.constexpr, FACTOR: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, ALIGN: tl.constexpr,
    HEADS: tl.constexpr, CHUNKS: tl.constexpr, FINITE: tl.constexpr = False,
):  # fmt: skip
    """Bits of the largest magnitude of each token over its heads, in every row of it: int32 [R, 1]. Tokens from `limit` on: 0."""
    R: tl.constexpr = t.shape[0]
    top = tl.zeros([R // HEADS], tl.int32)
    for chunk in range(CHUNKS):
        h = head + chunk * HEADS
        bits = bits_of(load_rows(x, s, b, t, h, (t < limit) & (h < H), cos, sin, s_rope, LOG, FACTOR, D, PAD, ALIGN)) & MAGNITUDE
        if FINITE:
            bits = tl.where(bits >= INF, 0, bits)
        top = tl.maximum(top, tl.max(tl.reshape(tl.max(bits, 1), [R // HEADS, HEADS]), 1))
    return tl.reshape(tl.broadcast_to(top[:, None], [R // HEADS, HEADS]), [R, 1])


@triton.jit
def rotate_queries(
    q, s, out, tile, batch, L, H, cos, sin, s_rope, R: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, ALIGN: tl.constexpr
):
    """R rows of q [B, H, L, D], the heads of a token one after the other, rotated by position into `out`, contiguous."""
    r = tile * R + tl.arange(0, R)
    b, t, h = (r // H // L).to(tl.int64), r // H % L, r % H
    ok = r < batch * L * H
    x = load_rows(q, s, b, t, h, ok, cos, sin, s_rope, 0, 1.0, D, PAD, ALIGN)
    d = tl.arange(0, PAD)
    rows = out + ((b * H + h) * L + t) * D
    tl.store(rows[:, None] + d[None, :], as_dtype(x, out.dtype.element_ty), mask=ok[:, None] & (d < D)[None, :])


# ------------------------------------------------------------------------------------------------------- writing a plane


@triton.jit
def slot(b, position, wanted, page_table, s_tb, s_tp, pages, PAGE: tl.constexpr):
    """(sequence or page, row, whether it may be written) of each position."""
    where, row = b + position * 0, position
    if PAGE > 0:
        where = tl.load(page_table + b * s_tb + (position // PAGE) * s_tp, mask=wanted, other=-1).to(tl.int64)
        row = position % PAGE
        wanted = wanted & (where >= 0) & (where < pages)
    return where, row, wanted


@triton.jit
def store_codes(q, rows, s_d, ok, D: tl.constexpr, F: tl.constexpr):
    """int32 codes [R, PAD] to `rows` [R], two a byte where the format has it so."""
    if F.per_byte == 2:
        low, high = tl.split(tl.reshape(q, [q.shape[0], q.shape[1] // 2, 2]))
        q = low | (high << 4)
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
def store_scaled(x, at, h, ok, top, scale, codes, c, scales, s, offsets, o, saturated, D: tl.constexpr, F: tl.constexpr):
    """Quantise f32 rows `x` [R, PAD] and write them where `ok`; `at`: sequence or page, row [R].

    top    [R, 1] the bits of each token's largest magnitude, where its heads share a scale
    scale  the number that a whole tensor shares
    """
    R: tl.constexpr = x.shape[0]
    PAD: tl.constexpr = x.shape[1]
    where, row = at
    inside = tl.arange(0, PAD) < D
    rows = codes + (where * c[0] + h * c[1] + row * c[2])
    if F.granularity == "tensor":
        unit = quotient(x, scale)
        store_codes(nearest(unit, F), rows, c[3], ok, D, F)
        if saturated is not None:
            count = tl.sum((beyond(unit, F.reach) & ok[:, None] & inside[None, :]).to(tl.int32))
            tl.atomic_add(saturated, count.to(tl.int64), mask=count > 0, sem="relaxed")
    else:
        GROUP: tl.constexpr = F.group if F.group > 0 else PAD
        GROUPS: tl.constexpr = PAD // GROUP
        blocks = tl.reshape(x, [R, GROUPS, GROUP])
        if F.granularity == "token":
            broken = top >= INF
            factor = f16_scale(float_of(top), broken, F)
            offset, zero = factor, broken
        else:
            valid = tl.broadcast_to(tl.reshape(inside, [1, GROUPS, GROUP]), [R, GROUPS, GROUP])
            factor, offset, zero = measure(blocks, valid, 2, F)  # [R, GROUPS]
        q = encode(blocks, factor[:, :, None], offset[:, :, None], zero[:, :, None], F)
        store_codes(tl.reshape(q, [R, PAD]), rows, c[3], ok, D, F)
        # Each number 32 / GROUPS times in a row: where a warp has one row, nothing moves between warps.
        EACH: tl.constexpr = 32 // GROUPS if GROUPS < 32 else 1
        i = tl.arange(0, GROUPS * EACH)
        g = (i // EACH).to(tl.int64)
        mask = ok[:, None] & ((i % EACH == 0) & (g < (D // GROUP if D > GROUP else 1)))[None, :]
        if F.granularity == "token":
            mask = mask & (h == 0)[:, None]
        at_scales = scales + (where * s[0] + h * s[1] + row * s[2])
        tl.store(at_scales[:, None] + (g * s[3] + i % EACH)[None, :], spread_out(factor, EACH), mask=mask)
        if F.offset:
            at_offsets = offsets + (where * o[0] + h * o[1] + row * o[2])
            tl.store(at_offsets[:, None] + (g * o[3] + i % EACH)[None, :], spread_out(offset, EACH), mask=mask)


@triton.jit
def store_rows(x, at, h, ok, top, scale, codes, c, scales, s, offsets, o, saturated, D: tl.constexpr, F: tl.constexpr):
    """Write f32 rows `x` [R, PAD] into a plane: rounded to 16 bits, or quantised."""
    if F.scaled:
        store_scaled(x, at, h, ok, top, scale, codes, c, scales, s, offsets, o, saturated, D, F)
    else:
        d = tl.arange(0, x.shape[1])
        where, row = at
        rows = codes + (where * c[0] + h * c[1] + row * c[2])
        target = rows[:, None] + d.to(tl.int64)[None, :] * c[3]
        tl.store(target, as_dtype(x, codes.dtype.element_ty), mask=ok[:, None] & (d < D)[None, :])
