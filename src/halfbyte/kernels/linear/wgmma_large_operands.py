"""GEMMs with large M: how stored words and their scales become the left operand of warp-group MMA, with k in its own order.

Of the eight k that four lanes t = 0 .. 3 hold of a row in an operand, lane t needs 2t and 2t + 1: of 4-bit codes byte t of a 32-bit
word, of 8-bit codes two bytes of two words. So all four lanes load the same words, and a byte permute takes what is the lane's:

    bf16  the low code is n * 2^-133, a subnormal, and the high one n * 2^-129: one multiply-add makes both (n - offset) * 2^-6
    fp16  1024 + n and 1024 + 16 n, whose multiply-add gives n - offset
    table the byte is the line of a codebook that holds both values

Then the group's scale multiplies, in 16 bits: for fp16 that rounds a weight once, for bf16 twice, as its scale is rounded too.
"""

# ruff: noqa: RET505, RUF005
# Triton compiles a part of Python: an `else` after a return is how a branch is left out of what it compiles.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.common.compat import view
from halfbyte.kernels.common.layouts import by_pairs
from halfbyte.kernels.common.scales import to_float
from halfbyte.kernels.linear.integers import integers, words_of_lanes
from halfbyte.kernels.linear.operands import dtype_of, halves, scale_layout
from halfbyte.kernels.linear.wgmma_operands import sums_layout


@gluon.constexpr_function
def operand_layout(C):
    """[tile, 64]: the left operand of four MMAs."""
    return gl.DotOperandLayout(0, sums_layout(C), 2)


@gluon.jit
def _by_groups(C: gl.constexpr, groups: gl.constexpr):
    """An operand as [tile, groups, 64 / groups]; of INT8 its words of codes as [tile, groups, 16 / groups]."""
    if C.x_bits == 8:
        return gl.reshape(words_of_lanes(C), [C.tile, groups, 16 // groups])
    else:
        return gl.reshape(gl.full([C.tile, 64], 0, gl.int32, operand_layout(C)), [C.tile, groups, 64 // groups])


@gluon.jit
def _spread(v, C: gl.constexpr):
    """[tile, groups], each number for its part of 64 k: [tile, 64]."""
    groups: gl.constexpr = v.shape[1]
    v = gl.expand_dims(v, 2).broadcast_to([C.tile, groups, 64 // groups])
    return gl.convert_layout(gl.reshape(v, [C.tile, 64]), operand_layout(C), assert_trivial=True)


@gluon.constexpr_function
def _ring_layout(S, C):
    """As `code_ring_layout`, of 32-bit words."""
    pieces = S.words(C) // 8
    return gl.SwizzledSharedLayout(4, max(1, 8 // pieces), min(8, pieces), [1, 0])


@gluon.jit
def load_words(pool, slot, block: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """The 32-bit words of 64 k of a slot of codes, [tile, 8]: the word that holds eight k, or the two words."""
    layout: gl.constexpr = gl.SliceLayout(2, _by_groups(C, gl.constexpr(16 if C.x_bits == 8 else 8)).type.layout)
    words: gl.constexpr = gl.constexpr(S.words(C) // 2)
    shape: gl.constexpr = [C.tile, words]
    codes = view(pool, slot, gl.int32, shape, _ring_layout(S, C))
    if C.k_blocks > 1:
        codes = codes.slice(block * (words // C.k_blocks), words // C.k_blocks, dim=1)
    if S.codes_per_word == 4:
        return (codes.load(layout),)
    else:
        one = gl.full([C.tile, 8], 0, gl.int32, layout)
        pairs: gl.constexpr = gl.reshape(gl.join(one, one), [C.tile, 16]).type.layout
        even, odd = gl.split(gl.reshape(codes.load(pairs), [C.tile, 8, 2]))
        even = gl.convert_layout(even, layout, assert_trivial=True)
        return even, gl.convert_layout(odd, layout, assert_trivial=True)


@gluon.jit
def _lane(C: gl.constexpr):
    """[tile, 64]: the number of the lane, of four, that holds a k."""
    layout: gl.constexpr = _by_groups(C, 8).type.layout
    k = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :].broadcast_to([C.tile, 8, 8])
    return gl.convert_layout(gl.reshape(k // 2, [C.tile, 64]), operand_layout(C), assert_trivial=True)


@gluon.constexpr_function
def _unpack_asm(S, C):
    """Two neighboring k: $1 the word (of 8-bit codes $1 and $3), then what selects its bytes, what belongs to the kind of code, and
    the scale. Operands of 32 bits come twice, once for each k.
    """
    bf16 = C.dtype == "bf16"
    lines = ["{ .reg .b32 t, u;"]
    if S.kind == "signed":  # as `unpack_int8`; fp16: 1024 + (n + 128), less 1152
        lines.append("prmt.b32 t, $1, $3, $5;")
        if bf16:
            lines.append("lop3.b32 u, t, 0x00800080, 0x43004300, 0xEA; lop3.b32 t, t, 0x007F007F, 0x43004300, 0xEA;")
            lines.append(".reg .b32 minus; mov.b32 minus, 0xBF80BF80; fma.rn.bf16x2 t, u, minus, t;")
        else:
            lines.append("lop3.b32 t, t, 0x00FF00FF, 0x64806480, 0x6A; mov.b32 u, 0xE480E480; add.f16x2 t, t, u;")
    elif S.kind == "table":
        lines.append(f"prmt.b32 t, $1, 0, $3; mad.lo.u32 t, t, 128, $5; ld.shared.b32 t, [t+{S.codebook_at(C)}];")
    elif bf16:
        lines.append("prmt.b32 t, $1, 0, $3; and.b32 t, t, 0x00F0000F; mov.b32 u, 0x7D007F00; fma.rn.bf16x2 t, t, u, $5;")
    else:
        lines.append("prmt.b32 t, $1, 0, $3; lop3.b32 t, t, 0x00F0000F, 0x64006400, 0xEA;")
        lines.append("mov.b32 u, 0x2C003C00; fma.rn.f16x2 t, t, u, $5;")
    if S.group > 0:
        lines.append(f"mul.{'bf16x2' if bf16 else 'f16x2'} t, t, ${6 if S.kind == 'unsigned' else 7};")
    return " ".join(lines) + " mov.b32 $0, t; }"


@gluon.jit
def packed_operands(words, scale, zero, S: gl.constexpr, C: gl.constexpr):
    """What C.width k are unpacked from, in pieces of an MMA each: words of `load_words`, scales and zero points [tile, groups]."""
    operands = (words[0], scale, zero) if C.x_bits == 8 else _halves_of(words, scale, zero, S, C)
    pieces = ()
    for i in gl.static_range(gl.constexpr(len(operands))):
        pieces = pieces + (_pieces(operands[i], C),)
    return pieces


@gluon.jit
def _halves_of(words, scale, zero, S: gl.constexpr, C: gl.constexpr):
    """The same [tile, 64] for 16-bit operands."""
    operands = ()
    for i in gl.static_range(gl.constexpr(len(words))):
        operands = operands + (_spread(words[i], C),)
    lane = _lane(C)
    if S.kind == "signed":
        operands = operands + (lane * 0x202 + 0x100,)
    elif S.kind == "table":
        bank = gl.inline_asm_elementwise(
            "{ .reg .b32 l; mov.u32 l, %laneid; shl.b32 l, l, 2; mov.u32 $0, global_smem; add.u32 $0, $0, l; } // $1",
            "=r,r",
            [lane],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
        operands = operands + (lane + 0x4440, bank)
    else:
        operands = operands + (lane * 0x1111, _minus_offsets(zero, S, C))
    if S.group > 0:
        operands = operands + (_spread(_scale_in_16_bits(scale, S, C), C),)
    return operands


@gluon.jit
def _pieces(v, C: gl.constexpr):
    """[tile, 64] as one operand, or as four of 16 k."""
    if C.pieces == 1:
        return (v,)
    else:
        v = gl.reshape(v, [C.tile, 2, 2, 16])
        a, b, c, d = halves(gl.permute(v, [0, 3, 1, 2]), 2)
        return _operand(a, C), _operand(b, C), _operand(c, C), _operand(d, C)


@gluon.jit
def _operand(v, C: gl.constexpr):
    return gl.convert_layout(v, operand_layout(C), assert_trivial=True)


@gluon.jit
def unpacked(packed, i: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """The weights of a piece over `C.unit`: the left operand of an MMA."""
    operands = ()
    for j in gl.static_range(gl.constexpr(len(packed))):
        operands = operands + (packed[j][i],)
    if C.x_bits == 8:
        return integers(*operands, S, C)
    else:
        return _numbers(operands, S, C)


@gluon.jit
def _numbers(operands, S: gl.constexpr, C: gl.constexpr):
    """16-bit operands of `_halves_of` as weights."""
    registers: gl.constexpr = gl.constexpr((5 if S.kind == "unsigned" else 6) + (S.group > 0))
    return by_pairs(_unpack_asm(S, C), 1, gl.constexpr(C.dtype), operands, registers)[0]


@gluon.constexpr_function
def _excess(S, C, odd):
    """By how much a code of an even or odd k exceeds its value where the multiply-add takes it; zero points left out."""
    return S.bias * C.unit if C.dtype == "bf16" else S.bias + (64.0 if odd else 1024.0)


@gluon.jit
def _minus_offsets(zero, S: gl.constexpr, C: gl.constexpr):
    """What is added to unsigned codes of 64 k, [tile, 64]."""
    layout: gl.constexpr = operand_layout(C)
    even: gl.constexpr = _excess(S, C, False)
    odd: gl.constexpr = _excess(S, C, True)
    unit: gl.constexpr = C.unit
    k = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :].broadcast_to([C.tile, 64])
    if S.zero:
        zero = zero.to(gl.float32) * -unit
        plus = _spread((zero - even).to(dtype_of(C)), C)
        if even != odd:
            plus = gl.where(k % 2 == 0, plus, _spread((zero - odd).to(dtype_of(C)), C))
        return plus
    elif even == odd:
        return gl.full([C.tile, 64], -even, dtype_of(C), layout)
    else:
        return gl.where(k % 2 == 0, -even, -odd).to(dtype_of(C))


@gluon.constexpr_function
def _e4m3_asm(C):
    """Four E4M3 numbers to 16 bits."""
    lines = ["{ .reg .b16 a, b, c, d; .reg .b32 s, t; .reg .f32 f, g; mov.b32 {a, b}, $2;"]
    lines.append("cvt.rn.f16x2.e4m3x2 s, a; cvt.rn.f16x2.e4m3x2 t, b;")
    for i, name in enumerate("st"):
        if C.dtype == "fp16":
            lines.append(f"mov.b32 ${i}, {name};")
        else:
            lines.append(f"mov.b32 {{c, d}}, {name}; cvt.f32.f16 f, c; cvt.f32.f16 g, d; cvt.rn.bf16x2.f32 ${i}, g, f;")
    return " ".join(lines) + " }"


@gluon.jit
def _scale_in_16_bits(scale, S: gl.constexpr, C: gl.constexpr):
    """Stored scales [tile, groups] as numbers of x's type."""
    if S.scale == "e4m3":
        like = gl.full(scale.shape, 0.0, dtype_of(C), scale.type.layout)
        bits = scale.to(gl.int8, bitcast=True)
        return gl.inline_asm_elementwise(_e4m3_asm(C), "=&r,=&r,r", [bits], dtype=like.dtype, is_pure=True, pack=4)
    else:
        return to_float(scale, S).to(dtype_of(C))


@gluon.jit
def _load_groups(base, n0, rows, k, K, groups: gl.constexpr, layout: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Numbers [tile, groups] of `rows` rows from n0 on, from the group of k on. Further ones repeat the last: beyond K x is 0."""
    row = gl.minimum(gl.arange(0, C.tile, layout=gl.SliceLayout(1, layout))[:, None], rows - 1)
    g = gl.arange(0, groups, layout=gl.SliceLayout(0, layout))[None, :]
    if C.aligned:
        loaded: gl.constexpr = gl.constexpr(groups * S.group)
        width = K // loaded * groups  # the compiler sees that loads are aligned
        g += gl.minimum(k // loaded, K // loaded - 1) * groups
    else:
        width = K // S.group
        g = gl.minimum(g + k // S.group, width - 1)
    return gl.load(base + n0.to(gl.int64) * width + (row * width + g))


@gluon.jit
def _groups_of_step(base, n0, rows, step, K, S: gl.constexpr, C: gl.constexpr):
    """Numbers of both halves of a step, [tile, groups] each."""
    groups: gl.constexpr = gl.constexpr(max(1, C.width // S.group))
    layout: gl.constexpr = gl.SliceLayout(2, _by_groups(C, groups).type.layout)
    if S.group == C.step:
        one = _load_groups(base, n0, rows, step * C.step, K, 1, layout, S, C)
        return one, one
    elif C.x_bits == 8 and groups > 1:  # lanes of a row need different ones
        first = _load_groups(base, n0, rows, step * C.step, K, groups, layout, S, C)
        return first, _load_groups(base, n0, rows, step * C.step + C.width, K, groups, layout, S, C)
    else:
        like = gl.full([C.tile, groups], 0, gl.int32, layout)
        both: gl.constexpr = gl.reshape(gl.permute(gl.join(like, like), [0, 2, 1]), [C.tile, 2 * groups]).type.layout
        loaded = _load_groups(base, n0, rows, step * C.step, K, 2 * groups, scale_layout(C, 2 * groups), S, C)
        loaded = gl.reshape(gl.convert_layout(loaded, both, assert_trivial=True), [C.tile, 2, groups])
        first, second = gl.split(gl.permute(loaded, [0, 2, 1]))
        return gl.convert_layout(first, layout, assert_trivial=True), gl.convert_layout(second, layout, assert_trivial=True)


@gluon.jit
def load_scales(scales, zeros, n0, rows, step, K, S: gl.constexpr, C: gl.constexpr):
    """Scales and zero points of both halves of a step of `rows` rows from n0 on; 0 where there are none."""
    scale = (0, 0)
    zero = (0, 0)
    if S.group > 0:
        scale = _groups_of_step(scales, n0, rows, step, K, S, C)
    if S.zero:
        zero = _groups_of_step(zeros, n0, rows, step, K, S, C)
    return scale, zero
