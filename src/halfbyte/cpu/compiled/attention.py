"""Attention over keys and values as they are stored, for the query rows of KV heads: the loops of `cpu.attention_codes`.

The tokens of a sequence are divided into splits of `SPLIT`. Each is attended to in blocks of `BLOCK` with an online softmax, and
they are merged in their order. Both begin at multiples of their size, so a query's bits do not depend on the keys that others see.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import types

from halfbyte.cpu.compiled import loop
from halfbyte.cpu.compiled.blocks import add, decode, dots, from_bits, half, largest_of, sum_of
from halfbyte.cpu.compiled.linear import Array

#: Tokens that are decoded at once, and those of a split.
BLOCK, SPLIT = 128, 1024
_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
#: Coefficients of exp(f) = 1 + f + f^2 p(f) for |f| <= ln(2) / 2, the highest power first.
_EXP = tuple(np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5))


class Facts(NamedTuple):
    """Of a `Side`.

    reader        how codes are read: a place in `blocks.READERS`
    width, parts  elements of a row of codes, which are bytes unless codes are wider; codes in a byte
    groups        scales of a row
    every         tokens that share the scales of their columns; 0: each has its own
    sinks, ring   rows of the tail, as in `KVBuffer`
    """

    reader: int
    width: int
    parts: int
    groups: int
    every: int
    sinks: int
    ring: int


class Options(NamedTuple):
    """Of a call: queries of each head; window, wider than any sequence for none; softcap, 0 for none."""

    queries: int
    window: int
    softcap: float


#: Stored rows [B or pages, H, rows, ..]: bytes of codes, bits of fp16 scales and offsets, of any strides; facts. Where tokens share
#: the scales of columns, scales have a row for so many.
Side = tuple[Array, Array, Array, Facts]


@functools.cache
def loops(number: str) -> tuple[Any, Any, Any]:
    """`_prepare`, `_attend` and `_finish`, which compute in float32 or float64."""
    t, f32, f64, i32, i64 = getattr(types, number), types.float32, types.float64, types.int32, types.int64
    rows, splits, raw, halves = t[:, :, :, ::1], t[:, :, :, :, ::1], types.uint8[:, :, :, :], types.uint16[:, :, :, :]
    side = types.Tuple((raw, halves, halves, types.NamedUniTuple(i64, len(Facts._fields), Facts)))
    sides = types.UniTuple(side, 2)
    options = types.NamedTuple((i64, i64, f64), Options)
    return (
        loop(_prepare, types.void(t[:, :, :, :], f64, i64, i64, rows)),
        loop(_attend, types.void(rows, sides, sides, i32[:, :], i64[:, ::1], f32[::1], options, splits, splits, i64, i64)),
        loop(_finish, types.void(splits, splits, f32[::1], i64, rows, f32[:, :, ::1])),
    )


@loop
def _column(d: int, parts: int, width: int) -> int:
    """Where number d of a head is in a decoded row, in which first codes of bytes come first."""
    return d % parts * (width // parts) + d // parts


def _prepare(q: Array, sm_scale: float, rotation: int, parts: int, rows: Array) -> None:
    """rows [B, H, R, W] = the rows of q [B, Hq, L, D], rotated in blocks of `rotation` (0: not at all) and scaled, in the order of
    decoded keys. What is beyond D is 0."""
    for b in range(q.shape[0]):
        for r in range(q.shape[1] * q.shape[2]):
            row = q[b, r // q.shape[2], r % q.shape[2]].copy()
            if rotation:
                rotate(row, rotation)
            line = rows[b, r // rows.shape[2], r % rows.shape[2]]
            line[:] = 0
            for d in range(q.shape[3]):
                line[_column(d, parts, line.shape[0])] = row[d] * q.dtype.type(sm_scale)


@loop
def rotate(row: Array, size: int) -> None:
    """The Hadamard rotation of `reference.hadamard` in blocks of `size`, in place, bit for bit."""
    step = 1
    while step < size:
        for start in range(0, row.shape[0], 2 * step):
            for i in range(start, start + step):
                a, b = row[i], row[i + step]
                row[i], row[i + step] = a + b, a - b
        step *= 2
    for i in range(row.shape[0]):
        row[i] *= row.dtype.type(size**-0.5)


def _attend(
    q: Array,
    keys: tuple[Side, Side],
    values: tuple[Side, Side],
    page_table: Array,
    places: Array,
    slopes: Array,
    options: Options,
    state: Array,
    out: Array,
    first: int,
    last: int,
) -> None:
    """Attention for units `first` to `last`; unit (b * H + h) * splits + s is a split of a KV head of a sequence.

    q             [B, H, R, W] of `_prepare`
    keys, values  what is quantized, and the tail, which may be without elements
    page_table    [B, pages], or without elements
    places        [B, 4]: position of the first query, the first key, the key after the last, the length
    slopes        [Hq] of ALiBi, or without elements
    state         [B, H, splits, R, 2]: the largest score, and the sum of exp(score - that)
    out           [B, H, splits, R, W], not divided by the sum
    """
    heads, rows, splits = q.shape[1], q.shape[2], state.shape[2]
    own, theirs = np.zeros((BLOCK, q.shape[3]), q.dtype), np.zeros((BLOCK, out.shape[4]), q.dtype)
    scores = np.empty((rows, BLOCK), q.dtype)
    scratch = np.empty((3, max(q.shape[3], out.shape[4])), q.dtype)
    for unit in range(first, last):
        s, h, b = unit % splits, unit // splits % heads, unit // splits // heads
        position, start, limit, length = places[b, 0], places[b, 1], places[b, 2], places[b, 3]
        newest = min(position + options.queries, limit)
        queries, peaks, sums = q[b, h], state[b, h, s], out[b, h, s]
        peaks[:, 0] = -np.inf
        peaks[:, 1] = 0
        sums[:] = 0
        for lo in range(s * SPLIT, min((s + 1) * SPLIT, newest), BLOCK):
            begin, end = max(position - options.window + 1 - lo, start - lo, 0), min(newest - lo, BLOCK)
            if begin >= end:
                continue
            _load(keys, page_table, b, h, lo, begin, end, length, scratch, own)
            dots(queries, own, begin, end, scores)
            _weights(scores, position - lo, max(start - lo, 0), end, slopes[h * rows // options.queries :], options, peaks, sums)
            _load(values, page_table, b, h, lo, begin, end, length, scratch, theirs)
            add(scores, theirs, begin, end, sums)


@loop
def _load(
    sides: tuple[Side, Side],
    page_table: Array,
    b: int,
    h: int,
    lo: int,
    first: int,
    last: int,
    length: int,
    scratch: Array,
    block: Array,
) -> None:
    """block[t] = token lo + t, for t from `first` to `last`; scratch [3, columns]."""
    side, tail = sides
    facts, size, has_tail = side[3], side[0].shape[2], tail[0].size > 0
    tail_start = length // facts.every * facts.every if facts.every else max(length - facts.ring, 0)
    factors, line = scratch[:2], scratch[2:]
    t = first
    while t < last:
        token = lo + t
        if has_tail and (token < facts.sinks or token >= tail_start):
            ring = max(facts.ring, 1)
            row, end = (token, facts.sinks) if token < facts.sinks else (facts.sinks + token % ring, facts.sinks + ring)
            count = min(end - row, last - t)
            if facts.parts == 1:
                decode(tail, b, h, row, count, factors, block, t)
                t += count
                continue
            decode(tail, b, h, row, 1, factors, line, 0)
            part = block.shape[1] // facts.parts
            for i in range(facts.parts):
                for j in range(facts.width):
                    block[t, i * part + j] = line[0, j * facts.parts + i]
            t += 1
            continue
        page, row, end = b, token, min(last, tail_start - lo) if has_tail else last
        if page_table.size:
            page, row = min(max(page_table[b, token // size], 0), side[0].shape[0] - 1), token % size
            end = min(end, t + size - row)
        if facts.every:
            end = min(end, t + facts.every - token % facts.every)
            group, part = row // facts.every, block.shape[1] // facts.parts
            for i in range(facts.parts):
                for j in range(facts.width):
                    factors[0, i * part + j] = half(side[1], page, h, group, j * facts.parts + i)
                    factors[1, i * part + j] = half(side[2], page, h, group, j * facts.parts + i)
        decode(side, page, h, row, end - t, factors, block, t)
        t = end


@loop
def _weights(scores: Array, place: int, start: int, end: int, slopes: Array, options: Options, state: Array, out: Array) -> None:
    """Scores of a block become weights exp(score - largest), 0 for keys that a row does not see; sums so far are rescaled.

    The first query is at `place` of the block; keys before `start` and from `end` on are seen by none.
    """
    number = scores.dtype.type
    for r in range(scores.shape[0]):
        here = place + r % options.queries
        first, last = max(here - options.window + 1, start), min(here + 1, end)
        if first >= last:
            scores[r] = 0
            continue
        if options.softcap:
            for t in range(first, last):
                scores[r, t] = np.tanh(scores[r, t] / number(options.softcap)) * number(options.softcap)
        if slopes.size:
            for t in range(first, last):
                scores[r, t] += number(slopes[r // options.queries]) * number(t - here)
        scores[r, :first] = -np.inf
        scores[r, last:] = -np.inf
        largest = max(state[r, 0], largest_of(scores, r))
        if largest > state[r, 0]:
            keep = np.exp(state[r, 0] - largest)
            state[r, 0] = largest
            state[r, 1] *= keep
            for d in range(out.shape[1]):
                out[r, d] *= keep
        _exp(scores, r, largest)
        state[r, 1] += sum_of(scores, r)


@loop
def _exp(scores: Array, r: int, largest: float) -> None:
    """scores[r] = exp(scores[r] - largest), in fp32 within two units in the last place; NaN stays NaN. A vector of x at a time."""
    x = scores[r]
    if x.itemsize == 8:
        for t in range(x.shape[0]):
            x[t] = np.exp(x[t] - largest)
        return
    for t in range(x.shape[0]):
        y = max(x[t] - largest, np.float32(-87.0))
        n = np.floor(y * _LOG2E + np.float32(0.5))
        f = y - n * _LN2_HIGH - n * _LN2_LOW
        p = _EXP[0]
        for c in _EXP[1:]:
            p = p * f + c
        value = (p * f * f + f + np.float32(1)) * from_bits((np.int32(n) + np.int32(127)) << np.int32(23))
        x[t] = value if x[t] - largest >= np.float32(-87.0) else (np.float32(0) if x[t] == x[t] else np.float32(np.nan))


def _finish(state: Array, out: Array, sinks: Array, parts: int, result: Array, lse: Array) -> None:
    """result [B, Hq, L, D] and lse [B, Hq, L] of all splits, in their order; sinks [Hq], or without elements."""
    queries = result.shape[2]
    total = np.empty(out.shape[4], out.dtype)
    for b in range(result.shape[0]):
        for i in range(result.shape[1] * queries):
            h, r = i // out.shape[3], i % out.shape[3]
            largest = state[b, h, :, r, 0].max()
            weight = out.dtype.type(0)
            total[:] = 0
            for s in range(out.shape[2]):
                if state[b, h, s, r, 1] != 0:
                    factor = np.exp(state[b, h, s, r, 0] - largest)
                    weight += state[b, h, s, r, 1] * factor
                    for d in range(total.shape[0]):
                        total[d] += out[b, h, s, r, d] * factor
            lse[b, i // queries, i % queries] = largest + np.log(weight)
            if sinks.size:
                weight += np.exp(sinks[i // queries] - max(largest, np.finfo(np.float32).min))
            for d in range(result.shape[3]):
                value = total[_column(d, parts, total.shape[0])]
                result[b, i // queries, i % queries, d] = value / weight if weight != 0 else value
