"""`LatentHeads`: how the heads of multi-head latent attention (MLA) make keys and values of a latent.

    k_j = [c_j K, r_j]    v_j = c_j V       for a head with matrices K [R, D], V [R, Dv]; r_j is a rotary key that all heads share

A cache holds the latents c as values and r as keys, for one KV head. Attention over them needs no k_j and no v_j (the absorbed
form): q . k_j = (q_nope K^T) . c_j + q_rope . r_j, and out = (sum_j p_j c_j) V.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class LatentHeads(NamedTuple):
    """Matrices of Hq heads over latents as a cache holds them: keys [Hq, R, D], values [Hq, R, Dv]."""

    keys: torch.Tensor
    values: torch.Tensor

    def absorbed(self, q: torch.Tensor) -> torch.Tensor:
        """q [B, Hq, L, D + rotary dims] as `decode_attention` takes it with latent=True: [B, Hq, L, R + rotary dims]."""
        own, rotary = q.split([self.keys.shape[2], q.shape[3] - self.keys.shape[2]], -1)
        return torch.cat([torch.einsum("bhld,hrd->bhlr", own, self.keys), rotary], -1)

    def expanded(self, out: torch.Tensor) -> torch.Tensor:
        """Weighted sums of latents [B, Hq, L, R] -> of values [B, Hq, L, Dv]."""
        return torch.einsum("bhlr,hrv->bhlv", out, self.values)
