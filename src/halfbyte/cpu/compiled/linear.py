"""The loops of `cpu.linear`: x times the weight as it is stored, for small M, and the weight decoded.

For each row of the weight, 32 codes at a time become fp32 vectors: by a lookup among 16 numbers (a vector register) if they have
4 bits, by conversion if they have 8. They lose the zero point of their group, and are multiplied by its scale and by x. A row's
products are summed as vectors, in fp32. So nothing is decoded to memory, and nothing is rounded but the sums. The scale of a long
group, such as a whole row, multiplies the group's sum: a third fewer multiplications and additions for each code of 8 bits.

Two 4-bit codes share a byte: the low and the high halves of 16 bytes meet two vectors of x, its even and its odd columns.
The loop over a row is written in LLVM's terms, because no compiler finds the lookup by itself.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

from halfbyte.cpu.compiled import loop

#: Numbers in a vector: AVX-512 has one register of that size, others two or four.
LANES = 16
#: Bytes ahead of those in use that are fetched into the first and the second cache.
_AHEAD = (1024, 8192)
#: Steps of a group from which on its scale is applied to its sums, in place of its codes.
_LONG_GROUP = 8

Array = np.ndarray[Any, Any]
_FLOAT, _INT, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(8)
FLOATS, _INTS, _BYTES = (ir.VectorType(number, LANES) for number in (_FLOAT, _INT, _BYTE))


def cpu_has(feature: str) -> bool:
    """Whether code is compiled for a CPU with `feature`, in LLVM's words."""
    features = llvm.get_host_cpu_features().flatten() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return f"+{feature}" in features.split(",")


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """Call an LLVM intrinsic."""
    signature = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


def load(builder: ir.IRBuilder, pointer: ir.Value, offset: ir.Value, vector: ir.Type) -> ir.Value:
    """A vector from any address."""
    address = builder.bitcast(builder.gep(pointer, [offset]), vector.as_pointer())
    return builder.load(address, align=1)


def prefetch(builder: ir.IRBuilder, pointer: ir.Value, cache: int) -> None:
    """Begin to read a line of memory into the first or second `cache`; any address may be named."""
    signature = ir.FunctionType(ir.VoidType(), [pointer.type, _INT, _INT, _INT])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    builder.call(function, [pointer, *(ir.Constant(_INT, number) for number in (0, 4 - cache, 1))])


def prefetch_ahead(builder: ir.IRBuilder, pointer: ir.Value, offset: ir.Value) -> None:
    """For codes that are read one row after the other: what the CPU fetches by itself comes at half of the memory's speed."""
    for cache, distance in enumerate(_AHEAD, 1):
        prefetch(builder, builder.gep(pointer, [builder.add(offset, ir.Constant(offset.type, distance))]), cache)


def spread(builder: ir.IRBuilder, short: ir.Value, places: list[int]) -> ir.Value:
    """The elements of a short vector that `places` name."""
    return builder.shuffle_vector(short, short, ir.Constant(ir.VectorType(_INT, LANES), places))


def _lookup(builder: ir.IRBuilder, table: ir.Value, index: ir.Value) -> ir.Value:
    """table[index], both vectors of 16; only the lowest 4 bits of an index count."""
    if cpu_has("avx512f"):
        return call(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, table, index)
    if cpu_has("avx2"):
        return _lookup_avx2(builder, table, index)
    result = ir.Constant(FLOATS, ir.Undefined)
    index = builder.and_(index, ir.Constant(_INTS, [15] * LANES))
    for lane in (ir.Constant(_INT, i) for i in range(LANES)):
        result = builder.insert_element(result, builder.extract_element(table, builder.extract_element(index, lane)), lane)
    return result


def _lookup_avx2(builder: ir.IRBuilder, table: ir.Value, index: ir.Value) -> ir.Value:
    """By both halves of the table; bit 3 of an index chooses."""

    def part(vector: ir.Value, first: int, count: int) -> ir.Value:
        return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_INT, count), [*range(first, first + count)]))

    results = []
    for lanes in (0, 8):
        places = part(index, lanes, 8)
        low, high = (call(builder, "llvm.x86.avx2.permps", part(table, 0, 8).type, part(table, at, 8), places) for at in (0, 8))
        bit = builder.and_(places, ir.Constant(places.type, [8] * 8))
        results.append(builder.select(builder.icmp_unsigned("==", bit, ir.Constant(places.type, [0] * 8)), low, high))
    return builder.shuffle_vector(*results, ir.Constant(ir.VectorType(_INT, LANES), [*range(LANES)]))


class Rows:
    """Emits code that reads rows of codes: of a weight, or keys or values. Arrays as in `products`; one that is None has no code.

    `scales` may be the bits of fp16 (uint16).
    """

    def __init__(self, context: Any, builder: ir.IRBuilder, kinds: tuple[Any, ...], values: tuple[ir.Value, ...]) -> None:
        self.builder = builder
        self.codes, self.table, self.scales, self.scale_table, self.zeros = (
            array_of(context, builder, kind, value) for kind, value in zip(kinds, values, strict=True)
        )
        self.bytes = cgutils.unpack_tuple(builder, self.codes.shape)[1]
        self.groups = cgutils.unpack_tuple(builder, self.scales.shape)[1]
        self.step = 2 * LANES if self.table is None else LANES  # bytes of two vectors
        self.numbers = None if self.table is None else load(builder, self.table.data, self.integer(0), FLOATS)

    def integer(self, value: int) -> ir.Constant:
        return ir.Constant(ir.IntType(64), value)

    def second(self, width: ir.Value) -> ir.Value:
        """How far the second vector lies behind the first, in x or a decoded row of `width` columns."""
        return self.integer(LANES) if self.table is None else self.builder.sdiv(width, self.integer(2))

    def visit(
        self, row: ir.Value, use: Callable[[ir.Value, list[ir.Value]], None], finish: Callable[[ir.Value], None] | None = None
    ) -> None:
        """Call `use` with the number of a byte and the two vectors that are decoded from there, throughout a row.

        finish: called behind each long group with its scale, which the group's vectors come without.
        """
        builder, step = self.builder, self.integer(self.step)
        group_bytes = builder.sdiv(self.bytes, self.groups)
        with builder.if_else(builder.icmp_signed("<", group_bytes, step)) as (narrow, wide):
            with narrow, cgutils.for_range(builder, builder.sdiv(self.bytes, step)) as loop:  # two groups in a vector
                at, group = builder.mul(loop.index, step), builder.mul(loop.index, self.integer(2))
                use(at, self._values(row, at, group, [0] * 8 + [1] * 8))
            with wide:
                if finish is None:
                    self._groups(row, group_bytes, use)
                else:
                    is_long = builder.icmp_signed(">=", group_bytes, builder.mul(step, self.integer(_LONG_GROUP)))
                    with builder.if_else(is_long) as (long, short):
                        with long:
                            self._groups(row, group_bytes, use, finish)
                        with short:
                            self._groups(row, group_bytes, use)

    def _groups(
        self,
        row: ir.Value,
        group_bytes: ir.Value,
        use: Callable[[ir.Value, list[ir.Value]], None],
        finish: Callable[[ir.Value], None] | None = None,
    ) -> None:
        """`visit` of a row whose groups have whole steps, all of them long or none."""
        builder, places = self.builder, [0] * LANES
        with cgutils.for_range(builder, self.groups) as group:
            start = builder.mul(group.index, group_bytes)
            with cgutils.for_range(builder, builder.sdiv(group_bytes, self.integer(self.step))) as loop:
                at = builder.add(start, builder.mul(loop.index, self.integer(self.step)))
                use(at, self._values(row, at, group.index, places, is_scaled=finish is None))
            if finish is not None:
                finish(self._group_scales(row, group.index, places))

    def _values(self, row: ir.Value, at: ir.Value, group: ir.Value, places: list[int], is_scaled: bool = True) -> list[ir.Value]:
        """(code - zero point) * scale (only if `is_scaled`) of the codes at byte `at`, whose groups are `group` + `places`."""
        builder = self.builder
        values = self._units(builder.add(builder.mul(row, self.bytes), at))
        if self.zeros is not None:
            zero = spread(builder, zeros_at(builder, self.zeros, self._of_group(row, group), max(places) + 1), places)
            values = [builder.fsub(value, zero) for value in values]
        if not is_scaled:
            return values
        scale = self._group_scales(row, group, places)
        return [builder.fmul(value, scale) for value in values]

    def _group_scales(self, row: ir.Value, group: ir.Value, places: list[int]) -> ir.Value:
        """Group scales: those of groups `group` + `places`."""
        count = max(places) + 1
        return spread(
            self.builder, scales_at(self.builder, self.scales, self.scale_table, self._of_group(row, group), count), places
        )

    def _of_group(self, row: ir.Value, group: ir.Value) -> ir.Value:
        return self.builder.add(self.builder.mul(row, self.groups), group)

    def _units(self, offset: ir.Value) -> list[ir.Value]:
        """The values of codes, unscaled."""
        builder = self.builder
        prefetch_ahead(builder, self.codes.data, offset)
        if self.numbers is None:
            parts = (load(builder, self.codes.data, builder.add(offset, self.integer(i)), _BYTES) for i in (0, LANES))
            return [builder.sitofp(builder.sext(part, _INTS), FLOATS) for part in parts]
        low = builder.zext(load(builder, self.codes.data, offset, _BYTES), _INTS)
        high = builder.lshr(low, ir.Constant(_INTS, [4] * LANES))
        return [_lookup(builder, self.numbers, index) for index in (low, high)]


def scales_at(builder: ir.IRBuilder, scales: Any, table: Any, offset: ir.Value, count: int) -> ir.Value:
    """`count` scales from the one at `offset` on, a vector: fp32, the bits of fp16, or indices of `table`."""
    if table is None:
        return _floats(builder, scales.data, offset, count)
    result = ir.Constant(ir.VectorType(_FLOAT, count), ir.Undefined)
    for i in range(count):
        stored = builder.load(builder.gep(scales.data, [builder.add(offset, ir.Constant(offset.type, i))]))
        scale = builder.load(builder.gep(table.data, [builder.zext(stored, offset.type)]))
        result = builder.insert_element(result, scale, ir.Constant(_INT, i))
    return result


def zeros_at(builder: ir.IRBuilder, zeros: Any, offset: ir.Value, count: int) -> ir.Value:
    """`count` zero points, a vector of fp32."""
    stored = load(builder, zeros.data, offset, ir.VectorType(_BYTE, count))
    return builder.uitofp(stored, ir.VectorType(_FLOAT, count))


def _floats(builder: ir.IRBuilder, pointer: ir.Value, offset: ir.Value, count: int) -> ir.Value:
    """`count` numbers of fp32, or of fp16 given by their bits."""
    if pointer.type.pointee == _FLOAT:
        return load(builder, pointer, offset, ir.VectorType(_FLOAT, count))
    half = load(builder, pointer, offset, ir.VectorType(ir.HalfType(), count))
    return builder.fpext(half, ir.VectorType(_FLOAT, count))


def array_of(context: Any, builder: ir.IRBuilder, kind: Any, value: ir.Value) -> Any:
    """An argument's array, None for None."""
    return None if isinstance(kind, types.NoneType) else context.make_array(kind)(context, builder, value)


@intrinsic(prefer_literal=True)
def row_dots(
    typing_context: Any,
    codes: Any,
    table: Any,
    scales: Any,
    scale_table: Any,
    zeros: Any,
    row: Any,
    x: Any,
    y: Any,
    first: Any,
    count: Any,
) -> Any:
    """y[row, first + m] = x[first + m] . (row of the weight) for m < `count`, a constant."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        weight = Rows(context, builder, signature.args[:5], args[:5])
        own, out = (array_of(context, builder, signature.args[i], args[i]) for i in (6, 7))
        stride, width = (cgutils.unpack_tuple(builder, array.shape)[1] for array in (own, out))
        zero, second = ir.Constant(FLOATS, [0.0] * LANES), weight.second(stride)
        sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(3)] for _ in range(count.literal_value)]
        for place in itertools.chain(*sums):
            builder.store(zero, place)
        columns = [builder.mul(builder.add(args[8], weight.integer(m)), stride) for m in range(len(sums))]

        def multiply(at: ir.Value, values: list[ir.Value]) -> None:
            for column, places in zip(columns, sums, strict=True):
                offset = builder.add(column, at)
                for value, place in zip(values, places[:2], strict=True):
                    part = load(builder, own.data, offset, FLOATS)
                    builder.store(call(builder, f"llvm.fma.v{LANES}f32", FLOATS, value, part, builder.load(place)), place)
                    offset = builder.add(offset, second)

        def finish(scale: ir.Value) -> None:
            for *pair, total in sums:
                group = builder.fadd(*(builder.load(place) for place in pair))
                builder.store(call(builder, f"llvm.fma.v{LANES}f32", FLOATS, group, scale, builder.load(total)), total)
                for place in pair:
                    builder.store(zero, place)

        weight.visit(args[5], multiply, finish)
        for m, places in enumerate(sums):
            total = functools.reduce(builder.fadd, (builder.load(place) for place in places))
            place = builder.add(builder.mul(args[5], width), builder.add(args[8], weight.integer(m)))
            builder.store(sum_of(builder, total), builder.gep(out.data, [place]))
        return context.get_dummy_value()

    return types.void(codes, table, scales, scale_table, zeros, row, x, y, first, count), codegen


@intrinsic
def _decode_row(typing_context: Any, codes: Any, table: Any, scales: Any, scale_table: Any, zeros: Any, row: Any, out: Any) -> Any:
    """out[row] = row of the weight."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ...]) -> ir.Value:
        weight = Rows(context, builder, signature.args[:5], args[:5])
        decoded = array_of(context, builder, signature.args[6], args[6])
        width = cgutils.unpack_tuple(builder, decoded.shape)[1]
        start, second = builder.mul(args[5], width), weight.second(width)

        def store(at: ir.Value, values: list[ir.Value]) -> None:
            if signature.args[6].dtype != types.float32:
                values = _in_order([_to_bf16(builder, value) for value in values], weight)
                at = at if weight.table is None else builder.mul(at, weight.integer(2))
            offset = builder.add(start, at)
            for value in values:
                address = builder.gep(decoded.data, [offset])
                builder.store(value, builder.bitcast(address, value.type.as_pointer()), align=1)
                offset = builder.add(offset, second)

        weight.visit(args[5], store)
        return context.get_dummy_value()

    return types.void(codes, table, scales, scale_table, zeros, row, out), codegen


def _in_order(values: list[ir.Value], weight: Rows) -> list[ir.Value]:
    """Vectors of even and of odd columns as one of all columns; those of codes of 8 bits are in order."""
    if weight.table is None:
        return values
    places = [i + half for i in range(LANES) for half in (0, LANES)]
    return [weight.builder.shuffle_vector(*values, ir.Constant(ir.VectorType(_INT, len(places)), places))]


def sum_of(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """The sum of a vector's elements, by halves."""
    while (half := vector.type.count // 2) > 0:
        parts = (ir.Constant(ir.VectorType(_INT, half), [*range(first, first + half)]) for first in (0, half))
        vector = builder.fadd(*(builder.shuffle_vector(vector, vector, places) for places in parts))
    return builder.extract_element(vector, ir.Constant(_INT, 0))


def _to_bf16(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """The bits of bf16 numbers, rounded to the nearest, ties to even."""
    bits = builder.bitcast(vector, _INTS)
    odd = builder.and_(builder.lshr(bits, ir.Constant(_INTS, [16] * LANES)), ir.Constant(_INTS, [1] * LANES))
    bits = builder.add(builder.add(bits, odd), ir.Constant(_INTS, [0x7FFF] * LANES))
    return builder.trunc(builder.lshr(bits, ir.Constant(_INTS, [16] * LANES)), ir.VectorType(ir.IntType(16), LANES))


@loop
def products(
    codes: Array,
    table: Array | None,
    scales: Array,
    scale_table: Array | None,
    zeros: Array | None,
    x: Array,
    y: Array,
    first: int,
    last: int,
) -> None:
    """y[n, m] = x[m] . (row n of the weight), for rows `first` to `last`. All arrays are contiguous.

    codes        [N, K / 2] uint8, two codes a byte, or [N, K] int8; K is a multiple of 32
    table        [16] fp32, the values of 4-bit codes; None for int8
    scales       [N, G] fp32, or uint8, indices of `scale_table`, fp32 [256]; a group has 16 codes (of 4 bits) or a multiple of 32
    zeros        [N, G] uint8, or None
    x            [M, K] fp32; for two codes a byte its even columns, then its odd ones
    y            [N, M] fp32
    """
    for n in range(first, last):
        m = 0
        while m + 4 <= x.shape[0]:
            row_dots(codes, table, scales, scale_table, zeros, n, x, y, m, 4)
            m += 4
        if m + 2 <= x.shape[0]:
            row_dots(codes, table, scales, scale_table, zeros, n, x, y, m, 2)
            m += 2
        if m < x.shape[0]:
            row_dots(codes, table, scales, scale_table, zeros, n, x, y, m, 1)


@loop
def decode(
    codes: Array,
    table: Array | None,
    scales: Array,
    scale_table: Array | None,
    zeros: Array | None,
    out: Array,
    first: int,
    last: int,
) -> None:
    """out [N, K] = the weight, in fp32, or as the bits of bf16 (uint16), then in the order of columns; arrays as in `products`."""
    for n in range(first, last):
        _decode_row(codes, table, scales, scale_table, zeros, n, out)
