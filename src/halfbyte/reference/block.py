"""Norms, residual sums and gated activations of a decoder block, rounded as in transformers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

#: Functions of the gate in gated MLPs; and of any gate, such as that of attention's output in Qwen3.5.
ACTIVATIONS = ("silu", "gelu_tanh")
GATES = (*ACTIVATIONS, "sigmoid")
#: How a family's RMSNorm rounds to 16 bits and applies its weight: see `Norm`.
KINDS = ("rounded", "exact", "offset")


class Norm(NamedTuple):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis, in fp32.

    weight  [N]
    kind    "rounded": rounded to the dtype of x before and after the multiplication by weight (Llama);
            "exact": rounded once, at the end (OLMo 2); "offset": the same with 1 + weight (Gemma)
    """

    weight: torch.Tensor
    eps: float
    kind: str


def rms_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """x [..., N] normalized, in its own dtype."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.kind == "rounded":
        return norm.weight * scaled.to(x.dtype)
    weight = norm.weight.float() + 1.0 if norm.kind == "offset" else norm.weight
    return (scaled * weight).to(x.dtype)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, after: Norm | None, multiplier: float, before: Norm | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """hidden = residual + multiplier * after(x), and before(hidden). `after` None: x itself; `before` None: no second result."""
    x = x if after is None else rms_norm(x, after)
    hidden = residual + (x if multiplier == 1 else x * multiplier)
    return hidden, None if before is None else rms_norm(hidden, before)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) * up."""
    if activation == "sigmoid":
        return torch.sigmoid(gate) * up
    return (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")) * up
