"""The loops of `cpu.attention_codes`: queries times keys as they are stored, and values as they are stored times their weights."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from halfbyte.cpu.compiled import loop
from halfbyte.cpu.compiled.linear import FLOATS, LANES, Array, Rows, array_of, call, load, row_dots, spread


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
def scores(
    codes: Array, table: Array | None, scales: Array, offsets: Array | None, q: Array, out: Array, first: int, last: int
) -> None:
    """out[b, h, t, r] = q[b, h, r] . (key t), for the pairs b * H + h from `first` to `last`.

    codes    [B, H, T, D / 2] uint8, two codes a byte, or [B, H, T, D] int8, rows of any stride for b and h; D is a multiple of 32
    table    [16] fp32, the values of 4-bit codes; None for int8
    scales   [B, H, T, G] fp32; offsets the same, or None
    q        [B, H, R, D] fp32; for two codes a byte its even columns, then its odd ones
    out      [B, H, T, R] fp32
    """
    for i in range(first, last):
        b, h = i // codes.shape[1], i % codes.shape[1]
        if offsets is None:
            _scores_of_head(codes[b, h], table, scales[b, h], None, q[b, h], out[b, h])
        else:
            _scores_of_head(codes[b, h], table, scales[b, h], offsets[b, h], q[b, h], out[b, h])


@loop
def _scores_of_head(codes: Array, table: Array | None, scales: Array, offsets: Array | None, q: Array, out: Array) -> None:
    for t in range(codes.shape[0]):
        r = 0
        while r + 4 <= q.shape[0]:
            row_dots(codes, table, scales, None, offsets, t, q, out, r, 4)
            r += 4
        while r < q.shape[0]:
            row_dots(codes, table, scales, None, offsets, t, q, out, r, 1)
            r += 1


@loop
def weighted_sum(
    codes: Array, table: Array | None, scales: Array, offsets: Array | None, weights: Array, out: Array, first: int, last: int
) -> None:
    """out[b, h, r] += the sum over t of weights[b, h, t, r] * (value t); other arrays, and the order of columns, as in `scores`.

    weights [B, H, T, R] and out [B, H, R, D] are fp32. Values whose weights are all 0 are not read.
    """
    for i in range(first, last):
        b, h = i // codes.shape[1], i % codes.shape[1]
        if offsets is None:
            _sum_of_head(codes[b, h], table, scales[b, h], None, weights[b, h], out[b, h])
        else:
            _sum_of_head(codes[b, h], table, scales[b, h], offsets[b, h], weights[b, h], out[b, h])


@loop
def _sum_of_head(codes: Array, table: Array | None, scales: Array, offsets: Array | None, weights: Array, out: Array) -> None:
    for t in range(codes.shape[0]):
        if not weights[t].any():
            continue
        r = 0
        while r + 4 <= out.shape[0]:
            _add_row(codes, table, scales, None, offsets, t, weights, out, r, 4)
            r += 4
        while r < out.shape[0]:
            _add_row(codes, table, scales, None, offsets, t, weights, out, r, 1)
            r += 1
