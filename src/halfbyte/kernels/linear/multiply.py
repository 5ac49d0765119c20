"""The linear kernel for small M: what one step of a tile adds to its sums.

Scales multiply fp32 sums of a group. With M of 1 to 4 an MMA has unused columns, which groups of 32 and 16 codes share: x is 0
in the columns of all groups but its own, and the scales of several groups are applied at once, by different lanes. With more rows
groups of 32 are summed one by one, and the scales of 16-code groups multiply codes, which is exact in 16 bits.
"""

# ruff: noqa: RET505, RUF005
# Triton compiles a part of Python: tuples are joined with `+`, and an `else` after a return is how a branch is left out of what it
# compiles.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from halfbyte.kernels.common.scales import to_float
from halfbyte.kernels.linear.async_copy import codes_of, scales_of, x_of
from halfbyte.kernels.linear.operands import (
    column_scale_layout,
    dtype_of,
    halves,
    mma_layout,
    scale_layout,
    sixteenth_layout,
    x_layout,
    x_operands,
)
from halfbyte.kernels.linear.unpack import code_operands


@gluon.constexpr_function
def _bits(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def _entry_asm(type_of, at):
    return f"{{ .reg .b32 a; mov.u32 a, global_smem; add.u32 a, a, $1; ld.shared.{type_of} $0, [a+{at}]; }}"


@gluon.jit
def _stored(pool, slot, zeros: gl.constexpr, layout: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Scales (or zero points) of a step, [tile, columns], by lanes as an MMA needs them."""
    if C.odd_zeros if zeros else C.odd_scales:  # odd rows lie 2 bytes further
        base: gl.constexpr = C.zeros_at if zeros else C.scales_at
        size: gl.constexpr = 1 if zeros else S.scale_bytes
        row = gl.arange(0, C.tile, layout=gl.SliceLayout(1, layout))[:, None]
        c = gl.arange(0, C.columns(S), layout=gl.SliceLayout(0, layout))[None, :]
        at = (slot * C.tile + row) * C.scale_stride(zeros) + row % 2 * 2 + c * size
        if size == 1:
            s = gl.inline_asm_elementwise(_entry_asm("u8", base), "=r,r,~{memory}", [at], dtype=gl.int32, is_pure=False, pack=1)
            return s.to(gl.uint8)
        else:
            s = gl.inline_asm_elementwise(_entry_asm("b16", base), "=h,r,~{memory}", [at], dtype=gl.int16, is_pure=False, pack=1)
            return s.to(gl.float16, bitcast=True)
    else:
        return scales_of(pool, slot, zeros, S, C).load(layout)


@gluon.jit
def _scales_of(pool, slot, zeros: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Scales (or zero points) of a step: for each group of a chunk, those of every chunk, [k_slices, tile, 1]."""
    mma: gl.constexpr = mma_layout(C)
    G: gl.constexpr = C.columns(S) // C.k_slices
    twos: gl.constexpr = [2] * _bits(G)
    s = gl.permute(gl.reshape(_stored(pool, slot, zeros, scale_layout(C, G), S, C), [C.tile, C.k_slices, G]), [1, 0, 2])
    parts = halves(gl.reshape(s, [C.k_slices, C.tile] + twos), _bits(G))
    made = ()
    for g in gl.static_range(G):
        made = made + (gl.expand_dims(gl.convert_layout(parts[g], gl.SliceLayout(2, mma), assert_trivial=True), 2),)
    return made


@gluon.jit
def _column_scales(pool, slot, zeros: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Scales (or zero points) of a step, where groups lie side by side: for each product those of its columns, in fp32."""
    mma: gl.constexpr = mma_layout(C)
    groups_per_mma: gl.constexpr = S.groups_per_mma(C)
    G: gl.constexpr = C.columns(S) // C.k_slices
    sets: gl.constexpr = _bits(G // groups_per_mma)
    twos: gl.constexpr = [2] * sets
    like = gl.reshape(
        gl.full([C.k_slices, C.tile, C.block_m], 0.0, gl.float32, mma), [C.k_slices, C.tile, groups_per_mma, C.x_rows]
    )
    s = gl.reshape(
        _stored(pool, slot, zeros, column_scale_layout(C, G, groups_per_mma), S, C),
        [C.tile, C.k_slices, G // groups_per_mma, groups_per_mma],
    )
    parts = halves(gl.reshape(gl.permute(s, [1, 0, 3, 2]), [C.k_slices, C.tile, groups_per_mma] + twos), sets)
    made = ()
    for i in gl.static_range(gl.constexpr(G // groups_per_mma)):
        one = gl.convert_layout(parts[i], gl.SliceLayout(3, like.type.layout), assert_trivial=True)
        made = made + (one,)
    return made


@gluon.jit
def _over_columns(s, C: gl.constexpr):
    """fp32 [k_slices, tile, groups of an mma] -> [k_slices, tile, M]: the M columns of a group share what it has."""
    mma: gl.constexpr = mma_layout(C)
    like = gl.reshape(
        gl.full([C.k_slices, C.tile, C.block_m], 0.0, gl.float32, mma), [C.k_slices, C.tile, C.block_m // C.x_rows, C.x_rows]
    )
    s, like = gl.broadcast(gl.expand_dims(s, 3), like)
    return gl.convert_layout(gl.reshape(s, [C.k_slices, C.tile, C.block_m]), mma, assert_trivial=True)


@gluon.jit
def _rows_alike(c, C: gl.constexpr):
    """[k_slices, 16 warps_m, M] with all its rows the same -> [k_slices, tile, M]; registers only."""
    for i in gl.static_range(_bits(C.tile // (16 * C.warps_m))):
        c = gl.permute(gl.join(c, c), [0, 3, 1, 2])
        c = gl.reshape(c, [C.k_slices, (32 * C.warps_m) << i, C.block_m])
    return gl.convert_layout(c, mma_layout(C), assert_trivial=True)


@gluon.jit
def _sixteenths(pool, slot, S: gl.constexpr, C: gl.constexpr):
    """Scales of 16-code groups, for each block of a chunk: 16-bit operands [W, tile, 16] to multiply codes by."""
    la: gl.constexpr = gl.DotOperandLayout(0, mma_layout(C), 2)
    half: gl.constexpr = dtype_of(C)
    like = gl.full([C.k_slices, C.tile, 16], 0.0, half, la)
    grouped: gl.constexpr = gl.reshape(like, [C.k_slices, C.tile, 4, 4]).type.layout
    G: gl.constexpr = C.columns(S) // C.k_slices
    twos: gl.constexpr = [2] * _bits(G // 4)
    s = (to_float(_stored(pool, slot, False, sixteenth_layout(C, G), S, C), S) * S.scale_factor(C)).to(half)
    s = gl.permute(gl.reshape(s, [C.tile, C.k_slices, G // 4, 4]), [1, 0, 3, 2])
    parts = halves(gl.reshape(s, [C.k_slices, C.tile, 4] + twos), _bits(G // 4))
    made = ()
    for block in gl.static_range(G // 4):
        one = gl.expand_dims(gl.convert_layout(parts[block], gl.SliceLayout(3, grouped), assert_trivial=True), 3)
        one = one + gl.full([C.k_slices, C.tile, 4, 4], 0.0, half, grouped)
        made = made + (gl.convert_layout(gl.reshape(one, [C.k_slices, C.tile, 16]), la, assert_trivial=True),)
    return made


@gluon.jit
def _sums_of(x, first: gl.constexpr, last: gl.constexpr, C: gl.constexpr):
    """sum of x over operands first..last-1, every row of [k_slices, 16 warps_m, M] the same: an MMA with ones."""
    la: gl.constexpr = gl.DotOperandLayout(0, mma_layout(C), 2)
    ones = gl.full([C.k_slices, 16 * C.warps_m, 16], 1.0, x[0].dtype, la)
    total = gl.full([C.k_slices, 16 * C.warps_m, C.block_m], 0.0, gl.float32, mma_layout(C))
    for i in gl.static_range(first, last):
        total = mma_v2(ones, x[i], total)
    return total


@gluon.jit
def multiply(acc, pool, slot, scale_slot, select, S: gl.constexpr, C: gl.constexpr):
    """acc + one step's GEMM, [k_slices, tile, M]."""
    scales = ()
    zeros = ()
    if S.groups_per_mma(C) > 1:
        scales = _column_scales(pool, scale_slot, False, S, C)
        if S.zero:
            zeros = _column_scales(pool, scale_slot, True, S, C)
        dot = gl.full([C.k_slices, C.tile, C.block_m], 0.0, gl.float32, mma_layout(C))
        sums = gl.full([C.k_slices, 16 * C.warps_m, C.block_m], 0.0, gl.float32, mma_layout(C))
        for part in gl.static_range(gl.constexpr(C.chunk // 128)):
            acc, dot, sums = _multiply_side_by_side(acc, dot, sums, pool, slot, part, scales, zeros, select, S, C)
        return acc
    if S.operands_scaled(C):
        scales = _sixteenths(pool, scale_slot, S, C)
    elif S.groups > 0:
        scales = _scales_of(pool, scale_slot, False, S, C)
    if S.zero:
        zeros = _scales_of(pool, scale_slot, True, S, C)
    for part in gl.static_range(gl.constexpr(C.chunk // 128)):
        acc = _multiply_part(acc, pool, slot, part, scales, zeros, S, C)
    return acc


@gluon.jit
def _multiply_side_by_side(acc, dot, sums, pool, slot, part: gl.constexpr, scales, zeros, select, S: gl.constexpr, C: gl.constexpr):
    """acc + the products of 128 k of each chunk, each group in columns of its own.

    dot, sums: what is begun of the products and of the sums of x.
    """
    mma: gl.constexpr = mma_layout(C)
    la: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    n: gl.constexpr = S.operands(C)
    shift: gl.constexpr = 0.0 if S.bias_in_unpack(C) else S.shift(C.dtype)
    ones = gl.full([C.k_slices, 16 * C.warps_m, 16], 1.0, select[0].dtype, la)
    x = x_operands(x_of(pool, slot, C).slice(4 * part, 4, dim=2).load(x_layout(C, S.codes_per_word)), S, C)
    a = ()
    for i in gl.static_range(8):
        if i % 4 == 0:
            a = code_operands(codes_of(pool, slot, gl.constexpr(2 * part + i // 4), S, C), (), S, C)
        if (8 * part + i) % n == 0:
            dot = gl.full([C.k_slices, C.tile, C.block_m], 0.0, gl.float32, mma)
            sums = gl.full([C.k_slices, 16 * C.warps_m, C.block_m], 0.0, gl.float32, mma)
        one = x[i] * select[(8 * part + i) % n // 4]
        dot = mma_v2(a[i % 4], one, dot)
        if S.zero or shift != 0.0:
            sums = mma_v2(ones, one, sums)
        if (8 * part + i) % n == n - 1:
            if S.zero:
                zero = zeros[(8 * part + i) // n].to(gl.float32) * S.unit(C.dtype) + shift
                dot = dot - _over_columns(zero, C) * _rows_alike(sums, C)
            elif shift != 0.0:
                dot = dot - shift * _rows_alike(sums, C)
            acc += dot * _over_columns(to_float(scales[(8 * part + i) // n], S), C)
    return acc, dot, sums


@gluon.jit
def _multiply_part(acc, pool, slot, part: gl.constexpr, scales, zeros, S: gl.constexpr, C: gl.constexpr):
    """acc + the products of 128 k of each chunk."""
    mma: gl.constexpr = mma_layout(C)
    x = x_operands(x_of(pool, slot, C).slice(4 * part, 4, dim=2).load(x_layout(C, S.codes_per_word)), S, C)
    planes: gl.constexpr = S.codes_per_word
    first: gl.constexpr = part * (8 // planes)  # block of words
    shift: gl.constexpr = 0.0 if S.bias_in_unpack(C) else S.shift(C.dtype)
    # Sums of whole rows, and of codes that are scaled before the product, go straight into `acc`.
    direct: gl.constexpr = S.groups == 0 or S.operands_scaled(C)
    groups: gl.constexpr = 1 if direct else S.groups
    each: gl.constexpr = 8 // groups
    a = ()
    for g in gl.static_range(groups):
        dot = gl.full([C.k_slices, C.tile, C.block_m], 0.0, gl.float32, mma)
        if direct:
            dot = acc
        for i in gl.static_range(g * each, g * each + each):
            if i % planes == 0:
                block = codes_of(pool, slot, gl.constexpr(first + i // planes), S, C)
                a = code_operands(block, zeros[part * groups + g :], S, C)
            if S.operands_scaled(C):
                dot = mma_v2(a[i % planes] * scales[first + i // planes], x[i], dot)
            else:
                dot = mma_v2(a[i % planes], x[i], dot)
        # The bias of the codes, in parallel with the MMAs and not ahead of them: neither chain waits for the other.
        if S.zero and not S.bias_in_unpack(C):
            sums = _rows_alike(_sums_of(x, g * each, g * each + each, C), C)
            dot = dot - (zeros[part * groups + g].to(gl.float32) * S.unit(C.dtype) + shift) * sums
        elif shift != 0.0:
            dot = dot - shift * _rows_alike(_sums_of(x, g * each, g * each + each, C), C)
        if direct:
            acc = dot
        else:
            acc += dot * to_float(scales[part * groups + g], S)
    return acc
