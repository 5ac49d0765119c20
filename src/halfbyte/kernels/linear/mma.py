"""GEMMs with quantized weights for M up to 16, in Gluon: the weight is read once, as it is stored.

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
"""

# ruff: noqa: RUF005
# Triton compiles a part of Python: tuples are joined with `+`, and a branch on a constant is an `if`.

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.common.compat import barrier, view
from halfbyte.kernels.common.launch import Launch
from halfbyte.kernels.common.shares import quotient
from halfbyte.kernels.linear.async_copy import fetch_codes, fetch_scales, fetch_x, make_pool, weight_at
from halfbyte.kernels.linear.multiply import multiply
from halfbyte.kernels.linear.operands import mma_layout, plain, selectors
from halfbyte.kernels.linear.results import Around, finish, output_layout, row_squares
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
from halfbyte.plans.linear import shares
from halfbyte.plans.linear_spec import LinearPlan


@gluon.constexpr_function
def _loads_in_flight(C):
    """Of partial results, as far as registers go."""
    return max(1, min(4, 64 * 32 * C.warps // C.partial_floats))


@gluon.jit
def sum_partials(Partials, at, first, last, own, v, C: gl.constexpr):
    """The partial results of programs first..last added in that order, several loads in flight; `v` is that of program `own`."""
    together: gl.constexpr = _loads_in_flight(C)
    there = (at >= 0) & (first != own)
    total = gl.load(Partials + (2 * first + 1).to(gl.int64) * C.partial_floats + at, mask=there, other=0.0, cache_modifier=".cg")
    total = gl.where(first == own, v, total)
    for begin in range(first + 1, last + 1, together):
        parts = ()
        for y in gl.static_range(together):
            there = (at >= 0) & (begin + y <= last) & (begin + y != own)
            base = Partials + (2 * (begin + y)).to(gl.int64) * C.partial_floats
            parts = parts + (gl.load(base + at, mask=there, other=0.0, cache_modifier=".cg"),)
        for y in gl.static_range(together):
            total += gl.where(begin + y == own, v, parts[y])
    return total


@gluon.jit
def _next(position, tile, step, at, work, weights, K, S: gl.constexpr, C: gl.constexpr):
    """One step further in a program's work: the position in it, the tile, the step of the tile, and where that lies.

    work: steps of a tile, steps in tiles that are shared, and the first tile of its own.
    """
    steps, shared, own = work
    position += 1
    step += 1
    if (step == steps) | (position == shared):
        step = 0
        tile = gl.where(position == shared, own, tile + 1)
        at = weight_at(tile, 0, weights, K, S, C)
    return position, tile, step, at


@gluon.jit
def _program_at(x, each, more):
    """The program whose part of the shared tiles holds step x: the first `more` have each + 1 steps, the others each."""
    large = quotient(x, each + 1)
    small = more + quotient(gl.maximum(x - more * (each + 1), 0), gl.maximum(each, 1))
    return gl.where(x < more * (each + 1), large, small)


@gluon.jit
def tile_sums(acc, pool, red, slot, layout: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """The sums [tile, rows] of a tile: those of its K slices, added in their order through `red` or the slot that was read last."""
    sums_shape: gl.constexpr = [C.k_slices, C.tile, C.sums]
    if C.separate_reduce_smem:
        sums = red
    else:
        barrier()  # no warp reads this slot's codes any more
        ratio: gl.constexpr = gl.constexpr(S.slot_bytes(C) // (4 * C.k_slices * C.partial_floats))
        sums = view(pool, slot * ratio, gl.float32, sums_shape, plain(3))
    if S.groups_per_mma(C) > 1:
        sums.store(gl.sum(gl.reshape(acc, [C.k_slices, C.tile, C.block_m // C.x_rows, C.x_rows]), axis=2))
    else:
        sums.store(acc)
    barrier()
    v = gl.sum(sums.load(layout), axis=0)
    if not C.separate_reduce_smem:
        barrier()  # no warp reads these sums any more: codes may come into the slot
    return v


@gluon.jit
def keep_partial(v, tile, steps, begin, program, each, more, Partials, Semaphores, C: gl.constexpr):
    """Write a program's part of a split tile: where its numbers lie in a partial result, the first and the last program that
    share the tile, and how many of them have arrived before."""
    n = gl.arange(0, C.tile, layout=gl.SliceLayout(1, v.type.layout))[:, None]
    offsets = n * C.sums + gl.arange(0, C.sums, layout=gl.SliceLayout(0, v.type.layout))[None, :]
    mine = 2 * program + (begin == 0).to(gl.int32)
    gl.store(Partials + mine.to(gl.int64) * C.partial_floats + offsets, v, cache_modifier=".cg")
    first = _program_at(tile * steps, each, more)
    last = _program_at(tile * steps + (steps - 1), each, more)
    barrier()
    arrived = gl.atomic_add(Semaphores + tile, 1, sem="acq_rel", scope="gpu")
    return offsets, first, last, arrived


@gluon.jit
def _number_at(v, program, M, Numbers, C: gl.constexpr):
    """Where a program's part of a tile's sums goes, and which of them lie within M."""
    n = gl.arange(0, C.tile, layout=gl.SliceLayout(1, v.type.layout))[:, None]
    m = gl.arange(0, C.sums, layout=gl.SliceLayout(0, v.type.layout))[None, :]
    return Numbers + ((program * C.tile + n) * C.x_rows + m), (m < M) & (n >= 0)


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
    if C.ending is not None and C.ending.norm != "":
        prefetch(around.weight + (tile * C.tile + 0 * i))


@gluon.jit
def _publish(v, program, M, Numbers, C: gl.constexpr):
    """Hand a part of a tile's sums to the program that began the tile. A NaN of ones only becomes another.

    Added to 0, once: a thread that holds a copy of a sum must not write it when the owner has cleared it.
    """
    at, there = _number_at(v, program, M, Numbers, C)
    word = ~v.to(gl.int32, bitcast=True)
    gl.atomic_add(at, gl.where(word == 0, 1, word), mask=there, sem="relaxed", scope="gpu")


@gluon.jit
def _add_published(v, first, last, M, Numbers, C: gl.constexpr):
    """v plus what programs first..last publish, in that order."""
    for other in range(first, last + 1):
        at, there = _number_at(v, other, M, Numbers, C)
        v += gl.inline_asm_elementwise(
            "{ .reg .pred p, q; .reg .b32 w; setp.ne.u32 p, $2, 0; mov.b32 w, -1; again: @p ld.relaxed.gpu.global.b32 w, [$1]; "
            "setp.eq.u32 q, w, 0; @q bra again; not.b32 $0, w; }",
            "=r,l,r,~{memory}",
            [at.to(gl.int64), there.to(gl.int32)],
            dtype=gl.float32,
            is_pure=False,
            pack=1,
        )
        barrier()  # all that hold the same sum have read it
        gl.store(at, 0, mask=there)
    return v


@gluon.jit(do_not_specialize=["M", "whole", "split_tiles", "each", "more"])
def linear(
    X,  # [M, K], strides x_row and 1
    Partials,  # fp32 workspace: two partial results a program; nothing where owners reduce
    Semaphores,  # int32, zero before and after: one a split tile; where owners reduce numbers [programs, tile, x_rows]
    M,
    K,
    x_stride,
    weights: Weights,
    whole,  # tiles that each program computes alone
    split_tiles,  # tiles that all programs share
    each,  # steps of those for each program
    more,  # programs that take one step more
    around: Around,  # what `C.ending` needs; None without one
    C: gl.constexpr,
):
    """One program's part of the split tiles, then its own tiles."""
    S: gl.constexpr = C.weights[0]
    mma: gl.constexpr = mma_layout(C)
    pool = make_pool(C)
    red = pool
    if C.separate_reduce_smem:
        red = gl.allocate_shared_memory(gl.float32, [C.k_slices, C.tile, C.sums], plain(3))
    steps = (K + C.step - 1) // C.step
    program = gl.program_id(0)
    if C.owner_reduces:  # programs are started in order: this one waits for those before it only
        program = gl.num_programs(0) - 1 - program
    shared = each + (program < more).to(gl.int32)
    own = split_tiles + program * whole
    end = shared + whole * steps
    x = program * each + gl.minimum(program, more)
    tile = own
    step = program * 0
    if shared > 0:
        tile = quotient(x, steps)
        step = x - tile * steps
    begin = step
    if S.groups > 0:
        make_barriers(C)
    # The weights first, ahead of the wait for the kernel before: that may write x, but not a weight.
    work = (steps, shared, own)
    at = weight_at(tile, step, weights, K, S, C)
    ahead = program * 0
    ahead_tile = tile
    ahead_step = step
    for i in gl.static_range(gl.constexpr(C.stages - 1)):
        at = fetch_codes(i, at, ahead_step, i < end, K, S, C)
        if S.groups > 0:
            if i == 0:
                barrier()  # all see the barriers of scales
            at = fetch_scales(i, at, ahead_step, i < end, K, S, C)
        commit()
        ahead, ahead_tile, ahead_step, at = _next(ahead, ahead_tile, ahead_step, at, work, weights, K, S, C)
    if S.kind == "table":
        make_codebook(pool, S, C)
    select = ()
    if S.groups_per_mma(C) > 1:
        select = selectors(S, C)
    _prefetch_last(program, tile, shared, Semaphores, around, C)
    if C.x_rows <= 4:  # measured: with more rows the block had better meet behind the wait
        check_addresses(pool, S, C)
    if C.use_pdl:
        gdc_wait()
        gdc_launch_dependents()
    x_step = step
    for i in gl.static_range(gl.constexpr(C.stages - 1)):
        fetch_x(i, x_step, i < end, X, M, K, x_stride, C)
        commit()
        x_step = gl.where((x_step + 1 == steps) | (i + 1 == shared), 0, x_step + 1)
    squares = row_squares(around, M, C)
    if C.x_rows > 4:
        check_addresses(pool, S, C)
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
        fetch_x(free, ahead_step, ahead < end, X, M, K, x_stride, C)
        commit()
        ahead, ahead_tile, ahead_step, at = _next(ahead, ahead_tile, ahead_step, at, work, weights, K, S, C)
        if S.groups > 0:
            await_scales(turn, C)
        acc = multiply(acc, pool, slot, slot_of(turn, C), select, S, C)
        step += 1
        if (step == steps) | (now + 1 == shared):
            v = tile_sums(acc, pool, red, slot, output_layout(C), S, C)
            if C.owner_reduces:
                if begin > 0:
                    _publish(v, program, M, Semaphores, C)
                else:
                    if step < steps:
                        last = _program_at(tile * steps + (steps - 1), each, more)
                        v = _add_published(v, program + 1, last, M, Semaphores, C)
                    finish(v, tile, M, K, weights, around, squares, S, C)
            elif (begin == 0) & (step == steps):
                finish(v, tile, M, K, weights, around, squares, S, C)
            else:
                offsets, first, last, arrived = keep_partial(v, tile, steps, begin, program, each, more, Partials, Semaphores, C)
                if arrived == last - first:
                    gl.store(Semaphores + tile, 0)
                    v = sum_partials(Partials, offsets, first, last, program, v, C)
                    finish(v, tile, M, K, weights, around, squares, S, C)
            acc = gl.full([C.k_slices, C.tile, C.block_m], 0.0, gl.float32, mma)
            begin = 0
            step = 0
            tile = gl.where(now + 1 == shared, own, tile + 1)
        slot = gl.where(slot == C.stages - 1, 0, slot + 1)
        turn = after(turn, C)
        ahead_turn = after(ahead_turn, C)
    meet(turn, 0, C)


# ------------------------------------------------------------------------------------------------------------- host code


def _sizes(x: torch.Tensor) -> tuple[int, int, int]:
    """M, K, and the row stride of x."""
    m, k = x.shape
    return m, k, k if m == 1 else x.stride(0)


def _partition(plan: LinearPlan) -> tuple[int, int, int, int]:
    """Which part of the work each program takes."""
    return shares(plan.tiles, plan.steps, plan.programs)


def launches(
    x: torch.Tensor,
    weights: Weights,
    plan: LinearPlan,
    partials: torch.Tensor,
    semaphores: torch.Tensor,
    around: Around | None = None,
) -> list[Launch]:
    """The launch of a plan.

    x [M, K], its row stride a multiple of 16; weights of one format, biases all or none and of one type. With
    spec.use_pdl weights are read before the previous kernel has ended (programmatic dependent launch).
    partials: plan.floats fp32; semaphores: plan.counters int32, zero before and after.
    around: tensors of spec.ending; with an activation, weights are gate and up, and their results one tensor.
    """
    spec, arguments = plan.spec, (x, partials, semaphores, *_sizes(x), weights, *_partition(plan), around, plan.spec)
    options = {"num_warps": spec.warps, "launch_pdl": spec.use_pdl, "maxnreg": 255}
    return [Launch(linear, (plan.programs,), arguments, options)]
