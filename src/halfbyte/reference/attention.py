"""Attention over a cache, dense and in one piece: the specification of `decode_attention`.

For query i at position p_i and key j, in float64:

    s_ij = softcap(sm_scale * q_i . k_j) + slope_h * (j - p_i)       for starts <= j < min(length, ends), p_i - window < j <= p_i
    out_i = sum_j exp(s_ij) v_j / (sum_j exp(s_ij) + exp(sink_h))    lse_i = log sum_j exp(s_ij)

A query that sees no key gets out = 0 and lse = -inf. With `latent` k_j is v_j followed by the cached key.

Parts over disjoint sets of keys merge by their log-sum-exp (FlashDecoding; the softmax of a union):

    lse = log sum_s exp(lse_s)        out = sum_s exp(lse_s - lse) out_s        with sinks: out * exp(lse) / (exp(lse) + exp(sink))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfbyte.kv_buffer import AttentionOptions, DecodeCall, KVBuffer
from halfbyte.reference.dequantize import decode
from halfbyte.reference.hadamard import rotate_end


def decode_attention(c: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, Hq, L, Dv] in q's dtype, lse float32 [B, Hq, L]."""
    oldest, limit = oldest_visible(c.first_query, c.options), c.options.limit(c.lengths)
    q, k, v = _operands(c, oldest, limit)
    out, lse = attend(q, k, v, c.lengths, c.first_query, c.options)
    return out.to(c.q.dtype), lse.float()


def chunk_attention(c: DecodeCall, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q [1, Hq, L, D] are consecutive queries of one sequence, from position `start` on.

    out [1, Hq, L, Dv] in q's dtype, lse float32 [1, Hq, L]. Each query is computed over the keys that it sees alone, so its bits
    do not depend on the chunk.
    """
    q, lengths, options = c.q, c.lengths, c.options
    limit, starts = options.limit(lengths), 0 if options.starts is None else int(options.starts)
    oldest_of_all = torch.full_like(lengths, starts)
    wide, k, v = _operands(c, oldest_of_all, limit)
    plain = options._replace(starts=None, ends=None, window=None)
    out, lse = q.new_zeros(*q.shape[:3], c.values.dim), torch.full(q.shape[:3], -torch.inf, device=q.device)
    for i, position in enumerate(range(start, start + q.shape[2])):
        oldest = max(starts, 0 if options.window is None else position - options.window + 1)
        count = min(position + 1, int(limit)) - oldest
        if count > 0:
            keys_seen, values_seen = (x[:, :, oldest : oldest + count] for x in (k, v))
            where = lengths.new_tensor([count]), lengths.new_tensor([position - oldest])
            out[:, :, i : i + 1], lse[:, :, i : i + 1] = attend(wide[:, :, i : i + 1], keys_seen, values_seen, *where, plain)
    return out, lse


def _operands(c: DecodeCall, oldest: torch.Tensor, limit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys [B, H, T, query_dim] and values [B, H, T, Dv] in float64, keys and queries rotated where keys are."""
    k, v = (read(buffer, c.lengths, c.page_table, oldest, limit) for buffer in (c.keys, c.values))
    q = rotate_end(c.q.double(), c.keys.dim) if c.options.rotate_keys else c.q.double()
    return q, torch.cat([v, k], -1) if c.latent else k, v


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    query_start: torch.Tensor,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula above over plain tensors q [B, Hq, L, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv], in their own dtype.

    Query heads that share a KV head read its keys and values without a copy.
    """
    batch, kv_heads, count, _ = k.shape
    rows = q.shape[1] // kv_heads * q.shape[2]  # queries of a KV head: (Hq / Hkv) * L
    queries = query_start.view(-1, 1, 1, 1) + torch.arange(q.shape[2], device=q.device).view(1, 1, -1, 1)
    tokens = torch.arange(k.shape[2], device=q.device).view(1, 1, 1, -1)

    s = (q.reshape(batch, kv_heads, rows, q.shape[-1]) @ k.mT).view(*q.shape[:3], count) * options.sm_scale  # [B, Hq, L, T]
    if options.softcap is not None:
        s = options.softcap * torch.tanh(s / options.softcap)
    if options.alibi_slopes is not None:
        s = s + options.alibi_slopes.to(s.dtype).view(1, -1, 1, 1) * (tokens - queries)
    s = s.masked_fill(~visible(queries, tokens, lengths, options), -torch.inf)

    lse = torch.logsumexp(s, -1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)  # [B, Hq, L]
    total = lse
    if options.sinks is not None:
        total = torch.logaddexp(lse, options.sinks.to(s.dtype).view(1, -1, 1).expand_as(lse))
    p = torch.exp(s - total.masked_fill(total == -torch.inf, 0).unsqueeze(-1))
    out = p.view(batch, kv_heads, rows, count) @ v
    return out.view(*q.shape[:3], v.shape[-1]), lse


def visible(queries: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Which keys each query sees: queries [B, 1, L, 1] and tokens [1, 1, 1, T] are positions; bool [B, 1, L, T]."""
    mask = (tokens <= queries) & (tokens < options.limit(lengths).view(-1, 1, 1, 1))
    if options.window is not None:
        mask = mask & (tokens > queries - options.window)
    if options.starts is not None:
        mask = mask & (tokens >= options.starts.view(-1, 1, 1, 1))
    return mask


def oldest_visible(query_start: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Position of the oldest key that any query of a call sees, [B]: what lies before it may hold anything."""
    oldest = torch.zeros_like(query_start) if options.starts is None else options.starts
    return oldest if options.window is None else torch.maximum(oldest, query_start - options.window + 1)


def stored_tokens(tokens: torch.Tensor, limit: torch.Tensor, oldest: torch.Tensor) -> torch.Tensor:
    """Whether tokens [1, 1, n, 1] lie from a sequence's oldest visible one to the limit: bool [B, 1, n, 1]."""
    return (tokens >= oldest.view(-1, 1, 1, 1)) & (tokens < limit.view(-1, 1, 1, 1))


def read(
    buffer: KVBuffer,
    lengths: torch.Tensor,
    page_table: torch.Tensor | None,
    oldest: torch.Tensor | None = None,
    limit: torch.Tensor | None = None,
) -> torch.Tensor:
    """The dequantized tokens of a buffer, float64 [B, H, T, D]; 0 before `oldest` and from `limit` (default: the length) on."""
    codes, scales, offsets = (None if t is None else _unpage(t, page_table) for t in buffer.tensors()[:3])
    assert codes is not None
    batch, heads, capacity, _ = codes.shape
    if scales is None:
        values = codes.double()
    else:
        values = decode(codes, scales.double(), offsets, buffer.format, (batch, heads, capacity, buffer.dim))
    column = torch.arange(capacity, device=codes.device).view(1, 1, -1, 1)
    if buffer.tail is not None:
        token = buffer.tail_tokens(lengths)  # [B, rows]
        sequence, row = ((token >= 0) & (token < capacity)).nonzero(as_tuple=True)
        values.transpose(1, 2)[sequence, token[sequence, row]] = buffer.tail.transpose(1, 2)[sequence, row].double()
    oldest = torch.zeros_like(lengths) if oldest is None else oldest
    return torch.where(stored_tokens(column, lengths if limit is None else limit, oldest), values, 0.0)


def _unpage(t: torch.Tensor, page_table: torch.Tensor | None) -> torch.Tensor:
    """[P, H, rows, ...] -> [B, H, pages * rows, ...] ([P, rows] -> [B, pages * rows] for scales of whole tokens).

    Page numbers out of range are clamped; the caller masks rows beyond the lengths.
    """
    if page_table is None or t.ndim == 1:
        return t
    if t.shape[0] == 0:  # a pool without pages holds nothing to read
        t = t.new_zeros(1, *t.shape[1:])
    pages = t[page_table.clamp(0, t.shape[0] - 1).long()]  # [B, pages, (H,) rows, ...]
    return pages.flatten(1, 2) if t.ndim == 2 else pages.movedim(1, 2).flatten(2, 3)


def merge_states(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """outs [B, Hq, L, Dv] and lses [B, Hq, L], one per part; parts without visible keys (lse = -inf) contribute nothing."""
    lse = torch.logsumexp(torch.stack([part.float() for part in lses]), 0)
    finite = lse.masked_fill(lse == -torch.inf, 0)
    out = torch.zeros_like(outs[0], dtype=torch.promote_types(outs[0].dtype, torch.float32))
    for part, part_lse in zip(outs, lses, strict=True):
        weight = torch.exp(part_lse.float() - finite).unsqueeze(-1)
        out = out + part.masked_fill(weight == 0, 0) * weight  # masked elements may hold anything, NaN included
    if sinks is not None:
        share = torch.sigmoid(lse - sinks.float().view(1, -1, 1)).masked_fill(lse == -torch.inf, 0)
        out = out * share.unsqueeze(-1)
    return out.to(outs[0].dtype), lse
