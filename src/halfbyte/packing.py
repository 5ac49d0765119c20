"""Packing of 4- and 2-bit codes, and its inverse.

The canonical storage is uint8 [..., K/n], n = 8 / bits: element n*i in the lowest bits of byte i, element n*i + 1 in the next
bits, and so on.
"""

from __future__ import annotations

import torch

from halfbyte.errors import check


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes 0 .. 2^bits - 1, one per byte, uint8 [..., K] -> uint8 [..., K * bits / 8]; K must fill whole bytes."""
    good = isinstance(codes, torch.Tensor) and codes.dtype is torch.uint8 and codes.ndim > 0
    check(good, f"codes is {getattr(codes, 'dtype', type(codes))}; {bits}-bit codes to pack are torch.uint8 [..., K], one a byte")
    n, mask, last = 8 // bits, 2**bits - 1, codes.shape[-1]
    check(last % n == 0, f"codes has a last axis of {last}; {n} codes share a byte, it must be a multiple of {n}")
    packed: torch.Tensor = codes[..., 0::n] & mask
    for j in range(1, n):
        packed = packed | (codes[..., j::n] & mask) << bits * j
    return packed


def unpack_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., K * bits / 8] -> codes 0 .. 2^bits - 1, one per byte, uint8 [..., K]."""
    check(packed.dtype is torch.uint8, f"packed is {packed.dtype}; packed {bits}-bit codes are torch.uint8")
    mask = 2**bits - 1
    return torch.stack([packed >> bits * j & mask for j in range(8 // bits)], dim=-1).flatten(-2)
