"""`deterministic_batch=True` where torch computes: a sequence has the same bits alone and in every batch, on each level."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import halfbyte as hb

LENGTHS = [2048, 1999, 1, 700, 32, 0, 1311, 2047]


def filled(kind: str, heads: int, dim: int, keys: str, values: str) -> hb.KVCache:
    make = hb.PagedKVCache if kind == "paged" else hb.KVCache
    window: dict[str, Any] = {"sink_tokens": 4, "recent_tokens": 16} if kind == "window" else {}
    cache = make(len(LENGTHS), heads, dim, 2048, keys=keys, values=values, **window)
    k, v = torch.randn(2, len(LENGTHS), heads, 2048, dim, generator=torch.Generator().manual_seed(3)).half().unbind(0)
    cache.append(k, v, torch.tensor(LENGTHS, dtype=torch.int32))
    return cache


def chosen(cache: hb.KVCache, rows: list[int], *, trimmed: bool = False) -> hb.KVCache:
    """These sequences of a cache; `trimmed`: in memory of another capacity."""
    index = torch.tensor(rows)
    if cache.page_table is not None:
        keys = cache.keys if cache.keys.tail is None else replace(cache.keys, tail=cache.keys.tail[index])
        parts = (keys, cache.values, cache.lengths[index])
        return hb.KVCache.from_buffers(*parts, page_table=cache.page_table[index], rotate_keys=cache.rotate_keys)
    made = cache.select(index)
    if not trimmed:
        return made
    capacity = -(-max(LENGTHS[row] for row in rows) // 64) * 64
    roomy = hb.KVCache(len(rows), cache.kv_heads, cache.head_dim, capacity, keys=cache.keys.format, values=cache.values.format)
    for ours, theirs in ((roomy.keys, made.keys), (roomy.values, made.values)):
        for t, source in zip(ours.tensors(), theirs.tensors(), strict=True):
            if t is not None and source is not None:
                t.copy_(source[tuple(slice(0, n) for n in t.shape)])
    roomy.lengths.copy_(made.lengths)
    return roomy


def attended(cache: hb.KVCache, q: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    return tuple(hb.decode_attention(q, cache, return_lse=True, deterministic_batch=True, **options))


def check_alone(cache: hb.KVCache, q: torch.Tensor, starts: torch.Tensor | None = None, **options: Any) -> None:
    """Alone, and with another sequence in memory of another capacity."""

    def of(rows: list[int]) -> dict[str, Any]:
        return options if starts is None else {**options, "starts": starts[rows]}

    whole = attended(cache, q, **of(list(range(8))))
    for sequence in range(8):
        alone = attended(chosen(cache, [sequence]), q[[sequence]], **of([sequence]))
        pair = [4, sequence]
        other = attended(chosen(cache, pair, trimmed=cache.keys.tail is None), q[pair], **of(pair))
        for t, one, two in zip(whole, alone, other, strict=True):
            assert torch.equal(t[sequence], one[0])
            assert torch.equal(t[sequence], two[1])


@pytest.mark.parametrize(("kind", "dtype"), [("contiguous", torch.float16), ("paged", torch.float32)])
def test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch(kind: str, dtype: torch.dtype) -> None:
    """The shapes where the blocks of tokens are cut otherwise for one sequence than for eight."""
    cache = filled(kind, 8, 128, "int8", "int8")
    check_alone(cache, torch.randn(8, 32, 1, 128, generator=torch.Generator().manual_seed(0)).to(dtype), impl="cpu")


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("kind", "keys"),
    [*product(("contiguous", "paged"), ("int8", "int4_channel", "fp8", "int8_tensor", "int8_token", "int2")), ("window", "int4")],
)
def test_every_layout_of_scales_and_every_option(impl: str, kind: str, keys: str) -> None:
    cache = filled(kind, 2, 32, keys, "int4_g32")
    q = torch.randn(8, 6, 2, 32, generator=torch.Generator().manual_seed(1)).half()
    starts = torch.tensor([0, 5, 0, 600, 1, 0, 64, 2047])
    check_alone(cache, q, starts, window=900, sinks=torch.ones(6), alibi_slopes=torch.ones(6) / 8, impl=impl)


def test_strides_of_the_queries_do_not_count() -> None:
    cache = filled("contiguous", 3, 64, "int8", "int8")
    q = torch.randn(8, 3, 2, 64, generator=torch.Generator().manual_seed(2)).half()
    strided = q.permute(2, 1, 3, 0).contiguous().permute(3, 1, 0, 2)
    assert not strided.is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(attended(cache, q), attended(cache, strided), strict=True))


def test_a_batch_of_none() -> None:
    out, lse = attended(hb.KVCache(0, 2, 32, 64), torch.zeros(0, 4, 1, 32))
    assert out.shape == (0, 4, 1, 32)
    assert lse.shape == (0, 4, 1)
