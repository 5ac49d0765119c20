"""A bf16 x times a weight as it is stored, for M up to 16, on CPUs with instructions for bf16 (AVX-512 BF16 and VBMI).

A tile is 16 rows of the weight, each in a lane of every vector. 16 bytes of all rows are transposed in registers, so that a lane
holds codes of its own row. A pair of codes becomes two bf16 numbers, by a lookup among 32 of them. One instruction multiplies
the pair by two columns of a token of x, and adds both products to an fp32 sum. So a code is decoded once for all of x, the scale of
a group is applied to a vector of rows, and no sum crosses lanes.

The values of codes are exact in bf16 but for nf4 and fp4, which are sums of two bf16 numbers: one that is rounded is as wrong in
every group, which adds up where x has a mean. Scales and zero points stay in fp32, and
are applied to the sums of at most 128 columns, where a zero point times the sum of x cancels few bits.
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
from halfbyte.cpu.compiled.linear import FLOATS, LANES, Array, array_of, call, cpu_has, load, prefetch

#: Bytes of a row that are transposed at a time: 4 words of 32 bits.
_STEP = 16
_INT, _LONG = ir.IntType(32), ir.IntType(64)
INTS = ir.VectorType(_INT, LANES)
WORDS, _BYTES = ir.VectorType(ir.IntType(16), 2 * LANES), ir.VectorType(ir.IntType(8), 4 * LANES)
_ZEROS = ir.Constant(FLOATS, [0.0] * LANES)


class _BFloat(ir.Type):  # type: ignore[misc]  # of a package without types
    """LLVM's type for bf16, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"


PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def works() -> bool:
    """Whether this CPU has the instructions."""
    return all(cpu_has(feature) for feature in ("avx512bf16", "avx512vbmi", "avx512bw"))


def number(value: int) -> ir.Constant:
    """A 64-bit constant."""
    return ir.Constant(_LONG, value)


def _shuffle(builder: ir.IRBuilder, first: ir.Value, second: ir.Value, places: list[int]) -> ir.Value:
    """The elements that `places` name, of two vectors behind one another."""
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_INT, len(places)), places))


def broadcast(builder: ir.IRBuilder, pointer: ir.Value, offset: ir.Value, vector: ir.VectorType) -> ir.Value:
    """The number at `offset` in all lanes."""
    number = builder.load(builder.gep(pointer, [offset]))
    lanes = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.Constant(_INT, 0))
    return _shuffle(builder, lanes, lanes, [0] * LANES)


def _transposed(builder: ir.IRBuilder, pointer: ir.Value, offsets: list[ir.Value]) -> list[ir.Value]:
    """Four vectors: the i-th has, of the 16 bytes at each of 16 offsets, word i."""
    rows = [load(builder, pointer, offset, ir.VectorType(_INT, 4)) for offset in offsets]
    parts = []  # part i has the words of rows i, i + 4, i + 8 and i + 12
    for i in range(4):
        first_half, second_half = (_shuffle(builder, rows[j], rows[j + 4], [*range(8)]) for j in (i, i + 8))
        parts.append(_shuffle(builder, first_half, second_half, [*range(LANES)]))
    low, high, first, last = (
        [start + i for start in range(0, LANES, 4) for i in four]
        for four in ((0, 16, 1, 17), (2, 18, 3, 19), (0, 1, 16, 17), (2, 3, 18, 19))
    )
    columns = []
    for half in (low, high):
        left, right = (_shuffle(builder, parts[j], parts[j + 1], half) for j in (0, 2))
        columns += [_shuffle(builder, left, right, end) for end in (first, last)]
    return columns


def from_nibbles(builder: ir.IRBuilder, words: ir.Value, table: ir.Value) -> list[ir.Value]:
    """The eight codes of each lane as four vectors of pairs. Of an index of `table` only the lowest 5 bits count."""
    pairs = []
    for start in range(0, 32, 8):  # bits of the even code; the odd one has the next four
        control = [start, 0, start + 4, 0, start + 32, 0, start + 36, 0] * (LANES // 2)
        operands = ir.Constant(_BYTES, control), builder.bitcast(words, _BYTES)
        indices = builder.bitcast(call(builder, "llvm.x86.avx512.pmultishift.qb.512", _BYTES, *operands), WORDS)
        pairs.append(call(builder, "llvm.x86.avx512.permvar.hi.512", WORDS, table, indices))
    return pairs


def _from_bytes(builder: ir.IRBuilder, words: ir.Value) -> list[ir.Value]:
    """The four codes of each lane, times 2^24, as two vectors of pairs: the upper halves of fp32 numbers."""
    stored, zeros, floats = builder.bitcast(words, _BYTES), ir.Constant(_BYTES, [0] * 4 * LANES), []
    for byte in range(4):
        top = _shuffle(builder, stored, zeros, [i for lane in range(LANES) for i in (64, 64, 64, 4 * lane + byte)])
        floats.append(builder.bitcast(builder.sitofp(builder.bitcast(top, INTS), FLOATS), INTS))
    upper, half = (ir.Constant(INTS, [number] * LANES) for number in (-(1 << 16), 16))
    return [builder.or_(builder.and_(odd, upper), builder.lshr(even, half)) for even, odd in (floats[:2], floats[2:])]


def products_of_pairs(builder: ir.IRBuilder, sums: ir.Value, first: ir.Value, second: ir.Value) -> ir.Value:
    """sums + the products of two vectors of pairs."""
    operands = sums, builder.bitcast(first, PAIRS), builder.bitcast(second, PAIRS)
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, *operands)


class _Tile:
    """Emits code for 16 rows times `count` tokens of x. Arguments as in `_tile`."""

    def __init__(self, context: Any, builder: ir.IRBuilder, kinds: tuple[Any, ...], args: tuple[ir.Value, ...]) -> None:
        self.builder = builder
        self.codes, table, rest, self.scales, self.zeros, self.x, self.x_sums, self.y = (
            array_of(context, builder, kinds[i], args[i]) for i in (0, 1, 2, 4, 6, 7, 8, 9)
        )
        self.has_zeros = not isinstance(kinds[5], types.NoneType)
        self.row, self.pieces, self.groups = args[3], args[10], args[11]
        self.count: int = kinds[12].literal_value
        self.width = cgutils.unpack_tuple(builder, self.codes.shape)[1]
        self.starts = [builder.mul(builder.add(self.row, number(lane)), self.width) for lane in range(LANES)]
        self.next_tile = builder.mul(builder.add(self.row, number(LANES)), self.width)
        self.table, self.rest = (None if part is None else load(builder, part.data, number(0), WORDS) for part in (table, rest))
        self.pairs = 2 if table is None else 4  # vectors of pairs in one of words
        # Several sums for the same numbers, where they are few: an addition waits for the one before.
        self.sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(self.count)] for _ in range(min(4, LANES // self.count))]
        self.totals = [cgutils.alloca_once(builder, FLOATS) for _ in range(self.count)]
        self.clear(self.totals)

    def clear(self, places: list[ir.Value]) -> None:
        for place in places:
            self.builder.store(_ZEROS, place)

    def multiply(self, at: ir.Value, word: int, words: ir.Value) -> None:
        """Add the products of `words`, which begin at byte `at` + 4 * `word`, to the sums."""
        builder = self.builder
        pairs = _from_bytes(builder, words) if self.table is None else from_nibbles(builder, words, self.table)
        rests = [None] * len(pairs) if self.rest is None else from_nibbles(builder, words, self.rest)
        columns = builder.mul(builder.udiv(at, number(4)), number(self.pairs))
        for i, parts in enumerate(zip(pairs, rests, strict=True), word * self.pairs):
            first = builder.mul(builder.add(columns, number(i)), number(self.count))
            for m, place in enumerate(self.sums[i % len(self.sums)]):
                x = broadcast(builder, self.x.data, builder.add(first, number(m)), INTS)
                for part in filter(None, parts):
                    builder.store(products_of_pairs(builder, builder.load(place), part, x), place)

    def finish(self, piece: ir.Value, group: ir.Value) -> None:
        """Add the sums of a piece of the columns, times the scales of its group, to the totals."""
        builder, at = self.builder, self.builder.mul(group, number(LANES))
        scales = load(builder, self.scales.data, at, FLOATS)
        if self.table is None:
            scales = builder.fmul(scales, ir.Constant(FLOATS, [2.0**-24] * LANES))
        for m, total in enumerate(self.totals):
            own = functools.reduce(builder.fadd, (builder.load(places[m]) for places in self.sums))
            if self.has_zeros:
                place = builder.add(builder.mul(piece, number(self.count)), number(m))
                x_sum = broadcast(builder, self.x_sums.data, place, FLOATS)
                own = builder.fsub(own, builder.fmul(load(builder, self.zeros.data, at, FLOATS), x_sum))
            builder.store(call(builder, f"llvm.fma.v{LANES}f32", FLOATS, own, scales, builder.load(total)), total)
            self.clear([places[m] for places in self.sums])

    def transposed(self, at: ir.Value) -> list[ir.Value]:
        """The words at byte `at` of the rows. The next tile follows in memory, and is fetched at the same speed."""
        builder = self.builder
        for line in range(0, _STEP * LANES, 64):
            offset = builder.add(self.next_tile, builder.add(builder.mul(at, number(LANES)), number(line)))
            prefetch(builder, builder.gep(self.codes.data, [offset]), 2)  # the first cache is full of what is multiplied now
        return _transposed(builder, self.codes.data, [builder.add(start, at) for start in self.starts])

    def pieces_of_8_bytes(self) -> None:
        """All columns, where a group has 16 codes of 4 bits."""
        builder = self.builder
        with cgutils.for_range(builder, builder.udiv(self.width, number(_STEP))) as step:
            at = builder.mul(step.index, number(_STEP))
            for word, words in enumerate(self.transposed(at)):
                self.multiply(at, word, words)
                if word % 2:
                    group = builder.add(builder.mul(step.index, number(2)), number(word // 2))
                    self.finish(group, group)

    def pieces_of_steps(self) -> None:
        """All columns, where a piece has a multiple of 16 bytes."""
        builder, size = self.builder, self.builder.udiv(self.width, self.pieces)
        with cgutils.for_range(builder, self.pieces) as piece:
            start = builder.mul(piece.index, size)
            with cgutils.for_range(builder, builder.udiv(size, number(_STEP))) as step:
                at = builder.add(start, builder.mul(step.index, number(_STEP)))
                for word, words in enumerate(self.transposed(at)):
                    self.multiply(at, word, words)
            self.finish(piece.index, builder.udiv(builder.mul(piece.index, self.groups), self.pieces))

    def store(self) -> None:
        features = cgutils.unpack_tuple(self.builder, self.y.shape)[1]
        for m, total in enumerate(self.totals):
            offset = self.builder.add(self.builder.mul(number(m), features), self.row)
            address = self.builder.bitcast(self.builder.gep(self.y.data, [offset]), FLOATS.as_pointer())
            self.builder.store(self.builder.load(total), address, align=4)


@intrinsic(prefer_literal=True)
def _tile(
    typing_context: Any,
    codes: Any,
    table: Any,
    rest: Any,
    row: Any,
    scales: Any,
    zeros: Any,
    tile_zeros: Any,
    x: Any,
    x_sums: Any,
    y: Any,
    pieces: Any,
    groups: Any,
    count: Any,
    is_narrow: Any,
) -> Any:
    """y[m, row + lane] = x[m] . (row + lane of the weight) for m < `count`. Scales and zero points, if there are any, are [G, 16],
    x [K / 2, count], its sums [pieces, count]; the rest as in `loop_for`.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        tile = _Tile(context, builder, signature.args, args)
        for places in tile.sums:
            tile.clear(places)
        if is_narrow.literal_value:
            tile.pieces_of_8_bytes()
        else:
            tile.pieces_of_steps()
        tile.store()
        return context.get_dummy_value()

    return types.void(codes, table, rest, row, scales, zeros, tile_zeros, x, x_sums, y, pieces, groups, count, is_narrow), codegen


@intrinsic
def _scale_value(typing_context: Any, stored: Any, table: Any) -> Any:
    """A scale in fp32: stored so, as the bits of fp16, or as an index of `table`."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        numbers = array_of(context, builder, signature.args[1], args[1])
        if numbers is not None:
            return builder.load(builder.gep(numbers.data, [builder.zext(args[0], _LONG)]))
        if signature.args[0] == types.float32:
            return args[0]
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(stored, table), codegen


@intrinsic
def transpose(typing_context: Any, rows: Any, out: Any) -> Any:
    """out [G, 16] = rows [16, G], both fp32; G is a multiple of 4."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        source, target = (array_of(context, builder, kind, value) for kind, value in zip(signature.args, args, strict=True))
        width = cgutils.unpack_tuple(builder, source.shape)[1]
        with cgutils.for_range(builder, builder.udiv(width, number(4))) as step:
            at = builder.mul(step.index, number(4))
            offsets = [builder.add(builder.mul(width, number(lane)), at) for lane in range(LANES)]
            for i, column in enumerate(_transposed(builder, source.data, offsets)):
                place = builder.mul(builder.add(at, number(i)), number(LANES))
                builder.store(column, builder.bitcast(builder.gep(target.data, [place]), INTS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(rows, out), codegen


@intrinsic
def sum_of_pair(typing_context: Any, pair: Any) -> Any:
    """The sum in fp32 of two bf16 numbers, given by their bits."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        even, odd = builder.shl(args[0], ir.Constant(_INT, 16)), builder.and_(args[0], ir.Constant(_INT, -(1 << 16)))
        return builder.fadd(*(builder.bitcast(bits, ir.FloatType()) for bits in (even, odd)))

    return types.float32(pair), codegen


@loop
def read_scales(scales: Array, table: Array | None, row: int, out: Array) -> None:
    """out [16, G] in fp32 = the scales of 16 rows of the weight from `row` on."""
    for lane in range(16):
        for group in range(scales.shape[1]):
            out[lane, group] = _scale_value(scales[row + lane, group], table)


@loop
def read_zeros(zeros: Array, row: int, out: Array) -> None:
    """out [16, G] in fp32 = the zero points of 16 rows of the weight from `row` on."""
    for lane in range(16):
        for group in range(zeros.shape[1]):
            out[lane, group] = np.float32(zeros[row + lane, group])


@loop
def aligned(words: int) -> Array:
    """Memory for so many words of 32 bits, which begins with a line of the cache: a vector across two lines is read twice."""
    memory = np.empty(words + 16, np.int32)
    start = -(memory.ctypes.data // 4) % 16
    return memory[start : start + words]


@loop
def _arrange(x: Array, columns: Array, sums: Array) -> None:
    """columns [K / 2, count] = x [M, K / 2] transposed, and zeros; sums [pieces, count] of each piece."""
    size = x.shape[1] // len(sums)
    for m in range(len(x)):
        for piece in range(len(sums)):
            total = np.float32(0)
            for column in range(piece * size, (piece + 1) * size):
                columns[column, m] = x[m, column]
                total += sum_of_pair(x[m, column])
            sums[piece, m] = total


@functools.cache
def loop_for(count: int, is_narrow: bool) -> Any:
    """The loop for an x of at most `count` rows (1, 2, 4, 8 or 16), over tiles `first` to `last` of the weight's rows.

    y[m, n] = x[m] . (row n of the weight). All arrays are contiguous; the last tile ends with the last of at least 16 rows.

    is_narrow    whether a group has 16 codes, of 4 bits; otherwise it has a multiple of 32
    codes        [N, K / 2] uint8, two codes a byte, or [N, K] int8; K is a multiple of 32
    table        [32] the bits of bf16 (uint16), the values of 4-bit codes twice; None for int8
    rest         the same of what bf16 lacks of the values; None if that is nothing
    scales       [N, G] fp32, the bits of fp16 (uint16), or uint8, indices of `scale_table`, fp32 [256]
    zeros        [N, G] uint8, or None
    x            [M, K / 2] int32, two columns of bf16 each
    y            [count, N] fp32
    pieces       number of pieces of the columns, each in one group, of 16 columns or a multiple of 32
    """

    @loop
    def tiles(
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
        features, groups = scales.shape
        padded = (groups + 3) // 4 * 4
        numbers = np.zeros((16, padded), np.float32)
        tile_scales, tile_zeros = np.empty((padded, 16), np.float32), np.empty((padded, 16), np.float32)
        columns, sums = np.zeros((x.shape[1], count), np.int32), np.zeros((pieces, count), np.float32)
        _arrange(x, columns, sums)
        for tile in range(first, last):
            row = min(16 * tile, features - 16)
            read_scales(scales, scale_table, row, numbers)
            transpose(numbers, tile_scales)
            if zeros is not None:
                read_zeros(zeros, row, numbers)
                transpose(numbers, tile_zeros)
            _tile(codes, table, rest, row, tile_scales, zeros, tile_zeros, columns, sums, y, pieces, groups, count, is_narrow)

    return tiles
