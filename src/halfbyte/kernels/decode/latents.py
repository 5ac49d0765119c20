"""Decode attention over latents (MLA) in Gluon: each latent is copied once, and read as a key and as a value.

    s[t, r] = sum_d c[t, d] q[r, d] + sum_e k[t, e] q[r, D + e]        c: latents, k: rotary keys
    p[t, r] = exp2(s - m)                                              m: a maximum that moves in steps, by row
    o[d, r] += sum_t c[t, d] (p[t, r] * scale[t])

Query heads share one KV head. A work item is up to 32 query rows of a sequence; to the host more heads are several KV heads, all
in the same memory (decode/launch.py). Codes enter the MMA unconverted, as in decode/mma.py, tokens or dims as its M axis, rows as
N; on Hopper products of warp groups are under way while the next codes are unpacked (latents_scores.py). A latent has 512 dims, so
no warp holds all of the output: for scores, warps divide the tokens of a tile; for outputs, its dims. Weights go from one to the
other through shared memory, where queries stay, too. Work items, shares of programs, and the sums of partial results are those of
decode/mma.py.
"""

# ruff: noqa: RUF005, SIM108, E741, B007
# Triton compiles a part of Python: tuples are joined with `+`, and a branch on a constant is an `if`.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.common.compat import barrier, view
from halfbyte.kernels.common.layouts import (
    code_ring_layout,
    latent_layout,
    latent_scores_layout,
    lengths_layout,
    post_scale_of,
    sum_layout,
    unpack_values,
)
from halfbyte.kernels.common.shares import program_at
from halfbyte.kernels.decode.arguments import Call
from halfbyte.kernels.decode.latents_scores import (
    chains,
    dots,
    make_queries,
    operand_layout,
    product,
    right_operand,
    scores,
    store_query,
    wait,
)
from halfbyte.kernels.decode.loads import fetch, first_slope, make_rings, page_of_tile, place_of
from halfbyte.kernels.decode.reduce import add_partials, partial_slot, stack, write_partial, write_rows
from halfbyte.kernels.decode.rotation import rotate_rows
from halfbyte.kernels.decode.softmax import adjust, log2_of
from halfbyte.kernels.decode.wgmma_operands import load_rows, of_tokens
from halfbyte.kernels.decode.work_split import next_work_item, partition, visible_keys, work_item_at


@gluon.jit
def _zero():
    """0, which only the assembler knows: addresses behind it are computed where they are needed, and take no registers."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _by_lanes(x, C: gl.constexpr):
    """Sums over the tokens that a lane holds: [warps, 8, R]."""
    x = gl.reshape(x, [C.tile // (16 * C.warps), C.warps, 2, 8, C.padded_rows])
    return gl.sum(gl.sum(x, axis=2), axis=0)


@gluon.jit
def _weigh(s, scale, offset, m, S: gl.constexpr, C: gl.constexpr):
    """A tile's weights in fp32, and what its tokens add to l and z, by lanes."""
    p = gl.exp2(s - m[None, :])
    added = _by_lanes(p, C)
    weight = p
    if S.scale == "token":
        weight = p * scale
    shift = added
    if S.offset:
        shift = _by_lanes(p * offset, C)
    elif S.kind == "signed":
        shift = _by_lanes(weight.to(gl.float16).to(gl.float32) * -128.0, C)  # as rounded, so that large sums cancel exactly
    return weight, added, shift


@gluon.jit
def _largest(weight, C: gl.constexpr):
    """The largest number of each warp, as the bits of fp32: [warps]."""
    x = weight.to(gl.int32, bitcast=True) & 0x7FFFFFFF  # NaN is above all
    x = gl.reshape(x, [C.tile // (16 * C.warps), C.warps, 2, 8, C.padded_rows // 8, 4, 2])
    x = gl.max(gl.max(gl.max(gl.max(x, axis=6), axis=4), axis=2), axis=0)  # of each lane: [warps, 8, 4]
    return gl.max(gl.max(x, axis=2), axis=1)


@gluon.jit
def _accumulate(weights, tops, rings, slot, s, ok, state, S: gl.constexpr, C: gl.constexpr):
    """One tile's online softmax and its product with the latents. state: (m, l, z, o by code of a word).

    Weights are relative to a maximum m that moves only when one would exceed 2^12: then all warps meet again, and o changes.
    """
    mma: gl.constexpr = latent_scores_layout(C)
    lo: gl.constexpr = latent_layout(C)
    la: gl.constexpr = gl.DotOperandLayout(0, lo, 2)
    N: gl.constexpr = S.codes_per_word
    m, l, z, o = state
    scale = s
    offset = s
    if S.scale == "token":
        scale = gl.where(ok, of_tokens(rings[1], slot, 0, mma, S, C), 0.0)
    if S.offset:
        offset = gl.where(ok, of_tokens(rings[2], slot, 0, mma, S, C), 0.0)
    weight, added, shift = _weigh(s, scale, offset, m, S, C)
    shape: gl.constexpr = [C.tile, S.padded]
    codes = view(rings[0], slot, gl.int16, shape, code_ring_layout(S.padded, 2))
    words = codes.slice(0, 16, dim=0).permute([1, 0]).load(la)  # of values, ahead of the barrier
    weights.store(weight.to(gl.float16))
    tops.store(_largest(weight, C))
    if C.wgmma_values:
        fence_async_shared()
    barrier()
    top = gl.max(tops.load(gl.BlockedLayout([C.warps], [32], [C.warps], [0])), axis=0)
    if top > 0x45800000:  # 2^12
        if S.scale == "token":
            peak = gl.max(s + log2_of(scale), axis=0)
        else:
            peak = gl.max(s, axis=0)
        new = gl.maximum(m, peak - 4.0)
        keep = gl.exp2(m - new)
        m = new
        by_lane = gl.convert_layout(keep, gl.SliceLayout(0, gl.SliceLayout(1, l.type.layout)))[None, None, :]
        kept = gl.convert_layout(keep, gl.SliceLayout(0, lo))[None, :]
        l = l * by_lane
        z = z * by_lane
        scaled = ()
        for j in gl.static_range(N):
            scaled = scaled + (o[j] * kept,)
        o = scaled
        weight, added, shift = _weigh(s, scale, offset, m, S, C)
        weights.store(weight.to(gl.float16))
        if C.wgmma_values:
            fence_async_shared()
        barrier()
    l += added
    if S.shifted:
        z += shift
    for c in gl.static_range(gl.constexpr(C.tile // 16)):
        planes = unpack_values(words, S)
        if c + 1 < C.tile // 16:
            words = codes.slice(c * 16 + 16, 16, dim=0).permute([1, 0]).load(la)
        w = right_operand(weights.slice(c * 16, 16, dim=0), o[0], C.wgmma_values)
        products = ()
        for j in gl.static_range(N):
            products = products + (product(planes[j], w, o[j], C.wgmma_values),)
        o = wait(N, products, C.wgmma_values)  # those of the tokens before: their registers are free
    o = wait(0, o, C.wgmma_values)
    return m, l, z, o


@gluon.jit
def _whole(m, l, z, o, C: gl.constexpr):
    """The state of an item's rows as partial results have it: m and l [1, R, 1], and values; of one head."""
    S: gl.constexpr = C.values
    lo: gl.constexpr = sum_layout(S, C)
    rows: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, lo))
    N: gl.constexpr = S.codes_per_word
    last = o[N - 1]  # of int4 and int2 over the whole second byte
    for j in gl.static_range(gl.constexpr(N - S.per_byte), N - 1):
        last -= o[j]
    scaled = ()
    for j in gl.static_range(N - 1):
        scaled = scaled + (o[j] * post_scale_of(S, j),)
    scaled = scaled + (last * post_scale_of(S, N - 1),)
    value = gl.convert_layout(stack(scaled, N), lo, assert_trivial=True)
    if S.shifted:
        value += gl.convert_layout(gl.sum(gl.sum(z, axis=1), axis=0), rows)[None, :, None]
    top = gl.convert_layout(m, rows)[None, :, None]
    total = gl.convert_layout(gl.sum(gl.sum(l, axis=1), axis=0), rows)[None, :, None]
    return ((top, total, (value,)),)


@gluon.jit
def decode_latents(call: Call, C: gl.constexpr):
    """One program's share of the work: work item after work item, from where its share begins to where it ends."""
    KS: gl.constexpr = C.keys
    VS: gl.constexpr = C.values
    mma: gl.constexpr = latent_scores_layout(C)
    R: gl.constexpr = C.padded_rows
    v_dim: gl.constexpr = VS.padded * VS.codes_per_word
    k_rings = make_rings(KS, C)
    v_rings = make_rings(VS, C)
    k_queries = make_queries(KS, C)
    v_queries = make_queries(VS, C)
    weights = gl.allocate_shared_memory(gl.float16, [1, C.tile, R], operand_layout(R, 16, C.wgmma_values))
    tops = gl.allocate_shared_memory(gl.int32, [C.warps], gl.SwizzledSharedLayout(1, 1, 1, [0]))
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
        rotary = load_rows(call, b, h, v_dim, KS, C)
        latent = load_rows(call, b, h, 0, VS, C)
        for i in range(C.stages - 1):
            page = fetch(k_rings, v_rings, i, k_at, v_at, t_begin + i, page, t_end, lo, hi, hi, C)
        first_program = program_at(start, programs, total)
        last_program = program_at(start + cost - 1, programs, total)

        if C.rotate:
            rotary = rotate_rows(rotary, KS, C)
        if C.softcap:
            post_scale = call.sm_scale / call.softcap
        else:
            post_scale = call.sm_scale * 1.4426950408889634
        k_scale = post_scale
        v_scale = post_scale
        if KS.scale == "tensor":
            k_scale = k_scale * gl.load(call.k.scales).to(gl.float32)
        if VS.scale == "tensor":
            v_scale = v_scale * gl.load(call.v.scales).to(gl.float32)
        k_sums, k_down = store_query(k_queries.index(0), rotary, KS, C)
        v_sums, v_down = store_query(v_queries.index(0), latent, VS, C)
        if C.wgmma:
            fence_async_shared()
        k_query = k_sums, k_down * k_scale
        v_query = v_sums, v_down * v_scale
        r = gl.arange(0, R, layout=gl.SliceLayout(0, mma))[None, :]
        position = first + r % C.queries
        slopes = gl.full([1, R], 0.0, gl.float32, mma)
        if C.alibi:
            slopes = gl.load(first_slope(call, h, C) + r // C.queries, mask=r < C.rows, other=0.0) * 1.4426950408889634
        t = gl.arange(0, C.tile, layout=gl.SliceLayout(1, mma))[:, None]
        # Within [lo_all, hi_all) every query sees every key.
        lo_all = lo
        if C.window:
            lo_all = gl.maximum(lo, first + (C.queries - call.window))
        hi_all = gl.minimum(hi, gl.minimum(limit, first + 1))

        m = gl.full([R], -3.0e38, gl.float32, gl.SliceLayout(0, mma))
        zero = gl.full([VS.padded, R], 0.0, gl.float32, latent_layout(C))
        l = _by_lanes(gl.full([C.tile, R], 0.0, gl.float32, mma), C)
        z = l
        o = ()
        for j in gl.static_range(gl.constexpr(VS.codes_per_word)):
            o = o + (zero,)
        slot = 0
        for tile in range(t_begin, t_end):
            async_copy.wait_group(C.stages - 2)
            barrier()
            free = gl.where(slot == 0, C.stages - 1, slot - 1)
            page = fetch(k_rings, v_rings, free, k_at, v_at, tile + (C.stages - 1), page, t_end, lo, hi, hi, C)
            z0 = _zero()
            k_dots = dots(k_queries.index(z0), k_rings, slot, k_sums, KS, C)
            done = wait(0, k_dots + dots(v_queries.index(z0), v_rings, slot, v_sums, VS, C), C.wgmma)
            s = scores(done, k_rings, slot, k_query, KS, C)
            s += scores(done[gl.constexpr(chains(KS, C)) :], v_rings, slot, v_query, VS, C)
            token = tile * C.tile + t
            s = adjust(s, token, position, slopes, call.softcap, C)
            there = (token >= lo) & (token < hi)
            if (tile * C.tile < lo_all) | (tile * C.tile + C.tile > hi_all):
                visible = there & (token <= position) & (token < limit)
                if C.window:
                    visible = visible & (token > position - call.window)
                s = gl.where(visible, s, float("-inf"))
            m, l, z, o = _accumulate(weights.index(z0), tops, v_rings, slot, s, there, (m, l, z, o), VS, C)
            slot = gl.where(slot == C.stages - 1, 0, slot + 1)
        async_copy.wait_group(0)
        o = wait(0, o, C.wgmma_values)

        item = b * call.heads + h
        merged = _whole(m, l, z, o, C)
        whole = (begin == 0) & (end == cost)
        if not whole:
            write_partial(call.results.partial, partial_slot(program, begin == 0), merged, VS, C)
            whole, merged = add_partials(call, item, call.batch * call.heads, first_program, last_program, VS, C)
        if whole:
            write_rows(call, b, item, h, merged, VS, C)
        x, b, h, start = next_work_item(b, h, start, cost, end, call.heads)
        barrier()  # the next item's queries and first requests must not overtake a warp that still reads this one's
