"""Prompts in blocks: new tokens beyond what a tuned kernel holds become sequences of their own, over the same memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from halfbyte.kv_buffer import DecodeCall, KVBuffer
from halfbyte.plans.decode_attention import MOST_SEQUENCES, MOST_TOKENS

Tensors = tuple[torch.Tensor, ...]
#: From a call to its results.
Run = Callable[[DecodeCall], Tensors]


def run_in_blocks(c: DecodeCall, queries: int, results: Tensors, run: Run) -> None:
    """Results of blocks of `queries` new tokens; with `run`, of calls that hold blocks as sequences."""
    for piece, parts in blocks_of(c, queries, results):
        for whole, part in zip(parts, run(piece), strict=True):
            put(whole, part)


def run_ragged(c: DecodeCall, queries: int, results: Tensors, run: Run) -> None:
    """The same of ragged queries; with `deterministic_batch` in several launches, if needed."""
    wholes, others = [t[0].transpose(0, 1) for t in results], (0.0, -math.inf)
    if not c.deterministic_batch:
        blocks, places = blocks_of_ragged(c, queries)
        for whole, part, otherwise in zip(wholes, run(blocks), others, strict=True):
            whole.copy_(from_blocks(part, places, otherwise))
        return
    for whole, otherwise in zip(wholes, others, strict=True):
        whole.fill_(otherwise)
    for piece, tokens in parts_of_ragged(c, queries):
        blocks, places = blocks_of_ragged(piece, queries)
        for whole, part in zip(wholes, run(blocks), strict=True):
            rows = whole[tokens]
            rows.copy_(torch.where(places[2].view(-1, *[1] * (rows.ndim - 1)), rows, from_blocks(part, places, 0.0)))


def blocks_of(c: DecodeCall, queries: int, results: Tensors) -> Iterator[tuple[DecodeCall, Tensors]]:
    """Calls of blocks of `queries` new tokens, each with the part of the `results` that its own belong into (`put`).

    A call has the blocks of several sequences, or some of those of one, as many as the kernel looks through.
    """
    (batch, _, length, _), o, table = c.q.shape, c.options, c.page_table
    count = -(-length // queries)
    missing = count * queries - length
    q = torch.nn.functional.pad(c.q, (0, 0, 0, missing)) if missing else c.q
    q = q.unflatten(2, (count, queries)).transpose(1, 2)  # [B, blocks, Hq, queries, D]
    on_device = c.lengths.to(q.device, non_blocking=True)  # which may be in pinned memory of the host
    first = on_device - length if c.query_start is None else c.query_start
    query_start = first[:, None] + torch.arange(0, count * queries, queries, dtype=torch.int32, device=q.device)
    most = most_sequences(c.keys.heads, c.capacity)
    some = max(1, most // count)
    for b, begin in itertools.product(range(0, batch, some), range(0, count, most)):
        here, those = slice(b, b + some), slice(begin, begin + most)
        blocks = q[here, those].flatten(0, 1)
        if blocks.shape[1] * blocks.stride(1) >= 2**31:
            blocks = blocks.contiguous()
        n = len(query_start[b, those])
        lengths, starts, ends = (None if t is None else t[here].repeat_interleave(n) for t in (on_device, o.starts, o.ends))
        keys, values = (_of_sequences(p, here, table is not None) for p in (c.keys, c.values))
        assert lengths is not None
        call = c._replace(
            q=blocks,
            keys=keys,
            values=values,
            lengths=lengths,
            query_start=query_start[here, those].flatten(),
            page_table=None if table is None else table[here].repeat_interleave(n, 0),
            options=o._replace(starts=starts, ends=ends),
        )
        yield call, tuple(whole[here, :, begin * queries :] for whole in results)


def most_sequences(heads: int, capacity: int) -> int:
    """Sequences, or blocks of them, that one launch of a tuned kernel takes."""
    return max(1, min(MOST_SEQUENCES, MOST_TOKENS // max(1, heads * capacity)))


def parts_of_ragged(c: DecodeCall, queries: int) -> Iterator[tuple[DecodeCall, slice]]:
    """Calls of some sequences and some of the tokens each, so few that the number of their blocks never changes the kernel."""
    tokens, batch = c.q.shape[2], len(c.lengths)
    most = most_sequences(c.keys.heads, c.capacity)
    some = max(1, min(batch, most // 2))
    many = max(1, most - some) * queries
    for b, first in itertools.product(range(0, batch, some), range(0, tokens, many)):
        here, those = slice(b, b + some), slice(first, first + many)
        yield part_of_ragged(c, here, those), those


def part_of_ragged(c: DecodeCall, here: slice, those: slice) -> DecodeCall:
    """The call of these sequences and of these tokens, which may be no sequence's."""
    assert c.cu_seqlens_q is not None
    first, count = those.start, min(those.stop, c.q.shape[2]) - those.start
    bounds, lengths, o = c.cu_seqlens_q[here.start : here.stop + 1], c.lengths[here], c.options
    starts, ends = (None if t is None else t[here] for t in (o.starts, o.ends))
    return c._replace(
        q=c.q[:, :, those],
        lengths=lengths,
        query_start=lengths - bounds.diff() + (first - bounds[:-1]).clamp_min(0),
        page_table=None if c.page_table is None else c.page_table[here],
        cu_seqlens_q=(bounds - first).clamp(0, count),
        options=o._replace(starts=starts, ends=ends),
    )


def blocks_of_ragged(c: DecodeCall, queries: int) -> tuple[DecodeCall, Tensors]:
    """Ragged queries over pages as blocks of `queries` tokens, each a sequence of its own; and the places of tokens.

    Sequence b begins with block cu_seqlens_q[b] // queries + b, so the host knows how many blocks there are at most. Tokens before
    cu_seqlens_q[0], which is not 0 in a part of a call, are no blocks', and padding as those behind the last one are.
    """
    assert c.cu_seqlens_q is not None and c.page_table is not None
    tokens, batch, device = c.q.shape[2], len(c.lengths), c.q.device
    bounds = c.cu_seqlens_q.long().clamp(0, tokens).cummax(0).values  # [B + 1], whatever it holds
    counts, token = bounds.diff(), torch.arange(tokens, device=device)
    first = bounds[:-1] // queries + torch.arange(batch, device=device)  # [B]: of each sequence the first block
    number = torch.arange(tokens // queries + batch, device=device)
    owner = torch.searchsorted(first, number, right=True) - 1  # [blocks]
    begin = (number - first[owner]) * queries  # in its sequence
    place = begin[:, None] + torch.arange(queries, device=device)
    real = (place >= 0) & (place < counts[owner, None])  # [blocks, queries]
    q = c.q[0, :, torch.where(real, bounds[owner, None] + place, 0)]  # [Hq, blocks, queries, D]
    starts, ends = (None if t is None else t[owner] for t in (c.options.starts, c.options.ends))
    call = c._replace(
        q=q.masked_fill_(~real[:, :, None], 0).transpose(0, 1),
        lengths=torch.where(real[:, 0], c.lengths[owner], 0),
        query_start=((c.lengths - counts if c.query_start is None else c.query_start)[owner] + begin).int(),
        page_table=c.page_table[owner],
        options=c.options._replace(starts=starts, ends=ends),
        cu_seqlens_q=None,
        max_query_len=0,
    )
    sequence = (torch.searchsorted(bounds, token, right=True) - 1).clamp(0, batch - 1)
    inside = (token - bounds[sequence]).clamp_min(0)
    return call, (first[sequence] + inside // queries, inside % queries, (token < bounds[0]) | (token >= bounds[-1]))


def from_blocks(result: torch.Tensor, places: Tensors, otherwise: float) -> torch.Tensor:
    """Of a result [blocks, Hq, queries, ...] what belongs to each token, [T, Hq, ...]; of padding `otherwise`.

    places: of each token its block, its place in it, and whether it is padding.
    """
    block, place, padding = places
    rows = result[block.clamp_max(len(result) - 1), :, place]
    return rows.masked_fill_(padding.view(-1, *[1] * (rows.ndim - 1)), otherwise)


def put(into: torch.Tensor, blocks: torch.Tensor) -> None:
    """blocks [B * n, Hq, tokens of a block, ...] into [B, Hq, L, ...]; what the last one has too much is left out."""
    blocks = blocks.unflatten(0, (into.shape[0], -1))
    size, length = blocks.shape[3], min(into.shape[2], blocks.shape[1] * blocks.shape[3])
    whole = length // size
    into[:, :, : whole * size].unflatten(2, (whole, size)).copy_(blocks[:, :whole].transpose(1, 2))
    if whole * size < length:
        into[:, :, whole * size : length].copy_(blocks[:, whole, :, : length - whole * size])


def _of_sequences(buffer: KVBuffer, some: slice, paged: bool) -> KVBuffer:
    """The part of a buffer that belongs to some sequences; pages are shared, and page tables select them."""
    tensors = [t if t is None or t.ndim == 1 or (paged and t is not buffer.tail) else t[some] for t in buffer.tensors()]
    return KVBuffer(buffer.format, *cast(Any, tensors), sink_tokens=buffer.sink_tokens)
