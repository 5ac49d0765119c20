"""Cropping a cache with a 16-bit tail: tokens that belong to it again are dequantized."""

from __future__ import annotations

import torch

from halfbyte.kv_buffer import KVBuffer
from halfbyte.reference.append import slots
from halfbyte.reference.dequantize import decode


def reopen(buffer: KVBuffer, before: torch.Tensor, kept: torch.Tensor, page_table: torch.Tensor | None) -> None:
    """Sequences are cropped from `before` to `kept` tokens, [B] each: dequantize those that belong to tails again into them."""
    if buffer.tail is None:
        return
    token = buffer.tail_tokens(kept)  # [B, rows]
    returns = (token >= buffer.sink_tokens) & (token < buffer.coded(before.long()).unsqueeze(1))
    sequence, row = returns.nonzero(as_tuple=True)
    if sequence.numel():
        values = _values(buffer, sequence, token[sequence, row], page_table)
        buffer.tail.transpose(1, 2)[sequence, row] = values.to(buffer.tail.dtype)


def _values(buffer: KVBuffer, sequence: torch.Tensor, token: torch.Tensor, page_table: torch.Tensor | None) -> torch.Tensor:
    """The dequantized values of n tokens: float32 [n, H, D]."""
    assert buffer.scales is not None
    block = buffer.format.token_block or 1

    def picked(t: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Rows [n, (H,) 1, ...] of codes, scales or offsets; per-tensor scales as they are."""
        if t.ndim == 1:
            return t
        axis = 1 if t.ndim == 2 else 2
        place, at = slots(sequence, row, page_table, t, t.shape[axis])
        return t.movedim(axis, 1)[place, at].unsqueeze(axis)

    codes = picked(buffer.codes, token)
    scales, offsets = (None if t is None else picked(t, token // block) for t in (buffer.scales, buffer.offsets))
    assert scales is not None
    return decode(codes, scales.float(), offsets, buffer.format, (*codes.shape[:3], buffer.dim))[:, :, 0]
