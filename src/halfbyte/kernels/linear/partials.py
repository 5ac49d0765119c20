"""The linear kernel for small M: the sums of a tile, which a program has computed alone or several have computed parts of."""

# ruff: noqa: RUF005
# Triton compiles a part of Python: tuples are joined with `+`.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.common.compat import barrier, view
from halfbyte.kernels.common.shares import quotient
from halfbyte.kernels.linear.experts_table import block_at
from halfbyte.kernels.linear.operands import plain
from halfbyte.kernels.linear.results import finish, write_pairs


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


@gluon.jit
def end_tile(v, part, M, K, workspace, weights, around, squares, S: gl.constexpr, C: gl.constexpr):
    """The sums of a program's part of a tile to where they go.

    part: the tile, the steps of it that the program has computed, from `begin` to `step`, how many it has, the program, and how
    many steps of tiles that are shared each program has, the first `more` one more. workspace: Partials, Semaphores.
    """
    tile, begin, step, steps, program, each, more = part
    Partials, Semaphores = workspace
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


@gluon.jit
def end_routed_tile(v, part, tiles, workspace, weights, S: gl.constexpr, C: gl.constexpr):
    """`end_tile` of a stack of experts, of so many tiles."""
    tile, begin, step, steps, program, each, more = part
    Partials, Semaphores = workspace
    whole_tile = (begin == 0) & (step == steps)
    if not whole_tile:
        offsets, first, last, arrived = keep_partial(v, tile, steps, begin, program, each, more, Partials, Semaphores, C)
        whole_tile = arrived == last - first
        if whole_tile:
            gl.store(Semaphores + tile, 0)
            v = sum_partials(Partials, offsets, first, last, program, v, C)
    if whole_tile:
        write_pairs(v, block_at(tile, tiles, weights, C), weights, S, C)
