"""How an append is divided into programs: pure functions of formats and sizes."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from halfbyte.formats import KV_FORMATS
from halfbyte.plans.compiled_for import CompiledFor
from halfbyte.plans.kv_codec import KVCodec, kv_codec, padded

#: Elements of a tile, 4 or 8 per thread. A warp that has one head of 128 reduces it in one instruction.
TILE = 4096
#: Largest heads that a program multiplies by a matrix, which it holds. Of up to FEW rows of smaller heads, each is a program's.
LARGEST, FEW, ROWS = 256, 16, 16


@dataclass(frozen=True)
class Head:
    """How heads of k, v or q are read: compile-time constants.

    dim, padded   size of a head, and the power of two that holds it
    rotary        elements that are rotated by position, the first of a head; 0: none
    interleaved   each with its neighbor
    aligned       elements per aligned run of a half of them, for vectorized reads of the other half
    hadamard      rotate in blocks of 2^hadamard, and multiply by `factor`; 0: do not
    norm, eps     RMSNorm, applied first, of a kind of `halfbyte.reference.block.KINDS`; "": none
    queries       the norm's weight is that of q
    """

    dim: int
    padded: int
    rotary: int = 0
    interleaved: bool = False
    aligned: int = 1
    hadamard: int = 0
    factor: float = 1.0
    norm: str = ""
    eps: float = 0.0
    queries: bool = False


@dataclass(frozen=True)
class AppendSpec(CompiledFor):
    """What the append kernels are compiled for.

    keys, values   the formats
    k, v, q        the heads
    tokens, heads  of a tile; it passes `passes` times over the heads
    by_head        a tile has tokens of several sequences and one head, which is multiplied by a matrix; then `query_rows` of q
    page           tokens of a page; 0: contiguous memory
    advance        the program that writes a sequence's tokens also advances its length
    sinks, recent  tokens that stay in 16 bits
    through        there may be more new tokens than recent ones, so that some leave the window at once
    """

    keys: KVCodec
    values: KVCodec
    k: Head
    v: Head
    q: Head
    tokens: int
    heads: int
    passes: int
    page: int
    advance: bool
    use_pdl: bool
    sinks: int
    recent: int
    through: bool
    by_head: bool = False
    query_rows: int = 0


@dataclass(frozen=True)
class AppendPlan:
    """The programs of an append.

    tiles, blocks        programs per sequence, or of all sequences per head (`by_head`); per head of a sequence, for blocks of
                         tokens (0: keys are not per channel)
    warps, block_warps   per program
    """

    spec: AppendSpec
    tiles: int
    blocks: int
    warps: int
    block_warps: int

    @property
    def floats(self) -> int:
        """Of workspace: one where there are counters."""
        return min(1, self.counters)

    @property
    def counters(self) -> int:
        """One for the programs of all heads that share sequences, the last of which advances their lengths."""
        return self.tiles if self.spec.by_head and self.spec.advance else 0

    @property
    def launches(self) -> int:
        """Where no scale is measured."""
        return 2 if self.blocks else 1


@functools.lru_cache(4096)
def append_plan(
    formats: tuple[str, str],
    heads: int,
    tokens: int,
    dims: tuple[int, int],
    page: int,
    window: tuple[int, int],
    hadamard: bool,
    rotary: tuple[int, bool],
    advance: bool,
    use_pdl: bool,
    norm: tuple[str, float] = ("", 0.0),
    rows: int = 0,
) -> AppendPlan:
    """`formats`, `dims`: of keys and of values. `page`: its tokens; 0: contiguous memory. `window`: sink and recent tokens in 16
    bits. `rotary`: of `Head`, and whether interleaved. `advance`: if a sequence has one program. `norm`: its kind and eps. `rows`:
    tokens of all sequences, of keys that are multiplied by a matrix (`takes_matrix`); 0: of others."""
    (dim, value_dim), (keys, values) = dims, (kv_codec(KV_FORMATS[name]) for name in formats)
    count, some, passes, warps = _tiling(heads, tokens, max(map(_row, dims)))
    tiles, block, head = -(-tokens // count), dim & -dim, head_of(dim, rotary, norm)
    if rows:
        count, some, passes, warps = 1 if rows <= FEW and head.padded < LARGEST else ROWS, 1, 1, max(1, head.padded // 16)
        tiles, advance = -(-rows // count), advance and count % tokens == 0
    q = replace(head, queries=bool(norm[0]))
    k = replace(head, hadamard=block.bit_length() - 1, factor=block**-0.5) if hadamard else head
    v = Head(value_dim, _row(value_dim))
    through = tokens > window[1]
    advance = advance and (tiles == 1 or rows > 0)
    spec = AppendSpec(
        keys, values, k, v, q, count, some, passes, page, advance, use_pdl, *window, through, rows > 0, ROWS if rows else 0
    )
    blocks = -(-(keys.block - 1 + tokens) // keys.block) if keys.block else 0
    return AppendPlan(spec, tiles, blocks, warps, _warps(keys.block * k.padded, 256, 8))


def takes_matrix(formats: tuple[str, str], dims: tuple[int, int]) -> bool:
    """Whether programs of single heads quantize such keys and values, and hold products of such heads."""
    spreads = {kv_codec(KV_FORMATS[name]).spread for name in formats}
    return spreads <= {"none", "head", "group"} and max(map(_row, dims)) <= LARGEST


def head_of(dim: int, rotary: tuple[int, bool], norm: tuple[str, float]) -> Head:
    """A head that is rotated by position and normalized like this."""
    half = rotary[0] // 2
    return Head(dim, _row(dim), *rotary, max(1, min(16, half & -half)), norm=norm[0], eps=norm[1])


def _tiling(heads: int, tokens: int, row: int) -> tuple[int, int, int, int]:
    """(tokens, heads, passes over the heads, warps) of a program."""
    whole = padded(heads)
    some = max(1, min(whole, TILE // row))
    count = max(1, min(padded(tokens), TILE // (some * row))) if some == whole else 1
    return count, some, -(-heads // some), _warps(count * some * row, 128, 16)


def _warps(elements: int, each: int, most: int) -> int:
    """Warps of a program: one for every `each` elements, at most `most`."""
    return max(1, min(most, elements // each))


def _row(dim: int) -> int:
    return max(16, padded(dim))
