"""How the portable Triton level of `linear` divides a GEMM into programs: pure functions of the problem and the device.

y^T [N, M] = W [N, K] x^T: a program takes `block_n` out features and `block_m` batch rows, and walks its share of K in steps of
`block_k`. Up to M = 64, reading the weight dominates, and K is split until all SMs read. Beyond, tensor cores and decoding
dominate: a tile of the weight is decoded for as many batch rows as registers hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from halfbyte.device import GPU
from halfbyte.formats import Format
from halfbyte.plans.linear_spec import LinearProblem

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
#: From this M on, it is faster to dequantize slabs of a weight for cuBLAS: in general, and with group_size 16, which costs the
#: portable kernel most. And bytes of a slab: smaller ones, although L2 holds them, were up to 50 % slower, because cuBLAS fills
#: the GPU with fewer tiles.
_EXPANDED_ROWS, _EXPANDED_ROWS_16, _SLAB_BYTES = 257, 128, 128 << 20


@dataclass(frozen=True)
class LinearTiles:
    """One launch over tiles of `block_n` out features and `block_m` batch rows, each walked by `splits` programs.

    Split s takes `share` steps of `block_k` columns, from step s * share on; no split is empty. `fold`: group scales multiply
    the codes, in 16 bits; otherwise the fp32 sums of a step, if its columns share a scale.
    `why`: the choice in words.
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

    def count(self, features: Sequence[int], m: int) -> int:
        """Tiles of a launch, each with a semaphore where K is split."""
        return sum(-(-n // self.block_n) for n in features) * -(-m // self.block_m)

    def floats(self, features: Sequence[int], m: int) -> int:
        """fp32 numbers of workspace: a partial result for each split of a tile."""
        return self.count(features, m) * self.splits * self.block_n * self.block_m if self.splits > 1 else 0

    def describe(self, p: LinearProblem) -> dict[str, str]:
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


def linear_tiles(p: LinearProblem, gpu: GPU, row_invariant: bool = False) -> LinearTiles:
    """Tiles of a GEMM. `row_invariant`: a function of the weights alone, not of M or the device."""
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
    shape = LinearTiles(64, block_m, block_k, 1, steps, False, 4, 4 if block_k > 32 else 6, why)
    return _split(shape, splits)


def expanded(p: LinearProblem) -> bool:
    """Whether M is so large that dequantizing slabs of the weights first is faster."""
    fine = any(fmt.group_size(p.width) < 32 for fmt, _ in p.weights)
    return p.rows >= (_EXPANDED_ROWS_16 if fine else _EXPANDED_ROWS)


def slab_rows(width: int) -> int:
    """Rows of a weight that are dequantized at a time: about `_SLAB_BYTES`, and a multiple of 256 for cuBLAS."""
    return max(256, _SLAB_BYTES // (2 * width) // 256 * 256)


def slab_shares(features: Sequence[int], first: int, count: int) -> list[tuple[int, int]]:
    """(first row, rows) that each weight adds to rows first ... first + count of all of them, one below the other."""
    shares, above = [], 0
    for n in features:
        start = min(max(first - above, 0), n)
        shares.append((start, min(max(first + count - above, 0), n) - start))
        above += n
    return shares


def folds_exactly(fmt: Format) -> bool:
    """Whether codes of this format times their stored scale are exact in 16 bits: E8M0 is a power of two, E4M3 has four bits."""
    return fmt.scale is not None and fmt.scale.dtype in ("e8m0", "e4m3")


def _split(tiles: LinearTiles, splits: int) -> LinearTiles:
    """The same work with about `splits` programs per tile, each with a share of the steps."""
    share = -(-tiles.share // splits)
    return replace(tiles, splits=-(-tiles.share // share), share=share, why=f"{tiles.why}, K in {-(-tiles.share // share)} parts")


def _large_m(p: LinearProblem, gpu: GPU) -> LinearTiles:
    """The tiles whose waves cost the least."""

    def cost(tiles: LinearTiles) -> float:
        programs = tiles.count(p.features, p.rows) * tiles.splits
        steps = tiles.share + _TILE + (_PARTIAL * tiles.splits if tiles.splits > 1 else 0)
        return -(-programs // gpu.num_sms) * tiles.block_n * (tiles.block_m + _DECODING) * steps

    steps = -(-p.width // 64)
    wide = 9 <= gpu.capability[0] <= 10  # the registers of asynchronous MMAs, and shared memory for their operands
    whole = [LinearTiles(128, block_m, 64, 1, steps, True, 8, 3) for block_m in ((64, 128, 256) if wide else (64, 128))]
    shapes = [_split(shape, n) for shape in whole for n in (1, 2, 4, 8) if n == 1 or steps >= 8 * n]
    best = min(shapes, key=cost)
    return replace(best, why=f"M = {p.rows}: each weight tile is decoded once for {best.block_m} of M{best.why}")


def describe_slabs(p: LinearProblem) -> dict[str, str]:
    """A GEMM by dequantized slabs of the weights in words, as `halfbyte explain` prints it."""
    step, total = slab_rows(p.width), sum(p.features)
    slabs = range(0, total, step)
    products = sum(rows > 0 for first in slabs for _, rows in slab_shares(p.features, first, step))
    launches, buffer = len(slabs) + products, 2 * min(step, total) * p.width
    return {
        "kernel": "cuBLAS, over parts of the weights that another kernel dequantizes",
        "parts": f"{len(slabs)} of at most {step} output channels, {launches} launches; {buffer / 1e6:.1f} MB of buffer",
        "schedule": f"M = {p.rows}: compute-bound, so dequantizing first is faster",
        "otherwise": "row_invariant and torch.use_deterministic_algorithms take the portable kernel",
    }
