"""The tuned linear kernel: layouts, and how x becomes operands of the tensor cores.

Inside a product the order of K is free, as long as both operands agree. A lane of an mma holds a 32-bit register of neighbouring
k; with codes as they are stored, four lanes t = 0..3 hold 32 bits of a row each, that is 8 neighbouring 4-bit codes (4 bytes):

    k of a block of 16 words, as bits:   4-bit codes: w3 t1 t0 r2 r1 r0      8-bit codes: w3 t1 t0 r1 r0

A mask takes every fourth code (second byte) of the register, so r2 (r1) stays the lowest bit of an operand's k and the others
number the operands; a table of pairs yields neighbours, so r0 stays. x is read in 16 bytes (8) a lane, which are exactly
the k that the lane needs, and are split by the same bits.
"""

# ruff: noqa: RUF005
# Triton compiles a part of Python: an `else` after a return is how a branch is left out of what it compiles.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def dtype_of(C):
    """The 16-bit type of x, operands and y."""
    return gl.bfloat16 if C.dtype == "bf16" else gl.float16


@gluon.constexpr_function
def mma_layout(C):
    """mma.m16n8k16: chunks of K along the batch axis; its M axis: out features, over `warps_m` warps; its N axis: M."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[C.k_slices, C.warps_m, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def plain(rank):
    """Row after row."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank))[::-1])


@gluon.constexpr_function
def scale_layout(C, groups):
    """The same as the lanes of an mma need it: each warp its own chunk, each lane the rows of its sums."""
    registers = [[0, 1 << i] for i in range(groups.bit_length() - 1)] + _higher_rows(C)
    shape = [C.tile, C.k_slices * groups]
    return gl.DistributedLinearLayout(registers, [[0, 0], [0, 0], *_LOW_ROWS], _warps_of(C, groups), [], shape)


@gluon.constexpr_function
def sixteenth_layout(C, groups):
    """Groups of 16 codes: a lane needs those of the codes in its operands."""
    registers = [[0, 1 << i] for i in range(1, groups.bit_length() - 1)] + _higher_rows(C)
    shape = [C.tile, C.k_slices * groups]
    return gl.DistributedLinearLayout(registers, [[0, 0], [0, 1], *_LOW_ROWS], _warps_of(C, groups), [], shape)


@gluon.constexpr_function
def column_scale_layout(C, groups, groups_per_mma):
    """Groups side by side: a lane needs those of the columns of its sums; M is the lowest part of a column's number."""
    bits = groups_per_mma.bit_length() - 1
    columns = [[0, 0]] * (3 - bits) + [[0, 1 << i] for i in range(bits)]
    registers = columns[:1] if bits == 3 else []
    registers = registers + [[0, groups_per_mma << i] for i in range((groups // groups_per_mma).bit_length() - 1)] + _higher_rows(C)
    shape = [C.tile, C.k_slices * groups]
    return gl.DistributedLinearLayout(registers, [*columns[1:], *_LOW_ROWS], _warps_of(C, groups), [], shape)


_LOW_ROWS = ([1, 0], [2, 0], [4, 0])


@gluon.constexpr_function
def _higher_rows(C):
    """Rows of a tile that one lane holds: those of one mma, and of the next that its warp works on."""
    return [[8, 0]] + [[16 * C.warps_m << i, 0] for i in range((C.tile // (16 * C.warps_m)).bit_length() - 1)]


@gluon.constexpr_function
def _warps_of(C, groups):
    """Warps of a K slice divide the rows, K slices take the scales of their chunks."""
    across = [[16 << i, 0] for i in range(C.warps_m.bit_length() - 1)]
    return across + [[0, groups << i] for i in range(C.k_slices.bit_length() - 1)]


@gluon.constexpr_function
def x_layout(C, codes_per_word):
    """[k_slices, x_high, 4, x_low, 32] as the lanes of an mma need it; k = 32 i2 + i4, row = x_low i1 + i3."""
    if codes_per_word == 4:
        registers, lanes = [1, 2, 4], [8, 16]
    else:
        registers, lanes = [1, 2, 16], [4, 8]
    registers, lanes = [[0, 0, 0, 0, k] for k in registers], [[0, 0, 0, 0, k] for k in lanes]
    registers += [[0, 0, 1, 0, 0], [0, 0, 2, 0, 0]]
    # Row r of 8 sits in lanes 4 r .. 4 r + 3; where there are fewer rows, several lanes hold the same.
    rows = [[0, 0, 0, 1, 0]] if C.x_low == 2 else []
    rows += [[0, 1 << i, 0, 0, 0] for i in range(C.x_high.bit_length() - 1)]
    while len(rows) < 3:
        rows.append([0, 0, 0, 0, 0])
    warps = [[0, 0, 0, 0, 0]] * (C.warps_m.bit_length() - 1)
    warps += [[1 << i, 0, 0, 0, 0] for i in range(C.k_slices.bit_length() - 1)]
    shape = [C.k_slices, C.x_high, 4, C.x_low, 32]
    return gl.DistributedLinearLayout(registers + rows[3:], lanes + rows[:3], warps, [], shape)


@gluon.jit
def halves(x, n: gl.constexpr):
    """2^n tensors: those of the last n dims, each of size 2, in the order of their index."""
    parts = (x,)
    for level in gl.static_range(n):
        firsts = ()
        seconds = ()
        for i in gl.static_range(1 << level):
            a, b = gl.split(parts[i])
            firsts = firsts + (a,)
            seconds = seconds + (b,)
        parts = firsts + seconds
    return parts


@gluon.jit
def x_operands(x, S: gl.constexpr, C: gl.constexpr):
    """x [k_slices, x_high, 4, x_low, 32] as mma operands [k_slices, 16, rows]: by block, then by code of a word."""
    lb: gl.constexpr = gl.DotOperandLayout(1, mma_layout(C), 2)
    R: gl.constexpr = C.x_rows
    x = gl.reshape(gl.permute(x, [0, 1, 3, 2, 4]), [C.k_slices, R, 128])
    if S.kind == "signed":
        x = gl.reshape(x, [C.k_slices, R, 2, 2, 8, 2, 2])  # block, w3 and t, r1, r0
        x = gl.permute(x, [0, 4, 5, 1, 2, 3, 6])
    else:
        x = gl.reshape(x, [C.k_slices, R, 2, 2, 4, 2, 2, 2])  # block, w3, t, r2, r1, r0
        if S.kind != "table" and S.halved(C):
            x = gl.permute(x, [0, 7, 4, 5, 1, 2, 3, 6])
        elif S.kind != "table":
            x = gl.permute(x, [0, 3, 4, 5, 1, 2, 6, 7])
        elif S.halved(C):
            x = gl.permute(x, [0, 5, 4, 7, 1, 2, 3, 6])
        else:
            x = gl.permute(x, [0, 3, 4, 7, 1, 2, 6, 5])
    parts = halves(gl.reshape(x, [C.k_slices, 16, R, 2, 2, 2]), 3)
    made = ()
    for i in gl.static_range(8):
        one = _to_rows(parts[i], lb, C)
        if S.groups_per_mma(C) == 1 and S.x_factor(C) != 1.0:
            one = one * gl.full([C.k_slices, 16, C.block_m], S.x_factor(C), one.dtype, lb)
        made = made + (one,)
    return made


@gluon.jit
def selectors(S: gl.constexpr, C: gl.constexpr):
    """For each block of 16 words whose groups lie side by side: what x is multiplied by, 0 in the columns of other groups."""
    lb: gl.constexpr = gl.DotOperandLayout(1, mma_layout(C), 2)
    inside: gl.constexpr = gl.constexpr(64 // S.group)  # groups of a block
    w = gl.arange(0, C.k_slices, layout=gl.SliceLayout(1, gl.SliceLayout(2, lb)))[:, None, None]
    k = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, lb)))[None, :, None]
    n = gl.arange(0, C.block_m, layout=gl.SliceLayout(0, gl.SliceLayout(1, lb)))[None, None, :]
    made = ()
    for block in gl.static_range(gl.constexpr((S.operands(C) + 3) // 4)):
        group = k * inside // 16 + block * inside
        if S.halved(C):
            group = group % S.groups_per_mma(C)  # the highest bit of k numbers the codes of a byte
        made = made + (gl.where(n // C.x_rows + w * 0 == group, S.x_factor(C), 0.0).to(dtype_of(C)),)
    return made


@gluon.jit
def _to_rows(x, lb: gl.constexpr, C: gl.constexpr):
    """[W, 16, R] -> [W, 16, rows]: R rows that lanes hold several times over become as many as a product has."""
    R: gl.constexpr = C.x_rows
    if R < 8:
        like = gl.reshape(gl.full([C.k_slices, 16, 8], 0.0, x.dtype, lb), [C.k_slices, 16, 8 // R, R])
        x = gl.convert_layout(x, gl.SliceLayout(2, like.type.layout), assert_trivial=True)
        x, like = gl.broadcast(gl.expand_dims(x, 2), like)
        x = gl.reshape(x, [C.k_slices, 16, 8])
    return gl.convert_layout(x, lb, assert_trivial=True)
