"""Hadamard rotation: spreads outliers of a head over its dims, and leaves q . k unchanged when both sides are rotated.

The matrix is block-diagonal: normalized Sylvester-Hadamard blocks of the largest power of two that divides D (at least 16). It is
symmetric and its own inverse.
"""

from __future__ import annotations

import torch

from halfbyte.errors import InvalidArgument, check
from halfbyte.formats import Format


def block_size(dim: int) -> int:
    """The largest power of two that divides `dim`. Raises below 16, where rotation gains too little."""
    size = dim & -dim
    if size < 16:
        raise InvalidArgument(f"head_dim={dim} has {size} as its largest power-of-two factor; rotation needs at least 16")
    return size


def rotated(rotate_keys: bool | None, keys: Format, head_dim: int) -> bool:
    """Whether keys are to be rotated. None: if the format gains by it and 16 divides `head_dim`."""
    if rotate_keys is None:
        return keys.gains_by_rotation and head_dim % 16 == 0
    return check_rotation(rotate_keys, head_dim)


def check_rotation(rotate: bool, head_dim: int, name: str = "rotate_keys") -> bool:
    """The option `name`. Raises unless it is a bool, and if it is True and 16 does not divide `head_dim`."""
    check(isinstance(rotate, bool), f"{name}={rotate!r}; expected True or False")
    if rotate:
        block_size(head_dim)
    return rotate


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotate the last axis of `x`, [..., D] in fp32 or float64; same shape and dtype. Applying it twice gives `x` back.

    With butterflies and not with a GEMM, whose last bits would depend on the number of rows.
    """
    size, step = block_size(x.shape[-1]), 1
    while step < size:
        a, b = torch.unflatten(x, -1, (-1, 2, step)).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        step *= 2
    return torch.mul(x, size**-0.5)


def rotate_end(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Rotate the last `dim` dims of the last axis; those before them stay."""
    before, own = x.split([x.shape[-1] - dim, dim], -1)
    return torch.cat([before, rotate(own)], -1) if before.shape[-1] else rotate(own)
