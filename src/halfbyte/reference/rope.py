"""Rotary position embedding (RoFormer, arXiv 2104.09864), in the half-split order that Llama checkpoints use."""

from __future__ import annotations

import torch


def rope_tables(positions: torch.Tensor, dim: int, theta: float = 10000.0) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [*positions.shape, dim / 2], of angle position * theta^(-2i / dim)."""
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    angles = positions.double().unsqueeze(-1) * frequencies
    return angles.cos().float(), angles.sin().float()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x[i], x[i + D/2]) of `x` [..., D]; cos and sin [..., D/2] broadcast. Result in the dtype of `x`."""
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
