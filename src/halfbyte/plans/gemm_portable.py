"""How the portable Triton kernels divide a GEMM, dense or of experts, into programs: pure functions, never of the ids.

y^T [N, M] = W [N, K] x^T: a program takes `block_n` out features and `block_m` batch rows, and walks its share of K in steps of
`block_k`. Up to M = 64, reading the weight dominates, and K is split until all SMs read. Beyond, tensor cores and decoding
dominate: a tile of the weight is decoded for as many batch rows as registers hold.

With routing a program takes an expert and a block of its pairs of a token and an expert, which come sorted by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from halfbyte.device import GPU
from halfbyte.formats import Format
from halfbyte.plans.gemm_problem import GemmProblem, Routing

#: Up to this M, scales multiply fp32 sums instead of codes, unless 16 bits hold code times scale exactly.
EXACT_ROWS = 64
#: Up to this `block_m`, the kernel reads columns of x one by one: strided, or in act-order.
GATHERED_ROWS = 16
#: With `row_invariant`: rows of a tile, and programs over N and K.
_INVARIANT_ROWS, _INVARIANT_PROGRAMS = 64, 256
#: The most splits of K, and the fewest columns of one.
_MOST_SPLITS, _FEWEST_COLUMNS = 32, 512
#: Costs besides multiply-adds: decoding the weights of a step, in batch rows; a tile and a partial result, in steps.
_DECODING, _TILE, _PARTIAL = 80, 8, 3
#: With routing: tokens and pairs up to which reading weights dominates; then the most splits of K, and the fewest columns of one.
_FEW_TOKENS, _FEW_PAIRS, _MOST_PAIR_SPLITS, _FEWEST_PAIR_COLUMNS = 64, 1024, 8, 256


@dataclass(frozen=True)
class PortableTiles:
    """One launch over tiles of `block_n` out features and `block_m` batch rows, each walked by `splits` programs.

    Split s takes `share` steps of `block_k` columns, from step s * share on; no split is empty.

    fold        group scales multiply the codes, in 16 bits; otherwise the fp32 sums of a step, if its columns share a scale
    why         the choice in words
    blocks      with routing: the most blocks of pairs that ids can need; else 0
    """

    block_n: int
    block_m: int
    block_k: int
    splits: int
    share: int
    fold: bool
    num_warps: int
    num_stages: int
    why: str = ""
    blocks: int = 0

    def count(self, features: Sequence[int], m: int) -> int:
        """Tiles of a launch."""
        return sum(-(-n // self.block_n) for n in features) * (self.blocks or -(-m // self.block_m))

    def floats(self, features: Sequence[int], m: int) -> int:
        """fp32 numbers of workspace: a partial result for each split of a tile."""
        return self.count(features, m) * self.splits * self.block_n * self.block_m if self.splits > 1 else 0

    def describe(self, p: GemmProblem) -> dict[str, str]:
        """The launch in words, as `halfbyte explain` prints it."""
        count = self.count(p.features, p.rows)
        split = f"{self.splits} a tile, {self.share} steps each; the last program to arrive reduces, in fixed order"
        return {
            "kernel": "triton (portable); one launch",
            "tile": f"{self.block_n} output channels by {self.block_m} of M; {self.num_warps} warps",
            "ring": f"{self.num_stages} steps of {self.block_k} of K",
            "programs": f"{count * self.splits} for {count} tiles",
            "schedule": self.why,
            "partial sums": "none" if self.splits == 1 else split,
        }


def portable_tiles(p: GemmProblem, gpu: GPU, row_invariant: bool = False) -> PortableTiles:
    """Tiles of a GEMM. `row_invariant`: a function of the weights alone, not of M or the device."""
    if p.routing is not None:
        return _routed(p, p.routing, gpu.num_sms)
    m, width = p.rows, p.width
    if m > EXACT_ROWS and not row_invariant:
        return _large_m(p, gpu)
    block_m = _INVARIANT_ROWS if row_invariant else max(16, 1 << (m - 1).bit_length())
    block_k = min([128, *(fmt.group_size(width) for fmt, _ in p.weights if not folds_exactly(fmt))])
    block_k = 1 << max(5, block_k.bit_length() - 1)
    steps = -(-width // block_k)
    slots = _INVARIANT_PROGRAMS if row_invariant else 4 * gpu.num_sms
    splits = max(1, min(slots // max(p.tiles(64), 1), steps * block_k // _FEWEST_COLUMNS, _MOST_SPLITS))
    why = "a function of N and K alone" if row_invariant else f"{m} rows: the weight is read once"
    shape = PortableTiles(64, block_m, block_k, 1, steps, False, 4, 4 if block_k > 32 else 6, why)
    return _split(shape, splits)


def folds_exactly(fmt: Format) -> bool:
    """Whether codes of this format times their stored scale are exact in 16 bits: E8M0 is a power of two, E4M3 has four bits."""
    return fmt.scale is not None and fmt.scale.dtype in ("e8m0", "e4m3")


def _split(tiles: PortableTiles, splits: int) -> PortableTiles:
    """The same work with about `splits` programs per tile, each with a share of the steps."""
    share = -(-tiles.share // splits)
    return replace(tiles, splits=-(-tiles.share // share), share=share, why=f"{tiles.why}, K in {-(-tiles.share // share)} parts")


def _large_m(p: GemmProblem, gpu: GPU) -> PortableTiles:
    """The tiles whose waves cost the least."""

    def cost(tiles: PortableTiles) -> float:
        programs = tiles.count(p.features, p.rows) * tiles.splits
        steps = tiles.share + _TILE + (_PARTIAL * tiles.splits if tiles.splits > 1 else 0)
        return -(-programs // gpu.num_sms) * tiles.block_n * (tiles.block_m + _DECODING) * steps

    steps = -(-p.width // 64)
    wide = 9 <= gpu.capability[0] <= 10  # the registers of asynchronous MMAs, and shared memory for their operands
    whole = [PortableTiles(128, block_m, 64, 1, steps, True, 8, 3) for block_m in ((64, 128, 256) if wide else (64, 128))]
    shapes = [_split(shape, n) for shape in whole for n in (1, 2, 4, 8) if n == 1 or steps >= 8 * n]
    best = min(shapes, key=cost)
    return replace(best, why=f"M = {p.rows}: each weight tile is decoded once for {best.block_m} of M{best.why}")


def _routed(p: GemmProblem, routing: Routing, num_sms: int) -> PortableTiles:
    """Tiles for a stack of experts."""
    ((fmt, features),), hit, pairs = p.weights, min(p.pairs, routing.experts), p.pairs
    if p.rows > _FEW_TOKENS or pairs > _FEW_PAIRS:
        block_m = 128 if pairs >= 96 * routing.experts else 64
        return PortableTiles(128, block_m, 64, 1, -(-p.width // 64), True, 8, 3, blocks=pairs // block_m + hit)
    block_m = 16 if pairs <= 8 * routing.experts else max(16, 1 << (p.rows - 1).bit_length())
    block_k = min(128, fmt.group_size(p.width) * (4 if folds_exactly(fmt) else 1))
    block_k = 1 << max(5, block_k.bit_length() - 1)
    splits = max(1, min(4 * num_sms // (hit * -(-features // 64)), p.width // _FEWEST_PAIR_COLUMNS, _MOST_PAIR_SPLITS))
    stages, blocks = 4 if block_k > 32 else 6, pairs // block_m + hit
    return _split(PortableTiles(64, block_m, block_k, 1, -(-p.width // block_k), False, 4, stages, blocks=blocks), splits)
