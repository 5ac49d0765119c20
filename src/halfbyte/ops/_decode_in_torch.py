"""The levels of `decode_attention` in torch code, or compiled loops: a block of queries, or a sequence, at a time.

For results that do not depend on the rest of the batch: torch's GEMMs sum in another order for another batch, and levels split
tokens according to the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halfbyte.cpu import decode_attention as cpu
from halfbyte.kv_buffer import DecodeCall, KVBuffer
from halfbyte.reference import attention as reference

Results = tuple[torch.Tensor, torch.Tensor]

#: Queries of one pass in torch code; more are processed in blocks of so many, which bounds the memory of the scores.
QUERY_BLOCK = 128
#: The levels in torch code.
LEVELS: dict[str, Any] = {"cpu": cpu, "reference": reference}


def run(call: DecodeCall) -> Results:
    """(out, lse) by the level of the call."""
    if call.cu_seqlens_q is not None:
        return _attend_chunks(LEVELS[call.impl].chunk_attention, call, QUERY_BLOCK)
    return _attend_per_sequence(_attend, call) if call.deterministic_batch else _attend(call)


def _attend(c: DecodeCall) -> Results:
    attend: Callable[[DecodeCall], Results] = LEVELS[c.impl].decode_attention
    if c.q.shape[2] <= QUERY_BLOCK:
        return attend(c)
    parts = enumerate(c.q.split(QUERY_BLOCK, dim=2))
    pieces = [attend(c._replace(q=q, query_start=c.first_query + i * QUERY_BLOCK)) for i, q in parts]
    return torch.cat([out for out, _ in pieces], 2), torch.cat([lse for _, lse in pieces], 2)


def _attend_per_sequence(attend: Callable[[DecodeCall], Results], call: DecodeCall) -> Results:
    """`attend` of each sequence alone, on a contiguous copy of its queries and no more of the cache than it fills."""
    outs, lses = [], []
    for b, length in enumerate(call.lengths.tolist()):
        q = call.q[b : b + 1].clone(memory_format=torch.contiguous_format)
        out, lse = attend(_alone(call, b, length)._replace(q=q, query_start=_cut(call.query_start, slice(b, b + 1))))
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _attend_chunks(attend: Callable[[DecodeCall, int], Results], call: DecodeCall, most: int) -> Results:
    """Ragged queries: `attend` of at most `most` consecutive ones of a sequence (`reference.chunk_attention`) at a time."""
    assert call.cu_seqlens_q is not None
    results = out, lse = call.new_results()
    out.zero_()
    lse.fill_(-torch.inf)
    bounds = call.cu_seqlens_q.clamp(0, call.q.shape[2]).tolist()
    for b, (first, last, length) in enumerate(zip(bounds, bounds[1:], call.lengths.tolist(), strict=False)):
        own = _alone(call, b, length)
        for begin in range(first, last, most):
            chunk = slice(begin, min(begin + most, last))
            parts = attend(own._replace(q=call.q[:, :, chunk]), length - last + begin)
            for whole, part in zip(results, parts, strict=True):
                whole[:, :, chunk] = part
    return results


def _alone(call: DecodeCall, b: int, length: int) -> DecodeCall:
    """The call with the memory and the options of sequence b, and no more of the cache than it fills."""
    keys, table, options, own = call.keys, call.page_table, call.options, slice(b, b + 1)
    unit = keys.codes.shape[2] if table is not None else keys.format.token_block or 1
    units = -(-max(length, 0) // max(unit, 1))  # the host does not know lengths in a GPU's memory
    tokens = None if table is not None else units * unit
    return call._replace(
        keys=_of_sequence(keys, own, tokens),
        values=_of_sequence(call.values, own, tokens),
        lengths=call.lengths[own],
        page_table=None if table is None else table[own, :units],
        options=options._replace(starts=_cut(options.starts, own), ends=_cut(options.ends, own)),
    )


def _of_sequence(buffer: KVBuffer, own: slice, tokens: int | None) -> KVBuffer:
    """The part of a buffer that belongs to one sequence: its tail, and its first tokens (None: they are in a pool of pages)."""
    codes, scales, offsets, tail = buffer.tensors()
    if tokens is not None:
        count = tokens // (buffer.format.token_block or 1)
        codes = codes[own, :, :tokens]
        scales, offsets = (t if t is None or t.ndim == 1 else _rows(t, own, count) for t in (scales, offsets))
    return KVBuffer(buffer.format, codes, scales, offsets, _cut(tail, own), sink_tokens=buffer.sink_tokens)


def _rows(t: torch.Tensor, own: slice, count: int) -> torch.Tensor:
    """The first scales or offsets of a sequence: of whole tokens [B, T], else [B, H, T, ...]."""
    return t[own, :count] if t.ndim == 2 else t[own, :, :count]


def _cut(t: torch.Tensor | None, own: slice) -> torch.Tensor | None:
    return None if t is None else t[own]
