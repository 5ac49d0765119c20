"""`experts_linear` for decoding, in Gluon: the kernel for small M of linear/mma.py on those experts of a stack that are hit.

    y[p, n] = sum_k x[row(p), k] W[e(p), n, k] + bias[e(p), n]      for each pair p = (token, i) of a token and its i-th expert e(p)

then, with an activation, columns 2n and 2n + 1 are a gate and its up projection and become one number; then, with gates, a second
launch adds the pairs of a token (linear/experts_sum.py).

Only the device knows which experts are hit. Each program sorts the pairs by expert (linear/experts_table.py) and cuts those of
each expert into *blocks* of at most `x_rows`. Every block has the tiles of N, and all tiles are divided as linear/mma.py divides
them: with few hits along K, with many tile by tile. So an expert's weight is read once for each of its blocks. Rings, waits and
products are those of linear/mma.py; x is gathered row by row from where the sorted pairs say.

A program writes a tile that it computed alone at once and waits for nothing: with gates to rows of the workspace, in fp32. No
floating-point atomics. A pair whose id is no expert gets zeros and counts nothing in sums.
"""

# ruff: noqa: RUF005
# Triton compiles a part of Python: tuples are joined with `+`.

from __future__ import annotations

from collections.abc import Sequence

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.common.launch import Launch
from halfbyte.kernels.common.scales import to_float
from halfbyte.kernels.common.shares import quotient
from halfbyte.kernels.linear.async_copy import fetch_codes, fetch_rows, fetch_scales, make_pool, rows_at
from halfbyte.kernels.linear.experts_sum import sum_of_pairs
from halfbyte.kernels.linear.experts_table import block_at, entry, sort_pairs
from halfbyte.kernels.linear.mma import keep_partial, sum_partials, tile_sums
from halfbyte.kernels.linear.multiply import multiply
from halfbyte.kernels.linear.operands import mma_layout, plain, selectors
from halfbyte.kernels.linear.ring import Weights
from halfbyte.kernels.linear.sync import (
    after,
    await_free,
    await_scales,
    check_addresses,
    commit,
    make_barriers,
    meet,
    prefetch,
    slot_of,
)
from halfbyte.kernels.linear.unpack import make_codebook
from halfbyte.plans.experts_mma import ExpertsPlan
from halfbyte.reference.experts import ExpertsCall

# ----------------------------------------------------------------------------------------------------------------- the division


@gluon.jit
def _shares(tiles, steps, C: gl.constexpr):
    """How the programs divide tiles of so many steps: see `halfbyte.plans.linear.shares`.

    Whole tiles, each program as many, if a split saves no program more than `steps_of_a_split`. Otherwise the fewest programs that
    have as many steps each as if all took part. The first `more` programs take `unit` steps more.
    """
    most = gl.num_programs(0)
    total = tiles * steps
    rounds = gl.maximum(quotient(tiles + most - 1, most), 1)
    even = gl.maximum(quotient(total + most - 1, most), 1)
    alone = rounds * steps <= even + C.steps_of_a_split
    programs = gl.where(alone, quotient(tiles + rounds - 1, rounds), quotient(total + even - 1, even))
    programs = gl.maximum(programs, 1)
    whole = quotient(tiles, programs)
    split = tiles - whole * programs
    each = gl.where(alone, 0, quotient(split * steps, programs))
    more = gl.where(alone, split, split * steps - each * programs)
    return programs, whole, split, each, more, gl.where(alone, steps, 1)


@gluon.jit
def _next(position, tile, step, at, block, work, weights, K, S: gl.constexpr, C: gl.constexpr):
    """One step further in a program's work, as in linear/mma.py; block: where the pairs of the tile begin, and how many."""
    steps, shared, own, tiles = work
    position += 1
    step += 1
    if (step == steps) | (position == shared):
        step = 0
        tile = gl.where(position == shared, own, tile + 1)
        at, block = _weight_at(tile, 0, tiles, weights, K, S, C)
    return position, tile, step, at, block


@gluon.jit
def _weight_at(tile, step, tiles, weights, K, S: gl.constexpr, C: gl.constexpr):
    """Where a thread's pieces of a step lie and how many rows of the expert are left; the block of pairs."""
    N = weights.features[0]
    expert, n0, first, count = block_at(tile, tiles, weights, C)
    zeros = weights.codes[0] if weights.zeros[0] is None else weights.zeros[0]
    row = expert.to(gl.int64) * N + n0
    if weights.biases[0] is not None:  # into L2, ahead of the tile's end
        i = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [C.warps], [0]))
        prefetch(weights.biases[0] + gl.where(tiles > 0, row + gl.minimum(i % gl.constexpr(C.tile // 8) * 8, N - 1 - n0), 0))
    codes, scales, zeros = rows_at(weights.codes[0], weights.scales[0], zeros, row, step, K, S, C)
    return (codes, scales, zeros, N - n0), (first, count)


# --------------------------------------------------------------------------------------------------------- what sums turn into


@gluon.constexpr_function
def _output_layout(C):
    """[k_slices, tile, rows]: a thread holds the sums of all K slices, and of both halves of an activation."""
    across = min(C.sums, 32)
    return gl.BlockedLayout([C.k_slices, C.halves, 1], [1, 32 // across, across], [1, C.warps, 1], [2, 1, 0])


@gluon.jit
def activated(y, C: gl.constexpr):
    """[n, M] -> [n / 2, M], see `Activation`; as it is without one."""
    if C.activation is not None:
        A: gl.constexpr = C.activation
        gate, up = gl.split(gl.permute(gl.reshape(y, [y.shape[0] // 2, 2, y.shape[1]]), [0, 2, 1]))
        if A.limit < float("inf"):
            # Comparisons, which let NaN through.
            gate = gl.where(gate > A.limit, A.limit, gate)
            up = gl.where(up > A.limit, A.limit, gl.where(up < -A.limit, -A.limit, up))
        if A.kind == "silu":
            gate = gate / (1.0 + gl.exp(-A.alpha * gate))
        elif A.kind == "gelu_tanh":
            gate = gate / (1.0 + gl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
        else:
            gate = gate * 0.5 * (1.0 + gl.erf(gate * 0.7071067811865476))
        y = gate * (up + A.shift)
    return y


@gluon.jit
def results(v, expert, n0, weights, S: gl.constexpr, C: gl.constexpr):
    """The sums [tile, rows] of a tile with what is left of the scales, and the bias."""
    N = weights.features[0]
    n = n0 + gl.arange(0, C.tile, layout=gl.SliceLayout(1, v.type.layout))[:, None]
    row = expert.to(gl.int64) * N + n
    if S.groups == 0:
        v = v * to_float(gl.load(weights.scales[0] + row, mask=n < N, other=0.0), S)
    v = v * (1.0 / S.unit(C.dtype))
    if S.factor:
        v = v * gl.load(weights.factors[0] + row, mask=n < N, other=0.0)
    if weights.biases[0] is not None:
        v = v + gl.load(weights.biases[0] + row, mask=n < N, other=0.0).to(gl.float32)
    return v


@gluon.jit
def _write_pairs(v, n0, block, weights, C: gl.constexpr):
    """Results [tile, rows] to the rows of out that belong to the block's pairs."""
    first, count = block
    width = weights.features[0] // C.halves
    v = activated(v, C)
    m = gl.arange(0, C.sums, layout=gl.SliceLayout(0, v.type.layout))[None, :]
    pair = entry(C.order_at, first + gl.minimum(m, count - 1)) & 1023
    n = n0 // C.halves + gl.arange(0, C.tile // C.halves, layout=gl.SliceLayout(1, v.type.layout))[:, None]
    out = weights.outs[0] + (pair.to(gl.int64) * width + n)
    gl.store(out, v.to(weights.outs[0].dtype.element_ty), mask=(m < count) & (n < width))


@gluon.jit
def _zeros(row, weights, C: gl.constexpr):
    """Zeros to a row of out."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [C.warps], [0])
    width = weights.features[0] // C.halves
    for begin in range(0, width, 256 * C.warps):
        n = begin + gl.arange(0, 256 * C.warps, layout=layout)
        zero = gl.full([256 * C.warps], 0.0, weights.outs[0].dtype.element_ty, layout)
        gl.store(weights.outs[0] + (row.to(gl.int64) * width + n), zero, mask=n < width)


# ----------------------------------------------------------------------------------------------------------------- the kernel


@gluon.jit(do_not_specialize=["T", "E"])
def experts(
    X,  # [T, K] or [T * top_k, K], strides x_stride and 1
    ids,  # [T * top_k]
    Partials,  # fp32 workspace: two partial results a program
    Semaphores,  # int32, one a program, zero before and after
    T,
    E,
    K,
    x_stride,
    weights: Weights,  # of one stack: N of its features are an expert
    C: gl.constexpr,
):
    """One program's part of the split tiles, then its own tiles."""
    S: gl.constexpr = C.weights[0]
    mma: gl.constexpr = mma_layout(C)
    pool = make_pool(C)
    red = pool
    if C.separate_reduce_smem:
        red = gl.allocate_shared_memory(gl.float32, [C.k_slices, C.tile, C.sums], plain(3))
    if S.groups > 0:
        make_barriers(C)
    if S.kind == "table":
        make_codebook(pool, S, C)
    select = ()
    if S.groups_per_mma(C) > 1:
        select = selectors(S, C)
    check_addresses(pool, S, C)
    if C.use_pdl and not C.ids_early:  # all addresses depend on the ids, which the kernel before may write
        gdc_wait()
        gdc_launch_dependents()
    program = gl.program_id(0)
    N = weights.features[0]
    blocks, pairs = sort_pairs(ids, T * C.top_k, E, x_stride, pool, C)
    steps = (K + C.step - 1) // C.step
    tiles = blocks * ((N + C.tile - 1) // C.tile)
    programs, whole, split, each, more, unit = _shares(tiles, steps, C)
    shared = each + gl.where(program < more, unit, 0)
    own = split + program * whole
    end = gl.where(program < programs, shared + whole * steps, 0)
    x = program * each + gl.minimum(program, more) * unit
    tile = own
    step = program * 0
    if shared > 0:
        tile = quotient(x, steps)
        step = x - tile * steps
    begin = step
    work = (steps, shared, own, tiles)
    at, block = _weight_at(tile, step, tiles, weights, K, S, C)
    ahead = program * 0
    ahead_tile = tile
    ahead_step = step
    rows = ()
    for i in gl.static_range(gl.constexpr(C.stages - 1)):
        at = fetch_codes(i, at, ahead_step, i < end, K, S, C)
        if S.groups > 0:
            at = fetch_scales(i, at, ahead_step, i < end, K, S, C)
        if C.ids_early:
            rows = rows + ((ahead_step, block),)
        else:
            fetch_rows(i, ahead_step, i < end, X, block, K, C)
        commit()
        ahead, ahead_tile, ahead_step, at, block = _next(ahead, ahead_tile, ahead_step, at, block, work, weights, K, S, C)
    if (shared > 0) & ((begin > 0) | (shared < steps)):  # a split tile's, into L2
        prefetch(Semaphores + (tile + 0 * gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [C.warps], [0]))))
    if C.ids_early:
        if C.use_pdl:
            gdc_wait()
            gdc_launch_dependents()
        for i in gl.static_range(gl.constexpr(C.stages - 1)):
            fetch_rows(i, rows[i][0], i < end, X, rows[i][1], K, C)
            commit()
    for i in range(pairs + program, T * C.top_k, gl.num_programs(0)):
        _zeros(entry(C.order_at, i) & 1023, weights, C)
    acc = gl.full([C.k_slices, C.tile, C.block_m], 0.0, gl.float32, mma)
    slot = 0
    turn = 0
    ahead_turn = C.stages - 1
    for now in range(end):
        meet(turn, C.stages - 2, C)
        free = gl.where(slot == 0, C.stages - 1, slot - 1)
        if S.groups > 0:  # scales come first, as other K slices wait for them
            if C.has_empty_barrier:
                await_free(ahead_turn, C)
            at = fetch_scales(ahead_turn, at, ahead_step, ahead < end, K, S, C)
        at = fetch_codes(free, at, ahead_step, ahead < end, K, S, C)
        fetch_rows(free, ahead_step, ahead < end, X, block, K, C)
        commit()
        ahead, ahead_tile, ahead_step, at, block = _next(ahead, ahead_tile, ahead_step, at, block, work, weights, K, S, C)
        if S.groups > 0:
            await_scales(turn, C)
        acc = multiply(acc, pool, slot, slot_of(turn, C), select, S, C)
        step += 1
        if (step == steps) | (now + 1 == shared):
            v = tile_sums(acc, pool, red, slot, _output_layout(C), S, C)
            whole_tile = (begin == 0) & (step == steps)
            if not whole_tile:
                offsets, first, last, arrived = keep_partial(v, tile, steps, begin, program, each, more, Partials, Semaphores, C)
                whole_tile = arrived == last - first
                if whole_tile:
                    gl.store(Semaphores + tile, 0)
                    v = sum_partials(Partials, offsets, first, last, program, v, C)
            if whole_tile:
                expert, n0, first_pair, count = block_at(tile, tiles, weights, C)
                _write_pairs(results(v, expert, n0, weights, S, C), n0, (first_pair, count), weights, C)
            acc = gl.full([C.k_slices, C.tile, C.block_m], 0.0, gl.float32, mma)
            begin = 0
            step = 0
            tile = gl.where(now + 1 == shared, own, tile + 1)
        slot = gl.where(slot == C.stages - 1, 0, slot + 1)
        turn = after(turn, C)
        ahead_turn = after(ahead_turn, C)
    meet(turn, 0, C)


# ------------------------------------------------------------------------------------------------------------------- host code


def stacked(call: ExpertsCall, rows: torch.Tensor) -> Weights:
    """The stack of a call, whose results go to `rows`, as kernels take it."""
    stack = call.weight
    return Weights(
        *((stack.codes.view(torch.int16),), (stack.scales,), (stack.offsets,), (call.bias,), (stack.tensor_scale,)),
        outs=(rows,),
        features=(stack.shape[1],),
    )


def launches(
    call: ExpertsCall, plan: ExpertsPlan, results: Sequence[torch.Tensor], workspace: Sequence[torch.Tensor]
) -> list[Launch]:
    """The launch of a plan, and with gates that of their sum.

    x [T, K] or [T * top_k, K], less than 2^31 bytes, its row stride a multiple of 16; the rest contiguous, codes, scales and zero
    points aligned to 16 bytes. The result: as `out` of `kernels.linear.experts.launch`. workspace: plan.floats fp32; plan.counters
    int32, zero before and after.
    """
    x, stack, ids, gates, _, _ = call[:6]
    spec, (experts_count, _, width), (out,), (floats, counters) = plan.spec, stack.shape, results, workspace
    rows = out if gates is None else floats[plan.partials :]
    arguments = (x, ids, floats, counters, ids.shape[0], experts_count, width, x.stride(0), stacked(call, rows), spec)
    options = {"num_warps": spec.warps, "launch_pdl": spec.use_pdl, "maxnreg": plan.registers}
    product = Launch(experts, (plan.programs,), arguments, options)
    return [product] if gates is None else [product, sum_of_pairs(rows, ids, gates, out, experts_count, spec.use_pdl)]
