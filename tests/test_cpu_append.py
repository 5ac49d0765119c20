"""`append` by compiled loops stores what the reference stores, bit for bit, and writes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfbyte.cache import KVCache
from halfbyte.cpu import append as cpu
from halfbyte.errors import CapacityError, InvalidArgument
from halfbyte.formats import KV_FORMATS
from halfbyte.kv_buffer import AppendCall, KVBuffer, Rope
from halfbyte.ops.append import append_
from halfbyte.ops.append_slots import append_slots
from halfbyte.reference.rope import rope_tables

pytest.importorskip("numba", reason="loops are compiled by numba: pip install halfbyte[cpu]")

VALUES = [name for name, f in KV_FORMATS.items() if not f.token_block]
WINDOWED = [name for name in VALUES if KV_FORMATS[name].is_quantized]
#: New tokens of two sequences, append by append: blocks of 32 that begin, end and are skipped; tokens that leave a window; the last
#: that there is room for.
COUNTS = ([1, 1], [31, 30], [0, 1], [33, 2], [1, 0], [17, 40], [45, 54])
PAGE, PAGES = 32, [[4, 0, 8, 1], [2, 6, 3, 7]]


def tokens(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """With outlier columns, a constant row, and zeros of both signs."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-3, 2, shape[-1])
    x[0, 0, 0] = 0.3
    x[-1, -1, -1, ::2] = -0.0
    return x.to(dtype)


def poisoned(t: torch.Tensor | None, layout: str) -> torch.Tensor | None:
    """Memory of this shape in which reads and writes by mistake are seen."""
    if t is None or t.ndim == 1:
        return None if t is None else t.clone()
    is_turned = layout == "turned" and t.ndim > 2
    shape = (t.shape[0], t.shape[2], t.shape[1], *t.shape[3:]) if is_turned else t.shape
    raw = torch.full(shape, -1, dtype={1: torch.int8, 2: torch.int16}[t.element_size()]).view(t.dtype)
    return raw.transpose(1, 2) if is_turned else raw


def new_cache(layout: str, heads: int, dim: int, **options: Any) -> KVCache:
    """Two sequences of 128 tokens: in one piece, as [B, T, H, D], or in pages out of order."""
    rows = (9, PAGE) if layout == "paged" else (2, 128)
    cache = KVCache(rows[0], heads, dim, rows[1], **options)
    buffers = []
    for side in (cache.keys, cache.values):
        codes, scales, offsets, tail = (poisoned(t, layout) for t in side.tensors())
        assert codes is not None
        tail = tail if tail is None else tail[:2]
        buffers.append(KVBuffer(side.format, codes, scales, offsets, tail, side.saturated, sink_tokens=side.sink_tokens))
    cache.keys, cache.values = buffers
    cache.lengths = torch.zeros(2, dtype=torch.int32)
    if layout == "paged":
        cache.page_table = torch.tensor(PAGES, dtype=torch.int32)
    return cache


def put(cache: KVCache, x: list[torch.Tensor], counts: list[int], impl: str, rope: Rope | None, q: Any) -> torch.Tensor | None:
    options: dict[str, Any] = {"page_table": cache.page_table, "rotate_keys": cache.rotate_keys, "rope": rope, "q": q}
    new = torch.tensor(counts, dtype=torch.int32)
    return append_(x[0], x[1], cache.keys, cache.values, cache.lengths, counts=new, impl=impl, **options)


def raw(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def differences(a: KVCache, b: KVCache) -> list[str]:
    """The parts of two caches that are not the same bytes; of a tail those of its tokens."""
    assert torch.equal(a.lengths, b.lengths)
    names = []
    for side in ("keys", "values"):
        one, two = getattr(a, side), getattr(b, side)
        parts = [(name, getattr(one, name), getattr(two, name)) for name in ("codes", "scales", "offsets", "saturated")]
        if one.tail is not None:
            here = (one.tail_tokens(a.lengths) >= 0)[:, None, :, None]
            parts.append(("tail", *(t.tail.masked_fill(~here, 0) for t in (one, two))))
        names += [f"{side}.{name}" for name, x, y in parts if x is not None and not torch.equal(raw(x), raw(y))]
    return names


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    is_windowed = draw(st.booleans())
    keys = draw(st.sampled_from(WINDOWED if is_windowed else [*KV_FORMATS]))
    window = {"sink_tokens": draw(st.integers(0, 5)), "recent_tokens": draw(st.sampled_from([0, 1, 7, 40]))} if is_windowed else {}
    case: dict[str, Any] = {"keys": keys, "values": draw(st.sampled_from(WINDOWED if is_windowed else VALUES)), **window}
    case |= {"rotate_keys": draw(st.booleans()), "dtype": draw(st.sampled_from([torch.float16, torch.bfloat16]))}
    layouts = ["whole", "turned"] if is_windowed else ["whole", "turned", "paged"]
    return {
        "options": case,
        "layout": draw(st.sampled_from(layouts)),
        "heads": draw(st.integers(1, 3)),
        "dim": draw(st.sampled_from([64, 128, 192])),
        "dtype": draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32])),
        "rope": draw(st.sampled_from([None, "half", "pairs", "partial", "shared"])),
        "threads": draw(st.sampled_from([1, 3])),
        "seed": draw(st.integers(0, 99)),
    }


def rope_of(kind: str | None, lengths: torch.Tensor, count: int, dim: int) -> Rope | None:
    if kind is None:
        return None
    positions = torch.arange(count) + (0 if kind == "shared" else lengths.unsqueeze(1))
    return Rope(*rope_tables(positions, dim // 2 if kind == "partial" else dim), kind == "pairs")


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_bits_are_those_of_the_reference(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: case["threads"])  # as `over_rows` reads it
    monkeypatch.setattr("halfbyte.cpu.threads.STEPS", 1)
    heads, dim = case["heads"], case["dim"]
    expected, stored = (new_cache(case["layout"], heads, dim, **case["options"]) for _ in range(2))
    for step, counts in enumerate(COUNTS):
        shape = (2, heads, max(counts), dim)
        x = [tokens(shape, case["seed"] + step + i, case["dtype"]) for i in (0, 100)]
        rope = rope_of(case["rope"], stored.lengths, max(counts), dim)
        q = None if rope is None else tokens((2, 2 * heads, *shape[2:]), step, case["dtype"])
        x[0] = x[0].transpose(1, 2).contiguous().transpose(1, 2)
        for t in x:  # tokens beyond counts may hold anything
            t[torch.arange(max(counts)).expand(2, heads, -1) >= torch.tensor(counts)[:, None, None]] = torch.nan
        results = [put(cache, x, counts, impl, rope, q) for cache, impl in ((expected, "reference"), (stored, "cpu"))]
        assert not differences(expected, stored)
        assert rope is None or torch.equal(*results)  # type: ignore[arg-type]


@pytest.mark.parametrize("keys", [*KV_FORMATS])
def test_loops_take_every_format(keys: str) -> None:
    """No case above is compared to itself."""
    cache = KVCache(1, 2, 64, 64, keys=keys, values="int4_g32")
    x = torch.randn(1, 2, 1, 64, dtype=torch.bfloat16)
    for number in range(2):  # the first append measures scales of all numbers, by the reference
        c = AppendCall(x, x, cache.keys, cache.values, cache.lengths, rotate_keys=cache.rotate_keys)
        assert cpu.append_(c) == (number > 0 or KV_FORMATS[keys].granularity != "tensor")
        cache.append(x, x)


@pytest.mark.parametrize("values", VALUES)
def test_slots(values: str) -> None:
    results = []
    for impl in ("reference", "cpu"):
        cache = KVCache(5, 2, 64, 16, keys="int8_token", values=values)
        k, v = (torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (0, 1))
        for slots in ([17, -1, 3, 79], [18, 4, -5, 0]):
            append_slots(k, v, cache.keys, cache.values, torch.tensor(slots), impl=impl)
        results.append(cache)
    assert not differences(*results)
    with pytest.raises(InvalidArgument, match="slot 80"):
        append_slots(k, v, cache.keys, cache.values, torch.tensor([0, 1, 2, 80]), impl="cpu")


BAD: dict[str, tuple[type[Exception], str, Any]] = {
    "not finite": (InvalidArgument, r"k holds 1 NaN", lambda c: c.k[0, 0, 0].__setitem__(0, torch.nan)),
    "infinite values": (InvalidArgument, r"v holds 1 NaN", lambda c: c.v[1, 1, 0].__setitem__(5, torch.inf)),
    "too large": (InvalidArgument, r"k \(keys\) is too large for int8_token in sequence 0", lambda c: c.k.fill_(3e38)),
    "no room": (CapacityError, "sequence 1", lambda c: c.lengths.copy_(torch.tensor([0, 96]))),
    "no length": (InvalidArgument, "lengths holds -1", lambda c: c.lengths.fill_(-1)),
    "no number": (InvalidArgument, "counts runs from 0 to 2", lambda c: c.counts.copy_(torch.tensor([0, 2]))),
    "no page": (InvalidArgument, r"page_table names a page outside 0\.\.8", lambda c: c.page_table.fill_(9)),
}


@pytest.mark.parametrize("fault", BAD)
def test_refused_appends_change_nothing(fault: str) -> None:
    error, message, spoil = BAD[fault]
    cache = new_cache("paged", 2, 64, keys="int8_token", values="int4")
    cache.page_table = torch.tensor([row[:3] for row in PAGES], dtype=torch.int32)
    x = [torch.ones(2, 2, 1, 64, dtype=torch.bfloat16) for _ in range(2)]
    where = (cache.lengths, torch.ones(2, dtype=torch.int32), cache.page_table)
    call = AppendCall(x[0], x[1], cache.keys, cache.values, *where)
    spoil(call)
    before = [raw(t).clone() for t in cache.tensors()]
    with pytest.raises(error, match=message):
        append_(*call[:5], counts=call.counts, page_table=call.page_table, impl="cpu")
    assert all(torch.equal(raw(t), old) for t, old in zip(cache.tensors(), before, strict=True))


def test_large_numbers_are_left_to_the_reference() -> None:
    """Where a scale might exceed fp16."""
    caches = [KVCache(1, 1, 64, 64, keys="int8", values="int8") for _ in range(2)]
    x = torch.full((1, 1, 1, 64), 3e5, dtype=torch.bfloat16)
    call = AppendCall(x, x, caches[0].keys, caches[0].values, caches[0].lengths)
    assert not cpu.append_(call)
    for cache, impl in zip(caches, ("reference", "cpu"), strict=True):
        append_(x, x, cache.keys, cache.values, cache.lengths, impl=impl)
    assert not differences(*caches)


def test_moved_memory_is_seen() -> None:
    """Views of a buffer are made once, and again where its memory is another."""
    cache, x = KVCache(1, 1, 64, 64), torch.ones(1, 1, 1, 64)
    cache.append(x, x)
    cache.keys.codes.data = cache.keys.codes.clone()
    cache.append(2 * x, x)
    assert cache.keys.codes[0, 0, :2].bool().all()
