"""Tokens of the gated delta rule: drawn calls, and what they give in float64, one number after the other."""

from __future__ import annotations

from typing import NamedTuple

import torch

from halfbyte.ops.gated_delta import gated_delta
from halfbyte.reference.gated_delta import DeltaWeights


class Shape(NamedTuple):
    """Sizes of a layer; `group`: value heads of a key head. by_head: projections lie key head by key head (Qwen3-Next)."""

    batch: int
    key_heads: int
    group: int
    dk: int
    dv: int
    taps: int = 4
    has_bias: bool = False
    by_head: bool = False


#: Of one, two and three value heads; heads of equal sizes, of others, of no power of two; one sequence and several.
SHAPES = (
    Shape(1, 2, 2, 16, 16),
    Shape(3, 1, 1, 32, 16, taps=2, has_bias=True),
    Shape(2, 2, 3, 16, 32, taps=3),
    Shape(5, 3, 2, 24, 40, by_head=True),
    Shape(2, 1, 4, 64, 8, has_bias=True, by_head=True),
)


class Case(NamedTuple):
    """Projections q, k, v, z, b and a of a token, the weights, and both states before it."""

    projections: tuple[torch.Tensor, ...]
    weights: DeltaWeights
    conv_state: torch.Tensor
    state: torch.Tensor

    def run(self, impl: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(out, the states behind the token); those of the case stay as they are."""
        conv_state, state = self.conv_state.clone(), self.state.clone()
        return gated_delta(*self.projections, self.weights, conv_state, state, impl=impl), conv_state, state

    def row(self, number: int) -> Case:
        """One of its sequences alone."""
        one = slice(number, number + 1)
        return self._replace(
            projections=tuple(t[one] for t in self.projections), conv_state=self.conv_state[one], state=self.state[one]
        )


def drawn(shape: Shape, dtype: torch.dtype, device: str = "cpu", seed: int = 0, beta_scale: float = 1.0) -> Case:
    """A case whose gates decay by little and by much; between the projections lies NaN."""
    rng = torch.Generator().manual_seed(seed)
    batch, hk, group, dk, dv, taps = shape[:6]
    heads, channels = hk * group, 2 * hk * dk + hk * group * dv

    def normal(*size: int, like: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*size, generator=rng).to(device, like)

    widths = (dk, dk, group * dv, group * dv, group, group)
    if shape.by_head:
        parts = torch.cat([normal(batch, hk, sum(widths)), torch.full((batch, hk, 3), torch.nan, dtype=dtype, device=device)], -1)
        projections = list(parts[..., : sum(widths)].split(widths, -1))
    else:
        projections = [normal(batch, hk * n + 5)[:, 5:].unflatten(-1, (hk, n)) for n in widths]
    for i, width in ((2, dv), (3, dv), (4, 1), (5, 1)):
        projections[i] = projections[i].unflatten(-1, (group, width))
    projections[4:] = [t.squeeze(-1) for t in projections[4:]]
    weights = DeltaWeights(
        conv=normal(channels, taps),
        conv_bias=normal(channels) if shape.has_bias else None,
        a_log=(torch.rand(heads, generator=rng) * 4 - 2).to(device, dtype),
        dt_bias=(4 * normal(heads)).to(dtype),
        norm=1 + 0.3 * normal(dv),
        eps=1e-6,
        beta_scale=beta_scale,
    )
    return Case(tuple(projections), weights, normal(batch, channels, taps), normal(batch, heads, dk, dv, like=torch.float32))


def truth(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out [B, H Dv], conv_state, state) in float64, head by head."""
    q, k, v, z, b, a = (t.double().cpu() for t in case.projections)
    w = case.weights
    conv, a_log, dt_bias, norm = (t.double().cpu() for t in (w.conv, w.a_log, w.dt_bias, w.norm))
    (batch, hk, dk), (group, dv) = q.shape, v.shape[2:]
    conv_state, states = case.conv_state.double().cpu(), case.state.double().cpu().clone()
    new = torch.cat([q.reshape(batch, -1), k.reshape(batch, -1), v.reshape(batch, -1)], 1)
    conv_state = torch.cat([conv_state[:, :, 1:], new[:, :, None]], 2)
    sums = (conv_state * conv).sum(2) + (0 if w.conv_bias is None else w.conv_bias.double().cpu())
    mixed = sums / (1 + (-sums).exp())
    out = torch.empty(batch, hk * group, dv, dtype=torch.float64)
    for n in range(batch):
        for head in range(hk * group):
            h, g = divmod(head, group)
            query, key = (mixed[n, first : first + dk] for first in (h * dk, (hk + h) * dk))
            value = mixed[n, 2 * hk * dk + head * dv :][:dv]
            query, key = (x / (x.square().sum() + 1e-6).sqrt() for x in (query, key))
            decay = (-a_log[head].exp() * (a[n, h, g] + dt_bias[head]).exp().log1p()).exp()
            s = states[n, head] * decay
            delta = (value - key @ s) / (1 + (-b[n, h, g]).exp()) * w.beta_scale
            states[n, head] = s + torch.outer(key, delta)
            y = query @ states[n, head] / dk**0.5
            gate = z[n, h, g]
            out[n, head] = y / (y.square().mean() + w.eps).sqrt() * norm * gate / (1 + (-gate).exp())
    return out.flatten(1), conv_state, states


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the norm of a result."""
    return float((found.double().cpu() - expected).norm() / expected.norm())
