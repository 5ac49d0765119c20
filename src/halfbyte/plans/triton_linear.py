"""How the portable Triton level of `linear` cuts a product into programs: pure functions, no device is asked anything.

y^T [N, M] = W [N, K] x^T: a program takes `block_n` weight rows and `block_m` rows of x, and walks its share of K in steps of
`block_k`. Up to 64 rows the weight's bytes are what it costs, and K is split until all multiprocessors read; beyond, the tensor
cores are, and each weight tile is decoded for as many rows of x as registers hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from halfbyte.formats import Format

#: Rows of x up to which scales multiply fp32 sums instead of codes.
EXACT_ROWS = 64
#: Rows of a tile, and programs over N x K, where the same bits are asked for whatever the number of rows.
_INVARIANT_ROWS, _INVARIANT_PROGRAMS = 64, 256
#: The most partial results that are added for one number.
_MOST_SPLITS = 32
#: What decoding a number costs, in multiply-adds of the tensor cores.
_DECODING = 80


@dataclass(frozen=True)
class LinearTiles:
    """One launch over tiles of `block_n` weight rows and `block_m` rows of x, each walked by `splits` programs.

    Split s takes `share` steps of `block_k` columns, from step s * share on. `fold`: scales of groups multiply the codes, in 16 bits;
    else fp32 sums over `block_k` columns, which are then those of one scale. `why`: the choice in words.
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
    weights: tuple[tuple[Format, int], ...], *, rows: int, width: int, processors: int, row_invariant: bool = False
) -> LinearTiles:
    """Tiles for x [rows, width] and weights of these formats and numbers of out features, on `processors` multiprocessors.

    `row_invariant`: nothing depends on `rows` or on the device.
    """
    groups = [fmt.group_size(width) if fmt.granularity == "group" else 0 for fmt, _ in weights]
    if rows > EXACT_ROWS and not row_invariant:
        return _many_rows(tuple(n for _, n in weights), groups, rows, width, processors)
    block_m = _INVARIANT_ROWS if row_invariant else max(16, 1 << (rows - 1).bit_length())
    fold = any(0 < g < 32 for g in groups)
    block_k = 64 if fold else min([128, *(g for g in groups if g)])
    tiles = sum(-(-n // 64) for _, n in weights) * -(-(1 if row_invariant else rows) // block_m)
    wanted = _INVARIANT_PROGRAMS if row_invariant else 4 * processors
    splits, share = _splits(tiles, wanted, -(-width // block_k), max(1, 512 // block_k))
    why = f"{rows} rows: the weight is read once, K in {splits} parts" if not row_invariant else "a function of N and K alone"
    return LinearTiles(64, block_m, block_k, splits, share, fold, 4, 4 if block_k > 32 else 6, why)


def _splits(tiles: int, wanted: int, steps: int, least: int) -> tuple[int, int]:
    """(splits, steps of each) so that tiles * splits comes near `wanted`, with `least` steps in each, and none without any."""
    splits = max(1, min(wanted // max(tiles, 1), steps // least, _MOST_SPLITS))
    share = max(1, -(-steps // splits))
    return max(1, -(-steps // share)), share


def _many_rows(features: tuple[int, ...], groups: list[int], rows: int, width: int, processors: int) -> LinearTiles:
    """The shape whose waves over the GPU take the least: multiply-adds of a tile and the decoding of its weight rows."""

    def cost(tiles: LinearTiles) -> float:
        count = sum(-(-n // tiles.block_n) for n in features) * -(-rows // tiles.block_m) * tiles.splits
        at_once = processors * (2 if tiles.block_n * tiles.block_m <= 128 * 128 else 1)
        waves = max(count / at_once, 1.0) if count % at_once == 0 else count // at_once + 1
        return waves * (at_once // processors) * tiles.block_n * (tiles.block_m + _DECODING) * tiles.share

    least = min([64, *(g for g in groups if g >= 32)])
    fold = any(groups)
    steps = -(-width // 64)
    shapes = [LinearTiles(128, m, 64, 1, steps, fold, 8, 4 if m < 256 else 3) for m in (64, 128, 256)]
    shapes += [replace(s, splits=n, share=-(-steps // n)) for s in shapes for n in (2, 4) if steps >= 8 * n]
    best = min(shapes, key=cost)
    assert least
    return best
