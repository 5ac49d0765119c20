"""Products with 17 to 256 rows of x on Hopper, by warp-group products: what they are compiled for and how their work is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from halfbyte.formats import Format
from halfbyte.plans.linear import BLOCK_BYTES, LinearPlan, cut, gluon_linear, scale_piece, shared_memory
from halfbyte.plans.weight_spec import Stored, stored

#: Rows of x that the kernel takes; below, warps that take chunks of K each are faster, beyond, cuBLAS over dequantised weights.
FEWEST_ROWS, MOST_ROWS = 17, 256


@dataclass(frozen=True)
class LinearWgmmaSpec:
    """Everything the kernel is compiled for."""

    weights: tuple[Stored, ...]
    half: str  # of x and y: "bf16" or "fp16"
    rows: int  # of x in a block: 32 or 64
    chunk: int  # K of a step
    stages: int
    piece: int  # scales that are copied at a time
    pair: bool
    tile: int = 128  # rows of the weight: 64 for each of two warp groups
    across: int = 8  # warps, which divide them

    @property
    def streams(self) -> int:
        """Groups of warps that take a chunk of K each: here all share one."""
        return 1

    @property
    def pad_slots(self) -> int:
        """Slots of the ring that nobody uses: none is needed, as two blocks have no room at once."""
        return 0

    @property
    def warps(self) -> int:
        return self.across

    @property
    def step(self) -> int:
        return self.chunk

    @property
    def blocks(self) -> int:
        """Of 64 k, in a step: 128 bytes of x."""
        return self.chunk // 64

    @property
    def halved(self) -> bool:
        """Groups of 32: two products for each 64 k, as their sums are scaled apart."""
        return self.weights[0].group == 32

    @property
    def fold(self) -> bool:
        """Scales multiply the codes, in 16 bits: where that is exact, as sums of so few codes would take long to scale."""
        weight = self.weights[0]
        return weight.group == 16 or (weight.group == 32 and weight.scale == "e8m0" and self.half == "bf16")

    @property
    def direct(self) -> bool:
        """All products of a tile are one sum: no scale multiplies those of a group."""
        return not self.weights[0].group or self.fold

    @property
    def carried(self) -> bool:
        """A step's last product runs on into the next step. Not where looking up codes leaves no registers for its sums, nor where
        the assembler would make it wait (two products of table codes for each 64 k).
        """
        return self.weights[0].kind != "pairs" or self.direct or (self.rows < 64 and not self.halved)

    @property
    def sums(self) -> int:
        """Columns of a tile's sums."""
        return self.rows

    @property
    def part_floats(self) -> int:
        """fp32 numbers of one partial result."""
        return self.tile * self.rows

    def columns(self, weight: Stored) -> int:
        """Scales of a row in one step."""
        return self.chunk // 128 * weight.groups

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the rings of codes (the table behind them), scales and x, and a tile of y."""
        weight = self.weights[0]
        scales = self.tile * self.columns(weight) * weight.scale_bytes
        stages = self.stages * (2 * self.chunk * self.rows + scales)
        return weight.slots(self) * weight.slot_bytes(self) + stages + 2 * self.tile * self.rows


def tuned_linear(
    weights: Sequence[tuple[Format, int]],
    *,
    rows: int,
    width: int,
    half: str,
    num_sms: int,
    capability: tuple[int, int],
    pair: bool,
) -> LinearPlan | str:
    """How a tuned kernel computes x [rows, width] times weights of these formats and out features; in words, why none can."""
    plan = gluon_linear if rows < FEWEST_ROWS else wgmma_linear
    return plan(weights, rows=rows, width=width, half=half, num_sms=num_sms, capability=capability, pair=pair)


def wgmma_linear(
    weights: Sequence[tuple[Format, int]],
    *,
    rows: int,
    width: int,
    half: str,
    num_sms: int,
    capability: tuple[int, int],
    pair: bool,
) -> LinearPlan | str:
    """How warp-group products compute x [rows, width] times these weights; in words, why they cannot."""
    if capability != (9, 0):
        return f"compute capability {capability[0]}.{capability[1]}; warp-group products need 9.0"
    if not FEWEST_ROWS <= rows <= MOST_ROWS:
        return f"{rows} rows; warp-group products take {FEWEST_ROWS} to {MOST_ROWS}"
    if len({fmt for fmt, _ in weights}) > 1:
        return "weights of several formats in one launch are the portable kernel's"
    weight = stored(weights[0][0], half, tables=True)  # E2M1's bits would need an x times 2^64
    if isinstance(weight, str):
        return weight
    if width % (8 * weight.planes):
        return f"rows of {width * 2 // weight.planes} bytes are not whole 16-byte pieces"
    # 256 bytes of a row at a time are read faster than 128, where shared memory has room for three such steps beside x.
    shape = LinearWgmmaSpec((weight,) * len(weights), half, 32 if rows <= 32 else 64, 256, 1, 1, pair)
    spec = (wgmma_staged(replace(shape, chunk=512), width) if rows <= 32 else None) or wgmma_staged(shape, width)
    if spec is None:
        return (
            f"the scales of a row of {width} cannot be copied in pieces of 4 bytes or more, or three steps do not fit shared memory"
        )
    tiles, steps = sum(-(-n // spec.tile) for _, n in weights) * -(-rows // spec.rows), -(-width // spec.step)
    count = _programs(tiles, steps, num_sms)
    why = f"{tiles} tiles of {spec.tile} x {spec.rows}, {steps} steps of {spec.step} each; {count} programs, {cut(count, tiles)}"
    return LinearPlan(spec, count, tiles, steps, tiles if tiles % count else 0, 1, why)


def wgmma_staged(shape: LinearWgmmaSpec, width: int) -> LinearWgmmaSpec | None:
    """The same with as many stages as shared memory has room for, at most 8; None with fewer than 3, or where scales do not fit."""
    weight = shape.weights[0]
    if weight.group:
        shape = replace(shape, piece=scale_piece(shape.columns(weight), width // weight.group, weight.scale_bytes))
        if not shape.piece:
            return None
    fits = [s for n in range(3, 9) if (s := replace(shape, stages=n)).shared_bytes + BLOCK_BYTES <= shared_memory((9, 0))]
    return fits[-1] if fits else None


def _programs(tiles: int, steps: int, slots: int) -> int:
    """How many programs share tiles of so many steps where `slots` run at once: equal parts of tiles, if that leaves few idle.

    Otherwise as few as have the same number of steps as if all slots took part.
    """
    parts = min(slots // tiles, steps)
    if tiles * parts >= 0.85 * slots or (parts and tiles >= 0.7 * slots):
        return tiles * parts
    each = -(-tiles * steps // slots)
    return -(-tiles * steps // each)
