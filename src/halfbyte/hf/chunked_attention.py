"""Chunked attention (Llama 4): a token sees those of its own chunk of a text, up to itself, and none of the chunks before.

Chunks have `size` tokens each, counted from the first real token of a sequence. So a query sees what causal attention sees that
starts with its chunk, and its layer keeps as many tokens as one with a window of `size`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from halfbyte.cache import KVCache
from halfbyte.ops.prefill_attention import prefill_attention


def step(
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


def chunked_prompt(
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
    cache = KVCache.from_buffers(kv.keys, kv.values, past, page_table=kv.page_table, rotate_keys=kv.rotate_keys)
    options = {**options, "starts": past + before[:, 0] - size, "appended": False}
    first = cast(torch.Tensor, prefill_attention(q[:, :, :size], k[:, :, :size], v[:, :, :size], cache, **options))
    is_first = (token[:size] < before)[:, None, :, None]
    return torch.cat([torch.where(is_first, first, out[:, :, :size]), out[:, :, size:]], 2)


def _each_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KVCache, options: dict[str, Any], size: int) -> torch.Tensor:
    """Attention of every `size` tokens over themselves."""
    parts = zip(q.split(size, 2), k.split(size, 2), v.split(size, 2), strict=True)
    results = [prefill_attention(*part, cache=kv, begins=True, **options) for part in parts]
    return torch.cat(cast(list[torch.Tensor], results), 2)


def _at(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Tokens [B, L] of x [B, H, L, D]; the first or the last in place of those that it does not have."""
    index = tokens.clamp(0, x.shape[2] - 1)[:, None, :, None]
    return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))
