"""Greedy decoding, in torch: choose the most likely token of each sequence and append it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Held(NamedTuple):
    """The tokens of a batch.

    ids [B, columns]      `lengths` tokens of each sequence, then padding
    last [B, 1]           the newest of them
    lengths int64 [B, 1]
    unfinished bool [B]   sequences that have not ended
    """

    ids: torch.Tensor
    last: torch.Tensor
    lengths: torch.Tensor
    unfinished: torch.Tensor


class Ends(NamedTuple):
    """How sequences end.

    tokens int64 [E]   each of them ends a sequence
    padding int64 []   the token that finished sequences get
    refused            none of `tokens` may be chosen, as before a minimum length
    """

    tokens: torch.Tensor
    padding: torch.Tensor
    refused: bool = False


def greedy(logits: torch.Tensor, held: Held, ends: Ends | None) -> None:
    """`halfbyte.ops.block.greedy`."""
    scores = logits.float()
    if ends is not None and ends.refused:
        columns = torch.arange(logits.shape[1], device=logits.device)
        scores = scores.masked_fill(torch.isin(columns, ends.tokens), -torch.inf)
    tokens = scores.argmax(-1)
    if ends is not None:
        tokens = torch.where(held.unfinished, tokens, ends.padding)
    held.last.copy_(tokens[:, None])
    held.ids.scatter_(1, held.lengths, held.last.to(held.ids.dtype))
    held.lengths.add_(held.unfinished[:, None])
    if ends is not None:
        held.unfinished.logical_and_(~torch.isin(tokens, ends.tokens))
