"""What one attention call of a real model sees: the queries of the newest token, and all keys and values, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from halfbyte.reference.rope import apply_rope, rope_tables

#: The channels of each head that a key bias shifts, up and down, and how far: as in Qwen2's first and last layers.
BIASED, BIAS = (3, 5), 200.0


@dataclass(frozen=True)
class Heads:
    """One layer in bf16: q [B, Hq, 1, D] of the newest token, k and v [B, H, T, D] of all, rotated by position."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def with_key_bias(self) -> Heads:
        """The same with a constant added to two channels of every key, rounded to bf16 again.

        In exact arithmetic that changes no output, as it adds the same to all scores of a query: what it changes is rounding.
        """
        bias = torch.zeros(self.k.shape[-1], device=self.k.device)
        bias[BIASED[0]], bias[BIASED[1]] = BIAS, -BIAS
        return replace(self, k=(self.k.float() + bias).to(self.k.dtype))


@torch.no_grad()
def recorded_heads(model: Any, ids: torch.Tensor) -> list[Heads]:
    """Heads of every layer of a Llama-like model while it reads `ids`, int64 [B, T]. It has halfbyte's attention."""
    from halfbyte.hf.attention import CACHE
    from halfbyte.hf.cache import PackedCache

    found: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, given: object, out: torch.Tensor) -> None:
        found.append(out[:, -1:])

    blocks, config = model.model.layers, model.config
    cache = PackedCache(model, ids.shape[1], keys="bf16", values="bf16")
    hooks = [block.self_attn.q_proj.register_forward_hook(keep) for block in blocks]
    try:
        model(input_ids=ids.to(model.device), **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    rope = rope_tables(torch.tensor([ids.shape[1] - 1], device=model.device), config.head_dim, config.rope_parameters["rope_theta"])

    def heads(q: torch.Tensor, held: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> Heads:
        k, v = (t[:, :, : ids.shape[1]].bfloat16() for t in held())
        return Heads(apply_rope(q.unflatten(-1, (-1, config.head_dim)).transpose(1, 2), *rope).bfloat16().contiguous(), k, v)

    return [heads(q, layer.kv.dequantized) for q, layer in zip(found, cache.layers, strict=True)]
