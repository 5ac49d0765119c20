"""What a thread does by itself: numbers from registers, of the types that PTX names, and back."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from machine.program import WIDTHS, Instruction

if TYPE_CHECKING:
    from machine.block import Block

Array = np.ndarray[Any, np.dtype[Any]]
Lanes = Array | slice
Read = Callable[["Block", Lanes], Array]
Write = Callable[["Block", Lanes, Array], None]
Step = Callable[["Block", Lanes], None]

RAW = {1: np.dtype(np.bool_), 8: np.dtype(np.uint8), 16: np.dtype(np.uint16), 32: np.dtype(np.uint32), 64: np.dtype(np.uint64)}
TYPES = {
    f"{kind}{bits}": np.dtype(f"{code}{bits // 8}")
    for kind, code in (("u", "u"), ("b", "u"), ("s", "i"))
    for bits in (8, 16, 32, 64)
}
TYPES |= {"f16": np.dtype(np.float16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64), "pred": np.dtype(np.bool_)}
PACKED = ("f16x2", "bf16x2")


def bf16(bits: Array) -> Array:
    """Numbers in bf16 as fp32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x: Array) -> Array:
    """float64 rounded once to the bits of bf16, ties to even: by way of fp32, where what is lost makes the last bit 1."""
    near = np.ascontiguousarray(x.astype(np.float32))
    lower = near.view(np.uint32) - (np.abs(near.astype(np.float64)) > np.abs(x))
    bits = np.where(np.isfinite(x) & (near.astype(np.float64) != x), lower | 1, near.view(np.uint32)).astype(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def _e4m3(bits: Array) -> Array:
    """Numbers in E4M3, of uint16."""
    numbers = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).astype(np.uint16).view(np.float16) * np.float64(256)
    return np.where((bits & 0x7F) == 0x7F, np.nan, numbers)


def constant(text: str) -> int | float | None:
    """The value of an immediate operand."""
    if text.startswith(("0f", "0F")):
        return float(struct.unpack(">f", bytes.fromhex(text[2:]))[0])
    try:
        return int(text.rstrip("U"), 0)
    except ValueError:
        return None


def raw(operand: str, registers: dict[str, int], bits: int, dtype: np.dtype[Any] | None = None) -> Read:
    """The bits of an operand as unsigned numbers, or as others of that size."""
    unsigned = RAW[bits]
    dtype = dtype or unsigned
    if operand in registers:
        if registers[operand] != bits:
            return lambda block, lanes: block.registers[operand][lanes].astype(unsigned).view(dtype)
        if dtype != unsigned:
            return lambda block, lanes: block.registers[operand][lanes].view(dtype)
        return lambda block, lanes: block.registers[operand][lanes]
    value = constant(operand)
    if value is None:
        return lambda block, lanes: block.specials[operand][lanes].astype(unsigned).view(dtype)
    if isinstance(value, float):
        fixed = np.asarray(value, np.float32).view(dtype)
    else:
        fixed = np.asarray(value % (1 << bits), np.uint64).astype(unsigned).view(dtype)
    return lambda block, lanes: fixed


def reader(operand: str, registers: dict[str, int], kind: str) -> Read:
    """An operand's values: packed halves along one more axis, bf16 as fp32."""
    if kind in PACKED:
        bits = raw(operand, registers, 32)
        part = bf16 if kind[0] == "b" else lambda halves: halves.view(np.float16)
        return lambda block, lanes: part(np.ascontiguousarray(bits(block, lanes)).reshape(-1).view(np.uint16)).reshape(-1, 2)
    if kind == "bf16":
        bits = raw(operand, registers, 16)
        return lambda block, lanes: bf16(bits(block, lanes))
    return raw(operand, registers, WIDTHS.get(kind, 16), TYPES[kind])


def to_bits(value: Array, kind: str) -> Array:
    """Values as the bits that a register holds."""
    if kind == "bf16":
        return to_bf16(value.astype(np.float64))
    if kind in PACKED:
        halves = to_bf16(value.astype(np.float64)) if kind[0] == "b" else value.astype(np.float16).view(np.uint16)
        return np.ascontiguousarray(halves).view(np.uint32)[..., 0]
    dtype = TYPES[kind]
    found = np.asarray(value).astype(dtype, copy=False)
    return found.view(RAW[8 * dtype.itemsize]) if kind != "pred" else found


def writer(operand: str, registers: dict[str, int], kind: str) -> Write:
    if operand == "_":
        return lambda block, lanes, value: None
    name, width = operand, RAW[registers[operand]]
    narrow = kind[0] == "s" and TYPES[kind].itemsize < width.itemsize  # a load into a wider register
    if kind in TYPES and TYPES[kind].itemsize == width.itemsize:
        dtype = TYPES[kind]

        def assign(block: Block, lanes: Lanes, value: Array) -> None:
            block.registers[name].view(dtype)[lanes] = np.asarray(value)

        return assign

    def write(block: Block, lanes: Lanes, value: Array) -> None:
        bits = to_bits(value, kind)
        block.registers[name][lanes] = bits.view(TYPES[kind]).astype(f"i{width.itemsize}").view(width) if narrow else bits

    return write


def _divide(a: Array, b: Array) -> Array:
    return a // np.where(b == 0, 1, b) if a.dtype.kind in "ui" else a / b


def _remainder(a: Array, b: Array) -> Array:
    return np.fmod(a, np.where(b == 0, 1, b))


def _shift_left(a: Array, by: Array) -> Array:
    """By as many bits as a has, or more, it is 0; of a negative number to the right, -1."""
    return a << np.minimum(by, 255).astype(a.dtype)


def _shift_right(a: Array, by: Array) -> Array:
    return a >> np.minimum(by, 255).astype(a.dtype)


def _bits_of(a: Array, start: Array, count: Array) -> Array:
    """bfe: `count` bits from `start` on, with the highest of them for a sign if signed."""
    start, count = start.astype(np.int64), count.astype(np.int64)
    found = a.astype(np.int64) >> start & (1 << count) - 1
    if a.dtype.kind == "i":
        found = np.where(count > 0, found << 64 - np.maximum(count, 1) >> 64 - np.maximum(count, 1), 0)
    return found.astype(a.dtype)


def _permuted(a: Array, b: Array, selectors: Array) -> Array:
    """prmt: each byte of the result is one of the eight of b and a, or copies of its sign."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    found = np.zeros(np.broadcast(a, b, selectors).shape, np.uint32)
    for i in range(4):
        which = selectors.astype(np.uint64) >> np.uint64(4 * i) & np.uint64(15)
        byte = (both >> np.uint64(8) * (which & np.uint64(7)) & np.uint64(255)).astype(np.uint32)
        found |= np.where(which & np.uint64(8), np.where(byte & 128, 255, 0).astype(np.uint32), byte) << np.uint32(8 * i)
    return found


#: Any function of two bits, by its four results: bit 2 b + c.
_OF_TWO: tuple[Callable[[Array, Array], Array], ...] = (
    lambda b, c: np.zeros_like(b),
    lambda b, c: ~(b | c),
    lambda b, c: ~b & c,
    lambda b, c: ~b,
    lambda b, c: b & ~c,
    lambda b, c: ~c,
    lambda b, c: b ^ c,
    lambda b, c: ~(b & c),
    lambda b, c: b & c,
    lambda b, c: ~(b ^ c),
    lambda b, c: c,
    lambda b, c: ~b | c,
    lambda b, c: b,
    lambda b, c: b | ~c,
    lambda b, c: b | c,
    lambda b, c: ~np.zeros_like(b),
)


def _lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    """Any function of three bits, by its eight results: that of b and c where a is 0, and what changes where it is 1."""
    without, with_a = int(table) & 15, int(table) >> 4
    return _OF_TWO[without](b, c) ^ a & _OF_TWO[without ^ with_a](b, c)


def _wide(a: Array) -> Array:
    return a.astype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")


def _fused(a: Array, b: Array, c: Array) -> Array:
    return a.astype(np.float64) * b + c


def _flushed(x: Array) -> Array:
    return (x * (np.abs(x) >= 2.0**-126)).astype(np.float32)


#: By name without types; what they take are numbers of the type that the name ends with.
LANEWISE: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mul.lo": np.multiply,
    "div": _divide,
    "rem": _remainder,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "neg": np.negative,
    "abs": np.abs,
    "min": np.fmin,
    "max": np.fmax,
    "shl": _shift_left,
    "shr": _shift_right,
    "bfe": _bits_of,
    "prmt": _permuted,
    "lop3": _lop3,
    "mad.lo": lambda a, b, c: a * b + c,
    "fma": _fused,
    "rcp": lambda a: 1 / a,
    "rsqrt": lambda a: (1 / np.sqrt(a.astype(np.float64))).astype(a.dtype),
    "ex2": np.exp2,
    "lg2": np.log2,
    "min.relu": lambda a, b: np.maximum(np.minimum(a, b), 0),
    "max.relu": lambda a, b: np.maximum(np.maximum(a, b), 0),
    "mov": lambda a: a,
    "cvta.param": lambda a: a,
    "popc": np.bitwise_count,
    "mul.hi": lambda a, b: _wide(a) * _wide(b) >> _wide(a).dtype.type(8 * a.dtype.itemsize),
    "mul.wide": lambda a, b: _wide(a) * _wide(b),
    "mad.wide": lambda a, b, c: _wide(a) * _wide(b) + c,
}
COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "ne": lambda a, b: (a != b) & (a == a) & (b == b),
    "neu": np.not_equal,
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b),
    "nan": lambda a, b: (a != a) | (b != b),
}
#: Parts of a name that say how a result is rounded: as here, or nearly so.
_ROUNDING = ("rn", "ftz", "approx", "full")
#: Operands that have a type of their own, by name: the place of the first, and the type.
_OTHERS = {"shl": (1, "u32"), "shr": (1, "u32"), "bfe": (1, "u32"), "lop3": (3, "u32")}


def step(one: Instruction, registers: dict[str, int]) -> Step | None:
    """What a thread does by itself; None if the instruction is none of these."""
    parts = one.name.split(".")
    if parts[0] == "setp" and parts[-1] in PACKED:
        return _compare_halves(one, registers, COMPARISONS[parts[1]], parts[2])
    if parts[0] == "setp" and len(parts) == 3:
        return _apply(one, registers, COMPARISONS[parts[1]], [parts[2]] * 2, "pred")
    if parts[0] == "selp":
        return _apply(one, registers, lambda a, b, which: np.where(which, a, b), [parts[1], parts[1], "pred"], parts[1])
    if parts[0] == "cvt":
        return _convert(one, registers, parts)
    if parts[0] == "mov" and any(isinstance(operand, tuple) for operand in one.operands):
        return _repack(one, registers)
    ftz, kind = "ftz" in parts, parts[-1]
    function = LANEWISE.get(".".join(part for part in parts[:-1] if part not in _ROUNDING))
    if function is None:
        return None
    kinds = [kind] * (len(one.operands) - 1)
    first, other = _OTHERS.get(parts[0], (9, ""))
    kinds[first:] = [other] * len(kinds[first:])
    result = kind
    if parts[:2] in (["mul", "wide"], ["mad", "wide"]):
        result = f"{kind[0]}{2 * int(kind[1:])}"
        kinds[2:] = [result] * len(kinds[2:])
    whole = (lambda *values: _flushed(function(*map(_flushed, values)))) if ftz else function
    return _apply(one, registers, whole, kinds, result)


def _apply(one: Instruction, registers: dict[str, int], function: Callable[..., Array], kinds: list[str], result: str) -> Step:
    into, *operands = one.operands
    reads = [reader(str(operand), registers, kind) for operand, kind in zip(operands, kinds, strict=True)]
    write = writer(str(into), registers, result)
    if any(kind in ("f16", "bf16", *PACKED) for kind in kinds):  # rounded once, at the end
        return lambda block, lanes: write(block, lanes, function(*[read(block, lanes).astype(np.float64) for read in reads]))
    if len(reads) == 1:
        return lambda block, lanes, a=reads[0]: write(block, lanes, function(a(block, lanes)))
    if len(reads) == 2:
        return lambda block, lanes, a=reads[0], b=reads[1]: write(block, lanes, function(a(block, lanes), b(block, lanes)))
    return lambda block, lanes: write(block, lanes, function(*[read(block, lanes) for read in reads]))


def _compare_halves(one: Instruction, registers: dict[str, int], compare: Callable[..., Array], kind: str) -> Step:
    """A predicate for the lower half of a register, and one for the upper half."""
    into, *operands = one.operands
    low, high = (writer(name, registers, "pred") for name in str(into).split("|"))
    a, b = (reader(str(operand), registers, kind) for operand in operands)

    def write(block: Block, lanes: Lanes) -> None:
        found = compare(a(block, lanes), b(block, lanes))
        low(block, lanes, found[..., 0])
        high(block, lanes, found[..., 1])

    return write


def _convert(one: Instruction, registers: dict[str, int], parts: list[str]) -> Step:
    to, source = parts[-2], parts[-1]
    if source == "e4m3x2":
        return _apply(one, registers, lambda pair: np.stack([_e4m3(pair & 255), _e4m3(pair >> 8)], -1), ["b16"], to)
    if to in PACKED:  # the first operand becomes the upper half
        return _apply(one, registers, lambda high, low: np.stack(np.broadcast_arrays(low, high), -1), [source, source], to)
    if "rzi" in parts:
        limits = np.iinfo(TYPES[to])
        return _apply(
            one, registers, lambda a: np.nan_to_num(np.trunc(a.astype(np.float64))).clip(limits.min, limits.max), [source], to
        )
    return _apply(one, registers, lambda a: a, [source], to)


def _repack(one: Instruction, registers: dict[str, int]) -> Step:
    """mov of a register's parts into several, or of several into one."""
    into, source = one.operands
    if isinstance(into, tuple):
        width = registers[str(source)] // len(into)
        read = raw(str(source), registers, registers[str(source)])

        def split(block: Block, lanes: Lanes) -> None:
            whole = read(block, lanes)
            for i, name in enumerate(into):
                if name != "_":
                    block.registers[name][lanes] = (whole >> whole.dtype.type(width * i)).astype(RAW[width])

        return split
    bits = registers[str(into)]
    reads = [raw(part, registers, bits // len(source)) for part in source]

    def join(block: Block, lanes: Lanes) -> None:
        found = np.zeros(1, RAW[bits])
        for i, part in enumerate(reads):
            found = found | part(block, lanes).astype(RAW[bits]) << RAW[bits].type(bits // len(reads) * i)
        block.registers[str(into)][lanes] = found

    return join
