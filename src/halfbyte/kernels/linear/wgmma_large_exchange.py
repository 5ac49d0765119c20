"""GEMMs with large M: the sums of a tile to y, or those of parts of K exchanged by the programs that share the tile.

Each of them adds up some columns of the tile, in the order of the parts: it stores its part of the other columns, and waits until
all have. Programs of a tile are neighbors and start together, so none waits for one that has not been started.
"""

# ruff: noqa: RET505
# Triton compiles a part of Python: an `else` after a return is how a branch is left out of what it compiles.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.common.compat import barrier
from halfbyte.kernels.linear.operands import halves
from halfbyte.kernels.linear.results import activated, routed_results, row_layout, write_tile
from halfbyte.kernels.linear.ring import place


@gluon.jit
def columns_of(v, C: gl.constexpr):
    """Sums [tile, block_m] in fp32 as two or four tensors of C.sums columns."""
    v = v.to(gl.float32)
    if C.block_m == C.sums:
        return (v,)
    elif C.block_m == 2 * C.sums:
        return halves(gl.permute(gl.reshape(v, [C.tile, 2, C.sums]), [0, 2, 1]), 1)
    else:
        return halves(gl.permute(gl.reshape(v, [C.tile, 2, 2, C.sums]), [0, 3, 1, 2]), 2)


@gluon.jit
def write_columns(v, tile, first_row, M, weights, Tokens, S: gl.constexpr, C: gl.constexpr):
    """Sums [tile, C.sums] to y, from `first_row` on. Those of integers have per-channel and per-token scales."""
    if C.x_bits == 8:
        _, _, _, _, scales, _, N, n0 = place(tile, weights, C)
        n = n0 + gl.arange(0, C.tile, layout=gl.SliceLayout(1, v.type.layout))
        m = first_row + gl.arange(0, C.sums, layout=gl.SliceLayout(0, v.type.layout))
        v = v * gl.load(scales + n, mask=n < N, other=0.0)[:, None] * gl.load(Tokens + m, mask=m < M, other=0.0)[None, :]
    unit: gl.constexpr = S.unit(C.dtype) / C.unit
    write_tile(v * unit, tile, first_row, M, weights, S, C)


@gluon.jit
def write_sorted(v, at, column, weights, S: gl.constexpr, C: gl.constexpr):
    """Sums [tile, C.sums] of a tile, from a column on, to its pairs' rows of y."""
    expert, n0, first, end = at
    out = weights.outs[0]
    half: gl.constexpr = out.dtype.element_ty
    unit: gl.constexpr = S.unit(C.dtype) / C.unit
    v = routed_results(v * unit, expert, n0, weights, S, C).to(half)
    v = gl.convert_layout(v, row_layout(C))
    v = activated(v.to(gl.float32), C).to(half)
    n = n0 // C.epilogue.halves + gl.arange(0, C.tile // C.epilogue.halves, layout=gl.SliceLayout(1, v.type.layout))[:, None]
    m = first + column + gl.arange(0, C.sums, layout=gl.SliceLayout(0, v.type.layout))[None, :]
    width = weights.features[0] // C.epilogue.halves
    gl.store(out + (m.to(gl.int64) * width + n), v, mask=(m < end) & (n < width))


@gluon.jit
def _flat(v, C: gl.constexpr):
    """Sums [tile, C.sums] in a row: four numbers that a thread holds, then those of the next."""
    v = gl.reshape(v, [C.tile // 16, 2, 8, C.sums // 8, 4, 2])
    return gl.reshape(gl.permute(v, [3, 0, 2, 4, 1, 5]), [C.tile * C.sums])


@gluon.jit
def _unflat(v, layout: gl.constexpr, C: gl.constexpr):
    v = gl.permute(gl.reshape(v, [C.sums // 8, C.tile // 16, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    return gl.convert_layout(gl.reshape(v, [C.tile, C.sums]), layout, assert_trivial=True)


_AWAIT_PARTS = gl.constexpr(
    "{ .reg .b32 n; .reg .pred q; again: ld.acquire.gpu.global.b32 n, [$1]; and.b32 n, n, 0xFFFF; setp.lt.u32 q, n, $2; "
    "@q bra again; } // $0"
)


@gluon.jit
def exchange(sums, position, tile, block, work, Partials, Semaphores, M, weights, Tokens, S: gl.constexpr, C: gl.constexpr):
    """A part of a tile's sums to the programs that add them up, and the columns that this one adds up to y.

    The low half of a tile's semaphore counts programs that have stored what others need, the high half those that need nothing
    more; the last one clears it.
    """
    parts = work[5]
    program = gl.program_id(0)
    part = program - position * parts
    layout: gl.constexpr = sums[0].type.layout
    columns: gl.constexpr = gl.constexpr(C.block_m // C.sums)
    of_column: gl.constexpr = C.tile * C.sums
    offsets = gl.arange(0, of_column, layout=_flat(sums[0], C).type.layout)
    for i in gl.static_range(columns):
        if i * parts // columns != part:
            own = Partials + (program.to(gl.int64) * C.partial_floats + i * of_column)
            gl.store(own + offsets, _flat(sums[i], C), cache_modifier=".cg")
    barrier()
    gl.atomic_add(Semaphores + position, 1, sem="acq_rel", scope="gpu")
    gl.inline_asm_elementwise(
        _AWAIT_PARTS,
        "=r,l,r,~{memory}",
        [(Semaphores + position).to(gl.int64), parts],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    first = position * parts
    for i in gl.static_range(columns):
        if i * parts // columns == part:
            mine = _flat(sums[i], C)
            base = Partials + (first.to(gl.int64) * C.partial_floats + i * of_column)
            total = gl.load(base + offsets, mask=(offsets >= 0) & (first != program), other=0.0, cache_modifier=".cg")
            total = gl.where(first == program, mine, total)
            for other in range(first + 1, first + parts):
                base += C.partial_floats
                added = gl.load(base + offsets, mask=(offsets >= 0) & (other != program), other=0.0, cache_modifier=".cg")
                total += gl.where(other == program, mine, added)
            write_columns(_unflat(total, layout, C), tile, block * C.block_m + i * C.sums, M, weights, Tokens, S, C)
    barrier()
    before = gl.atomic_add(Semaphores + position, 1 << 16, sem="acq_rel", scope="gpu")
    if before == (parts << 16) - (1 << 16) + parts:
        gl.store(Semaphores + position, 0)
