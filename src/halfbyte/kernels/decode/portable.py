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

Over latents (MLA) a score has products with the values, too, which are read once for both.

Splits leave (M, sum p, unnormalised out) in a workspace; `_combine` adds them in their order. No floating-point atomics.

Ragged queries [T, Hq, D] come with their bounds: sequence b has tokens bounds[b] .. bounds[b + 1] and begins with block
bounds[b] G // M + b, so that every block of M rows belongs to one sequence, and the host need not know which.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.common.codes import INTERPRETED, rounded
from halfbyte.kernels.decode.arguments import PerHead, Sequences
from halfbyte.kernels.decode.kv_args import KVArgs, kv_args, place_of, read
from halfbyte.kernels.decode.portable_rows import Call, Constants, Queries, Results, Rows, query_of, rows_of, share_of
from halfbyte.kernels.decode.portable_softmax import (
    INF,
    LOG2E,
    accumulate,
    accumulate_tail,
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
def _over_codes(state, query, of_latents, slope, rows: Rows, share, keys: KVArgs, values: KVArgs, call: Call, C: tl.constexpr):
    """One pass over the tokens of a share that are codes: [first, end), of which rows see those from `lo`, and from `low`, on."""
    N: tl.constexpr = C.tokens
    q_parts, sums, scale, _ = query
    first, end, lo, low, high = share
    head = rows.head
    for t in tl.range(first, end, N, num_stages=C.stages):
        token = tl.multiple_of(t, 16) + tl.arange(0, N)
        seen = (token >= lo) & (token < end)
        place, row, inside = place_of(token, seen, rows.sequence, call, C.page)
        parts, factor, offset = read(place, row, seen, inside, head, N, keys, EXACT=True)
        s = products(q_parts, sums, parts, factor, offset, keys) * scale[:, None]
        if C.latent:
            value = read(place, row, seen, inside, head, N, values, EXACT=True)
            s += products(of_latents[0], of_latents[1], value[0], value[1], value[2], values) * of_latents[2][:, None]
        s = scores(s, token, seen, rows.position, low, high, slope, call.softcap, C.single)
        if not C.latent:
            value = read(place, row, seen, inside, head, N, values)
        state = accumulate(s, state, value, values)
    return state


@triton.jit
def _over_window(
    state, query, of_latents, slope, rows: Rows, begin, stop, finished, lo, high, keys: KVArgs, values: KVArgs, call: Call,
    C: tl.constexpr,
):  # fmt: skip
    """Sink tokens of this share, then those from `finished` on; an item is a block of either."""
    M: tl.constexpr = C.rows
    N: tl.constexpr = C.tokens
    q_parts, _, _, scale = query
    SINKS: tl.constexpr = keys.SINKS
    RING: tl.constexpr = keys.RING
    end_of_sinks, recent = tl.minimum(stop, SINKS), tl.maximum(begin, finished)
    of_sinks = tl.cdiv(tl.maximum(end_of_sinks - begin, 0), N)
    for i in tl.range(0, of_sinks + tl.cdiv(tl.maximum(stop - recent, 0), N)):
        sink = i < of_sinks
        token = tl.where(sink, begin + i * N, recent + (i - of_sinks) * N) + tl.arange(0, N)
        end = tl.where(sink, end_of_sinks, stop)
        seen = (token >= lo) & (token < end)
        row = token
        if RING > 0:
            row = tl.where(token < SINKS, token, SINKS + token % RING)
        s = tail_products(q_parts, row, seen, rows.sequence, rows.head, M, N, keys) * scale[:, None]
        if C.latent:
            s += tail_products(of_latents[0], row, seen, rows.sequence, rows.head, M, N, values) * of_latents[3][:, None]
        s = scores(s, token, seen, rows.position, rows.low, tl.minimum(high, end), slope, call.softcap, C.single)
        state = accumulate_tail(s, state, row, seen, rows.sequence, rows.head, values)
    return state


@triton.jit
def _over_unfinished(
    state, query, of_latents, slope, rows: Rows, begin, stop, finished, lo, high, keys: KVArgs, values: KVArgs, call: Call,
    C: tl.constexpr,
):  # fmt: skip
    """The tokens from `finished` on, whose keys are not quantized yet: at most one block of them, in exact 16-bit numbers."""
    M: tl.constexpr = C.rows
    q_parts, _, scale, _ = query
    BLOCK: tl.constexpr = keys.F.block
    place_in_tail = tl.arange(0, BLOCK)
    token = finished + place_in_tail
    seen = (token >= tl.maximum(lo, begin)) & (token < stop)
    s = tl.zeros([M, BLOCK], tl.float32)
    for j in tl.static_range(keys.PARTS):
        d = tl.arange(0, keys.WORDS).to(tl.int64) * keys.PARTS + j
        at = keys.tail + rows.sequence * keys.tail0 + rows.head * keys.tail1 + place_in_tail.to(tl.int64)[:, None] * keys.tail2
        k = tl.load(at + d[None, :] * keys.tail3, mask=seen[:, None] & (d < keys.DIM)[None, :], other=0)
        s = tl.dot(q_parts[j].to(tl.float32), tl.trans(k.to(tl.float32)), s, input_precision="tf32")
    s *= scale[:, None]
    if C.latent:
        place, row, inside = place_of(token, seen, rows.sequence, call, C.page)
        value = read(place, row, seen, inside, rows.head, BLOCK, values, EXACT=True)
        s += products(of_latents[0], of_latents[1], value[0], value[1], value[2], values) * of_latents[2][:, None]
    s = scores(s, token, seen, rows.position, rows.low, high, slope, call.softcap, C.single)
    if not C.latent:
        place, row, inside = place_of(token, seen, rows.sequence, call, C.page)
        value = read(place, row, seen, inside, rows.head, BLOCK, values)
    return accumulate(s, state, value, values)


@triton.jit
def _write(state, rows: Rows, row_index, partial_state, split, values: KVArgs, call: Call, C: tl.constexpr):
    """The result of a block of rows, or its partial one."""
    peak, total, shift, acc = state
    divisor = 1.0
    if not C.split:
        tl.store(call.results.lse + row_index, (peak + tl.log2(total)) * _LN2, mask=rows.valid)
        divisor = total
        if call.per_head.sinks is not None:
            sink = tl.load(call.per_head.sinks + rows.query_head, mask=rows.valid, other=0).to(tl.float32) * LOG2E
            divisor += tl.exp2(sink - peak)
        divisor = tl.where(peak == -INF, 1.0, divisor)[:, None]
        target = call.results.out + row_index * values.DIM
    else:
        tl.store(partial_state, peak, mask=rows.valid)
        tl.store(partial_state + 1, total, mask=rows.valid)
        target = call.results.partial + (row_index * call.splits + split) * values.DIM
    tensor_scale = 1.0
    if values.F.spread == "tensor":
        tensor_scale = tl.load(values.scales).to(tl.float32)
    for j in tl.static_range(values.PARTS):
        d = tl.arange(0, values.WORDS) * values.PARTS + j
        o = (acc[j] * values.UNIT + shift[:, None]) * tensor_scale / divisor
        seen = rows.valid[:, None] & (d < values.DIM)[None, :]
        tl.store(target[:, None] + d[None, :], rounded(o, target, C.interpreted), mask=seen)


# Numbers that no address is made of are not specialised on: a kernel for each would be compiled for nothing.
_UNSPECIALIZED = ["table0", "table1", "pages", "heads", "queries", "group", "splits", "chunk", "window", "count", "tokens"]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _decode(
    q: Queries, keys: KVArgs, values: KVArgs, sequences: Sequences, per_head: PerHead, results: Results,
    bounds, count, tokens, table0, table1, pages, heads, queries, group, capacity, splits, chunk, sm_scale, softcap, window,
    C: tl.constexpr,
):  # fmt: skip
    """A block of rows over a share of the tokens that they see."""
    M: tl.constexpr = C.rows
    call = Call(
        q, sequences, per_head, results,
        bounds, count, tokens, table0, table1, pages, heads, queries, group, capacity, splits, chunk, sm_scale, softcap, window,
    )  # fmt: skip
    split = tl.program_id(0) % splits
    sequence = (tl.program_id(0) // splits // heads).to(tl.int64)
    head = (tl.program_id(0) // splits % heads).to(tl.int64)
    if C.pdl:
        gdc_wait()  # before anything is read that an earlier kernel may still write
        gdc_launch_dependents()
    rows, lo, hi = rows_of(sequence, head, call, C)
    begin, stop = share_of(split, lo, hi, keys, call, C)
    if bounds is None:
        row_index = (rows.sequence * heads * group + rows.query_head) * queries + rows.query  # [M] of [B, Hq, L]
        count_of_rows = (tl.num_programs(0) // splits).to(tl.int64) * group * queries  # B * Hq * L
    else:
        row_index = rows.from_token * heads * group + (rows.query * heads * group + rows.query_head)  # [M] of [T, Hq]
        count_of_rows = tokens.to(tl.int64) * heads * group  # T * Hq
    partial_state = results.partial + count_of_rows * splits * values.DIM + (row_index * splits + split) * 2
    if C.split:  # noqa: SIM102 (a constant and a condition of the device do not mix)
        if begin >= stop:
            tl.store(partial_state, tl.full([M], -INF, tl.float32), mask=rows.valid)
            tl.store(partial_state + 1, tl.zeros([M], tl.float32), mask=rows.valid)
            return

    BEFORE: tl.constexpr = values.DIM if C.latent else 0
    query = query_of(rows, keys, BEFORE, C.rotate > 0, call, C)
    of_latents = query
    if C.latent:
        of_latents = query_of(rows, values, 0, False, call, C)
    slope = None
    if per_head.alibi_slopes is not None:
        slope = tl.load(per_head.alibi_slopes + rows.query_head, mask=rows.valid, other=0).to(tl.float32) * LOG2E
    acc = ()
    peak = tl.full([M], -INF, tl.float32)
    total = tl.zeros([M], tl.float32)
    shift = tl.zeros([M], tl.float32)
    for _ in tl.static_range(values.PARTS):
        acc += (tl.zeros([M, values.WORDS], tl.float32),)
    state = peak, total, shift, acc
    coded = stop
    WINDOW: tl.constexpr = values.tail is not None
    if WINDOW:  # sink tokens, and those from `finished` on, are read in 16 bits
        finished = tl.maximum(tl.minimum(tl.load(sequences.lengths + rows.sequence), capacity) - keys.RING, keys.SINKS)
        coded = tl.minimum(stop, finished)
    elif keys.tail is not None:
        finished = tl.load(sequences.lengths + rows.sequence) // keys.F.block * keys.F.block
        coded = tl.minimum(stop, finished)
    high = tl.minimum(rows.high, stop)
    high_coded = tl.minimum(high, coded)  # a block may reach beyond the share
    begin_coded, lo_coded, low_coded = begin, lo, rows.low
    if keys.SINKS > 0:
        begin_coded = tl.maximum(begin, keys.SINKS // 16 * 16)
        lo_coded = tl.maximum(lo, keys.SINKS)
        low_coded = tl.maximum(rows.low, keys.SINKS)
    share = begin_coded, coded, lo_coded, low_coded, high_coded
    state = _over_codes(state, query, of_latents, slope, rows, share, keys, values, call, C)
    if WINDOW:
        state = _over_window(state, query, of_latents, slope, rows, begin, stop, finished, lo, high, keys, values, call, C)
    elif keys.tail is not None:  # noqa: SIM102
        if stop > finished:
            state = _over_unfinished(state, query, of_latents, slope, rows, begin, stop, finished, lo, high, keys, values, call, C)
    _write(state, rows, row_index, partial_state, split, values, call, C)


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
    """q [B, Hq, L, query_dim], fp16 or bf16, any strides; out [B, Hq, L, Dv] and lse fp32 [B, Hq, L], contiguous, all written.

    Tensors of one axis are contiguous; a query_start is given. `workspace`: `workspace_floats` fp32, only with tiles.splits > 1; it
    may hold anything. Ragged queries need no query_start, but one sequence at least; their results are [1, Hq, T, Dv] and
    [1, Hq, T] with the memory of [T, Hq, Dv] and [T, Hq].
    """
    q, keys, values, lengths, query_start, page_table, options = call[:7]
    batch, query_heads, queries, _ = q.shape
    group = query_heads // keys.heads
    page, pages = keys.codes.shape[2], min(keys.codes.shape[0], values.codes.shape[0])
    capacity = call.capacity if page_table is None else call.capacity * (pages > 0)
    rotate = block_size(keys.dim) if options.rotate_keys else 0
    pdl = {"launch_pdl": True} if tiles.pdl else {}
    split = tiles.splits > 1
    bounds, sequences, tokens = call.cu_seqlens_q, None, None
    grid = (batch * keys.heads * tiles.splits, triton.cdiv(group * queries, tiles.block_rows))
    if bounds is not None:
        sequences, tokens = len(lengths), queries
        grid = ((tokens * group // tiles.block_rows + sequences + 1) * keys.heads * tiles.splits, 1)
    constants = Constants(
        page=0 if page_table is None else page, rotate=rotate, rotate_steps=rotate.bit_length() - 1, latent=call.latent,
        single=queries == 1 and bounds is None, split=split, rows=tiles.block_rows, tokens=tiles.block_tokens,
        stages=tiles.num_stages, pdl=tiles.pdl, interpreted=INTERPRETED,
    )  # fmt: skip
    _decode[grid](
        Queries(q, *q.stride()), kv_args(keys, q.dtype), kv_args(values, q.dtype),
        Sequences(lengths, query_start, page_table, options.starts, options.ends),
        PerHead(options.alibi_slopes, None if split else options.sinks), Results(out, lse, workspace),
        bounds, sequences, tokens, *((0, 0) if page_table is None else page_table.stride()), pages,
        keys.heads, queries, group, capacity, tiles.splits, tiles.chunk, options.sm_scale, options.softcap, options.window,
        constants, num_warps=tiles.num_warps, **pdl,
    )  # fmt: skip
    if split:
        _combine[(batch * query_heads * queries,)](
            workspace, options.sinks, out, lse, tiles.splits, 1 if bounds is not None else queries, query_heads, DIM=values.dim,
            WIDTH=triton.next_power_of_2(values.dim), AT_ONCE=8, PDL=tiles.pdl, INTERPRETED=INTERPRETED, num_warps=2, **pdl,
        )  # fmt: skip
