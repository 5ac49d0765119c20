"""transformers' own growing cache, its contents quantized and expanded again: what a packed cache is compared with."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tiny_models import VOCAB, left_padding
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer

import halfbyte
import halfbyte.hf as hf
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


def packed_and_plain(plain: Any, **formats: Any) -> tuple[Any, Any]:
    """A copy with a packed cache, and the model."""
    packed = hf.quantize(copy.deepcopy(plain), **formats)
    plain.set_attn_implementation("eager")
    return packed, plain


def two_texts(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, count), generator=torch.Generator().manual_seed(seed))


def turns(model: Any, cache: Any, counts: tuple[int, ...], behind_a_crop: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """Logits of so many tokens of two texts, one padded on the left, call by call; and of more behind a crop of 9."""
    mask, logits = torch.ones(2, sum(counts) + 16, dtype=torch.long), []
    mask[1, :5] = 0

    def read(count: int, seed: int) -> None:
        columns = mask[:, : int(cache.get_seq_length()) + count]
        logits.append(model(two_texts(count, seed), attention_mask=columns, past_key_values=cache).logits)

    with torch.no_grad():
        for seed, count in enumerate(counts):
            read(count, seed)
        if behind_a_crop:
            cache.crop(-9)
            for seed, count in enumerate(behind_a_crop, 9):
                read(count, seed)
    return [logits[0][:, 5:], *logits[1:]]


def check_generation(packed: Any, plain: Any, tokens: int, pads: int, *loops: dict[str, Any]) -> None:
    """Greedy in each of these loops, by beams and by sampling: the tokens of transformers over a rounded cache of INT8."""
    ids = two_texts(tokens)
    mask = left_padding(ids, pads)
    prompt = {"input_ids": ids * mask, "attention_mask": mask}

    def generate(model: Any, **options: Any) -> torch.Tensor:
        torch.manual_seed(3)
        cache = {"past_key_values": rounded_cache(plain, "int8")} if model is plain else {}
        return model.generate(**prompt, **{"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **options}, **cache)

    for options in ({}, {"num_beams": 3}, {"do_sample": True}):
        expected = generate(plain, **options)
        for loop in ({}, *loops) if not options else ({},):
            assert torch.equal(generate(packed, **options, **loop), expected), (options, loop)
