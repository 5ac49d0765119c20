"""Cropping a cache with per-channel keys: tokens of a finished block go back into the 16-bit tail."""

from __future__ import annotations

import torch

from halfbyte.kv_buffer import KVBuffer
from halfbyte.reference.append import slots
from halfbyte.reference.dequantize import decode


def reopen_block(buffer: KVBuffer, before: torch.Tensor, kept: torch.Tensor, page_table: torch.Tensor | None) -> None:
    """Where `kept` ends inside a finished block, copy that block's values into the tail."""
    size = buffer.format.token_block
    if size is None or buffer.tail is None or buffer.scales is None:
        return
    block = kept.long() // size  # [B]
    rows = (kept % size != 0) & (block < before.long() // size)
    sequence = rows.nonzero().flatten()
    if not sequence.numel():
        return
    fragment = _blocks(buffer, sequence, block[sequence], page_table)
    buffer.tail[sequence] = fragment.to(buffer.tail.dtype)


def _blocks(buffer: KVBuffer, sequence: torch.Tensor, block: torch.Tensor, page_table: torch.Tensor | None) -> torch.Tensor:
    """The values of one finished block each of `sequence`: float32 [n, H, block, D]."""
    assert buffer.scales is not None
    size = buffer.format.token_block or 1
    per_page = buffer.scales.shape[2]
    sequence, block = slots(sequence, block, page_table, buffer.codes, per_page)
    token = block.unsqueeze(1) * size + torch.arange(size, device=block.device)
    codes = buffer.codes.transpose(1, 2)[sequence.unsqueeze(1), token].transpose(1, 2)  # [n, H, block, ...]

    def pick(t: torch.Tensor) -> torch.Tensor:  # [n, H, 1, D]
        return t.transpose(1, 2)[sequence, block].unsqueeze(2)

    offsets = None if buffer.offsets is None else pick(buffer.offsets)
    shape = (*codes.shape[:3], buffer.dim)
    return decode(codes, pick(buffer.scales).float(), offsets, buffer.format, shape)
