"""Decode attention for many query rows in Gluon, on Hopper: codes are unpacked once for all of them, into shared memory.

    s[r, t] = sum_d q[r, d] K[t, d]        both operands in shared memory
    p[r, t] = exp2(s - m)                  m: running maximum, by row
    o[r, d] += sum_t p[r, t] V[t, d]       p in registers, in fp16

Query rows are the M axis of wgmma, 64 for each warp group; tokens of a tile, or dims, are the N axis. Codes
come as they are stored into a ring in shared memory (cp.async). There a tile becomes numbers in fp16, f c + o, relative to a power
of two 2^e that follows from its largest scale (wgmma_operands.py); scores take 2^e as a factor, and weights in the exponent: with e
of the values, p 2^e is what multiplies, and m the maximum of s + e. So any size of scales fits, with one rounding of each number,
as in eager attention over a dequantized cache. What remains for each score is a maximum, an exponential and an addition.

Products with the values of a tile run while the next tile is read and unpacked, those with the keys while further codes are asked
for. Work items, shares of programs, partial results and their sums are those of decode/mma.py, and so is the call.
"""

# ruff: noqa: RUF005, SIM108, E741
# Triton compiles a part of Python: tuples are joined with `+`, and a branch on a constant is an `if`.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.common.compat import barrier, view
from halfbyte.kernels.common.layouts import PLAIN, lengths_layout, sum_layout
from halfbyte.kernels.common.shares import program_at
from halfbyte.kernels.decode.arguments import Call
from halfbyte.kernels.decode.loads import fetch, first_slope, make_rings, page_of_tile, place_of
from halfbyte.kernels.decode.reduce import add_partials, partial_slot, write_partial, write_rows
from halfbyte.kernels.decode.rotation import rotate_rows
from halfbyte.kernels.decode.softmax import adjust
from halfbyte.kernels.decode.wgmma_operands import (
    OPERAND,
    code_step_of,
    load_rows,
    power_of_two,
    read_tile,
    scores_layout,
    store_queries,
    store_tile,
    sums_layout,
    top_of,
)
from halfbyte.kernels.decode.work_split import next_work_item, partition, visible_keys, work_item_at


@gluon.jit
def _by_lanes(x, C: gl.constexpr):
    """Sums over the tokens that a lane holds: [rows, 8]."""
    return gl.sum(gl.reshape(x, [C.padded_rows, C.tile // 8, 8]), axis=1)


@gluon.jit
def _softmax(s, scale, exponent, m, l, C: gl.constexpr):
    """A tile's online softmax over scores s * scale: weights in fp16, what is kept of sums before, the new maximum and sum."""
    by_lane: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    new = gl.maximum(m, gl.max(s, axis=1) * scale + (exponent - 8).to(gl.float32))
    keep = gl.exp2(m - new)
    w = gl.exp2(s * scale - (new - exponent.to(gl.float32))[:, None])
    kept = gl.convert_layout(keep, by_lane, assert_trivial=True)[:, None]
    l = l * kept + _by_lanes(w, C) * power_of_two(-exponent)
    weights = gl.convert_layout(w.to(gl.float16), gl.DotOperandLayout(0, sums_layout(C), 2), assert_trivial=True)
    return weights, gl.convert_layout(keep, gl.SliceLayout(1, sums_layout(C)), assert_trivial=True)[:, None], new, l


@gluon.jit
def _whole(memory, m, l, o, C: gl.constexpr):
    """The state of an item's rows as partial results have it: m and l [1, R, 1], values by section; of one head."""
    S: gl.constexpr = C.values
    R: gl.constexpr = C.padded_rows
    N: gl.constexpr = S.operands
    lo: gl.constexpr = sum_layout(S, C)
    shape: gl.constexpr = [S.sections * S.rows, R, N]
    red = view(memory, 0, gl.float32, shape, PLAIN)
    o = o * (1.0 / top_of(S) if S.scale == "token" else code_step_of(S))
    if S.halved:
        o = gl.permute(gl.reshape(o, [R, S.sections, S.codes_per_word // N, N, 8]), [1, 2, 4, 0, 3])
    else:
        o = gl.permute(gl.reshape(o, [R, S.sections, S.rows // 8, N, 8]), [1, 2, 4, 0, 3])
    red.store(gl.reshape(o, shape))
    barrier()
    values = ()
    for g in gl.static_range(gl.constexpr(S.sections)):
        values = values + (red.slice(g * S.rows, S.rows, dim=0).load(lo),)
    rows: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, lo))
    top = gl.convert_layout(m, rows)[None, :, None]
    total = gl.convert_layout(gl.sum(l, axis=1), rows)[None, :, None]
    return ((top, total, values),)


@gluon.jit
def decode_many_rows(call: Call, C: gl.constexpr):
    """One program's share of the work: work item after work item, from where its share begins to where it ends."""
    KS: gl.constexpr = C.keys
    VS: gl.constexpr = C.values
    mma: gl.constexpr = scores_layout(C)
    R: gl.constexpr = C.padded_rows
    k_rings = make_rings(KS, C)
    v_rings = make_rings(VS, C)
    q_tile = gl.allocate_shared_memory(gl.float16, [R, C.dim], OPERAND)
    k_tile = gl.allocate_shared_memory(gl.float16, [C.tile, C.dim], OPERAND)
    v_tiles = gl.allocate_shared_memory(gl.float16, [2, C.tile, C.dim], OPERAND)
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
        first, limit, lo, hi, _ = here
        k_at = place_of(call, call.k, call.k_scale_token, b, h, KS, C)
        v_at = place_of(call, call.v, call.v_scale_token, b, h, VS, C)
        page = page_of_tile(k_at, t_begin, hi, C)
        loaded = load_rows(call, b, h, 0, KS, C)
        for i in range(C.stages - 1):
            page = fetch(k_rings, v_rings, i, k_at, v_at, t_begin + i, page, t_end, lo, hi, hi, C)
        first_program = program_at(start, programs, total)
        last_program = program_at(start + cost - 1, programs, total)

        if C.rotate:
            loaded = rotate_rows(loaded, KS, C)
        if C.softcap:
            post_scale = call.sm_scale / call.softcap
        else:
            post_scale = call.sm_scale * 1.4426950408889634
        if KS.scale == "tensor":
            post_scale = post_scale * gl.load(call.k.scales).to(gl.float32)
        # A factor of scores is not negative: the maximum of what it multiplies is that of the scores.
        factor = gl.abs(post_scale) * store_queries(q_tile, loaded, gl.where(post_scale < 0.0, -1.0, 1.0), KS, C)
        if KS.scale == "token":
            factor = factor * (1.0 / top_of(KS))
        else:
            factor = factor * code_step_of(KS)
        r = gl.arange(0, R, layout=gl.SliceLayout(1, mma))[:, None]
        position = first + r % C.queries
        slopes = gl.full([R, 1], 0.0, gl.float32, mma)
        if C.alibi:
            slopes = gl.load(first_slope(call, h, C) + r // C.queries, mask=r < C.rows, other=0.0) * 1.4426950408889634
        t = gl.arange(0, C.tile, layout=gl.SliceLayout(0, mma))[None, :]
        # Within [lo_all, hi_all) every query sees every key.
        lo_all = lo
        if C.window:
            lo_all = gl.maximum(lo, first + (C.queries - call.window))
        hi_all = gl.minimum(hi, gl.minimum(limit, first + 1))

        m = gl.full([R], -3.0e38, gl.float32, gl.SliceLayout(1, mma))
        none = gl.full([R, C.tile], 0.0, gl.float32, mma)
        l = _by_lanes(none, C)
        o = warpgroup_mma_init(gl.full([R, C.dim], 0.0, gl.float32, sums_layout(C)))
        slot = 0
        for tile in range(t_begin, t_end):
            async_copy.wait_group(C.stages - 2)
            barrier()
            now = v_tiles.index(tile % 2)
            k_read = read_tile(k_rings, slot, h, tile, lo, hi, KS, C)
            v_read = read_tile(v_rings, slot, h, tile, lo, hi, VS, C)
            store_tile(k_tile, k_read, KS, C)
            store_tile(now, v_read, VS, C)
            fence_async_shared()
            barrier()
            s = warpgroup_mma(q_tile, k_tile.permute([1, 0]), none, use_acc=False, is_async=True)
            free = gl.where(slot == 0, C.stages - 1, slot - 1)
            page = fetch(k_rings, v_rings, free, k_at, v_at, tile + (C.stages - 1), page, t_end, lo, hi, hi, C)
            s, o = warpgroup_mma_wait(0, deps=[s, o])
            scale = factor * power_of_two(k_read[0])
            token = tile * C.tile + t
            if C.alibi or C.softcap:
                s = adjust(s * scale, token, position, slopes, call.softcap, C)
                scale = 1.0
            if (tile * C.tile < lo_all) | (tile * C.tile + C.tile > hi_all):
                visible = (token >= lo) & (token < hi) & (token <= position) & (token < limit)
                if C.window:
                    visible = visible & (token > position - call.window)
                s = gl.where(visible, s * scale, float("-inf"))
                scale = 1.0
            weights, kept, m, l = _softmax(s, scale, v_read[0], m, l, C)
            o = warpgroup_mma(weights, now, o * kept, is_async=True)
            slot = gl.where(slot == C.stages - 1, 0, slot + 1)
        async_copy.wait_group(0)
        o = warpgroup_mma_wait(0, deps=[o])
        barrier()  # all products are done, and their memory is free

        item = b * call.heads + h
        merged = _whole(v_tiles, m, l, o, C)
        whole = (begin == 0) & (end == cost)
        if not whole:
            write_partial(call.results.partial, partial_slot(program, begin == 0), merged, VS, C)
            whole, merged = add_partials(call, item, call.batch * call.heads, first_program, last_program, VS, C)
        if whole:
            write_rows(call, b, item, h, merged, VS, C)
        x, b, h, start = next_work_item(b, h, start, cost, end, call.heads)
        barrier()  # the next item's queries and first requests must not overtake a warp that still reads this one's
