"""The attention function that transformers calls under the name "halfbyte"; `handles.py` has the mask function.

With a `PackedCache`, `key` and `value` are handles: they carry the packed cache of the layer and the chunk's own keys and values.
A prompt of any length attends to itself in 16 bits and reads only the past from the packed cache; steps, of one token or of drafts,
read everything from it. With any other cache, or none, the plain tensors go to torch's scaled_dot_product_attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.generation import configuration_utils

from halfbyte.cache import KVCache
from halfbyte.errors import Unsupported, warn_once
from halfbyte.hf.handles import NO_DRAFTS, Handle, check_one_text, mask, newest_layer
from halfbyte.hf.model_support import NAME, NO_WEIGHTS, WINDOW_IN_MASK, layer_chunk, layer_window
from halfbyte.ops.decode_attention import decode_attention, decode_of_parts
from halfbyte.ops.prefill_attention import prefill_attention
from halfbyte.ops.transform_heads import transform_heads

_NO_CACHE = (
    "this forward has no packed KV cache, so attention runs in 16 or 32 bits (torch's scaled_dot_product_attention); "
    "pass past_key_values=halfbyte.hf.PackedCache(model, capacity) to use one, or call the model within "
    "halfbyte.hf.packed_forwards(model), say to measure perplexity"
)

#: Keyword arguments that models pass along and that do not change what attention computes.
_HARMLESS = frozenset(
    (
        *("position_ids", "cache_position", "use_cache", "output_hidden_states", "return_dict", "logits_to_keep", "labels"),
        *("num_items_in_batch", "position_embeddings", "cache", "past_key_values", "past_key_value", "output_router_logits"),
        *("token_type_ids", "inputs_embeds", "is_causal"),
        *("tokenizer", "assistant_tokenizer"),  # of generate(), for stop strings and token healing
    )
)


class Attended(NamedTuple):
    """What an attention layer gave `attention`: a query, new keys and values [B, H, L, D], and options."""

    module: nn.Module
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: dict[str, Any]


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, Hq, L, D], key and value handles (or plain [B, Hkv, T, D]) -> (out [B, L, Hq, Dv] contiguous, None)."""
    if not isinstance(key, Handle) and (latent_layer := newest_layer(module)) is not None:
        latent_layer.learn(module, key)
        key, value = Handle(latent_layer, key, "keys"), Handle(latent_layer, value, "values")
    if not isinstance(key, Handle):
        if kwargs.get("is_causal", getattr(module, "is_causal", True)):  # an encoder of images has no cache
            warn_once(_NO_CACHE)
        return _plain(module, query, key, value, attention_mask, scaling, dropout, softcap, s_aux, kwargs), None
    _check_supported(module, kwargs)
    if (transform := key.layer.transform) is not None:
        if transform.shift is not None and (softcap is not None or s_aux is not None):
            raise Unsupported(
                f"{type(module).__name__} has a softcap or sinks, which scores of shifted keys do not fit; calibrate this model"
            )
        query = transform_heads(query, transform.queries) if key.rotated is None else query
    if dropout > 0 and module.training:
        raise Unsupported(
            f"dropout={dropout} while training: a packed cache serves inference; call model.eval(), or pass use_cache=False"
        )
    seen, window = _seen(key, query.shape[2], attention_mask, sliding_window), _window(module, sliding_window)
    size = layer_chunk(getattr(module, "config", None), getattr(module, "layer_idx", None))
    window = window if size is None else size
    if key.layer.drafts is not None and (seen is not None or key.layer.latent_heads is not None):
        raise Unsupported(NO_DRAFTS)
    if seen is not None:
        if key.layer.latent_heads is not None:
            raise Unsupported(
                f"{type(module).__name__} passes a mask by which tokens see later ones, as those of an image do; over a packed "
                f"cache of latents (MLA) attention is causal: use transformers' own cache (keys=None, values=None)"
            )
        out = _plain(module, query, *_in_full(key, value), seen, scaling, dropout, softcap, s_aux, {})
        return _by_token(out.transpose(1, 2), key.layer), None
    options: dict[str, Any] = {
        "sm_scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "window": window,
        "softcap": softcap,
        "sinks": None if s_aux is None else s_aux.float(),
        "starts": _starts(attention_mask, query.shape[0]),
    }
    layer = key.layer
    if not torch.compiler.is_compiling():
        if layer.checks_positions and query.shape[2] > 1 and layer.chunk is None:
            check_one_text(kwargs.get("position_ids"), options["starts"], cast(KVCache, layer.kv).lengths)
        if layer.calls is not None:
            call = {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
            layer.calls.append(Attended(module, query, key.new, value.new, call))
    if torch.compiler.is_compiling() and query.shape[2] <= layer.longest_step:
        decode = partial(decode_of_parts, query, layer.parts)
        return _by_token(_chunked_step(decode, layer, query.shape[2], options, size), layer), None
    kv, before = cast(KVCache, layer.kv), key.before
    held = getattr(kv, "window", None)
    if held is not None and (window is None or window > held):
        raise Unsupported(
            f"{type(module).__name__} attends to {window or 'all'} tokens, and the cache keeps the last {held}, the sliding window "
            f"of its configuration; use transformers' own cache (keys=None, values=None)"
        )

    heads = layer.latent_heads

    def read(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_step: bool) -> torch.Tensor:
        if not is_step:
            past, begins = kv if before is None else before, layer.chunk is not None
            if size is not None:
                begins = layer.begins and not torch.compiler.is_compiling()
                return _chunked_prompt(q, k, v, past, options, size, q.shape[2] * (before is None), begins)
            out = prefill_attention(q, k, v, past, appended=before is None, begins=begins, latent_heads=heads, **options)
            return cast(torch.Tensor, out)  # a pair only with return_lse
        q = q if heads is None else heads.absorbed(q)
        start = None if layer.chunk is None else layer.chunk.held

        def decode(options: dict[str, Any]) -> torch.Tensor:
            return cast(torch.Tensor, decode_attention(q, kv, query_start=start, latent=heads is not None, **options))

        out = _chunked_step(decode, layer, q.shape[2], options, size)
        return out if heads is None else heads.expanded(out)

    if torch.compiler.is_compiling() or layer.drafts is None:
        return _by_token(read(query, key.new, value.new, _is_step(layer, query.shape[2])), layer), None
    return _by_token(layer.drafts.attend(kv, query, key.new, value.new, read), layer), None


def sees_all(module: nn.Module, options: dict[str, Any]) -> bool:
    """Whether a layer attends to all tokens before its own, with options of an `Attended`."""
    config, number = getattr(module, "config", None), getattr(module, "layer_idx", None)
    own = None if config is None else layer_window(config, number)
    return own is None and options["sliding_window"] is None and layer_chunk(config, number) is None


def _is_step(layer: Any, count: int) -> bool:
    """Whether the newest `count` tokens read themselves as they are stored: one alone over an empty cache is a prompt."""
    if layer.chunk is not None:
        return layer.chunk.held is not None
    return count <= layer.longest_step and not (layer.begins and layer.longest_step == 1)


def _by_token(out: torch.Tensor, layer: Any) -> torch.Tensor:
    """[B, H, L, D] -> [B, L, H, D] contiguous, rotated back where the layer rotates values."""
    out = transform_heads(out) if layer.rotate_values and layer.latent_heads is None else out
    return out.transpose(1, 2).contiguous()


def _seen(key: Handle, queries: int, mask: torch.Tensor | None, window: int | None) -> torch.Tensor | None:
    """Which of all T tokens the queries see, bool [B or 1, 1, L, T], where that is more than causal attention with a window.

    That are tokens of an image, which see each other; and the last queries of a prompt in layers that read the keys and values of
    another, where transformers leaves the rest out.
    """
    if mask is not None and mask.dtype is torch.bool:
        return mask
    count = key.new.shape[2]
    if torch.compiler.is_compiling() or queries == count or _is_step(key.layer, count):
        return None
    length = cast(KVCache, key.layer.kv).lengths[:1, None, None, None]
    token = torch.arange(int(length), device=length.device)
    query = token[-queries:, None]
    visible = ((token <= query) & (token > query - (window or len(token))))[None, None]
    return visible if mask is None else visible & (token >= mask)


def _in_full(key: Handle, value: Handle) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values of a layer [B, H, T, D]: the past dequantized, the newest as they came."""
    kv = cast(KVCache, key.layer.kv)
    past = int(kv.lengths[0]) - key.new.shape[2]
    kv = kv if key.before is None else key.before
    sides = zip(kv.dequantized() if past else (key.new, value.new), (key.new, value.new), strict=True)
    keys, values = (torch.cat([old[:, :, :past].to(new.dtype), new], 2) for old, new in sides)
    return keys, values


def _window(module: nn.Module, given: int | None) -> int | None:
    """The window to apply. Raises when the configuration has one for this layer and the model did not pass it on."""
    config: Any = getattr(module, "config", None)
    expected = None if config is None else layer_window(config, getattr(module, "layer_idx", None))
    if given is not None or expected is None:
        return given
    if config.model_type not in WINDOW_IN_MASK:
        raise Unsupported(
            f"{type(module).__name__}: layer {getattr(module, 'layer_idx', '?')} has a sliding window of {expected} in its "
            f"configuration, but the model does not pass it to attention (only a mask of it); "
            f"use transformers' own cache (keys=None, values=None)"
        )
    return expected


def _starts(mask: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """The first real token of each sequence, int32 [B], from what `mask` made; None when nothing is padded."""
    if mask is None:
        return None
    if tuple(mask.shape) != (batch, 1, 1, 1) or mask.dtype is not torch.int32:
        raise Unsupported(
            f"attention_mask is {mask.dtype} {list(mask.shape)}; with a packed cache pass a 2-D mask [batch, tokens] (1: token, 0: "
            f"left padding), or none. Masks of other shapes and additive masks need transformers' own cache"
        )
    return mask.view(batch)


def _check_supported(module: nn.Module, kwargs: dict[str, Any]) -> None:
    if getattr(module, "is_causal", True) is False:
        raise Unsupported(
            f"{type(module).__name__} attends to both sides (is_causal is False); attention over a packed cache is causal"
        )
    for name, value in kwargs.items():
        if value is None or (value is False and name != "is_causal"):
            continue
        if name == "is_causal" and not value:
            raise Unsupported("is_causal=False: attention over a packed cache is causal")
        if name == "output_attentions":
            raise Unsupported(NO_WEIGHTS)
        if name not in _HARMLESS:
            raise Unsupported(
                f"{type(module).__name__} passes {name} to attention, which is not implemented over a packed cache; "
                f"use transformers' own cache (keys=None, values=None)"
            )


# ----------------------------------------------------------------------------------------------- chunked attention (Llama 4)

# A token sees those of its own chunk of a text, up to itself, and none of the chunks before. Chunks have `size` tokens each,
# counted from the first real token of a sequence: causal attention that starts with the chunk. A layer keeps as many tokens as one
# with a window of `size`.


def _chunked_step(
    decode: Callable[[dict[str, Any]], torch.Tensor], layer: Any, queries: int, options: dict[str, Any], size: int | None
) -> torch.Tensor:
    """Attention of so many queries over what a layer holds, [B, Hq, L, D], by decode(options); size: None without chunks.

    A pass is right for queries of one chunk, and a step of one token needs one. Where its chunk starts is computed by the first
    layer of a cache (`leader`), for all.
    """
    if size is None:
        return decode(options)
    lengths, starts, is_compiling = layer.parts["lengths"], options["starts"], torch.compiler.is_compiling()
    if queries == 1 and layer.leader is not None and not is_compiling and layer.drafts is None:
        return decode({**options, "starts": layer.leader.chunk_start.to(lengths.device)})
    first = lengths - queries if layer.chunk is None else layer.chunk.held
    start = first // size * size if starts is None else starts + (first - starts) // size * size
    if not is_compiling:
        layer.chunk_start = start
    out = decode({**options, "starts": start})
    for number in range(1, (queries - 2 + size) // size + 1):
        later = start + number * size
        is_later = first[:, None] + torch.arange(queries, device=first.device) >= later[:, None]
        out = torch.where(is_later[:, None, :, None], decode({**options, "starts": later}), out)
    return out


def _chunked_prompt(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KVCache, options: dict[str, Any], size: int, held: int, begins: bool
) -> torch.Tensor:
    """Attention of the new tokens of a prompt, [B, Hq, L, D]: each chunk over itself in 16 bits, and the first over the past, too.

    kv: a cache that holds the past and `held` of the new tokens behind it. begins: there is no past.
    """
    starts, past, tokens = options["starts"], kv.lengths - held, q.shape[2]
    if begins and (starts is None or tokens <= size):
        return _each_alone(q, k, v, kv, options, size)
    #: New tokens before the first boundary between chunks; of a prompt that begins, they are padding.
    before = (-past % size if starts is None else (starts - past) % size)[:, None]
    token = torch.arange(tokens, device=q.device)
    behind = token + before
    out = _each_alone(_at(q, behind), _at(k, behind), _at(v, behind), kv, {**options, "starts": None}, size)
    out = _at(out, token - before)
    if begins:
        return out
    few = tokens if held else size  # what the cache holds of the new tokens, it holds of all
    options = {**options, "starts": past + before[:, 0] - size, "appended": held > 0}
    first = cast(torch.Tensor, prefill_attention(q[:, :, :few], k[:, :, :few], v[:, :, :few], kv, **options))
    is_first = (token[:few] < before)[:, None, :, None]
    return torch.cat([torch.where(is_first, first, out[:, :, :few]), out[:, :, few:]], 2)


def _each_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KVCache, options: dict[str, Any], size: int) -> torch.Tensor:
    """Attention of every `size` tokens over themselves."""
    parts = zip(q.split(size, 2), k.split(size, 2), v.split(size, 2), strict=True)
    results = [prefill_attention(*part, cache=kv, begins=True, **options) for part in parts]
    return torch.cat(cast(list[torch.Tensor], results), 2)


def _at(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Tokens [B, L] of x [B, H, L, D]; the first or the last in place of those that it does not have."""
    index = tokens.clamp(0, x.shape[2] - 1)[:, None, :, None]
    return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))


# ------------------------------------------------------------------------------------------------------------ plain tensors


def _plain(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """[B, L, Hq, Dv] by transformers' scaled_dot_product_attention, or by the written-out form for softcap and sinks."""
    if softcap is None and s_aux is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        kwargs.pop("output_attentions", None)
        out, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
        return cast(torch.Tensor, out)
    if kwargs.get("position_bias") is not None:
        raise Unsupported("position_bias together with softcap or sinks is not implemented")
    groups, (batch, heads, queries, dim), tokens = query.shape[1] // key.shape[1], query.shape, key.shape[2]
    causal = kwargs.get("is_causal")
    if mask is None and (getattr(module, "is_causal", True) if causal is None else causal):
        mask = torch.ones(queries, tokens, dtype=torch.bool, device=query.device).tril(tokens - queries)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.mT).float() * (dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype is torch.bool else scores + mask
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.float().view(1, heads, 1, 1).expand(batch, heads, queries, 1)], -1)
    weights = scores.softmax(-1)[..., :tokens].to(value.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous()


# The names under which transformers finds them.
AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
if NAME not in configuration_utils.ALL_CACHE_IMPLEMENTATIONS:
    configuration_utils.ALL_CACHE_IMPLEMENTATIONS += (NAME,)  # no seam for it: a closed list, against which files are checked
