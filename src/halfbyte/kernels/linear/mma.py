"""GEMMs with quantized weights for M up to 16, dense or of experts, in Gluon: a weight is read once, as it is stored.

    y[m, n] = sum_k x[m, k] W[n, k],     W[n, k] = scale[n, g] (code[n, k] - zero[n, g]),  g the group that k lies in

Out features are the M axis of the tensor cores and the batch M their N axis, so that M up to 8 costs one MMA. A *tile* is
`tile` rows of the weight; a *step* of it is a chunk of K for each of `k_slices` warps (or groups of `warps_m` warps, which divide
the rows of the tile). Codes, scales, zero points and x of a step come into rings in shared memory by cp.async, codes and x of a K
slice by its own warps (linear/async_copy.py), which do not wait for the block (linear/sync.py). Codes enter the MMA exactly: a
masked nibble is a number already (linear/operands.py); what it exceeds its value by (128 + 8, say) is a multiple of the sum of x,
which an MMA with ones gives, or at M = 16 is subtracted; the group's scale multiplies fp32 sums of the group. The K slices'
sums of a tile are added at its end, in the order of the slices: there the whole block meets.

Work is the tiles of all weights that are computed together. Each program computes the same number of whole tiles. All share the
tiles that are left: their steps, one after the other, are divided into equal parts, and a program begins with its part. With as
many programs as tiles none are left (data-parallel), with n times as many each tile is split into n (split-K), with as many as the
GPU runs at once a part may begin and end inside a tile (stream-K). What one program computes alone is written at once; otherwise
partial results go to the workspace, and one program adds them up, in the order of the programs: the one that arrives last, or for
few rows (`owner_reduces`) the one that begins the tile. That one waits for the numbers themselves, which costs neither fence nor
semaphore: an fp32 is stored as its complement, and 0 says that it is not there yet.

With routing (`C.table`) the weight is a stack of experts, and only the device knows which of them are hit. For each pair p of a
token and its i-th expert e(p)

    y[p, n] = sum_k x[row(p), k] W[e(p), n, k] + bias[e(p), n]

Each program sorts the pairs by expert (linear/experts_table.py) and cuts those of each expert into *blocks* of at most `x_rows`.
Every block has the tiles of N, and all tiles are divided as above, on the device: with few hits along K, with many tile by tile. So
an expert's weight is read once for each of its blocks; x is gathered row by row from where the sorted pairs say. With gates a
second launch adds the pairs of a token (linear/experts_sum.py), which are fp32 rows of the workspace until then. A pair whose id is
no expert gets zeros and counts nothing in sums.
"""

# ruff: noqa: RET505, RUF005
# Triton compiles a part of Python: tuples are joined with `+`, and a branch on a constant is an `if` with an `else`, also behind a
# return: else Triton 3.6 compiles both.

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.common.compat import barrier
from halfbyte.kernels.common.launch import Launch
from halfbyte.kernels.common.shares import quotient
from halfbyte.kernels.linear.async_copy import fetch_codes, fetch_rows, fetch_scales, fetch_x, make_pool, rows_at, weight_at
from halfbyte.kernels.linear.experts_sum import sum_of_pairs
from halfbyte.kernels.linear.experts_table import block_at, entry, sort_pairs
from halfbyte.kernels.linear.multiply import multiply
from halfbyte.kernels.linear.operands import mma_layout, plain, selectors
from halfbyte.kernels.linear.partials import end_routed_tile, end_tile, tile_sums
from halfbyte.kernels.linear.results import Around, output_layout, row_squares, write_zeros
from halfbyte.kernels.linear.ring import Routed, Weights
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
from halfbyte.plans.gemm_mma import shares
from halfbyte.plans.gemm_plan import GemmPlan


@gluon.jit
def _routed_shares(tiles, steps, C: gl.constexpr):
    """How the programs divide tiles of so many steps: see `halfbyte.plans.gemm_mma.shares`.

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
def _place(tile, step, tiles, weights, K, S: gl.constexpr, C: gl.constexpr):
    """Where a step of a tile lies: a thread's pieces of it and the rows of the weight that are left; and with routing the block of
    pairs, the first of them and how many, else ().
    """
    if C.table is None:
        return weight_at(tile, step, weights, K, S, C), ()
    else:
        return _routed_place(tile, step, tiles, weights, K, S, C)


@gluon.jit
def _routed_place(tile, step, tiles, weights, K, S: gl.constexpr, C: gl.constexpr):
    """`_place` in a stack of experts."""
    N = weights.features[0]
    expert, n0, first, count = block_at(tile, tiles, weights, C)
    zeros = weights.codes[0] if weights.zeros[0] is None else weights.zeros[0]
    row = expert.to(gl.int64) * N + n0
    if weights.biases[0] is not None:  # into L2, ahead of the tile's end
        i = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [C.warps], [0]))
        prefetch(weights.biases[0] + gl.where(tiles > 0, row + gl.minimum(i % gl.constexpr(C.tile // 8) * 8, N - 1 - n0), 0))
    codes, scales, zeros = rows_at(weights.codes[0], weights.scales[0], zeros, row, step, K, S, C)
    return (codes, scales, zeros, N - n0), (first, count)


@gluon.jit
def _next(position, tile, step, at, block, work, weights, K, S: gl.constexpr, C: gl.constexpr):
    """One step further in a program's work: the position in it, the tile, the step of the tile, and where that lies.

    work: steps of a tile, steps in tiles that are shared, the first tile of its own, and with routing how many tiles there are.
    """
    steps, shared, own, tiles = work
    position += 1
    step += 1
    if (step == steps) | (position == shared):
        step = 0
        tile = gl.where(position == shared, own, tile + 1)
        at, block = _place(tile, 0, tiles, weights, K, S, C)
    return position, tile, step, at, block


@gluon.jit
def _fetch_x(slot, step, wanted, X, block, M, K, x_stride, C: gl.constexpr):
    """Ask for x of one step, if `wanted`: all rows, or those of a block of pairs."""
    if C.table is None:
        fetch_x(slot, step, wanted, X, M, K, x_stride, C)
    else:
        fetch_rows(slot, step, wanted, X, block, K, C)


@gluon.jit
def _prefetch_last(program, tile, shared, Semaphores, around, C: gl.constexpr):
    """What a program needs at its end, into L2: since the last launch of this layer the weights of all others went through it."""
    i = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [C.warps], [0]))
    if shared > 0:
        if C.owner_reduces:
            sectors: gl.constexpr = gl.constexpr(C.tile * C.x_rows // 8)  # of 32 bytes
            prefetch(Semaphores + 8 * (program * sectors + gl.arange(0, sectors, layout=i.type.layout)))
        else:
            prefetch(Semaphores + (tile + 0 * i))
    if C.epilogue.norm != "":
        prefetch(around.weight + (tile * C.tile + 0 * i))


@gluon.jit
def _prepare(pool, S: gl.constexpr, C: gl.constexpr):
    """The codebook, and selectors of groups that share an MMA, () without."""
    if S.kind == "table":
        make_codebook(pool, S, C)
    select = ()
    if S.groups_per_mma(C) > 1:
        select = selectors(S, C)
    return select


@gluon.jit
def _wait(C: gl.constexpr):
    """For the kernel before, which may write x and ids, but not a weight."""
    if C.use_pdl:
        gdc_wait()
        gdc_launch_dependents()


@gluon.jit(do_not_specialize=["M", "whole", "split_tiles", "each", "more"])
def linear(
    X,  # [M, K], strides x_row and 1; with routing M tokens, and [M * top_k, K] unless they share rows
    Partials,  # fp32 workspace: two partial results a program; nothing where owners reduce
    Semaphores,  # int32, zero before and after: one a split tile; where owners reduce numbers [programs, tile, x_rows]
    M,
    K,
    x_stride,
    weights: Weights,  # with routing one stack: N of its features are an expert
    whole,  # tiles that each program computes alone; with routing the number of experts, and None in the three that follow
    split_tiles,  # tiles that all programs share
    each,  # steps of those for each program
    more,  # programs that take one step more
    around: Around,  # what `C.epilogue` and routing need; None without them
    C: gl.constexpr,
):
    """One program's part of the split tiles, then its own tiles."""
    S: gl.constexpr = C.weights[0]
    mma: gl.constexpr = mma_layout(C)
    pool = make_pool(C)
    red = pool
    if C.separate_reduce_smem:
        red = gl.allocate_shared_memory(gl.float32, [C.k_slices, C.tile, C.sums], plain(3))
    if C.table is None:
        steps = (K + C.step - 1) // C.step
        program = gl.program_id(0)
        if C.owner_reduces:  # programs are started in order: this one waits for those before it only
            program = gl.num_programs(0) - 1 - program
        shared = each + (program < more).to(gl.int32)
        own = split_tiles + program * whole
        end = shared + whole * steps
        x = program * each + gl.minimum(program, more)
        tiles = 0
    else:
        if S.groups > 0:
            make_barriers(C)
        select = _prepare(pool, S, C)
        check_addresses(pool, S, C)
        if not C.table.ids_early:  # all addresses depend on the ids, which the kernel before may write
            _wait(C)
        program = gl.program_id(0)
        N = weights.features[0]
        blocks, pairs = sort_pairs(around.ids, M * C.table.top_k, whole, x_stride, pool, C)
        steps = (K + C.step - 1) // C.step
        tiles = blocks * ((N + C.tile - 1) // C.tile)
        programs, own_tiles, split, each, more, unit = _routed_shares(tiles, steps, C)
        shared = each + gl.where(program < more, unit, 0)
        own = split + program * own_tiles
        end = gl.where(program < programs, shared + own_tiles * steps, 0)
        x = program * each + gl.minimum(program, more) * unit
    tile = own
    step = program * 0
    if shared > 0:
        tile = quotient(x, steps)
        step = x - tile * steps
    begin = step
    if C.table is None and S.groups > 0:
        make_barriers(C)
    # The weights first, ahead of the wait for the kernel before: that may write x, but not a weight.
    work = (steps, shared, own, tiles)
    at, block = _place(tile, step, tiles, weights, K, S, C)
    ahead = program * 0
    ahead_tile = tile
    ahead_step = step
    rows = ()
    for i in gl.static_range(gl.constexpr(C.stages - 1)):
        at = fetch_codes(i, at, ahead_step, i < end, K, S, C)
        if S.groups > 0:
            if C.table is None and i == 0:
                barrier()  # all see the barriers of scales
            at = fetch_scales(i, at, ahead_step, i < end, K, S, C)
        if C.table is not None and C.table.ids_early:
            rows = rows + ((ahead_step, block),)
        elif C.table is not None:
            fetch_rows(i, ahead_step, i < end, X, block, K, C)
        commit()
        ahead, ahead_tile, ahead_step, at, block = _next(ahead, ahead_tile, ahead_step, at, block, work, weights, K, S, C)
    if C.table is None:
        select = _prepare(pool, S, C)
        _prefetch_last(program, tile, shared, Semaphores, around, C)
        if C.x_rows <= 4:  # measured: with more rows the block had better meet behind the wait
            check_addresses(pool, S, C)
        _wait(C)
        x_step = step
        for i in gl.static_range(gl.constexpr(C.stages - 1)):
            fetch_x(i, x_step, i < end, X, M, K, x_stride, C)
            commit()
            x_step = gl.where((x_step + 1 == steps) | (i + 1 == shared), 0, x_step + 1)
        squares = row_squares(around, M, C)
        if C.x_rows > 4:
            check_addresses(pool, S, C)
    else:
        squares = ()
        if (shared > 0) & ((begin > 0) | (shared < steps)):  # a split tile's, into L2
            prefetch(Semaphores + (tile + 0 * gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [C.warps], [0]))))
        if C.table.ids_early:
            _wait(C)
            for i in gl.static_range(gl.constexpr(C.stages - 1)):
                fetch_rows(i, rows[i][0], i < end, X, rows[i][1], K, C)
                commit()
        for i in range(pairs + program, M * C.table.top_k, gl.num_programs(0)):
            write_zeros(entry(C.order_at, i) & 1023, weights, C)
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
        _fetch_x(free, ahead_step, ahead < end, X, block, M, K, x_stride, C)
        commit()
        ahead, ahead_tile, ahead_step, at, block = _next(ahead, ahead_tile, ahead_step, at, block, work, weights, K, S, C)
        if S.groups > 0:
            await_scales(turn, C)
        acc = multiply(acc, pool, slot, slot_of(turn, C), select, S, C)
        step += 1
        if (step == steps) | (now + 1 == shared):
            v = tile_sums(acc, pool, red, slot, output_layout(C), S, C)
            part = (tile, begin, step, steps, program, each, more)
            if C.table is None:
                end_tile(v, part, M, K, (Partials, Semaphores), weights, around, squares, S, C)
            else:
                end_routed_tile(v, part, tiles, (Partials, Semaphores), weights, S, C)
            acc = gl.full([C.k_slices, C.tile, C.block_m], 0.0, gl.float32, mma)
            begin = 0
            step = 0
            tile = gl.where(now + 1 == shared, own, tile + 1)
        slot = gl.where(slot == C.stages - 1, 0, slot + 1)
        turn = after(turn, C)
        ahead_turn = after(ahead_turn, C)
    meet(turn, 0, C)


# ------------------------------------------------------------------------------------------------------------- host code


def launches(
    x: torch.Tensor,
    weights: Weights,
    plan: GemmPlan,
    floats: torch.Tensor,
    counters: torch.Tensor,
    around: Around | None = None,
    routed: Routed | None = None,
) -> list[Launch]:
    """The launch of a plan, and with gates that of their sum.

    x [M, K], its row stride a multiple of 16; weights of one format, biases all or none and of one type. With
    spec.use_pdl weights are read before the previous kernel has ended (programmatic dependent launch).
    floats: plan.floats fp32; counters: plan.counters int32, zero before and after.
    around: tensors of spec.epilogue; with an activation, weights are gate and up, and their results one tensor.
    routed: with routing; weights are one stack then (`ring.stack_of`), and x, less than 2^31 bytes, has a row a token or a pair.
    """
    spec, (m, k) = plan.spec, x.shape
    options = {"num_warps": spec.warps, "launch_pdl": spec.use_pdl, "maxnreg": plan.registers}
    if routed is None:
        partition = shares(plan.tiles, plan.steps, plan.programs)
        arguments = (x, floats, counters, m, k, k if m == 1 else x.stride(0), weights, *partition, around, spec)
        return [Launch(linear, (plan.programs,), arguments, options)]
    ids, gates, experts, (out,) = *routed, weights.outs
    rows = out if gates is None else floats[plan.partials :]
    stack, partition = weights._replace(outs=(rows,)), (experts, None, None, None)
    arguments = (x, floats, counters, len(ids), k, x.stride(0), stack, *partition, Around(ids=ids), spec)
    product = Launch(linear, (plan.programs,), arguments, options)
    return [product] if gates is None else [product, sum_of_pairs(rows, ids, gates, out, experts, spec.use_pdl)]
