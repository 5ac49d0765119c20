"""GEMMs with large M: which tile a program computes when, which rows of which weight it has, and which of the batch.

Dense: every tile of the weights meets every block of C.block_m batch rows. Tiles are computed in bands of C.band blocks, so that
those of the same time share x and weights in the L2 cache. With P programs each takes every P-th tile, whole. The tiles that are
left come first: each is cut along K into equal parts, as many as there are programs for it.

With routing x has a row for each pair of a token and an expert, sorted by expert, and a table lists the blocks of each expert's
pairs (linear/experts_sort.py). Tiles of an expert follow each other, its blocks innermost, for the same reason. All are whole. Rows
behind a block's last belong to other experts, and what becomes of them is not written.
"""

# ruff: noqa: RET505
# Triton compiles a part of Python: an `else` after a return is how a branch is left out of what it compiles.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.common.shares import quotient
from halfbyte.kernels.linear.ring import place


@gluon.jit
def work_of(M, K, weights, Blocks, C: gl.constexpr):
    """A program's work: the position of its first tile, its first step there, how many steps it has in all; and numbers of tiles
    of the weights, of blocks of batch rows, of steps of a tile, of those of its part of a tile that is left, of its first own tile,
    and of parts of a tile.
    """
    steps = (K + C.step - 1) // C.step
    blocks = (M + C.block_m - 1) // C.block_m if Blocks is None else gl.load(Blocks)
    tiles = 0
    for i in gl.static_range(gl.constexpr(len(C.weights))):
        tiles += (weights.features[i] + C.tile - 1) // C.tile
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    own = quotient(tiles * blocks, programs)
    left = tiles * blocks - own * programs
    parts = quotient(programs, gl.maximum(left, 1)) if Blocks is None else left * 0 + 1
    position = quotient(program, parts)
    part = program - position * parts
    begin = quotient(part * steps, parts)
    shared = gl.where(position < left, quotient(part * steps + steps, parts) - begin, 0)
    first_own = left + program
    position = gl.where(shared > 0, position, first_own)
    return position, gl.where(shared > 0, begin, 0), shared + own * steps, (tiles, blocks, steps, shared, first_own, parts)


@gluon.jit
def advance(position, step, done, work):
    """One step further in a program's work: where that is, how many are done, and whether another tile begins."""
    _, _, steps, shared, first_own, _ = work
    step += 1
    done += 1
    over = (step == steps) | (done == shared)
    following = gl.where(done == shared, first_own, position + gl.num_programs(0))
    return gl.where(over, following, position), gl.where(over, 0, step), done, over


@gluon.jit
def _expert_tile(position, columns, blocks, Blocks, C: gl.constexpr):
    """Of a tile: its expert, its first row there, its first pair, and the number behind the expert's last.

    columns: tiles of an expert's rows. Beyond all tiles it is the last one; without any some of expert 0, and no pairs.
    """
    tile = gl.maximum(gl.minimum(position, blocks * columns - 1), 0)
    at = Blocks + 4 * (1 + quotient(tile, columns))
    there = blocks > 0
    expert, first_block = gl.load(at, mask=there, other=0), gl.load(at + 1, mask=there, other=0)
    start, end = gl.load(at + 2, mask=there, other=0), gl.load(at + 3, mask=there, other=0)
    own = tile - first_block * columns
    count = gl.maximum((end - start + C.block_m - 1) // C.block_m, 1)
    column = quotient(own, count)
    return expert, column * C.tile, start + (own - column * count) * C.block_m, end


@gluon.jit
def tile_at(position, work, Blocks, C: gl.constexpr):
    """What is computed at a position: the tile of the weights and the block of batch rows; of a stack `_expert_tile`."""
    tiles, blocks, _, _, _, _ = work
    if Blocks is None:
        band = quotient(position, tiles * C.band)
        inside = position - band * (tiles * C.band)
        width = gl.minimum(C.band, blocks - band * C.band)
        tile = quotient(inside, width)
        return tile, band * C.band + (inside - tile * width)
    else:
        return _expert_tile(position, tiles, blocks, Blocks, C)


@gluon.jit
def weight_of(at, weights, Blocks, C: gl.constexpr):
    """Codes, scales and zero points of a tile's weight, the tile's first row there, and how many there are from that on."""
    if Blocks is None:
        codes, scales, zeros, _, _, _, N, n0 = place(at[0], weights, C)
        return codes, scales, zeros, n0, N - n0
    else:
        zeros = weights.codes[0] if weights.zeros[0] is None else weights.zeros[0]
        N = weights.features[0]
        return weights.codes[0], weights.scales[0], zeros, at[0].to(gl.int64) * N + at[1], N - at[1]


@gluon.jit
def first_row(at, Blocks, C: gl.constexpr):
    """The first row of the batch, or of the sorted pairs, of a tile."""
    if Blocks is None:
        return at[1] * C.block_m
    else:
        return at[2]
