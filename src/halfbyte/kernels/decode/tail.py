"""The tuned decode kernel: sink tokens and recent ones, which a cache stores in 16 bits (`KVBuffer.tail`).

A head's tail is [rows, D]: token t of the S sink tokens in row t, t of the W recent ones in row S + t % W. A softmax does not care
for the order of tokens, so rows are read as they lie, behind the loop over tiles of codes: a chunk of 16 rows for each stream,
straight into registers, which the loop's addresses have left.

    s[t, r] = sum_d K[t, d] q[r, d]        p[t, r] = exp2(s - m)        o[d, r] += sum_t V[t, d] p[t, r]

Rows become what rows of codes are: fp16 numbers with a scale for each token, here a power of two that puts the largest of them
between 2^8 and 2^9. What is lost is below 2^-33 of that one. Then all is as with codes: queries are the same operands, so dims have
their order; scales of keys multiply scores, and those of values the weights.
"""

# ruff: noqa: RUF005, E741
# Triton compiles a part of Python: tuples are joined with `+`.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from halfbyte.kernels.common.compat import barrier
from halfbyte.kernels.common.layouts import (
    mma_layout,
    movmatrix,
    multiple_of,
    operand_of,
    planes_of,
    post_scale_of,
    with_planes,
    words_at_once,
)
from halfbyte.kernels.decode.loads import powers_of
from halfbyte.kernels.decode.softmax import adjust, log2_of, operand_of_weights

#: Rows of a chunk for each stream: what one mma takes.
ROWS = gl.constexpr(16)


@gluon.jit
def _token_of(row, recent, C: gl.constexpr):
    """The token that rows of a tail hold, if they hold one; `recent`: the first token of the ring."""
    token = row
    if C.recent_tokens > 0:
        turned = row + (C.recent_tokens - C.sink_tokens) - recent % C.recent_tokens
        token = gl.where(row < C.sink_tokens, row, recent + turned % C.recent_tokens)
    return token


@gluon.jit
def _rows_at(chunk, seen, axes: gl.constexpr, C: gl.constexpr):
    """Rows of a chunk as streams take them, [W, 16], their tokens, and which are seen. seen: (lo, hi, first recent token).

    axes: layouts of streams and of rows, each with the other axis of size 1.
    """
    lo, hi, recent = seen
    w = gl.expand_dims(gl.arange(0, C.kv_warps, layout=gl.SliceLayout(1, axes)), 1)
    t = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, axes)), 0)
    row = chunk * C.chunk + w // C.heads * ROWS + t
    token = _token_of(row, recent, C)
    return w % C.heads * C.tail_rows + row, token, (row < C.tail_rows) & (token >= lo) & (token < hi)


@gluon.jit
def _pair(x, y, half: gl.constexpr, C: gl.constexpr):
    """One half of the words [W, 16, 16] of two codes as one operand, [W, 16, 16]."""
    la: gl.constexpr = gl.DotOperandLayout(0, mma_layout(C), 2)
    a = gl.split(gl.permute(gl.reshape(x, [C.kv_warps, ROWS, 2, 8]), [0, 1, 3, 2]))[half]
    b = gl.split(gl.permute(gl.reshape(y, [C.kv_warps, ROWS, 2, 8]), [0, 1, 3, 2]))[half]
    both = gl.reshape(gl.permute(gl.join(a, b), [0, 1, 3, 2]), [C.kv_warps, ROWS, 16])
    return gl.convert_layout(both, la, assert_trivial=True)


@gluon.jit
def _load(Tail, chunk, seen, near: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """A chunk of a tail as operands of codes, [W, 16, words], by section: `near`, in the order of keys, else in that of values."""
    la: gl.constexpr = gl.DotOperandLayout(0, mma_layout(C), 2)
    n: gl.constexpr = words_at_once(S)
    L: gl.constexpr = with_planes(gl.full([C.kv_warps, ROWS, n], 0, gl.int32, la), S).type.layout
    row, _, there = _rows_at(chunk, seen, gl.SliceLayout(2, gl.SliceLayout(3, L)), C)
    i = gl.arange(0, n, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))[None, None, :, None]
    j = gl.arange(0, S.codes_per_word, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]
    first = gl.expand_dims(gl.expand_dims(row * (S.words * S.codes_per_word), 2), 3)
    there = gl.expand_dims(gl.expand_dims(there, 2), 3)
    made = ()
    for c in gl.static_range(gl.constexpr(S.padded // n)):
        word = i + c * n
        planes = planes_of(gl.load(Tail + (first + (word * S.codes_per_word + j)), mask=there & (word < S.words), other=0.0), S)
        if S.halved:
            for half in gl.static_range(2):
                for k in gl.static_range(gl.constexpr(S.operands)):
                    if near:
                        made = made + (_pair(planes[2 * k], planes[2 * k + 1], half, C),)
                    else:
                        made = made + (_pair(planes[k], planes[k + S.operands], half, C),)
        else:
            for k in gl.static_range(gl.constexpr(S.codes_per_word)):
                made = made + (gl.convert_layout(planes[k], la, assert_trivial=True),)
    return made


@gluon.jit
def _scaled(x, of_keys: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Operands of a chunk in fp16, and the scale of each token in fp32, [W, 16, 1].

    Those of keys are multiplied by what queries were divided by, because masking in place multiplies codes (`query_operands`).
    """
    top = gl.abs(x[0])
    for n in gl.static_range(1, gl.constexpr(len(x))):
        top = gl.maximum(top, gl.abs(x[n]))
    up, down = powers_of(gl.max(top, axis=2).to(gl.float32))
    up = up[:, :, None]
    i = gl.arange(0, S.rows, layout=gl.SliceLayout(0, gl.SliceLayout(1, x[0].type.layout)))[None, None, :]
    made = ()
    for n in gl.static_range(gl.constexpr(len(x))):
        by = up
        if of_keys and S.per_byte > 1 and S.halved:
            by = up * gl.where(i // 8 == 1, multiple_of(S, 2 * (n % S.operands) + 1), multiple_of(S, 2 * (n % S.operands)))
        elif of_keys and S.per_byte > 1:
            by = up * multiple_of(S, n % S.operands)
        made = made + ((x[n].to(gl.float32) * by).to(gl.float16),)
    return made, gl.convert_layout(down, gl.SliceLayout(2, mma_layout(C)), assert_trivial=True)[:, :, None]


@gluon.jit
def _scores(k, q, S: gl.constexpr, C: gl.constexpr):
    """q . k of a chunk in fp32, [W, 16, R]. Of queries with two groups to a section the words of one are 0."""
    dot = gl.full([C.kv_warps, ROWS, C.padded_rows], 0.0, gl.float32, mma_layout(C))
    for g in gl.static_range(gl.constexpr(S.groups)):
        for j in gl.static_range(gl.constexpr(S.operands)):
            dot = mma_v2(k[operand_of(S, g, j)], q[g * S.operands + j], dot)
    return dot


@gluon.jit
def _masked(s, token, there, limit, position, window, C: gl.constexpr):
    """Scores of what a query does not see become -inf."""
    if C.queries > 1:
        there = there & (token <= position) & (token < limit)
        if C.window:
            there = there & (token > position - window)
    return gl.where(there, s, float("-inf"))


@gluon.jit
def _turned(x, C: gl.constexpr):
    """An operand [W, 16, n] with its rows as columns, [W, n, 16]."""
    n: gl.constexpr = x.shape[2]
    x = gl.permute(gl.reshape(movmatrix(x), [C.kv_warps, 2, 8, n // 8, 8]), [0, 3, 2, 1, 4])
    return gl.convert_layout(gl.reshape(x, [C.kv_warps, n, ROWS]), gl.DotOperandLayout(0, mma_layout(C), 2), assert_trivial=True)


@gluon.jit
def _accumulate(state, s, v, scale, C: gl.constexpr):
    """A chunk's online softmax and its product with the values."""
    m, l, z, o = state
    new = gl.maximum(m, gl.max(s + log2_of(scale), axis=1) - 8.0)
    keep = gl.exp2(m - new)
    p = gl.exp2(s - new[:, None, :])
    kept_lanes = gl.convert_layout(keep, gl.SliceLayout(1, l.type.layout), assert_trivial=True)[:, None, :]
    sums = gl.sum(gl.reshape(p, [C.kv_warps, ROWS // 8, 8, C.padded_rows]), axis=1)
    l = l * kept_lanes + gl.convert_layout(sums, l.type.layout, assert_trivial=True)
    weights = operand_of_weights((p * scale).to(gl.float16), C)
    new_z = ()
    for g in gl.static_range(gl.constexpr(len(z))):
        new_z = new_z + (z[g] * kept_lanes,)
    new_o = ()
    for n in gl.static_range(gl.constexpr(len(v))):
        new_o = new_o + (mma_v2(_turned(v[n], C), weights, o[n] * keep[:, None, :]),)
    return new, l, new_z, new_o


@gluon.jit
def _in_units(o, codes: gl.constexpr, S: gl.constexpr):
    """Sums over values, in the units of codes or out of them, by powers of two."""
    made = ()
    for n in gl.static_range(gl.constexpr(len(o))):
        if codes:
            made = made + (o[n] * (1.0 / post_scale_of(S, n % S.operands)),)
        else:
            made = made + (o[n] * post_scale_of(S, n % S.operands),)
    return made


@gluon.jit
def add_tail(state, call, item, part, visible, scoring, C: gl.constexpr):
    """The state of a work item plus a part of its tail: chunks part[0] .. part[1].

    item: its first head, counted over all sequences; visible: what `visible_keys` returns; scoring: operands of queries, what
    their products are multiplied by, positions, slopes.
    """
    KS: gl.constexpr = C.keys
    VS: gl.constexpr = C.values
    q, factor, position, slopes = scoring
    values = call.v
    K = call.k.tail + item * (C.tail_rows * KS.words * KS.codes_per_word)
    V = values.tail + item * (C.tail_rows * VS.words * VS.codes_per_word)
    seen = visible[2], visible[3], visible[4]
    unit = 1.0
    if VS.scale == "tensor":
        unit = gl.load(values.scales).to(gl.float32)
        unit = gl.where(unit == 0.0, 1.0, unit)  # 0 as long as there were only zeros
    m, l, z, o = state
    state = m, l, z, _in_units(o, False, VS)
    for chunk in range(part[0], part[1]):
        k, k_scale = _scaled(_load(K, chunk, seen, True, KS, C), True, KS, C)
        _, token, there = _rows_at(chunk, seen, gl.SliceLayout(2, mma_layout(C)), C)
        token = gl.expand_dims(token, 2)
        s = adjust(_scores(k, q, KS, C) * (k_scale * factor), token, position, slopes, call.softcap, C)
        s = _masked(s, token, gl.expand_dims(there, 2), visible[1], position, call.window, C)
        if C.numbers > 1024:
            barrier()  # else the assembler loads values next to keys, and registers do not hold both
        v, v_scale = _scaled(_load(V, chunk, seen, False, VS, C), False, VS, C)
        state = _accumulate(state, s, v, v_scale / unit, C)
    m, l, z, o = state
    return m, l, z, _in_units(o, True, VS)
