"""A bf16 x with M = 1 times 4-bit codes, on CPUs with the instructions of `compiled.tiles`.

A step is 64 bytes of a row of the weight: 128 codes, 8 in each lane. They become pairs of bf16 numbers as in tiles, without the
transposition, which pays for a larger M only: x is put into the order of the codes once a call. A lane's 8 codes are in one
group, whose zero point comes off the lane's own sum, and whose scale multiplies it. Lanes are added up at the end of a row.
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
from halfbyte.cpu.compiled.tiles import INTS, WORDS, from_nibbles, number, products_of_pairs, sum_of_pair

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
        together: int = per_step.literal_value
        places = [lane * together // LANES for lane in range(LANES)]
        total = cgutils.alloca_once_value(builder, none)
        pieces = groups if together == 1 else steps
        steps_a_piece = builder.udiv(steps, groups) if together == 1 else number(1)
        with cgutils.for_range(builder, pieces) as piece:
            offset = builder.add(builder.mul(args[3], groups), builder.mul(piece.index, number(together)))
            scale = spread(builder, scales_at(builder, own_scales, own_scale_table, offset, together), places)
            if own_zeros is not None:
                zero = spread(builder, zeros_at(builder, own_zeros, offset, together), places)
            with cgutils.for_range(builder, steps_a_piece) as inner:
                step = builder.add(builder.mul(piece.index, steps_a_piece), inner.index)
                at = builder.add(start, builder.mul(step, number(_BYTES)))
                prefetch_ahead(builder, own_codes.data, at)
                words = load(builder, own_codes.data, at, INTS)
                pairs = [pair for table in tables for pair in from_nibbles(builder, words, table)]
                sums = [none, none]
                if own_zeros is not None:
                    sums[0] = builder.fmul(zero, load(builder, own_sums.data, builder.mul(step, number(LANES)), FLOATS))
                for i, pair in enumerate(pairs):
                    place = builder.mul(builder.add(builder.mul(step, number(4)), number(i % 4)), number(LANES))
                    sums[i % 2] = products_of_pairs(builder, sums[i % 2], pair, load(builder, own_x.data, place, INTS))
                more = call(builder, f"llvm.fma.v{LANES}f32", FLOATS, builder.fadd(*sums), scale, builder.load(total))
                builder.store(more, total)
        builder.store(sum_of(builder, builder.load(total)), builder.gep(out.data, [args[3]]))
        return context.get_dummy_value()

    return types.void(codes, table, rest, row, scales, scale_table, zeros, x, x_sums, y, per_step), codegen


@loop
def _arrange(x: Array, columns: Array, sums: Array) -> None:
    """columns [K / 128, 4, 16] = x [1, K / 2] in the order of the pairs of codes; sums [K / 128, 16] by lane, negative."""
    for step in range(len(columns)):
        for lane in range(16):
            total = np.float32(0)
            for i in range(4):
                pair = x[0, 64 * step + 4 * lane + i]
                columns[step, i, lane] = pair
                total -= sum_of_pair(pair)
            sums[step, lane] = total


@functools.cache
def loop_for(per_step: int) -> Any:
    """The loop for M = 1; `per_step`: groups in 128 columns, 1 for longer ones, too. Arguments as of `tiles.loop_for`.

    K is a multiple of 128; `first` and `last` count rows of the weight by 16, as tiles do.
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
        steps = x.shape[1] // 64
        memory = np.empty(80 * steps + 16, np.int32)
        start = -(memory.ctypes.data // 4) % 16  # a vector across two lines of the cache is read twice
        columns = memory[start : start + 64 * steps].reshape((steps, 4, 16))
        sums = memory[start + 64 * steps : start + 80 * steps].view(np.float32).reshape((steps, 16))
        _arrange(x, columns, sums)
        for row in range(16 * first, min(16 * last, len(codes))):
            _row(codes, table, rest, row, scales, scale_table, zeros, columns, sums, y, per_step)

    return rows
