"""Mixtures of experts for tests: a stack, tokens and ids, the float64 truth and what eager 16-bit torch makes of the same numbers.

The truth is computed pair by pair, by a loop that shares no code with the levels but `dequantize`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from accuracy import linear_accuracy
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.ops._experts_prompt import SortedPairs, sorting
from halfbyte.ops.experts_mlp import MlpCall, Projection
from halfbyte.reference.experts import Activation, ExpertsCall
from halfbyte.reference.quantize import quantize
from halfbyte.tensors import QuantTensor

OAI = Activation("silu", 1.702, 1.5, 1.0)
ACTIVATIONS = (None, Activation("silu"), Activation("gelu"), Activation("gelu_tanh"), OAI)
#: 18 pairs of expert 0, 16 of expert 1, one of expert 3 and none of expert 2; three ids are no expert, and one token has one twice.
IDS = torch.tensor([[0, 1]] * 16 + [[0, 0], [-1, 4], [3, 2**40]])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stack(name: str, experts: int, n: int, k: int, *, act_order: bool = False) -> QuantTensor:
    scales = torch.logspace(-1, 1, experts).view(-1, 1, 1)  # so that an expert's scale is not its neighbour's
    made = quantize(normal(experts, n, k, seed=3) * 0.1 * scales, name)
    perm = torch.stack([torch.randperm(k, generator=torch.Generator().manual_seed(e)) for e in range(experts)]).int()
    return replace(made, perm=perm) if act_order else made


def routed(tokens: int, top_k: int, experts: int, seed: int = 1) -> torch.Tensor:
    """Different experts for each token, where there are enough."""
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    return scores.argsort(1)[:, torch.arange(top_k) % experts]


def sorted_pairs(ids: torch.Tensor, experts: int, block: int = 0) -> SortedPairs:
    """The pairs, sorted."""
    pairs, steps = sorting(ids, experts, block)
    for step in steps:
        step()
    return pairs


def both_in_one(up: ExpertsCall, down: ExpertsCall) -> MlpCall:
    """`down` of what `up` gives, as one call."""
    first, last = (Projection([*c.weight.parts().values()], c.weight.format.name, c.bias) for c in (up, down))
    assert down.gates is not None
    assert up.activation is not None
    return MlpCall(up.x, first, last, up.ids, down.gates, up.activation, up.impl)


def by_hand(a: Activation, y: torch.Tensor) -> torch.Tensor:
    """The activation of [..., N] in y's dtype, from its definition."""
    g, u = y.unflatten(-1, (-1, 2)).unbind(-1)
    g, u = torch.minimum(g, torch.tensor(a.limit, dtype=g.dtype)), u.clamp(-a.limit, a.limit)
    if a.kind == "silu":
        f = g / (1 + torch.exp(-a.alpha * g))
    elif a.kind == "gelu":
        f = g * (1 + torch.erf(g / 2**0.5)) / 2
    else:
        f = g * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3))) / 2
    return f * (u + a.shift)


class Mixture(ExpertsCall):
    """A call, and what it should give."""

    def expected(self, dtype: torch.dtype) -> torch.Tensor:
        """In float64; in a 16-bit dtype each step is rounded as eager torch does it."""
        values = self.weight.dequantize(torch.float64).to(dtype)
        rows = []
        for t in range(self.ids.shape[0]):
            made = [self._pair(t, i, values, dtype) for i in range(self.ids.shape[1])]
            if self.gates is not None:
                weighed = [y.to(dtype) * g.to(dtype) for y, g in zip(made, self.gates[t], strict=True)]
                made = [torch.stack(weighed).sum(0)]
            rows.append(torch.stack(made))
        return torch.stack(rows).squeeze(1) if self.gates is not None else torch.stack(rows)

    def _pair(self, t: int, i: int, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        expert = int(self.ids[t, i])
        x = (self.x[t] if self.x.ndim == 2 else self.x[t, i]).to(dtype)
        if not 0 <= expert < len(values):
            y = torch.zeros(values.shape[1], dtype=dtype)
        else:
            bias = None if self.bias is None else self.bias[expert].to(dtype)
            y = torch.nn.functional.linear(x, values[expert], bias)
        return y if self.activation is None else by_hand(self.activation, y)

    def check(self, level: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Within the promise: relative L2 error at most twice that of 16-bit torch on the dequantized weights."""
        out, truth = level(self), self.expected(torch.float64)
        assert out.shape == truth.shape
        assert out.dtype is self.x.dtype
        what = f"{self.weight.format} {list(self.weight.shape)} {list(self.ids.shape)} {self.activation}"
        linear_accuracy(out, self.expected(self.x.dtype), truth).require(what)
        return out


def _calls() -> dict[str, Callable[[], Mixture]]:
    """Mixtures that every level is held to that runs without a GPU: formats, epilogues, routings, orders and layouts."""
    calls: dict[str, Callable[[], Mixture]] = {}
    for i, name in enumerate(WEIGHT_FORMATS):
        dtype = (torch.float16, torch.bfloat16)[i % 2]
        weight = partial(stack, name, 3, 34, 256)
        calls[name] = lambda w=weight, d=dtype: Mixture(normal(3, 256).to(d), w(), routed(3, 2, 3), None, normal(3, 34), OAI)
        calls[f"{name}, act-order, x by pair"] = lambda w=weight, d=dtype: Mixture(
            normal(3, 2, 256).to(d), w(act_order=True), routed(3, 2, 3), torch.rand(3, 2)
        )
    for what, activation in zip(("none", "silu", "gelu", "gelu_tanh", "oai"), ACTIVATIONS, strict=True):
        for gated, biased in itertools.product((False, True), repeat=2):
            x = (lambda: normal(len(IDS), 192)[:, ::2]) if gated else (lambda: normal(len(IDS) + 1, 2, 96)[1:])
            calls[f"{what}{', gates' * gated}{', bias' * biased}"] = lambda a=activation, g=gated, b=biased, x=x: Mixture(
                *(x().half(), stack("int4_g32", 4, 36, 96), IDS),
                *(normal(len(IDS), 2).softmax(1) if g else None, normal(4, 36) if b else None, a),
            )
    for tokens, top_k, experts in ((70, 2, 4), (1, 16, 512), (64, 4, 3), (300, 1, 2), (40, 1, 1), (2, 3, 1), (9, 5, 12)):
        calls[f"{tokens} tokens, {top_k} of {experts}"] = lambda t=tokens, k=top_k, e=experts: Mixture(
            normal(64, t).bfloat16().mT, stack("mxfp4", e, 12, 64), routed(t, k, e), torch.rand(k, t).mT
        )
    return calls


CALLS = _calls()
