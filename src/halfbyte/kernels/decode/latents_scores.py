"""Scores over latents: how queries and codes become operands, and products of both scores.

Queries stay in shared memory. On Hopper integer codes are the left operand as bytes, as they are stored or masked to one code a
byte, and queries are two bytes: q = up (256 h + l), up a power of two by row, at most 2^14 of it. Sums of both are exact integers.
Elsewhere, and for other formats, operands have 16 bits, as in decode/mma.py.
"""

# ruff: noqa: RET505, RUF005, SIM108
# Triton compiles a part of Python: tuples are joined with `+`, and a branch on a constant is an `if`.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from halfbyte.kernels.common.compat import view
from halfbyte.kernels.common.layouts import code_ring_layout, latent_scores_layout, unpack
from halfbyte.kernels.decode.loads import powers_of
from halfbyte.kernels.decode.wgmma_operands import of_tokens


@gluon.constexpr_function
def operand_layout(columns, bits, wgmma):
    """Rows of 16-byte pieces, of up to 128 bytes before the pattern begins anew."""
    pieces = min(8, columns * bits // 128)
    if wgmma:
        return gl.NVMMASharedLayout(swizzle_byte_width=16 * pieces, element_bitwidth=bits, rank=2)
    return gl.SwizzledSharedLayout(128 // bits, max(1, 8 // pieces), pieces, [1, 0])


@gluon.constexpr_function
def in_bytes(S, C):
    """Whether products with a side's codes are those of bytes."""
    return C.wgmma and S.kind in ("signed", "unsigned")


@gluon.constexpr_function
def _at_once(S, C):
    """Words of a token that are unpacked at a time."""
    return min(64 // S.per_byte if in_bytes(S, C) else 32, S.padded)


@gluon.constexpr_function
def chains(S, C):
    """Sums that products are added to in turn: of 16-bit operands and few rows as many as codes of a word, so that none waits."""
    return S.codes_per_word if C.padded_rows == 16 and not in_bytes(S, C) else 1


@gluon.constexpr_function
def _byte_sums_layout(C):
    """As `latent_scores_layout`, of integers: each eight rows twice, with upper and with lower bytes of queries."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[C.warps, 1], instr_shape=[16, 2 * C.padded_rows, 32])


@gluon.constexpr_function
def _byte_ring_layout(words):
    """`code_ring_layout` in bytes."""
    whole = code_ring_layout(words, 2)
    return gl.SwizzledSharedLayout(16, whole.per_phase, whole.max_phase, [1, 0])


@gluon.jit
def make_queries(S: gl.constexpr, C: gl.constexpr):
    """Shared memory of queries as operands: [1, rows, codes of a word, words]."""
    dims: gl.constexpr = S.padded * S.codes_per_word
    if in_bytes(S, C):
        return gl.allocate_shared_memory(gl.int8, [1, 2 * C.padded_rows, dims], operand_layout(dims, 8, True))
    elif S.kind == "bf16":
        return gl.allocate_shared_memory(gl.bfloat16, [1, C.padded_rows, dims], operand_layout(dims, 16, C.wgmma))
    else:
        return gl.allocate_shared_memory(gl.float16, [1, C.padded_rows, dims], operand_layout(dims, 16, C.wgmma))


@gluon.jit
def store_query(memory, x, S: gl.constexpr, C: gl.constexpr):
    """Query rows as operands in shared memory. Returns their sums, and a factor of scores.

    For fp16 operands all rows are multiplied by the power of two that puts the largest number of all at 2^8; for bytes each row by
    one that puts its own at 2^13, and the factor of a row that is not finite is NaN.
    """
    over_rows: gl.constexpr = gl.SliceLayout(0, latent_scores_layout(C))
    if in_bytes(S, C):
        R: gl.constexpr = C.padded_rows
        P: gl.constexpr = S.per_byte
        dims: gl.constexpr = S.padded * S.codes_per_word
        x = x.to(gl.float32)
        bits = gl.max(x.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # of the largest; infinity and NaN are above all
        up, down = powers_of(bits.to(gl.float32, bitcast=True))
        down = gl.where(bits < 0x7F800000, down * (1.0 / 32.0), float("nan"))
        n = (x * (up * 32.0)[:, None] + 12582912.0).to(gl.int32, bitcast=True) - 0x4B400000  # rounded by an addition of 3 * 2^22
        sums = gl.sum(n, axis=1).to(gl.float32)
        both = gl.join(((n + 128) >> 8).to(gl.int8), n.to(gl.int8))
        both = gl.permute(gl.reshape(both, [R // 8, 8, dims // P, P, 2]), [0, 4, 1, 3, 2])
        memory.store(gl.reshape(both, [2 * R, dims]))
        return gl.convert_layout(sums, over_rows)[None, :], gl.convert_layout(down, over_rows)[None, :]
    elif S.codes_per_word == 1:
        memory.store(x.to(memory.dtype))
        return gl.convert_layout(gl.sum(x.to(gl.float32), axis=1), over_rows)[None, :], 1.0
    else:
        x = x.to(gl.float32)
        largest = gl.abs(x)
        largest = gl.where(largest < float("inf"), largest, 0.0)  # else one infinity would make all other rows 0
        up, down = powers_of(gl.max(gl.max(largest, axis=1), axis=0))
        x = (x * up).to(gl.float16)
        sums = gl.sum(x.to(gl.float32), axis=1)
        x = gl.reshape(x, [C.padded_rows, S.padded, S.codes_per_word])
        if S.per_byte > 1:  # what masking in place multiplies a code by
            j = gl.arange(0, S.codes_per_word, layout=gl.SliceLayout(0, gl.SliceLayout(1, x.type.layout)))[None, None, :]
            over = gl.exp2(j % S.per_byte * (-1.0 * S.bits))
            x = (x.to(gl.float32) * over).to(gl.float16)
        memory.store(gl.reshape(gl.permute(x, [0, 2, 1]), [C.padded_rows, S.padded * S.codes_per_word]))
        return gl.convert_layout(sums, over_rows)[None, :], down


@gluon.jit
def _one_a_byte(x, S: gl.constexpr):
    """Bytes -> one tensor a code of a byte."""
    if S.per_byte == 1:
        return (x,)
    elif S.per_byte == 2:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 h; shr.u32 h, $2, 4; and.b32 $0, $2, 0x0F0F0F0F; and.b32 $1, h, 0x0F0F0F0F; }",
            "=&r,=&r,r", [x], dtype=(gl.int8, gl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            """{ .reg .b32 b, c, d; shr.u32 b, $4, 2; shr.u32 c, $4, 4; shr.u32 d, $4, 6; and.b32 $0, $4, 0x03030303;
            and.b32 $1, b, 0x03030303; and.b32 $2, c, 0x03030303; and.b32 $3, d, 0x03030303; }""",
            "=&r,=&r,=&r,=&r,r", [x], dtype=(gl.int8, gl.int8, gl.int8, gl.int8), is_pure=True, pack=4,
        )  # fmt: skip


@gluon.jit
def right_operand(memory, like, wgmma: gl.constexpr):
    """A right operand of products that are added to tensors like this one."""
    if wgmma:
        return memory
    else:
        return memory.load(gl.DotOperandLayout(1, like.type.layout, 2))


@gluon.jit
def product(a, b, sums, wgmma: gl.constexpr):
    """sums + a b; by warp groups it is under way."""
    if wgmma:
        return warpgroup_mma(a, b, sums, is_async=True)
    else:
        return mma_v2(a, b, sums)


@gluon.jit
def wait(under_way: gl.constexpr, sums, wgmma: gl.constexpr):
    """A tuple of sums, once all but so many products are done."""
    if not wgmma:
        return sums
    elif len(sums) == 1:
        return (warpgroup_mma_wait(under_way, deps=sums),)
    else:
        return warpgroup_mma_wait(under_way, deps=sums)


@gluon.jit
def dots(queries, rings, slot, sums, S: gl.constexpr, C: gl.constexpr):
    """q . codes of one tile as so many parts, of which the last products are under way. sums: of queries."""
    W: gl.constexpr = _at_once(S, C)
    parts = ()
    if in_bytes(S, C):
        mma: gl.constexpr = _byte_sums_layout(C)
        N: gl.constexpr = S.per_byte
        B: gl.constexpr = 2 * S.padded  # bytes of a token
        shape: gl.constexpr = [C.tile, 2 * S.padded]
        codes = view(rings[0], slot, gl.int8, shape, _byte_ring_layout(S.padded))
        parts = (gl.full([C.tile, 2 * C.padded_rows], 0, gl.int32, mma),)
        for c in gl.static_range(gl.constexpr(S.padded // W)):
            planes = _one_a_byte(codes.slice(c * 2 * W, 2 * W, dim=1).load(gl.DotOperandLayout(0, mma, 4)), S)
            for j in gl.static_range(N):
                q = queries.slice(j * B + c * 2 * W, 2 * W, dim=1).permute([1, 0])
                parts = (product(planes[j], q, parts[0], True),)
            parts = wait(N, parts, True)  # those of the words before: their registers are free
    else:
        mma: gl.constexpr = latent_scores_layout(C)
        N: gl.constexpr = S.codes_per_word
        shape: gl.constexpr = [C.tile, S.padded]
        codes = view(rings[0], slot, gl.int16, shape, code_ring_layout(S.padded, 2))
        zero = gl.full([C.tile, C.padded_rows], 0.0, gl.float32, mma)
        for j in gl.static_range(gl.constexpr(chains(S, C))):
            if j == 0 and S.kind == "signed":
                parts = parts + (zero - sums * (128.0 / 16777216.0),)
            else:
                parts = parts + (zero,)
        for c in gl.static_range(gl.constexpr(S.padded // W)):
            planes = unpack(codes.slice(c * W, W, dim=1).load(gl.DotOperandLayout(0, mma, 2)), S)
            for j in gl.static_range(N):
                q = right_operand(queries.slice(j * S.padded + c * W, W, dim=1).permute([1, 0]), zero, C.wgmma)
                parts = parts[1:] + (product(planes[j], q, parts[0], C.wgmma),)
            parts = wait(N, parts, C.wgmma)
    return parts


@gluon.jit
def scores(parts, rings, slot, query, S: gl.constexpr, C: gl.constexpr):
    """Scores in fp32, [tile, R], scales and offsets included. query: its sums, and the factor of scores."""
    mma: gl.constexpr = latent_scores_layout(C)
    sums, factor = query
    dot = parts[0]
    if in_bytes(S, C):
        both = gl.permute(gl.reshape(dot, [C.tile, C.padded_rows // 8, 2, 8]), [0, 1, 3, 2])
        upper, lower = gl.split(both)
        dot = gl.reshape((upper * 256 + lower).to(gl.float32), [C.tile, C.padded_rows])
        dot = gl.convert_layout(dot, mma, assert_trivial=True)
    else:
        for j in gl.static_range(1, gl.constexpr(chains(S, C))):
            dot += parts[j]
        factor = factor * S.step
    s = dot
    if S.scale == "token":
        s = dot * (of_tokens(rings[1], slot, 0, mma, S, C) * factor)
    else:
        s = dot * factor
    if S.offset:
        s += of_tokens(rings[2], slot, 0, mma, S, C) * (sums * query[1])
    return s
