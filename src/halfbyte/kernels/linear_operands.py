"""The tuned linear kernel: layouts, and how stored words and rows of x become operands of the tensor cores.

Inside a product the order of K is free, as long as both operands agree. A lane of an mma holds a 32-bit register of neighbouring
k; with codes as they are stored, four lanes t = 0..3 hold 32 bits of a row each, that is 8 neighbouring 4-bit codes (4 bytes):

    k of a block of 16 words, as bits:   4-bit codes: w3 t1 t0 r2 r1 r0      8-bit codes: w3 t1 t0 r1 r0

A mask takes every fourth code (second byte) of the register, so r2 (r1) stays the lowest bit of an operand's k and the others
number the operands; a table of pairs yields neighbours, so r0 stays. Rows of x are read in 16 bytes (8) a lane, which are exactly
the k that the lane needs, and are split by the same bits.
"""

# ruff: noqa: RUF005
# Triton compiles a part of Python: an `else` after a return is how a branch is left out of what it compiles.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.compat import barrier, reinterpret
from halfbyte.kernels.gluon_operands import unpack_bytes
from halfbyte.plans.linear import TABLE_BYTES


@gluon.constexpr_function
def mma_layout(C):
    """mma.m16n8k16: chunks of K along the batch axis; rows of the weight are M, divided over `across` warps; rows of x are N."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[C.streams, C.across, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def code_copy_layout(C, words):
    """One lane copies 16 bytes of a row."""
    lanes = words // 8
    return gl.BlockedLayout([1, 1, 8], [1, 32 // lanes, lanes], [C.streams, C.across, 1], [2, 1, 0])


@gluon.constexpr_function
def plain(rank):
    """Row after row."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank))[::-1])


@gluon.constexpr_function
def scale_copy_layout(C, columns, piece):
    """[rows, scales of a row in one step]: one lane copies `piece` scales."""
    lanes = columns // piece
    return gl.BlockedLayout([1, piece], [32 // lanes, lanes], [C.warps, 1], [1, 0])


@gluon.constexpr_function
def scale_layout(C, groups):
    """The same as the lanes of an mma need it: each warp its own chunk, each lane the rows of its sums."""
    registers = [[0, 1 << i] for i in range(groups.bit_length() - 1)] + _higher_rows(C)
    shape = [C.tile, C.streams * groups]
    return gl.DistributedLinearLayout(registers, [[0, 0], [0, 0], *_LOW_ROWS], _warps_of(C, groups), [], shape)


@gluon.constexpr_function
def sixteenth_layout(C, groups):
    """Groups of 16 codes: a lane needs those of the codes in its operands."""
    registers = [[0, 1 << i] for i in range(1, groups.bit_length() - 1)] + _higher_rows(C)
    shape = [C.tile, C.streams * groups]
    return gl.DistributedLinearLayout(registers, [[0, 0], [0, 1], *_LOW_ROWS], _warps_of(C, groups), [], shape)


_LOW_ROWS = ([1, 0], [2, 0], [4, 0])


@gluon.constexpr_function
def _higher_rows(C):
    """Rows of a tile that one lane holds: those of one mma, and of the next that its warp works on."""
    return [[8, 0]] + [[16 * C.across << i, 0] for i in range((C.tile // (16 * C.across)).bit_length() - 1)]


@gluon.constexpr_function
def _warps_of(C, groups):
    """Warps of a stream divide the rows, streams take the scales of their chunks."""
    across = [[16 << i, 0] for i in range(C.across.bit_length() - 1)]
    return across + [[0, groups << i] for i in range(C.streams.bit_length() - 1)]


@gluon.constexpr_function
def x_copy_layout(C):
    """[streams, x_high, chunk / 32, x_low, 32]: one lane copies 16 bytes."""
    return gl.BlockedLayout([1, 1, 1, 1, 8], [1, 2 // C.x_low, 4, C.x_low, 4], [C.streams, C.across, 1, 1, 1], [4, 2, 3, 1, 0])


@gluon.constexpr_function
def x_layout(C, planes):
    """[streams, x_high, 4, x_low, 32] as the lanes of an mma need it; k = 32 i2 + i4, row = x_low i1 + i3."""
    if planes == 4:
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
    warps = [[0, 0, 0, 0, 0]] * (C.across.bit_length() - 1)
    warps += [[1 << i, 0, 0, 0, 0] for i in range(C.streams.bit_length() - 1)]
    shape = [C.streams, C.x_high, 4, C.x_low, 32]
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
    """x [streams, x_high, 4, x_low, 32] as mma operands [streams, 16, rows], block after block, plane after plane."""
    lb: gl.constexpr = gl.DotOperandLayout(1, mma_layout(C), 2)
    R: gl.constexpr = C.few
    x = gl.reshape(gl.permute(x, [0, 1, 3, 2, 4]), [C.streams, R, 128])
    if S.kind == "bytes":
        x = gl.reshape(x, [C.streams, R, 2, 2, 8, 2, 2])  # block, w3 and t, r1, r0
        x = gl.permute(x, [0, 4, 5, 1, 2, 3, 6])
    else:
        x = gl.reshape(x, [C.streams, R, 2, 2, 4, 2, 2, 2])  # block, w3, t, r2, r1, r0
        if S.kind == "nibbles" and S.halved:
            x = gl.permute(x, [0, 7, 4, 5, 1, 2, 3, 6])
        elif S.kind == "nibbles":
            x = gl.permute(x, [0, 3, 4, 5, 1, 2, 6, 7])
        elif S.halved:
            x = gl.permute(x, [0, 5, 4, 7, 1, 2, 3, 6])
        else:
            x = gl.permute(x, [0, 3, 4, 7, 1, 2, 6, 5])
    parts = halves(gl.reshape(x, [C.streams, 16, R, 2, 2, 2]), 3)
    made = ()
    for i in gl.static_range(8):
        made = made + (_to_rows(parts[i], lb, C),)
    return made


@gluon.jit
def _to_rows(x, lb: gl.constexpr, C: gl.constexpr):
    """[W, 16, R] -> [W, 16, rows]: R rows that lanes hold several times over become as many as a product has."""
    R: gl.constexpr = C.few
    if R < 8:
        like = gl.reshape(gl.full([C.streams, 16, 8], 0.0, x.dtype, lb), [C.streams, 16, 8 // R, R])
        x = gl.convert_layout(x, gl.SliceLayout(2, like.type.layout), assert_trivial=True)
        x, like = gl.broadcast(gl.expand_dims(x, 2), like)
        x = gl.reshape(x, [C.streams, 16, 8])
    return gl.convert_layout(x, lb, assert_trivial=True)


# ------------------------------------------------------------------------------------------------------------ weights


@gluon.jit
def nibble_planes(x, C: gl.constexpr):
    """Words of four 4-bit codes -> one tensor a code. bf16: 128 + n; fp16: n * 2^-24, a subnormal."""
    if C.half == "bf16":
        a, b, c, d = gl.inline_asm_elementwise(
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
            "=&r,=&r,=&r,=&r,r",
            [x],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        a, b, c, d = gl.inline_asm_elementwise(
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
            "=&r,=&r,=&r,=&r,r",
            [x],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
            is_pure=True,
            pack=2,
        )
    return (a, b, c, d)


@gluon.jit
def byte_planes(x, C: gl.constexpr):
    """Words of two int8 codes -> one tensor a code. bf16: the number itself; fp16: (n + 128) * 2^-24, a subnormal."""
    if C.half == "bf16":
        # 128 + (low seven bits), minus 128 or, where the sign is set, 256: both exact.
        a, b = gl.inline_asm_elementwise(
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
            "=&r,=&r,r",
            [x],
            dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        a, b = unpack_bytes(x)
    return (a, b)


@gluon.jit
def make_table(ring, S: gl.constexpr, C: gl.constexpr):
    """For every byte the two codes in it as 16-bit numbers, once for each bank of shared memory, behind the stages of the ring."""
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [C.warps, 1], [1, 0])
    byte = gl.arange(0, 256, layout=gl.SliceLayout(1, flat))
    low = byte * 0
    high = byte * 0
    for code in gl.static_range(16):
        low = gl.where((byte & 15) == code, S.table[code], low)
        high = gl.where((byte >> 4) == code, S.table[code], high)
    pair = gl.expand_dims(low | (high << 16), 1) + gl.full([256, 32], 0, gl.int32, flat)
    at: gl.constexpr = S.table_at(C)
    reinterpret(ring, gl.int32, [at + 1, 256, 32], plain(2)).index(at).store(pair)
    barrier()
    # What follows reads the table by its address, which holds as long as the ring is the first thing in shared memory.
    bank = gl.arange(0, 32, layout=gl.SliceLayout(0, flat))[None, :]
    found = _entry(byte[:, None] * 128 + bank * 4, S, C)
    if gl.max(gl.max((found != pair).to(gl.int32), axis=1), axis=0) != 0:
        gl.inline_asm_elementwise("trap; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _entry_asm(S, C):
    base = S.table_at(C) * TABLE_BYTES
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
        lines.append(f"add.u32 a, a, s; ld.shared.b32 ${i}, [a+{S.table_at(C) * TABLE_BYTES}];")
    return " ".join(lines) + " }"


@gluon.jit
def look_up(words, S: gl.constexpr, C: gl.constexpr):
    """Words [streams, tile, 16] of 4-bit codes -> four operands of their values: a byte's two lie side by side."""
    bank = gl.inline_asm_elementwise(
        "{ .reg .b32 l; mov.u32 l, %laneid; shl.b32 $0, l, 2; } // $1",
        "=r,r",
        [words.to(gl.int32)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    if C.half == "bf16":
        a, b, c, d = gl.inline_asm_elementwise(
            _look_up_asm(S, C),
            "=&r,=&r,=&r,=&r,r,r,r",
            [words, bank],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        a, b, c, d = gl.inline_asm_elementwise(
            _look_up_asm(S, C),
            "=&r,=&r,=&r,=&r,r,r,r",
            [words, bank],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
            is_pure=True,
            pack=2,
        )
    return (a, b, c, d)


@gluon.jit
def code_operands(ring, block: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Block of 16 words of each row [W, tile, 16] as mma operands, one for each plane, in the order of `x_operands`."""
    la: gl.constexpr = gl.DotOperandLayout(0, mma_layout(C), 2)
    words = ring.slice(block * 16, 16, dim=2).load(la)
    if S.kind == "nibbles":
        planes = nibble_planes(words, C)
    elif S.kind == "bytes":
        planes = byte_planes(words, C)
    else:
        planes = look_up(words, S, C)
    if S.halved:
        a0, a1 = _by_half(planes[0], planes[1], C)
        b0, b1 = _by_half(planes[2], planes[3], C)
        planes = (a0, b0, a1, b1)
    return planes


@gluon.jit
def _by_half(a, b, C: gl.constexpr):
    """Two operands of 16 words as two of 8: the first halves of both, and the second halves."""
    la: gl.constexpr = gl.DotOperandLayout(0, mma_layout(C), 2)
    a0, a1 = gl.split(gl.permute(gl.reshape(a, [C.streams, C.tile, 2, 8]), [0, 1, 3, 2]))
    b0, b1 = gl.split(gl.permute(gl.reshape(b, [C.streams, C.tile, 2, 8]), [0, 1, 3, 2]))
    first = gl.reshape(gl.permute(gl.join(a0, b0), [0, 1, 3, 2]), [C.streams, C.tile, 16])
    second = gl.reshape(gl.permute(gl.join(a1, b1), [0, 1, 3, 2]), [C.streams, C.tile, 16])
    return gl.convert_layout(first, la, assert_trivial=True), gl.convert_layout(second, la, assert_trivial=True)
