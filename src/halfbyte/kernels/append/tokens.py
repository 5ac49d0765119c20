"""Quantize-and-append: new keys and values enter a cache in one launch.

Token i of sequence b goes to position lengths[b] + i. `encode.py` has the arithmetic.

A program takes C.tokens new tokens of one sequence with all their heads, keys and values, as a tile [tokens * heads, D]; sequences
of few new tokens have one program each, which then also advances the length. Behind those, in the same launch, come programs for
queries that are to be rotated by position like the keys. Keys that are multiplied by a matrix are taken head by head, the tokens of
several sequences at once, and the last program to arrive advances lengths. Per-channel keys have a kernel of their own: a program
takes one block of tokens of one head, from the tail and from what is new, and quantizes it once it is whole.

Tokens beyond the capacity or whose page is not in the pool are not written, but counted in the length. Under a scale of a whole
tensor, what saturates is counted, NaN and infinity with it.

Structs of arguments are those of `arguments.py`; C, and what follows from it, are compile-time constants.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.append.arguments import Paging, Sizes
from halfbyte.kernels.append.rows import (
    load_matrix,
    load_rows,
    new_tokens,
    rotate_queries,
    slot,
    store_codes,
    store_rows,
    tensor_scale,
)
from halfbyte.kernels.append.window import keep_rows, rows_to_encode
from halfbyte.kernels.common.encode import INF, MAGNITUDE, as_dtype, bits_of, encode, measure

_SIZES = Sizes._fields
_SIZES_AND_PAGING = (*_SIZES, *Paging._fields)


@triton.jit
def _tile(pid, tiles, batch, tokens, C: tl.constexpr):
    """(sequence, token and head of each row) of a program; a sequence has so many `tiles`, None: one.

    Times a matrix, a head has so many, and a program one head; rows beyond the last sequence are tokens that no sequence has.
    """
    r = tl.arange(0, C.tokens * C.heads)
    if C.by_head:
        row = pid % tiles * C.tokens + r
        real = row < batch * tokens
        b, t = tl.where(real, row // tokens, 0).to(tl.int64), tl.where(real, row % tokens, tokens)
        head = pid // tiles
    else:
        b, t = pid, r // C.heads
        if tiles is not None:  # a division takes long, and no load has been issued yet
            b, t = pid // tiles, (pid % tiles) * C.tokens + t
        b, head = b.to(tl.int64), r % C.heads
    return b, t, head.to(tl.int64)


@triton.jit
def _top_of_tokens(
    x, s, tail, tail_s, b, t, head, length, limit, heads, rope, rope_stride,
    HEAD: tl.constexpr, C: tl.constexpr, FINITE: tl.constexpr = False,
):  # fmt: skip
    """Bits of the largest magnitude of what each token makes be quantized, over its heads, in every row of it: int32 [R, 1].

    Tokens from `limit` on: 0.
    """
    R: tl.constexpr = t.shape[0]
    top = tl.zeros([R // C.heads], tl.int32)
    for i in range(C.passes):
        h = head + i * C.heads
        x_rows = rows_to_encode(x, s, tail, tail_s, b, t, h, length, (t < limit) & (h < heads), rope, rope_stride, HEAD, C)
        bits = bits_of(x_rows) & MAGNITUDE
        if FINITE:
            bits = tl.where(bits >= INF, 0, bits)
        top = tl.maximum(top, tl.max(tl.reshape(tl.max(bits, 1), [R // C.heads, C.heads]), 1))
    return tl.reshape(tl.broadcast_to(top[:, None], [R // C.heads, C.heads]), [R, 1])


@triton.jit(do_not_specialize=[*_SIZES_AND_PAGING, "batch", "query_heads"])
def append_tokens(
    k, v, q, q_out, sequences, page_table, rope, keys, values, tails, amax,
    tokens, heads, tiles, capacity, lengths_stride, pages, table_stride_b, table_stride_p, batch, query_heads,
    rope_stride, k_strides, v_strides, q_strides, keys_strides, values_strides, tail_strides, C: tl.constexpr,
):  # fmt: skip
    """Every format that quantizes token by token: of per-channel keys, the values alone."""
    KEYS: tl.constexpr = C.keys
    VALUES: tl.constexpr = C.values
    K: tl.constexpr = C.k
    V: tl.constexpr = C.v
    Q: tl.constexpr = C.q
    WITH_KEYS: tl.constexpr = KEYS.block == 0
    pid = tl.program_id(0)
    b, t, head = _tile(pid, tiles, batch, tokens, C)
    m = None
    if C.by_head:  # no launch writes matrices: they are read before those ahead have ended
        if q is not None and pid >= heads * tiles:
            tile, kv = (pid - heads * tiles) // heads, (pid - heads * tiles) % heads
            m = load_matrix(rope.q_matrix, kv.to(tl.int64), Q)
            if C.use_pdl:
                gdc_wait()
                gdc_launch_dependents()
            rotate_queries(q, q_strides, q_out, tile, batch, tokens, query_heads, rope, rope_stride, C.query_rows, Q, kv, heads, m)
            return
        m = load_matrix(rope.k_matrix, head, K)
    if C.use_pdl:
        gdc_wait()
        gdc_launch_dependents()
    if q is not None and not C.by_head:
        first = batch if tiles is None else batch * tiles
        if pid >= first:
            rotate_queries(q, q_strides, q_out, pid - first, batch, tokens, query_heads, rope, rope_stride, C.tokens * C.heads, Q)
            return
    length, new, fit = new_tokens(sequences, lengths_stride, b, tokens, capacity)
    position = length.to(tl.int64) + t - C.recent
    coded = t < fit
    if C.sinks + C.recent > 0:
        coded = coded & (position >= C.sinks)
    where, row, paged = slot(b, position, coded, page_table, table_stride_b, table_stride_p, pages, C.page)
    k_top, v_top, k_scale, v_scale = 0, 0, 0, 0
    if WITH_KEYS and KEYS.spread == "token":
        k_top = _top_of_tokens(k, k_strides, tails.k, tail_strides.k, b, t, head, length, tokens, heads, rope, rope_stride, K, C)
    if VALUES.spread == "token":
        v_top = _top_of_tokens(v, v_strides, tails.v, tail_strides.v, b, t, head, length, tokens, heads, rope, rope_stride, V, C)
    if WITH_KEYS and KEYS.spread == "tensor":
        k_scale = tensor_scale(keys.scales, amax, 0, pid, KEYS)
    if VALUES.spread == "tensor":
        v_scale = tensor_scale(values.scales, amax, 1, pid, VALUES)
    for i in range(C.passes):
        h = head + i * C.heads
        read = (t < tokens) & (h < heads)  # the length is on its way meanwhile; what does not fit is not stored
        ok = paged & (h < heads)
        if C.by_head:  # on their way while keys are multiplied
            y = rows_to_encode(v, v_strides, tails.v, tail_strides.v, b, t, h, length, read, rope, rope_stride, V, C)
        if WITH_KEYS:
            x = rows_to_encode(k, k_strides, tails.k, tail_strides.k, b, t, h, length, read, rope, rope_stride, K, C, m)
        if not C.by_head:
            y = rows_to_encode(v, v_strides, tails.v, tail_strides.v, b, t, h, length, read, rope, rope_stride, V, C)
        if WITH_KEYS:
            store_rows(x, where, row, h, ok, k_top, k_scale, keys, keys_strides, K.dim, KEYS)
        store_rows(y, where, row, h, ok, v_top, v_scale, values, values_strides, V.dim, VALUES)
        if C.sinks + C.recent > 0:
            tl.debug_barrier()  # every warp has read what leaves
            keep_rows(k, k_strides, tails.k, tail_strides.k, b, t, h, length, fit, read, rope, rope_stride, K, C, m)
            keep_rows(v, v_strides, tails.v, tail_strides.v, b, t, h, length, fit, read, rope, rope_stride, V, C)
    if C.advance:  # once all warps, and the programs of all heads, have read the length and computed with it
        tl.debug_barrier()
        if C.by_head:
            arrived = sequences.arrived + pid % tiles
            if tl.atomic_add(arrived, 1, sem="relaxed") == heads - 1:
                tl.store(sequences.lengths + b * lengths_stride, length + new, mask=t == 0)
                tl.store(arrived, 0)
        else:
            tl.store(sequences.lengths + b * lengths_stride, length + new)


@triton.jit
def _measure_tensor(amax, scales, x, s, b, t, head, fit, heads, rope, rope_stride, HEAD: tl.constexpr, C: tl.constexpr):
    if tl.load(scales) == 0:
        top = _top_of_tokens(x, s, None, None, b, t, head, 0, fit, heads, rope, rope_stride, HEAD, C, True)
        tl.atomic_max(amax, tl.max(top), sem="relaxed")


@triton.jit(do_not_specialize=_SIZES)
def measure_tensors(
    k, v, sequences, rope, k_scales, v_scales, amax,
    tokens, heads, tiles, capacity, lengths_stride, rope_stride, k_strides, v_strides, C: tl.constexpr,
):  # fmt: skip
    """Where the scale of a whole tensor is still 0: amax [2], the bits of the largest finite magnitude of new keys and values."""
    K: tl.constexpr = C.k
    V: tl.constexpr = C.v
    if C.use_pdl:
        gdc_launch_dependents()
        gdc_wait()
    b, t, head = _tile(tl.program_id(0), tiles, 0, tokens, C)
    fit = new_tokens(sequences, lengths_stride, b, tokens, capacity)[2]
    if C.keys.spread == "tensor":
        _measure_tensor(amax, k_scales, k, k_strides, b, t, head, fit, heads, rope, rope_stride, K, C)
    if C.values.spread == "tensor":
        _measure_tensor(amax + 1, v_scales, v, v_strides, b, t, head, fit, heads, rope, rope_stride, V, C)


@triton.jit
def _block_rows(k, s, b, h, t, tokens, rope, rope_stride, dtype: tl.constexpr, HEAD: tl.constexpr):
    """f32 rows [BLOCK, padded] of new keys t [BLOCK], rounded to the 16 bits of the tail."""
    x = load_rows(k, s, b, t, t * 0 + h, (t >= 0) & (t < tokens), rope, rope_stride, HEAD)
    return as_dtype(x, dtype).to(tl.float32)


@triton.jit(do_not_specialize=_SIZES_AND_PAGING)
def append_blocks(
    k, sequences, page_table, rope, keys, tail,
    tokens, heads, tiles, capacity, lengths_stride, pages, table_stride_b, table_stride_p,
    rope_stride, k_strides, keys_strides, tail_strides, C: tl.constexpr,
):  # fmt: skip
    """Per-channel keys. A sequence's run is its tail and then its new tokens; a program quantizes block j of one head's run, if it
    is whole. The program of block 0, which alone reads the tail, then fills it with what is new behind the last whole block.
    """
    KEYS: tl.constexpr = C.keys
    K: tl.constexpr = C.k
    BLOCK: tl.constexpr = KEYS.block
    dtype: tl.constexpr = tail.dtype.element_ty
    if C.use_pdl:
        gdc_launch_dependents()
        gdc_wait()
    j, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    length, _, fit = new_tokens(sequences, lengths_stride, b, tokens, capacity)
    old = tl.maximum(length, 0) % BLOCK
    total = old + fit
    i, d = tl.arange(0, BLOCK), tl.arange(0, K.padded)
    inside = (d < K.dim)[None, :]
    tail_rows = tail + (b * tail_strides[0] + h * tail_strides[1] + i.to(tl.int64) * tail_strides[2])
    in_tail = tail_rows[:, None] + d.to(tl.int64)[None, :] * tail_strides[3]
    x = _block_rows(k, k_strides, b, h, j * BLOCK + i - old, tokens, rope, rope_stride, dtype, K)

    if (j + 1) * BLOCK <= total:
        kept = (j * BLOCK + i < old)[:, None] & inside
        block = tl.where(kept, tl.load(in_tail, mask=kept, other=0.0).to(tl.float32), x)
        first = (length // BLOCK + j).to(tl.int64)  # index of this block in its sequence
        where, row, ok = slot(b, first * BLOCK, first >= 0, page_table, table_stride_b, table_stride_p, pages, C.page)
        factor, offset, zero = measure(block, inside, 0, KEYS)  # [padded]
        codes = encode(block, factor[None, :], offset[None, :], zero[None, :], KEYS)
        s = keys_strides
        rows = keys.codes + (where * s.codes_b + h * s.codes_h + (row + i) * s.codes_t)
        store_codes(codes, rows, s.codes_d, ok & (i >= 0), K.dim, KEYS)
        mask, at = ok & (d < K.dim), row // BLOCK
        scales = keys.scales + (where * s.scales_b + h * s.scales_h + at * s.scales_t)
        tl.store(scales + d.to(tl.int64) * s.scales_d, factor, mask=mask)
        if KEYS.offset:
            offsets = keys.offsets + (where * s.offsets_b + h * s.offsets_h + at * s.offsets_t)
            tl.store(offsets + d.to(tl.int64) * s.offsets_d, offset, mask=mask)
    if j == 0:
        last = total // BLOCK
        if last > 0:
            tl.debug_barrier()  # every warp has read the tail
            x = _block_rows(k, k_strides, b, h, last * BLOCK + i - old, tokens, rope, rope_stride, dtype, K)
        position = last * BLOCK + i
        added = ((position >= old) & (position < total))[:, None] & inside
        tl.store(in_tail, as_dtype(x, dtype), mask=added)
