"""The tuned decode kernel: scores of a tile, its online softmax, and its product with the values."""

# ruff: noqa: RET505, RUF005, SIM108, B007, E741
# Triton compiles a part of Python: tuples are joined with `+`, and a branch on a constant is an `if` with an `else`.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from halfbyte.kernels.common.layouts import key_operands, mma_layout, movmatrix, operand_of, value_operands
from halfbyte.kernels.decode.per_channel import channel_scores


@gluon.jit
def _word_of_heads(ring, C: gl.constexpr):
    """Words [runs, T, 1], each the scales of two heads, as streams read them, [W, T, 1]: their own head's in the low half."""
    mma: gl.constexpr = mma_layout(C)
    like = gl.reshape(gl.full([C.kv_warps, C.tokens, 1], 0, gl.int32, mma), [C.runs, C.heads, C.tokens, 1])
    layout: gl.constexpr = like.type.layout
    e = gl.arange(0, C.heads, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))[None, :, None, None]
    word = gl.expand_dims(ring.load(gl.SliceLayout(1, layout)), 1) >> (e * 16)
    return gl.convert_layout(gl.reshape(word, [C.kv_warps, C.tokens, 1]), mma, assert_trivial=True)


@gluon.jit
def _scales_of(ring, slot, head, g: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Scales (or offsets) of one group of a tile's tokens in fp32, [W, T, 1]."""
    mma: gl.constexpr = mma_layout(C)
    if not S.paired:
        return ring.index(slot).slice(g, 1, dim=2).load(mma).to(gl.float32)
    else:
        if C.heads > 1:
            word = _word_of_heads(ring.index(slot), C)
        else:
            word = ring.index(slot).slice(g // 2, 1, dim=2).load(mma)
            if S.groups > 1:
                word = word >> (g % 2 * 16)
            else:  # a word has the scales of two heads
                word = word >> (head % 2 * 16)
        return word.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def _product(a, b, C: gl.constexpr):
    """a b; in splits of fixed size rounded, whatever follows: paths that mask scores could not fuse it with a sum, others would."""
    if C.split > 0:
        return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1)
    else:
        return a * b


@gluon.jit
def raw_scores(rings, slot, head, q, sums, factor, S: gl.constexpr, C: gl.constexpr):
    """q . k of one tile in fp32, [W, T, R], scales and offsets of the keys included.

    `sums`: of q by group, times the post-scale of offsets (int8: raw). `factor`: the post-scale of scaled codes.
    """
    if S.scale == "channel":
        return channel_scores(rings, slot, q, factor, S, C)
    mma: gl.constexpr = mma_layout(C)
    a = key_operands(rings[0].index(slot), S, C)
    zero = gl.full([C.kv_warps, C.tokens, C.padded_rows], 0.0, gl.float32, mma)
    total = zero
    shift = zero
    for g in gl.static_range(gl.constexpr(S.groups)):
        dot = zero
        if S.kind == "signed":
            dot = zero - sums[g] * (128.0 / 16777216.0)
        for j in gl.static_range(gl.constexpr(S.operands)):
            dot = mma_v2(a[operand_of(S, g, j)], q[g * S.operands + j], dot)
        if S.scale != "token":
            total = _product(dot, factor, C)
        elif S.groups == 1:
            total = _product(dot, _scales_of(rings[1], slot, head, g, S, C) * factor, C)
        else:
            total += dot * _scales_of(rings[1], slot, head, g, S, C)
        if S.offset:
            shift += _scales_of(rings[2], slot, head, g, S, C) * sums[g]
    if S.groups > 1:
        total = _product(total, factor, C)
    if S.offset:
        total += shift
    return total


@gluon.jit
def adjust(s, token, row_position, slopes, softcap, C: gl.constexpr):
    """Softcap and ALiBi on scores that are in units of log2 (for the softcap: in units of the cap)."""
    if C.softcap:
        # tanh: by its series where 1 - 2 / (1 + e) would cancel, as a cap may be much larger than the scores.
        y = s * s
        small = s * (1.0 + y * (-1.0 / 3.0 + y * (2.0 / 15.0 - y * (17.0 / 315.0))))
        e = gl.exp2(s * 2.8853900817779268)
        s = _product(gl.where(gl.abs(s) < 0.15, small, 1.0 - 2.0 / (1.0 + e)), softcap * 1.4426950408889634, C)
    if C.alibi:
        s += slopes * (token - row_position).to(gl.float32)
    return s


@gluon.jit
def log2_of(x):
    """About log2(x), at least -24."""
    y = gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    return gl.maximum(y, -24.0)


@gluon.jit
def operand_of_weights(x, C: gl.constexpr):
    """Weights [W, T, R] in 16 bits, from accumulator layout to operand layout."""
    lb: gl.constexpr = gl.DotOperandLayout(1, mma_layout(C), 2)
    T: gl.constexpr = x.shape[1]
    x = gl.permute(gl.reshape(movmatrix(x), [C.kv_warps, T // 8, 8, C.padded_rows // 8, 8]), [0, 1, 4, 3, 2])
    return gl.convert_layout(gl.reshape(x, [C.kv_warps, T, C.padded_rows]), lb, assert_trivial=True)


@gluon.jit
def accumulate(rings, slot, head, s, ok, state, whole: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """One tile's online softmax and its product with the values. state: (m, l, z by group, o by section and operand)."""
    W: gl.constexpr = C.kv_warps
    T: gl.constexpr = C.tokens
    R: gl.constexpr = C.padded_rows
    m, l, z, o = state
    weigh = ()
    if S.scale == "token":
        for g in gl.static_range(gl.constexpr(S.groups)):
            scale = _scales_of(rings[1], slot, head, g, S, C)
            if not whole:
                scale = gl.where(ok, scale, 0.0)
            weigh = weigh + (scale,)
        top = weigh[0]
        for g in gl.static_range(1, gl.constexpr(S.groups)):
            top = gl.maximum(top, weigh[g])
        peak = gl.max(s + log2_of(top), axis=1)
    else:
        peak = gl.max(s, axis=1)
    new = gl.maximum(m, peak - 8.0)
    keep = gl.exp2(m - new)
    p = gl.exp2(s - new[:, None, :])
    kept = keep[:, None, :]
    kept_lanes = gl.convert_layout(keep, gl.SliceLayout(1, l.type.layout), assert_trivial=True)[:, None, :]
    l = l * kept_lanes + gl.sum(gl.reshape(p, [W, T // 8, 8, R]), axis=1)
    a = value_operands(rings[0].index(slot).permute([0, 2, 1]), S, C)
    new_z = ()
    new_o = ()
    weights = ()
    for g in gl.static_range(gl.constexpr(S.groups)):
        weight = p
        if S.scale == "token":
            weight = p * weigh[g]
        if S.kind == "bf16":
            narrow = weight.to(gl.bfloat16)
        else:
            narrow = weight.to(gl.float16)
        if S.shifted:
            if S.offset:
                offset = _scales_of(rings[2], slot, head, g, S, C)
                if not whole:
                    offset = gl.where(ok, offset, 0.0)
                lost = p * offset
            else:
                lost = narrow.to(gl.float32) * -128.0  # of int8; the weights as rounded, so that large sums cancel exactly
            new_z = new_z + (z[g] * kept_lanes + gl.sum(gl.reshape(lost, [W, T // 8, 8, R]), axis=1),)
        weights = weights + (operand_of_weights(narrow, C),)
        if (g + 1) % S.sharing == 0:
            for j in gl.static_range(gl.constexpr(S.operands)):
                new_o = new_o + (_add_product(o[operand_of(S, g, j)] * kept, a[operand_of(S, g, j)], weights, g, S, C),)
    return new, l, new_z, new_o


@gluon.jit
def _add_product(o, a, weights, g: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """o plus the values of a section, [W, rows, T], times the weights of its last group g. Rows of two groups take their own's."""
    if S.sharing == 1:
        return mma_v2(a, weights[g], o)
    else:
        mma: gl.constexpr = mma_layout(C)
        row = gl.arange(0, S.rows, layout=gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :, None]
        zero = gl.full([C.kv_warps, S.rows, C.padded_rows], 0.0, gl.float32, mma)
        return o + gl.where(row % 8 < 4, mma_v2(a, weights[g - 1], zero), mma_v2(a, weights[g], zero))


@gluon.jit
def empty_state(S: gl.constexpr, C: gl.constexpr):
    """The state before the first tile."""
    mma: gl.constexpr = mma_layout(C)
    m = gl.full([C.kv_warps, C.padded_rows], -3.0e38, gl.float32, gl.SliceLayout(1, mma))
    zeros = gl.full([C.kv_warps, C.tokens, C.padded_rows], 0.0, gl.float32, mma)
    l = gl.sum(gl.reshape(zeros, [C.kv_warps, C.tokens // 8, 8, C.padded_rows]), axis=1)
    z = ()
    o = ()
    for g in gl.static_range(gl.constexpr(S.groups)):
        if S.shifted:
            z = z + (l,)
    for n in gl.static_range(gl.constexpr(S.sections * S.operands)):
        o = o + (gl.full([C.kv_warps, S.rows, C.padded_rows], 0.0, gl.float32, mma),)
    return m, l, z, o
