"""Stored codes to numbers, before any scale, in few passes over memory. Shared by the ops of this level."""

from __future__ import annotations

import functools

import torch

from halfbyte.formats import Code


def unpack_into(out: torch.Tensor, codes: torch.Tensor, code: Code) -> None:
    """Write the values of `codes` [..., D / codes per byte] to `out`, contiguous fp32 or float64 [..., D]."""
    if code.values is not None:
        out.copy_(_look_up_pairs(codes, code).view(out.shape))
        return
    if code.is_e4m3:
        _e4m3_into(out, codes)
        return
    out.copy_(_one_a_byte(codes, code.bits) if code.per_byte > 1 else codes)
    if code.bias:
        out.sub_(code.bias)


def _one_a_byte(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., n] -> uint8 [..., 8 / bits * n]: a byte 0xHL becomes the word 0x0H0L, and so on with the halves of H and L."""
    width = 8
    while width > bits:
        width //= 2
        words = packed.to(torch.int16, memory_format=torch.contiguous_format)
        packed = words.bitwise_or_(words << 8 - width).bitwise_and_(0x0101 * (2**width - 1)).view(torch.uint8)
    return packed


def _e4m3_into(out: torch.Tensor, codes: torch.Tensor) -> None:
    """E4M3 through fp16: the same bits one place lower mean 2^-8 times as much (the exponents' biases are 7 and 15).

    Several times faster than torch's own conversion; the two NaN codes need a look of their own.
    """
    words = codes.view(torch.int8).to(torch.int16)  # ssss ssss seee emmm: the sign fills the upper byte
    words.bitwise_left_shift_(7).bitwise_and_(~0x4000)  # s0ee eemm m000 0000
    out.copy_(words.view(torch.float16)).mul_(256)
    out.masked_fill_((codes & 0x7F) == 0x7F, torch.nan)


def _look_up_pairs(packed: torch.Tensor, code: Code) -> torch.Tensor:
    """float32 [elements], one access for the two codes of a byte."""
    pairs = _pair_table(code, packed.device).index_select(0, packed.flatten().int())
    return pairs.view(torch.float32)


@functools.cache
def _pair_table(code: Code, device: torch.device) -> torch.Tensor:
    """The two float32 values of every byte, low nibble first, as one int64: [256]."""
    values = code.codebook()
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)  # [256, 2]
    return pairs.view(torch.int64).flatten().to(device)
