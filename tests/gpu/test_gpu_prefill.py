"""Prompts: long chunks over themselves and over the past, by torch's fused kernels, tuned ones in blocks, and the portable one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_place import PLACE

import halfbyte as hb
from accuracy import attention_accuracy

Made = tuple[torch.Tensor, torch.Tensor, torch.Tensor, hb.KVCache, list[torch.Tensor]]


def made(keys: str, values: str, past: int, count: int, batch: int, heads: int, group: int, dim: int, page: int = 0) -> Made:
    """Queries, keys and values of a chunk behind `past` tokens, the cache that holds all, and what attention should read."""
    rng = torch.Generator(PLACE.device).manual_seed(past + count)
    k, v = torch.randn(2, batch, heads, past + count, dim, generator=rng, device=PLACE.device).bfloat16()
    q = 2 * torch.randn(batch, heads * group, count, dim, generator=rng, device=PLACE.device).bfloat16()
    sizes = (batch, heads, dim, past + count + 3)
    options: dict[str, Any] = {"keys": keys, "values": values, "device": PLACE.device}
    cache = hb.PagedKVCache(*sizes, page_size=page, **options) if page else hb.KVCache(*sizes, **options)
    if past:
        cache.append(k[:, :, :past], v[:, :, :past])
    old = cache.dequantized()
    new = k[:, :, past:], v[:, :, past:]
    cache.append(*new)
    exact = [torch.cat([x[:, :, :past].double(), y.double()], 2) for x, y in zip(old, new, strict=True)]
    return q, *new, cache, exact


def eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    past: int,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its lse, written out, in q's dtype."""
    k, v = (x.to(q.dtype).repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * q.shape[3] ** -0.5
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    i = past + torch.arange(q.shape[2], device=q.device)[:, None]
    j = torch.arange(k.shape[2], device=q.device)
    if alibi_slopes is not None:
        s = s + (alibi_slopes.to(q.dtype)[:, None, None] * (j - i))
    hidden = j > i
    if window is not None:
        hidden = hidden | (j <= i - window)
    hidden = hidden.expand(q.shape[0], 1, *hidden.shape)
    if starts is not None:
        hidden = hidden | (j < starts[:, None])[:, None, None]
    s = s.masked_fill(hidden, -torch.inf)
    lse = s.logsumexp(-1)
    share = 1 if sinks is None else torch.sigmoid(lse - sinks.to(q.dtype)[:, None]).unsqueeze(-1)
    out = (torch.exp(s - lse.unsqueeze(-1)).nan_to_num(0) @ v) * share
    return out.masked_fill((lse == -torch.inf).unsqueeze(-1), 0), lse


def check(m: Made, impl: str, **options: Any) -> None:
    """Within the promise; lse within twice eager PyTorch's error in 16 bits."""
    q, k, v, cache, exact = m
    past = exact[0].shape[2] - q.shape[2]
    out, lse = hb.prefill_attention(q, k, v, cache, return_lse=True, impl=impl, **options)
    truth, truth_lse = eager(q.double(), *exact, past, **options)
    base, base_lse = eager(q, *exact, past, **options)
    attention_accuracy(out, base, truth).require(str(options))
    seen = truth_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen)
    assert (lse - truth_lse)[seen].abs().max() <= 2 * (base_lse - truth_lse)[seen].abs().max() + 1e-5


def options_of(name: str, heads: int, batch: int, count: int) -> dict[str, Any]:
    """Options by name: on this device, for so many query heads and sequences."""
    rng = torch.Generator().manual_seed(1)
    every = {
        "window": 37,
        "softcap": 20.0,
        "alibi_slopes": torch.rand(heads, generator=rng).to(PLACE.device) / 8,
        "starts": (torch.arange(batch, dtype=torch.int32) * (count // 3)).to(PLACE.device),
        "sinks": torch.randn(heads, generator=rng).to(PLACE.device),
    }
    return {option: every[option] for option in name.split()}


OPTIONS = ("", "window", "starts", "window starts sinks", "softcap", "alibi_slopes")


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("dim", "group"), [(128, 4), (64, 1), (96, 5), (256, 2)])
def test_a_prompt_over_itself(dim: int, group: int, name: str, impl: str) -> None:
    """Nothing before it, which the host knows; by torch's fused kernels with impl="auto", but for softcap and ALiBi."""
    m = made("int8", "int8", 0, PLACE.size(333, 40), 2, 2, group, dim)
    check(m, impl, **options_of(name, 2 * group, 2, m[0].shape[2]))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("keys", "values", "group", "page"), [("int4", "int4", 8, 0), ("int8", "int4_g32", 3, 64), ("fp8", "bf16", 4, 0)]
)
def test_a_chunk_over_the_past(keys: str, values: str, group: int, page: int, name: str, impl: str) -> None:
    """In blocks of query rows, the last one short; 16-bit values have the kernel for few rows, the others that for many."""
    count = PLACE.size(150, 20)
    m = made(keys, values, PLACE.size(400, 50), count, 2, 2, group, 128, page)
    check(m, impl, **options_of(name, 2 * group, 2, count))


def test_many_blocks_of_one_sequence() -> None:
    """More than 64 blocks, for which another kernel is compiled."""
    check(made("int8", "int4_g32", 300, PLACE.size(1100, 30), 1, 1, 8, 128), "auto")


@pytest.mark.parametrize("name", ["", "starts"])
def test_a_prompt_in_memory_that_fused_kernels_cannot_read(name: str) -> None:
    """Rows that begin anywhere; and the same under autocast, which must not change a type."""
    q, k, v, cache, _ = made("int8", "int8", 0, PLACE.size(333, 40), 2, 2, 4, 128)
    options = options_of(name, 8, 2, q.shape[2])
    expected = hb.prefill_attention(q, k, v, cache, **options)
    apart = [torch.nn.functional.pad(x, (1, 0))[..., 1:] for x in (q, k, v)]
    assert not any(x.is_contiguous() for x in apart)
    with torch.autocast(PLACE.device, dtype=torch.float16):
        out = hb.prefill_attention(*apart, cache, **options)
    assert isinstance(out, torch.Tensor)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [0, 3])
def test_one_token_of_many_heads_and_no_sequence(batch: int) -> None:
    """What FlashAttention refuses or takes for something else."""
    cache = hb.KVCache(batch, 1, 64, 32, keys="int8", values="int8", device=PLACE.device)
    k, v = torch.randn(2, batch, 1, 1, 64, device=PLACE.device).bfloat16()
    q = torch.randn(batch, 71, 1, 64, device=PLACE.device).bfloat16()
    cache.append(k, v)
    out = hb.prefill_attention(q, k, v, cache, starts=torch.zeros(batch, dtype=torch.int32, device=PLACE.device))
    torch.testing.assert_close(out, v.expand_as(q))


def new_tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator(PLACE.device).manual_seed(0)
    q, k, v = (torch.randn(1, heads, 64, 128, generator=rng, device=PLACE.device).bfloat16() for heads in (8, 2, 2))
    return q, k, v


def empty() -> hb.KVCache:
    return hb.KVCache(1, 2, 128, 400, keys="int8", values="int4_g32", device=PLACE.device)


def test_what_the_host_cannot_know_is_read() -> None:
    """Tokens that somebody put into a new cache past `append` are the past of what is appended."""
    q, k, v = new_tokens()
    cache, other = empty(), empty()
    cache.append(k, v)
    for mine, theirs in zip(other.tensors(), cache.tensors(), strict=True):
        mine.copy_(theirs)
    for one in (cache, other):
        one.append(k, v)
    a, b = (hb.prefill_attention(q, k, v, one) for one in (cache, other))
    assert torch.equal(a, b)  # type: ignore[arg-type]


@pytest.mark.skipif(PLACE.dry, reason="graphs need a GPU")
def test_a_chunk_in_a_graph_reads_its_past() -> None:
    """Recorded with an empty cache, replayed over a growing one."""
    q, k, v = new_tokens()
    cache, grown = empty(), empty()

    def step(held: hb.KVCache) -> Any:
        held.append(k, v)
        return hb.prefill_attention(q, k, v, held)

    for _ in range(2):
        step(grown)
    grown.reset()
    graph, attention = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(grown)
    grown.reset()
    cache.append(k, v)
    with torch.cuda.graph(attention):  # of a prompt of which the host knows that nothing is before it
        alone = hb.prefill_attention(q, k, v, cache)
    cache.reset()
    for _ in range(3):
        graph.replay()
        expected = step(cache)
        attention.replay()
        torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
        torch.testing.assert_close(alone, expected, rtol=0.02, atol=0.02)
