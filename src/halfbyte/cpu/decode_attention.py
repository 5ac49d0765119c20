"""Attention over a cache, a block of tokens at a time, in plain torch: the `cpu` level of `decode_attention`.

The cache is walked in blocks of n tokens with an online softmax: per query row a running maximum m, the sum l of exp(s - m), and
the weighted values a; a new block rescales l and a by exp(m_old - m_new). Only one block is ever decoded, into one buffer that
stays in cache between being written and being multiplied.

A stored number is x = scale * unit + offset, and what does not vary along a head stays outside the products:

    q . k_j        = scale_j (q . unit_j) + sum_g offset_jg (sum of q over the dims of group g)
    sum_j p_j v_j  = sum_j (p_j scale_j) unit_j + sum_j p_j offset_jg                            for the dims of group g

Scales of groups of dims, and of channels, multiply the decoded block instead. The G query heads of a KV head and the L queries
share its block as R = G * L rows of one matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.cpu.codes import unpack_into
from halfbyte.formats import Format
from halfbyte.planes import AttentionOptions, Plane
from halfbyte.reference.attention import visible
from halfbyte.reference.hadamard import rotate

#: Numbers in one decoded block: few enough for the caches of a CPU, enough to hide the cost of calling some thirty operators.
BLOCK = 1 << 19


def decode_attention(
    q: torch.Tensor,
    keys: Plane,
    values: Plane,
    lengths: torch.Tensor,
    page_table: torch.Tensor | None,
    query_start: torch.Tensor,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Hq, L, D]; lengths, query_start int32 [B]; out [B, Hq, L, Dv] in q's dtype, lse float32 [B, Hq, L]."""
    queries = q.shape[2]
    rows = _query_rows(q, keys.heads, options)  # [B, H, R, D]
    positions = query_start.view(-1, 1, 1, 1) + torch.arange(queries, device=q.device).view(1, 1, -1, 1)  # [B, 1, L, 1]
    span = _span(keys, page_table, lengths, query_start, queries, options)
    step = _step(span, rows, keys, values)
    buffer = rows.new_empty(rows.shape[0] * rows.shape[1] * step * max(keys.dim, values.dim))

    peak = rows.new_full((*rows.shape[:3], 1), -torch.inf)  # [B, H, R, 1]
    total = torch.zeros_like(peak)
    out = rows.new_zeros((*rows.shape[:3], values.dim))
    for lo in range(span.first, span.last, step):
        hi = min(lo + step, span.last)
        tokens = torch.arange(lo, hi, device=q.device).view(1, 1, 1, -1)
        masked = not span.all_visible(lo, hi)

        key = _load(keys, page_table, lo, hi, buffer)
        if keys.tail is not None and hi > span.flushed:
            key = _with_tail(key, keys.tail, lengths, lo)
        scores = _scores(rows, key)  # [B, H, R, n]
        per_query = scores.view(q.shape[0], -1, queries, hi - lo)  # the same memory, [B, Hq, L, n]
        _adjust(per_query, positions, tokens, options)
        if masked:
            per_query.masked_fill_(~visible(positions, tokens, lengths, options), -torch.inf)

        rise = torch.maximum(peak, scores.amax(-1, keepdim=True))
        shift = rise.clamp_min(torch.finfo(rows.dtype).min)  # finite: -inf - -inf would be NaN
        p = scores.sub_(shift).exp_()
        keep = peak.sub_(shift).exp_()
        peak = rise
        total = total.mul_(keep).add_(p.sum(-1, keepdim=True))
        stored = tokens.mT < lengths.view(-1, 1, 1, 1) if masked else None
        out = out.mul_(keep).add_(_weighted(p, _load(values, page_table, lo, hi, buffer, stored)))
    return _finish(q, out, peak, total, options)


def _query_rows(q: torch.Tensor, heads: int, options: AttentionOptions) -> torch.Tensor:
    """The queries of one KV head side by side, scaled: fp32 (float64 for float64) [B, H, G * L, D]."""
    wide = q if q.dtype is torch.float64 else q.float()
    if options.rotate_keys:
        wide = rotate(wide)
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
    return (out.view(*q.shape[:3], -1) / total.unsqueeze(-1)).to(q.dtype), lse.float()


# ------------------------------------------------------------------------------------------------------- which tokens to read


@dataclass(frozen=True)
class _Span:
    """No query sees a key outside [first, last); every query sees every key of [clear_first, clear_last).

    `flushed`: tokens before it are in the codes of every sequence, never in a tail. `unit`: blocks start at its multiples.
    """

    first: int
    last: int
    unit: int
    clear_first: int = 0
    clear_last: int = 0
    flushed: int = 0

    def all_visible(self, lo: int, hi: int) -> bool:
        return self.clear_first <= lo and hi <= self.clear_last


def _span(
    keys: Plane,
    page_table: torch.Tensor | None,
    lengths: torch.Tensor,
    query_start: torch.Tensor,
    queries: int,
    options: AttentionOptions,
) -> _Span:
    """Read off the lengths on a CPU; elsewhere, where reading them would stop a GPU, everything is visited and masked."""
    block = keys.format.token_block or 1
    page = keys.codes.shape[2]
    unit = block if page_table is None else page
    capacity = page if page_table is None else page * page_table.shape[1]
    if 0 in (*keys.codes.shape[:2], len(lengths), unit):
        return _Span(0, 0, 1)
    if lengths.device.type != "cpu":
        return _Span(0, capacity, unit)
    stored, start = lengths.tolist(), query_start.tolist()
    starts = [0] if options.starts is None else options.starts.tolist()
    window = max(start) + queries if options.window is None else options.window
    first = max(0, min(starts), min(start) - window + 1)
    last = min(max(stored), max(start) + queries)
    return _Span(
        first=first // unit * unit,
        last=min(capacity, -(-last // block) * block),
        unit=unit,
        clear_first=max(*starts, max(start) + queries - window),
        clear_last=min(*stored, min(start) + 1),
        flushed=min(stored) // block * block,
    )


def _step(span: _Span, rows: torch.Tensor, keys: Plane, values: Plane) -> int:
    """Tokens of a block: a multiple of the unit, at least one."""
    per_token = rows.shape[0] * rows.shape[1] * max(keys.dim, values.dim, rows.shape[2])
    wanted = min(BLOCK // max(per_token, 1), span.last - span.first)
    return max(1, -(-wanted // span.unit)) * span.unit


# ------------------------------------------------------------------------------------------------------------ blocks of a plane


@dataclass(frozen=True)
class _Block:
    """n tokens of a plane: scale * unit + offset, the offset spread over its group of dims."""

    unit: torch.Tensor  # [B, H, n, D]
    scale: torch.Tensor | None = None  # [B or 1, H or 1, n or 1, 1]
    offset: torch.Tensor | None = None  # [B or 1, H or 1, n or 1, groups]


def _load(
    plane: Plane,
    page_table: torch.Tensor | None,
    lo: int,
    hi: int,
    buffer: torch.Tensor,
    stored: torch.Tensor | None = None,
) -> _Block:
    """Tokens [lo, hi) of a plane, decoded into `buffer`.

    `stored` [B, 1, n, 1] says which tokens exist. Given, all others read as 0: a weight of 0 would not hide a NaN.
    """
    fmt = plane.format
    codes = _rows(plane.codes, page_table, lo, hi)
    batch, heads, n, _ = codes.shape
    unit = buffer[: batch * heads * n * plane.dim].view(batch, heads, n, plane.dim)
    unpack_into(unit, codes, fmt.code)
    if plane.scales is None:
        return _Block(unit if stored is None else unit.masked_fill_(~stored, 0))
    every = fmt.token_block or 1
    scale, offset = (
        None if t is None else _over_groups(_rows(t, page_table, lo // every, hi // every).to(unit.dtype), fmt)
        for t in (plane.scales, plane.offsets)
    )
    assert scale is not None
    if fmt.token_block:  # [B, H, n / every, D]
        blocks = torch.unflatten(unit, 2, (-1, every)).mul_(scale.unsqueeze(3))
        if offset is not None:
            blocks.add_(offset.unsqueeze(3))
        return _Block(unit)
    if stored is not None:
        scale = torch.where(stored, scale, 0)
        offset = None if offset is None else torch.where(stored, offset, 0)
    if scale.shape[-1] == 1:
        return _Block(unit, scale, offset)
    torch.unflatten(unit, -1, (scale.shape[-1], -1)).mul_(scale.unsqueeze(-1))
    return _Block(unit, None, offset)


def _over_groups(t: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Scales or offsets, whatever shares one, as [B or 1, H or 1, n or 1, groups] (per channel: [B, H, blocks, D])."""
    match fmt.granularity:
        case "tensor":
            return t.view(1, 1, 1, 1)
        case "token":
            return t[:, None, :, None]
        case "head":
            return t.unsqueeze(-1)
        case _:
            return t


def _rows(t: torch.Tensor, page_table: torch.Tensor | None, lo: int, hi: int) -> torch.Tensor:
    """Rows [lo, hi) of the token axis as [B, (H,) hi - lo, ...]; a page number out of range reads some page, never memory beyond."""
    if t.ndim == 1:  # per tensor
        return t
    axis = 1 if t.ndim == 2 else 2
    if page_table is None:
        return t.narrow(axis, lo, hi - lo)
    size = t.shape[axis]
    numbers = page_table[:, lo // size : -(-hi // size)].clamp(0, t.shape[0] - 1)
    pages = torch.unflatten(t.index_select(0, numbers.flatten()), 0, numbers.shape)  # [B, pages, (H,) rows, ...]
    return pages.movedim(1, axis).flatten(axis, axis + 1).narrow(axis, 0, hi - lo)


def _with_tail(block: _Block, tail: torch.Tensor, lengths: torch.Tensor, lo: int) -> _Block:
    """The block with every sequence's unfinished tokens taken from its 16-bit tail [B, H, every, D]."""
    every = tail.shape[2]
    blocks = torch.unflatten(block.unit, 2, (-1, every))  # [B, H, n / every, every, D]
    first = torch.arange(lo, lo + block.unit.shape[2], every, device=tail.device).view(1, 1, -1, 1, 1)
    flushed = first + every <= lengths.view(-1, 1, 1, 1, 1)
    return _Block(torch.where(flushed, blocks, tail.unsqueeze(2).to(blocks.dtype)).flatten(2, 3))


# --------------------------------------------------------------------------------------------------------------- the two products


def _scores(rows: torch.Tensor, key: _Block) -> torch.Tensor:
    """rows [B, H, R, D] times the keys of a block: [B, H, R, n], contiguous."""
    scores = rows @ key.unit.mT
    if key.scale is not None:
        scores.mul_(key.scale.mT)
    if key.offset is not None:
        sums = torch.unflatten(rows, -1, (key.offset.shape[-1], -1)).sum(-1)  # [B, H, R, groups]
        scores.add_(sums @ key.offset.mT)
    return scores


def _weighted(p: torch.Tensor, value: _Block) -> torch.Tensor:
    """The sum of a block's values weighted by p [B, H, R, n]: [B, H, R, D]."""
    out = (p if value.scale is None else p * value.scale.mT) @ value.unit
    if value.offset is not None:
        torch.unflatten(out, -1, (value.offset.shape[-1], -1)).add_((p @ value.offset).unsqueeze(-1))
    return out
