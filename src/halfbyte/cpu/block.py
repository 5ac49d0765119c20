"""Projections of a decoder block with what surrounds them, by compiled loops, for a bf16 x of few rows.

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
NONE = np.empty((1, 0), np.uint16)

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
    is_plain = type(residual) is torch.Tensor and residual.dtype is torch.bfloat16 and residual.is_contiguous()
    if not is_plain or not (before is None or is_row(before.weight, residual.shape[-1])):
        return None
    if not cpu.in_tiles(x, (weight,)) or not is_bias(bias, weight) or residual.shape != (*x.shape[:-1], weight.shape[0]):
        return None
    return profiled("linear", _add_projection, x, weight, bias, residual, before, multiplier)


def _add_projection(
    x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None, residual: torch.Tensor, before: Norm | None, multiplier: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    from halfbyte.cpu.compiled.block import add_norm

    sums = cpu.tile_sums(x, cpu.tile_rows(x), weight, bias)
    hidden = np.empty(sums.shape, np.uint16)
    out = NONE if before is None else np.empty_like(hidden)
    norm, kind, eps = (NONE[0], 0, 0.0) if before is None else (bits(before.weight), KINDS[before.kind], before.eps)
    add_norm(sums, bits(residual).reshape(sums.shape), hidden, out, norm, float(multiplier), eps, kind)
    return _bf16(hidden, residual.shape), None if before is None else _bf16(out, residual.shape)


def bits(t: torch.Tensor) -> Array:
    """Those of a bf16 tensor, which share its memory."""
    return t.detach().view(torch.uint16).numpy()


def _bf16(bits: Array, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16).view(shape)


def is_row(t: torch.Tensor, width: int) -> bool:
    """Whether t is bf16 [width]."""
    return t.dtype is torch.bfloat16 and t.is_cpu and t.shape == (width,) and t.is_contiguous()


def is_bias(t: torch.Tensor | None, weight: QuantTensor) -> bool:
    """Whether t is a bias of this weight, or none."""
    return t is None or (t.is_cpu and t.is_floating_point() and t.shape == weight.shape[:1])
