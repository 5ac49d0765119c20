"""Tuned decode attention in Gluon: a cache of any supported format, read once, at the speed of memory.

A *work item* is one KV head of one sequence. Its R = G * L query rows (G query heads share the KV head, L new tokens each) stay in
registers; its tokens stream through a ring in shared memory, filled by cp.async. Tokens are the M axis of the tensor cores and rows
the N axis, so no slot of an mma is wasted at R = 8, and every warp owns the tokens it works on (where R rows are too many for its
registers, two warps or more share their tokens and divide the rows; W counts streams of tokens, `kv_warps`, not warps):

    s[t, r] = sum_d K[t, d] q[r, d]                    one mma chain per scale group of K
    p[t, r] = exp2(s - m)                              m: running maximum of s + log2(scale of V's token), per warp and row
    o[d, r] += sum_t V[t, d] (p[t, r] * v_scale[t])    P goes from accumulator to operand by movmatrix, never through memory

Codes enter the mma without conversion: one masked in place is a subnormal fp16 number (n * 2^-24), which tensor cores
multiply exactly; the power of two is multiplied back into fp32 results. One 16-bit word holds P codes (8, 4, 2 or 1), and code j of
word w is dim P * w + j. Offsets of codes are rank-one terms: a sum of q for keys, a sum of p for values.
Per-channel scales go into the query (decode/per_channel.py). Sink and recent tokens are read in 16 bits (decode/tail.py).

Where memory has the order tokens, heads and a head's codes of a token are less than 128 bytes, an item is two neighbouring heads:
codes of both are copied as one row, a tile has half as many tokens, and stream w works on head w % 2 and run w // 2 of its tokens.
Queries, scales and sums differ by stream; all else is as with one head, and so is the machine code of that.

Work is partitioned on the device. Each item costs its tiles of tokens plus a constant; the programs take equal shares of the total,
so a share may begin and end inside an item. An item that one program computes alone is written at once; else the partial results go
to the workspace and the program that arrives last adds them up, in the order of the programs and never of their arrival.

With `deterministic_batch` shares meet where splits of a fixed size do. Every split has a state of its own, whoever computes it, and
those are added in the order of tokens; the ring goes on across them.
"""

# ruff: noqa: RUF005, SIM108, E741
# Triton compiles a part of Python: tuples are joined with `+`, and a branch on a constant is an `if`.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.common.compat import barrier
from halfbyte.kernels.common.layouts import lengths_layout, mma_layout
from halfbyte.kernels.common.shares import program_at
from halfbyte.kernels.decode.arguments import Call
from halfbyte.kernels.decode.loads import (
    fetch,
    first_head,
    first_slope,
    head_of,
    load_query,
    make_rings,
    page_of_tile,
    place_of,
    query_operands,
)
from halfbyte.kernels.decode.per_channel import tail_scores, whole_blocks
from halfbyte.kernels.decode.reduce import add_partials, add_split, partial_slot, split_planes, sum_warps, write_partial, write_rows
from halfbyte.kernels.decode.rotation import rotate_operands
from halfbyte.kernels.decode.softmax import accumulate, adjust, empty_state, raw_scores
from halfbyte.kernels.decode.tail import add_tail
from halfbyte.kernels.decode.work_split import (
    chunk_at,
    coded_keys,
    next_work_item,
    partition,
    position_of_split,
    splits_of,
    visible_keys,
    work_item_at,
)


@gluon.jit
def _add_tiles(state, slot, page, begin, end, t_end, rings, keys, scoring, head, call, C: gl.constexpr):
    """The state, the ring's slot and the page behind tiles begin .. end of a work item; requests go as far as t_end."""
    KS: gl.constexpr = C.keys
    VS: gl.constexpr = C.values
    k_rings, v_rings, k_at, v_at = rings
    lo, lo_all, hi_all, coded, hi, limit, tail = keys
    operands, sums, factor, position, slopes, row = scoring
    for tile in range(begin, end):
        async_copy.wait_group(C.stages - 2)
        free = gl.where(slot == 0, C.stages - 1, slot - 1)
        page = fetch(k_rings, v_rings, free, k_at, v_at, tile + (C.stages - 1), page, t_end, lo, coded, hi, C)
        token = tile * C.tile + row
        if (tile * C.tile >= lo_all) & (tile * C.tile + C.tile <= hi_all):
            s = raw_scores(k_rings, slot, head, operands, sums, factor, KS, C)
            s = adjust(s, token, position, slopes, call.softcap, C)
            state = accumulate(v_rings, slot, head, s, True, state, True, VS, C)
        else:
            s = raw_scores(k_rings, slot, head, operands, sums, factor, KS, C)
            if KS.scale == "channel":
                s = gl.where(token >= coded, tail, s)
            s = adjust(s, token, position, slopes, call.softcap, C)
            there = (token >= lo) & (token < hi)
            if C.queries == 1:
                s = gl.where(there, s, float("-inf"))
            else:
                visible = there & (token <= position) & (token < limit)
                if C.window:
                    visible = visible & (token > position - call.window)
                s = gl.where(visible, s, float("-inf"))
            state = accumulate(v_rings, slot, head, s, there, state, False, VS, C)
        slot = gl.where(slot == C.stages - 1, 0, slot + 1)
    return state, slot, page


@gluon.jit
def decode_few_rows(call: Call, C: gl.constexpr):
    """One program's share of the work: work item after work item, from where its share begins to where it ends."""
    KS: gl.constexpr = C.keys
    VS: gl.constexpr = C.values
    mma: gl.constexpr = mma_layout(C)
    k_rings = make_rings(KS, C)
    v_rings = make_rings(VS, C)
    at = 0 if C.batch == 1 else gl.arange(0, C.batch, layout=lengths_layout(C))
    ok = at < call.batch
    if C.use_pdl:
        gdc_wait()  # lengths, queries, pages and the newest token may come from the kernel before
        gdc_launch_dependents()
    seen = visible_keys(at, ok, call, C)
    total, programs, x, x_end, b, start = partition(seen, call, C)
    program = gl.program_id(0)
    h = -1
    while x < x_end:
        here, h, start, cost, begin, end, t_begin, t_end = work_item_at(x, x_end, b, h, start, call, C)
        first, limit, _, _, _ = here
        lo, hi = coded_keys(here, C)
        head = h * C.heads
        coded = hi
        if KS.scale == "channel":
            coded = whole_blocks(call.sequences.lengths, b, hi, KS)

        k_at = place_of(call, call.k, call.k_scale_token, b, head, KS, C)
        v_at = place_of(call, call.v, call.v_scale_token, b, head, VS, C)
        page = page_of_tile(k_at, t_begin, hi, C)
        # The queries first: behind the ring's requests they would wait for all of those.
        loaded = load_query(call, b, head, KS, C)
        for i in range(C.stages - 1):
            page = fetch(k_rings, v_rings, i, k_at, v_at, t_begin + i, page, t_end, lo, coded, hi, C)

        if C.split == 0:  # Who shares this item, while its first tile is on the way.
            first_program = program_at(start, programs, total)
            last_program = program_at(start + cost - 1, programs, total)

        if C.rotate:
            loaded = rotate_operands(loaded, KS, C)
        operands, sums, factor = query_operands(loaded, KS, C)
        if C.softcap:
            post_scale = call.sm_scale / call.softcap
        else:
            post_scale = call.sm_scale * 1.4426950408889634
        if KS.offset and KS.scale == "token":
            scaled = ()
            for g in gl.static_range(gl.constexpr(KS.groups)):
                scaled = scaled + (sums[g] * (factor * post_scale),)
            sums = scaled
        exact_factor = factor * post_scale  # of scores over 16 bits, which know of no scale of the whole tensor
        if KS.scale == "tensor":
            post_scale = post_scale * gl.load(call.k.scales).to(gl.float32)
        factor = factor * (post_scale * KS.step)
        r = gl.arange(0, C.padded_rows, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, None, :]
        position = first + r % C.queries
        w = gl.arange(0, C.kv_warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None, None]
        slopes = gl.full([1, 1, C.padded_rows], 0.0, gl.float32, mma)
        if C.alibi:
            slopes = gl.load(first_slope(call, head, C) + head_of(w, r, C), mask=r < C.rows, other=0.0) * 1.4426950408889634
        t = gl.arange(0, C.tokens, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :, None]
        row = w // C.heads * C.tokens + t
        # Within [lo_all, hi_all) every query sees every key, and all of them are quantized.
        lo_all = lo
        if C.window:
            lo_all = gl.maximum(lo, first + (C.queries - call.window))
        hi_all = gl.minimum(coded, gl.minimum(limit, first + 1))

        tail = ()
        if KS.scale == "channel":
            tail = gl.full([C.kv_warps, C.tokens, C.padded_rows], 0.0, gl.float32, mma)
            if (hi > coded) & (t_begin * C.tile <= coded) & (coded < t_end * C.tile):
                tail_at = call.k.tail + first_head(b, head, call) * (KS.block * KS.words * KS.codes_per_word)
                tail = tail_scores(tail_at, coded, lo, hi, operands, factor, KS, C)

        rings = k_rings, v_rings, k_at, v_at
        keys = lo, lo_all, hi_all, coded, hi, limit, tail
        scoring = operands, sums, factor, position, slopes, row
        if C.split == 0:
            state = empty_state(VS, C)
            slot = gl.to_tensor(0)
            state, slot, page = _add_tiles(state, slot, page, t_begin, t_end, t_end, rings, keys, scoring, head, call, C)
            async_copy.wait_group(0)
            item = b * (call.heads // C.heads) + h
            m, l, z, o = state
            state = m, l, z, split_planes(o, VS, C)
            if C.tail_rows:
                if KS.scale != "tensor":
                    exact_factor = factor * (1.0 / KS.step)  # the same, without a register in the loop
                here = visible_keys(b, True, call, C)  # once more: no register is free for it in the loop
                part = chunk_at(begin, here, C), chunk_at(end, here, C)
                state = add_tail(state, call, first_head(b, head, call), part, here, (operands, exact_factor, position, slopes), C)
            merged = sum_warps(k_rings[0], state, VS, C)
            whole = (begin == 0) & (end == cost)
            if not whole:
                write_partial(call.results.partial, partial_slot(program, begin == 0), merged, VS, C)
                whole, merged = add_partials(call, item, call.batch * (call.heads // C.heads), first_program, last_program, VS, C)
            if whole:
                write_rows(call, b, item * C.heads, head, merged, VS, C)
        else:
            first_split, last_split, split_begin, split_end = splits_of(here, begin, end, cost, t_begin, t_end, C)
            item = b * (call.heads // C.heads) + h
            slot = 0
            for split in range(split_begin, split_end):
                t_start = gl.maximum(split * C.split_tiles, t_begin)
                t_stop = gl.minimum(split * C.split_tiles + C.split_tiles, t_end)
                state, slot, page = _add_tiles(
                    empty_state(VS, C), slot, page, t_start, t_stop, t_end, rings, keys, scoring, head, call, C
                )
                m, l, z, o = state
                state = m, l, z, split_planes(o, VS, C)
                visible = here
                if C.tail_rows:
                    visible = visible_keys(b, True, call, C)
                    part = 0, gl.where(split == first_split, chunk_at(cost, visible, C), 0)
                    scores = operands, exact_factor if KS.scale == "tensor" else factor * (1.0 / KS.step), position, slopes
                    state = add_tail(state, call, first_head(b, head, call), part, visible, scores, C)
                merged = sum_warps(k_rings[0], state, VS, C)
                whole = last_split - first_split == 1
                if not whole:
                    group = split // C.reduce_fanin * C.reduce_fanin
                    owner = program_at(start + position_of_split(group, visible, C), programs, total)
                    whole, merged = add_split(
                        call, item, split, (first_split, last_split), (split_begin, split_end), owner, merged, VS, C
                    )
                if whole:
                    write_rows(call, b, item * C.heads, head, merged, VS, C)
            async_copy.wait_group(0)
        x, b, h, start = next_work_item(b, h, start, cost, end, call.heads // C.heads)
        if C.reuses_ring:
            barrier()  # the next item's first requests must not overtake a warp that still reads sums from where they go
