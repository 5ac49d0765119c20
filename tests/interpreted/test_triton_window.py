"""Sink and recent tokens, interpreted: append writes what the reference writes, and attention reads it within its promise."""

from __future__ import annotations

from typing import Any

import pytest
import test_triton_append as appends
import test_triton_decode as decodes
import torch

import test_cpu_attention as corpus
from halfbyte.cache import KVCache
from halfbyte.formats import KV_FORMATS
from halfbyte.kv_buffer import KVBuffer, new_kv_buffer
from halfbyte.ops.append import append_
from halfbyte.ops.decode_attention import decode_attention
from halfbyte.reference.rope import rope_tables

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NAMES = corpus.QUANTIZED
#: (sink tokens, recent tokens): some of each, none of one, a window that most appends fill at once.
WINDOWS = [(3, 7), (0, 16), (5, 0), (2, 1)]
COUNTS = [[1, 1, 1], [2, 0, 1], [31, 33, 7], [1, 1, 0], [5, 3, 6]]
TABLE = torch.tensor([[4, 0, 8], [2, 6, 1], [7, 3, 5]], dtype=torch.int32)


def buffers(window: tuple[int, int], how: str, heads: int, dim: int, names: tuple[str, str], dtype: torch.dtype) -> list[KVBuffer]:
    """Of 3 sequences of 96 tokens, in one piece, as [B, T, H, D], or in pages out of order; all memory poisoned."""
    rows, made = (9, heads, 32, dim) if how == "paged" else (3, heads, 96, dim), []
    for name in names:
        p = new_kv_buffer(KV_FORMATS[name], rows, (3, heads, sum(window), dim), dtype, "cpu")
        spoiled = (appends.in_memory(t, how) for t in p.tensors())
        made.append(KVBuffer(p.format, *spoiled, p.saturated, sink_tokens=window[0]))  # type: ignore[arg-type]
    return made


def both(window: tuple[int, int], how: str, names: tuple[str, str], dtype: torch.dtype, dim: int = 64, **options: Any) -> None:
    """The same appends by the reference and by the kernel: every byte, written or not."""
    kept = torch.float16 if dtype is torch.float16 else torch.bfloat16
    sides = []
    for impl in ("reference", "triton"):
        planes, lengths = buffers(window, how, 2, dim, names, kept), torch.zeros(3, dtype=torch.int32)
        for step, counts in enumerate(COUNTS):
            k, v = appends.tokens((3, 2, max(counts), dim), step, dtype)
            for b, n in enumerate(counts):
                k[b, :, n:] = v[b, :, n:] = torch.nan
            place = {"page_table": TABLE if how == "paged" else None, "counts": torch.tensor(counts, dtype=torch.int32)}
            rope = {"rope": rope_tables(torch.arange(max(counts)), dim)} if options.get("rope") else {}
            append_(k, v, *planes, lengths, **place, impl=impl, rotate_keys=bool(options.get("rotate")), **rope)
        sides.append([t for p in planes for t in (*p.tensors(), p.saturated) if t is not None] + [lengths])
    for s, t in zip(*sides, strict=True):
        assert torch.equal(s.contiguous().view(torch.uint8), t.contiguous().view(torch.uint8))


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("keys", NAMES)
def test_append_is_the_reference_bit_for_bit(keys: str) -> None:
    i = NAMES.index(keys)
    dtype = (torch.float16, torch.bfloat16, torch.float32)[i % 3]
    both(WINDOWS[i % 4], ("piece", "transposed", "paged")[i % 3], (keys, NAMES[i - 3]), dtype)


@pytest.mark.parametrize(("window", "how", "names", "options"), [
    ((3, 7), "paged", ("int8_token", "int4_g32"), {"rotate": True, "rope": True}),
    ((2, 1), "paged", ("int4", "int8_token"), {"rope": True}),
    ((0, 33), "piece", ("int8", "fp8"), {"rotate": True, "dim": 80}),
    ((40, 50), "transposed", ("int4", "int4"), {"dim": 96}),
])  # fmt: skip
def test_sizes_and_rotation(window: tuple[int, int], how: str, names: tuple[str, str], options: dict[str, Any]) -> None:
    both(window, how, names, torch.bfloat16, **options)


def test_more_heads_than_a_tile_holds() -> None:
    options: dict[str, Any] = {"keys": "int8_token", "values": "int4", "sink_tokens": 1, "recent_tokens": 2}
    a, b = (KVCache(1, 70, 128, 8, **options) for _ in range(2))
    for step in range(3):
        k, v = appends.tokens((1, 70, 2, 128), step)
        for cache, impl in ((a, "reference"), (b, "triton")):
            appends.put(cache, k, v, None, impl)
    assert all(torch.equal(s, t) for s, t in zip(a.tensors(), b.tensors(), strict=True))


def test_tokens_beyond_the_capacity_are_not_written() -> None:
    """But counted, and the window is that of the tokens that are there."""
    options: dict[str, Any] = {"keys": "int8", "values": "int4", "sink_tokens": 2, "recent_tokens": 5}
    a, b = (KVCache(2, 1, 64, 20, **options) for _ in range(2))
    (k, v), (more, most) = appends.tokens((2, 1, 18, 64)), appends.tokens((2, 1, 4, 64), 1)
    for cache, impl in ((a, "reference"), (b, "triton")):
        appends.put(cache, k, v, None, impl)
    appends.put(a, more[:, :, :2], most[:, :, :2], None, "reference")
    appends.put(b, more, most, None, "triton")
    assert b.lengths.tolist() == [22, 22]
    appends.put(b, more, most, None, "triton")
    for s, t in zip(a.keys.tensors() + a.values.tensors(), b.keys.tensors() + b.values.tensors(), strict=True):
        assert s is None or torch.equal(s, t)


# ------------------------------------------------------------------------------------------------------------- attention


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("keys", NAMES)
@pytest.mark.parametrize("window", [(0, 20), (3, 0), (5, 7), (40, 9)])
def test_attention_over_every_format(keys: str, window: tuple[int, int]) -> None:
    i = NAMES.index(keys) + WINDOWS.index((3, 7)) + window[0]
    names, queries, dtype = {"keys": keys, "values": NAMES[i % len(NAMES)]}, 1 + i % 2, decodes.DTYPES[i % 2]
    c = decodes.case(**names, queries=queries, dtype=dtype, lengths=[37, 64, 0, 12], exact=window)
    for splits in (1, 2, 5):
        c.check(decodes.tiles(splits))
    c.check(decodes.tiles(3, 32))


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("name", decodes.OPTIONS)
@pytest.mark.parametrize("queries", [1, 3])
def test_every_option(name: str, queries: int) -> None:
    c = decodes.case(keys="int8", values="int4", queries=queries, lengths=[37, 64], exact=(6, 11), **decodes.OPTIONS[name])
    c.check(decodes.tiles(2))


@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 3000.0])
@pytest.mark.parametrize("values", ["int8_tensor", "int4", "int4_g32"])
def test_values_of_any_size(values: str, scale: float) -> None:
    decodes.case(keys="int4", values=values, lengths=[50, 64], exact=(4, 20), v_scale=scale).check(decodes.tiles(2))


def test_pages_of_the_window_need_not_exist() -> None:
    """Of tokens that are all in 16 bits no page is read: their numbers may be those of no page."""
    c = decodes.case(keys="int8", values="int4", lengths=[60, 64], exact=(4, 34))
    expected = c.run(decodes.tiles(2))
    pages = c.keys.codes.shape[2] // 32
    order = corpus.shuffled(2, pages)
    c.keys, c.values = (corpus.paged(p, 32, order) for p in (c.keys, c.values))
    c.page_table = order.clone()
    c.page_table[:, 1:] = -1
    assert decodes.same(c.run(decodes.tiles(2)), expected)


@pytest.mark.parametrize("values", ["int8_tensor", "fp8_tensor"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_only_token_is_the_answer(values: str, dtype: torch.dtype) -> None:
    """Its weight is 1, whatever a per-tensor scale makes of it on the way."""
    cache = KVCache(2, 1, 64, 64, keys="int8", values=values, sink_tokens=4, recent_tokens=16, v_scale=0.8281, dtype=dtype)
    k, v = 100 * torch.randn(2, 2, 1, 1, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    cache.append(k, v)
    out = decode_attention(k.expand(2, 3, 1, 64), cache, impl="triton")
    assert torch.equal(out, v.expand(2, 3, 1, 64))
