"""PagedKVCache: pages are taken, shared, copied and given back without a byte of one sequence reaching another."""

from __future__ import annotations

import pytest
import torch

from halfbyte.cache import KVCache
from halfbyte.errors import CapacityError, InvalidArgument, Unsupported
from halfbyte.ops.decode_attention import decode_attention
from halfbyte.paging import PagedKVCache
from test_cache import assert_same, assert_unchanged, same_bits, snapshot, stored, tokens

pytestmark = pytest.mark.usefixtures("poisoned_memory")
KEYS = ["int8", "int4_g32", "int8_token", "int4_channel", "fp16", "int8_tensor"]


def consistent(cache: PagedKVCache) -> None:
    """The host's books agree with each other and with the device."""
    held = [page for pages in cache._held for page in pages]
    assert all(cache._holders[p] == held.count(p) for p in range(len(cache._holders)))
    assert sorted(cache._free) == [p for p in range(len(cache._holders)) if p not in held]
    assert cache._tokens == cache.lengths.tolist()
    for b, pages in enumerate(cache._held):
        assert len(pages) == -(-cache._tokens[b] // cache.page_size)
        assert cache.page_table[b].tolist() == pages + [-1] * (cache.page_table.shape[1] - len(pages))


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
def test_every_page_size_is_one_piece(page_size: int) -> None:
    paged, whole = PagedKVCache(2, 2, 64, 300, page_size=page_size, keys="int4"), KVCache(2, 2, 64, 300, keys="int4")
    for count in (1, 17, 0, 200):
        for cache in (paged, whole):
            cache.append(*tokens(2, 2, count, 64, count), torch.tensor([count, count // 2]))
    assert_same(paged, whole)
    consistent(paged)
    q = torch.randn(2, 4, 2, 64)
    for impl in ("cpu", "reference"):
        a, b = decode_attention(q, paged, impl=impl), decode_attention(q, whole, impl=impl)
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_pages_follow_the_lengths() -> None:
    cache = PagedKVCache(2, 2, 64, 256, page_size=32)
    assert (cache.capacity, cache.page_size, cache.free_pages) == (256, 32, 16)
    cache.append(*tokens(2, 2, 33, 64), torch.tensor([33, 1]))
    assert cache.free_pages == 13
    cache.crop(32)
    assert cache.free_pages == 14
    cache.crop(torch.tensor([0, 9]))
    assert cache.free_pages == 15
    consistent(cache)
    cache.reset()
    assert cache.free_pages == 16
    consistent(cache)


@pytest.mark.parametrize("keys", KEYS)
def test_shared_pages_are_copied_before_they_are_written(keys: str) -> None:
    cache = PagedKVCache(3, 2, 64, 128, page_size=32, keys=keys)
    alone = KVCache(3, 2, 64, 128, keys=keys)
    k, v = tokens(3, 2, 40, 64)
    for c in (cache, alone):
        c.append(k, v)
        c.reorder(torch.tensor([0, 0, 0]))
    assert cache.free_pages == 12 - 2  # all three hold the same two pages
    for step, counts in enumerate([[1, 0, 0], [0, 1, 1], [0, 30, 1], [25, 5, 30]]):
        more = tokens(3, 2, max(counts), 64, step + 5)  # each sequence goes its own way
        for c in (cache, alone):
            c.append(*more, torch.tensor(counts))
        assert_same(cache, alone)
        consistent(cache)
    assert not torch.equal(cache.dequantized()[0][0, :, 40], cache.dequantized()[0][2, :, 40])


def test_a_full_shared_page_stays_shared() -> None:
    cache = PagedKVCache(2, 2, 64, 96, page_size=32)
    cache.append(*tokens(2, 2, 32, 64))
    cache.reorder(torch.tensor([0, 0]))
    cache.append(*tokens(2, 2, 1, 64, 1))
    assert cache._held[0][0] == cache._held[1][0]
    assert cache._held[0][1] != cache._held[1][1]
    consistent(cache)


def test_appends_within_pages_do_not_write_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each write is a copy. A page that is shared stops that until the copy."""
    cache, writes = PagedKVCache(2, 2, 64, 192, page_size=32), []
    monkeypatch.setattr(cache, "_write_table", lambda *a: (writes.append(len(writes)), PagedKVCache._write_table(cache, *a)))
    for _ in range(65):
        cache.append(*tokens(2, 2, 1, 64))
    assert len(writes) == 3
    cache.reorder(torch.tensor([0, 0]))
    consistent(cache)
    for _ in range(2):
        cache.append(*tokens(2, 2, 1, 64))
        consistent(cache)


@pytest.mark.parametrize("keys", ["int8", "int4_channel"])
def test_crop_of_a_shared_page_leaves_the_other_sequence(keys: str) -> None:
    cache = PagedKVCache(2, 2, 64, 96, page_size=32, keys=keys)
    cache.append(*tokens(2, 2, 60, 64))
    cache.reorder(torch.tensor([0, 0]))
    other = [t.clone() for t in stored(cache, 1)]
    cache.crop(torch.tensor([20, 60]))
    cache.append(*tokens(2, 2, 30, 64, 3), torch.tensor([30, 0]))
    assert all(same_bits(s, t) for s, t in zip(stored(cache, 1), other, strict=True))
    consistent(cache)


@pytest.mark.parametrize("keys", KEYS)
def test_a_pool_that_is_too_small_changes_nothing(keys: str) -> None:
    cache = PagedKVCache(3, 2, 64, 128, page_size=32, pages=4, keys=keys)
    cache.append(*tokens(3, 2, 40, 64), torch.tensor([40, 3, 0]))
    before = snapshot(cache)
    with pytest.raises(CapacityError, match=r"needs a page and all 4 of the pool are held; nothing was appended"):
        cache.append(*tokens(3, 2, 40, 64, 1), torch.tensor([40, 40, 0]))
    assert_unchanged(cache, before)
    consistent(cache)
    cache.append(*tokens(3, 2, 40, 64, 1), torch.tensor([1, 29, 32]))  # what does fit
    assert cache.free_pages == 0
    consistent(cache)


def test_copying_a_shared_page_can_exhaust_the_pool_too() -> None:
    cache = PagedKVCache(2, 2, 64, 64, page_size=32, pages=2)
    cache.append(*tokens(2, 2, 5, 64))
    cache.reorder(torch.tensor([0, 0]))
    cache.append(*tokens(2, 2, 40, 64), torch.tensor([27, 0]))  # copies, and fills its page
    before, lengths = snapshot(cache), cache.lengths.tolist()
    with pytest.raises(CapacityError):
        cache.append(*tokens(2, 2, 40, 64), torch.tensor([1, 0]))
    assert_unchanged(cache, before)
    assert lengths == [32, 5]


def test_what_is_refused_gives_its_pages_back() -> None:
    cache = PagedKVCache(2, 2, 64, 128, page_size=32)
    cache.append(*tokens(2, 2, 5, 64))
    cache.reorder(torch.tensor([0, 0]))
    before = snapshot(cache)
    k, v = tokens(2, 2, 100, 64)
    v[1, 1, 99, 63] = torch.nan
    for _ in range(3):
        with pytest.raises(InvalidArgument, match="v holds 1 NaN"):
            cache.append(k, v)
        with pytest.raises(InvalidArgument, match="k has shape"):
            cache.append(k[..., :32], v)
        with pytest.raises(CapacityError):
            cache.append(k.repeat(1, 1, 2, 1), k.repeat(1, 1, 2, 1))
    host = snapshot(cache)[1]
    assert host[:3] == before[1][:3]  # type: ignore[index]
    assert cache.free_pages == 7
    consistent(cache)
    cache.append(k, k)
    consistent(cache)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("keys", KEYS)
def test_stale_pages_never_leak(keys: str, impl: str) -> None:
    """Pages that come back full of NaN scales and junk codes give what fresh ones give."""
    used, fresh = (PagedKVCache(2, 2, 64, 128, page_size=32, keys=keys, values="fp16") for _ in range(2))
    used.append(*tokens(2, 2, 128, 64))
    used.reset()
    for plane in (used.keys, used.values):
        for t in plane.tensors():
            if t is not None and t.ndim > 1:
                t.fill_(torch.nan if t.is_floating_point() else 0x7F)
    for cache in (used, fresh):
        cache.append(*tokens(2, 2, 45, 64, 1), torch.tensor([45, 0]))
    assert_same(used, fresh)
    q = torch.randn(2, 4, 3, 64)
    a, b = (decode_attention(q, c, return_lse=True, impl=impl) for c in (used, fresh))
    for got, expected in zip(a, b, strict=True):
        assert torch.equal(got, expected)
    for got, expected in zip(used.dequantized(), fresh.dequantized(), strict=True):
        assert torch.equal(got, expected)


def test_per_channel_pages_hold_whole_blocks() -> None:
    with pytest.raises(InvalidArgument, match="page_size=16; int8_channel"):
        PagedKVCache(1, 1, 64, 64, page_size=16, keys="int8_channel")
    with pytest.raises(InvalidArgument, match="page_size=48"):
        PagedKVCache(1, 1, 64, 64, page_size=48)


def test_select_is_not_offered() -> None:
    cache = PagedKVCache(2, 1, 64, 64)
    for call in (lambda: cache.select(torch.tensor([0])), lambda: cache.repeat_interleave(2)):
        with pytest.raises(Unsupported, match="use reorder"):
            call()


def test_no_sequences() -> None:
    cache = PagedKVCache(0, 2, 64, 64)
    cache.append(*tokens(0, 2, 5, 64))
    cache.reset()
    assert decode_attention(torch.zeros(0, 4, 1, 64), cache).shape == (0, 4, 1, 64)  # type: ignore[union-attr]


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_a_pool_without_pages_is_empty(impl: str) -> None:
    cache = PagedKVCache(2, 2, 64, 64, pages=0)
    out = decode_attention(torch.randn(2, 2, 1, 64), cache, impl=impl)
    assert not out.any()  # type: ignore[union-attr]
    assert not cache.dequantized()[0].any()
    with pytest.raises(CapacityError, match="all 0 of the pool"):
        cache.append(*tokens(2, 2, 1, 64))


def test_the_hosts_table_is_on_the_host() -> None:
    """Whatever torch's default device is: from there it is copied as pinned memory."""
    k, v = tokens(2, 2, 40, 64)
    with torch.device("meta"):  # in place of a GPU
        cache = PagedKVCache(2, 2, 64, 96, page_size=32, device="cpu")
        cache.append(k, v)
    assert cache._table.device.type == "cpu"
    consistent(cache)
