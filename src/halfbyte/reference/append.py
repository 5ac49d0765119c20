"""Quantize-and-append: the specification of how new keys and values enter a cache.

Token i of sequence b (i < counts[b]) goes to position lengths[b] + i. Nothing is written until everything has been checked, so a
refused append leaves the cache as it was.

Per-channel formats quantize blocks of tokens: new tokens first fill the 16-bit tail; each block that becomes complete is
quantized from its 16-bit values, so codes do not depend on how tokens were split into appends. Tokens that leave the window of
recent tokens are quantized in the same way, one by one. Errors about them are raised when they are appended, not when they leave.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from halfbyte.errors import CapacityError, InvalidArgument, check
from halfbyte.formats import MIN_SCALE
from halfbyte.kv_buffer import KVBuffer
from halfbyte.reference.hadamard import rotate
from halfbyte.reference.quantize import F16_MAX, check_finite, check_range, encode, measure

Index = tuple[torch.Tensor, torch.Tensor]
Write = Callable[[], object]
#: How errors name k and v.
_SIDES = {"k": "k (keys)", "v": "v (values)"}


def _scatter(target: torch.Tensor, index: Index, data: torch.Tensor) -> None:
    """`target[index] = data` with heads after the indexed axes: target [.., H, rows, ..] viewed as [.., rows, H, ..]."""
    view = target if target.ndim == 2 else target.transpose(1, 2)
    view[index] = data.to(view.dtype)


def append_(
    k: torch.Tensor,
    v: torch.Tensor,
    counts: torch.Tensor | None,
    keys: KVBuffer,
    values: KVBuffer,
    lengths: torch.Tensor,
    page_table: torch.Tensor | None,
    rotate_keys: bool,
) -> None:
    """k [B, H, L, D], v [B, H, L, Dv]; counts int32 [B] or None for all L. Buffers change; the caller advances lengths."""
    new = torch.full_like(lengths, k.shape[2]) if counts is None else counts.to(lengths.dtype)
    if new.numel() and not 0 <= int(new.min()) <= int(new.max()) <= k.shape[2]:
        raise InvalidArgument(
            f"counts runs from {int(new.min())} to {int(new.max())}; expected 0 to {k.shape[2]}, the tokens given"
        )
    check_capacity(lengths, new, capacity(keys, page_table))
    fresh = torch.arange(k.shape[2], device=k.device) < new.unsqueeze(1)  # [B, L]
    if not bool(fresh.any()):
        return  # nothing to store, and nothing to measure a per-tensor scale on
    writes: list[Write] = []
    for buffer, x, name in ((keys, k, "k"), (values, v, "v")):
        x = x.masked_fill(~fresh[:, None, :, None], 0)  # tokens beyond counts may hold anything
        check_finite(x, name)
        if x.dtype is torch.float64:
            x = x.float()
            check_finite(x, f"{name} rounded to fp32")
        if name == "k" and rotate_keys:
            x = rotate(x.float())
        prepare = _whole_blocks if buffer.format.token_block else _tokens if buffer.tail is None else _leaving_tokens
        writes += prepare(buffer, x, fresh, lengths, page_table, name)
    for write in writes:
        write()


def append_slots_(
    k: torch.Tensor, v: torch.Tensor, keys: KVBuffer, values: KVBuffer, slots: torch.Tensor, rotate_keys: bool
) -> None:
    """k [T, H, 1, D], v [T, H, 1, Dv]; token i goes to row slots[i] % N of page slots[i] // N. Negative slots are skipped."""
    lengths, counts, pages = slots_as_pages(keys, slots)
    append_(k, v, counts, keys, values, lengths, pages, rotate_keys)


def slots_as_pages(keys: KVBuffer, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots as sequences that own every page and get a token each: lengths, counts and page table of an append."""
    pages, _, rows, _ = keys.codes.shape
    last = int(slots.max()) if slots.numel() else -1
    check(last < pages * rows, f"slot_mapping names slot {last}; {pages} pages of {rows} tokens have {pages * rows}")
    everywhere = torch.arange(pages, dtype=torch.int32, device=slots.device).expand(len(slots), pages)
    return slots.long().clamp_min(0), (slots >= 0).int(), everywhere


def capacity(buffer: KVBuffer, page_table: torch.Tensor | None) -> int:
    """Maximum tokens of a sequence."""
    rows = buffer.codes.shape[2]
    return rows if page_table is None else rows * page_table.shape[1]


def check_capacity(lengths: torch.Tensor, new: torch.Tensor, limit: int) -> None:
    """Raise `CapacityError` when a sequence would exceed `limit`. Synchronizes with the device."""
    total = lengths + new
    if total.numel() and int(lengths.min()) < 0:
        raise InvalidArgument(f"lengths holds {int(lengths.min())}; a sequence has at least 0 tokens")
    if total.numel() and int(total.max()) > limit:
        worst = int(total.argmax())
        raise CapacityError(
            f"sequence {worst} holds {int(lengths[worst])} tokens and {int(new[worst])} more do not fit in a capacity of {limit}; "
            f"nothing was appended; make the cache larger or crop it first"
        )


def slots(sequence: torch.Tensor, token: torch.Tensor, page_table: torch.Tensor | None, t: torch.Tensor, rows: int) -> Index:
    """Where a token is in `t`: (sequence, row) of a contiguous buffer, (page, row) of a paged one with `rows` rows per page."""
    if page_table is None:
        return sequence, token
    page = page_table[sequence, token // rows].long()
    check(
        page.numel() == 0 or (int(page.min()) >= 0 and int(page.max()) < t.shape[0]),
        f"page_table names a page outside 0..{t.shape[0] - 1} where there are tokens or will be; allocate the pages first",
    )
    return page, token % rows


def _tokens(
    buffer: KVBuffer,
    x: torch.Tensor,
    fresh: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor | None,
    name: str,
    measured: torch.Tensor | None = None,
) -> list[Write]:
    """Formats that quantize tokens independently. `measured`: what a per-tensor scale is calibrated on; None: x."""
    sequence, i = fresh.nonzero(as_tuple=True)
    index = slots(sequence, lengths.long()[sequence] + i, page_table, buffer.codes, buffer.codes.shape[2])

    def picked(t: torch.Tensor) -> torch.Tensor:  # [B, H, L, ...] -> [n, H, ...], [B, L] -> [n]
        return (t if t.ndim == 2 else t.transpose(1, 2))[sequence, i]

    if buffer.scales is None:
        rows = x.to(buffer.codes.dtype)
        check_finite(rows, f"{name} rounded to {buffer.format.name}")
        return [partial(_scatter, buffer.codes, index, picked(rows))]
    x = x.float()
    if buffer.format.granularity == "tensor":
        return _fixed_scale(buffer, x, index, picked, x if measured is None else measured, name)
    scales, offsets = measure(x, buffer.format)
    check_range(scales, offsets, buffer.format, _SIDES[name], "sequence")
    writes: list[Write] = [partial(_scatter, buffer.codes, index, picked(encode(x, scales, offsets, buffer.format)))]
    writes.append(partial(_scatter, buffer.scales, index, picked(scales)))
    if buffer.offsets is not None and offsets is not None:
        writes.append(partial(_scatter, buffer.offsets, index, picked(offsets)))
    return writes


def _fixed_scale(
    buffer: KVBuffer,
    x: torch.Tensor,
    index: Index,
    picked: Callable[[torch.Tensor], torch.Tensor],
    measured: torch.Tensor,
    name: str,
) -> list[Write]:
    """A per-tensor scale of 0 is not calibrated yet. The first append sets it; later values beyond it saturate and are counted."""
    assert buffer.scales is not None
    measured_scale, _ = measure(measured, buffer.format)
    all_scales = torch.where(
        buffer.scales == 0, measured_scale * (measured.abs().amax() > 0), buffer.scales
    )  # zeros do not calibrate it
    check_range(all_scales, None, buffer.format, _SIDES[name])
    scale = all_scales.clamp_min(MIN_SCALE)
    beyond = ((x / scale.float()).round().abs() > buffer.format.code.reach).sum()
    writes: list[Write] = [
        partial(buffer.scales.copy_, all_scales),
        partial(_scatter, buffer.codes, index, picked(encode(x, scale, None, buffer.format))),
    ]
    return writes if buffer.saturated is None else [*writes, partial(buffer.saturated.add_, beyond)]


def _leaving_tokens(
    buffer: KVBuffer, x: torch.Tensor, fresh: torch.Tensor, lengths: torch.Tensor, page_table: torch.Tensor | None, name: str
) -> list[Write]:
    """Caches with sink or recent tokens. `run` is each sequence from its first recent token on: the ring, then the new tokens."""
    tail, ring, sinks, (batch, _, count, _) = buffer.tail, buffer.ring, buffer.sink_tokens, x.shape
    assert tail is not None
    new = x.to(tail.dtype)
    check_finite(new, f"{name} rounded to {tail.dtype}")
    if buffer.format.granularity != "tensor":
        check_range(*measure(new.float(), buffer.format), buffer.format, _SIDES[name], "sequence")
    before, total = lengths.long().unsqueeze(1), (lengths + fresh.sum(1)).long().unsqueeze(1)  # [B, 1]
    first, end = buffer.coded(before), buffer.coded(total)
    position = first + torch.arange(ring + count, device=x.device)  # [B, run]
    rows = torch.arange(batch, device=x.device).unsqueeze(1)
    in_ring = (sinks + position % max(ring, 1)).clamp_max(tail.shape[2] - 1)
    old, fresh_rows = tail.transpose(1, 2)[rows, in_ring], new.transpose(1, 2)[rows, (position - before).clamp(0, count - 1)]
    run = torch.where((position < before)[..., None, None], old, fresh_rows).transpose(1, 2)  # [B, H, run, D]
    leaving = (position >= sinks) & (position < end)
    run = run.masked_fill(~leaving[:, None, :, None], 0)
    writes = _tokens(buffer, run, leaving, first.squeeze(1), page_table, name, measured=x.float())

    token = before + torch.arange(count, device=x.device)  # [B, L]
    to_quantize = fresh & ((token < sinks) | (token >= end))
    sequence, i = to_quantize.nonzero(as_tuple=True)
    at = token[sequence, i]
    at = torch.where(at < sinks, at, sinks + at % max(ring, 1))
    return [*writes, partial(_scatter, tail, (sequence, at), new.transpose(1, 2)[sequence, i])]


def _whole_blocks(
    buffer: KVBuffer, x: torch.Tensor, fresh: torch.Tensor, lengths: torch.Tensor, page_table: torch.Tensor | None, name: str
) -> list[Write]:
    """Per-channel formats. `run` is each sequence from its first unfinished block on: the tail, then the new tokens."""
    assert buffer.tail is not None and buffer.scales is not None
    size, (batch, _, count, _) = buffer.format.token_block or 1, x.shape
    if count == 0:
        return []
    x = x.to(buffer.tail.dtype)
    check_finite(x, f"{name} rounded to {buffer.tail.dtype}")
    if bool(x.abs().amax() > F16_MAX):  # else the scales of every block are in range; raised now, not when the block is whole
        ends = torch.stack(x.float().aminmax(dim=2), 2)  # [B, H, 2, D]
        check_range(*measure(ends.repeat_interleave(size, 2), buffer.format), buffer.format, _SIDES[name], "sequence")
    old, total = (lengths % size).long(), (lengths % size + fresh.sum(1)).long()  # tokens in the tail; in the run
    position = torch.arange(-(-(size - 1 + count) // size) * size, device=x.device)  # [run]
    from_new = (position - old.unsqueeze(1)).clamp(0, count - 1)  # [B, run]
    rows = torch.arange(batch, device=x.device).unsqueeze(1)
    in_tail = (position < old.unsqueeze(1))[..., None, None]
    run = torch.where(in_tail, buffer.tail.transpose(1, 2)[:, position % size], x.transpose(1, 2)[rows, from_new])  # [B, run, H, D]

    blocks = run.unflatten(1, (-1, size))  # [B, n, size, H, D]
    sequence, j = ((torch.arange(blocks.shape[1], device=x.device) + 1) * size <= total.unsqueeze(1)).nonzero(as_tuple=True)
    done = blocks[sequence, j].transpose(1, 2).float()  # [m, H, size, D]
    scales, offsets = measure(done, buffer.format)
    check_range(scales, offsets, buffer.format, _SIDES[name])
    first = (lengths.long() // size)[sequence] + j  # index of each finished block in its sequence
    token = first.unsqueeze(1) * size + torch.arange(size, device=x.device)  # [m, size]
    at = slots(sequence.unsqueeze(1).expand_as(token), token, page_table, buffer.codes, buffer.codes.shape[2])
    block_at = slots(sequence, first, page_table, buffer.scales, buffer.scales.shape[2])
    writes: list[Write] = [partial(_scatter, buffer.codes, at, encode(done, scales, offsets, buffer.format).transpose(1, 2))]
    writes.append(partial(_scatter, buffer.scales, block_at, scales[:, :, 0]))
    if buffer.offsets is not None and offsets is not None:
        writes.append(partial(_scatter, buffer.offsets, block_at, offsets[:, :, 0]))
    left = (total // size * size).unsqueeze(1) + torch.arange(size, device=x.device)  # [B, size]: what stays unfinished
    tail = run[rows, left.clamp_max(position.numel() - 1)]
    return [*writes, partial(_scatter, buffer.tail, (rows, torch.arange(size, device=x.device).expand_as(left)), tail)]
