"""The cpu level of attention: the bound of lse, and which KV head a query head reads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import halfbyte as hb
from accuracy import lse_bound


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("offset", [0.0, -3e2, -6e4])
@pytest.mark.parametrize("peaked", [1.0, 60.0])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_lse_is_within_its_stated_bound(impl: str, dim: int, peaked: float, offset: float) -> None:
    """`offset`: of every score, as a large common part of keys gives; `peaked`: one key far above the others."""
    cache = hb.KVCache(2, 2, dim, 512, keys="fp16", values="int8")
    q, k = drawn(2, 4, 1, dim, seed=0), drawn(2, 2, 500, dim, seed=1)
    q[..., 0], k[..., 0] = 8.0, offset
    k[:, :, 17, 1:] *= peaked
    cache.append(k.half(), k.half())
    q = q.half()
    lse = hb.decode_attention(q, cache, sm_scale=1.0, return_lse=True, impl=impl)[1]
    keys = k.half().double().repeat_interleave(2, 1)
    scores = q.double() @ keys.mT
    error, bound = (lse.double() - scores.logsumexp(-1)).abs(), lse_bound(q.double(), keys)
    assert (error <= (bound / (dim + 8) if impl == "reference" else bound)).all()


@pytest.mark.parametrize(("q_heads", "heads"), [(5, 1), (10, 2), (40, 8), (7, 1), (12, 4)])
@pytest.mark.parametrize("queries", [1, 3])
def test_query_heads_read_their_own_kv_head(q_heads: int, heads: int, queries: int) -> None:
    """Values say which head they are of, so any other mapping of heads gives another number."""
    cache = hb.KVCache(1, heads, 32, 64, keys="fp16", values="fp16")
    v = torch.arange(heads, dtype=torch.float32).view(1, heads, 1, 1).expand(1, heads, 9, 32)
    cache.append(drawn(1, heads, 9, 32, seed=2).half(), v.half())
    out = hb.decode_attention(drawn(1, q_heads, queries, 32, seed=3).half(), cache, impl="cpu")
    expected = torch.arange(q_heads) // (q_heads // heads)
    torch.testing.assert_close(out, expected.view(1, -1, 1, 1).expand_as(out).half())


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Python changes threads so often that unguarded ones meet in every run."""
    before, threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(1e-5)
    torch.set_num_threads(1)
    yield
    sys.setswitchinterval(before)
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize("kind", [hb.KVCache, hb.PagedKVCache])
def test_threads_that_share_a_cache_lose_no_token(kind: type[hb.KVCache]) -> None:
    """The contract in the docstring of `KVCache`. Pages of 16 tokens, so that they are handed out all the time."""
    options: dict[str, Any] = {"page_size": 16} if kind is hb.PagedKVCache else {}
    cache, each, failed = kind(2, 1, 32, 256, keys="fp16", values="fp16", **options), 60, []

    def work(start: int) -> None:
        try:
            for i in range(each):
                token = torch.full((2, 1, 1, 32), float(start + i + 1)).half()
                cache.append(token, token, torch.tensor([1, start // each % 2]))
        except Exception as error:  # in a thread nobody would see it
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n * each,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert cache.lengths.tolist() == [4 * each, 2 * each]
    stored = cache.dequantized()[1][:, 0, :, 0]
    assert sorted(stored[0, : 4 * each].tolist()) == [float(n + 1) for n in range(4 * each)]
    assert sorted(stored[1, : 2 * each].tolist()) == [float(n + 1) for n in range(4 * each) if n // each % 2]


@pytest.mark.usefixtures("eager_switches")
def test_pages_are_not_handed_out_twice_while_threads_crop_and_append() -> None:
    cache, failed = hb.PagedKVCache(2, 1, 32, 512, keys="fp16", values="fp16", page_size=16), []

    def work(change: Callable[[], None]) -> None:
        try:
            for _ in range(300):
                change()
        except Exception as error:
            failed.append(error)

    token = torch.ones(2, 1, 1, 32).half()
    changes = (lambda: cache.append(token, token), lambda: cache.crop(20), lambda: cache.reorder(torch.tensor([1, 0])), cache.reset)
    threads = [threading.Thread(target=work, args=(change,)) for change in changes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    held = [page for pages in cache._held for page in pages]
    assert len(set(held)) == len(held)
    assert len(held) + cache.free_pages == 64
    assert cache.lengths.tolist() == cache._tokens
