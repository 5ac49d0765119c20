"""A cache that keeps its window gives what one that keeps everything gives, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import halfbyte
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.paging import SPARE, WindowKVCache, ring_tokens

WINDOW, CAPACITY = 37, 1024
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "channel": {"keys": "int4_channel"},
    "exact": {"sink_tokens": 4, "recent_tokens": 8},
    "plain": {"keys": "bf16", "values": "bf16"},
}


def pair(**options: Any) -> tuple[halfbyte.KVCache, WindowKVCache]:
    return halfbyte.KVCache(2, 2, 32, CAPACITY, **options), WindowKVCache(2, 2, 32, CAPACITY, window=WINDOW, **options)


def add(count: int, *caches: halfbyte.KVCache, **options: Any) -> None:
    noise = torch.Generator().manual_seed(count)
    k, v = (torch.randn(2, 2, count, 32, generator=noise) for _ in range(2))
    for cache in caches:
        cache.append(k, v, **options)


def check_alike(whole: halfbyte.KVCache, ring: halfbyte.KVCache, queries: int = 1) -> None:
    q = torch.randn(whole.batch, 4, queries, 32, generator=torch.Generator().manual_seed(queries))
    assert torch.equal(*(halfbyte.decode_attention(q, cache, window=WINDOW) for cache in (whole, ring)))


@pytest.mark.parametrize("kind", OPTIONS)
def test_every_step_of_appends(kind: str) -> None:
    whole, ring = pair(**OPTIONS[kind])
    for count in (300, 1, 1, 5, 16, SPARE, 1, 1, 17, 200, 1):
        add(count, whole, ring)
        check_alike(whole, ring, min(count, 16))
    assert ring.nbytes - _tail_bytes(ring) == (whole.nbytes - _tail_bytes(whole)) * ring_tokens(WINDOW) // CAPACITY


def _tail_bytes(cache: halfbyte.KVCache) -> int:
    return sum(t.nbytes for t in (cache.keys.tail, cache.values.tail) if t is not None)


@pytest.mark.parametrize("kind", OPTIONS)
def test_crop_reorder_select_and_growth(kind: str) -> None:
    caches = pair(**OPTIONS[kind])
    add(300, *caches)
    for cache in caches:
        cache.crop(290)
        cache.reorder(torch.tensor([1, 0]))
    check_alike(*caches, queries=3)
    add(7, *caches)
    check_alike(*(cache.grown(4096).repeat_interleave(2) for cache in caches), queries=3)


def test_growth_of_a_ring_that_was_all_of_the_cache() -> None:
    whole, ring = halfbyte.KVCache(2, 2, 32, 64), WindowKVCache(2, 2, 32, 64, window=WINDOW)
    add(60, whole, ring)
    whole, ring = whole.grown(CAPACITY), ring.grown(CAPACITY)
    check_alike(whole, ring)
    add(200, whole, ring)
    check_alike(whole, ring)


@pytest.mark.parametrize(("length", "shortest"), [(300, 224), (113, 37), (112, 1)])
def test_a_crop_goes_back_to_what_is_held(length: int, shortest: int) -> None:
    """Of 128 tokens of a ring 16 may be recorded drafts. What is refused changes nothing."""
    whole, ring = pair()
    add(length, whole, ring)
    before = [t.clone() for t in ring.tensors()]
    for gone in (1, shortest - 1, torch.tensor([length, shortest - 1])) if shortest > 1 else ():
        with pytest.raises(Unsupported, match=r"the last 128 that it has seen, and attention after \d+ tokens needs others"):
            ring.crop(gone)
        assert all(map(torch.equal, ring.tensors(), before))
    for cache in (whole, ring):
        cache.crop(shortest)
    check_alike(whole, ring)


def test_a_crop_knows_the_places_that_cropped_tokens_took() -> None:
    whole, ring = pair()
    add(300, whole, ring)
    for cache in (whole, ring):
        cache.crop(285)
        add(3, cache)
    with pytest.raises(Unsupported, match="needs others"):
        ring.crop(210)
    ring.crop(0)
    ring.reset()
    add(100, ring)
    ring.crop(10)


def test_a_refused_append_changes_nothing() -> None:
    _, ring = pair()
    add(30, ring)
    before = [t.clone() for t in ring.tensors()]
    k = torch.randn(2, 2, 400, 32)
    k[1, 0, 390] = torch.nan  # in the last part
    with pytest.raises(InvalidArgument, match="NaN"):
        ring.append(k, k.nan_to_num())
    assert all(map(torch.equal, ring.tensors(), before))


def test_counts_rope_and_queries_of_a_long_append() -> None:
    whole, ring = pair()
    angles = torch.rand(300, 16)
    rope, q = (angles.cos(), angles.sin()), torch.randn(2, 4, 300, 32)
    k, v, counts = torch.randn(2, 2, 300, 32), torch.randn(2, 2, 300, 32), torch.tensor([300, 130], dtype=torch.int32)
    rotated = [cache.append(k, v, counts, rope, q=q) for cache in (whole, ring)]
    assert torch.equal(*rotated)
    check_alike(whole, ring)


def test_a_chunk_reads_the_past_from_a_copy() -> None:
    whole, ring = pair()
    add(200, whole, ring)
    before = ring.repeat_interleave(1)
    k, v, q = torch.randn(2, 2, 150, 32), torch.randn(2, 2, 150, 32), torch.randn(2, 4, 150, 32)
    for cache in (whole, ring):
        cache.append(k, v)
    expected = halfbyte.prefill_attention(q, k, v, whole, window=WINDOW)
    assert torch.equal(halfbyte.prefill_attention(q, k, v, before, window=WINDOW, appended=False), expected)
