"""A bf16 x with M = 1 times 4-bit codes, on CPUs with the instructions of `compiled.tiles`.

A step is 64 bytes of a row of the weight, at the end what is left: 128 codes, 8 in each lane. They become pairs of bf16 numbers as
in tiles, without the transposition, which pays for a larger M only: x is put into the order of the codes once a call. A lane's 8
codes are in one group, whose zero point comes off the lane's own sum, and whose scale multiplies it. Lanes are added up at the end
of a row.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from halfbyte.cpu.compiled import loop
from halfbyte.cpu.compiled.linear import (
    FLOATS,
    LANES,
    Array,
    array_of,
    call,
    load,
    prefetch_ahead,
    scales_at,
    spread,
    sum_of,
    zeros_at,
)
from halfbyte.cpu.compiled.tiles import INTS, WORDS, aligned, from_nibbles, number, products_of_pairs, sum_of_pair

#: Columns of a step, and bytes.
STEP, _BYTES = 128, 64


@intrinsic(prefer_literal=True)
def _row(
    typing_context: Any,
    codes: Any,
    table: Any,
    rest: Any,
    row: Any,
    scales: Any,
    scale_table: Any,
    zeros: Any,
    x: Any,
    x_sums: Any,
    y: Any,
    per_step: Any,
    rest_columns: Any,
) -> Any:
    """y[0, row] = x . (row of the weight), with x and its sums as of `_arrange`; the other arguments as of `loop_for`."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        own_codes, own_table, own_rest, own_scales, own_scale_table, own_zeros, own_x, own_sums, out = (
            array_of(context, builder, signature.args[i], args[i]) for i in (0, 1, 2, 4, 5, 6, 7, 8, 9)
        )
        width, groups = (cgutils.unpack_tuple(builder, array.shape)[1] for array in (own_codes, own_scales))
        start, steps = builder.mul(args[3], width), builder.udiv(width, number(_BYTES))
        tables = [load(builder, part.data, number(0), WORDS) for part in (own_table, own_rest) if part is not None]
        none = ir.Constant(FLOATS, [0.0] * LANES)
        together, left = per_step.literal_value, rest_columns.literal_value // 2
        total = cgutils.alloca_once_value(builder, none)

        def of_groups(first: ir.Value, count: int) -> tuple[ir.Value, ir.Value | None]:
            """Scales and zero points of the lanes of a step, whose `count` groups begin with `first`."""
            offset, places = builder.add(builder.mul(args[3], groups), first), [lane * together // LANES for lane in range(LANES)]
            places = [min(place, count - 1) for place in places]
            scale = spread(builder, scales_at(builder, own_scales, own_scale_table, offset, count), places)
            zero = None if own_zeros is None else spread(builder, zeros_at(builder, own_zeros, offset, count), places)
            return scale, zero

        def multiply(step: ir.Value, words: ir.Value, scale: ir.Value, zero: ir.Value | None) -> None:
            """Add the products of a step's codes."""
            pairs = [pair for table in tables for pair in from_nibbles(builder, words, table)]
            sums = [none, none]
            if zero is not None:
                sums[0] = builder.fmul(zero, load(builder, own_sums.data, builder.mul(step, number(LANES)), FLOATS))
            for i, pair in enumerate(pairs):
                place = builder.mul(builder.add(builder.mul(step, number(4)), number(i % 4)), number(LANES))
                sums[i % 2] = products_of_pairs(builder, sums[i % 2], pair, load(builder, own_x.data, place, INTS))
            more = call(builder, f"llvm.fma.v{LANES}f32", FLOATS, builder.fadd(*sums), scale, builder.load(total))
            builder.store(more, total)

        pieces = groups if together == 1 else steps
        steps_a_piece = builder.udiv(steps, groups) if together == 1 else number(1)
        with cgutils.for_range(builder, pieces) as piece:
            of_lanes = of_groups(builder.mul(piece.index, number(together)), together)
            with cgutils.for_range(builder, steps_a_piece) as inner:
                step = builder.add(builder.mul(piece.index, steps_a_piece), inner.index)
                at = builder.add(start, builder.mul(step, number(_BYTES)))
                prefetch_ahead(builder, own_codes.data, at)
                multiply(step, load(builder, own_codes.data, at, INTS), *of_lanes)
        if left:
            count = max(1, together * left // _BYTES)
            at = builder.add(start, builder.mul(steps, number(_BYTES)))
            words = load(builder, own_codes.data, at, ir.VectorType(ir.IntType(32), left // 4))
            words = builder.shuffle_vector(words, words.type(None), ir.Constant(INTS, [min(i, left // 4) for i in range(LANES)]))
            multiply(steps, words, *of_groups(builder.sub(groups, number(count)), count))
        builder.store(sum_of(builder, builder.load(total)), builder.gep(out.data, [args[3]]))
        return context.get_dummy_value()

    return types.void(codes, table, rest, row, scales, scale_table, zeros, x, x_sums, y, per_step, rest_columns), codegen


@loop
def _arrange(x: Array, columns: Array, sums: Array) -> None:
    """columns [steps, 4, 16] = x [1, K / 2] in the order of the pairs of codes, and zeros; sums [steps, 16] by lane, negative."""
    for step in range(len(columns)):
        for lane in range(16):
            total = np.float32(0)
            for i in range(4):
                place = 64 * step + 4 * lane + i
                pair = x[0, place] if place < x.shape[1] else np.int32(0)
                columns[step, i, lane] = pair
                total -= sum_of_pair(pair)
            sums[step, lane] = total


@functools.cache
def loop_for(per_step: int, rest_columns: int) -> Any:
    """The loop for M = 1. Arguments as of `tiles.loop_for`; `first` and `last` count rows of the weight by 16, as tiles do.

    per_step        groups in 128 columns, 1 for longer ones, too
    rest_columns    K modulo 128
    """

    @loop
    def rows(
        codes: Array,
        table: Array,
        rest: Array | None,
        scales: Array,
        scale_table: Array | None,
        zeros: Array | None,
        x: Array,
        y: Array,
        pieces: int,
        first: int,
        last: int,
    ) -> None:
        steps = (x.shape[1] + 63) // 64
        memory = aligned(80 * steps)
        columns, sums = memory[: 64 * steps].reshape((steps, 4, 16)), memory[64 * steps :].view(np.float32).reshape((steps, 16))
        _arrange(x, columns, sums)
        for row in range(16 * first, min(16 * last, len(codes))):
            _row(codes, table, rest, row, scales, scale_table, zeros, columns, sums, y, per_step, rest_columns)

    return rows
