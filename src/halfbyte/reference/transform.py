"""Heads times a matrix of their KV head, or the Hadamard matrix: the specification of `transform_heads`, and a part of appends."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch

from halfbyte.arguments import Mark
from halfbyte.reference.hadamard import rotate


class TransformCall(NamedTuple):
    """One call of `transform_heads`, see there: the declaration of the op."""

    x: Annotated[torch.Tensor, Mark.DIFFERENTIABLE]
    matrix: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    impl: str = "auto"


def transformed(x: torch.Tensor, matrix: torch.Tensor | None, shift: torch.Tensor | None = None) -> torch.Tensor:
    """x matrix + shift, in fp32, or float64 if x is; with the shapes of `transform_heads`."""
    wide = x if x.dtype is torch.float64 else x.float()
    if matrix is None:
        return rotate(wide)
    heads = wide.unflatten(1, (matrix.shape[0], -1))  # [B, H, G, L, D]
    product: torch.Tensor = heads @ matrix.to(wide.dtype)[:, None]
    if shift is not None:
        product = product + shift.to(wide.dtype)[:, None, None]
    return product.flatten(1, 2)
