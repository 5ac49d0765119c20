"""`GemmPlan`: a launch of a tuned GEMM, how its work is divided, and both in words."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.plans.gemm_spec import MmaSpec, WgmmaSpec


@dataclass(frozen=True)
class GemmPlan:
    """A launch of a tuned kernel: what it is compiled for, and how many programs share the steps of its tiles.

    With routing, tiles are the most that ids can need, and the device divides those that there are.

    blocks              blocks of batch rows, or of pairs
    split_tiles         tiles that several programs compute, which are the first ones
    programs_per_sm     how many run at once on an SM
    kept                fp32 results of pairs, which a second launch adds up
    """

    spec: MmaSpec | WgmmaSpec
    programs: int
    tiles: int
    steps: int
    blocks: int
    split_tiles: int
    programs_per_sm: int
    kept: int = 0

    @property
    def why(self) -> str:
        """How the work is divided, in words."""
        spec, programs = self.spec, self.programs
        size = f"{spec.tile} rows" if isinstance(spec, MmaSpec) else f"{spec.tile} x {spec.block_m}"
        tiles = f"{self.tiles} tiles of {size}, {self.steps} steps of {spec.step} each"
        return f"{tiles}; {programs} programs, {decomposition(programs, self.tiles, spec.stream_k)}"

    @property
    def owner_reduces(self) -> bool:
        """Whether the program that begins a split tile adds up its parts."""
        return isinstance(self.spec, MmaSpec) and self.spec.owner_reduces

    @property
    def registers(self) -> int:
        """The most of a thread so that `programs_per_sm` programs run at once on an SM, whose registers are 65,536."""
        return min(255, 65536 // (32 * self.spec.warps * self.programs_per_sm) // 8 * 8)

    @property
    def partials(self) -> int:
        """fp32 numbers of partial results, of a share up to two, unless programs compute whole tiles only."""
        partials = self.programs * (2 if self.spec.stream_k else 1)
        return partials * self.spec.partial_floats if self.split_tiles and not self.owner_reduces else 0

    @property
    def floats(self) -> int:
        """fp32 numbers of workspace: partial results, and behind them those of pairs."""
        return max(1, self.partials + self.kept)

    @property
    def counters(self) -> int:
        """Words that are zero before and after: a semaphore for each split tile, or the numbers that its owner waits for."""
        spec = self.spec
        return self.programs * spec.tile * spec.x_rows if isinstance(spec, MmaSpec) and spec.owner_reduces else self.split_tiles

    def describe(self, m: int) -> dict[str, str]:
        """The plan of x [m, K] in words, as `halfbyte explain` prints them."""
        spec = self.spec
        blocks = f", in {self.blocks} blocks" * (self.blocks > 1)
        reducer = "the last program to arrive reduces" if spec.stream_k else "each program of a tile reduces some columns"
        partials = f"{4 * self.floats / 1e6:.2f} MB at most; {reducer}, in fixed order"
        if self.owner_reduces:
            partials = f"{4 * self.counters / 1e6:.2f} MB; the program that begins a tile reduces, in fixed order"
        rounding = "; one ahead rounds x to INT8" if isinstance(spec, WgmmaSpec) and spec.x_bits == 8 else ""
        ring = f"{spec.stages} stages of {spec.k_slices * spec.chunk} of K"
        return {
            "kernel": f"gluon (tuned); {spec.launches}{rounding}",
            "tile": f"{spec.tile} output channels by {spec.block_m} of M (M = {m}){blocks}; {spec.warps} warps",
            "ring": f"{ring}, {spec.shared_bytes / 1024:.0f} KB of shared memory a program",
            "programs": f"{self.programs}, {self.programs_per_sm} per multiprocessor",
            "schedule": self.why,
            "partial sums": partials if self.split_tiles else "none",
        }


def decomposition(programs: int, tiles: int, stream_k: bool = True) -> str:
    """The name of a decomposition."""
    left = tiles % programs
    if not left or (not stream_k and programs < 2 * left):
        return "data-parallel"
    if stream_k and programs % tiles:
        return "stream-K"
    return f"{'data-parallel, then ' * (tiles > programs)}split-K, {programs // left} parts a tile"
