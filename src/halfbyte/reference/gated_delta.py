"""One token of the gated delta rule (Qwen3-Next, Qwen3.5, OLMo Hybrid), rounded as in transformers: what `gated_delta` computes.

    q, k, v = silu(conv(q, k, v))                        depthwise, over the last W tokens
    S = exp(-exp(a_log) softplus(a + dt_bias)) S         by value head; q and k of length 1, q divided by sqrt(Dk)
    S = S + k (beta (v - k^T S))                         beta = beta_scale * sigmoid(b)
    out = norm(q^T S) * silu(z)

Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import torch
from torch.nn import functional

from halfbyte.arguments import Mark

#: Added to the squares of a query or a key before it is divided by its length, as in flash-linear-attention.
LENGTH_EPS = 1e-6


class DeltaWeights(NamedTuple):
    """Of a layer with H value heads; C = 2 Hk Dk + H Dv channels, those of q, k and v, head by head.

    conv, conv_bias   [C, W], and [C] or None
    a_log, dt_bias    [H]
    norm, eps         [Dv], of the RMSNorm of each head, which is rounded before the multiplication by its weight
    beta_scale        2 where eigenvalues may be negative, else 1
    """

    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    beta_scale: float = 1.0


class DeltaCall(NamedTuple):
    """One call of `gated_delta`, see there: the declaration of the op. out: [B, H Dv]."""

    q: Annotated[torch.Tensor, Mark.DIFFERENTIABLE]
    k: Annotated[torch.Tensor, Mark.DIFFERENTIABLE]
    v: Annotated[torch.Tensor, Mark.DIFFERENTIABLE]
    z: Annotated[torch.Tensor, Mark.DIFFERENTIABLE]
    b: Annotated[torch.Tensor, Mark.DIFFERENTIABLE]
    a: Annotated[torch.Tensor, Mark.DIFFERENTIABLE]
    weights: DeltaWeights
    conv_state: Annotated[torch.Tensor, Mark.WRITTEN]
    state: Annotated[torch.Tensor, Mark.WRITTEN]
    out: Annotated[torch.Tensor, Mark.RESULT]
    impl: str = "auto"


def gated_delta(call: DeltaCall) -> None:
    """Write `out`, and both states in place; in fp32, or float64 if q is."""
    q, w, (batch, key_heads, group, dv) = call.q, call.weights, call.v.shape
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    q, k, v = _convolved(call, wide)
    q, k = (_of_length_one(t.view(batch, key_heads, 1, -1)) for t in (q, k))
    v = v.view(batch, key_heads, group, dv)
    beta = call.b.sigmoid().to(wide) * w.beta_scale
    step = functional.softplus(call.a.to(wide) + w.dt_bias.to(wide).view(key_heads, group))
    decay = (-w.a_log.to(wide).exp().view(key_heads, group) * step).exp()
    state = call.state.view(batch, key_heads, group, -1, dv).to(wide) * decay[..., None, None]
    delta = (v - (state * k[..., None]).sum(-2)) * beta[..., None]
    state = state + k[..., None] * delta[..., None, :]
    call.state.copy_(state.view(call.state.shape))
    y = (state * (q * q.shape[-1] ** -0.5)[..., None]).sum(-2).to(call.q.dtype).to(wide)
    y = w.norm * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + w.eps)).to(call.q.dtype)
    call.out.copy_((y * functional.silu(call.z.to(wide))).reshape(call.out.shape))


def _convolved(call: DeltaCall, wide: torch.dtype) -> Sequence[torch.Tensor]:
    """q, k and v of the token behind the convolution, [B, channels]; its state moves on."""
    q, k, v = new = [t.flatten(1) for t in (call.q, call.k, call.v)]
    weight, bias = call.weights.conv, call.weights.conv_bias
    taps = torch.cat([call.conv_state[..., 1:], torch.cat(new, 1)[..., None].to(call.conv_state.dtype)], -1)
    call.conv_state.copy_(taps)
    sums = (taps.to(wide) * weight.to(wide)).sum(-1)
    if bias is not None:
        sums = sums + bias.to(wide)
    mixed = functional.silu(sums.to(weight.dtype)).to(q.dtype).to(wide)
    parts: Sequence[torch.Tensor] = mixed.split([t.shape[1] for t in (q, k, v)], 1)
    return parts


def _of_length_one(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + LENGTH_EPS)
