"""A counting sort of pairs of a token and an expert by expert, in three launches, few in one; pairs of one expert keep their order.

    place(p) = pairs of smaller experts + pairs of the same expert in blocks before + such pairs before p in its block

The first launch counts the pairs of each expert in each block, the second adds up what lies in blocks before, the third adds up the
pairs of smaller experts and writes. A number that is no expert counts as E, which comes last. It also lists blocks of each
expert's pairs, if asked to: how many there are; then for each its expert, that one's first block, its first pair, and the number
behind its last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halfbyte.kernels.common.launch import Launch

#: Pairs of a block, and with how many each is compared at a time; blocks and experts that a program of the second launch adds up.
BLOCK, _AT_A_TIME, _ROWS, _COLUMNS = 256, 32, 256, 32


@triton.jit
def _expert(ids, p, S, E):
    """The expert of pair p: E for a number that is none, E + 1 behind the last pair."""
    expert = tl.load(ids + p, mask=p < S, other=0).to(tl.int64)
    expert = tl.where((expert >= 0) & (expert < E), expert, E)
    return tl.where(p < S, expert, E + 1).to(tl.int32)


@triton.jit(do_not_specialize=["S", "E"])
def _count(ids, counts, S, E, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """counts [blocks, BINS]: how many pairs of a block each expert has."""
    expert = _expert(ids, tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), S, E)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), tl.histogram(expert, BINS))


@triton.jit(do_not_specialize=["blocks"])
def _add(counts, totals, blocks, BINS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """counts: how many pairs each expert has in blocks before; totals [BINS]: in all of them."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros([COLUMNS], tl.int32)
    for first in tl.range(0, blocks, ROWS):
        row = first + tl.arange(0, ROWS)
        at = counts + row[:, None] * BINS + column[None, :]
        here = tl.load(at, mask=(row < blocks)[:, None], other=0)
        tl.store(at, before[None, :] + tl.cumsum(here, 0) - here, mask=(row < blocks)[:, None])
        before += tl.sum(here, 0)
    tl.store(totals + column, before)


@triton.jit(do_not_specialize=["S", "E"])
def _place(
    ids,
    counts,
    totals,
    order,
    places,
    starts,
    experts,
    blocks,
    S,
    E,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    AT_A_TIME: tl.constexpr,
    OF: tl.constexpr,
):
    """Each pair of a block in its place; the first program writes where experts begin, and their blocks of OF pairs."""
    base = tl.program_id(0) * BLOCK
    p, bins = base + tl.arange(0, BLOCK), tl.arange(0, BINS)
    expert = _expert(ids, p, S, E)
    total = tl.histogram(expert, BINS) if counts is None else tl.load(totals + bins)
    start = tl.cumsum(total, 0) - total
    if tl.program_id(0) == 0:
        tl.store(starts + bins, start, mask=bins <= E)
        if blocks is not None:
            own = tl.where(bins < E, tl.cdiv(total, OF), 0)
            first = tl.cumsum(own, 0) - own
            tl.store(blocks, tl.sum(own))
            for i in tl.range(0, tl.max(own)):
                at = blocks + 4 * (1 + first + i)
                tl.store(at, bins, mask=i < own)
                tl.store(at + 1, first, mask=i < own)
                tl.store(at + 2, start, mask=i < own)
                tl.store(at + 3, start + total, mask=i < own)
    place = tl.gather(start, expert, 0)
    if counts is not None:
        place += tl.load(counts + tl.program_id(0) * BINS + expert)
    for first in tl.range(0, BLOCK, AT_A_TIME):
        other = base + first + tl.arange(0, AT_A_TIME)
        same = (_expert(ids, other, S, E)[None, :] == expert[:, None]) & (other[None, :] < p[:, None])
        place += tl.sum(same.to(tl.int32), 1)
    tl.store(order + place, p, mask=p < S)
    tl.store(places + p, place, mask=p < S)
    tl.store(experts + place, expert, mask=p < S)


def bins(experts: int) -> int:
    """Columns of `counts`: the experts, none, and what lies behind the last pair."""
    return max(_COLUMNS, triton.next_power_of_2(experts + 2))


def launches(
    ids: torch.Tensor,
    order: torch.Tensor,
    places: torch.Tensor,
    starts: torch.Tensor,
    experts: torch.Tensor,
    table: torch.Tensor | None = None,
    block: int = 0,
) -> list[Launch]:
    """ids [S], integers; the others int32: order, places and experts [S], starts [E + 1].

    table [at least 1 + the blocks of `block` pairs of an expert, 4]: the list of these.
    """
    pairs, count = len(ids), len(starts) - 1
    blocks, columns = -(-pairs // BLOCK), bins(count)
    counts, totals, some = None, None, list[Launch]()
    if blocks > 1:
        counts, totals = order.new_empty(blocks, columns), order.new_empty(columns)
        some = [
            Launch(_count, (blocks,), (ids, counts, pairs, count, BLOCK, columns), {"num_warps": 4}),
            Launch(_add, (columns // _COLUMNS,), (counts, totals, blocks, columns, _ROWS, _COLUMNS), {"num_warps": 8}),
        ]
    arguments = (ids, counts, totals, order, places, starts, experts, table, pairs, count, BLOCK, columns, _AT_A_TIME, block)
    return [*some, Launch(_place, (blocks,), arguments, {"num_warps": 4})]
