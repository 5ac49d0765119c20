"""Rotary position embedding (RoFormer, arXiv 2104.09864), in the half-split order that Llama checkpoints use."""

from __future__ import annotations

import torch


def rope_tables(positions: torch.Tensor, dim: int, theta: float = 10000.0) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [*positions.shape, dim / 2], of angle position * theta^(-2i / dim)."""
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    angles = positions.double().unsqueeze(-1) * frequencies
    return angles.cos().float(), angles.sin().float()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x[i], x[i + R/2]) of the first R elements of `x` [..., D]; cos and sin [..., R/2] broadcast.

    Result in the dtype of `x`; elements from R on are as they were.
    """
    half = cos.shape[-1]
    a, b = (t.to(cos.dtype) for t in (x[..., :half], x[..., half : 2 * half]))
    rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
    return torch.cat([rotated, x[..., 2 * half :]], dim=-1)
