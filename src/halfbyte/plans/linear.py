"""What products with quantised weights are compiled for and how their work is cut: pure functions of the problem and the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from halfbyte.formats import Format
from halfbyte.plans.toolchain import EQUAL_PARTS, takes_any_part
from halfbyte.plans.weight_spec import Stored, stored

if TYPE_CHECKING:
    from halfbyte.plans.linear_wgmma import LinearWgmmaSpec


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
    scale_slots: int  # steps that scales are kept of, at least `stages`: with twice as many streams drift apart freely
    piece: int  # scales that are copied at a time
    zero_piece: int  # zero points, the same
    pair: bool
    few: int  # rows of x that are loaded: 1, 2, 4 or `rows`
    separate_reduce_smem: bool  # the warps' sums have shared memory of their own; else a slot of the ring that was read
    x_cached: bool  # x comes through the L1 cache: the blocks of a multiprocessor read the same
    pad_slots: int  # slots of the ring that nobody uses: one more block would fit on a multiprocessor, and blocks lie unevenly

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
        return self.rows if self.weights[0].groups_per_mma(self) == 1 else self.few

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
        return self.ring_bytes + (4 * self.streams * self.part_floats if self.separate_reduce_smem else 0)

    @property
    def x_at(self) -> int:
        """Where x lies in shared memory: behind the codes."""
        return self.weights[0].slots(self) * self.weights[0].slot_bytes(self)

    @property
    def scales_at(self) -> int:
        return self.x_at + self.stages * 2 * self.step * self.few

    @property
    def zeros_at(self) -> int:
        return self.scales_at + self._scale_bytes(self.weights[0].scale_bytes)

    @property
    def barriers_at(self) -> int:
        """Where barriers lie, 8 bytes each: for each slot of scales that it is filled, and behind those that it is free."""
        return self.zeros_at + self.weights[0].zero * self._scale_bytes(1)

    @property
    def has_empty_barrier(self) -> bool:
        """Streams say when they have read a slot of scales. With slots for twice the stages that is known without: who is in a
        step has had the scales of the step before, so all streams have asked for those, which they do `stages` - 1 steps ahead.
        (That a thread's reads come before what it asks for later is the order of the machine: PTX says it of arriving alone.)
        """
        return self.weights[0].groups > 0 and self.scale_slots < 2 * self.stages

    @property
    def ring_bytes(self) -> int:
        """Codes, x, scales and zero points of all stages, and barriers."""
        return self.barriers_at + (-(-16 * self.scale_slots // 128) * 128 if self.weights[0].groups else 0)

    def _scale_bytes(self, size: int) -> int:
        """Of all slots of scales (or zero points) of `size` bytes."""
        return self.scale_slots * self.tile * self.columns(self.weights[0]) * size

    def columns(self, weight: Stored) -> int:
        """Scales of a row in one step."""
        return self.step // 128 * weight.groups


#: Rows of x that the tuned kernel takes. From 17 on the portable one, whose tiles are larger, is faster.
MOST_ROWS = 16
#: Shared memory that a block takes beside its rings: the driver's, and with it what the compiler needs.
_DRIVER_BYTES, BLOCK_BYTES = 1024, 1280


@dataclass(frozen=True)
class LinearPlan:
    """A launch of a tuned kernel: what it is compiled for, and how many programs share the steps of its tiles.

    shared: tiles that several programs compute, which are the first ones. blocks: programs that a multiprocessor runs at once.
    """

    spec: Spec | LinearWgmmaSpec
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
    num_sms: int,
    capability: tuple[int, int],
    pair: bool,
) -> LinearPlan | str:
    """How the tuned kernel computes x [rows, width] times weights of these formats and out features; in words, why it cannot."""
    if len({fmt for fmt, _ in weights}) > 1:
        return "weights of several formats in one launch are the portable kernel's"
    if not takes_any_part():
        return EQUAL_PARTS
    weight = stored(weights[0][0], half)
    if isinstance(weight, str):
        return weight
    features = [n for _, n in weights]
    per_processor = 1 if _long(weight, rows, features, width, num_sms) else 2
    shape = _shape(weight, len(weights), rows, features, per_processor * num_sms, half)
    shape = replace(shape, pair=pair and capability >= (9, 0))
    refusal = _refusal(shape, rows, width, capability)
    if refusal:
        return refusal
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
    count = fewest_programs(tiles, steps, num_sms, per_processor)
    why = f"{tiles} tiles of {spec.tile} rows, {steps} steps of {spec.step} each; {count} programs, {cut(count, tiles)}"
    return LinearPlan(spec, count, tiles, steps, tiles % count, per_processor, why)


def _long(weight: Stored, rows: int, features: list[int], width: int, num_sms: int) -> bool:
    """Whether one block of a multiprocessor does best: rows of x few, rows of the weight long, about one tile of 64 for each.

    With INT4 in larger groups, as measured (docs/linear.md); two blocks would take tiles of 32 rows and read x twice as often.
    """
    tiles = sum(-(-n // 64) for n in features)
    suits = weight.kind == "nibbles" and (weight.group == 0 or weight.group >= 64) and rows <= 8
    return suits and width >= 20 << 10 and num_sms >= tiles >= 0.9 * num_sms


def _refusal(shape: Spec, rows: int, width: int, capability: tuple[int, int]) -> str:
    """Why the tuned kernel cannot compute a product, apart from its format; "" if nothing is in the way."""
    weight = shape.weights[0]
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]}; the tuned kernel needs 8.0"
    if rows > MOST_ROWS:
        return f"{rows} rows; the tuned kernel takes {MOST_ROWS}"
    if width >= 2**30:
        return f"rows of {width} numbers; the tuned kernel counts their bytes in 32 bits"
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
        scale_slots=4,
        piece=1,
        zero_piece=1,
        pair=False,
        few=few,
        separate_reduce_smem=True,
        x_cached=few in (2, 4),
        pad_slots=0,
    )


def shared_memory(capability: tuple[int, int]) -> int:
    """Bytes of a multiprocessor."""
    return {(9, 0): 228 << 10, (10, 0): 228 << 10, (8, 0): 164 << 10, (8, 7): 164 << 10}.get(capability, 100 << 10)


def staged(shape: Spec, blocks: int, capability: tuple[int, int], depths: Sequence[int] = (4, 3, 2)) -> Spec | None:
    """The same with the first of `depths` stages that lets so many blocks run on a multiprocessor at once, and no more; or None."""
    everything = shared_memory(capability)
    apart = (True, False) if shape.tile == 32 else (False,)  # as measured: 6 % faster, and with tiles of 64 rows 7 to 10 % slower
    for stages, separate_reduce_smem, slots in ((n, a, s) for n in depths for a in apart for s in _scale_slots(n)):
        spec = replace(shape, stages=stages, separate_reduce_smem=separate_reduce_smem, scale_slots=slots)
        if blocks * (spec.shared_bytes + BLOCK_BYTES) <= everything:
            while (blocks + 1) * (spec.shared_bytes + _DRIVER_BYTES) <= everything:
                spec = replace(spec, pad_slots=spec.pad_slots + 1)
            return spec
    return None


def _scale_slots(stages: int) -> tuple[int, ...]:
    """How many steps' scales to keep, the best first.

    With twice the stages no stream ever waits to ask for scales: before that it waits for scales that others are to ask for. A
    power of two takes fewer instructions.
    """
    most = 2 * stages
    return (1 << (most - 1).bit_length(), *range(most, stages - 1, -1))


def fewest_programs(tiles: int, steps: int, num_sms: int, blocks: int) -> int:
    """How many programs share tiles of so many steps, with so many blocks on each processor at once.

    Whole tiles for each need no partial results, which cost more than some idle multiprocessors do; a few tiles are cut into equal
    parts; otherwise the fewest that have as many steps each as if all slots took part, from 4 steps on all slots.
    """
    slots = blocks * num_sms
    if slots >= tiles >= 0.7 * slots:
        return tiles
    parts = num_sms // tiles
    if parts >= 2 or num_sms >= tiles >= 0.875 * num_sms:
        parts = min(parts, steps)
        return tiles * parts * (blocks if steps // parts >= 8 else 1)
    even = even_programs(tiles, steps, slots)
    return even if tiles % even == 0 or tiles * steps <= 3 * slots else slots


def even_programs(tiles: int, steps: int, slots: int) -> int:
    """The fewest programs that have as many steps each as if all slots took part."""
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
