"""Linear layers on quantized weights: the specification of `linear` and `qkv_projection`."""

from __future__ import annotations

import torch

from halfbyte.reference.quantize import dequantize
from halfbyte.tensors import QuantTensor


def linear(x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., K] times the values of weight [N, K], in float64; result [..., N] in x's dtype."""
    y = x.double() @ dequantize(weight, torch.float64).T
    if bias is not None:
        y = y + bias.double()
    return y.to(x.dtype)
