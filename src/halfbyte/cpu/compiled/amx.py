"""A bf16 x times a weight as it is stored, for M up to 64, on CPUs that multiply matrices (AMX BF16).

Arithmetic as in `compiled.tiles`, with another layout. A step is 32 columns of 16 rows of the weight. The codes of a row become a
vector of bf16 numbers, in a buffer that stays in the first cache. One instruction multiplies the buffer [16, 32] by 16 tokens of
x [32, 16], and adds to fp32 sums [16, 16], a matrix register. x is transposed once a call. At the end of a piece of the columns
the sums meet the scales and zero points of its group, by rows.

    sums[n, m]   +=  bf16(code[n, k]) * x[m, k]                              columns k of a piece
    totals[n, m] +=  scale[n, g] * (sums[n, m] - zero[n, g] * x_sums[p, m])  piece p of group g
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from halfbyte.cpu.compiled import loop
from halfbyte.cpu.compiled.linear import FLOATS, LANES, Array, array_of, call, cpu_has, load, prefetch
from halfbyte.cpu.compiled.tiles import INTS, WORDS, aligned, broadcast, number, read_scales, read_zeros, transpose

#: Matrix registers of x times 16 tokens each are free for this many times 16 tokens.
MOST_TILES = 4
#: Columns of a step, and bytes of a row of a matrix register.
_STEP, _LINE = 32, 64
#: Matrix registers: sums are the first ones.
_WEIGHT, _REST, _X = 4, 5, 6
#: Words of 32 bits in a matrix register.
_WORDS = 256
#: Bytes ahead of those in use that are fetched into the second cache.
_AHEAD = 256
#: Numbers of arch_prctl of Linux on x86-64: the system call, the request for a permission, and that for data of matrix registers.
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18
_BYTE, _INT, _POINTER = ir.IntType(8), ir.IntType(32), ir.IntType(8).as_pointer()
_SIXTEEN = ir.VectorType(_BYTE, LANES)


@functools.cache
def works() -> bool:
    """Whether this CPU has the instructions, and this process may use them."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or not all(map(cpu_has, ("amx-tile", "amx-bf16", "avx512bf16"))):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0)


def shapes_of(columns: int) -> Array:
    """What `ldtilecfg` loads: rows and bytes of a row of each matrix register, for so many columns of the weight."""
    shapes = np.zeros(64, np.uint8)
    shapes[0] = 1  # the only palette
    shapes[16:32:2] = _LINE
    shapes[[16 + 2 * _WEIGHT, 16 + 2 * _REST]] = 2 * columns
    shapes[48:56] = LANES
    shapes[48 + _X : 56] = columns // 2
    return shapes


def _order(bits: int, piece: int) -> list[int]:
    """Columns of a step in the order of decoded ones: of 8 bits, of both halves by turns; of 4 bits, nibbles of words by turns."""
    if bits == 8:
        return [i % 2 * LANES + i // 2 for i in range(_STEP)]
    words = min(piece, _STEP) // 4
    return [4 * (i // (4 * words) * words + i % words) + i // words % 4 for i in range(_STEP)]


class _Matrix:
    """Emits code for 16 rows times `tiles` times 16 tokens of x. Arguments as in `_matrix`."""

    def __init__(self, context: Any, builder: ir.IRBuilder, kinds: tuple[Any, ...], args: tuple[ir.Value, ...]) -> None:
        self.builder = builder
        self.codes, table, rest, self.scales, self.zeros, self.x, self.x_sums, self.y, self.buffer = (
            array_of(context, builder, kinds[i], args[i]) for i in (0, 1, 2, 4, 6, 7, 8, 9, 10)
        )
        self.has_zeros = not isinstance(kinds[5], types.NoneType)
        self.row, self.pieces, self.groups = args[3], args[11], args[12]
        self.tiles: int = kinds[13].literal_value
        self.piece: int = kinds[14].literal_value
        self.block: int = kinds[15].literal_value
        self.width = cgutils.unpack_tuple(builder, self.codes.shape)[1]
        self.stride = cgutils.unpack_tuple(builder, self.scales.shape)[1]
        self.depth = cgutils.unpack_tuple(builder, self.x.shape)[1]
        self.tables = [load(builder, part.data, number(0), WORDS) for part in (table, rest) if part is not None]
        self.parts = max(1, len(self.tables))
        self.steps = self.block // _STEP
        self.bytes = _STEP if table is None else _STEP // 2
        self.start = builder.mul(self.row, self.width)
        zeros = ir.Constant(FLOATS, [0.0] * LANES)
        self.totals = [[cgutils.alloca_once_value(builder, zeros) for _ in range(LANES)] for _ in range(self.tiles)]

    def tile(self, name: str, *args: ir.Value | int) -> None:
        """An instruction for matrix registers, which are constants."""
        values = [ir.Constant(_BYTE, arg) if isinstance(arg, int) else arg for arg in args]
        call(self.builder, f"llvm.x86.{name}", ir.VoidType(), *values)

    def load_tile(self, register: int, array: Any, offset: ir.Value) -> None:
        self.tile("tileloadd64", register, self.address(array, offset), number(_LINE))

    def address(self, array: Any, offset: ir.Value, kind: ir.Type = _BYTE) -> ir.Value:
        """Of the number at `offset`."""
        return self.builder.bitcast(self.builder.gep(array.data, [offset]), kind.as_pointer())

    def decode(self, block: ir.Value) -> None:
        """Fill the buffer with the numbers of a block of columns. A later block is fetched, behind a row's end of the next tile."""
        builder, size = self.builder, self.steps * self.bytes
        at = builder.mul(block, number(size))
        beyond = builder.icmp_unsigned(">=", builder.add(at, number(_AHEAD)), self.width)
        ahead = builder.add(number(_AHEAD), builder.select(beyond, builder.mul(self.width, number(LANES - 1)), number(0)))
        for lane in range(LANES):
            row = builder.add(builder.add(self.start, builder.mul(number(lane), self.width)), at)
            for line in range(0, size, _LINE):
                prefetch(builder, builder.gep(self.codes.data, [builder.add(builder.add(row, ahead), number(line))]), 2)
            for step in range(self.steps):
                for part, numbers in enumerate(self.numbers(builder.add(row, number(step * self.bytes)))):
                    place = number((step * self.parts + part) * _WORDS + lane * LANES)
                    builder.store(numbers, self.address(self.buffer, place, numbers.type), align=_LINE)

    def numbers(self, offset: ir.Value) -> list[ir.Value]:
        """32 columns from a byte on, as bf16 numbers in the order of `_order`: one vector, or two whose sum is meant."""
        builder = self.builder
        if not self.tables:  # the lower halves of small integers in fp32 are 0
            halves = (load(builder, self.codes.data, builder.add(offset, number(i)), _SIXTEEN) for i in (0, LANES))
            first, second = (builder.bitcast(builder.sitofp(builder.sext(half, INTS), FLOATS), INTS) for half in halves)
            return [builder.or_(builder.lshr(first, ir.Constant(INTS, [16] * LANES)), second)]
        stored = load(builder, self.codes.data, offset, ir.VectorType(ir.IntType(16), 8))
        order = _order(4, self.piece)
        words = builder.shuffle_vector(stored, stored, ir.Constant(ir.VectorType(_INT, _STEP), [i // 4 for i in order]))
        # Of an index only the lowest 5 bits count, of which the table ignores one: no code needs a mask.
        index = builder.lshr(words, ir.Constant(WORDS, [i % 4 * 4 for i in order]))
        return [call(builder, "llvm.x86.avx512.permvar.hi.512", WORDS, table, index) for table in self.tables]

    def multiply(self, register: int, piece: ir.Value, column: int) -> None:
        """Sums, in registers from `register` on: of a piece, which begins at `column` of a block."""
        builder = self.builder
        for tile in range(self.tiles):
            self.tile("tilezero", register + tile)
        for at in range(0, self.piece, _STEP):
            step, word = (column + at) // _STEP, (column + at) % _STEP // 2
            for part in range(self.parts):
                self.load_tile(_WEIGHT + part, self.buffer, number((step * self.parts + part) * _WORDS + word))
            pair = builder.add(builder.mul(piece, number(self.piece // 2)), number(at // 2))
            for tile in range(self.tiles):
                own, row = _X + (step + tile) % 2, builder.add(builder.mul(number(tile), self.depth), pair)
                self.load_tile(own, self.x, builder.mul(row, number(LANES)))
                for part in range(self.parts):
                    self.tile("tdpbf16ps", register + tile, _WEIGHT + part, own)

    def finish(self, slot: int, piece: ir.Value) -> None:
        """Add a piece's sums, which are in the buffer, times the scales of its group, to the totals."""
        builder = self.builder
        group = builder.udiv(builder.mul(piece, self.groups), self.pieces)
        x_sums = []
        if self.has_zeros:
            first = builder.mul(piece, number(self.tiles * LANES))
            x_sums = [load(builder, self.x_sums.data, builder.add(first, number(i * LANES)), FLOATS) for i in range(self.tiles)]
        for lane in range(LANES):
            place = builder.add(builder.mul(number(lane), self.stride), group)
            scale = broadcast(builder, self.scales.data, place, FLOATS)
            zero = broadcast(builder, self.zeros.data, place, FLOATS) if self.has_zeros else None
            for tile, totals in enumerate(self.totals):
                sums = builder.load(self.address(self.buffer, number(self.sums_of(slot + tile) + lane * LANES), FLOATS))
                if zero is not None:
                    sums = self.fma(zero, x_sums[tile], sums)
                builder.store(self.fma(sums, scale, builder.load(totals[lane])), totals[lane])

    def sums_of(self, register: int) -> int:
        """Where in the buffer the sums of a register go."""
        first: int = self.steps * self.parts
        return (first + register) * _WORDS

    def fma(self, first: ir.Value, second: ir.Value, third: ir.Value) -> ir.Value:
        return call(self.builder, f"llvm.fma.v{LANES}f32", FLOATS, first, second, third)

    def all_columns(self) -> None:
        """Totals of the rows: as many pieces at a time as have registers."""
        builder = self.builder
        in_block = self.block // self.piece
        together = MOST_TILES // self.tiles
        with cgutils.for_range(builder, builder.udiv(self.pieces, number(in_block))) as loop:
            self.decode(loop.index)
            pieces = [builder.add(builder.mul(loop.index, number(in_block)), number(i)) for i in range(in_block)]
            for first in range(0, in_block, together):
                some = [*enumerate(range(first, min(first + together, in_block)))]
                for slot, i in some:
                    self.multiply(slot * self.tiles, pieces[i], i * self.piece)
                for register in range(len(some) * self.tiles):
                    place = self.address(self.buffer, number(self.sums_of(register)))
                    self.tile("tilestored64", register, place, number(_LINE))
                for slot, i in some:
                    self.finish(slot * self.tiles, pieces[i])

    def store(self) -> None:
        for tile, totals in enumerate(self.totals):
            for lane, total in enumerate(totals):
                place = number(tile * _WORDS + lane * LANES)
                self.builder.store(self.builder.load(total), self.address(self.y, place, FLOATS), align=4)


@intrinsic(prefer_literal=True)
def _matrix(
    typing_context: Any,
    codes: Any,
    table: Any,
    rest: Any,
    row: Any,
    scales: Any,
    zeros: Any,
    own_zeros: Any,
    x: Any,
    x_sums: Any,
    y: Any,
    buffer: Any,
    pieces: Any,
    groups: Any,
    tiles: Any,
    piece: Any,
    block: Any,
) -> Any:
    """y[t, lane, m] = x[16 t + m] . (row + lane of the weight).

    Scales and zero points, if there are any, are [16, G], x [tiles, K / 2, 16], its negative sums [pieces, tiles, 16]; the
    rest as in `loop_for`.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        matrix = _Matrix(context, builder, signature.args, args)
        matrix.all_columns()
        matrix.store()
        return context.get_dummy_value()

    kinds = codes, table, rest, row, scales, zeros, own_zeros, x, x_sums, y, buffer, pieces, groups, tiles, piece, block
    return types.void(*kinds), codegen


@intrinsic
def configure(typing_context: Any, shapes: Any) -> Any:
    """Give the matrix registers of this thread the shapes of `shapes_of`."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        own = array_of(context, builder, signature.args[0], args[0])
        call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), builder.bitcast(own.data, _POINTER))
        return context.get_dummy_value()

    return types.void(shapes), codegen


@intrinsic
def release(typing_context: Any) -> Any:
    """Give the matrix registers back: a switch of threads saves them otherwise."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        call(builder, "llvm.x86.tilerelease", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic(prefer_literal=True)
def _reorder(typing_context: Any, rows: Any, table: Any, piece: Any) -> Any:
    """Put the columns of rows [16, K / 2], pairs of bf16 numbers, in the order of decoded ones; 4 bits have a table."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        own = array_of(context, builder, signature.args[0], args[0])
        bits = 8 if isinstance(table, types.NoneType) else 4
        order = ir.Constant(ir.VectorType(_INT, _STEP), _order(bits, piece.literal_value))
        with cgutils.for_range(builder, builder.udiv(own.nitems, number(LANES))) as loop:
            offset = builder.mul(loop.index, number(LANES))
            words = load(builder, own.data, offset, WORDS)
            place = builder.bitcast(builder.gep(own.data, [offset]), WORDS.as_pointer())
            builder.store(builder.shuffle_vector(words, words, order), place, align=4)
        return context.get_dummy_value()

    return types.void(rows, table, piece), codegen


@intrinsic
def _sum_columns(typing_context: Any, columns: Any, first: Any, count: Any, out: Any) -> Any:
    """out [16] = the negative sums of `count` rows of columns [n, 16], pairs of bf16 numbers, from row `first` on."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        own, sums = (array_of(context, builder, signature.args[i], args[i]) for i in (0, 3))
        total = cgutils.alloca_once_value(builder, ir.Constant(FLOATS, [0.0] * LANES))
        half, upper = ir.Constant(INTS, [16] * LANES), ir.Constant(INTS, [-(1 << 16)] * LANES)
        with cgutils.for_range(builder, args[2]) as loop:
            pairs = load(builder, own.data, builder.mul(builder.add(args[1], loop.index), number(LANES)), INTS)
            even, odd = (builder.bitcast(bits, FLOATS) for bits in (builder.shl(pairs, half), builder.and_(pairs, upper)))
            builder.store(builder.fsub(builder.load(total), builder.fadd(even, odd)), total)
        builder.store(builder.load(total), builder.bitcast(sums.data, FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(columns, first, count, out), codegen


@functools.cache
def loop_for(tiles: int, piece: int, block: int) -> Any:
    """The loop for an x of at most 16 times `tiles` rows, over 16 rows of the weight at a time. Arguments as of `tiles.loop_for`.

    piece, block    columns whose sums a scale is applied to, and that are decoded at a time: as `block_of` says
    """
    shapes = shapes_of(min(piece, _STEP))
    words = (2 * block // _STEP + MOST_TILES) * _WORDS

    @loop
    def amx(
        codes: Array,
        table: Array | None,
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
        (features, groups), pairs = scales.shape, x.shape[1]
        own_scales, own_zeros = np.empty((16, groups), np.float32), np.empty((16, groups), np.float32)
        columns, sums = aligned(tiles * pairs * 16).reshape((tiles, pairs, 16)), np.empty((pieces, tiles, 16), np.float32)
        rows = np.zeros((16, pairs), np.int32)
        for tile in range(tiles):
            own = x[16 * tile : 16 * tile + 16]
            rows[: len(own)] = own
            rows[len(own) :] = 0
            _reorder(rows, table, piece)
            transpose(rows, columns[tile])
            if zeros is not None:
                for part in range(pieces):
                    _sum_columns(columns[tile], part * (piece // 2), piece // 2, sums[part, tile])
        buffer, out = aligned(words), np.empty((tiles, 16, 16), np.float32)
        configure(shapes)
        for tile in range(first, last):
            row = min(16 * tile, features - 16)
            read_scales(scales, scale_table, row, own_scales)
            if zeros is not None:
                read_zeros(zeros, row, own_zeros)
            _matrix(
                codes,
                table,
                rest,
                row,
                own_scales,
                zeros,
                own_zeros,
                columns,
                sums,
                out,
                buffer,
                pieces,
                groups,
                tiles,
                piece,
                block,
            )
            for m in range(len(x)):
                for lane in range(16):
                    y[m, row + lane] = out[m // 16, lane, m % 16]
        release()

    return amx


def block_of(columns: int, piece: int) -> int:
    """How many columns are decoded at a time: a whole line of the cache, where the weight and its pieces have such."""
    return next(size for size in (128, 96, 64, 32) if columns % size == 0 and size % piece == 0)
