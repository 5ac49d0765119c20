"""Vector code for blocks of tokens, in LLVM's terms: decoding, products with query rows, values weighted by scores.

A block [n, W] holds decoded tokens in fp32 or float64; W is a multiple of `LANES`. The sums of a query row have one order, in tiles
of any size, so its bits do not depend on other rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from halfbyte.cpu.compiled.linear import LANES, call, cpu_has, load

_INT, _LONG, _BYTE, _SHORT, _HALF = ir.IntType(32), ir.IntType(64), ir.IntType(8), ir.IntType(16), ir.HalfType()
_FLOAT, _DOUBLE = ir.FloatType(), ir.DoubleType()

#: Loads a vector of this type from the codes at hand.
Load = Callable[[ir.Type], ir.Value]
#: The numbers of codes, unscaled: a vector for every code in a byte.
Reader = Callable[[ir.IRBuilder, Load], list[ir.Value]]
#: Combines two vectors.
Operation = Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]
#: Where a tile starts, and its size.
Tile = tuple[ir.Value, int]
#: Tokens, or vectors of columns, of a tile: as many as leave sums of four query rows in registers, of which AVX-512 has more.
_WIDE = (4, 1) if cpu_has("avx512f") else (1,)


def _long(value: int) -> ir.Constant:
    return ir.Constant(_LONG, value)


def _like(vector: ir.Value, number: ir.Type) -> ir.VectorType:
    """The type of a vector as long as this one."""
    return ir.VectorType(number, vector.type.count)


def _all(vector: ir.Value, value: float) -> ir.Constant:
    """A vector like this one, of one number."""
    return ir.Constant(vector.type, [value] * vector.type.count)


def _broadcast(builder: ir.IRBuilder, number: ir.Value, count: int) -> ir.Value:
    one = builder.insert_element(ir.Constant(ir.VectorType(number.type, 1), ir.Undefined), number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_INT, count), [0] * count))


def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    bits = 32 if a.type.element == _FLOAT else 64
    return call(builder, f"llvm.fma.v{a.type.count}f{bits}", a.type, a, b, c)


class Rows:
    """Emits loads and stores of an array [rows, columns] that is contiguous."""

    def __init__(self, context: Any, builder: ir.IRBuilder, kind: Any, value: ir.Value) -> None:
        self.builder = builder
        array = context.make_array(kind)(context, builder, value)
        self.data, (self.rows, self.width) = array.data, cgutils.unpack_tuple(builder, array.shape)
        self.number = self.data.type.pointee

    def at(self, row: ir.Value, column: ir.Value) -> ir.Value:
        """How far an element lies behind the first."""
        return self.builder.add(self.builder.mul(row, self.width), column)

    def load(self, offset: ir.Value, count: int = LANES) -> ir.Value:
        return load(self.builder, self.data, offset, ir.VectorType(self.number, count))

    def store(self, vector: ir.Value, offset: ir.Value) -> None:
        place = self.builder.gep(self.data, [offset])
        self.builder.store(vector, self.builder.bitcast(place, vector.type.as_pointer()), align=1)


def _plus(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return builder.fadd(x, y)


def _tiles(builder: ir.IRBuilder, last: ir.Value, sizes: tuple[int, ...], first: ir.Value | None = None) -> Iterator[Tile]:
    """Emits what its loop emits for tiles of [first, last): (where one starts, its size), as many as fit of each size."""
    first = _long(0) if first is None else first
    for size in sizes:
        count = builder.sdiv(builder.sub(last, first), _long(size))
        with cgutils.for_range(builder, count) as loop:
            yield builder.add(first, builder.mul(loop.index, _long(size))), size
        first = builder.add(first, builder.mul(count, _long(size)))


def _steps(builder: ir.IRBuilder, tile: Tile, factor: int = 1) -> list[ir.Value]:
    """The members of a tile, each times `factor`."""
    return [builder.add(builder.mul(tile[0], _long(factor)), _long(i * factor)) for i in range(tile[1])]


# ------------------------------------------------------------------------------------------------------------------ decoding


def _int8(builder: ir.IRBuilder, load: Load) -> list[ir.Value]:
    codes = load(_BYTE)
    return [builder.sitofp(builder.sext(codes, _like(codes, _INT)), _like(codes, _FLOAT))]


def _int4(builder: ir.IRBuilder, load: Load) -> list[ir.Value]:
    return _bit_fields(builder, load(_BYTE), 4)


def _int2(builder: ir.IRBuilder, load: Load) -> list[ir.Value]:
    return _bit_fields(builder, load(_BYTE), 2)


def _bit_fields(builder: ir.IRBuilder, codes: ir.Value, bits: int) -> list[ir.Value]:
    codes = builder.zext(codes, _like(codes, _INT))
    fields = (builder.and_(builder.lshr(codes, _all(codes, shift)), _all(codes, 2**bits - 1)) for shift in range(0, 8, bits))
    return [builder.sitofp(field, _like(field, _FLOAT)) for field in fields]


def _e4m3(builder: ir.IRBuilder, load: Load) -> list[ir.Value]:
    """The same bits one place lower mean 2^-8 times as much in fp16."""
    codes = load(_BYTE)
    codes = builder.zext(codes, _like(codes, _SHORT))
    size = builder.and_(codes, _all(codes, 0x7F))
    sign = builder.shl(builder.and_(codes, _all(codes, 0x80)), _all(codes, 8))
    halves = builder.bitcast(builder.or_(sign, builder.shl(size, _all(codes, 7))), _like(codes, _HALF))
    value = builder.fpext(halves, _like(codes, _FLOAT))
    nan = builder.icmp_unsigned("==", size, _all(codes, 0x7F))
    return [builder.select(nan, _all(value, float("nan")), builder.fmul(value, _all(value, 256.0)))]


def _fp16(builder: ir.IRBuilder, load: Load) -> list[ir.Value]:
    halves = load(_HALF)
    return [builder.fpext(halves, _like(halves, _FLOAT))]


def _bf16(builder: ir.IRBuilder, load: Load) -> list[ir.Value]:
    codes = load(_SHORT)
    bits = builder.zext(codes, _like(codes, _INT))
    return [builder.bitcast(builder.shl(bits, _all(bits, 16)), _like(codes, _FLOAT))]


def _fp32(builder: ir.IRBuilder, load: Load) -> list[ir.Value]:
    return [load(_FLOAT)]


def _fp64(builder: ir.IRBuilder, load: Load) -> list[ir.Value]:
    return [load(_DOUBLE)]


#: By the names of codes.
READERS = {f.__name__[1:]: f for f in (_int8, _int4, _int2, _e4m3, _fp16, _bf16, _fp32, _fp64)}


def _address(builder: ir.IRBuilder, array: Any, *index: ir.Value) -> ir.Value:
    """That of an element, as a number."""
    place = builder.ptrtoint(array.data, _LONG)
    for i, stride in zip(index, cgutils.unpack_tuple(builder, array.strides), strict=False):
        place = builder.add(place, builder.mul(i, stride))
    return place


def _at(builder: ir.IRBuilder, address: ir.Value, offset: ir.Value, vector: ir.VectorType) -> ir.Value:
    """A vector, `offset` of its elements behind an address."""
    return load(builder, builder.inttoptr(address, vector.element.as_pointer()), offset, vector)


def _prefetch(builder: ir.IRBuilder, address: ir.Value, count: ir.Value) -> None:
    """Ask for `count` bytes, by lines of 64, so that they are in cache when they are read. Any address will do."""
    for at, _ in _tiles(builder, builder.add(count, _long(63)), (64,)):
        pointer = builder.inttoptr(builder.add(address, at), _BYTE.as_pointer())
        call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *(ir.Constant(_INT, flag) for flag in (0, 3, 1)))


def _half(builder: ir.IRBuilder, array: Any, *index: ir.Value) -> ir.Value:
    return builder.load(builder.inttoptr(_address(builder, array, *index), _HALF.as_pointer()), align=2)


@intrinsic
def half(typing_context: Any, array: Any, i: Any, j: Any, k: Any, m: Any) -> Any:
    """array[i, j, k, m] as fp32, of an array that holds the bits of fp16 numbers."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.fpext(_half(builder, array, *args[1:]), _FLOAT)

    index = types.intp
    return types.float32(array, index, index, index, index), codegen


@intrinsic
def from_bits(typing_context: Any, bits: Any) -> Any:
    """The fp32 number of these bits."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.int32), codegen


@intrinsic
def decode(typing_context: Any, side: Any, page: Any, h: Any, row: Any, rows: Any, factors: Any, block: Any, t: Any) -> Any:
    """block[t + i] = row + i of a `compiled.attention.Side`, for i < `rows`, all of one page.

    The second and later codes of a byte are in the second and later parts of a row of the block. factors [2, columns] are the
    scales and offsets of its columns, in its dtype, where tokens share them.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        codes, scales, offsets = (
            context.make_array(signature.args[0].types[i])(context, builder, builder.extract_value(args[0], i)) for i in range(3)
        )
        reader, count, _, groups, every, *_ = cgutils.unpack_tuple(builder, builder.extract_value(args[0], 3))
        columns, target = (Rows(context, builder, signature.args[i], args[i]) for i in (5, 6))

        def step(read: Reader, source: ir.Value, at: Tile, start: ir.Value, common: list[ir.Value] | None) -> None:
            units = read(builder, lambda kind: _at(builder, source, builder.add(start, at[0]), ir.VectorType(kind, at[1])))
            part = builder.sdiv(target.width, _long(len(units)))
            for i, unit in enumerate(units):
                vector = _like(unit, target.number)
                if unit.type != vector:
                    unit = builder.fpext(unit, vector) if target.number == _DOUBLE else builder.fptrunc(unit, vector)
                column = builder.add(builder.add(start, at[0]), builder.mul(part, _long(i)))
                scale, offset = (
                    [_broadcast(builder, number, at[1]) for number in common]
                    if common
                    else [columns.load(columns.at(_long(j), column), at[1]) for j in (0, 1)]
                )
                target.store(_fma(builder, unit, scale, offset), target.at(line, column))

        def number(array: Any, place: ir.Value, group: ir.Value) -> ir.Value:
            return builder.fpext(_half(builder, array, args[1], args[2], place, group), target.number)

        # Rows of the next block arrive while this one is multiplied.
        row_bytes = cgutils.unpack_tuple(builder, codes.shape)[3]
        ahead = builder.mul(target.rows, cgutils.unpack_tuple(builder, codes.strides)[2])
        in_groups = builder.icmp_signed("==", every, _long(0))
        size = builder.sdiv(count, groups)
        after = builder.append_basic_block("decoded")
        switch = builder.switch(reader, after)
        for i, (name, read) in enumerate(READERS.items()):
            switch.add_case(_long(i), case := builder.append_basic_block(name))
            builder.position_at_end(case)
            with builder.if_else(in_groups) as (by_group, by_column):
                with by_group:
                    for place, _ in _tiles(builder, args[4], (1,)):
                        line = builder.add(args[7], place)
                        place = builder.add(args[3], place)
                        source = _address(builder, codes, args[1], args[2], place)
                        _prefetch(builder, builder.add(source, ahead), row_bytes)
                        for group, _ in _tiles(builder, groups, (1,)):
                            common = [number(array, place, group) for array in (scales, offsets)]
                            start = builder.mul(group, size)
                            for at in _tiles(builder, size, (LANES, 8, 1)):
                                step(read, source, at, start, common)
                with by_column:
                    for place, _ in _tiles(builder, args[4], (1,)):
                        line = builder.add(args[7], place)
                        source = _address(builder, codes, args[1], args[2], builder.add(args[3], place))
                        _prefetch(builder, builder.add(source, ahead), row_bytes)
                        for at in _tiles(builder, count, (LANES, 1)):
                            step(read, source, at, _long(0), None)
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    index = types.intp
    return types.void(side, index, index, index, index, factors, block, index), codegen


# ------------------------------------------------------------------------------------------------------------------ products


def _reduced(builder: ir.IRBuilder, vectors: list[ir.Value], operation: Operation) -> ir.Value:
    """`operation` over the elements of each vector, by halves: a vector of the results. The halves of two vectors share a step."""
    size = vectors[0].type.count  # elements of a vector that belong to one result
    while size > 1:
        seconds = vectors[1::2] + [None] * (len(vectors) % 2)
        vectors = [operation(builder, *_halves(builder, x, y, size)) for x, y in zip(vectors[::2], seconds, strict=True)]
        size //= 2
    return vectors[0]


def _halves(builder: ir.IRBuilder, x: ir.Value, y: ir.Value | None, size: int) -> list[ir.Value]:
    """The first half of every `size` elements of x and y, and the second half."""
    count = x.type.count * (1 if y is None else 2)
    first = [i for i in range(count) if i % size < size // 2]
    places = ([i + shift for i in first] for shift in (0, size // 2))
    return [builder.shuffle_vector(x, y or x, ir.Constant(ir.VectorType(_INT, len(part)), part)) for part in places]


@intrinsic
def dots(typing_context: Any, q: Any, block: Any, first: Any, last: Any, scores: Any) -> Any:
    """scores[r, t] = q[r] . block[t], for tokens `first` to `last` and every row of q."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        queries, keys, out = (Rows(context, builder, signature.args[i], args[i]) for i in (0, 1, 4))

        def tile(lines: list[ir.Value], tokens: list[ir.Value]) -> None:
            starts = [[array.at(i, _long(0)) for i in part] for array, part in ((queries, lines), (keys, tokens))]
            zero = ir.Constant(ir.VectorType(queries.number, LANES), [0.0] * LANES)
            sums = [[cgutils.alloca_once_value(builder, zero) for _ in tokens] for _ in lines]
            for at, _ in _tiles(builder, queries.width, (LANES,)):
                ours = [queries.load(builder.add(start, at)) for start in starts[0]]
                theirs = [keys.load(builder.add(start, at)) for start in starts[1]]
                for query, places in zip(ours, sums, strict=True):
                    for key, place in zip(theirs, places, strict=True):
                        builder.store(_fma(builder, query, key, builder.load(place)), place)
            total = _reduced(builder, [builder.load(place) for places in sums for place in places], _plus)
            for i, line in enumerate(lines):
                mask = [len(tokens) * i + j for j in range(len(tokens))]
                part = builder.shuffle_vector(total, total, ir.Constant(ir.VectorType(_INT, len(mask)), mask))
                out.store(part, out.at(line, tokens[0]))

        for lines in _tiles(builder, queries.rows, (4, 2, 1)):
            for tokens in _tiles(builder, args[3], _WIDE, args[2]):
                tile(_steps(builder, lines), _steps(builder, tokens))
        return context.get_dummy_value()

    return types.void(q, block, types.intp, types.intp, scores), codegen


@intrinsic
def add(typing_context: Any, weights: Any, block: Any, first: Any, last: Any, out: Any) -> Any:
    """out[r] += the sum over t from `first` to `last` of weights[r, t] * block[t], for every row of out."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        factors, values, sums = (Rows(context, builder, signature.args[i], args[i]) for i in (0, 1, 4))

        def tile(lines: list[ir.Value], columns: list[ir.Value]) -> None:
            offsets = [[sums.at(line, column) for column in columns] for line in lines]
            places = [[cgutils.alloca_once_value(builder, sums.load(offset)) for offset in part] for part in offsets]
            for t, _ in _tiles(builder, args[3], (1,), args[2]):
                parts = [values.load(values.at(t, column)) for column in columns]
                for line, own in zip(lines, places, strict=True):
                    weight = _broadcast(builder, builder.load(builder.gep(factors.data, [factors.at(line, t)])), LANES)
                    for part, place in zip(parts, own, strict=True):
                        builder.store(_fma(builder, weight, part, builder.load(place)), place)
            for own, part in zip(places, offsets, strict=True):
                for place, offset in zip(own, part, strict=True):
                    sums.store(builder.load(place), offset)

        for lines in _tiles(builder, sums.rows, (4, 2, 1)):
            for columns in _tiles(builder, builder.sdiv(sums.width, _long(LANES)), _WIDE):
                tile(_steps(builder, lines), _steps(builder, columns, LANES))
        return context.get_dummy_value()

    return types.void(weights, block, types.intp, types.intp, out), codegen


@intrinsic
def largest_of(typing_context: Any, scores: Any, r: Any) -> Any:
    """The largest of a row, whose NaN do not count."""

    def larger(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
        return builder.select(builder.fcmp_ordered(">", y, x), y, x)

    return scores.dtype(scores, types.intp), _over_row(larger, -math.inf)


@intrinsic
def sum_of(typing_context: Any, scores: Any, r: Any) -> Any:
    """The sum of a row."""
    return scores.dtype(scores, types.intp), _over_row(_plus, 0.0)


def _over_row(operation: Operation, start: float) -> Any:
    """Code for `operation` over all vectors of a row, then over the elements of the result, by halves."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        array = Rows(context, builder, signature.args[0], args[0])
        place = cgutils.alloca_once_value(builder, ir.Constant(ir.VectorType(array.number, LANES), [start] * LANES))
        for at, _ in _tiles(builder, array.width, (LANES,)):
            builder.store(operation(builder, builder.load(place), array.load(array.at(args[1], at))), place)
        total = _reduced(builder, [builder.load(place)], operation)
        return builder.extract_element(total, ir.Constant(_INT, 0))

    return codegen
