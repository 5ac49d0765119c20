"""What products with quantised weights are compiled for and how their work is cut: pure functions of the problem and the device."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from halfbyte.formats import Format

#: Shared memory of a table: two values of every byte, for each of 32 banks.
TABLE_BYTES = 256 * 32 * 4
_SCALES = {"f16": 2, "f32": 4, "e8m0": 1, "e4m3": 1}


@dataclass(frozen=True)
class Stored:
    """How a weight is stored: one compile-time constant of the tuned kernel.

    kind    what a 16-bit word holds: "nibbles" (four integers), "bytes" (two int8), "pairs" (four codes of a table)
    group   codes that share a scale; 0: a whole row
    scale   type of a stored scale: "f16", "f32", "e8m0", "e4m3"
    zero    zero points are stored
    bias    what is subtracted from every code besides
    table   the 16-bit patterns of the values of a table, of every code
    factor  one more fp32 factor for the whole tensor
    """

    kind: str
    group: int
    scale: str
    zero: bool
    bias: int
    table: tuple[int, ...]
    factor: bool

    @property
    def planes(self) -> int:
        """Codes in one 16-bit word."""
        return 2 if self.kind == "bytes" else 4

    def words(self, spec: Spec) -> int:
        """16-bit words of a chunk of a row."""
        return spec.chunk // self.planes

    @property
    def groups(self) -> int:
        """Scales of a row in 128 k."""
        return 128 // self.group if self.group else 0

    @property
    def halved(self) -> bool:
        """A group is 8 words, half of an mma's depth: two planes share an operand."""
        return self.group == 32

    @property
    def scale_bytes(self) -> int:
        return _SCALES[self.scale]

    def slot_bytes(self, spec: Spec) -> int:
        """Shared memory of the codes of one stage."""
        return spec.streams * spec.tile * self.words(spec) * 2

    def table_at(self, spec: Spec) -> int:
        """Where the table lies, in multiples of its size: behind the stages."""
        return -(-spec.stages * self.slot_bytes(spec) // TABLE_BYTES)

    def slots(self, spec: Spec) -> int:
        """Stages, and what the table takes behind them."""
        return -(-(self.table_at(spec) + 1) * TABLE_BYTES // self.slot_bytes(spec)) if self.table else spec.stages

    def unit(self, half: str) -> float:
        """What one step of a code is, in operands of the tensor cores."""
        return 1.0 if half == "bf16" or self.table else 2.0**-24

    def shift(self, half: str) -> float:
        """What operands have too much, apart from zero points."""
        extra = {("nibbles", "bf16"): 128, ("bytes", "fp16"): 128}.get((self.kind, half), 0)
        return (self.bias + extra) * self.unit(half)


@dataclass(frozen=True)
class Spec:
    """Everything the tuned kernel is compiled for."""

    weights: tuple[Stored, ...]
    half: str  # of x and y: "bf16" or "fp16"
    rows: int  # of x, rounded up to a power of two, at least 8
    tile: int  # rows of the weight
    streams: int  # warps, or groups of `across` of them, that take a chunk of K each
    across: int  # warps that divide the rows of a tile
    chunk: int  # K of a chunk: 128, 256, ...
    stages: int
    piece: int  # scales that are copied at a time
    zero_piece: int  # zero points, the same
    pair: bool
    few: int  # rows of x that are loaded: 1, 2, 4 or `rows`

    @property
    def x_low(self) -> int:
        """The lowest axis of rows of x in shared memory: two rows lie side by side for the sake of its banks."""
        return min(2, self.few)

    @property
    def x_high(self) -> int:
        return self.few // self.x_low

    @property
    def part_floats(self) -> int:
        """fp32 numbers of one partial result."""
        return self.tile * self.rows

    @property
    def step(self) -> int:
        """K of one step, a chunk for every stream."""
        return self.streams * self.chunk

    @property
    def warps(self) -> int:
        return self.streams * self.across

    def columns(self, weight: Stored) -> int:
        """Scales of a row in one step."""
        return self.step // 128 * weight.groups


def stored(fmt: Format, half: str) -> Stored | str:
    """How the tuned kernel reads a weight of `fmt`; in words, why it cannot."""
    code, scale = fmt.code, fmt.scale
    assert scale is not None
    group = scale.group or 0
    if group not in (0, 16, 32, 64, 128) or scale.nested is not None:
        return f"{fmt.name} is read by the portable kernel only"
    if fmt.offset == "int" and not group:
        return "zero points of whole rows are read by the portable kernel only"
    table: tuple[int, ...] = ()
    if code.kind == "lookup":
        assert code.values is not None
        table = tuple(_bits(value, half) for value in code.values)
    kind = "pairs" if table else "bytes" if code.bits == 8 else "nibbles"
    return Stored(kind, group, scale.dtype, fmt.offset == "int", code.bias, table, fmt.tensor_scale)


def _bits(value: float, half: str) -> int:
    """The pattern of the 16-bit number nearest to `value`."""
    if half == "fp16":
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    bits = int(struct.unpack("<I", struct.pack("<f", value))[0])
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
