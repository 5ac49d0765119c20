"""Attention over a cache, a block of tokens at a time, in plain torch: the `cpu` level of `decode_attention`.

The cache is walked in blocks of n tokens with an online softmax: per query row a running maximum (`peak`), the sum of
exp(s - peak) (`total`) and the values weighted by it (`out`); a block that raises the maximum by r scales both by exp(-r). Only
one block is ever decoded, into a scratch buffer that stays in cache between being written and being multiplied.

A scale of whole tokens stays outside the products: it multiplies the score, or the weight, of its token. All other scales,
and the offsets, are applied to the decoded block. The G query heads of a KV head and the L queries share its block as
R = G * L rows of one matrix product.

`chunk_attention` gives a query the same bits in every chunk: matrix products have one shape, and a query one place in them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from halfbyte.cpu import attention_codes
from halfbyte.cpu.attention_codes import reads_codes
from halfbyte.cpu.codes import unpack_into
from halfbyte.cpu.sides import broadcast_scales
from halfbyte.device import SPINNING
from halfbyte.formats import Format
from halfbyte.kv_buffer import AttentionOptions, DecodeCall, KVBuffer
from halfbyte.reference.attention import oldest_visible, stored_tokens, visible
from halfbyte.reference.hadamard import rotate_end

#: Numbers in one decoded block: few enough for a CPU's last cache, enough to hide the cost of calling thirty operators.
BLOCK = 1 << 21
#: Queries and tokens of a matrix product in `chunk_attention`; blocks start at multiples of them.
CHUNK_QUERIES, CHUNK_TOKENS = 8, 256


def decode_attention(c: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, Hq, L, Dv] in q's dtype, lse float32 [B, Hq, L]."""
    if reads_codes(c):
        return attention_codes.decode_attention(c)
    span = _span(c, c.first_query, c.q.shape[2])
    return _walk(c, replace(span, step=_step(span, c)))


def chunk_attention(c: DecodeCall, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q [1, Hq, L, D] are consecutive queries of one sequence, from position `start` on.

    out [1, Hq, L, Dv] in q's dtype, lse float32 [1, Hq, L]. A query's bits depend on what it sees, on its position and on nothing
    else.
    """
    if reads_codes(c):
        return attention_codes.decode_attention(c._replace(query_start=torch.full_like(c.lengths, start)))
    (_, heads, length, dim), before = c.q.shape, start % CHUNK_QUERIES
    blocks = -(-(before + length) // CHUNK_QUERIES)
    padded = c.q.new_zeros(blocks * CHUNK_QUERIES, heads, dim)
    padded[before : before + length] = c.q[0].transpose(0, 1)
    query_start = torch.arange(blocks, device=c.q.device) * CHUNK_QUERIES + (start - before)  # [blocks]
    # No query of the chunk sees anything older, whatever those see that fill up the first block.
    c = c._replace(options=c.options._replace(starts=oldest_visible(query_start[:1] + before, c.options)))
    span = _span(c, query_start[:1] + before, length)
    span = replace(span, first=span.first // CHUNK_TOKENS * CHUNK_TOKENS, step=CHUNK_TOKENS, padded=True)
    by_block = padded.unflatten(0, (blocks, CHUNK_QUERIES)).transpose(1, 2)  # [blocks, Hq, queries, D]
    out, lse = _walk(c._replace(q=by_block, query_start=query_start), span)
    out, lse = (t.transpose(1, 2).flatten(0, 1)[before : before + length].transpose(0, 1)[None] for t in (out, lse))
    return out, lse


def _walk(c: DecodeCall, span: _Span) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Hq, L, D] over the memory of B sequences, or of one that all share (lengths [1]); query_start [B]."""
    q, keys, values, lengths, page_table, options = c.q, c.keys, c.values, c.lengths, c.page_table, c.options
    query_start, queries = c.first_query, q.shape[2]
    rows = _query_rows(q, keys.heads, keys.dim, options)  # [B, H, R, D]
    of_latents, rows = rows.split([rows.shape[-1] - keys.dim, keys.dim], -1)
    if q.is_cpu:
        SPINNING.step()
    positions = query_start.view(-1, 1, 1, 1) + torch.arange(queries, device=q.device).view(1, 1, -1, 1)  # [B, 1, L, 1]
    oldest, limit = oldest_visible(query_start, options), options.limit(lengths)
    oldest = oldest if len(oldest) == len(limit) else oldest.amin(0, keepdim=True)
    scratch = rows.new_empty(len(lengths) * rows.shape[1] * span.step * max(keys.dim, values.dim))

    peak = rows.new_full((*rows.shape[:3], 1), -torch.inf)  # [B, H, R, 1]
    total = torch.zeros_like(peak)
    out = rows.new_zeros((*rows.shape[:3], values.dim))
    for lo in range(span.first, span.last, span.step):
        hi = min(lo + span.step, span.last)
        size = span.step if span.padded else hi - lo
        tokens = torch.arange(lo, lo + size, device=q.device).view(1, 1, 1, -1)
        masked = not span.all_visible(lo, lo + size)

        block, scale = _load(keys, page_table, lo, hi, scratch)
        scale = _put_tail(keys, block, scale, lengths, lo)
        scores = _scores(rows, block, scale, size)
        stored = stored_tokens(tokens[..., : hi - lo].mT, limit, oldest) if masked else None
        if c.latent:
            block, scale = _load(values, page_table, lo, hi, scratch, stored)
            scale = _put_tail(values, block, scale, lengths, lo, stored)
            scores.add_(_scores(of_latents, block, scale, size))
        per_query = scores.view(q.shape[0], -1, queries, size)  # the same memory, [B, Hq, L, n]
        _adjust(per_query, positions, tokens, options)
        if masked:
            per_query.masked_fill_(~visible(positions, tokens, lengths, options), -torch.inf)

        rise = torch.maximum(peak, scores.amax(-1, keepdim=True))
        shift = rise.clamp_min(torch.finfo(rows.dtype).min)  # finite: -inf - -inf would be NaN
        p = scores.sub_(shift).exp_()
        keep = peak.sub_(shift).exp_()
        peak = rise
        total = total.mul_(keep).add_(p.sum(-1, keepdim=True))
        if not c.latent:
            block, scale = _load(values, page_table, lo, hi, scratch, stored)
            scale = _put_tail(values, block, scale, lengths, lo, stored)
        if scale is not None:
            p.mul_(_filled_scale(scale, size).mT)
        out = out.mul_(keep).add_(_product(p, _filled(block, size)))
    return _finish(q, out, peak, total, options)


def _scores(rows: torch.Tensor, block: torch.Tensor, scale: torch.Tensor | None, size: int) -> torch.Tensor:
    """Products of rows [B, H, R, D] with `size` tokens, of which a block [B, H, n, D] holds the first: [B, H, R, size]."""
    scores = _product(rows, _filled(block, size).mT)
    return scores if scale is None else scores.mul_(_filled_scale(scale, size).mT)


def _product(rows: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """rows [B, H, R, D] times block [B, H, D, n], or [1, H, D, n]: then one after the other, in the same shapes for any B."""
    return rows @ block if len(rows) == len(block) else torch.stack([part @ block[0] for part in rows])


def _filled(block: torch.Tensor, size: int) -> torch.Tensor:
    """A block [B, H, n, D] with zeros up to `size` tokens."""
    missing = size - block.shape[2]
    return torch.nn.functional.pad(block, (0, 0, 0, missing)) if missing else block


def _filled_scale(scale: torch.Tensor, size: int) -> torch.Tensor:
    """Its scales; one that all tokens share stays as it is."""
    return scale if scale.shape[2] == 1 else _filled(scale, size)


def _query_rows(q: torch.Tensor, heads: int, key_dim: int, options: AttentionOptions) -> torch.Tensor:
    """The queries of one KV head side by side, scaled, in the dtype to compute in: [B, H, G * L, D].

    That is fp32 for 16 bits. For fp32 it is float64: another order of fp32 sums than eager PyTorch's is as good on average, but
    off by more than twice its error in one small call of fifteen.
    """
    wide = q.float() if q.dtype.itemsize == 2 else q.double()
    if options.rotate_keys:
        wide = rotate_end(wide, key_dim)
    return (wide * options.sm_scale).reshape(q.shape[0], heads, q.shape[1] // heads * q.shape[2], q.shape[3])


def _adjust(scores: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, options: AttentionOptions) -> None:
    """Softcap and ALiBi, in place, on scores [B, Hq, L, n]."""
    if options.softcap is not None:
        scores.div_(options.softcap).tanh_().mul_(options.softcap)
    if options.alibi_slopes is not None:
        scores.addcmul_(options.alibi_slopes.to(scores.dtype).view(1, -1, 1, 1), (tokens - positions).to(scores.dtype))


def _finish(
    q: torch.Tensor, out: torch.Tensor, peak: torch.Tensor, total: torch.Tensor, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide by the softmax's sum, sinks included, and take the logarithm of the sum without them."""
    peak, total = peak.view(q.shape[:3]), total.view(q.shape[:3])
    lse = peak + total.log()
    if options.sinks is not None:
        floor = peak.clamp_min(torch.finfo(peak.dtype).min)
        total = total + (options.sinks.to(peak.dtype).view(1, -1, 1) - floor).exp()
    total = total.masked_fill(total == 0, 1)  # no key seen: out is 0
    return (out.view(*q.shape[:3], out.shape[-1]) / total.unsqueeze(-1)).to(q.dtype), lse.float()


# ------------------------------------------------------------------------------------------------ which tokens to read


@dataclass(frozen=True)
class _Span:
    """No query sees a key outside [first, last); every query sees every key of [clear_first, clear_last).

    `alignment`: blocks start at its multiples. `step`: tokens of a block; `padded`: of every block, with zeros beyond the last
    token.
    """

    first: int
    last: int
    alignment: int
    clear_first: int = 0
    clear_last: int = 0
    step: int = 1
    padded: bool = False

    def all_visible(self, lo: int, hi: int) -> bool:
        return self.clear_first <= lo and hi <= self.clear_last


def _span(c: DecodeCall, first_query: torch.Tensor, queries: int) -> _Span:
    """Of so many queries. Read off the lengths on a CPU; elsewhere, which would stop a GPU, all is visited and masked."""
    options, block = c.options, c.keys.format.token_block or 1
    alignment = block if c.page_table is None else c.keys.codes.shape[2]
    if 0 in (*c.keys.codes.shape[:2], len(c.lengths), alignment):
        return _Span(0, 0, 1)
    if c.lengths.device.type != "cpu":
        return _Span(0, c.capacity, alignment)
    stored, start = options.limit(c.lengths).tolist(), first_query.tolist()
    starts = [0] if options.starts is None else options.starts.tolist()
    window = max(start) + queries if options.window is None else options.window
    first = max(0, min(starts), min(start) - window + 1)
    last = min(max(stored), max(start) + queries)
    return _Span(
        first=first // alignment * alignment,
        last=min(c.capacity, -(-last // block) * block),
        alignment=alignment,
        clear_first=max(*starts, max(start) + queries - window),
        clear_last=min(*stored, min(start) + 1),
    )


def _step(span: _Span, c: DecodeCall) -> int:
    """Tokens of a block: a multiple of the alignment, at least one."""
    (batch, q_heads, queries, _), heads = c.q.shape, c.keys.heads
    per_token = batch * heads * max(c.keys.dim, c.values.dim, q_heads // heads * queries)
    wanted = min(BLOCK // max(per_token, 1), span.last - span.first)
    return max(1, -(-wanted // span.alignment)) * span.alignment


# -------------------------------------------------------------------------------------------------- blocks of a buffer


def _load(
    buffer: KVBuffer,
    page_table: torch.Tensor | None,
    lo: int,
    hi: int,
    scratch: torch.Tensor,
    stored: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens [lo, hi) of a buffer: numbers [B, H, n, D] in `scratch`, and the scale of whole tokens [B|1, H|1, n|1, 1].

    A scale that varies along a head is in the numbers already. `stored` [B, 1, n, 1] says which tokens can be seen. Given, all
    others read as 0, whatever is there: a weight of 0 would not hide a NaN.
    """
    fmt = buffer.format
    codes = _rows(buffer.codes, page_table, lo, hi)
    shape = (*codes.shape[:3], buffer.dim)
    block = scratch[: math.prod(shape)].view(shape)
    unpack_into(block, codes, fmt.code)
    if stored is not None and fmt.code.kind == "float":
        block.masked_fill_(~stored, 0)
    if buffer.scales is None:
        return block, None
    every = fmt.token_block or 1
    scale = _spread(_rows(buffer.scales, page_table, lo // every, hi // every), fmt, stored).to(block.dtype)
    if scale.shape[-1] == 1 and buffer.offsets is None:
        return block, scale
    if fmt.token_block:
        parts, axis = torch.unflatten(block, 2, (-1, every)), 3  # [B, H, n / every, every, D]
    else:
        parts, axis = torch.unflatten(block, 3, (scale.shape[-1], -1)), 4  # [B, H, n, groups, D / groups]
    parts.mul_(scale.unsqueeze(axis))
    if buffer.offsets is not None:
        # Added here and not once per head after the product: there s * code and m would cancel in long sums.
        offset = _spread(_rows(buffer.offsets, page_table, lo // every, hi // every), fmt, stored).to(block.dtype)
        parts.add_(offset.unsqueeze(axis))
    return block, None


def _spread(t: torch.Tensor, fmt: Format, stored: torch.Tensor | None) -> torch.Tensor:
    """`broadcast_scales`, 0 for tokens that no query can see, unless they are per tensor or per channel."""
    spread = broadcast_scales(t, fmt)
    return spread if stored is None or fmt.granularity in ("tensor", "channel") else spread.masked_fill(~stored, 0)


def _rows(t: torch.Tensor, page_table: torch.Tensor | None, lo: int, hi: int) -> torch.Tensor:
    """Rows [lo, hi) of the token axis: [B, (H,) hi - lo, ...]. A page number out of range reads some page, nothing beyond."""
    if t.ndim == 1:  # per tensor
        return t
    axis = 1 if t.ndim == 2 else 2
    if page_table is None:
        return t.narrow(axis, lo, hi - lo)
    size = t.shape[axis]
    numbers = page_table[:, lo // size : -(-hi // size)].clamp(0, t.shape[0] - 1)
    pages = torch.unflatten(t.index_select(0, numbers.flatten()), 0, numbers.shape)  # [B, pages, (H,) rows, ...]
    return pages.movedim(1, axis).flatten(axis, axis + 1).narrow(axis, lo % size, hi - lo)


def _put_tail(
    buffer: KVBuffer,
    block: torch.Tensor,
    scale: torch.Tensor | None,
    lengths: torch.Tensor,
    lo: int,
    stored: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Put tokens of the 16-bit tail into a block from token `lo` on, in place, where they are `stored` (as for `_load`).

    Returns the scales of its tokens, which are 1 of these.
    """
    if buffer.tail is None:
        return scale
    token, count = buffer.tail_tokens(lengths), block.shape[2]  # [B, rows]
    here = (token >= lo) & (token < lo + count)
    if stored is not None:
        here &= stored[:, 0, :, 0].gather(1, (token - lo).clamp(0, count - 1))
    sequence, row = here.nonzero(as_tuple=True)
    if not sequence.numel():
        return scale
    at = token[sequence, row] - lo
    block.transpose(1, 2)[sequence, at] = buffer.tail.transpose(1, 2)[sequence, row].to(block.dtype)
    if scale is None:
        return None
    scale = scale.expand(block.shape[0], scale.shape[1], count, 1).clone()
    scale.transpose(1, 2)[sequence, at] = 1
    return scale
