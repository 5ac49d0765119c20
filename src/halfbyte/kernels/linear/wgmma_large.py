"""GEMMs with quantized weights for M from 33 on Hopper, in Gluon: packed weights are unpacked between warp-group MMAs.

    y[m, n] = sum_k x[m, k] W[n, k],     W[n, k] = scale[n, g] (code[n, k] - zero[n, g]),  g the group that k lies in

A tile is 128 out features, 64 for each of two warp groups, times 64 to 256 batch rows. The weight is the left operand, in
registers; x is the right operand, in shared memory, as it is: operands have k in its own order (linear/wgmma_large_operands.py).
Scales multiply the codes in 16 bits. While MMAs run, the next 16 or 64 k are unpacked into other registers (`C.pieces`). With x in
INT8 (`C.x_bits`) 64 k become 128, sums are exact integers, and linear/rounding.py has made x, its scales and those of the weight.

Warps are specialized. One copies x (TMA) into a ring, whose slots are handed on by mbarriers: one says that x is there, one that
all warps have read it. The eight that multiply do not meet in the loop: each copies the codes of its own rows (cp.async) and loads
their scales.

Which tiles a program computes, dense or of experts, is in linear/wgmma_large_work.py. Parts of a tile exchange partial results
through the workspace: each program adds up some columns, in the order of parts.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.common.compat import barrier, copy_tile, view
from halfbyte.kernels.common.launch import Launch
from halfbyte.kernels.linear.async_copy import _copy_asm, make_pool
from halfbyte.kernels.linear.operands import dtype_of
from halfbyte.kernels.linear.ring import Weights
from halfbyte.kernels.linear.rounding import rounding
from halfbyte.kernels.linear.sync import _await_asm, check_addresses, commit, thread_of
from halfbyte.kernels.linear.unpack import make_codebook
from halfbyte.kernels.linear.wgmma_large_exchange import columns_of, exchange, write_columns, write_sorted
from halfbyte.kernels.linear.wgmma_large_operands import load_scales, load_words, packed_operands, unpacked
from halfbyte.kernels.linear.wgmma_large_work import advance, first_row, tile_at, weight_of, work_of
from halfbyte.kernels.linear.wgmma_operands import sums_layout
from halfbyte.plans.gemm_plan import GemmPlan

# ----------------------------------------------------------------------------------------------------- copies and mbarriers


@gluon.constexpr_function
def _x_layout(C):
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=C.x_bits, rank=2)


@gluon.constexpr_function
def _x_type(C):
    return gl.int8 if C.x_bits == 8 else dtype_of(C)


@gluon.constexpr_function
def _sums_type(C):
    return gl.int32 if C.x_bits == 8 else gl.float32


@gluon.jit
def _x_of(pool, slot, block: gl.constexpr, C: gl.constexpr):
    """A block of C.width k of a slot of x, [block_m, width]."""
    shape: gl.constexpr = [C.block_m, C.width]
    first: gl.constexpr = gl.constexpr(C.x_at // (128 * C.block_m))
    return view(pool, first + slot * C.k_blocks + block, _x_type(C), shape, _x_layout(C))


@gluon.jit
def _asm(text: gl.constexpr, registers: gl.constexpr, operands):
    """PTX for its effect alone."""
    gl.inline_asm_elementwise(text, registers, operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _init_asm(C):
    lines = ["{ .reg .b32 b; .reg .pred q; mov.u32 b, global_smem; setp.eq.u32 q, $1, 0;"]
    for slot in range(2 * C.x_stages):
        lines.append(f"@q mbarrier.init.shared.b64 [b+{C.barriers_at + 8 * slot}], {C.warps if slot < C.x_stages else 1};")
    return " ".join(lines) + " fence.proxy.async.shared::cta; } // $0"


@gluon.constexpr_function
def _free_asm(C):
    start = "{ .reg .b32 b; .reg .b64 t; .reg .pred q; mov.u32 b, global_smem; add.u32 b, b, $2; setp.eq.u32 q, $1, 0;"
    return f"{start} @q mbarrier.arrive.shared.b64 t, [b+{C.barriers_at}]; }} // $0"


@gluon.jit
def _free_x_before(slot, C: gl.constexpr):
    """This warp's MMAs have read the slot of x before this one."""
    before = gl.where(slot == 0, C.x_stages - 1, slot - 1)
    _asm(_free_asm(C), "=r,r,r,~{memory}", [thread_of(C) % 32, before * 8])


@gluon.jit
def _turn(slot, parity, C: gl.constexpr):
    """The next slot of x, and the parity of its mbarriers' phase."""
    last = slot == C.x_stages - 1
    return gl.where(last, 0, slot + 1), gl.where(last, parity ^ 1, parity)


@gluon.constexpr_function
def _code_asm(S, C):
    """A thread's copies of codes: one, or two of rows 8 from each other."""
    pieces = S.words(C) // 8
    return _copy_asm(
        [(row, 0, 0, row * pieces * 16) for row in range(0, 16, 64 // pieces // 2)], 0, 16, False, False, 1, C.whole_tiles
    )


@gluon.jit
def _piece(S: gl.constexpr, C: gl.constexpr):
    """The row of a thread's first copy of codes, one of those that its warp multiplies, and the number of the 16 bytes in it."""
    pieces: gl.constexpr = gl.constexpr(S.words(C) // 8)
    t = thread_of(C)
    return t // 32 * 16 + t % 32 // pieces, t % pieces


@gluon.jit
def _copy_codes(slot, codes, rows, left, K, S: gl.constexpr, C: gl.constexpr):
    """Ask for codes of a chunk, of so many rows from a thread's first one on, of which so many k are left."""
    pieces: gl.constexpr = gl.constexpr(S.words(C) // 8)
    row, piece = _piece(S, C)
    column = piece ^ (row // gl.constexpr(8 // pieces) % pieces)
    into = slot * S.slot_bytes(C) + (row * pieces + column) * 16
    there = gl.where(piece * (8 * S.codes_per_word) < left, rows, 0)
    _asm(_code_asm(S, C), "=r,r,l,r,r,~{memory}", [into, codes, K // S.codes_per_word * 2, there])
    commit()


@gluon.constexpr_function
def _codes_there_asm(groups):
    return f"cp.async.wait_group {groups}; bar.warp.sync 0xffffffff; // $0"


# --------------------------------------------------------------------------------------------------------- warps that part


@gluon.jit
def _codes_at(position, k, K, work, weights, Blocks, S: gl.constexpr, C: gl.constexpr):
    """The address of a thread's first piece of codes of a tile from k on, and the rows from there on."""
    codes, _, _, n0, rows = weight_of(tile_at(position, work, Blocks, C), weights, Blocks, C)
    width = K // S.codes_per_word
    row, piece = _piece(S, C)
    at = n0.to(gl.int64) * width + (row * width + piece * 8 + k // S.codes_per_word)
    return codes.to(gl.int64) + 2 * at, rows - row


@gluon.jit
def _copy_x(X, pool, M, K, weights, Blocks, C: gl.constexpr):
    """The warp that copies x."""
    position, step, end, work = work_of(M, K, weights, Blocks, C)
    done = end * 0
    slot = end * 0
    parity = end * 0
    one: gl.constexpr = [1]
    if C.use_pdl:
        gdc_wait()
    while done < end:
        at = tile_at(position, work, Blocks, C)
        for i in gl.static_range(gl.constexpr(C.step // C.chunk)):
            _asm(_await_asm(C.barriers_at), "=r,r,r,~{memory}", [slot * 8, parity ^ 1])
            there = view(pool, gl.constexpr(C.barriers_at // 8 + C.x_stages) + slot, gl.int64, one, mbarrier.MBarrierLayout())
            mbarrier.expect(there, C.x_bytes)
            for j in gl.static_range(gl.constexpr(C.k_blocks)):
                corner = [first_row(at, Blocks, C), step * C.step + i * C.chunk + j * C.width]
                copy_tile(X, corner, there, _x_of(pool, slot, j, C))
            slot, parity = _turn(slot, parity, C)
        position, step, done, _ = advance(position, step, done, work)


@gluon.jit
def _fetch(chunk: gl.constexpr, ahead, end, K, work, weights, Blocks, S: gl.constexpr, C: gl.constexpr):
    """Ask for the next codes: this chunk of a step."""
    slot, position, step, done, codes, rows = ahead
    left = gl.where(done < end, K - (step * C.step + chunk * C.chunk), 0)
    _copy_codes(slot, codes, rows, left, K, S, C)
    slot = gl.where(slot == C.stages - 1, 0, slot + 1)
    codes += C.chunk // S.codes_per_word * 2
    if chunk == C.step // C.chunk - 1:
        position, step, done, over = advance(position, step, done, work)
        if over:
            codes, rows = _codes_at(position, 0, K, work, weights, Blocks, S, C)
    return slot, position, step, done, codes, rows


@gluon.jit
def _words_of(pool, slot, groups: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """The first words of a slot of codes, once at most so many groups of this thread's later copies are under way."""
    _asm(_codes_there_asm(groups), "=r,~{memory}", [])
    return load_words(pool, slot, 0, S, C)


@gluon.jit
def _multiply(p, words, pool, slots, block: gl.constexpr, scale, zero, adds: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """The MMAs of C.width k, a block of a slot, left under way; those before are done. With four, the next are unpacked under each.

    words: of these codes, and those of the next are returned, loaded halfway; both () where a single MMA takes all.
    """
    x_slot, parity, code_slot = slots
    last: gl.constexpr = block == C.k_blocks - 1
    following = gl.where(code_slot == C.stages - 1, 0, code_slot + 1)
    if C.pieces == 1 and block == 0:
        words = _words_of(pool, code_slot, gl.constexpr(C.ahead - 1), S, C)
    elif C.pieces == 1:
        words = load_words(pool, code_slot, block, S, C)
    packed = packed_operands(words, scale, zero, S, C)
    left = unpacked(packed, 0, S, C)
    if block == 0:
        _asm(_await_asm(C.barriers_at + 8 * C.x_stages), "=r,r,r,~{memory}", [x_slot * 8, parity])
    x = _x_of(pool, x_slot, block, C)
    width: gl.constexpr = C.width // C.pieces
    words = ()
    for i in gl.static_range(gl.constexpr(C.pieces)):
        right = x.slice(width * i, width, dim=1).permute([1, 0])
        p = warpgroup_mma(left, right, p, use_acc=adds or i > 0, is_async=True)
        if i == 1 and last:
            words = _words_of(pool, following, gl.constexpr(C.ahead - 2 + (C.k_blocks > 1)), S, C)
        elif i == 1:
            words = load_words(pool, code_slot, block + 1, S, C)
        if i + 1 < C.pieces:
            left = unpacked(packed, i + 1, S, C)
    if last:
        x_slot, parity = _turn(x_slot, parity, C)
        code_slot = following
    return warpgroup_mma_wait(C.pieces, deps=[p]), words, (x_slot, parity, code_slot)


@gluon.jit
def _step(
    p, words, slots, ahead, scale, zero, pool, end, K, work, weights, Blocks, first: gl.constexpr, S: gl.constexpr, C: gl.constexpr
):
    """A step's MMAs, and copies that are further ahead; first: of a tile."""
    for half in gl.static_range(2):
        x_slot = slots[0]
        p, words, slots = _multiply(p, words, pool, slots, half % C.k_blocks, scale[half], zero[half], half > 0 or not first, S, C)
        if half % C.k_blocks == 0:
            if half > 0 or not first:
                _free_x_before(x_slot, C)
            ahead = _fetch((half + C.ahead) % (C.step // C.chunk), ahead, end, K, work, weights, Blocks, S, C)
    return p, words, slots, ahead


@gluon.jit
def _compute(pool, Tokens, Partials, Semaphores, M, K, weights, Blocks, C: gl.constexpr):
    """The warps that unpack and multiply."""
    S: gl.constexpr = C.weights[0]
    position, step, end, work = work_of(M, K, weights, Blocks, C)
    steps, shared, first_own = work[2], work[3], work[4]
    # Codes first, ahead of the wait for the kernel before: that may write x, but not a weight.
    codes, rows = _codes_at(position, step * C.step, K, work, weights, Blocks, S, C)
    ahead = (end * 0, position, step, end * 0, codes, rows)
    for i in gl.static_range(gl.constexpr(C.ahead)):
        ahead = _fetch(i % (C.step // C.chunk), ahead, end, K, work, weights, Blocks, S, C)
    if C.use_pdl:
        gdc_wait()
        gdc_launch_dependents()
    done = end * 0
    slots = (end * 0, end * 0, end * 0)
    words = ()
    if C.pieces > 1:
        words = _words_of(pool, slots[2], gl.constexpr(C.ahead - 1), S, C)
    while done < end:
        stop = gl.where(done < shared, step + shared, steps)
        at = tile_at(position, work, Blocks, C)
        _, scales, zeros, n0, left = weight_of(at, weights, Blocks, C)
        scale, zero = load_scales(scales, zeros, n0, left, step, K, S, C)
        next_scale, next_zero = load_scales(scales, zeros, n0, left, step + 1, K, S, C)
        # The first step separately: its MMAs define the sums. Were they set to 0, the assembler would make all MMAs wait.
        p = gl.full([C.tile, C.block_m], 0.0, _sums_type(C), sums_layout(C))
        p, words, slots, ahead = _step(p, words, slots, ahead, scale, zero, pool, end, K, work, weights, Blocks, True, S, C)
        for now in range(step + 1, stop):
            scale, zero = next_scale, next_zero
            next_scale, next_zero = load_scales(scales, zeros, n0, left, now + 1, K, S, C)
            p, words, slots, ahead = _step(p, words, slots, ahead, scale, zero, pool, end, K, work, weights, Blocks, False, S, C)
        sums = columns_of(warpgroup_mma_wait(0, deps=[p]), C)
        _free_x_before(slots[0], C)
        if Blocks is not None:
            for i in gl.static_range(gl.constexpr(C.block_m // C.sums)):
                write_sorted(sums[i], at, i * C.sums, weights, S, C)
        elif C.whole or stop - step == steps:
            for i in gl.static_range(gl.constexpr(C.block_m // C.sums)):
                write_columns(sums[i], at[0], at[1] * C.block_m + i * C.sums, M, weights, Tokens, S, C)
        else:
            exchange(sums, position, at[0], at[1], work, Partials, Semaphores, M, weights, Tokens, S, C)
        done += stop - step
        position = gl.where(done == shared, first_own, position + gl.num_programs(0))
        step = end * 0


@gluon.jit(do_not_specialize=["M"])
def linear_large(
    X,  # a TMA descriptor of x [M, K] in boxes [C.block_m, C.width]
    Tokens,  # fp32 [M], per-token scales of x in INT8; else None
    Partials,  # fp32 workspace: a partial result of each program
    Semaphores,  # int32, one for each tile that is split, zero before and after
    M,
    K,
    weights: Weights,  # with routing one stack: N of its features are an expert
    Blocks,  # with routing int32 [blocks + 1, 4], see linear/experts_sort.py; else None
    C: gl.constexpr,
):
    """One program's share of all tiles: 128 out features times C.block_m batch rows."""
    S: gl.constexpr = C.weights[0]
    pool = make_pool(C)
    _asm(_init_asm(C), "=r,r,~{memory}", [thread_of(C)])
    if S.kind == "table":
        make_codebook(pool, S, C)
    check_addresses(pool, S, C)
    barrier()
    gl.warp_specialize(
        [
            (_compute, (pool, Tokens, Partials, Semaphores, M, K, weights, Blocks, C)),
            (_copy_x, (X, pool, M, K, weights, Blocks, C)),
        ],
        [1],
        [C.copy_registers],
    )


# --------------------------------------------------------------------------------------------------------------- host code


def launches(
    x: torch.Tensor,
    weights: Weights,
    plan: GemmPlan,
    partials: torch.Tensor | None,
    semaphores: torch.Tensor | None,
    around: None = None,
    blocks: torch.Tensor | None = None,
) -> list[Launch]:
    """As `mma.launches`. The kernel takes a TMA descriptor of x in place of its address.

    blocks: with routing, the list of blocks of sorted pairs, each a row of the batch and of the result; weights are one stack then
    (`ring.stack_of`), and there is no workspace.
    """
    spec, shape, tokens, ahead = plan.spec, x.shape, None, list[Launch]()
    if spec.x_bits == 8:
        x, tokens, weights, ahead = rounding(x, weights, spec)
    described = TensorDescriptor.from_tensor(x, [spec.block_m, spec.width], _x_layout(spec))
    options = {"launch_pdl": spec.use_pdl, "num_warps": spec.warps, "maxnreg": spec.registers}
    arguments = (described, tokens, partials, semaphores, *shape, weights, blocks, spec)
    return [*ahead, Launch(linear_large, (plan.programs,), arguments, options)]
