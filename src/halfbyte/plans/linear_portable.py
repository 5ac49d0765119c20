"""How the portable Triton level of `linear` cuts a product into programs: pure functions, no device is asked anything.

y^T [N, M] = W [N, K] x^T: a program takes `block_n` weight rows and `block_m` rows of x, and walks its share of K in steps of
`block_k`. Up to 64 rows reading the weight is what takes time, and K is split until all multiprocessors read. Beyond, it is the
tensor cores and the decoding in front of them: a tile of the weight is decoded for as many rows of x as registers hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from halfbyte.formats import Format

#: Rows of x up to which scales that 16 bits do not hold exactly multiply fp32 sums instead of codes.
EXACT_ROWS = 64
#: Rows of a tile up to which the kernel reads columns of x one by one: strided, or in the order of the weight.
GATHERED_ROWS = 16
#: Where the same bits are asked for whatever the number of rows: rows of a tile, and programs over N and K.
_INVARIANT_ROWS, _INVARIANT_PROGRAMS = 64, 256
#: The most partial results that are added for one number, and the fewest columns of one.
_MOST_SPLITS, _FEWEST_COLUMNS = 32, 512
#: What a step costs besides its multiply-adds, in rows of x: decoding the weights. And, in steps: a tile, a partial result.
_DECODING, _TILE, _PARTIAL = 80, 8, 3
#: Rows of x from which on it is faster to dequantise a part of a weight and multiply by cuBLAS: in general, and where every 16
#: codes have a scale of their own, which costs the portable kernel most. And bytes of such a part: smaller ones were up to half
#: slower, as cuBLAS fills the GPU with fewer tiles, although L2 would hold them.
_EXPANDED_ROWS, _EXPANDED_ROWS_16, _SLAB_BYTES = 257, 128, 128 << 20


@dataclass(frozen=True)
class LinearTiles:
    """One launch over tiles of `block_n` weight rows and `block_m` rows of x, each walked by `splits` programs.

    Split s takes `share` steps of `block_k` columns, from step s * share on; none is without any. `fold`: scales of groups multiply
    the codes, in 16 bits; else fp32 sums of a step, whose columns then share a scale (where a step holds more groups, codes again).
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


def linear_tiles(
    weights: Sequence[tuple[Format, int]],
    *,
    rows: int,
    width: int,
    num_sms: int,
    capability: tuple[int, int] = (8, 0),
    row_invariant: bool = False,
) -> LinearTiles:
    """Tiles for x [rows, width] and weights of these formats and out features, on `num_sms` multiprocessors.

    `row_invariant`: from the weights alone, neither from `rows` nor from the device.
    """
    features = [n for _, n in weights]
    if rows > EXACT_ROWS and not row_invariant:
        return _many_rows(features, rows, width, num_sms, capability)
    block_m = _INVARIANT_ROWS if row_invariant else max(16, 1 << (rows - 1).bit_length())
    block_k = min([128, *(fmt.group_size(width) for fmt, _ in weights if not folds_exactly(fmt))])
    block_k = 1 << max(5, block_k.bit_length() - 1)
    tiles = sum(-(-n // 64) for n in features)
    steps = -(-width // block_k)
    wanted = _INVARIANT_PROGRAMS if row_invariant else 4 * num_sms
    splits = max(1, min(wanted // max(tiles, 1), steps * block_k // _FEWEST_COLUMNS, _MOST_SPLITS))
    why = "a function of N and K alone" if row_invariant else f"{rows} rows: the weight is read once"
    found = LinearTiles(64, block_m, block_k, 1, steps, False, 4, 4 if block_k > 32 else 6, why)
    return _split(found, splits)


def expanded(formats: Sequence[Format], rows: int, width: int) -> bool:
    """Whether a product of so many rows is faster by dequantised parts of weights [N, width] of these formats."""
    fine = any(fmt.group_size(width) < 32 for fmt in formats)
    return rows >= (_EXPANDED_ROWS_16 if fine else _EXPANDED_ROWS)


def slab_rows(width: int) -> int:
    """Rows of a weight that are dequantised at a time: few enough for their memory, and aligned, for cuBLAS."""
    return max(256, _SLAB_BYTES // (2 * width) // 256 * 256)


def folds_exactly(fmt: Format) -> bool:
    """Whether codes of this format times their stored scale are exact in 16 bits: E8M0 is a power of two, E4M3 has four bits."""
    return fmt.scale is not None and fmt.scale.dtype in ("e8m0", "e4m3")


def _split(tiles: LinearTiles, splits: int) -> LinearTiles:
    """The same work by about so many programs a tile, each with a share of the steps."""
    share = -(-tiles.share // splits)
    return replace(tiles, splits=-(-tiles.share // share), share=share, why=f"{tiles.why}, K in {-(-tiles.share // share)} parts")


def _many_rows(features: list[int], rows: int, width: int, num_sms: int, capability: tuple[int, int]) -> LinearTiles:
    """The shape whose waves over the GPU cost the least."""

    def cost(tiles: LinearTiles) -> float:
        programs = sum(-(-n // tiles.block_n) for n in features) * -(-rows // tiles.block_m) * tiles.splits
        steps = tiles.share + _TILE + (_PARTIAL * tiles.splits if tiles.splits > 1 else 0)
        return -(-programs // num_sms) * tiles.block_n * (tiles.block_m + _DECODING) * steps

    steps = -(-width // 64)
    wide = 9 <= capability[0] <= 10  # the registers of asynchronous products, and shared memory for their operands
    whole = [LinearTiles(128, m, 64, 1, steps, True, 8, 3) for m in ((64, 128, 256) if wide else (64, 128))]
    shapes = [_split(shape, n) for shape in whole for n in (1, 2, 4, 8) if n == 1 or steps >= 8 * n]
    best = min(shapes, key=cost)
    return replace(best, why=f"{rows} rows: each weight tile is decoded for {best.block_m} of them{best.why}")
