"""GEMMs with quantized weights for M from 17 to 256 on Hopper, in Gluon: warp-group MMA.

    y[m, n] = sum_k x[m, k] W[n, k],     W[n, k] = scale[n, g] (code[n, k] - zero[n, g]),  g the group that k lies in

Each warp group computes 64 out features of 32 or 64 batch rows. Codes come as they are stored into a ring in shared memory (as in
linear/async_copy.py: one barrier a step), become numbers in registers, exactly, and are the left operand from there; x is the right
operand, in shared memory. Scales and zero points are loaded to registers a step ahead.
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

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.common.compat import barrier, view
from halfbyte.kernels.common.launch import Launch
from halfbyte.kernels.common.layouts import code_ring_layout
from halfbyte.kernels.common.scales import to_float
from halfbyte.kernels.common.shares import program_at, quotient, share
from halfbyte.kernels.linear.async_copy import codes_at, copy_codes, make_pool
from halfbyte.kernels.linear.operands import dtype_of
from halfbyte.kernels.linear.partials import sum_partials
from halfbyte.kernels.linear.results import write_tile
from halfbyte.kernels.linear.ring import Weights, load_scales, numbers, place, typed
from halfbyte.kernels.linear.sync import check_addresses, commit, thread_of
from halfbyte.kernels.linear.unpack import make_codebook
from halfbyte.kernels.linear.wgmma_operands import code_operands, in_order, sixteenths, sums_layout, taken
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_spec import MmaSpec, WgmmaSpec

#: Columns of x that a program of `order` takes.
ORDER_BLOCK = 1024


@gluon.jit
def _codes_of(pool, slot, S: gl.constexpr, C: gl.constexpr):
    """Codes of a step, [tile, words]."""
    shape: gl.constexpr = [C.tile, S.words(C)]
    return view(pool, slot, gl.int16, shape, code_ring_layout(S.words(C), 2))


@gluon.jit
def _x_of(pool, slot, block: gl.constexpr, C: gl.constexpr):
    """64 k of x of a step, [rows, 64]."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    shape: gl.constexpr = [C.block_m, 64]
    first: gl.constexpr = gl.constexpr(C.x_at // (128 * C.block_m))
    return view(pool, first + slot * C.k_blocks + block, dtype_of(C), shape, layout)


@gluon.jit
def _place(tile, step, weights, K, S: gl.constexpr, C: gl.constexpr):
    """Where codes of a step of a tile lie, and the rows of the weight from there on."""
    codes, _, _, _, _, _, N, n0 = place(tile, weights, C)
    return codes_at(codes, n0, step, K, S, C), N - n0


@gluon.jit
def _next(tile, block, step, codes, rows, steps, blocks, weights, K, S: gl.constexpr, C: gl.constexpr):
    """One step further: rows of the weight (a tile) and of x (a block), the step, and where that of the weight lies."""
    codes += S.words(C) * 2
    step += 1
    if not C.whole:
        # Without a branch: behind one the assembler unpacks no codes between MMAs, and adds an address to each look-up.
        over = step == steps
        further = over & (block + 1 == blocks)
        tile += further.to(gl.int32)
        block = gl.where(further, 0, block + over.to(gl.int32))
        step = gl.where(over, 0, step)
        if len(C.weights) == 1:
            tile_bytes = C.tile * (K // S.codes_per_word * 2)
            codes += gl.where(over, gl.where(further, tile_bytes, 0) - steps * (S.words(C) * 2), 0)
            rows -= gl.where(further, C.tile, 0)
        else:
            first, left = _place(tile, 0, weights, K, S, C)
            codes = gl.where(over, first, codes)
            rows = gl.where(over, left, rows)
    return tile, block, step, codes, rows


@gluon.constexpr_function
def _x_asm(distance, C):
    """Copies of one thread's pieces of x. $1 where the first goes, in bytes from `x_at`; $2 its address; $3 whether to copy; $4
    bytes from row to row. distance: bytes from one block of 64 k to the next.
    """
    at_once = 4 * C.warps  # rows, and those of further blocks where x lies in one piece
    lines = ["{ .reg .pred q; .reg .b32 s; .reg .b64 p, d; mov.u32 s, global_smem; add.u32 s, s, $1; setp.ne.s32 q, $3, 0;"]
    lines.append(f"mul.wide.s32 d, $4, {at_once};")
    for first in range(0, C.block_m, at_once):
        lines.append("add.s64 p, p, d;" if first else "mov.b64 p, $2;")
        for block in range(0, C.k_blocks, max(1, at_once // C.block_m)):
            into = C.x_at + (block * C.block_m + first) * 128
            lines.append(f"@q cp.async.cg.shared.global [s+{into}], [p+{block * distance}], 16;")
    return " ".join(lines) + " } // $0"


@gluon.jit
def copy_x(slot, at, row_bytes, wanted, distance: gl.constexpr, C: gl.constexpr):
    """Ask for x of one step, if `wanted`: 128 bytes of each row and 64 k, swizzled. at: of a thread's first 16 bytes."""
    t = thread_of(C)
    into = slot * C.x_bytes + t // 8 * 128 + (t % 8 ^ t // 8 % 8) * 16
    gl.inline_asm_elementwise(
        _x_asm(distance, C),
        "=r,r,l,r,r,~{memory}",
        [into, at, wanted.to(gl.int32), row_bytes],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _fetch_x(slot, X, piece, wanted, C: gl.constexpr):
    """Ask for x of one step, which lies in one piece, if `wanted`."""
    at = X.to(gl.int64) + (piece.to(gl.int64) * C.x_bytes + thread_of(C) * 16)
    copy_x(slot, at, 128, wanted, gl.constexpr(C.block_m * 128), C)


@gluon.constexpr_function
def _arrived_asm(groups):
    return f"cp.async.wait_group {groups}; fence.proxy.async.shared::cta; // $0"


@gluon.jit
def arrived(groups: gl.constexpr):
    """Wait until at most `groups` groups of this thread's copies are under way: once all threads meet, MMAs may read the others."""
    gl.inline_asm_elementwise(_arrived_asm(groups), "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)
    barrier()


@gluon.jit
def free_slot(slot, C: gl.constexpr):
    """The slot of the step `ahead` of that in `slot`."""
    return gl.where(slot >= C.stages - C.ahead, slot - (C.stages - C.ahead), slot + C.ahead)


@gluon.jit
def _scale_of(s, S: gl.constexpr, C: gl.constexpr):
    s = gl.convert_layout(s, gl.SliceLayout(1, sums_layout(C)), assert_trivial=True)
    return gl.expand_dims(to_float(s, S), 1)


@gluon.jit
def _scaled(acc, p, pending, S: gl.constexpr, C: gl.constexpr):
    """acc and the sums of a group that its products have just completed; `pending` is that group's scale."""
    if C.direct:
        return p
    else:
        # Computed here and not later, when the MMAs that follow write p.
        return gl.inline_asm_elementwise("// $0 $1", "=f,0", [acc + p * pending], dtype=gl.float32, is_pure=False, pack=1)


@gluon.constexpr_function
def _begins(block, operand, S, C):
    """Whether a group whose sums are scaled begins with an operand."""
    return not C.direct and (block * 64 + operand * 16) % S.group == 0


@gluon.jit
def multiply(acc, p, pending, pool, slot, scale, zero, S: gl.constexpr, C: gl.constexpr):
    """One step's MMAs, of which the last are left under way: acc, their sums p, and the scale that these still need.

    Those of a group are summed by the tensor cores, and scaled when the next are under way. Each 16 k are an MMA: what is left to
    unpack of 64 is unpacked between them.
    """
    codes = _codes_of(pool, slot, S, C)
    scales = ()
    zeros = ()
    if S.group == 16:
        scales = sixteenths(numbers(scale, C.scale_bytes, S, C), S, C)
    elif S.groups > 0:
        scales = typed(numbers(scale, C.scale_bytes, S, C), S)
    if S.zero:
        zeros = numbers(zero, 1, S, C)
    none = gl.full([C.tile, C.block_m], 0.0, gl.float32, sums_layout(C))
    for block in gl.static_range(gl.constexpr(C.k_blocks)):
        parts = code_operands(codes, block, scales, zeros, S, C)
        x = _x_of(pool, slot, block, C)
        for i in gl.static_range(4):
            right = x.slice(16 * i, 16, dim=1).permute([1, 0])
            done = p
            if (i == 0 or _begins(block, i, S, C)) and (block + i > 0 or C.carried):
                done = warpgroup_mma_wait(0, deps=[p])
            if _begins(block, i, S, C):
                p = warpgroup_mma(parts[i], right, none, use_acc=False, is_async=True)
                if block + i > 0 or C.carried:
                    acc = _scaled(acc, done, pending, S, C)
                pending = _scale_of(scales[(block * 64 + i * 16) // S.group], S, C)
            else:
                p = warpgroup_mma(parts[i], right, done, is_async=True)
    if not C.carried:
        acc = _scaled(acc, warpgroup_mma_wait(0, deps=[p]), pending, S, C)
        p = warpgroup_mma_init(none)
        pending = gl.full([C.tile, 1], 0.0, gl.float32, sums_layout(C))
    return acc, p, pending


@gluon.jit
def tile_sums(acc, p, pending, S: gl.constexpr, C: gl.constexpr):
    """The sums of a tile, whose last MMAs may be under way."""
    if C.carried:
        acc = _scaled(acc, warpgroup_mma_wait(0, deps=[p]), pending, S, C)
    return acc * (1.0 / taken(S, C))


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
    pool = make_pool(C)
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
    if C.whole:
        now, end, position = program * steps, program * steps + steps, program
    step = now - position * steps
    tile = quotient(position, blocks)
    block = position - tile * blocks
    # The weights first, ahead of the wait for the kernel before: that may write x, but not a weight.
    codes, rows = _place(tile, step, weights, K, S, C)
    next_tile, next_block, next_step = tile, block, step
    for i in gl.static_range(gl.constexpr(C.ahead)):
        copy_codes(i, codes, rows, gl.where(now + i < end, K - next_step * C.chunk, 0), K, S, C)
        commit()
        next_tile, next_block, next_step, codes, rows = _next(
            next_tile, next_block, next_step, codes, rows, steps, blocks, weights, K, S, C
        )
    if S.kind == "table":
        make_codebook(pool, S, C)
    if C.use_pdl:
        gdc_wait()
        gdc_launch_dependents()
    x_block = block
    x_step = step
    for i in gl.static_range(gl.constexpr(C.ahead)):
        _fetch_x(i, X, x_block * steps + x_step, now + i < end, C)
        commit()
        x_step += 1
        x_block = gl.where(x_step == steps, gl.where(x_block + 1 == blocks, 0, x_block + 1), x_block)
        x_step = gl.where(x_step == steps, 0, x_step)
    check_addresses(pool, S, C)
    slot = 0
    while now < end:
        begin = step
        stop = end if C.whole else gl.minimum(end, now + (steps - step))
        acc = gl.full([C.tile, C.block_m], 0.0, gl.float32, mma)
        pending = gl.full([C.tile, 1], 0.0, gl.float32, mma)
        p = warpgroup_mma_init(acc)
        _, scales, zeros, _, _, _, N, n0 = place(tile, weights, C)
        scale, zero = load_scales(scales, zeros, n0, N - n0, step, K - step * C.chunk, K, S, C)
        for at_step in range(now, stop):
            # Scales of the next step come while this one is computed; behind a tile's last step nothing is read.
            scale_now = scale
            zero_now = zero
            left = gl.where(at_step + 1 < stop, K - (step + 1) * C.chunk, 0)
            scale, zero = load_scales(scales, zeros, n0, N - n0, step + 1, left, K, S, C)
            arrived(gl.constexpr(C.ahead - 1))
            free = free_slot(slot, C)
            wanted = at_step + C.ahead < end
            copy_codes(free, codes, rows, gl.where(wanted, K - next_step * C.chunk, 0), K, S, C)
            _fetch_x(free, X, next_block * steps + next_step, wanted, C)
            commit()
            next_tile, next_block, next_step, codes, rows = _next(
                next_tile, next_block, next_step, codes, rows, steps, blocks, weights, K, S, C
            )
            acc, p, pending = multiply(acc, p, pending, pool, slot, scale_now, zero_now, S, C)
            step += 1
            slot = gl.where(slot == C.stages - 1, 0, slot + 1)
        acc = tile_sums(acc, p, pending, S, C)
        first_row = block * C.block_m
        if C.whole or (begin == 0) & (step == steps):
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
            before = gl.atomic_add(Semaphores + at_all, 1, sem="acq_rel", scope="gpu")
            if before == last - first:
                gl.store(Semaphores + at_all, 0)
                v = sum_partials(Partials, offsets, first, last, program, acc, C)
                write_tile(v, tile, first_row, M, weights, S, C)
        now = end if C.whole else stop
        step = 0
        block += 1
        tile = gl.where(block == blocks, tile + 1, tile)
        block = gl.where(block == blocks, 0, block)


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


def launches(
    x: torch.Tensor, weights: Weights, plan: GemmPlan, partials: torch.Tensor, semaphores: torch.Tensor, around: None = None
) -> list[Launch]:
    """As `mma.launches`, with one more launch ahead, which brings x into the operands' order."""
    spec = plan.spec
    padded, grid = _shape_in_order(x, spec)
    y, options = x.new_empty(padded), {"launch_pdl": spec.use_pdl}
    ordering, product = (x, y, *x.shape, x.stride(0), spec, ORDER_BLOCK), (y, partials, semaphores, *x.shape, weights, spec)
    registers = min(255, 2048 // spec.warps)
    return [
        Launch(order, grid, ordering, options | {"num_warps": 4}),
        Launch(linear, (plan.programs,), product, options | {"num_warps": spec.warps, "maxnreg": registers}),
    ]


def _shape_in_order(x: torch.Tensor, spec: MmaSpec | WgmmaSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shape of x in the operands' order, and the programs that bring it there."""
    m, k = -(-x.shape[0] // spec.block_m) * spec.block_m, -(-x.shape[1] // spec.chunk) * spec.chunk
    return (m, k), (-(-k // ORDER_BLOCK), m)
