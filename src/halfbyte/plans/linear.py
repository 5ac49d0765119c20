"""What products with quantised weights are compiled for and how their work is cut: pure functions of the problem and the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from halfbyte.formats import E2M1, Format
from halfbyte.plans.levels import level_of, pattern

if TYPE_CHECKING:
    from halfbyte.plans.linear_wgmma import WgmmaSpec

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
    def spare(self) -> int: ...


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

    def abreast(self, spec: Spec) -> int:
        """Groups whose sums lie side by side in one product: fewer than 8 rows of x leave columns of it free."""
        free = spec.rows // spec.few
        return free if self.planes == 4 and 0 < self.group <= 32 <= free * self.group <= spec.chunk else 1

    def operands(self, spec: Spec) -> int:
        """Operands of the tensor cores, 16 k each, whose products are scaled together."""
        return self.abreast(spec) * self.group // 16

    def halved(self, spec: Spec) -> bool:
        """What is scaled together is 8 words, half of an mma's depth: two planes share an operand."""
        return self.operands(spec) == 2

    def operands_scaled(self, spec: Spec) -> bool:
        """Codes of 16 share a scale, which multiplies them in 16 bits."""
        return self.group == 16 and self.abreast(spec) == 1

    @property
    def scale_bytes(self) -> int:
        return _SCALES[self.scale]

    def slot_bytes(self, spec: Ring) -> int:
        """Shared memory of the codes of one stage."""
        return spec.streams * spec.tile * self.words(spec) * 2

    def table_at(self, spec: Ring) -> int:
        """Where the table lies, in multiples of its size: behind the stages."""
        return -(-spec.stages * self.slot_bytes(spec) // TABLE_BYTES)

    def slots(self, spec: Ring) -> int:
        """Stages, and what the table takes behind them."""
        behind = -(-(self.table_at(spec) + 1) * TABLE_BYTES // self.slot_bytes(spec)) if self.table else spec.stages
        return behind + spec.spare

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

    def taken_off(self, spec: Spec) -> bool:
        """What 4-bit codes have too much is taken off each operand: with 16 rows of x a product with ones costs more."""
        return self.kind == "nibbles" and not self.zero and spec.few == 16

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
    sums_apart: bool  # the warps' sums have shared memory of their own; else they take a slot of the ring, once it was read
    x_cached: bool  # x comes through the L1 cache, 8 bytes at a time: the blocks of a multiprocessor read the same
    spare: int  # slots of the ring that nobody uses: one more block would fit on a multiprocessor, and blocks lie unevenly

    @property
    def x_low(self) -> int:
        """The lowest axis of rows of x in shared memory: two rows lie side by side for the sake of its banks."""
        return min(2, self.few)

    @property
    def x_high(self) -> int:
        return self.few // self.x_low

    @property
    def sums(self) -> int:
        """Columns of what is left of a tile's sums when groups side by side are added."""
        return self.rows if self.weights[0].abreast(self) == 1 else self.few

    @property
    def part_floats(self) -> int:
        """fp32 numbers of one partial result."""
        return self.tile * self.sums

    @property
    def step(self) -> int:
        """K of one step, a chunk for every stream."""
        return self.streams * self.chunk

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.streams * self.across

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the rings of codes (the table behind them), x, scales and zero points, and sums."""
        weight = self.weights[0]
        scales = self.tile * self.columns(weight) * (weight.scale_bytes + weight.zero)
        ring = weight.slots(self) * weight.slot_bytes(self) + self.stages * (2 * self.step * self.few + scales)
        return ring + (4 * self.streams * self.part_floats if self.sums_apart else 0)

    def columns(self, weight: Stored) -> int:
        """Scales of a row in one step."""
        return self.step // 128 * weight.groups


#: Rows of x that the tuned kernel takes. From 17 on the portable one, whose tiles are larger, is faster.
MOST_ROWS = 16
#: Shared memory that a block takes beside its rings: the driver's, and with it what the compiler needs.
_DRIVER_BYTES, BLOCK_BYTES = 1024, 1280


@dataclass(frozen=True)
class GluonLinear:
    """A launch of a tuned kernel: what it is compiled for, and how many programs share the steps of its tiles.

    shared: tiles that several programs compute, which are the first ones. blocks: programs that a multiprocessor runs at once.
    """

    spec: Spec | WgmmaSpec
    programs: int
    tiles: int
    steps: int
    shared: int
    blocks: int
    why: str

    @property
    def floats(self) -> int:
        """fp32 numbers of workspace: two partial results a program, unless it computes whole tiles only."""
        return 2 * self.programs * self.spec.part_floats if self.shared else 1

    @property
    def counters(self) -> int:
        """One a tile that several programs share: none where each computes whole tiles only, and then none to clear."""
        return self.shared


def gluon_linear(
    weights: Sequence[tuple[Format, int]],
    *,
    rows: int,
    width: int,
    half: str,
    processors: int,
    capability: tuple[int, int],
    pair: bool,
) -> GluonLinear | str:
    """How the tuned kernel computes x [rows, width] times weights of these formats and out features; in words, why it cannot."""
    if len({fmt for fmt, _ in weights}) > 1:
        return "weights of several formats in one launch are the portable kernel's"
    weight = stored(weights[0][0], half)
    if isinstance(weight, str):
        return weight
    features = [n for _, n in weights]
    shape = _shape(weight, len(weights), rows, features, 2 * processors, half)
    shape = replace(shape, pair=pair and capability >= (9, 0))
    refusal = _refusal(shape, rows, width, capability)
    if refusal:
        return refusal
    per_processor = 2
    if weight.group:
        shape = replace(shape, piece=piece(shape, width, weight.scale_bytes), zero_piece=piece(shape, width, 1))
    spec = staged(shape, per_processor, capability)
    if spec is None:
        per_processor = 1
        spec = staged(shape, per_processor, capability)
    if spec is None:
        return f"two stages of its ring take {replace(shape, stages=2).shared_bytes} bytes of shared memory, more than this GPU has"
    tiles = sum(-(-n // spec.tile) for n in features)
    steps = -(-width // spec.step)
    count = fewest_programs(tiles, steps, processors, per_processor)
    why = f"{tiles} tiles of {spec.tile} rows, {steps} steps of {spec.step} each; {count} programs, {cut(count, tiles)}"
    return GluonLinear(spec, count, tiles, steps, tiles % count, per_processor, why)


def _refusal(shape: Spec, rows: int, width: int, capability: tuple[int, int]) -> str:
    """Why the tuned kernel cannot compute a product, apart from its format; "" if nothing is in the way."""
    weight = shape.weights[0]
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]}; the tuned kernel needs 8.0"
    if rows > MOST_ROWS:
        return f"{rows} rows; the tuned kernel takes {MOST_ROWS}"
    if width % (8 * weight.planes):
        return f"rows of {width * 2 // weight.planes} bytes are not whole 16-byte pieces"
    if weight.group and not (piece(shape, width, weight.scale_bytes) and (piece(shape, width, 1) or not weight.zero)):
        return f"the {width // weight.group} scales of a row cannot be copied in pieces of 4 bytes or more"
    return ""


def piece(shape: Spec, width: int, size: int) -> int:
    """`scale_piece` of the scales (or zero points) of `size` bytes in a step of this shape."""
    weight = shape.weights[0]
    return scale_piece(shape.columns(weight), width // weight.group, size)


def scale_piece(columns: int, row: int, size: int) -> int:
    """How many scales (or zero points) of `size` bytes are copied together, of `columns` in a step and `row` in a whole row.

    16 bytes of them if it can be; 0: not even 4.
    """
    fits = [n for n in (16, 8, 4, 2, 1) if 4 <= n * size <= 16 and columns % n == 0]
    return next((n for n in fits if row % n == 0), 0)


def _shape(weight: Stored, count: int, rows: int, features: list[int], slots: int, half: str) -> Spec:
    """Tiles, warps and chunks, with one stage; found by measuring (docs/linear.md).

    Pieces of 128 bytes of a row are what memory likes best. Warps do best on 64 rows of the weight, as what they do to x is then
    shared by many, where that leaves a tile for every program; else on 32. More than 8 rows of x are shared by two warps.
    2 to 4 rows come through the L1 cache; with 1 there is too little to gain, with 8 it holds too few steps.
    """
    wide = weight.kind == "bytes"
    tiles = sum(-(-n // 32) for n in features)
    few = next((n for n in (1, 2, 4, 8) if rows <= n), 16)
    fine = 0 < weight.group < 64 or bool(weight.table)  # what they need beside the product fills the registers
    if rows > 8:
        tile, streams, across = (64 if tiles <= slots or fine else 128), 2, 2
    else:
        narrow = tiles <= (slots if rows <= 4 else 0.7 * slots)
        cramped = wide or (0 < weight.group < 64 and (few == 8 or weight.kind == "nibbles"))
        tile, streams, across = (32 if narrow or cramped else 64), 4, 1
    return Spec(
        weights=(weight,) * count,
        half=half,
        rows=max(8, few),
        tile=tile,
        streams=streams,
        across=across,
        chunk=128 if wide else 256,
        stages=1,
        piece=1,
        zero_piece=1,
        pair=False,
        few=few,
        sums_apart=True,
        x_cached=few in (2, 4),
        spare=0,
    )


def shared_memory(capability: tuple[int, int]) -> int:
    """Bytes of a multiprocessor."""
    return {(9, 0): 228 << 10, (10, 0): 228 << 10, (8, 0): 164 << 10, (8, 7): 164 << 10}.get(capability, 100 << 10)


def staged(shape: Spec, blocks: int, capability: tuple[int, int], depths: Sequence[int] = (4, 3, 2)) -> Spec | None:
    """The same with the first of `depths` stages that lets so many blocks run on a multiprocessor at once, and no more; or None."""
    everything = shared_memory(capability)
    apart = (True, False) if shape.tile == 32 else (False,)  # as measured: 6 % faster, and with tiles of 64 rows 7 to 10 % slower
    for stages, sums_apart in itertools.product(depths, apart):
        spec = replace(shape, stages=stages, sums_apart=sums_apart)
        if blocks * (spec.shared_bytes + BLOCK_BYTES) <= everything:
            while (blocks + 1) * (spec.shared_bytes + _DRIVER_BYTES) <= everything:
                spec = replace(spec, spare=spec.spare + 1)
            return spec
    return None


def fewest_programs(tiles: int, steps: int, processors: int, blocks: int) -> int:
    """How many programs share tiles of so many steps, with so many blocks on each processor at once.

    One tile each needs no partial results, which cost more than some idle multiprocessors do; a few tiles are cut into equal parts;
    otherwise as few programs as have the same number of steps as if all slots took part.
    """
    slots = blocks * processors
    if slots >= tiles >= 0.7 * slots:
        return tiles
    parts = processors // tiles
    if parts >= 2 or processors >= tiles >= 0.875 * processors:
        parts = min(parts, steps)
        return tiles * parts * (blocks if steps // parts >= 8 else 1)
    each = -(-tiles * steps // slots)
    return -(-tiles * steps // each)


def shares(tiles: int, steps: int, programs: int) -> tuple[int, int, int, int]:
    """How programs divide tiles of so many steps.

    Whole tiles for each; tiles that all of them share, which come first; steps of those for each; how many programs take one step
    more, the first ones.
    """
    whole, shared = divmod(tiles, programs)
    return whole, shared, *divmod(shared * steps, programs)


def cut(programs: int, tiles: int) -> str:
    """The name of a decomposition."""
    if tiles % programs == 0:
        return "data-parallel"
    return f"split-K, {programs // tiles} parts a tile" if programs % tiles == 0 else "stream-K"


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
