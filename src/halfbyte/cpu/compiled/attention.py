"""The loop of `cpu.attention_codes`: attention of few query rows over keys and values as they are stored.

A KV head of a sequence is walked in blocks of `BLOCK` tokens with an online softmax, as in `cpu.decode_attention`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from halfbyte.cpu.compiled import loop
from halfbyte.cpu.compiled.linear import FLOATS, LANES, Array, Rows, array_of, call, load, row_dots, spread

#: Codes, the table of their values, scales and offsets.
Side = tuple[Array, Array | None, Array, Array | None]
#: Tokens whose scores are computed before their weights.
BLOCK = 256
_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
#: Coefficients of exp(f) = 1 + f + f^2 p(f) for |f| <= ln(2) / 2, the highest power first.
_EXP = tuple(np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5))


@intrinsic(prefer_literal=True)
def _add_row(
    typing_context: Any,
    codes: Any,
    table: Any,
    scales: Any,
    scale_table: Any,
    offsets: Any,
    row: Any,
    weights: Any,
    out: Any,
    first: Any,
    count: Any,
) -> Any:
    """out[first + m] += weights[row, first + m] * (row of codes) for m < `count`, a constant."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        rows = Rows(context, builder, signature.args[:5], args[:5])
        own, sums = (array_of(context, builder, signature.args[i], args[i]) for i in (6, 7))
        heads, width = (cgutils.unpack_tuple(builder, array.shape)[1] for array in (own, sums))
        second, start = rows.second(width), builder.mul(args[5], heads)
        queries = [builder.add(args[8], rows.integer(m)) for m in range(count.literal_value)]
        factors = [
            spread(builder, load(builder, own.data, builder.add(start, m), ir.VectorType(ir.FloatType(), 1)), [0] * LANES)
            for m in queries
        ]
        columns = [builder.mul(m, width) for m in queries]

        def add(at: ir.Value, numbers: list[ir.Value]) -> None:
            for factor, column in zip(factors, columns, strict=True):
                offset = builder.add(column, at)
                for number in numbers:
                    total = call(builder, f"llvm.fma.v{LANES}f32", FLOATS, factor, number, load(builder, sums.data, offset, FLOATS))
                    place = builder.bitcast(builder.gep(sums.data, [offset]), FLOATS.as_pointer())
                    builder.store(total, place, align=1)
                    offset = builder.add(offset, second)

        rows.visit(args[5], add)
        return context.get_dummy_value()

    return types.void(codes, table, scales, scale_table, offsets, row, weights, out, first, count), codegen


@loop
def attend(
    keys: Side,
    values: Side,
    q: Array,
    spans: Array,
    slopes: Array | None,
    softcap: float,
    start: int,
    state: Array,
    out: Array,
    first: int,
    last: int,
) -> None:
    """Attention over tokens `start` and on, added to `state` and `out`, for the pairs b * H + h from `first` to `last`.

    keys, values  codes [B, H, T, D / 2] uint8, two codes a byte, or [B, H, T, D] int8; a table [16] fp32 of the values of 4-bit
                  codes, or None; the bits of fp16 scales [B, H, T, G], and of offsets or None. D is a multiple of 32; rows
                  of tokens are dense
    q             [B, H, R, D] fp32, scaled; for two codes a byte its even columns, then its odd ones
    spans         [B, R, 3] int64: the first key that a row sees, the one after the last, its own position
    slopes        [H, R] fp32 of ALiBi, or None; softcap: 0 for none
    state         [B, H, R, 2] fp32: the largest score so far, and the sum of exp(score - that)
    out           [B, H, R, D] fp32, not divided by the sum; the order of columns as in q
    """
    for i in range(first, last):
        b, h = i // q.shape[1], i % q.shape[1]
        tokens = keys[0].shape[2]
        scores = np.empty((BLOCK, q.shape[2]), np.float32)
        bits = np.empty(BLOCK, np.int32)
        for lo in range(0, tokens, BLOCK):
            hi = min(lo + BLOCK, tokens)
            _scores(keys[0], keys[1], keys[2], keys[3], b, h, lo, hi, q[b, h], scores)
            for r in range(q.shape[2]):
                row = scores[: hi - lo, r].copy()
                if softcap:
                    row = np.tanh(row / np.float32(softcap)) * np.float32(softcap)
                if slopes is not None:
                    for t in range(hi - lo):
                        row[t] += slopes[h, r] * np.float32(start + lo + t - spans[b, r, 2])
                # Neither below 0: a negative bound of a slice counts from its end.
                begin, end = max(spans[b, r, 0] - start - lo, 0), max(min(spans[b, r, 1] - start, hi) - lo, 0)
                _weights(row, begin, end, state[b, h, r], out[b, h, r], bits)
                scores[: hi - lo, r] = row
            _add(values[0], values[1], values[2], values[3], b, h, lo, hi, scores, out[b, h])


@loop
def _scores(
    codes: Array,
    table: Array | None,
    scales: Array,
    offsets: Array | None,
    b: int,
    h: int,
    lo: int,
    hi: int,
    q: Array,
    scores: Array,
) -> None:
    """scores[t, r] = q[r] . (key lo + t)."""
    if offsets is None:
        _scores_of(codes[b, h, lo:hi], table, scales[b, h, lo:hi], None, q, scores)
    else:
        _scores_of(codes[b, h, lo:hi], table, scales[b, h, lo:hi], offsets[b, h, lo:hi], q, scores)


@loop
def _scores_of(codes: Array, table: Array | None, scales: Array, offsets: Array | None, q: Array, scores: Array) -> None:
    for t in range(codes.shape[0]):
        r = 0
        while r + 4 <= q.shape[0]:
            row_dots(codes, table, scales, None, offsets, t, q, scores, r, 4)
            r += 4
        while r < q.shape[0]:
            row_dots(codes, table, scales, None, offsets, t, q, scores, r, 1)
            r += 1


@loop
def _weights(row: Array, first: int, last: int, state: Array, out: Array, bits: Array) -> None:
    """Scores of a row, of which keys first to last are seen, become weights exp(score - largest); sums so far are rescaled."""
    largest = state[0]
    for t in range(first, last):
        if row[t] > largest:
            largest = row[t]
    if largest > state[0]:
        keep = np.exp(state[0] - largest)
        state[0], state[1] = largest, state[1] * keep
        for d in range(out.shape[0]):
            out[d] *= keep
    row[:first] = 0
    row[last:] = 0
    _exp(row[first:last], largest, bits)
    state[1] += row[first:last].sum()


@loop
def _exp(x: Array, largest: float, bits: Array) -> None:
    """x = exp(x - largest), within two units in the last place; NaN stays NaN. A vector of x at a time."""
    power = bits.view(np.float32)
    for t in range(x.shape[0]):
        y = max(x[t] - largest, np.float32(-87.0))
        n = np.floor(y * _LOG2E + np.float32(0.5))
        f = y - n * _LN2_HIGH - n * _LN2_LOW
        p = _EXP[0]
        for c in _EXP[1:]:
            p = p * f + c
        bits[t] = (np.int32(n) + np.int32(127)) << np.int32(23)
        value = (p * f * f + f + np.float32(1)) * power[t]
        x[t] = value if x[t] - largest >= np.float32(-87.0) else (np.float32(0) if x[t] == x[t] else np.float32(np.nan))


@loop
def _add(
    codes: Array,
    table: Array | None,
    scales: Array,
    offsets: Array | None,
    b: int,
    h: int,
    lo: int,
    hi: int,
    weights: Array,
    out: Array,
) -> None:
    """out[r] += the sum over t of weights[t, r] * (value lo + t)."""
    if offsets is None:
        _add_of(codes[b, h, lo:hi], table, scales[b, h, lo:hi], None, weights, out)
    else:
        _add_of(codes[b, h, lo:hi], table, scales[b, h, lo:hi], offsets[b, h, lo:hi], weights, out)


@loop
def _add_of(codes: Array, table: Array | None, scales: Array, offsets: Array | None, weights: Array, out: Array) -> None:
    for t in range(codes.shape[0]):
        if not weights[t].any():  # also of tokens that no query sees: a weight of 0 would not hide a NaN
            continue
        r = 0
        while r + 4 <= out.shape[0]:
            _add_row(codes, table, scales, None, offsets, t, weights, out, r, 4)
            r += 4
        while r < out.shape[0]:
            _add_row(codes, table, scales, None, offsets, t, weights, out, r, 1)
            r += 1
