"""Projections of a mixture of experts (MoE) on quantized weights: the specification of `experts_linear`."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch

from halfbyte.reference.dequantize import decode, expert_scales, in_order
from halfbyte.tensors import QuantTensor


class Activation(NamedTuple):
    """A gated activation: f(min(g, limit)) * (clamp(u, -limit, limit) + shift) of a gate g and its up projection u.

    kind: f, one of "silu" (g * sigmoid(alpha * g)), "gelu" and "gelu_tanh". gpt-oss: `Activation("silu", 1.702, 7.0, 1.0)`.
    """

    kind: Literal["silu", "gelu", "gelu_tanh"]
    alpha: float = 1.0
    limit: float = math.inf
    shift: float = 0.0

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        """[..., N / 2] from [..., N], in which gate and up alternate: g0, u0, g1, u1, ..."""
        gate, up = y[..., ::2].clamp(max=self.limit), y[..., 1::2].clamp(-self.limit, self.limit)
        if self.kind == "silu":
            return gate * torch.sigmoid(self.alpha * gate) * (up + self.shift)
        how = "tanh" if self.kind == "gelu_tanh" else "none"
        return torch.nn.functional.gelu(gate, approximate=how) * (up + self.shift)


#: The activations that `Activation.kind` names.
KINDS = ("silu", "gelu", "gelu_tanh")


class ExpertsCall(NamedTuple):
    """One call of `experts_linear`, made once from its arguments and passed on: the declaration of the op.

    x [T, K] or [T, top_k, K]; weight [E, N, K]; ids, gates [T, top_k]; bias [E, N]. impl: as requested, later the level that runs.
    """

    x: torch.Tensor
    weight: QuantTensor
    ids: torch.Tensor
    gates: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    activation: Activation | None = None
    impl: str = "auto"

    def new_result(self) -> torch.Tensor:
        """Memory for [T, top_k, N], or N / 2 with an activation; with gates [T, N]."""
        features = self.weight.shape[1] // (1 if self.activation is None else 2)
        return self.x.new_empty(*(self.ids.shape if self.gates is None else self.ids.shape[:1]), features)


def experts_linear(call: ExpertsCall, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """x times the weight of expert ids[t, i], computed in `dtype`, returned in x's dtype; an id out of range gives zeros."""
    x, weight, ids, _, bias, _ = call[:6]
    rows = x.to(dtype) if x.ndim == 3 else x.to(dtype).unsqueeze(1).expand(-1, ids.shape[1], -1)
    y = rows.new_zeros(*ids.shape, weight.shape[1])
    for expert in hit(call):
        here = ids == expert
        y[here] = rows[here] @ expert_values(weight, expert, dtype).T + (0 if bias is None else bias[expert].to(dtype))
    return combined(y, call).to(x.dtype)


def hit(call: ExpertsCall) -> list[int]:
    """The experts in `ids`, ascending."""
    return [expert for expert in call.ids.unique().tolist() if 0 <= expert < call.weight.shape[0]]


def expert_values(weight: QuantTensor, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """The values [N, K] of one expert of a stack; as `dequantize`, in float32 or float64."""
    offsets = None if weight.offsets is None else weight.offsets[expert]
    scales = expert_scales(weight, expert, dtype)
    values = decode(weight.codes[expert], scales, offsets, weight.format, weight.shape[1:])
    return values if weight.perm is None else in_order(values, weight.perm[expert])


def combined(y: torch.Tensor, call: ExpertsCall) -> torch.Tensor:
    """The activation of y [T, top_k, N], then the sum weighted by gates, in the order of ids."""
    y = y if call.activation is None else call.activation(y)
    if call.gates is None:
        return y
    gates = call.gates.to(y.dtype).masked_fill((call.ids < 0) | (call.ids >= call.weight.shape[0]), 0)
    total = torch.zeros_like(y[:, 0]) if y.shape[1] else y.new_zeros(y.shape[0], y.shape[2])
    for i in range(y.shape[1]):
        total += gates[:, i, None] * y[:, i]
    return total
