"""Cropping a cache with per-channel keys: tokens of a finished block go back into the 16-bit tail."""

from __future__ import annotations

import torch

from halfbyte.planes import Plane
from halfbyte.reference.append import slots
from halfbyte.reference.quantize import decode


def reopen_block(plane: Plane, before: torch.Tensor, kept: torch.Tensor, page_table: torch.Tensor | None) -> None:
    """Where `kept` ends inside a finished block, copy that block's values into the tail."""
    size = plane.format.token_block
    if size is None or plane.tail is None or plane.scales is None:
        return
    block = kept.long() // size  # [B]
    rows = (kept % size != 0) & (block < before.long() // size)
    sequence = rows.nonzero().flatten()
    if not sequence.numel():
        return
    fragment = _blocks(plane, sequence, block[sequence], page_table)
    plane.tail[sequence] = fragment.to(plane.tail.dtype)


def _blocks(plane: Plane, sequence: torch.Tensor, block: torch.Tensor, page_table: torch.Tensor | None) -> torch.Tensor:
    """The values of one finished block each of `sequence`: float32 [n, H, block, D]."""
    assert plane.scales is not None
    size = plane.format.token_block or 1
    per_page = plane.scales.shape[2]
    sequence, block = slots(sequence, block, page_table, plane.codes, per_page)
    token = block.unsqueeze(1) * size + torch.arange(size, device=block.device)
    codes = plane.codes.transpose(1, 2)[sequence.unsqueeze(1), token].transpose(1, 2)  # [n, H, block, ...]

    def pick(t: torch.Tensor) -> torch.Tensor:  # [n, H, 1, D]
        return t.transpose(1, 2)[sequence, block].unsqueeze(2)

    offsets = None if plane.offsets is None else pick(plane.offsets)
    shape = (*codes.shape[:3], plane.dim)
    return decode(codes, pick(plane.scales).float(), offsets, plane.format, shape)
