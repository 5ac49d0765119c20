"""Stored codes to numbers, before any scale, in few passes over memory. Shared by the ops of this level."""

from __future__ import annotations

import functools

import torch

from halfbyte.formats import Code


def unpack_into(out: torch.Tensor, codes: torch.Tensor, code: Code, zeros: torch.Tensor | None = None) -> None:
    """Write the values of `codes` [..., D / codes per byte] to `out`, contiguous fp32 or float64 [..., D].

    zeros: uint8 [..., G], the zero points that come off the integer codes of G groups.
    """
    if code.values is not None or code.per_byte > 2:
        _look_up_into(out, codes, code)
        return
    if code.is_e4m3:
        _e4m3_into(out, codes)
        return
    units = _nibbles(codes) if code.per_byte > 1 else codes
    out.copy_(units if zeros is None or not units.numel() else _less(units, zeros))
    if code.bias:
        out.sub_(code.bias)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., D/2] -> uint8 [..., D]: a byte 0xHL becomes the word 0x0H0L, whose bytes are the two codes in order."""
    words = packed.to(torch.int16, memory_format=torch.contiguous_format)
    return words.bitwise_or_(words << 4).bitwise_and_(0x0F0F).view(torch.uint8)


def _less(units: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [..., D], overwritten, less the zero points [..., G] of their groups: signed integers, and exact.

    A byte holds the differences of 4-bit codes and zero points up to 128, which is several times faster than fp32.
    """
    groups = units.unflatten(-1, (zeros.shape[-1], -1))
    if int(zeros.max()) > 128:
        groups = groups.to(torch.int16)
    less: torch.Tensor = groups.sub_(zeros.unsqueeze(-1)).flatten(-2)
    return less.view(torch.int8) if less.dtype is torch.uint8 else less


def _e4m3_into(out: torch.Tensor, codes: torch.Tensor) -> None:
    """E4M3 through fp16: the same bits one place lower mean 2^-8 times as much (the exponents' biases are 7 and 15).

    Several times faster than torch's own conversion; the two NaN codes need a look of their own.
    """
    words = codes.view(torch.int8).to(torch.int16)  # ssss ssss seee emmm: the sign fills the upper byte
    words.bitwise_left_shift_(7).bitwise_and_(~0x4000)  # s0ee eemm m000 0000
    out.copy_(words.view(torch.float16)).mul_(256)
    out.masked_fill_((codes & 0x7F) == 0x7F, torch.nan)


def _look_up_into(out: torch.Tensor, packed: torch.Tensor, code: Code) -> None:
    """One access for all codes of a byte."""
    table, index = _byte_table(code, packed.device), packed.flatten().int()
    if out.dtype is torch.float32:
        torch.index_select(table, 0, index, out=out.flatten().view(table.dtype))
    else:
        out.copy_(table.index_select(0, index).view(torch.float32).view(out.shape))


@functools.cache
def _byte_table(code: Code, device: torch.device) -> torch.Tensor:
    """The two or four float32 values of every byte, lowest bits first, as one int64 or complex128: [256]."""
    shifts = torch.arange(0, 8, code.bits, device="cpu")
    fields = torch.arange(256, device="cpu")[:, None] >> shifts & 2**code.bits - 1
    whole = torch.int64 if code.per_byte == 2 else torch.complex128  # as wide as that many float32
    return code.codebook()[fields].view(whole).flatten().to(device)
