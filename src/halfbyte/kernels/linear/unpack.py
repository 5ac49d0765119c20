"""The tuned linear kernel: how stored words become operands of the tensor cores, in the order of k of linear/operands.py."""

# ruff: noqa: RET505
# Triton compiles a part of Python: an `else` after a return is how a branch is left out of what it compiles.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.common.compat import barrier, view
from halfbyte.kernels.common.layouts import by_pairs, unpack_bytes
from halfbyte.kernels.linear.operands import mma_layout, plain


@gluon.jit
def unpack_nibbles(x, C: gl.constexpr):
    """Words of four 4-bit codes -> one tensor a code. bf16: 128 + n; fp16: n * 2^-24, a subnormal."""
    if C.dtype == "bf16":
        return by_pairs(
            """{
            .reg .b32 a, b, c;
            shr.u32 a, $4, 4;
            shr.u32 b, $4, 8;
            shr.u32 c, $4, 12;
            lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $1, a, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $2, b, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $3, c, 0x000F000F, 0x43004300, 0xEA;
            }""",
            4,
            "bf16",
            (x,),
        )
    else:
        return by_pairs(
            """{
            .reg .b32 a, b, c;
            shr.u32 a, $4, 4;
            shr.u32 b, $4, 8;
            shr.u32 c, $4, 12;
            and.b32 $0, $4, 0x000F000F;
            and.b32 $1, a, 0x000F000F;
            and.b32 $2, b, 0x000F000F;
            and.b32 $3, c, 0x000F000F;
            }""",
            4,
            "fp16",
            (x,),
        )


@gluon.constexpr_function
def _in_place_asm(C):
    low = "lop3.b32 {0}, {1}, 0x000F000F, 0x43004300, 0xEA;" if C.dtype == "bf16" else "and.b32 {0}, {1}, 0x000F000F;"
    lines = ["{ .reg .b32 h; shr.u32 h, $4, 8;"]
    for i, source in enumerate(("$4", "h")):
        lines += [low.format(f"${2 * i}", source), f"and.b32 ${2 * i + 1}, {source}, 0x00F000F0;"]
    return " ".join(lines) + " }"


@gluon.jit
def unpack_in_place(x, C: gl.constexpr):
    """As `unpack_nibbles`, with one shift instead of three: every second code is n * 2^-129 (bf16) or n * 2^-20 (fp16)."""
    return by_pairs(_in_place_asm(C), 4, gl.constexpr(C.dtype), (x,))


@gluon.constexpr_function
def _minus(S, C):
    """What a code 0 exceeds its value by, ignoring zero points, negated: 16 bits whose lowest count zero points."""
    return (0xC300 if C.dtype == "bf16" else 0x8000) + S.bias


@gluon.constexpr_function
def _exact_asm(S, C):
    """unpack_nibbles, then bias and zero point are subtracted: exact, 128 + n and n * 2^-24 have room for them."""
    if C.dtype == "bf16":
        take, mask = "fma.rn.bf16x2", "lop3.b32 {0}, {1}, 0x000F000F, 0x43004300, 0xEA;"
    else:
        take, mask = "fma.rn.f16x2", "and.b32 {0}, {1}, 0x000F000F;"
    one = 0x3F803F80 if C.dtype == "bf16" else 0x3C003C00
    minus = "$5" if S.zero else _minus(S, C) * 0x10001
    lines = [f"{{ .reg .b32 a, b, c, o, m; mov.b32 o, {one}; mov.b32 m, {minus};"]
    lines += [f"shr.u32 {name}, $4, {4 * i + 4};" for i, name in enumerate("abc")]
    for i, source in enumerate(("$4", "a", "b", "c")):
        lines += [mask.format(f"${i}", source), f"{take} ${i}, ${i}, o, m;"]
    return " ".join(lines) + " }"


@gluon.jit
def unpack_exact(x, zeros, S: gl.constexpr, C: gl.constexpr):
    """Words of four 4-bit codes -> one tensor a code less its bias and zero point. bf16: the number; fp16: times 2^-24.

    zeros: of both groups of 8 words [k_slices, tile, 1]; not read where the format has none.
    """
    if S.zero:
        return by_pairs(_exact_asm(S, C), 4, gl.constexpr(C.dtype), (x, _subtrahends(zeros, S, C)), 2)
    else:
        return by_pairs(_exact_asm(S, C), 4, gl.constexpr(C.dtype), (x,))


@gluon.jit
def _subtrahends(zeros, S: gl.constexpr, C: gl.constexpr):
    """Zero points of the two groups of a block as operands of its 16 words [k_slices, tile, 16], negated and with the bias."""
    la: gl.constexpr = gl.DotOperandLayout(0, mma_layout(C), 2)
    by_group = gl.reshape(gl.full([C.k_slices, C.tile, 16], 0, gl.uint16, la), [C.k_slices, C.tile, 2, 8])
    first, second = gl.reshape(zeros[0], [C.k_slices, C.tile]), gl.reshape(zeros[1], [C.k_slices, C.tile])
    z = gl.join(first, second).to(gl.uint16) + _minus(S, C)
    z = gl.expand_dims(gl.convert_layout(z, gl.SliceLayout(3, by_group.type.layout), assert_trivial=True), 3) + by_group
    return gl.convert_layout(gl.reshape(z, [C.k_slices, C.tile, 16]), la, assert_trivial=True)


@gluon.jit
def unpack_e2m1(x, C: gl.constexpr):
    """Words of four E2M1 codes -> one tensor a code. With sign, exponent and mantissa moved into place they are the numbers, times
    2^-126 in bf16 and 2^-14 in fp16.

    bf16: a code alone, times two powers of two, stands twice, its sign in place in one copy and the rest in the other. fp16: every
    second code of the 32 bits at once, each in a byte of its own.
    """
    if C.dtype == "bf16":
        return by_pairs(
            """{
            .reg .b32 a, b, c, h;
            and.b32 a, $4, 0x000F000F;
            and.b32 b, $4, 0x00F000F0;
            shr.u32 h, $4, 6;
            and.b32 c, h, 0x003C003C;
            mul.lo.u32 a, a, 0x1040;
            mul.lo.u32 b, b, 0x0104;
            mul.lo.u32 c, c, 0x0410;
            and.b32 h, h, 0x01C001C0;
            and.b32 $0, a, 0x81C081C0;
            and.b32 $1, b, 0x81C081C0;
            and.b32 $2, c, 0x81C081C0;
            lop3.b32 $3, $4, 0x80008000, h, 0xEA;
            }""",
            4,
            "bf16",
            (x,),
        )
    else:
        return by_pairs(
            """{
            .reg .b32 e, f, o;
            shr.u32 o, $4, 3;
            shl.b32 e, $4, 1;
            shl.b32 f, $4, 4;
            and.b32 o, o, 0x0E0E0E0E;
            and.b32 e, e, 0x0E0E0E0E;
            lop3.b32 o, $4, 0x80808080, o, 0xEA;
            lop3.b32 e, f, 0x80808080, e, 0xEA;
            prmt.b32 $0, e, 0, 0x2404;
            prmt.b32 $1, o, 0, 0x2404;
            and.b32 $2, e, 0xFF00FF00;
            and.b32 $3, o, 0xFF00FF00;
            }""",
            4,
            "fp16",
            (x,),
        )


@gluon.jit
def unpack_int8(x, C: gl.constexpr):
    """Words of two int8 codes -> one tensor a code. bf16: the number itself; fp16: (n + 128) * 2^-24, a subnormal."""
    if C.dtype == "bf16":
        # 128 + (low seven bits), minus 128 or, where the sign is set, 256: both exact.
        return by_pairs(
            """{
            .reg .b32 h, p, q, s, t, minus;
            mov.b32 minus, 0xBF80BF80;
            shr.u32 h, $2, 8;
            lop3.b32 p, $2, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 q, $2, 0x00800080, 0x43004300, 0xEA;
            lop3.b32 s, h, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 t, h, 0x00800080, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, q, minus, p;
            fma.rn.bf16x2 $1, t, minus, s;
            }""",
            2,
            "bf16",
            (x,),
        )
    else:
        return unpack_bytes(x)


@gluon.jit
def make_codebook(ring, S: gl.constexpr, C: gl.constexpr):
    """For every byte the two codes in it as 16-bit numbers, once for each bank of shared memory, behind the stages of the ring."""
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [C.warps, 1], [1, 0])
    shape: gl.constexpr = [256 // C.table_parts, 32]
    for part in gl.static_range(gl.constexpr(C.table_parts)):
        byte = part * shape[0] + gl.arange(0, shape[0], layout=gl.SliceLayout(1, flat))
        low = byte * 0
        high = byte * 0
        for code in gl.static_range(16):
            low = gl.where((byte & 15) == code, S.codebook[code], low)
            high = gl.where((byte >> 4) == code, S.codebook[code], high)
        pair = gl.expand_dims(low | (high << 16), 1) + gl.full(shape, 0, gl.int32, flat)
        view(ring, gl.constexpr(S.codebook_at(C) // (128 * shape[0]) + part), gl.int32, shape, plain(2)).store(pair)
        barrier()
        # What follows reads the table by its address, which holds as long as the ring is the first thing in shared memory.
        bank = gl.arange(0, 32, layout=gl.SliceLayout(0, flat))[None, :]
        found = _entry(byte[:, None] * 128 + bank * 4, S, C)
        if gl.max(gl.max((found != pair).to(gl.int32), axis=1), axis=0) != 0:
            gl.inline_asm_elementwise("trap; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _entry_asm(S, C):
    base = S.codebook_at(C)
    return "{ .reg .b32 a; mov.u32 a, global_smem; add.u32 a, a, $1; ld.shared.b32 $0, [a+" + str(base) + "]; }"


@gluon.jit
def _entry(at, S: gl.constexpr, C: gl.constexpr):
    """The 32 bits of the table at byte offsets `at`."""
    return gl.inline_asm_elementwise(_entry_asm(S, C), "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _look_up_asm(S, C):
    """Each byte of $4 is a line of the table; $5 is the bank of this lane. Bytes 0, 2, 1, 3, as `x_operands` orders x."""
    lines = ["{ .reg .b32 a, s; mov.u32 s, global_smem;"]
    for i, byte in enumerate((0, 2, 1, 3)):
        lines.append("shl.b32 a, $4, 7;" if byte == 0 else f"shr.u32 a, $4, {8 * byte - 7};")
        lines.append("lop3.b32 a, a, 0x7F80, $5, 0xEA;")
        lines.append(f"add.u32 a, a, s; ld.shared.b32 ${i}, [a+{S.codebook_at(C)}];")
    return " ".join(lines) + " }"


@gluon.jit
def look_up(words, S: gl.constexpr, C: gl.constexpr):
    """Words [k_slices, tile, 16] of 4-bit codes -> four operands of their values: a byte's two lie side by side."""
    bank = gl.inline_asm_elementwise(
        "{ .reg .b32 l; mov.u32 l, %laneid; shl.b32 $0, l, 2; } // $1",
        "=r,r",
        [words.to(gl.int32)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    return by_pairs(_look_up_asm(S, C), 4, gl.constexpr(C.dtype), (words, bank), 3)


@gluon.jit
def code_operands(block, zeros, S: gl.constexpr, C: gl.constexpr):
    """A block of 16 words of each row [W, tile, 16] as mma operands, one per code of a word, in the order of `x_operands`.

    zeros: of the groups of the block, for `unpack_exact`.
    """
    la: gl.constexpr = gl.DotOperandLayout(0, mma_layout(C), 2)
    words = block.load(la)
    if S.bias_in_unpack(C):
        planes = unpack_exact(words, zeros, S, C)
    elif S.kind == "unsigned":
        planes = unpack_nibbles(words, C)
    elif S.kind == "e2m1":
        planes = unpack_e2m1(words, C)
    elif S.kind == "signed":
        planes = unpack_int8(words, C)
    else:
        planes = look_up(words, S, C)
    if S.halved(C):
        a0, a1 = _by_half(planes[0], planes[1], C)
        b0, b1 = _by_half(planes[2], planes[3], C)
        planes = (a0, b0, a1, b1)
    return planes


@gluon.jit
def _by_half(a, b, C: gl.constexpr):
    """Two operands of 16 words as two of 8: the first halves of both, and the second halves."""
    la: gl.constexpr = gl.DotOperandLayout(0, mma_layout(C), 2)
    a0, a1 = gl.split(gl.permute(gl.reshape(a, [C.k_slices, C.tile, 2, 8]), [0, 1, 3, 2]))
    b0, b1 = gl.split(gl.permute(gl.reshape(b, [C.k_slices, C.tile, 2, 8]), [0, 1, 3, 2]))
    first = gl.reshape(gl.permute(gl.join(a0, b0), [0, 1, 3, 2]), [C.k_slices, C.tile, 16])
    second = gl.reshape(gl.permute(gl.join(a1, b1), [0, 1, 3, 2]), [C.k_slices, C.tile, 16])
    return gl.convert_layout(first, la, assert_trivial=True), gl.convert_layout(second, la, assert_trivial=True)
