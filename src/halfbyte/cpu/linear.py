"""A GEMM with a quantized weight, a block of rows at a time, in plain torch: the `cpu` level of `linear`.

A stored weight is w = scale * (unit - zero), with units on a small grid. A block of rows is decoded into one buffer that stays
in cache until it is multiplied, in fp32 (float64 for a float64 x). A scale of a whole row stays outside the product; scales of
groups multiply the decoded block.

Zero points come off the codes, where the difference is exact. Subtracted from the GEMM instead, as the sum over groups of
scale * zero * (sum of x), they would cancel: both terms are many times the result where x has a mean. Nothing is rounded to x's
dtype before the bias is in.
"""

from __future__ import annotations

import torch

from halfbyte.cpu.codes import unpack_into
from halfbyte.device import SPINNING
from halfbyte.formats import Code
from halfbyte.reference.dequantize import block_scales
from halfbyte.tensors import QuantTensor

#: Numbers in one decoded block of rows: few enough for a CPU's cache, enough to hide the cost of calling an operator.
BLOCK = 1 << 19


def linear(x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., K] times the rows of `weight` [N, K], plus bias [N]: [..., N] in x's dtype."""
    features, width = weight.shape
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    rows = x.reshape(x.shape[:-1].numel(), width).to(wide)  # [M, K]; either may be 0
    if weight.perm is not None:
        rows = rows.index_select(1, weight.perm)  # the columns of x in the order of the stored ones
    scales = None if weight.scales is None else block_scales(weight, wide)  # [N, G]
    y = product(rows, weight.codes, scales, weight.offsets, weight.format.code)
    if bias is not None:
        y += bias.unsqueeze(-1)
    return y.mT.to(x.dtype).contiguous().view(*x.shape[:-1], features)


def product(
    rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor | None, offsets: torch.Tensor | None, code: Code
) -> torch.Tensor:
    """[N, M] of rows [M, K], fp32 or float64, and a weight [N, K] by its codes, plain scales [N, G] and zero points."""
    if rows.is_cpu:
        SPINNING.step()
    features, width = codes.shape[0], rows.shape[1]
    y = rows.new_empty(features, rows.shape[0])  # [N, M]: a block's rows are in one piece, and the product is faster so
    step = max(1, min(BLOCK // max(width, 1), features))
    buffer = rows.new_empty(step, width)
    for lo in range(0, features, step):
        hi = min(lo + step, features)
        unit = buffer[: hi - lo]
        unpack_into(unit, codes[lo:hi], code, None if offsets is None else offsets[lo:hi])
        if scales is not None and scales.shape[-1] > 1:
            unit.unflatten(-1, (scales.shape[-1], -1)).mul_(scales[lo:hi].unsqueeze(-1))
        torch.mm(unit, rows.mT, out=y[lo:hi])
    if scales is not None and scales.shape[-1] == 1:
        y *= scales
    return y
