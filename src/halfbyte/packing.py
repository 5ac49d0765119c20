"""Where the bytes sit: pack and unpack, each the other's inverse.

The canonical storage of 4-bit codes is uint8 [..., K/2]: element 2i in the low nibble of byte i, element 2i + 1 in the high one.
"""

from __future__ import annotations

import torch

from halfbyte.errors import check


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15, one a byte, uint8 [..., K] -> uint8 [..., K/2]. K must be even."""
    good = isinstance(codes, torch.Tensor) and codes.dtype is torch.uint8 and codes.ndim > 0
    check(good, f"codes is {getattr(codes, 'dtype', type(codes))}; 4-bit codes to pack are torch.uint8 [..., K], one a byte")
    check(codes.shape[-1] % 2 == 0, f"codes has a last axis of {codes.shape[-1]}; two codes share a byte, it must be even")
    return (codes[..., 0::2] & 15) | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K/2] -> codes 0..15, one a byte, uint8 [..., K]."""
    check(packed.dtype is torch.uint8, f"packed is {packed.dtype}; packed 4-bit codes are torch.uint8")
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
