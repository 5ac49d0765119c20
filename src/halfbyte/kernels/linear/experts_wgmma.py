"""`experts_linear` for few pairs an expert, in Gluon: the kernel of linear/wgmma.py on the pairs of each expert of a stack.

    y[p, n] = sum_k x[p, k] W[e(p), n, k] + bias[e(p), n]      for pairs p of a token and an expert, sorted by expert

then, with an activation, columns 2n and 2n + 1 are a gate and its up projection and become one number.

The pairs of an expert are cut into blocks of C.block_m, which the sort lists (linear/experts_sort.py). A tile is a block times
C.tile rows of its expert's weight. Tiles of an expert follow each other, its blocks innermost, so that those which run at the same
time read the same weights and the same x. With P programs each takes every P-th tile, whole, and reads ahead into the next.
Copies and products are those of linear/wgmma.py. A small kernel ahead (`gather`) sorts x and brings k into the order of the
operands; rows behind a block's last belong to others, and what becomes of them is not written.
"""

# Triton compiles a part of Python: an `else` after a return is how a branch is left out of what it compiles.

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_init

from halfbyte.kernels.common.launch import Launch
from halfbyte.kernels.common.shares import quotient
from halfbyte.kernels.linear.async_copy import codes_at, copy_codes, make_pool
from halfbyte.kernels.linear.results import activated, routed_results, row_layout
from halfbyte.kernels.linear.ring import Weights, load_scales
from halfbyte.kernels.linear.sync import check_addresses, commit, thread_of
from halfbyte.kernels.linear.unpack import make_codebook
from halfbyte.kernels.linear.wgmma import arrived, copy_x, free_slot, multiply, tile_sums
from halfbyte.kernels.linear.wgmma_operands import in_order, sums_layout
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_spec import WgmmaSpec

#: Rows and columns of x that a program of `gather` takes.
_ROWS, _COLUMNS = 4, 1024


@gluon.jit
def _entry(tile, tiles, Blocks, columns):
    """A tile, and what the table says of its block; beyond all tiles the last one. Zeros without any: there is no block then."""
    tile = gl.maximum(gl.minimum(tile, tiles - 1), 0)
    at = Blocks + 4 * (1 + quotient(tile, columns))
    there = tiles > 0
    expert, first_block = gl.load(at, mask=there, other=0), gl.load(at + 1, mask=there, other=0)
    return tile, expert, first_block, gl.load(at + 2, mask=there, other=0), gl.load(at + 3, mask=there, other=0)


@gluon.jit
def _place(entry, columns, C: gl.constexpr):
    """Of a tile: its expert, its first row there, its first pair, and the number behind the expert's last."""
    tile, expert, first_block, start, end = entry
    own = tile - first_block * columns
    blocks = gl.maximum((end - start + C.block_m - 1) // C.block_m, 1)
    column = quotient(own, blocks)
    return expert, column * C.tile, start + (own - column * blocks) * C.block_m, end


@gluon.jit
def _first_step(place, weights, K, S: gl.constexpr, C: gl.constexpr):
    """Where a tile begins: a thread's codes, the rows of its expert from there on, and its first pair."""
    expert, n0, first, _ = place
    N = weights.features[0]
    return codes_at(weights.codes[0], expert * N + n0, 0, K, S, C), N - n0, first


@gluon.jit
def _next(at, step, steps, behind, S: gl.constexpr, C: gl.constexpr):
    """One step further, or to where the next tile begins, without a branch (see linear/wgmma.py); and whether it is that."""
    codes, rows, first = at
    step += 1
    over = step == steps
    at = gl.where(over, behind[0], codes + S.words(C) * 2), gl.where(over, behind[1], rows), gl.where(over, behind[2], first)
    return at, gl.where(over, 0, step), over


@gluon.jit
def _fetch(slot, X, at, step, steps, wanted, K, S: gl.constexpr, C: gl.constexpr):
    """Ask for codes and x of one step, if `wanted`."""
    codes, rows, first = at
    copy_codes(slot, codes, rows, gl.where(wanted, K - step * C.chunk, 0), K, S, C)
    t = thread_of(C)
    width = steps * C.chunk
    x = first.to(gl.int64) * width + step * C.chunk + (t // 8 * width + t % 8 * 8)
    copy_x(slot, X.to(gl.int64) + 2 * x, 2 * width, wanted, 128, C)
    commit()


@gluon.jit
def _load_scales(expert, n0, step, weights, K, S: gl.constexpr, C: gl.constexpr):
    """Scales and zero points of a step of rows from n0 of an expert on."""
    N = weights.features[0]
    return load_scales(weights.scales[0], weights.zeros[0], expert * N + n0, N - n0, step, K - step * C.chunk, K, S, C)


@gluon.jit
def _write(v, expert, n0, first, end, weights, S: gl.constexpr, C: gl.constexpr):
    """The sums [tile, rows] of a tile to its pairs' rows of y."""
    out = weights.outs[0]
    half: gl.constexpr = out.dtype.element_ty
    width = weights.features[0] // C.epilogue.halves
    v = routed_results(v, expert, n0, weights, S, C).to(half)
    if C.epilogue.order is not None:  # zeros behind the last column: it may be another one in their order
        To: gl.constexpr = C.epilogue.order
        T: gl.constexpr = To.weights[0]
        width = (width + To.chunk - 1) // To.chunk * To.chunk
        v = gl.permute(gl.reshape(v, [64, C.epilogue.halves, C.block_m]), [1, 2, 0])
        v = gl.reshape(gl.permute(in_order(v, T, To), [2, 0, 1]), [C.tile, C.block_m])
    v = gl.convert_layout(v, row_layout(C))
    v = activated(v.to(gl.float32), C).to(half)
    n = n0 // C.epilogue.halves + gl.arange(0, C.tile // C.epilogue.halves, layout=gl.SliceLayout(1, v.type.layout))[:, None]
    m = first + gl.arange(0, C.block_m, layout=gl.SliceLayout(0, v.type.layout))[None, :]
    gl.store(out + (m.to(gl.int64) * width + n), v, mask=(m < end) & (n < width))


@gluon.jit
def experts(
    X,  # [S + C.block_m, steps * C.chunk] as `gather` wrote it
    Blocks,  # int32 [blocks + 1, 4], see linear/experts_sort.py
    K,
    weights: Weights,  # of one stack: N of its features are an expert
    C: gl.constexpr,
):
    """One program's tiles."""
    S: gl.constexpr = C.weights[0]
    mma: gl.constexpr = sums_layout(C)
    pool = make_pool(C)
    steps = (K + C.chunk - 1) // C.chunk
    columns = (weights.features[0] + C.tile - 1) // C.tile
    tiles = gl.load(Blocks) * columns
    tile = gl.program_id(0)
    programs = gl.num_programs(0)
    end = quotient(gl.maximum(tiles - tile + programs - 1, 0), programs) * steps
    expert, n0, first, last = _place(_entry(tile, tiles, Blocks, columns), columns, C)
    behind = _place(_entry(tile + programs, tiles, Blocks, columns), columns, C)
    scale, zero = _load_scales(expert, n0, 0, weights, K, S, C)
    at = _first_step((expert, n0, first, last), weights, K, S, C)
    next_at = _first_step(behind, weights, K, S, C)
    next_tile = tile + programs
    next_step = 0
    for i in gl.static_range(gl.constexpr(C.ahead)):
        _fetch(i, X, at, next_step, steps, i < end, K, S, C)
        at, next_step, over = _next(at, next_step, steps, next_at, S, C)
        if over:
            next_tile += programs
            next_at = _first_step(_place(_entry(next_tile, tiles, Blocks, columns), columns, C), weights, K, S, C)
    if S.kind == "table":
        make_codebook(pool, S, C)
    check_addresses(pool, S, C)
    slot = 0
    now = 0
    while now < end:
        acc = gl.full([C.tile, C.block_m], 0.0, gl.float32, mma)
        pending = gl.full([C.tile, 1], 0.0, gl.float32, mma)
        p = warpgroup_mma_init(acc)
        # What follows when this tile is done, ahead: it takes a trip to the L2 cache. Copies go on to a tile once in its steps.
        tile += programs
        next_tile += programs
        entry = _entry(tile + programs, tiles, Blocks, columns)
        next_entry = _entry(next_tile, tiles, Blocks, columns)
        for step in range(steps):
            scale_now = scale
            zero_now = zero
            over = step + 1 == steps
            of_expert, of_n0 = gl.where(over, behind[0], expert), gl.where(over, behind[1], n0)
            scale, zero = _load_scales(of_expert, of_n0, gl.where(over, 0, step + 1), weights, K, S, C)
            arrived(gl.constexpr(C.ahead - 1))
            _fetch(free_slot(slot, C), X, at, next_step, steps, now + C.ahead < end, K, S, C)
            at, next_step, _ = _next(at, next_step, steps, next_at, S, C)
            acc, p, pending = multiply(acc, p, pending, pool, slot, scale_now, zero_now, S, C)
            now += 1
            slot = gl.where(slot == C.stages - 1, 0, slot + 1)
        _write(tile_sums(acc, p, pending, S, C), expert, n0, first, last, weights, S, C)
        expert, n0, first, last = behind
        behind = _place(entry, columns, C)
        next_at = _first_step(_place(next_entry, columns, C), weights, K, S, C)


@gluon.jit(do_not_specialize=["S"])
def gather(X, Order, Y, S, K, x_stride, pairs: gl.constexpr, C: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """x, one row for `pairs` pairs -> y [S, steps * C.chunk], sorted: k in the order of the operands, zeros beyond x."""
    Weight: gl.constexpr = C.weights[0]  # by a name: Triton 3.6 does not pass it on otherwise
    layout: gl.constexpr = gl.BlockedLayout([ROWS, 8], [1, 32], [1, 4], [1, 0])
    m = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    k = gl.program_id(1) * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    pair = gl.load(Order + m, mask=m < S, other=0)
    row = gl.expand_dims(pair // pairs, 1).to(gl.int64)
    m = gl.expand_dims(m, 1)
    x = gl.load(X + (row * x_stride + k), mask=(k < K) & (m < S), other=0.0)
    x = in_order(gl.reshape(x, [ROWS * COLUMNS // 64, 1, 64]), Weight, C)
    width = (K + C.chunk - 1) // C.chunk * C.chunk
    x = gl.convert_layout(gl.reshape(x, [ROWS, COLUMNS]), layout)
    gl.store(Y + (m.to(gl.int64) * width + k), x, mask=(k < width) & (m < S))


# ------------------------------------------------------------------------------------------------------------- host code


def sorted_rows(x: torch.Tensor, order: torch.Tensor, spec: WgmmaSpec) -> tuple[torch.Tensor, Launch]:
    """x [M, K], whose columns are neighbors, as `launches` takes it, in `order` [S]; and the launch that writes it."""
    rows, width = len(order), -(-x.shape[1] // spec.chunk) * spec.chunk
    y = x.new_empty(rows + spec.block_m, width)
    arguments = (x, order, y, rows, x.shape[1], x.stride(0), rows // len(x), spec, _ROWS, _COLUMNS)
    return y, Launch(gather, (-(-rows // _ROWS), -(-width // _COLUMNS)), arguments, {"num_warps": 4})


def launches(x: torch.Tensor, weights: Weights, plan: GemmPlan, width: int, blocks: torch.Tensor) -> list[Launch]:
    """One launch: x, from `sorted_rows`, of so many columns, times the weights of a stack; rows of none are left.

    With `order` results are themselves as the next launch takes its x; columns from the last 64 on, if any, are zeros already.
    blocks: the table of the sort.
    """
    spec = plan.spec
    return [Launch(experts, (plan.programs,), (x, blocks, width, weights, spec), {"num_warps": spec.warps, "maxnreg": 255})]
