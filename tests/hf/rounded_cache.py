"""transformers' own growing cache, its contents quantized and expanded again: what a packed cache is compared with."""

from __future__ import annotations

from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer

import halfbyte
from halfbyte.hf.cache_layers import EmptyLayer, StateLayer
from halfbyte.reference.hadamard import rotate, rotated


class RoundedLayer(DynamicLayer):
    """A prompt sees itself exactly, as with ours."""

    fmt = "bf16"
    #: What is a key: of MLA the second that `update` is given, behind the latent.
    keys_are = "keys"

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        seen = []
        for name, new in (("keys", key_states), ("values", value_states)):
            rounded, old = _rounded(new, self.fmt, name == self.keys_are), getattr(self, name)
            is_step = new.shape[-2] == 1 and old.numel() > 0
            setattr(self, name, torch.cat([old, rounded], -2))
            seen.append(torch.cat([old, rounded if is_step else new], -2))
        return tuple(seen)


def _rounded(new: torch.Tensor, name: str, are_keys: bool) -> torch.Tensor:
    """Quantized and expanded, keys as they are rotated by default."""
    fmt = halfbyte.key_format(name)
    if not are_keys or not rotated(None, fmt, new.shape[-1]):
        return halfbyte.dequantize(halfbyte.quantize(new, fmt), new.dtype)
    return rotate(halfbyte.dequantize(halfbyte.quantize(rotate(new.float()), fmt))).to(new.dtype)


#: What transformers without it has no layers for.
_Both: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", object)


class RoundedHybrid(RoundedLayer, _Both):
    """Of a layer that has a state as well."""


def rounded_cache(model: Any, fmt: str = "bf16") -> DynamicCache:
    """Of a model's layers, those with keys and values are rounded. Windows are left to masks."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    cache = DynamicCache()
    cache.layers = [_layer(kind) for kind in kinds]
    for layer in cache.layers:
        layer.fmt = fmt
        layer.keys_are = "values" if getattr(config, "kv_lora_rank", None) else "keys"
    return cache


def _layer(kind: str) -> Any:
    if "hybrid" in kind:
        return RoundedHybrid()
    if kind in ("linear_attention", "conv"):
        return StateLayer()
    return EmptyLayer() if kind in ("moe", "mlp") else RoundedLayer()
