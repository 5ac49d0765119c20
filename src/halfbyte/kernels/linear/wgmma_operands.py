"""Warp-group MMAs of quantized weights: layouts, the order of K, and how stored words become the left operand."""

# ruff: noqa: RUF005
# Triton compiles a part of Python: tuples are joined with `+`.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.common.layouts import by_pairs
from halfbyte.kernels.common.scales import to_float
from halfbyte.kernels.linear.operands import dtype_of
from halfbyte.kernels.linear.unpack import look_up, unpack_in_place, unpack_int8, unpack_nibbles


@gluon.constexpr_function
def sums_layout(C):
    """wgmma.m64nNk16, or k32 of INT8: out features are its M axis, 16 for each warp; the batch is its N axis.

    With INT8 Triton knows N up to 224: two MMAs multiply 256 rows.
    """
    columns = C.block_m if C.x_bits == 16 else min(C.block_m, 128)
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[C.warps_m, 1], instr_shape=[16, columns, 256 // C.x_bits])


@gluon.jit
def in_order(x, S: gl.constexpr, C: gl.constexpr):
    """x [blocks, rows, 64] in the order of k that `code_operands` has: by operand of 16 k, then as its lanes hold them."""
    B: gl.constexpr = x.shape[0]
    R: gl.constexpr = x.shape[1]
    if S.kind == "signed":
        x = gl.permute(gl.reshape(x, [B, R, 2, 16, 2]), [0, 1, 2, 4, 3])
    elif S.kind == "unsigned" and C.halved:
        x = gl.permute(gl.reshape(x, [B, R, 2, 8, 4]), [0, 1, 2, 4, 3])
    elif S.kind == "unsigned":
        x = gl.permute(gl.reshape(x, [B, R, 16, 4]), [0, 1, 3, 2])
    elif C.halved:
        x = gl.permute(gl.reshape(x, [B, R, 2, 4, 2, 2, 2]), [0, 1, 2, 5, 4, 3, 6])
    else:
        x = gl.permute(gl.reshape(x, [B, R, 2, 4, 2, 2, 2]), [0, 1, 5, 4, 2, 3, 6])
    return gl.reshape(x, [B, R, 64])


@gluon.constexpr_function
def _sixteenths_asm(C):
    """E4M3 scales $2 of 64 k, one a byte: as 16-bit numbers, each twice, the two that the bytes of $4 say."""
    lines = ["{ .reg .b32 s; .reg .b16 a, b; .reg .f32 f; prmt.b32 s, $2, 0, $4; mov.b32 {a, b}, s; cvt.rn.f16x2.e4m3x2 s, a;"]
    if C.dtype == "bf16":
        lines.append(
            "mov.b32 {a, b}, s; cvt.f32.f16 f, a; cvt.rn.bf16x2.f32 $0, f, f; cvt.f32.f16 f, b; cvt.rn.bf16x2.f32 $1, f, f;"
        )
    else:
        lines.append("prmt.b32 $0, s, 0, 0x1010; prmt.b32 $1, s, 0, 0x3232;")
    return " ".join(lines) + " } // $3 $5"


@gluon.jit
def sixteenths(pairs, S: gl.constexpr, C: gl.constexpr):
    """Scales of 16-code groups, two in each of `pairs` [tile], for each 64 k of a step: 16-bit operands [tile, 16] for codes."""
    like = gl.full([C.tile, 16], 0.0, dtype_of(C), gl.DotOperandLayout(0, sums_layout(C), 2))
    half, _ = gl.split(gl.permute(gl.reshape(like, [C.tile, 2, 8]), [0, 2, 1]))
    layout: gl.constexpr = gl.reshape(half, [C.tile, 2, 4]).type.layout
    odd = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    which = (0x4420 + odd * 0x11).broadcast_to([C.tile, 2, 4])
    made = ()
    for block in gl.static_range(gl.constexpr(C.columns(S) // 2)):
        four = pairs[2 * block] & 0xFFFF | pairs[2 * block + 1] << 16
        four = gl.convert_layout(four, gl.SliceLayout(1, gl.SliceLayout(2, layout)), assert_trivial=True)
        four = gl.expand_dims(gl.expand_dims(four, 1), 2).broadcast_to([C.tile, 2, 4])
        first, second = by_pairs(_sixteenths_asm(C), 2, gl.constexpr(C.dtype), (four, which), 4)
        made = made + (_one_behind_other(gl.reshape(first, [C.tile, 8]), gl.reshape(second, [C.tile, 8]), C),)
    return made


@gluon.constexpr_function
def _pairwise_asm(name, C):
    return f"{name}.{'bf16x2' if C.dtype == 'bf16' else 'f16x2'} $0, $1, $2;"


@gluon.jit
def _pairwise(name: gl.constexpr, a, b, C: gl.constexpr):
    """An instruction on two numbers of 16 bits at a time."""
    return gl.inline_asm_elementwise(_pairwise_asm(name, C), "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2)


@gluon.jit
def _fused(p, factor: gl.constexpr, plus, C: gl.constexpr):
    """p * factor + plus, exactly, two numbers of 16 bits at a time."""
    factor = gl.full([C.tile, 16], factor, dtype_of(C), p.type.layout)
    asm: gl.constexpr = gl.constexpr(f"fma.rn.{'bf16x2' if C.dtype == 'bf16' else 'f16x2'} $0, $1, $2, $3;")
    return gl.inline_asm_elementwise(asm, "=r,r,r,r", [p, factor, plus], dtype=p.dtype, is_pure=True, pack=2)


@gluon.jit
def _rows(v, C: gl.constexpr):
    """[tile], the same for all 16 k of an operand."""
    la: gl.constexpr = gl.DotOperandLayout(0, sums_layout(C), 2)
    v = gl.expand_dims(gl.convert_layout(v.to(dtype_of(C)), gl.SliceLayout(1, la), assert_trivial=True), 1)
    return v.broadcast_to([C.tile, 16])


@gluon.jit
def _by_half(a, b, C: gl.constexpr):
    """Two operands of 16 words as two of 8: the first halves of both, and the second halves."""
    a0, a1 = gl.split(gl.permute(gl.reshape(a, [C.tile, 2, 8]), [0, 2, 1]))
    b0, b1 = gl.split(gl.permute(gl.reshape(b, [C.tile, 2, 8]), [0, 2, 1]))
    return _one_behind_other(a0, b0, C), _one_behind_other(a1, b1, C)


@gluon.jit
def _one_behind_other(a, b, C: gl.constexpr):
    """[tile, k] and [tile, k] -> an operand [tile, 2 k]."""
    la: gl.constexpr = gl.DotOperandLayout(0, sums_layout(C), 2)
    k: gl.constexpr = a.shape[1]
    a = gl.reshape(gl.permute(gl.join(a, b), [0, 2, 1]), [C.tile, 2 * k])
    return gl.convert_layout(a, la, assert_trivial=True)


@gluon.constexpr_function
def in_place(S):
    """Whether codes become numbers without a shift to the lowest bits: not in groups of 32, where an operand has two of a word."""
    return S.kind == "unsigned" and S.group != 32


@gluon.constexpr_function
def taken(S, C):
    """A factor of all operands that sums lose at the end: bf16 codes in place are n * 2^-129, and no factor exceeds 2^127."""
    return 0.25 if in_place(S) and C.dtype == "bf16" else 1.0


@gluon.constexpr_function
def _factor(operand, S, C):
    """What an operand of codes in place is multiplied by: every second one holds them 16 times too large, or as subnormals."""
    return (2.0**127 if C.dtype == "bf16" else 2.0**-4) if operand % 2 else taken(S, C)


@gluon.constexpr_function
def _excess(operand, S, C):
    """What an operand exceeds its codes' values by, times `taken`; zero points left out."""
    return S.bias * S.unit(C.dtype) * taken(S, C) if in_place(S) and operand % 2 else S.shift(C.dtype) * taken(S, C)


@gluon.jit
def _planes(codes, block: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Codes of 64 k as four operands [tile, 16], with what they have too much; halved: the first two are the first 32 k."""
    la: gl.constexpr = gl.DotOperandLayout(0, sums_layout(C), 2)
    if S.kind == "signed":
        first = unpack_int8(codes.slice(block * 32, 16, dim=1).load(la), C)
        planes = first + unpack_int8(codes.slice(block * 32 + 16, 16, dim=1).load(la), C)
    elif in_place(S):
        planes = unpack_in_place(codes.slice(block * 16, 16, dim=1).load(la), C)
    elif S.kind == "unsigned":
        planes = unpack_nibbles(codes.slice(block * 16, 16, dim=1).load(la), C)
    else:
        planes = look_up(codes.slice(block * 16, 16, dim=1).load(la), S, C)
    if C.halved and S.kind != "signed":
        a0, a1 = _by_half(planes[0], planes[1], C)
        b0, b1 = _by_half(planes[2], planes[3], C)
        planes = (a0, b0, a1, b1)
    return planes


@gluon.constexpr_function
def _group_of(block, operand, S):
    """The group of a step that an operand's scale and zero point belong to."""
    return (block * 64 + operand // 2 * 32) // S.group if S.groups else 0


@gluon.jit
def _exact(p, block: gl.constexpr, operand: gl.constexpr, scales, zeros, S: gl.constexpr, C: gl.constexpr):
    """An operand less what its codes have too much: 128, a bias, a zero point; times its scale, where that is exact."""
    shift: gl.constexpr = _excess(operand, S, C)
    group: gl.constexpr = _group_of(block, operand, S)
    plus = gl.full([C.tile, 16], -shift, dtype_of(C), p.type.layout)
    if S.zero:
        plus = _rows(zeros[group].to(gl.float32) * -(S.unit(C.dtype) * taken(S, C)) - shift, C)
    if in_place(S):
        p = _fused(p, _factor(operand, S, C), plus, C)
    elif S.zero or shift != 0.0:
        p = _pairwise("add", p, plus, C)
    if C.fold and S.group == 16:
        p = _pairwise("mul", p, scales[block], C)
    elif C.fold:
        p = _pairwise("mul", p, _rows(to_float(scales[group], S), C), C)
    return p


@gluon.jit
def code_operands(codes, block: gl.constexpr, scales, zeros, S: gl.constexpr, C: gl.constexpr):
    """Codes [tile, words] of 64 k of a step as four operands [tile, 16], exactly."""
    planes = _planes(codes, block, S, C)
    made = ()
    for i in gl.static_range(4):
        made = made + (_exact(planes[i], block, i, scales, zeros, S, C),)
    return made
