"""Tuned decode attention in Gluon: a cache of any supported format, read once, at the speed of memory.

One *unit* is one KV head of one sequence. Its R = G * L query rows (G query heads share the KV head, L new tokens each) stay in
registers; its tokens stream through a ring in shared memory, filled by cp.async. Tokens are the M axis of the tensor cores and rows
the N axis, so no slot of an mma is wasted at R = 8, and every warp owns the tokens it works on (where R rows are too many for its
registers, two warps or more share their tokens and divide the rows; W counts the streams of tokens, not the warps):

    s[t, r] = sum_d K[t, d] q[r, d]                    one mma chain per scale group of K
    p[t, r] = exp2(s - m)                              m: running maximum of s + log2(scale of V's token), per warp and row
    o[d, r] += sum_t V[t, d] (p[t, r] * v_scale[t])    P goes from accumulator to operand by movmatrix, never through memory

Codes enter the mma without conversion: a nibble or byte masked in place is a subnormal fp16 number (n * 2^-24), which tensor cores
multiply exactly; the power of two is multiplied back into fp32 results. One 16-bit word holds `planes` codes (4, 2 or 1), and plane
j of word w is dim planes * w + j. Offsets of codes are rank-one terms: a sum of q for keys, a sum of p for values.
Scales of channels go into the query (decode/per_channel.py).

Where memory has the order tokens, heads and a head's codes of a token are less than 128 bytes, a unit is two neighbouring heads:
codes of both are copied as one row, a tile has half as many tokens, and stream w works on head w % 2 and run w // 2 of its tokens.
Queries, scales and sums differ by stream; all else is as with one head, and so is the machine code of that.

Work is dealt out on the device. Each unit costs its tiles of tokens plus a constant; the programs take equal shares of the total,
so a share may begin and end inside a unit. A unit that one program computes alone is written at once; else the partial results go
to the workspace and the program that arrives last adds them up, in the order of the programs and never of their arrival.
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
from halfbyte.kernels.decode.loads import (
    fetch,
    head_of,
    load_query,
    make_rings,
    page_of_tile,
    place_of,
    query_operands,
)
from halfbyte.kernels.decode.per_channel import tail_scores, whole_blocks
from halfbyte.kernels.decode.reduce import gather, part_slot, parted, sum_warps, write_part, write_rows
from halfbyte.kernels.decode.softmax import accumulate, adjust, empty_state, raw_scores
from halfbyte.kernels.decode.work_split import deal, next_unit, program_at, unit_at, visible_keys


# Numbers that no vector of addresses is made of are not specialised on: a kernel for each would be compiled for nothing.
@gluon.jit(
    do_not_specialize=["window", "batch", "heads", "pages", "capacity", "ks_token", "vs_token", "p_batch"],
    do_not_specialize_on_alignment=["repeats"],
)
def decode(
    Q,  # [B, Hq, L, D], strides q_*
    K,  # codes as 16-bit words [B or pages, H, T, words]
    KScale,  # fp16 [B or pages, (H,) T, (groups)], or [1]
    KOffset,  # fp16, as KScale and with its strides
    KTail,  # 16-bit keys of tokens that fill no whole block, [B, H, block, D], contiguous; of formats with blocks alone
    V,
    VScale,
    VOffset,
    Out,  # [B, Hq, L, Dv], contiguous
    Lse,  # fp32 [B, Hq, L]
    Part,  # fp32 workspace: two partial results a program
    Count,  # int32, one a unit and two for every C.gather programs; zero before and after
    Lengths,  # int32 [B]
    QueryStart,
    Starts,
    Ends,
    Pages,  # int32 [B, pages of a sequence]
    Slopes,
    Sinks,  # fp32 [Hq]
    sm_scale,
    softcap,
    window,
    batch,
    heads,
    pages,
    capacity,
    repeats,  # sequences of Q for each of K and V, whose pages are not repeated
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token8,
    v_batch,
    v_head,
    v_token8,
    ks_batch,
    ks_head,
    ks_token,
    vs_batch,
    vs_head,
    vs_token,
    p_batch,
    C: gl.constexpr,
):
    """One program's share of the work: unit after unit, from where its share begins to where it ends."""
    KS: gl.constexpr = C.keys
    VS: gl.constexpr = C.values
    mma: gl.constexpr = mma_layout(C)
    k_rings = make_rings(KS, C)
    v_rings = make_rings(VS, C)
    at = 0 if C.batch == 1 else gl.arange(0, C.batch, layout=lengths_layout(C))
    ok = at < batch
    if C.pair:
        gdc_wait()  # lengths, queries, pages and the newest token may come from the kernel before
        gdc_launch_dependents()
    seen = visible_keys(at, ok, Lengths, QueryStart, Starts, Ends, capacity, window, C)
    total, programs, x, x_end, b, start = deal(seen[2], seen[3], batch, heads, C)
    program = gl.program_id(0)
    h = -1
    while x < x_end:
        here, h, start, cost, begin, end, t_begin, t_end = unit_at(
            x, x_end, b, h, start, Lengths, QueryStart, Starts, Ends, capacity, window, C
        )
        first, limit, lo, hi = here
        head = h * C.heads
        coded = hi
        if KS.scale == "channel":
            coded = whole_blocks(Lengths, b, hi, KS)

        k_sizes = (pages, repeats, k_batch, k_head, k_token8, ks_batch, ks_head, ks_token, p_batch)
        v_sizes = (pages, repeats, v_batch, v_head, v_token8, vs_batch, vs_head, vs_token, p_batch)
        k_at = place_of(K, KScale, KOffset, Pages, b, head, k_sizes, KS, C)
        v_at = place_of(V, VScale, VOffset, Pages, b, head, v_sizes, VS, C)
        page = page_of_tile(k_at, t_begin, hi, C)
        # The queries first: behind the ring's requests they would wait for all of those.
        group: gl.constexpr = C.rows // C.queries
        loaded = load_query(Q + b.to(gl.int64) * q_batch + head * (group * q_head), q_head, q_token, KS, C)
        for i in range(C.stages - 1):
            page = fetch(k_rings, v_rings, i, k_at, v_at, t_begin + i, page, t_end, lo, coded, hi, C)

        # Who shares this unit, while its first tile is on the way.
        part_first = program_at(start, programs, total)
        part_last = program_at(start + cost - 1, programs, total)

        q, sums, factor = query_operands(loaded, KS, C)
        if C.softcap:
            owed = sm_scale / softcap
        else:
            owed = sm_scale * 1.4426950408889634
        if KS.offset and KS.scale == "token":
            scaled = ()
            for g in gl.static_range(gl.constexpr(KS.groups)):
                scaled = scaled + (sums[g] * (factor * owed),)
            sums = scaled
        if KS.scale == "tensor":
            owed = owed * gl.load(KScale).to(gl.float32)
        factor = factor * (owed * KS.unit)
        r = gl.arange(0, C.padded_rows, layout=gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, None, :]
        position = first + r % C.queries
        w = gl.arange(0, C.streams, layout=gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None, None]
        slopes = gl.full([1, 1, C.padded_rows], 0.0, gl.float32, mma)
        if C.alibi:
            slopes = gl.load(Slopes + head * group + head_of(w, r, C), mask=r < C.rows, other=0.0) * 1.4426950408889634
        t = gl.arange(0, C.tokens, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :, None]
        row = w // C.heads * C.tokens + t
        # Within [lo_all, hi_all) every query sees every key, and all of them are quantised.
        lo_all = lo
        if C.window:
            lo_all = gl.maximum(lo, first + (C.queries - window))
        hi_all = gl.minimum(coded, gl.minimum(limit, first + 1))

        if KS.scale == "channel":
            tail = gl.full([C.streams, C.tokens, C.padded_rows], 0.0, gl.float32, mma)
            if (hi > coded) & (t_begin * C.tile <= coded) & (coded < t_end * C.tile):
                tail_at = KTail + ((b // repeats).to(gl.int64) * heads + head) * (KS.block * KS.words * KS.planes)
                tail = tail_scores(tail_at, coded, lo, hi, q, factor, KS, C)

        state = empty_state(VS, C)
        slot = 0
        for tile in range(t_begin, t_end):
            async_copy.wait_group(C.stages - 2)
            free = gl.where(slot == 0, C.stages - 1, slot - 1)
            page = fetch(k_rings, v_rings, free, k_at, v_at, tile + (C.stages - 1), page, t_end, lo, coded, hi, C)
            token = tile * C.tile + row
            if (tile * C.tile >= lo_all) & (tile * C.tile + C.tile <= hi_all):
                s = raw_scores(k_rings, slot, head, q, sums, factor, KS, C)
                s = adjust(s, token, position, slopes, softcap, C)
                state = accumulate(v_rings, slot, head, s, True, state, True, VS, C)
            else:
                s = raw_scores(k_rings, slot, head, q, sums, factor, KS, C)
                if KS.scale == "channel":
                    s = gl.where(token >= coded, tail, s)
                s = adjust(s, token, position, slopes, softcap, C)
                there = (token >= lo) & (token < hi)
                if C.queries == 1:
                    s = gl.where(there, s, float("-inf"))
                else:
                    visible = there & (token <= position) & (token < limit)
                    if C.window:
                        visible = visible & (token > position - window)
                    s = gl.where(visible, s, float("-inf"))
                state = accumulate(v_rings, slot, head, s, there, state, False, VS, C)
            slot = gl.where(slot == C.stages - 1, 0, slot + 1)
        async_copy.wait_group(0)

        unit = b * (heads // C.heads) + h
        m, l, z, o = state
        merged = sum_warps(k_rings[0], (m, l, z, parted(o, VS, C)), VS, C)
        whole = (begin == 0) & (end == cost)
        if not whole:
            write_part(Part, part_slot(program, begin == 0), merged, VS, C)
            whole, merged = gather(Part, Count, unit, batch * (heads // C.heads), part_first, part_last, VS, C)
        if whole:
            write_rows(Out, Lse, Sinks, VScale, unit * C.heads, head, merged, VS, C)
        x, b, h, start = next_unit(b, h, start, cost, end, heads // C.heads)
        if C.reuses_ring:
            barrier()  # the next unit's first requests must not overtake a warp that still reads sums from where they go
