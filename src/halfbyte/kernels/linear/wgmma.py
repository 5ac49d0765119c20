"""GEMMs with quantized weights for M from 17 to 256 on Hopper, in Gluon: warp-group MMA.

    y[m, n] = sum_k x[m, k] W[n, k],     W[n, k] = scale[n, g] (code[n, k] - zero[n, g]),  g the group that k lies in

Each warp group computes 64 out features of 32 or 64 batch rows. Codes come as they are stored into a ring in shared memory
(cp.async), become numbers in registers, exactly, and are the left operand from there; x is the right operand, in shared memory.
Each group is summed separately and its scale multiplies the fp32 sums; where code times scale is exact in 16 bits (NVFP4, and MXFP4
for bf16) the scale multiplies the codes. MMAs run asynchronously: the next 64 codes of each row are unpacked while the tensor cores
work on those before, from one step to the next.

Inside an MMA the order of K is free, as long as both operands agree. The lanes' 32 bits of a row hold 8 neighbouring codes of which
a mask takes every fourth (see linear/operands.py); tensor cores read x from shared memory as it lies there, so a small kernel ahead
writes x in the codes' order (`order`), and what a step reads of it contiguously.

Work is divided and partial results are added as in linear/mma.py.
"""

# ruff: noqa: RET505
# Triton compiles a part of Python: an `else` after a return is how a branch is left out of what it compiles.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
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

from halfbyte.kernels.common.compat import barrier, copy_to_shared, launcher, view
from halfbyte.kernels.common.layouts import code_ring_layout
from halfbyte.kernels.common.scales import to_float
from halfbyte.kernels.common.shares import program_at, quotient, share
from halfbyte.kernels.linear.mma import sum_partials
from halfbyte.kernels.linear.operands import dtype_of, halves, scale_layout
from halfbyte.kernels.linear.results import write_tile
from halfbyte.kernels.linear.ring import Weights, fetch_weight, place, weight_at, weight_rings
from halfbyte.kernels.linear.unpack import make_codebook
from halfbyte.kernels.linear.wgmma_operands import code_operands, in_order, joined, sixteenths, sums_layout, x_copy_layout
from halfbyte.plans.linear_spec import LinearPlan, LinearSpec, LinearWgmmaSpec

#: Columns of x that a program of `order` takes.
ORDER_BLOCK = 1024


@gluon.jit
def make_rings(S: gl.constexpr, C: gl.constexpr):
    """Shared memory: codes, scales and x of each stage; zero points have no ring here."""
    codes, scales = weight_rings(S, C)
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x = gl.allocate_shared_memory(dtype_of(C), [C.stages * C.k_blocks, C.block_m, 64], layout)
    return codes, scales, x


@gluon.jit
def _codes_of(ring, slot, S: gl.constexpr, C: gl.constexpr):
    """Codes of a step, [tile, words]."""
    shape: gl.constexpr = [C.tile, S.words(C)]
    return view(ring, slot, gl.int16, shape, code_ring_layout(S.words(C), 2))


@gluon.jit
def x_of(ring, slot, C: gl.constexpr):
    """x of a step for threads, [blocks of 64 k, rows, 64]: the same bytes that warp-group MMAs read."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    shape: gl.constexpr = [C.k_blocks, C.block_m, 64]
    return view(ring, slot, dtype_of(C), shape, layout)


@gluon.jit
def _next(tile, block, step, at, steps, blocks, weights, K, S: gl.constexpr, C: gl.constexpr):
    """One step further: rows of the weight (a tile) and of x (a block), the step, and where that of the weight lies."""
    step += 1
    if step == steps:
        step = 0
        block += 1
        tile = gl.where(block == blocks, tile + 1, tile)
        block = gl.where(block == blocks, 0, block)
        at = weight_at(tile, 0, weights, K, S, C)
    return tile, block, step, at


@gluon.jit
def _load_zeros(tile, step, weights, K, S: gl.constexpr, C: gl.constexpr):
    """Zero points of a step, one for each scale; 0 where there are none."""
    _, _, base, _, _, _, N, n0 = place(tile, weights, C)
    return load_groups(base, n0, n0, N, step, K, S.zero, S, C)


@gluon.jit
def load_groups(base, first, n0, N, step, K, wanted: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Numbers of groups that have too few bytes a row for cp.async, in a step of rows n0 .. N; 0 if not `wanted`.

    first: where row n0 lies in `base`.
    """
    found = 0
    if wanted:
        G: gl.constexpr = C.columns(S)
        layout: gl.constexpr = scale_layout(C, G)
        row = gl.arange(0, C.tile, layout=gl.SliceLayout(1, layout))[:, None]
        c = step * G + gl.arange(0, G, layout=gl.SliceLayout(0, layout))[None, :]
        width = K // S.group
        found = gl.load(base + first.to(gl.int64) * width + (row * width + c), mask=(row < N - n0) & (c < width), other=0)
    return found


@gluon.jit
def _fetch_x(ring, slot, X, block, step, steps, C: gl.constexpr):
    """Ask for x of one step, which lies in one piece."""
    layout: gl.constexpr = x_copy_layout(C)
    b = gl.arange(0, C.k_blocks, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    m = gl.arange(0, C.block_m, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    k = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    piece = (block * steps + step).to(gl.int64) * (C.block_m * C.chunk)
    copy_to_shared(x_of(ring, slot, C), X + piece + (b * (C.block_m * 64) + (m * 64 + k)))


@gluon.jit
def _columns(s, C: gl.constexpr):
    """Scales (or zero points) of a step [tile, groups] as one tensor [tile] a group."""
    n: gl.constexpr = s.shape[1].bit_length() - 1
    return halves(gl.reshape(s, [C.tile] + [2] * n), n)


@gluon.jit
def _scale_of(s, S: gl.constexpr, C: gl.constexpr):
    s = gl.convert_layout(s, gl.SliceLayout(1, sums_layout(C)), assert_trivial=True)
    return gl.expand_dims(to_float(s, S), 1)


@gluon.jit
def _operand(parts, unit: gl.constexpr, depth: gl.constexpr, C: gl.constexpr):
    """Codes of 64 k as the left operand of one product, or one half of them."""
    if depth == 64:
        return joined(parts, C)
    else:
        return joined((parts[unit % 2 * 2], parts[unit % 2 * 2 + 1]), C)


@gluon.jit
def _x_operand(x, unit: gl.constexpr, depth: gl.constexpr):
    """x [rows, 64] as the right operand, or one half of it."""
    if depth == 64:
        return x.permute([1, 0])
    else:
        return x.slice(unit % 2 * 32, 32, dim=1).permute([1, 0])


@gluon.jit
def scaled(acc, p, pending, S: gl.constexpr, C: gl.constexpr):
    """acc and the sums of a group that its products have just completed; `pending` is that group's scale."""
    if C.direct:
        return p
    else:
        return acc + p * pending


@gluon.jit
def multiply(acc, p, pending, rings, slot, zero, scale, S: gl.constexpr, C: gl.constexpr):
    """One step's MMAs, of which the last is left under way: acc, its sums p, and the scale that these still need.

    scale: what the ring has not. Products of a group are summed by the tensor cores, and scaled when the next are under way.
    """
    codes = _codes_of(rings[0], slot, S, C)
    scales = ()
    zeros = ()
    if S.group == 16:
        scales = sixteenths(rings[1].index(slot), S, C)
    elif S.groups > 0 and not C.copies_scales:
        scales = _columns(scale, C)
    elif S.groups > 0:
        scales = _columns(rings[1].index(slot).load(scale_layout(C, C.columns(S))), C)
    if S.zero:
        zeros = _columns(zero, C)
    depth: gl.constexpr = 32 if C.halved and not C.direct else 64
    none = gl.full([C.tile, C.block_m], 0.0, gl.float32, sums_layout(C))
    parts = ()
    for unit in gl.static_range(gl.constexpr(C.chunk // depth)):
        if (unit * depth) % 64 == 0:
            parts = code_operands(codes, unit * depth // 64, scales, zeros, S, C)
        a = _operand(parts, unit, depth, C)
        x = _x_operand(rings[2].index(slot * C.k_blocks + unit * depth // 64), unit, depth)
        done = none
        if unit > 0 or C.carried:
            done = warpgroup_mma_wait(0, deps=[p])
        if C.direct or (unit * depth) % S.group != 0:
            p = warpgroup_mma(a, x, done, is_async=True)
        else:
            p = warpgroup_mma(a, x, none, use_acc=False, is_async=True)
            if unit > 0 or C.carried:
                acc = scaled(acc, done, pending, S, C)
            pending = _scale_of(scales[unit * depth // S.group], S, C)
    if not C.carried:
        acc = scaled(acc, warpgroup_mma_wait(0, deps=[p]), pending, S, C)
        p = warpgroup_mma_init(none)
        pending = gl.full([C.tile, 1], 0.0, gl.float32, sums_layout(C))
    return acc, p, pending


@gluon.jit(do_not_specialize=["M"])
def linear(
    X,  # [blocks of C.block_m rows, steps, C.k_blocks, C.block_m, 64] as `order` wrote it
    Partials,  # fp32 workspace: two partial results a program
    Semaphores,  # int32, one a tile, zero before and after
    M,
    K,
    weights: Weights,
    C: gl.constexpr,
):
    """One program's share of the steps of all tiles: out features times C.block_m batch rows, batch rows first."""
    S: gl.constexpr = C.weights[0]
    mma: gl.constexpr = sums_layout(C)
    ahead: gl.constexpr = C.stages - 2
    rings = make_rings(S, C)
    steps = (K + C.chunk - 1) // C.chunk
    blocks = (M + C.block_m - 1) // C.block_m
    tiles = 0
    for i in gl.static_range(gl.constexpr(len(C.weights))):
        tiles += (weights.features[i] + C.tile - 1) // C.tile
    total = tiles * blocks * steps
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    now = share(program, programs, total)
    end = share(program + 1, programs, total)
    position = quotient(now, steps)
    step = now - position * steps
    tile = quotient(position, blocks)
    block = position - tile * blocks
    # The weights first, ahead of the wait for the kernel before: that may write x, but not a weight.
    at = weight_at(tile, step, weights, K, S, C)
    next_tile, next_block, next_step = tile, block, step
    for i in gl.static_range(ahead):
        if now + i < end:
            at = fetch_weight(rings, i, at, next_step, K, S, C)
        async_copy.commit_group()
        next_tile, next_block, next_step, at = _next(next_tile, next_block, next_step, at, steps, blocks, weights, K, S, C)
    if S.kind == "table":
        make_codebook(rings[0], S, C)
    zero_next = _load_zeros(tile, step, weights, K, S, C)
    if C.use_pdl:
        gdc_wait()
        gdc_launch_dependents()
    x_block = block
    x_step = step
    for i in gl.static_range(ahead):
        if now + i < end:
            _fetch_x(rings[2], i, X, x_block, x_step, steps, C)
        async_copy.commit_group()
        x_step += 1
        x_block = gl.where(x_step == steps, gl.where(x_block + 1 == blocks, 0, x_block + 1), x_block)
        x_step = gl.where(x_step == steps, 0, x_step)
    slot = 0
    while now < end:
        begin = step
        stop = gl.minimum(end, now + (steps - step))
        acc = gl.full([C.tile, C.block_m], 0.0, gl.float32, mma)
        pending = gl.full([C.tile, 1], 0.0, gl.float32, mma)
        p = warpgroup_mma_init(acc)
        for at_step in range(now, stop):
            zero = zero_next
            if S.zero:
                over = step + 1 == steps
                zero_tile = gl.where(over & (block + 1 == blocks), tile + 1, tile)
                zero_step = gl.where(over, 0, step + 1)
                zero_next = _load_zeros(zero_tile, zero_step, weights, K, S, C)
            async_copy.wait_group(ahead - 1)
            barrier()
            fence_async_shared()
            # Into the slot of two steps before: MMAs of the step before may still be running.
            if at_step + ahead < end:
                free = gl.where(slot >= 2, slot - 2, slot + ahead)
                _fetch_x(rings[2], free, X, next_block, next_step, steps, C)
                at = fetch_weight(rings, free, at, next_step, K, S, C)
            async_copy.commit_group()
            next_tile, next_block, next_step, at = _next(next_tile, next_block, next_step, at, steps, blocks, weights, K, S, C)
            acc, p, pending = multiply(acc, p, pending, rings, slot, zero, 0, S, C)
            step += 1
            slot = gl.where(slot == C.stages - 1, 0, slot + 1)
        if C.carried:
            acc = scaled(acc, warpgroup_mma_wait(0, deps=[p]), pending, S, C)
        first_row = block * C.block_m
        if (begin == 0) & (step == steps):
            write_tile(acc, tile, first_row, M, weights, S, C)
        else:
            n = gl.arange(0, C.tile, layout=gl.SliceLayout(1, mma))[:, None]
            offsets = n * C.block_m + gl.arange(0, C.block_m, layout=gl.SliceLayout(0, mma))[None, :]
            own = 2 * program + (begin == 0).to(gl.int32)
            gl.store(Partials + own.to(gl.int64) * C.partial_floats + offsets, acc, cache_modifier=".cg")
            at_all = tile * blocks + block
            first = program_at(at_all * steps, programs, total)
            last = program_at(at_all * steps + (steps - 1), programs, total)
            barrier()
            arrived = gl.atomic_add(Semaphores + at_all, 1, sem="acq_rel", scope="gpu")
            if arrived == last - first:
                gl.store(Semaphores + at_all, 0)
                v = sum_partials(Partials, offsets, first, last, program, acc, C)
                write_tile(v, tile, first_row, M, weights, S, C)
        now = stop
        step = 0
        block += 1
        tile = gl.where(block == blocks, tile + 1, tile)
        block = gl.where(block == blocks, 0, block)
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["M"])
def order(X, Y, M, K, x_stride, C: gl.constexpr, BLOCK: gl.constexpr):
    """x [M, K] -> y [blocks of M, K in pieces of 64, C.block_m, 64]: k in the order of the operands, zeros beyond x."""
    S: gl.constexpr = C.weights[0]
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    if C.use_pdl:
        gdc_wait()
        gdc_launch_dependents()
    m = gl.program_id(1)
    k = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    x = gl.load(X + m.to(gl.int64) * x_stride + k, mask=(k < K) & (m < M), other=0.0)
    x = in_order(gl.reshape(x, [BLOCK // 64, 1, 64]), S, C)
    pieces = (K + C.chunk - 1) // C.chunk * C.k_blocks
    at = ((m // C.block_m).to(gl.int64) * pieces + k // 64) * (C.block_m * 64) + (m % C.block_m * 64 + k % 64)
    gl.store(Y + at, gl.convert_layout(gl.reshape(x, [BLOCK]), layout), mask=k < pieces * 64)


# ------------------------------------------------------------------------------------------------------------- host code


def launch(
    x: torch.Tensor,
    weights: Weights,
    plan: LinearPlan,
    partials: torch.Tensor,
    semaphores: torch.Tensor,
    compiled: Any = None,
) -> Any:
    """As `mma.launch`, with one more launch ahead, which brings x into the operands' order."""
    spec, programs = plan.spec, plan.programs
    padded, grid = _shape_in_order(x, spec)
    y = x.new_empty(padded)
    to_order, to_multiply = (x, y, *x.shape, x.stride(0)), (y, partials, semaphores, *x.shape, weights)
    if compiled is not None:
        compiled[0][(*grid, 1)](*to_order, spec, ORDER_BLOCK)
        compiled[1][programs, 1, 1](*to_multiply, spec)
        return compiled
    ordering = order[grid](*to_order, C=spec, BLOCK=ORDER_BLOCK, num_warps=4, launch_pdl=spec.use_pdl)
    gemm = linear[(programs,)](*to_multiply, C=spec, num_warps=spec.warps, launch_pdl=spec.use_pdl, maxnreg=255)
    return ordering, gemm


def _shape_in_order(x: torch.Tensor, spec: LinearSpec | LinearWgmmaSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shape of x in the operands' order, and the programs that bring it there."""
    m, k = -(-x.shape[0] // spec.block_m) * spec.block_m, -(-x.shape[1] // spec.chunk) * spec.chunk
    return (m, k), (-(-k // ORDER_BLOCK), m)


def relauncher(compiled: Any, x: torch.Tensor, features: tuple[int, ...], plan: LinearPlan) -> Callable[..., None]:
    """As `mma.relauncher`."""
    spec, (padded, grid) = plan.spec, _shape_in_order(x, plan.spec)
    numbers, stride = tuple(x.shape), x.stride(0)
    ordering, gemm = launcher(compiled[0], (*grid, 1)), launcher(compiled[1], (plan.programs, 1, 1))

    def relaunch(stream: int, x: torch.Tensor, tensors: Sequence[Any], partials: int, semaphores: int) -> None:
        y = x.new_empty(padded)
        ordering(stream, x.data_ptr(), y.data_ptr(), *numbers, stride, spec, ORDER_BLOCK)
        gemm(stream, y.data_ptr(), partials, semaphores, *numbers, (*tensors, features), spec)

    return relaunch
