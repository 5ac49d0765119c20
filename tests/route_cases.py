"""Routers of published models, and what they choose: Python and numpy, in float64, one token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from halfbyte.reference.route import Routing

#: Name -> (experts, routing, whether there is a bias).
PUBLISHED: dict[str, tuple[int, Routing, bool]] = {
    "qwen3_30b": (128, Routing(8, "softmax", 1e-20), False),
    "gpt_oss_20b": (32, Routing(4, "softmax", 1e-20), False),
    "mixtral": (8, Routing(2, "softmax", 1e-20), False),
    "qwen2_moe": (60, Routing(4, "softmax"), False),
    "granite": (72, Routing(10, "softmax", 1e-20), False),
    "deepseek_v2": (160, Routing(6, "softmax", None, 16.0, 8, 3, 1), False),
    "deepseek_v3": (256, Routing(8, "sigmoid", 1e-20, 2.5, 8, 4, 2), True),
    "minimax_m2": (256, Routing(8, "sigmoid", 1e-20), True),
    "qwen3_next": (512, Routing(10, "softmax", 1e-20), False),
    "longcat": (768, Routing(12, "softmax", None, 6.0), True),
}


def by_hand(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and gates float64 [T, top_k] of finite logits."""
    rows = [_token(row, routing, bias) for row in logits.double().numpy()]
    return torch.tensor([ids for ids, _ in rows]), torch.tensor([gates for _, gates in rows], dtype=torch.float64)


def _token(logits: Any, routing: Routing, bias: torch.Tensor | None) -> tuple[list[int], list[float]]:
    powers = np.exp(logits - logits.max())
    scores = powers / powers.sum() if routing.score == "softmax" else 1 / (1 + np.exp(-logits))
    keys = logits
    if bias is not None or routing.groups > 1:
        keys = scores + (0 if bias is None else bias.double().numpy())
    width = len(logits) // routing.groups
    groups = [range(g * width, (g + 1) * width) for g in range(routing.groups)]
    worth = [sum(sorted((keys[e] for e in group), reverse=True)[: routing.best]) for group in groups]
    best = sorted(range(routing.groups), key=lambda g: (-worth[g], g))[: routing.top_groups]
    allowed = [e for g in best for e in groups[g]]
    ids = sorted(allowed, key=lambda e: (-keys[e], e))[: routing.top_k]
    total = 1.0 if routing.eps is None else sum(scores[e] for e in ids) + routing.eps
    return ids, [routing.scale * scores[e] / total for e in ids]


def draw(experts: int, has_bias: bool, dtype: torch.dtype, tokens: int = 5, seed: int = 0) -> tuple[Any, Any]:
    """Logits [tokens, experts] that differ from each other, and a bias [experts] of both signs or None."""
    rng = torch.Generator().manual_seed(seed)
    logits = (torch.rand(tokens, experts, generator=rng) * 0.5 + torch.arange(experts)) * 8 / experts - 6
    order = torch.rand(tokens, experts, generator=rng).argsort(-1)
    return logits.gather(1, order).to(dtype), torch.randn(experts, generator=rng) if has_bias else None
