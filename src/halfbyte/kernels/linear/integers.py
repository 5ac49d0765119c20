"""GEMMs with x in INT8: how codes of 4 bits become the left operand of wgmma in s8, in the order of k of linear/rounding.py.

    d = round((code - zero) ratio)     in fp16: 1024 + code and 1024 + 16 code are numbers with the code as their last bits,
                                       (code - zero) is exact, and 1536 + (code - zero) ratio rounds d to its last byte

Eight codes, a word, take fifteen instructions: no code is moved to another lane, and x comes in the order that is left.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.linear.wgmma_operands import sums_layout


@gluon.constexpr_function
def bytes_layout(C):
    """[tile, 128]: the left operand of four MMAs in s8."""
    return gl.DotOperandLayout(0, sums_layout(C), 4)


@gluon.jit
def _by_mma(C: gl.constexpr):
    """An operand as [tile, MMA, half of its k, lane, byte]."""
    return gl.reshape(gl.full([C.tile, 128], 0, gl.int32, bytes_layout(C)), [C.tile, 4, 2, 4, 4])


@gluon.jit
def words_of_lanes(C: gl.constexpr):
    """Zeros [tile, 16] as lanes hold words of codes: four that follow each other, one for each MMA."""
    layout: gl.constexpr = gl.SliceLayout(4, _by_mma(C).type.layout)
    halves = gl.permute(gl.full([C.tile, 4, 2, 4], 0, gl.int32, layout), [0, 3, 1, 2])
    one, _ = gl.split(halves)
    return gl.reshape(one, [C.tile, 16])


@gluon.jit
def _spread(v, C: gl.constexpr):
    """[tile, groups], each number for its part of 16 words: [tile, 16]."""
    groups: gl.constexpr = v.shape[1]
    like = words_of_lanes(C)
    v = gl.expand_dims(v, 2).broadcast_to([C.tile, groups, 16 // groups])
    return gl.convert_layout(gl.reshape(v, [C.tile, 16]), like.type.layout, assert_trivial=True)


@gluon.constexpr_function
def _asm():
    """$0, $1: integers of codes 0, 1, 4, 5 and 2, 3, 6, 7 of $2; $3, $4: -1024 - zero and -64 - zero; $5: the ratio, all twice."""
    lines = ["{ .reg .b32 a, b, c, d, s, m; shr.u32 s, $2, 8; mov.b32 m, 0x66006600;"]
    for low, high, word in (("a", "b", "$2"), ("c", "d", "s")):
        lines.append(f"lop3.b32 {low}, {word}, 0x000F000F, 0x64006400, 0xEA;")
        lines.append(f"lop3.b32 {high}, {word}, 0x00F000F0, 0x64006400, 0xEA;")
        lines.append(f"add.f16x2 {low}, {low}, $3; fma.rn.f16x2 {low}, {low}, $5, m;")
        lines.append(f"{{ .reg .b32 u; mov.b32 u, 0x2C002C00; fma.rn.f16x2 {high}, {high}, u, $4; }}")
        lines.append(f"fma.rn.f16x2 {high}, {high}, $5, m;")
    return " ".join(lines) + " prmt.b32 $0, a, b, 0x6240; prmt.b32 $1, c, d, 0x6240; }"


@gluon.jit
def integers(words, ratio, zero, S: gl.constexpr, C: gl.constexpr):
    """Words of codes [tile, 16], ratios and zero points [tile, groups] -> int8 [tile, 128], an operand."""
    ratio = (ratio.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x10001
    if S.zero:
        minus = zero.to(gl.int32) * 0x10001 - 0x1BFF1C00  # 0xE400E400
    else:
        minus = gl.full(ratio.shape, S.bias * 0x10001 - 0x1BFF1C00, gl.int32, ratio.type.layout)
    sixteenth = gl.inline_asm_elementwise(
        "{ .reg .b32 t; mov.b32 t, 0x63806380; add.f16x2 $0, $1, t; }", "=r,r", [minus], dtype=gl.int32, is_pure=True, pack=1
    )
    words = gl.convert_layout(words, words_of_lanes(C).type.layout, assert_trivial=True)
    operands = [words, _spread(minus, C), _spread(sixteenth, C), _spread(ratio, C)]
    pair: gl.constexpr = (gl.int32, gl.int32)
    first, second = gl.inline_asm_elementwise(_asm(), "=r,=r,r,r,r,r", operands, dtype=pair, is_pure=True, pack=1)
    both = gl.reshape(gl.join(first, second), [C.tile, 4, 4, 2])  # lane, MMA, half
    layout: gl.constexpr = _by_mma(C).type.layout
    both = gl.convert_layout(gl.permute(both, [0, 2, 3, 1]), gl.SliceLayout(4, layout), assert_trivial=True)
    both = gl.reshape(gl.expand_dims(both, 4).broadcast_to([C.tile, 4, 2, 4, 4]), [C.tile, 128])
    both = gl.convert_layout(both, bytes_layout(C), assert_trivial=True)
    return gl.inline_asm_elementwise("mov.b32 $0, $1; // $2 $3 $4", "=r,r,r,r,r", [both], dtype=gl.int8, is_pure=True, pack=4)
