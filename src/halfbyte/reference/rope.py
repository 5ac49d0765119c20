"""Rotary position embedding (RoFormer, arXiv 2104.09864), in the half-split order of Llama checkpoints, or interleaved."""

from __future__ import annotations

import torch


def rope_tables(positions: torch.Tensor, dim: int, theta: float = 10000.0) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [*positions.shape, dim / 2], of angle position * theta^(-2i / dim)."""
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    angles = positions.double().unsqueeze(-1) * frequencies
    return angles.cos().float(), angles.sin().float()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the pairs (x[i], x[i + R/2]) of the first R elements of `x` [..., D], interleaved (x[2 i], x[2 i + 1]).

    cos and sin [..., R/2] broadcast. Result in the dtype of `x`; elements from R on are as they were.
    """
    rotary = 2 * cos.shape[-1]
    pairs = x[..., :rotary].to(cos.dtype).unflatten(-1, (-1, 2) if interleaved else (2, -1))
    axis = -1 if interleaved else -2
    a, b = pairs.unbind(axis)
    rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], axis).flatten(-2).to(x.dtype)
    return torch.cat([rotated, x[..., rotary:]], dim=-1)
