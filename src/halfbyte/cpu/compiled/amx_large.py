"""A bf16 x times a weight as it is stored, for large M, on CPUs that multiply matrices (AMX BF16).

`ROWS` rows of the weight are decoded to bf16, scaled, into memory that stays in the second cache, and meet all of x: by 32 rows and
32 tokens at a time, whose sums are in four matrix registers. Both operands lie in memory as registers hold them: a step of 32
columns is 16 rows of weights, or 16 pairs of numbers of 16 tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from halfbyte.cpu.compiled import loop
from halfbyte.cpu.compiled.amx import configure, release, shapes_of
from halfbyte.cpu.compiled.linear import FLOATS, LANES, Array, Rows, array_of, call, load
from halfbyte.cpu.compiled.tiles import PAIRS, WORDS, aligned, number, transpose

#: Rows of the weight that are decoded at a time, and tiles of 16 tokens whose sums are kept meanwhile.
ROWS, MOST_TILES = 128, 32
#: Columns of a step, and numbers of a matrix register.
_STEP, _TILE = 32, 512
#: Steps of the decoded rows that stay in the second cache.
_CHUNK = 128
_BYTE = ir.IntType(8)
_HALF_PAIRS = ir.VectorType(PAIRS.element, LANES)
_SHAPES = shapes_of(_STEP)


@intrinsic
def _decode(
    typing_context: Any, codes: Any, table: Any, scales: Any, scale_table: Any, zeros: Any, row: Any, out: Any, lane: Any
) -> Any:
    """out [K / 32, 16, 32], at `lane` = row of the weight, as bits of bf16."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        weight = Rows(context, builder, signature.args[:5], args[:5])
        target = array_of(context, builder, signature.args[6], args[6])
        is_packed = weight.table is not None
        order = [i // 2 + i % 2 * LANES for i in range(_STEP)] if is_packed else [*range(_STEP)]

        def store(at: ir.Value, values: list[ir.Value]) -> None:
            pair = call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", PAIRS, values[1], values[0])
            bits = builder.bitcast(pair, WORDS)
            bits = builder.shuffle_vector(bits, bits, ir.Constant(ir.VectorType(ir.IntType(32), _STEP), order))
            column = builder.mul(at, number(2)) if is_packed else at
            offset = builder.add(builder.mul(column, number(LANES)), builder.mul(args[7], number(_STEP)))
            builder.store(bits, builder.bitcast(builder.gep(target.data, [offset]), WORDS.as_pointer()), align=64)

        weight.visit(args[5], store)
        return context.get_dummy_value()

    return types.void(codes, table, scales, scale_table, zeros, row, out, lane), codegen


@intrinsic
def _multiply(typing_context: Any, weight: Any, x: Any, all_steps: Any, first: Any, steps: Any, out: Any) -> Any:
    """out [2, 2, 16, 16] += two tiles of weights [2, K / 32, 16, 32] times two of x [2, K / 32, 16, 16], for `steps` of all."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        own, columns, sums = (array_of(context, builder, signature.args[i], args[i]) for i in (0, 1, 5))

        def tile(name: str, *values: Any) -> None:
            call(builder, f"llvm.x86.{name}", ir.VoidType(), *(ir.Constant(_BYTE, v) if isinstance(v, int) else v for v in values))

        def address(array: Any, offset: ir.Value) -> ir.Value:
            return builder.bitcast(builder.gep(array.data, [offset]), _BYTE.as_pointer())

        line, size = number(64), builder.mul(args[2], number(_TILE))
        for register in range(4):
            tile("tileloadd64", register, address(sums, number(register * 256)), line)
        with cgutils.for_range(builder, args[4]) as step:
            at = builder.mul(builder.add(args[3], step.index), number(_TILE))
            for i in range(2):
                tile("tileloadd64", 4 + i, address(own, builder.add(at, builder.mul(size, number(i)))), line)
                pairs = builder.udiv(builder.add(at, builder.mul(size, number(i))), number(2))
                tile("tileloadd64", 6 + i, address(columns, pairs), line)
            for i in range(2):
                for j in range(2):
                    tile("tdpbf16ps", 2 * i + j, 4 + i, 6 + j)
        for register in range(4):
            tile("tilestored64", register, address(sums, number(register * 256)), line)
        return context.get_dummy_value()

    return types.void(weight, x, all_steps, first, steps, out), codegen


@intrinsic
def _put(typing_context: Any, sums: Any, m: Any, bias: Any, y: Any, token: Any, row: Any) -> Any:
    """y[token, row : row + 16] = sums[m] + bias[row : row + 16], as bits of bf16."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        own, more, out = (array_of(context, builder, signature.args[i], args[i]) for i in (0, 2, 3))
        features = cgutils.unpack_tuple(builder, out.shape)[1]
        numbers = load(builder, own.data, builder.mul(args[1], number(LANES)), FLOATS)
        numbers = builder.fadd(numbers, load(builder, more.data, args[5], FLOATS))
        bits = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", _HALF_PAIRS, numbers)
        bits = builder.bitcast(bits, ir.VectorType(ir.IntType(16), LANES))
        place = builder.gep(out.data, [builder.add(builder.mul(args[4], features), args[5])])
        builder.store(bits, builder.bitcast(place, bits.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(sums, m, bias, y, token, row), codegen


@loop
def arrange(x: Array, columns: Array, first: int, last: int) -> None:
    """columns [tiles, K / 32, 16, 16] = x [M, K / 2], pairs of bf16 numbers, by 16 tokens; and zeros. Tiles `first` to `last`."""
    rows = np.zeros((16, x.shape[1]), np.int32)
    for tile in range(first, last):
        own = x[16 * tile : 16 * tile + 16]
        rows[: len(own)] = own
        rows[len(own) :] = 0
        transpose(rows, columns[tile].reshape((x.shape[1], 16)))


@loop
def amx_large(
    codes: Array,
    table: Array | None,
    scales: Array,
    scale_table: Array | None,
    zeros: Array | None,
    columns: Array,
    bias: Array,
    y: Array,
    first: int,
    last: int,
) -> None:
    """y [M, N], bits of bf16 = x W^T + bias, for tiles `first` to `last` of 16 rows of the weight; the arrays of `linear.products`.

    columns  x of `arrange`, an even number of tiles
    bias     [N] fp32
    """
    features, steps = len(codes), columns.shape[1]
    memory = aligned(ROWS * steps * 16)
    weight = memory.view(np.uint16).reshape((ROWS // 16, steps * 16 * 32))
    pairs = min(len(columns), MOST_TILES) // 2
    sums = aligned(pairs * ROWS * 32).view(np.float32).reshape((pairs, ROWS // 32, 4, 16, 16))
    tokens = np.empty((16, 16), np.float32)
    configure(_SHAPES)
    for block in range(first, last, ROWS // 16):
        count = (min(last - block, ROWS // 16) + 1) // 2 * 2
        for tile in range(count):
            row = min(16 * min(block + tile, last - 1), features - 16)
            for lane in range(16):
                _decode(codes, table, scales, scale_table, zeros, row + lane, weight[tile], lane)
        for start in range(0, len(columns), 2 * pairs):
            own = columns[start : start + 2 * pairs]
            for step in range(0, steps, _CHUNK):
                for pair in range(0, len(own), 2):
                    for tile in range(0, count, 2):
                        total = sums[pair // 2, tile // 2] if steps > _CHUNK else sums[0, 0]
                        if step == 0:
                            total[:] = 0
                        _multiply(weight[tile:], own[pair:], steps, step, min(steps - step, _CHUNK), total)
                        if step + _CHUNK < steps:
                            continue
                        for i in range(4):
                            transpose(total[i], tokens)
                            row, token = min(16 * min(block + tile + i // 2, last - 1), features - 16), 16 * (start + pair + i % 2)
                            for m in range(min(16, len(y) - token)):
                                _put(tokens, m, bias, y, token + m, row)
    release()
