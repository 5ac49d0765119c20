"""transformers' own attention over its own cache: what halfbyte's over 16 bits is compared with."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from halfbyte.formats import plain_format
from halfbyte.nn import QuantLayer


@torch.no_grad()
def agreement(model: Any, ids: torch.Tensor, tokens: int = 32) -> tuple[int, int]:
    """(equal, compared): greedy tokens of halfbyte's attention over a 16-bit cache and of transformers' own over the same 16 bits.

    ids int64 [B, T]: prompts. transformers runs "eager" or "sdpa" attention over its own cache, with keys and values rounded alike.
    """
    from halfbyte.hf.cache import PackedCache
    from halfbyte.hf.model_support import CACHE, half_type

    plain, capacity = plain_format(half_type(model)), ids.shape[1] + tokens
    ids = ids.to(model.device)
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    ours = model.generate(
        ids, attention_mask=mask, **{CACHE: PackedCache(model, capacity, keys=plain.name, values=plain.name)}, **options
    )
    with own_attention(model):
        rounded = {CACHE: _rounded_cache(model, plain.code.dtype)}
        theirs = model.generate(ids, attention_mask=mask, recorded=False, **rounded, **options)
    fresh = slice(ids.shape[1], None)
    return int((ours[:, fresh] == theirs[:, fresh]).sum()), ours[:, fresh].numel()


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """transformers' attention for a while: sdpa, or eager where a model has features that sdpa lacks."""
    from halfbyte.hf.model_support import NAME

    needs_eager = getattr(model.config, "attn_logit_softcapping", None) or "gpt_oss" in model.config.model_type
    model.set_attn_implementation("eager" if needs_eager else "sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(NAME)


def in_half(model: Any) -> Any:
    """The model in the arithmetic of its 16-bit type: itself on a GPU; of one in fp32 a copy with weights of that type."""
    from halfbyte.hf.model_support import half_type

    packed = {id(p) for m in model.modules() if isinstance(m, QuantLayer) for p in m.parameters()}
    wide = [p for p in model.parameters() if p.dtype is torch.float32 and id(p) not in packed]
    memo: dict[int, Any] = {id(p): torch.nn.Parameter(p.detach().to(half_type(model)), requires_grad=False) for p in wide}
    return copy.deepcopy(model, memo) if wide else model


def _rounded_cache(model: Any, dtype: torch.dtype | None) -> Any:
    """transformers' own cache, keys and values rounded to `dtype` behind the prompt, which sees itself exactly as with ours."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer

    from halfbyte.hf.cache_layers import EmptyLayer, StateLayer
    from halfbyte.hf.model_support import ATTENTION, STATES, layer_types, text_config

    config = text_config(model)

    class Rounded(DynamicLayer):  # type: ignore[misc]
        def update(self, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(k, v)
            chunk = [x.to(dtype).to(x.dtype) for x in (k, v)]
            past: tuple[torch.Tensor, torch.Tensor] = (self.keys, self.values)  # type: ignore[has-type]
            self.keys, self.values = (torch.cat([old, new], -2) for old, new in zip(past, chunk, strict=True))
            if k.shape[-2] == 1 and past[0].numel():
                return self.keys, self.values
            return torch.cat([past[0], k], -2), torch.cat([past[1], v], -2)

    class RoundedHybrid(Rounded, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
        """Of a layer that has a state as well."""

    def layer(kind: str) -> Any:
        if kind not in STATES:
            return Rounded() if kind in ATTENTION else EmptyLayer()
        return (RoundedHybrid if kind in ATTENTION else StateLayer)(number_of_states=getattr(config, "number_of_conv_states", 1))

    cache = DynamicCache()
    cache.layers = [layer(kind) for kind in layer_types(config)]
    return cache
