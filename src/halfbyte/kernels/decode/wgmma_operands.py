"""Decode attention for many query rows: layouts, and how queries and stored words become operands in shared memory.

Columns of an operand are dims in the order in which threads unpack them: pieces of 8 words, then the codes of a word, then its
place among the 8. Queries and outputs are turned accordingly, once an item.

Numbers of a tile are rounded to fp16 relative to a power of two 2^e, above all that its scales and offsets allow: x / 2^e is at
most `top`. So no size of scales overflows, and beyond fp16's rounding 2^-20 of the tile's largest number is lost, or less. Codes
under one scale for everything stay as they are, and e is 0.
"""

# ruff: noqa: RET505, RUF005, SIM108
# Triton compiles a part of Python: an `else` after a return is how a branch is left out of what it compiles.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.common.compat import view
from halfbyte.kernels.common.layouts import by_pairs, code_ring_layout, unpack
from halfbyte.kernels.decode.blocks import real_rows, rows_of_head
from halfbyte.kernels.decode.reduce import stack
from halfbyte.kernels.linear.operands import plain


@gluon.constexpr_function
def scores_layout(C):
    """wgmma.m64nNk16: query rows are M, 16 for each warp; tokens of a tile are N."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[C.warps, 1], instr_shape=[16, C.tile, 16])


@gluon.constexpr_function
def sums_layout(C):
    """The same, with dims of the values as N."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[C.warps, 1], instr_shape=[16, C.dim, 16])


OPERAND = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.constexpr_function
def words_layout(S, C):
    """[tokens, words]: a thread unpacks 8 words at a time. Eight lanes have eight rows, which lie in different banks."""
    lanes = min(4, S.padded // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [C.warps, 1], [0, 1])


@gluon.constexpr_function
def query_layout(S, C):
    """[query rows, dims]: a thread loads the dims that 8 words hold."""
    lanes = S.padded // 8
    return gl.BlockedLayout([1, 8 * S.codes_per_word], [32 // lanes, lanes], [C.warps, 1], [1, 0])


@gluon.constexpr_function
def bound_layout(S, C):
    """[tokens, scales]: every warp has all of a tile, so that their maximum needs no barrier."""
    return gl.BlockedLayout([max(1, C.tile // 32), S.scale_columns], [32, 1], [C.warps, 1], [1, 0])


@gluon.constexpr_function
def code_step_of(S):
    """What a code is over its fp16 number: n, x 2^-8; int4: n 2^-20, even codes a sixteenth; int2: n 2^-18, even codes a fourth."""
    return {"unsigned": 2.0 ** (16 + S.bits), "signed": 1.0, "e4m3": 2.0**8}[S.kind]


@gluon.constexpr_function
def top_of(S):
    """What numbers with scales are at most; scales over 2^e are exact in fp16 from 2^-14 of the largest on."""
    return {2: 2.0**-3, 4: 2.0**-5, 8: 256.0}[S.bits]


@gluon.constexpr_function
def largest_of(S):
    """The largest code."""
    return {"unsigned": 2.0**S.bits - 1.0, "signed": 128.0, "e4m3": 448.0}[S.kind]


@gluon.jit
def _codes(words, S: gl.constexpr):
    """Words -> one fp16 tensor per code of a word, exactly, over `code_step_of`."""
    if S.kind == "signed":  # 0x6480 ^ byte is 1024 + 128 + n
        return by_pairs(
            """{
            .reg .b32 h, m;
            mov.b32 m, 0xE480E480;
            shr.u32 h, $2, 8;
            lop3.b32 $0, $2, 0x00FF00FF, 0x64806480, 0x6A;
            lop3.b32 $1, h, 0x00FF00FF, 0x64806480, 0x6A;
            add.f16x2 $0, $0, m;
            add.f16x2 $1, $1, m;
            }""",
            2,
            "fp16",
            (words,),
        )
    elif S.bits == 2:  # 16 n 2^-24 and 64 n 2^-24: n 2^-24 would leave fp16 fewer bits for scales over 2^e
        return by_pairs(
            """{
            .reg .b32 a, b, c;
            shl.b32 a, $8, 4;
            shr.u32 b, $8, 4;
            shr.u32 c, $8, 8;
            and.b32 $0, a, 0x00300030;
            and.b32 $1, a, 0x00C000C0;
            and.b32 $2, $8, 0x00300030;
            and.b32 $3, $8, 0x00C000C0;
            and.b32 $4, b, 0x00300030;
            and.b32 $5, b, 0x00C000C0;
            and.b32 $6, c, 0x00300030;
            and.b32 $7, c, 0x00C000C0;
            }""",
            8,
            "fp16",
            (words,),
        )
    else:
        return unpack(words, S)


@gluon.jit
def of_tokens(ring, slot, head, layout: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Scales (or offsets) of a tile's tokens in fp32, [tokens, groups]; `layout`: of that, or of words of two."""
    shape: gl.constexpr = [C.tile, S.scale_columns]
    if not S.paired:
        return view(ring, slot, gl.float16, shape, plain(2)).load(layout).to(gl.float32)
    else:
        word = view(ring, slot, gl.int32, shape, plain(2)).load(layout)
        if S.groups > 1:
            word = gl.reshape(gl.join(word, word >> 16), [C.tile, S.groups])
        else:  # a word has the scales of two heads
            word = word >> (head % 2 * 16)
        return word.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def _exponent(rings, slot, head, there, S: gl.constexpr, C: gl.constexpr):
    """e of a tile."""
    layout: gl.constexpr = bound_layout(S, C)
    bound = gl.abs(of_tokens(rings[1], slot, head, layout, S, C)) * largest_of(S)
    if S.offset:
        bound += gl.abs(of_tokens(rings[2], slot, head, layout, S, C))
    bits = gl.max(bound.to(gl.int32, bitcast=True), axis=1)
    bits = gl.where(gl.convert_layout(there, bits.type.layout, assert_trivial=True), bits, 0)
    return gl.minimum(gl.maximum((gl.max(bits, axis=0) >> 23) - 126, -60), 60)


@gluon.jit
def _spread(rings, which: gl.constexpr, slot, head, up, tile, lo, hi, S: gl.constexpr, C: gl.constexpr):
    """Scales (or offsets) times `up` in fp16 for each word of a tile, [tokens, words]; 0 for tokens outside of [lo, hi)."""
    words: gl.constexpr = words_layout(S, C)
    like = gl.reshape(gl.full([C.tile, S.padded], 0, gl.int16, words), [C.tile, S.groups, S.padded // S.groups])
    grouped: gl.constexpr = like.type.layout
    by_group: gl.constexpr = gl.SliceLayout(2, grouped)
    if S.paired and S.groups > 1:
        halved: gl.constexpr = gl.reshape(like, [C.tile, S.groups // 2, 2 * S.padded // S.groups]).type.layout
        x = of_tokens(rings[which], slot, head, gl.SliceLayout(2, halved), S, C)
        x = gl.convert_layout(x, by_group)
    else:
        x = of_tokens(rings[which], slot, head, by_group, S, C)
    token = tile * C.tile + gl.arange(0, C.tile, layout=gl.SliceLayout(1, by_group))[:, None]
    x = gl.where((token >= lo) & (token < hi), x * up, 0.0).to(gl.float16)
    x = gl.expand_dims(x, 2) + gl.full([C.tile, S.groups, S.padded // S.groups], 0.0, gl.float16, grouped)
    return gl.convert_layout(gl.reshape(x, [C.tile, S.padded]), words, assert_trivial=True)


@gluon.jit
def read_tile(rings, slot, head, tile, lo, hi, S: gl.constexpr, C: gl.constexpr):
    """Of a tile in the ring: e, its words, and for each word scale and offset over 2^e in fp16, if there are any."""
    shape: gl.constexpr = [C.tile, S.padded]
    words = view(rings[0], slot, gl.int16, shape, code_ring_layout(S.padded, 2)).load(words_layout(S, C))
    exponent = tile * 0
    scale = words
    offset = words
    if S.scale == "token":
        token = tile * C.tile + gl.arange(0, C.tile, layout=gl.SliceLayout(1, bound_layout(S, C)))
        exponent = _exponent(rings, slot, head, (token >= lo) & (token < hi), S, C)
        up = power_of_two(-exponent) * top_of(S)
        scale = _spread(rings, 1, slot, head, up * code_step_of(S), tile, lo, hi, S, C)
        if S.offset:
            offset = _spread(rings, 2, slot, head, up, tile, lo, hi, S, C)
    return exponent, words, scale, offset


@gluon.jit
def store_tile(memory, read, S: gl.constexpr, C: gl.constexpr):
    """A tile as `read_tile` gives it, as an operand, [tokens, dims], dims in the order of operands."""
    _, words, scale, offset = read
    planes = _codes(words, S)
    if S.scale == "token":
        more = scale
        if S.per_byte > 1:
            more = scale * 2.0**S.bits
        scaled = ()
        for j in gl.static_range(gl.constexpr(S.codes_per_word)):
            if S.offset:
                scaled = scaled + (_multiply_add(planes[j], more if j % 2 == 0 else scale, offset),)
            else:
                scaled = scaled + (_multiply(planes[j], scale),)
        planes = scaled
    x = gl.reshape(stack(planes, S.codes_per_word), [C.tile, S.padded // 8, 8, S.codes_per_word])
    memory.store(gl.reshape(gl.permute(x, [0, 1, 3, 2]), [C.tile, C.dim]))


@gluon.jit
def power_of_two(e):
    """2^e in fp32, for a scalar of -126 to 127."""
    return ((e + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _multiply(a, b):
    return gl.inline_asm_elementwise("mul.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def _multiply_add(a, b, c):
    return gl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def load_rows(call, b, head, before: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Query rows of a KV head as they are stored, [rows, dims], behind the first `before` dims; row r is query r % L of head r // L
    of those that share it."""
    q, rows = call.q, rows_of_head(call, b, head, C)
    layout: gl.constexpr = query_layout(S, C)
    r = gl.arange(0, C.padded_rows, layout=gl.SliceLayout(1, layout))[:, None]
    d = gl.arange(0, S.codes_per_word * S.padded, layout=gl.SliceLayout(0, layout))[None, :]
    mask = real_rows(r, b, call, C) & (d < S.words * S.codes_per_word)
    return gl.load(rows + (r // C.queries * q.head + r % C.queries * q.token) + (before + d), mask=mask, other=0.0)


@gluon.jit
def store_queries(memory, x, sign, S: gl.constexpr, C: gl.constexpr):
    """Rows x times `sign` as the left operand, in shared memory; returns what scores are to be multiplied by.

    All rows are multiplied by the power of two that puts the largest number of all at 2^8.
    """
    x = x.to(gl.float32)
    largest = gl.abs(x)
    largest = gl.where(largest < float("inf"), largest, 0.0)  # else one infinity would make all other rows 0
    top = gl.max(gl.max(largest, axis=1), axis=0)
    exponent = gl.minimum(gl.maximum(top.to(gl.int32, bitcast=True) >> 23, 32), 246)
    x = (x * (sign * ((262 - exponent) << 23).to(gl.float32, bitcast=True))).to(gl.float16)  # 2^8 / 2^(exponent - 127)
    x = gl.permute(gl.reshape(x, [C.padded_rows, S.padded // 8, 8, S.codes_per_word]), [0, 1, 3, 2])
    memory.store(gl.reshape(x, [C.padded_rows, C.dim]))
    return ((exponent - 8) << 23).to(gl.float32, bitcast=True)
