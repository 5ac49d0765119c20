"""`decode_attention` in plain Triton, for every format, option, shape and stride: the portable level, kept simple.

The R = G * L rows (query l of query head g, row l * G + g) of one KV head share its keys and values. A program takes BLOCK_ROWS of
them and one share of the tokens that they can see, and walks it in blocks of BLOCK_TOKENS with an online softmax (FlashDecoding):

    x = f_t UNIT c_t + o_t       a stored element; c_t is an exact 16-bit number (kernels/decode/kv_args.py)
    s_mt = f_t UNIT (q_m . c_t) + o_t sum q_m
    M_m = max_t (s_mt + log2 f_t)       p_mt = 2^(s_mt - M_m)       w_mt = f_t p_mt <= 2
    out_m = sum_t (w_mt UNIT c_t + p_mt o_t) / sum_t p_mt

Scales of a token (f) and offsets (o) stay in fp32, outside of the products, and only w is rounded to 16 bits, whatever the size of
the values. Every part of a word is a product of its own: part j of word w is dim PARTS * w + j, of queries and outputs, too.
Products take 16-bit operands and add in fp32; where queries and cache mix fp16 and bf16 they take TF32, which holds both exactly.

Splits leave (M, sum p, unnormalised out) in a workspace; `_combine` adds them in their order. No floating-point atomics.

Ragged queries [T, Hq, D] come with their bounds: sequence b has tokens bounds[b] .. bounds[b + 1] and begins with block
bounds[b] G // M + b, so that every block of M rows belongs to one sequence, and the host need not know which.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.common.codes import INTERPRETED, exponent, power_of_two, rounded
from halfbyte.kernels.decode.kv_args import TOP, KVArgs, kv_args, place_of, read
from halfbyte.kernels.decode.portable_softmax import (
    INF,
    LOG2E,
    accumulate,
    accumulate_tail,
    operand,
    products,
    scores,
    tail_products,
)
from halfbyte.kv_buffer import DecodeCall
from halfbyte.plans.decode_portable import TritonTiles
from halfbyte.reference.hadamard import block_size

_LN2 = tl.constexpr(0.6931471805599453)

# ------------------------------------------------------------------------------------------------------------ device code


@triton.jit
def _rotated(x, M: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr):
    """Hadamard-rotate rows x, fp32 [M, D], in blocks of SIZE = 2^STEPS. Each step also turns the bits of the index by one."""
    for _ in tl.static_range(STEPS):
        a, b = tl.split(tl.reshape(x, (M, D // SIZE, SIZE // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (M, D))
    return x * (SIZE**-0.5)


@triton.jit
def _in_parts(x, M: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr):
    """Rows [M, WORDS * PARTS] as PARTS tensors [M, WORDS]."""
    parts = (x,)
    for bit in tl.static_range(3):
        if 2**bit < PARTS:  # by one more bit of the dim, the lowest first
            even = ()
            odd = ()
            for j in tl.static_range(len(parts)):
                a, b = tl.split(tl.reshape(parts[j], (M, parts[j].shape[1] // 2, 2)))
                even += (a,)
                odd += (b,)
            parts = even + odd
    return parts


@triton.jit
def _ragged(block, bounds, sequences, tokens, group, M: tl.constexpr):
    """Of a block of M rows its sequence (`sequences`: the padding behind them all), that one's first token and how many it has, and
    the block's first row.

    The last sequence whose first block is not behind this one. Bounds out of order lead to some sequence and to no token outside.
    """
    count = 0
    for first in tl.range(0, sequences + 1, 128):
        number = first + tl.arange(0, 128)
        begin = tl.minimum(tl.maximum(tl.load(bounds + number, mask=number <= sequences, other=0).to(tl.int64), 0), tokens)
        count += tl.sum(((number <= sequences) & (begin * group // M + number <= block)).to(tl.int32), 0)
    sequence = tl.maximum(count - 1, 0)
    begin = tl.minimum(tl.maximum(tl.load(bounds + sequence).to(tl.int64), 0), tokens)
    end = tl.load(bounds + sequence + 1, mask=sequence < sequences, other=tokens).to(tl.int64)
    end = tl.maximum(tl.minimum(end, tokens), begin)
    first = tl.maximum(block - begin * group // M - sequence, 0) * M
    return sequence.to(tl.int64), begin, (end - begin).to(tl.int32), first.to(tl.int32)


# Numbers that no address is made of are not specialised on: a kernel for each would be compiled for nothing.
_UNSPECIALIZED = ["table0", "table1", "pages", "heads", "queries", "group", "splits", "chunk", "window", "sequences", "tokens"]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _decode(
    q, q0, q1, q2, q3,
    keys: KVArgs, values: KVArgs,
    lengths, query_start, page_table, table0, table1, pages, starts, ends, slopes, sinks,
    bounds, sequences, tokens,  # of ragged queries: int32 [sequences + 1], and how many tokens there are
    out, lse, partial, heads, queries, group, capacity, splits, chunk, sm_scale, softcap, window,
    PAGE: tl.constexpr, ROTATE: tl.constexpr, ROTATE_STEPS: tl.constexpr, SINGLE: tl.constexpr, SPLIT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0) % splits
    sequence = (tl.program_id(0) // splits // heads).to(tl.int64)
    head = (tl.program_id(0) // splits % heads).to(tl.int64)
    if PDL:
        gdc_wait()  # before anything is read that an earlier kernel may still write
        gdc_launch_dependents()

    # Rows: which query of which head, and which tokens each can see.
    first = tl.program_id(1) * M
    padding = False
    if bounds is not None:
        sequence, from_token, queries, first = _ragged(sequence, bounds, sequences, tokens, group, M)
        padding = sequence == sequences
        sequence = tl.minimum(sequence, sequences - 1)
    index = first + tl.arange(0, M)
    query, query_head = index // group, head * group + index % group
    valid = index < queries * group
    if query_start is not None:
        start = tl.load(query_start + sequence).to(tl.int64)
    else:
        start = tl.load(lengths + sequence).to(tl.int64) - queries
    limit = tl.minimum(tl.load(lengths + sequence), capacity)
    if bounds is not None:
        limit = tl.where(padding, 0, limit)
    oldest = 0
    if ends is not None:
        limit = tl.minimum(limit, tl.load(ends + sequence))
    if starts is not None:
        oldest = tl.maximum(oldest, tl.load(starts + sequence))
    position = start + query
    low = tl.zeros([M], tl.int32) + oldest
    if window is not None:
        low = tl.minimum(tl.maximum(low, position - window + 1), capacity).to(tl.int32)
    high = tl.maximum(tl.minimum(position + 1, limit), 0).to(tl.int32)
    lo = tl.min(tl.where(valid, low, capacity), 0)
    hi = tl.max(tl.where(valid, high, 0), 0)

    # Its own share of them, from a multiple of 16 on (of whole blocks that share scales).
    BLOCK: tl.constexpr = keys.F.block
    ALIGN: tl.constexpr = N if bounds is not None else BLOCK if BLOCK > 0 else 16
    begin = lo // ALIGN * ALIGN
    stop = hi
    if SPLIT:
        if chunk > 0:
            begin, stop = tl.maximum(begin, split * chunk), tl.minimum(hi, (split + 1) * chunk)
        else:
            share = tl.cdiv(tl.cdiv(tl.maximum(hi - begin, 0), splits), N) * N
            begin, stop = begin + split * share, tl.minimum(hi, begin + (split + 1) * share)
    if bounds is None:
        row_index = (sequence * heads * group + query_head) * queries + query  # [M] of [B, Hq, L]
        rows = (tl.num_programs(0) // splits).to(tl.int64) * group * queries  # B * Hq * L
    else:
        row_index = from_token * heads * group + (query * heads * group + query_head)  # [M] of [T, Hq]
        rows = tokens.to(tl.int64) * heads * group  # T * Hq
    state = partial + rows * splits * values.DIM + (row_index * splits + split) * 2
    if SPLIT:  # noqa: SIM102 (a constant and a condition of the device do not mix)
        if begin >= stop:
            tl.store(state, tl.full([M], -INF, tl.float32), mask=valid)
            tl.store(state + 1, tl.zeros([M], tl.float32), mask=valid)
            return

    # The query in parts, brought to a power of two below fp16's limit where products take fp16: bf16 may be of any size.
    WIDTH: tl.constexpr = keys.WORDS * keys.PARTS
    dim = tl.arange(0, WIDTH)
    if bounds is None:
        pointers = q + sequence * q0 + (query_head * q1 + query.to(tl.int64) * q2)[:, None] + dim.to(tl.int64)[None, :] * q3
    else:
        pointers = q + (query_head * q1 + (from_token + query) * q2)[:, None] + dim.to(tl.int64)[None, :] * q3
    x = tl.load(pointers, mask=valid[:, None] & (dim < keys.DIM)[None, :], other=0).to(tl.float32)
    if ROTATE:
        x = _rotated(x, M, WIDTH, ROTATE, ROTATE_STEPS)
    scale = tl.full([M], 1.0, tl.float32) * sm_scale
    if keys.DOT == tl.float16:  # noqa: SIM300 (an operand, not a constant)
        e = tl.minimum(tl.maximum(exponent(tl.max(tl.abs(x), 1)), -100), 100)
        x *= power_of_two(-e + TOP)[:, None]
        scale *= power_of_two(e - TOP)
    x = operand(x, keys)
    sums = tl.sum(x.to(tl.float32), 1) / keys.UNIT
    tail_scale = scale
    scale *= keys.UNIT  # here once, and not on every product
    q_parts = _in_parts(x, M, keys.WORDS, keys.PARTS)
    if keys.F.spread == "tensor":
        scale *= tl.load(keys.scales).to(tl.float32)
    if softcap is None:
        scale *= LOG2E
        tail_scale *= LOG2E
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + query_head, mask=valid, other=0).to(tl.float32) * LOG2E

    peak = tl.full([M], -INF, tl.float32)
    total = tl.zeros([M], tl.float32)
    shift = tl.zeros([M], tl.float32)
    acc = ()
    for _ in tl.static_range(values.PARTS):
        acc += (tl.zeros([M, values.WORDS], tl.float32),)
    coded = stop
    WINDOW: tl.constexpr = values.tail is not None
    if WINDOW:  # sink tokens, and those from `finished` on, are read in 16 bits
        finished = tl.maximum(tl.minimum(tl.load(lengths + sequence), capacity) - keys.RING, keys.SINKS)
        coded = tl.minimum(stop, finished)
    elif keys.tail is not None:  # these tokens are not quantized yet
        finished = tl.load(lengths + sequence) // BLOCK * BLOCK
        coded = tl.minimum(stop, finished)
    high = tl.minimum(high, stop)
    high_coded = tl.minimum(high, coded)  # a block may reach beyond the share
    begin_coded, lo_coded, low_coded = begin, lo, low
    if keys.SINKS > 0:
        begin_coded = tl.maximum(begin, keys.SINKS // 16 * 16)
        lo_coded = tl.maximum(lo, keys.SINKS)
        low_coded = tl.maximum(low, keys.SINKS)
    for t in tl.range(begin_coded, coded, N, num_stages=STAGES):
        token = tl.multiple_of(t, 16) + tl.arange(0, N)
        seen = (token >= lo_coded) & (token < coded)
        place, row, inside = place_of(token, seen, capacity, sequence, page_table, table0, table1, pages, PAGE)
        parts, factor, offset = read(place, row, seen, inside, head, N, keys, EXACT=True)
        s = products(q_parts, sums, parts, factor, offset, keys) * scale[:, None]
        s = scores(s, token, seen, position, low_coded, high_coded, slope, softcap, SINGLE)
        peak, total, shift, acc = accumulate(s, peak, total, shift, acc, place, row, seen, inside, head, N, values)
    if WINDOW:
        # Sink tokens of this share, then recent ones; an item is a block of either.
        end_of_sinks, recent = tl.minimum(stop, keys.SINKS), tl.maximum(begin, finished)
        of_sinks = tl.cdiv(tl.maximum(end_of_sinks - begin, 0), N)
        for i in tl.range(0, of_sinks + tl.cdiv(tl.maximum(stop - recent, 0), N)):
            sink = i < of_sinks
            token = tl.where(sink, begin + i * N, recent + (i - of_sinks) * N) + tl.arange(0, N)
            end = tl.where(sink, end_of_sinks, stop)
            seen = (token >= lo) & (token < end)
            row = token
            if keys.RING > 0:
                row = tl.where(token < keys.SINKS, token, keys.SINKS + token % keys.RING)
            s = tail_products(q_parts, row, seen, sequence, head, M, N, keys) * tail_scale[:, None]
            s = scores(s, token, seen, position, low, tl.minimum(high, end), slope, softcap, SINGLE)
            peak, total, shift, acc = accumulate_tail(s, peak, total, shift, acc, row, seen, sequence, head, values)
    elif keys.tail is not None:  # noqa: SIM102
        if stop > finished:  # at most one block of them, in exact 16-bit numbers
            place_in_tail = tl.arange(0, BLOCK)
            token = finished + place_in_tail
            seen = (token >= tl.maximum(lo, begin)) & (token < stop)
            s = tl.zeros([M, BLOCK], tl.float32)
            for j in tl.static_range(keys.PARTS):
                d = tl.arange(0, keys.WORDS).to(tl.int64) * keys.PARTS + j
                at = keys.tail + sequence * keys.tail0 + head * keys.tail1 + place_in_tail.to(tl.int64)[:, None] * keys.tail2
                k = tl.load(at + d[None, :] * keys.tail3, mask=seen[:, None] & (d < keys.DIM)[None, :], other=0)
                s = tl.dot(q_parts[j].to(tl.float32), tl.trans(k.to(tl.float32)), s, input_precision="tf32")
            s = scores(s * scale[:, None], token, seen, position, low, high, slope, softcap, SINGLE)
            place, row, inside = place_of(token, seen, capacity, sequence, page_table, table0, table1, pages, PAGE)
            peak, total, shift, acc = accumulate(s, peak, total, shift, acc, place, row, seen, inside, head, BLOCK, values)

    divisor = 1.0
    if not SPLIT:
        tl.store(lse + row_index, (peak + tl.log2(total)) * _LN2, mask=valid)
        divisor = total
        if sinks is not None:
            sink = tl.load(sinks + query_head, mask=valid, other=0).to(tl.float32) * LOG2E
            divisor += tl.exp2(sink - peak)
        divisor = tl.where(peak == -INF, 1.0, divisor)[:, None]
        target = out + row_index * values.DIM
    else:
        tl.store(state, peak, mask=valid)
        tl.store(state + 1, total, mask=valid)
        target = partial + (row_index * splits + split) * values.DIM
    tensor_scale = 1.0
    if values.F.spread == "tensor":
        tensor_scale = tl.load(values.scales).to(tl.float32)
    for j in tl.static_range(values.PARTS):
        d = tl.arange(0, values.WORDS) * values.PARTS + j
        o = (acc[j] * values.UNIT + shift[:, None]) * tensor_scale / divisor
        tl.store(target[:, None] + d[None, :], rounded(o, target, INTERPRETED), mask=valid[:, None] & (d < values.DIM)[None, :])


@triton.jit(do_not_specialize=["splits", "queries", "query_heads"])
def _combine(
    partial, sinks, out, lse, splits, queries, query_heads,
    DIM: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One row of [B, Hq, L]: its splits, AT_ONCE at a time from the first on, whatever follows the last one that saw a key."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    state = partial + tl.num_programs(0).to(tl.int64) * splits * DIM + row * splits * 2
    number = tl.arange(0, AT_ONCE)
    peak = tl.full([AT_ONCE], -INF, tl.float32)
    for s in tl.range(0, splits, AT_ONCE):
        peak = tl.maximum(peak, tl.load(state + (s + number) * 2, mask=s + number < splits, other=-INF))
    peak = tl.max(peak, 0)
    finite = tl.where(peak == -INF, 0.0, peak)

    d = tl.arange(0, WIDTH)
    total = 0.0
    acc = tl.zeros([WIDTH], tl.float32)
    for s in tl.range(0, splits, AT_ONCE):
        own = tl.load(state + (s + number) * 2, mask=s + number < splits, other=-INF)
        used = own != -INF  # a split without a key left nothing else behind
        weight = tl.exp2(own - finite)
        total += tl.sum(weight * tl.load(state + (s + number) * 2 + 1, mask=used, other=0), 0)
        at = partial + (row * splits + s + number)[:, None] * DIM + d[None, :]
        acc += tl.sum(weight[:, None] * tl.load(at, mask=used[:, None] & (d < DIM)[None, :], other=0), 0)
    tl.store(lse + row, (peak + tl.log2(total)) * _LN2)
    if sinks is not None:
        sink = tl.load(sinks + row // queries % query_heads).to(tl.float32) * LOG2E
        total += tl.exp2(sink - peak)
    total = tl.where(peak == -INF, 1.0, total)
    tl.store(out + row * DIM + d, rounded(acc / total, out, INTERPRETED), mask=d < DIM)


# -------------------------------------------------------------------------------------------------------------- host code


def workspace_floats(rows: int, dim: int, splits: int) -> int:
    """fp32 numbers of workspace for `rows` rows of output (B * Hq * L) of `dim` numbers."""
    return rows * splits * (dim + 2) if splits > 1 else 0


def launch(call: DecodeCall, tiles: TritonTiles, out: torch.Tensor, lse: torch.Tensor, workspace: torch.Tensor | None) -> None:
    """q [B, Hq, L, D], fp16 or bf16, any strides; out [B, Hq, L, Dv] and lse fp32 [B, Hq, L], contiguous, all written.

    Tensors of one axis are contiguous; a query_start is given. `workspace`: `workspace_floats` fp32, only with tiles.splits > 1; it
    may hold anything. Ragged queries need no query_start, but one sequence at least; their results are [1, Hq, T, Dv] and
    [1, Hq, T] with the memory of [T, Hq, Dv] and [T, Hq].
    """
    q, keys, values, lengths, query_start, page_table, options = call[:7]
    batch, query_heads, queries, dim = q.shape
    group = query_heads // keys.heads
    page, pages = keys.codes.shape[2], min(keys.codes.shape[0], values.codes.shape[0])
    capacity = call.capacity if page_table is None else call.capacity * (pages > 0)
    rotate = block_size(dim) if options.rotate_keys else 0
    pdl = {"launch_pdl": True} if tiles.pdl else {}
    split = tiles.splits > 1
    bounds, sequences, tokens = call.cu_seqlens_q, None, None
    grid = (batch * keys.heads * tiles.splits, triton.cdiv(group * queries, tiles.block_rows))
    if bounds is not None:
        sequences, tokens = len(lengths), queries
        grid = ((tokens * group // tiles.block_rows + sequences + 1) * keys.heads * tiles.splits, 1)
    _decode[grid](
        q, *q.stride(), kv_args(keys, q.dtype), kv_args(values, q.dtype),
        lengths, query_start, page_table, *((0, 0) if page_table is None else page_table.stride()), pages,
        options.starts, options.ends, options.alibi_slopes, None if split else options.sinks, bounds, sequences, tokens,
        out, lse, workspace, keys.heads, queries, group, capacity, tiles.splits, tiles.chunk,
        options.sm_scale, options.softcap, options.window,
        PAGE=0 if page_table is None else page, ROTATE=rotate, ROTATE_STEPS=rotate.bit_length() - 1,
        SINGLE=queries == 1 and bounds is None, SPLIT=split, M=tiles.block_rows, N=tiles.block_tokens, STAGES=tiles.num_stages,
        PDL=tiles.pdl, INTERPRETED=INTERPRETED, num_warps=tiles.num_warps, **pdl,
    )  # fmt: skip
    if split:
        _combine[(batch * query_heads * queries,)](
            workspace, options.sinks, out, lse, tiles.splits, 1 if bounds is not None else queries, query_heads, DIM=values.dim,
            WIDTH=triton.next_power_of_2(values.dim), AT_ONCE=8, PDL=tiles.pdl, INTERPRETED=INTERPRETED, num_warps=2, **pdl,
        )  # fmt: skip
