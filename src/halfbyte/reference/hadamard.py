"""Hadamard rotation: spreads outliers of a head over its dims, and leaves q . k unchanged when both sides are rotated.

The matrix is block-diagonal: normalised Sylvester-Hadamard blocks of the largest power of two that divides D (at least 16). It is
symmetric and its own inverse.
"""

from __future__ import annotations

import functools

import torch

from halfbyte.errors import InvalidArgument


def block_size(dim: int) -> int:
    """The largest power of two that divides `dim`. Raises below 16, where rotation does too little to be worth it."""
    size = dim & -dim
    if size < 16:
        raise InvalidArgument(f"head_dim={dim} has {size} as its largest power-of-two factor; rotate_keys needs at least 16")
    return size


@functools.cache
def matrix(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The normalised Hadamard matrix, [size, size]."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return torch.mul(h, size**-0.5).to(dtype=dtype, device=device)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotate the last axis of `x`, [..., D] in fp32 or float64; same shape and dtype. Applying it twice gives `x` back."""
    size = block_size(x.shape[-1])
    blocks: torch.Tensor = x.unflatten(-1, (-1, size))
    return torch.matmul(blocks, matrix(size, x.dtype, x.device)).flatten(-2)
