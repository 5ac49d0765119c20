"""How a quantised weight is stored, as the tuned kernels are compiled for it: pure functions of its format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from halfbyte.formats import E2M1, Format
from halfbyte.plans.codebooks import level_of, pattern

if TYPE_CHECKING:
    from halfbyte.plans.linear import Spec

#: Shared memory of a table: two values of every byte, for each of 32 banks.
TABLE_BYTES = 256 * 32 * 4
_SCALES = {"f16": 2, "f32": 4, "e8m0": 1, "e4m3": 1}


class Ring(Protocol):
    """What a ring of stored words in shared memory is laid out by."""

    @property
    def streams(self) -> int: ...
    @property
    def tile(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def pad_slots(self) -> int: ...


@dataclass(frozen=True)
class Stored:
    """How a weight is stored: one compile-time constant of the tuned kernel.

    kind    what a 16-bit word holds: "nibbles" (four integers), "bytes" (two int8), "floats" (four E2M1 numbers), "pairs" (four
            codes of a table)
    group   codes that share a scale; 0: a whole row
    scale   type of a stored scale: "f16", "f32", "e8m0", "e4m3"
    zero    zero points are stored
    bias    what is subtracted from every code besides
    table   the 16-bit patterns of the values of a table over `level`, of every code
    level   what a table's numbers are multiples of
    factor  one more fp32 factor for the whole tensor
    """

    kind: str
    group: int
    scale: str
    zero: bool
    bias: int
    table: tuple[int, ...]
    level: float
    factor: bool

    @property
    def planes(self) -> int:
        """Codes in one 16-bit word."""
        return 2 if self.kind == "bytes" else 4

    def words(self, spec: Ring) -> int:
        """16-bit words of a chunk of a row."""
        return spec.chunk // self.planes

    @property
    def groups(self) -> int:
        """Scales of a row in 128 k."""
        return 128 // self.group if self.group else 0

    def groups_per_mma(self, spec: Spec) -> int:
        """Groups whose sums lie side by side in one product: fewer than 8 rows of x leave columns of it free."""
        free = spec.rows // spec.few
        return free if self.planes == 4 and 0 < self.group <= 32 <= free * self.group <= spec.chunk else 1

    def operands(self, spec: Spec) -> int:
        """Operands of the tensor cores, 16 k each, whose products are scaled together."""
        return self.groups_per_mma(spec) * self.group // 16

    def halved(self, spec: Spec) -> bool:
        """What is scaled together is 8 words, half of an mma's depth: two planes share an operand."""
        return self.operands(spec) == 2

    def operands_scaled(self, spec: Spec) -> bool:
        """Codes of 16 share a scale, which multiplies them in 16 bits."""
        return self.group == 16 and self.groups_per_mma(spec) == 1

    @property
    def scale_bytes(self) -> int:
        return _SCALES[self.scale]

    def slot_bytes(self, spec: Ring) -> int:
        """Shared memory of the codes of one stage."""
        return spec.streams * spec.tile * self.words(spec) * 2

    def table_at(self, spec: Ring) -> int:
        """Where in shared memory the table lies, a multiple of its size: behind the stages."""
        return -(-spec.stages * self.slot_bytes(spec) // TABLE_BYTES) * TABLE_BYTES

    def slots(self, spec: Ring) -> int:
        """Stages, and what the table takes behind them."""
        behind = -(-(self.table_at(spec) + TABLE_BYTES) // self.slot_bytes(spec)) if self.table else spec.stages
        return behind + spec.pad_slots

    def unit(self, half: str) -> float:
        """What one step of a code is, in products of the tensor cores: in the operands, and for E2M1 in bf16 in those of x, too."""
        if self.kind == "floats":
            return 2.0**-62 if half == "bf16" else 2.0**-14
        return 1.0 / self.level if self.table else 1.0 if half == "bf16" else 2.0**-24

    def x_factor(self, spec: Spec) -> float:
        """What x is multiplied by: E2M1's bits in a bf16 are the number times 2^-126, too small for what fp32 can add up."""
        return 1.0 if self.kind != "floats" or spec.half == "fp16" else 2.0**57 if self.operands_scaled(spec) else 2.0**64

    def scale_factor(self, spec: Spec) -> float:
        """What scales that multiply operands are multiplied by: a bf16 holds code times scale exactly from 2^-133 on."""
        return 2.0**7 if self.kind == "floats" and spec.half == "bf16" else 1.0

    def bias_in_unpack(self, spec: Spec) -> bool:
        """What 4-bit codes have too much is taken off each operand: with 16 rows of x a product with ones costs more."""
        return self.kind == "nibbles" and not self.zero and spec.few == 16

    def shift(self, half: str) -> float:
        """What operands have too much, apart from zero points."""
        extra = {("nibbles", "bf16"): 128, ("bytes", "fp16"): 128}.get((self.kind, half), 0)
        return (self.bias + extra) * self.unit(half)


def stored(fmt: Format, half: str, tables: bool = False) -> Stored | str:
    """How a tuned kernel reads a weight of `fmt`; in words, why it cannot. `tables`: E2M1 through a table, too."""
    code, scale = fmt.code, fmt.scale
    assert scale is not None
    floats = code.values == E2M1.values and not tables
    group = scale.group or 0
    if group not in (0, 16, 32, 64, 128) or scale.nested is not None:
        return f"{fmt.name} is read by the portable kernel only"
    if fmt.offset == "int" and not group:
        return "zero points of whole rows are read by the portable kernel only"
    table, level = tuple[int, ...](), 1.0
    if code.values is not None and not floats:
        level = level_of(code, half)
        table = tuple(pattern(value / level, half) for value in code.values)
    kind = "floats" if floats else "pairs" if table else "bytes" if code.bits == 8 else "nibbles"
    return Stored(kind, group, scale.dtype, fmt.offset == "int", code.bias, table, level, fmt.tensor_scale)
