"""Projections of a decoder block with what surrounds them, by compiled loops, for an x of few rows, in bf16 or fp32.

Each function returns None where the loops do not run, or something may be wrong with its arguments: the ops that call them check.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from halfbyte.cpu import linear as cpu
from halfbyte.cpu.profiled import profiled
from halfbyte.reference.block import Norm, gated
from halfbyte.tensors import QuantTensor

#: How a norm rounds, for the loop.
KINDS = {"rounded": 0, "exact": 1, "offset": 2}
#: Types of rows, and those of the arrays that loops read and write them as: bf16 as its bits.
NUMBERS: dict[torch.dtype, type[np.generic]] = {torch.bfloat16: np.uint16, torch.float32: np.float32}

Array = np.ndarray[Any, Any]


def projections(
    x: torch.Tensor, weights: Sequence[QuantTensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor] | None:
    """[..., N] of each weight."""
    if not cpu.in_tiles(x, weights) or not all(map(is_bias, biases, weights)):
        return None
    return profiled("linear", _projections, x, weights, biases)


def _projections(x: torch.Tensor, weights: Sequence[QuantTensor], biases: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    rows = cpu.tile_rows(x)
    return [cpu.by_tiles(x, rows, each, bias) for each, bias in zip(weights, biases, strict=True)]


def gated_projection(
    x: torch.Tensor, weights: Sequence[QuantTensor], biases: Sequence[torch.Tensor | None], activation: str
) -> torch.Tensor | None:
    """activation(gate) * up [..., N]."""
    both = projections(x, weights, biases)
    return None if both is None or both[0].shape != both[1].shape else gated(both[0], both[1], activation)


def add_projection(
    x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None, residual: torch.Tensor, before: Norm | None, multiplier: float
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """hidden = residual + multiplier * (x W^T + bias), and before(hidden)."""
    is_plain = type(residual) is torch.Tensor and residual.dtype in NUMBERS and residual.is_contiguous()
    if not is_plain or not (before is None or is_row(before.weight, residual.shape[-1], residual.dtype)):
        return None
    fits = (is_tiled := cpu.in_tiles(x, (weight,))) or cpu.by_codes(x, weight)
    if not fits or x.dtype is not residual.dtype or not is_bias(bias, weight):
        return None
    if residual.shape != (*x.shape[:-1], weight.shape[0]):
        return None
    return profiled("linear", _add_projection, x, weight, bias, residual, before, multiplier, is_tiled)


def _add_projection(
    x: torch.Tensor,
    weight: QuantTensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    before: Norm | None,
    multiplier: float,
    is_tiled: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    from halfbyte.cpu.compiled.block import add_norm

    sums = cpu.tile_sums(x, cpu.tile_rows(x), weight, bias) if is_tiled else cpu.code_sums(x, weight, bias)
    rows = array_of(residual).reshape(sums.shape)
    hidden, out = np.empty_like(rows), np.empty_like(rows if before is not None else rows[:, :0])
    norm, kind, eps = (out[0], 0, 0.0) if before is None else (array_of(before.weight), KINDS[before.kind], before.eps)
    add_norm(sums, rows, hidden, out, norm, float(multiplier), eps, kind)
    return tensor_of(hidden).view(residual.shape), None if before is None else tensor_of(out).view(residual.shape)


def array_of(t: torch.Tensor) -> Array:
    """A tensor of a type of `NUMBERS` as an array, which shares its memory."""
    array: Array = (t.detach().view(torch.uint16) if t.dtype is torch.bfloat16 else t.detach()).numpy()
    return array


def tensor_of(array: Array) -> torch.Tensor:
    """The inverse of `array_of`."""
    t = torch.from_numpy(array)
    return t.view(torch.bfloat16) if t.dtype is torch.uint16 else t


def is_row(t: torch.Tensor, width: int, dtype: torch.dtype) -> bool:
    """Whether t is [width], of this type."""
    return t.dtype is dtype and t.is_cpu and t.shape == (width,) and t.is_contiguous()


def is_bias(t: torch.Tensor | None, weight: QuantTensor) -> bool:
    """Whether t is a bias of this weight, or none."""
    return t is None or (t.is_cpu and t.is_floating_point() and t.shape == weight.shape[:1])
