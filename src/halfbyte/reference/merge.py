"""Merging attention over disjoint sets of keys by their log-sum-exp (FlashDecoding; the softmax of a union).

lse = log sum_s exp(lse_s)        out = sum_s exp(lse_s - lse) out_s        with sinks: out * exp(lse) / (exp(lse) + exp(sink))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
