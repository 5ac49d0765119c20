"""Quantize-and-append: the bits of `reference.append`, by loops over the new tokens of a KV head."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from halfbyte.cpu.compiled import loop
from halfbyte.cpu.compiled.attention import Facts, Side, rotate
from halfbyte.cpu.compiled.blocks import READERS, from_bits
from halfbyte.cpu.compiled.linear import Array

#: The largest magnitude that is taken: no scale, no offset and no rounding of it exceeds 16 bits.
LARGEST = np.float32(2.0**15)
_MIN_SCALE = np.float32(2.0**-24)
_E4M3, _FP16, _BF16 = (list(READERS).index(name) for name in ("e4m3", "fp16", "bf16"))


class Rule(NamedTuple):
    """How the numbers of a side become codes, besides the `Facts` of it.

    scales       how many there are: 0 none, 1 for all numbers, 2 for a token, 3 for a head of a token or for parts of it
    has_offsets  whether a block's lowest number is subtracted
    reach, clip  as in `formats`
    """

    scales: int
    has_offsets: bool
    reach: float
    clip: float


@functools.cache
def loops() -> tuple[Any, Any, Any]:
    """`_fits`, `_prepare` and `_store`, compiled."""
    f32, f64, i32, i64 = types.float32, types.float64, types.int32, types.int64
    raw, halves, new, numbers = types.uint8[:, :, :, :], types.uint16[:, :, :, :], f32[:, :, :, ::1], i64[::1]
    side = types.Tuple((raw, halves, halves, types.NamedUniTuple(i64, len(Facts._fields), Facts)))
    sides, rule = types.UniTuple(side, 2), types.NamedTuple((i64, types.boolean, f64, f64), Rule)
    x, angles, table = f32[:, :, :, :], f32[:, :, :], i32[:, :]
    return (
        loop(_fits, types.boolean(numbers, numbers, i64, table, i64, i64, i64)),
        loop(_prepare, types.boolean(x, x, x, angles, angles, types.boolean, i64, i64, numbers, new, new, new)),
        loop(_store, types.void(new, new, sides, sides, rule, rule, numbers, numbers, table, i64[:, ::1], i64, i64)),
    )


@intrinsic
def _half_bits(typing_context: Any, number: Any) -> Any:
    """The bits of an fp32 number rounded to fp16."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def _half(typing_context: Any, bits: Any) -> Any:
    """The fp32 number of the bits of an fp16 one."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def _bits(typing_context: Any, number: Any) -> Any:
    """The bits of an fp32 number."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@loop
def as_bf16(number: float) -> Any:
    """The bits of a number rounded to bf16."""
    bits = _bits(number)
    return np.uint16((bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> np.int32(16) & np.int32(0xFFFF))


@loop
def from_bf16(bits: int) -> Any:
    """The number of the bits of bf16."""
    return from_bits(np.int32(bits) << np.int32(16))


@loop
def _plain_bits(number: float, code: int) -> Any:
    """The bits of a number rounded to fp16 or bf16."""
    return _half_bits(number) if code == _FP16 else as_bf16(number)


@loop
def _rounded(number: float, code: int) -> Any:
    """A number rounded to fp16 or bf16, or as it is for any other code."""
    if code == _FP16:
        return _half(_half_bits(number))
    return from_bf16(as_bf16(number)) if code == _BF16 else number


@loop
def _e4m3_bits(number: float) -> Any:
    """The bits of a number, of magnitude 448 or less, rounded to E4M3, ties to even."""
    size = _bits(number) & np.int32(0x7FFFFFFF)
    sign = _bits(number) >> np.int32(24) & np.int32(0x80)
    if size < np.int32(121 << 23):  # below 2^-6: a multiple of 2^-9, the last place of 2^14
        return sign | _bits(from_bits(size) + np.float32(2.0**14)) - np.int32(141 << 23)
    odd = size >> np.int32(20) & np.int32(1)
    return sign | (size - np.int32(120 << 23) + np.int32(0x7FFFF) + odd) >> np.int32(20)


def _fits(lengths: Array, counts: Array, most: int, page_table: Array, ring: int, pages: int, rows: int) -> bool:
    """Whether `counts` of at most `most` tokens have room, in pages (or sequences) of so many rows that there are."""
    for b in range(lengths.shape[0]):
        total = lengths[b] + counts[b]
        if lengths[b] < 0 or not 0 <= counts[b] <= most or total > rows * (page_table.shape[1] if page_table.size else 1):
            return False
        if page_table.size:
            for i in range(max(lengths[b] - ring, 0) // rows, (total + rows - 1) // rows):
                if not 0 <= page_table[b, i] < pages:
                    return False
    return True


def _prepare(
    k: Array,
    v: Array,
    q: Array,
    cos: Array,
    sin: Array,
    interleaved: bool,
    code: int,
    rotation: int,
    counts: Array,
    new_k: Array,
    new_v: Array,
    new_q: Array,
) -> bool:
    """new_k, new_v and new_q [B, H, L, D] = k, v and q: k and q by position, k also by `rotation` (0: not at all); whether k and v
    can be stored. `counts` tokens of k and v, and all of q.

    cos, sin  [B or 1, L, R / 2], or without elements; what they give is rounded to the type of `code`
    """
    good = True
    for b in range(k.shape[0]):
        place = b if cos.shape[0] > 1 else 0
        for i in range(q.shape[2]):
            for h in range(q.shape[1]):
                new_q[b, h, i] = q[b, h, i]
                _place_row(new_q[b, h, i], cos, sin, place, i, interleaved, code)
        for i in range(counts[b]):
            for h in range(k.shape[1]):
                row, values = new_k[b, h, i], new_v[b, h, i]
                for d in range(k.shape[3]):
                    row[d] = k[b, h, i, d]
                for d in range(v.shape[3]):
                    values[d] = v[b, h, i, d]
                _place_row(row, cos, sin, place, i, interleaved, code)
                good &= _is_moderate(row) and _is_moderate(values)
                if rotation:
                    rotate(row, rotation)
                    good &= _is_moderate(row)
    return good


@loop
def _place_row(row: Array, cos: Array, sin: Array, b: int, i: int, interleaved: bool, code: int) -> None:
    """Rotate a row by its position, as `reference.rope` does."""
    half = cos.shape[2]
    for d in range(half):
        low, high = (2 * d, 2 * d + 1) if interleaved else (d, d + half)
        first, second = row[low], row[high]
        row[low] = _rounded(first * cos[b, i, d] - second * sin[b, i, d], code)
        row[high] = _rounded(second * cos[b, i, d] + first * sin[b, i, d], code)


@loop
def _is_moderate(row: Array) -> bool:
    """Whether all numbers are at most `LARGEST`; NaN is not."""
    good = True
    for d in range(row.shape[0]):
        good &= abs(row[d]) <= LARGEST
    return good


def _store(
    k: Array,
    v: Array,
    keys: tuple[Side, Side],
    values: tuple[Side, Side],
    k_rule: Rule,
    v_rule: Rule,
    lengths: Array,
    counts: Array,
    page_table: Array,
    beyond: Array,
    first: int,
    last: int,
) -> None:
    """Tokens k and v of `_prepare` for units `first` to `last`; unit b * H + h is a KV head of a sequence.

    page_table  [B, pages], or without elements
    beyond      [2, B * H]: how many numbers of k and of v a scale for all of them does not reach
    """
    _store_side(k, keys, k_rule, lengths, counts, page_table, beyond[0], first, last)
    _store_side(v, values, v_rule, lengths, counts, page_table, beyond[1], first, last)


@loop
def _store_side(
    new: Array,
    sides: tuple[Side, Side],
    rule: Rule,
    lengths: Array,
    counts: Array,
    page_table: Array,
    beyond: Array,
    first: int,
    last: int,
) -> None:
    """`_store` of one side."""
    side, tail = sides
    facts, heads = side[3], new.shape[1]
    shared = heads if rule.scales == 2 else 1
    rows = np.empty((max(shared, facts.every), new.shape[3]), np.float32)
    scales = np.empty((2, new.shape[3]), np.float32)
    for unit in range(first, last):
        b, h = unit // heads, unit % heads
        if rule.scales == 2 and h:
            continue  # the first head stores those of all
        for i in range(counts[b]):
            token = lengths[b] + i
            for j in range(shared):
                rows[j] = new[b, h + j, i]
            if facts.every:
                row = token % facts.every
                _put(rows[0], tail, b, h, row)
                if row == facts.every - 1:
                    for j in range(facts.every):
                        _take(rows[j], tail, b, h, j)
                    page, at = _place(b, token - row, page_table, side)
                    _store_block(rows, side, rule, page, h, at, scales)
                continue
            if tail[0].size:
                row = token if token < facts.sinks else facts.sinks + token % max(facts.ring, 1)
                token = token if token < facts.sinks else token - facts.ring
                for j in range(shared):
                    # What leaves the ring makes room. Without a ring a token leaves at once, rounded as if it had been there.
                    if facts.ring and token >= facts.sinks:
                        _take(rows[j], tail, b, h + j, row)
                    if facts.ring or token < facts.sinks:
                        _put(new[b, h + j, i], tail, b, h + j, row)
                    else:
                        for d in range(rows.shape[1]):
                            rows[j, d] = _rounded(rows[j, d], tail[3].reader)
                if token < facts.sinks:
                    continue
            page, at = _place(b, token, page_table, side)
            beyond[unit] += _store_token(rows[:shared], side, rule, page, h, at, scales)


@loop
def _place(b: int, token: int, page_table: Array, side: Side) -> Any:
    """The page (or sequence) and row of a token."""
    size = side[0].shape[2]
    return (np.int64(page_table[b, token // size]), token % size) if page_table.size else (b, token)


@loop
def _put(row: Array, side: Side, page: int, h: int, at: int) -> None:
    """Store a row in 16 bits."""
    codes = side[0]
    for d in range(row.shape[0]):
        bits = _plain_bits(row[d], side[3].reader)
        codes[page, h, at, 2 * d], codes[page, h, at, 2 * d + 1] = np.uint8(bits & 255), np.uint8(bits >> 8)


@loop
def _take(row: Array, side: Side, page: int, h: int, at: int) -> None:
    """Read a row of 16 bits."""
    codes = side[0]
    for d in range(row.shape[0]):
        bits = np.int32(codes[page, h, at, 2 * d]) | np.int32(codes[page, h, at, 2 * d + 1]) << np.int32(8)
        row[d] = _half(np.uint16(bits)) if side[3].reader == _FP16 else from_bf16(bits)


@loop
def _store_token(rows: Array, side: Side, rule: Rule, page: int, h: int, at: int, scales: Array) -> int:
    """Store rows of heads h and following of a token. Returns how many numbers its scale does not reach."""
    if not rule.scales:
        _put(rows[0], side, page, h, at)
        return 0
    beyond, groups = 0, side[3].groups
    size = rows.shape[1] // groups
    for g in range(groups):
        columns = slice(g * size, (g + 1) * size)
        if rule.scales == 1:
            scale, offset = max(_half(side[1][page, h, at, 0]), _MIN_SCALE), np.float32(0)
        else:
            low, high = _extent(rows[:, columns], rule)
            scale, offset = _store_scale(low, high, side, rule, page, h, at, g)
        scales[0, columns], scales[1, columns] = scale, offset
    for j in range(rows.shape[0]):
        if rule.scales == 1:
            for d in range(rows.shape[1]):
                beyond += abs(np.rint(rows[j, d] / scales[0, d])) > np.float32(rule.reach)
        _encode(rows[j], scales, side, rule, page, h + j, at)
    return beyond


@loop
def _store_block(rows: Array, side: Side, rule: Rule, page: int, h: int, at: int, scales: Array) -> None:
    """Store tokens that share the scales of their columns, from row `at` on."""
    for d in range(rows.shape[1]):
        low, high = _extent(rows[:, d : d + 1], rule)
        scales[0, d], scales[1, d] = _store_scale(low, high, side, rule, page, h, at // side[3].every, d)
    for j in range(rows.shape[0]):
        _encode(rows[j], scales, side, rule, page, h, at + j)


@loop
def _extent(x: Array, rule: Rule) -> Any:
    """The smallest and the largest number; without offsets: 0, the largest magnitude."""
    low, high = np.float32(np.inf), np.float32(-np.inf)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            value = x[i, j] if rule.has_offsets else abs(x[i, j])
            low, high = min(low, value), max(high, value)
    return low if rule.has_offsets else np.float32(0), high


@loop
def _store_scale(low: Any, high: Any, side: Side, rule: Rule, page: int, h: int, at: int, group: int) -> Any:
    """Store the scale and the offset of a block of this extent; as they are stored, but for a scale of infinity where all is one
    number, whose code is 0."""
    span, constant = high - low, rule.has_offsets and high == low
    if rule.clip != 1:
        low, span = low + span * np.float32((1 - rule.clip) / 2), span * np.float32(rule.clip)
    bits = _half_bits(max(span / np.float32(rule.reach), _MIN_SCALE))
    side[1][page, h, at, group] = bits
    if not rule.has_offsets:
        return _half(bits), np.float32(0)
    offset = _half_bits(low)
    side[2][page, h, at, group] = offset
    return np.float32(np.inf) if constant else _half(bits), _half(offset)


@loop
def _encode(row: Array, scales: Array, side: Side, rule: Rule, page: int, h: int, at: int) -> None:
    """Store the codes of a row; scales [2, D] are those of columns, and their offsets."""
    codes, facts = side[0][page, h, at], side[3]
    reach = np.float32(rule.reach)
    lowest, bits = -reach if facts.parts == 1 else np.float32(0), 8 // facts.parts
    for i in range(facts.width):
        byte: Any = 0
        for j in range(facts.parts):
            d = i * facts.parts + j
            unit = (row[d] - scales[1, d]) / scales[0, d]
            if facts.reader == _E4M3:
                byte = _e4m3_bits(min(max(unit, lowest), reach))
            else:
                byte |= np.int64(min(max(np.rint(unit), lowest), reach)) << bits * j
        codes[i] = np.uint8(byte & 255)
