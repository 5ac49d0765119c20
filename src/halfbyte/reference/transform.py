"""Heads times a matrix of their KV head, or the Hadamard matrix: the specification of `transform_heads`."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch

from halfbyte.arguments import Mark
from halfbyte.kv_buffer import HeadNorms, Rope
from halfbyte.reference.block import Norm, rms_norm
from halfbyte.reference.hadamard import rotate
from halfbyte.reference.rope import apply_rope


class TransformCall(NamedTuple):
    """One call of `transform_heads`, see there: the declaration of the op."""

    x: Annotated[torch.Tensor, Mark.DIFFERENTIABLE]
    matrix: torch.Tensor | None = None
    center: torch.Tensor | None = None
    rope: Annotated[Rope | None, Mark.DIFFERENTIABLE] = None
    norms: Annotated[HeadNorms | None, Mark.DIFFERENTIABLE] = None
    queries: bool = False
    impl: str = "auto"


def transformed(call: TransformCall) -> torch.Tensor:
    """The result in fp32, or float64 if x is."""
    x, matrix, center = call.x, call.matrix, call.center
    if call.norms is not None:
        norms = call.norms
        x = rms_norm(x, Norm(norms.q if call.queries else norms.k, norms.eps, norms.kind))
    if call.rope is not None:
        x = apply_rope(x, call.rope.cos.unsqueeze(-3), call.rope.sin.unsqueeze(-3), call.rope.interleaved)
    wide = x if x.dtype is torch.float64 else x.float()
    if matrix is None:
        return rotate(wide)
    heads = wide.unflatten(1, (matrix.shape[0], -1))  # [B, H, G, L, D]
    if center is not None:
        heads = heads - center.to(wide.dtype)[:, None, None]
    product: torch.Tensor = heads @ matrix.to(wide.dtype)[:, None]
    return product.flatten(1, 2)
