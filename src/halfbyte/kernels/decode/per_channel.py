"""The tuned decode kernel: keys with a scale for each channel of a block of tokens (KIVI), and those not quantized yet.

A warp's tokens of a tile lie in one block, whose scales f_d and offsets o_d are 2 D numbers. They go into the query, once for all
these tokens, and codes into the tensor cores as they are:

    q . k_t = sum_d (q_d f_d) n_td + sum_d q_d o_d

q_d f_d is kept as a sum of two fp16 numbers, h = round(q_d f_d) and q_d f_d - h, a product for each: what is lost, where the second
is subnormal, is far below what fp32 loses. A power of two for each block keeps h in range. What is the same for all tokens (sums
with offsets; -128 sum_d q_d f_d of bytes) is a product with 16 equal rows.

Tokens behind the last whole block lie in a tail, in 16 bits. Their scores are computed before the loop over tiles, while the first
one is on the way, and take the place of those of whatever is read for them there.
"""

# ruff: noqa: RET505, RUF005
# Triton compiles a part of Python: an `else` after a return is how a branch is left out of what it compiles.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from halfbyte.kernels.common.compat import copy_to_shared
from halfbyte.kernels.common.layouts import code_copy_layout, key_operands, mma_layout, planes_of, with_planes


@gluon.jit
def whole_blocks(Lengths, b, hi, S: gl.constexpr):
    """The end of the tokens of sequence b that are quantized, at most hi."""
    return gl.minimum(hi, gl.maximum(gl.load(Lengths + b), 0) // S.block * S.block)


@gluon.jit
def copy_rows(ring, Base, tile, lo, hi, page, pages, s_page, S: gl.constexpr, C: gl.constexpr):
    """Scales (or offsets) of the block that each run of a tile's tokens lies in, into a ring [runs, 1, D]; 0 for runs unseen."""
    layout: gl.constexpr = code_copy_layout(C, S.codes_per_word * S.padded)
    w = gl.arange(0, C.runs, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    d = gl.arange(0, S.codes_per_word * S.padded, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    first = tile * C.tile + w * C.tokens
    if C.page == 0:
        row = (first // S.block).to(gl.int64) * (S.scale_stride * S.words * S.codes_per_word)
    else:
        page = gl.convert_layout(page, gl.SliceLayout(1, gl.SliceLayout(2, layout)), assert_trivial=True)[:, None, None]
        page = gl.minimum(gl.maximum(page, 0), pages - 1)  # a number out of range reads some page
        row = page.to(gl.int64) * s_page + first % C.page // S.block * (S.scale_stride * S.words * S.codes_per_word)
    seen = (first < hi) & (first + C.tokens > lo) & (d < S.words * S.codes_per_word)
    copy_to_shared(ring, Base + row + d, mask=seen)


@gluon.jit
def _row_of(ring, S: gl.constexpr, C: gl.constexpr):
    """A block's scales (or offsets) as operands of queries have them: [W, K] per code of a word."""
    lb: gl.constexpr = gl.DotOperandLayout(1, mma_layout(C), 2)
    of_queries: gl.constexpr = with_planes(gl.full([C.kv_warps, S.rows, C.padded_rows], 0, gl.int32, lb), S).type.layout
    like = gl.full([C.kv_warps, S.rows, S.codes_per_word], 0, gl.int32, gl.SliceLayout(2, of_queries))
    flat: gl.constexpr = gl.reshape(like, [C.kv_warps, 1, S.rows * S.codes_per_word]).type.layout
    x = gl.reshape(ring.load(flat), [C.kv_warps, S.rows, S.codes_per_word])
    planes = planes_of(gl.convert_layout(x, gl.SliceLayout(2, of_queries), assert_trivial=True), S)
    made = ()
    for j in gl.static_range(gl.constexpr(S.codes_per_word)):
        made = made + (gl.convert_layout(planes[j], gl.SliceLayout(2, lb), assert_trivial=True),)
    return made


@gluon.jit
def _equal_rows(x, C: gl.constexpr):
    """[W, K] as an operand of 16 equal rows, [W, 16, K]."""
    la: gl.constexpr = gl.DotOperandLayout(0, mma_layout(C), 2)
    x = gl.convert_layout(x, gl.SliceLayout(1, la), assert_trivial=True)[:, None, :]
    bits = x.to(gl.int16, bitcast=True) | gl.full([C.kv_warps, 16, x.shape[2]], 0, gl.int16, la)
    return bits.to(gl.float16, bitcast=True)


@gluon.jit
def _for_all_tokens(x, C: gl.constexpr):
    """[W, 16, R], rows all equal, as [W, T, R]."""
    if C.tokens == 16:
        return x
    else:
        both = gl.permute(gl.join(x, x), [0, 3, 1, 2])
        both = gl.reshape(both, [C.kv_warps, 32, C.padded_rows])
        return gl.convert_layout(both, mma_layout(C), assert_trivial=True)


@gluon.jit
def _largest(planes, S: gl.constexpr):
    """The largest of numbers [W, K] per code of a word, in fp32, [W]."""
    top = gl.abs(planes[0])
    for j in gl.static_range(1, gl.constexpr(S.codes_per_word)):
        top = gl.maximum(top, gl.abs(planes[j]))
    return gl.max(top.to(gl.float32), axis=1)


@gluon.jit
def _powers(top):
    """Two powers of two, fp32: what brings `top` to [2^10, 2^11), at most 2^11, as 16 times that is an fp16 number; its inverse."""
    exponent = gl.minimum(gl.maximum(top.to(gl.int32, bitcast=True) >> 23, 126), 246)
    up = ((264 - exponent) << 23).to(gl.float32, bitcast=True)  # 2^10 / 2^(exponent - 127)
    down = ((exponent - 10) << 23).to(gl.float32, bitcast=True)
    return up, down


@gluon.jit
def _exact_product(a, b):
    """a b of fp16 numbers as a sum of two."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 n;
        mul.rn.f16x2 $0, $2, $3;
        xor.b32 n, $0, 0x80008000;
        fma.rn.f16x2 $1, $2, $3, n;
        }""",
        "=&r,=&r,r,r",
        [a, b],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.constexpr_function
def _query_post_scale(S, plane):
    """What the scores of one operand of queries are multiplied by where codes have no part in them: a sixteenth is kept of some."""
    return 16.0 if S.bits == 4 and plane % 2 == 1 else 1.0


@gluon.jit
def channel_scores(rings, slot, q, factor, S: gl.constexpr, C: gl.constexpr):
    """q . k of one tile in fp32, [W, T, R]. `factor`: the post-scale of codes, without their scales."""
    mma: gl.constexpr = mma_layout(C)
    lb: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    gl.static_assert(S.block % C.tokens == 0, "a warp's tokens share their scales")
    gl.static_assert(not (S.kind == "signed" and S.offset), "sums of both would count in different units")
    scales = _row_of(rings[1].index(slot), S, C)
    top = _largest(scales, S) * 64.0  # below 2^5 then, and below 2^14 times the query, whose largest number is below 2^9
    if S.offset:
        offsets = _row_of(rings[2].index(slot), S, C)
        top = gl.maximum(top, _largest(offsets, S))
    up, down = _powers(top)
    up = up.to(gl.float16)[:, None]
    same = gl.full([C.kv_warps, 16, C.padded_rows], 0.0, gl.float32, mma)
    dot = gl.full([C.kv_warps, C.tokens, C.padded_rows], 0.0, gl.float32, mma)
    a = key_operands(rings[0].index(slot), S, C)
    for j in gl.static_range(gl.constexpr(S.codes_per_word)):
        scale = (scales[j] * up)[:, :, None] + gl.full([C.kv_warps, S.rows, C.padded_rows], 0.0, gl.float16, lb)
        high, low = _exact_product(q[j], scale)
        dot = mma_v2(a[j], high, dot)
        dot = mma_v2(a[j], low, dot)
        if S.kind == "signed":
            ones = gl.full([C.kv_warps, 16, S.rows], -128.0 / 16777216.0, gl.float16, gl.DotOperandLayout(0, mma, 2))
            same = mma_v2(ones, high, same)
            same = mma_v2(ones, low, same)
        if S.offset:
            same = mma_v2(_equal_rows(offsets[j] * (up * _query_post_scale(S, j)), C), q[j], same)
    down = gl.convert_layout(down, gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None, None] * factor
    if S.kind == "signed":
        dot += _for_all_tokens(same, C)
    total = dot * down
    if S.offset:
        total += _for_all_tokens(same * (down * (1.0 / S.step)), C)
    return total


@gluon.jit
def tail_scores(Tail, coded, lo, hi, q, factor, S: gl.constexpr, C: gl.constexpr):
    """q . k of tokens from `coded` on, of the tile that they lie in, [W, T, R]: from a head's tail, [block, D]; 0 for others."""
    mma: gl.constexpr = mma_layout(C)
    la: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    L: gl.constexpr = with_planes(gl.full([C.kv_warps, C.tokens, S.rows], 0, gl.int32, la), S).type.layout
    w = gl.arange(0, C.kv_warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))[:, None, None, None]
    t = gl.arange(0, C.tokens, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))[None, :, None, None]
    i = gl.arange(0, S.rows, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))[None, None, :, None]
    j = gl.arange(0, S.codes_per_word, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]
    token = coded // C.tile * C.tile + w * C.tokens + t
    seen = (token >= gl.maximum(lo, coded)) & (token < hi) & (i < S.words)
    x = gl.load(Tail + (token % S.block * (S.words * S.codes_per_word) + i * S.codes_per_word + j), mask=seen, other=0.0)
    planes = planes_of(x, S)
    dot = gl.full([C.kv_warps, C.tokens, C.padded_rows], 0.0, gl.float32, mma)
    for k in gl.static_range(gl.constexpr(S.codes_per_word)):
        a = gl.convert_layout(planes[k], la, assert_trivial=True)
        whole = q[k] * _query_post_scale(S, k)
        if Tail.dtype.element_ty == gl.float16:
            dot = mma_v2(a, whole, dot)
        else:  # 11 bits are two times 8
            high = whole.to(gl.bfloat16)
            low = (whole.to(gl.float32) - high.to(gl.float32)).to(gl.bfloat16)
            dot = mma_v2(a, high, dot)
            dot = mma_v2(a, low, dot)
    return dot * (factor * (1.0 / S.step))
