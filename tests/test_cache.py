"""KVCache: what is stored does not depend on how it arrived, and what is refused changes nothing."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halfbyte.cache import KVCache
from halfbyte.cache_options import CacheOptions
from halfbyte.device import H200
from halfbyte.errors import CapacityError, HalfbyteError, InvalidArgument
from halfbyte.formats import KV_FORMATS, key_format
from halfbyte.kv_buffer import KVBuffer
from halfbyte.ops.decode_attention import decode_attention
from halfbyte.paging import PagedKVCache, WindowKVCache
from halfbyte.plans.explain import explanation
from halfbyte.reference.hadamard import rotate
from halfbyte.reference.quantize import dequantize, quantize
from halfbyte.reference.rope import rope_tables
from sizes import head_dim

pytestmark = pytest.mark.usefixtures("poisoned_memory")
KEYS = list(KV_FORMATS)
VALUES = [name for name, f in KV_FORMATS.items() if not f.token_block]
DIMS = [40, 64, 80, 96, 128, 256, 59]


def fits(name: str, dim: int) -> bool:
    fmt = KV_FORMATS[name]
    grouped = fmt.granularity == "group" and fmt.scale is not None and dim % (fmt.scale.group or 1) != 0
    return not grouped and dim % fmt.code.per_byte == 0


def rows(t: torch.Tensor, cache: KVCache, b: int, count: int) -> torch.Tensor:
    """The first `count` rows (tokens, or blocks of tokens) of sequence b, through the page table if there is one."""
    axis = 1 if t.ndim == 2 else 2
    if cache.page_table is None:
        return t[b].narrow(axis - 1, 0, count)
    size = t.shape[axis]
    pages = [t[int(p)] for p in cache.page_table[b, : -(-count // size)]]
    return torch.cat(pages, axis - 1).narrow(axis - 1, 0, count) if pages else t.new_zeros(t.shape[1:]).narrow(axis - 1, 0, 0)


def stored(cache: KVCache, b: int) -> list[torch.Tensor]:
    """Everything that sequence b holds: codes, scales, offsets and the tail, and nothing behind its length."""
    n, parts = int(cache.lengths[b]), []
    for plane in (cache.keys, cache.values):
        block = plane.format.token_block or 1
        done = n // block
        parts.append(rows(plane.codes, cache, b, done * block))
        for t in (plane.scales, plane.offsets):
            if t is not None:
                parts.append(t if t.ndim == 1 else rows(t, cache, b, done))
        if plane.tail is not None:
            parts.append(plane.tail[b, :, : n - done * block])
    return parts


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(*(t.contiguous().view(torch.uint8) for t in (a, b)))


def assert_same(a: KVCache, b: KVCache) -> None:
    assert torch.equal(a.lengths, b.lengths)
    for sequence in range(a.batch):
        for s, t in zip(stored(a, sequence), stored(b, sequence), strict=True):
            assert same_bits(s, t)


def snapshot(cache: KVCache) -> tuple[list[torch.Tensor], object]:
    host = ()
    if isinstance(cache, PagedKVCache):
        host = ([list(h) for h in cache._held], list(cache._tokens), list(cache._holders), sorted(cache._free))
    return [t.clone() for t in cache.tensors()], host


def assert_unchanged(cache: KVCache, before: tuple[list[torch.Tensor], object]) -> None:
    tensors, host = snapshot(cache)
    assert all(same_bits(a, b) for a, b in zip(tensors, before[0], strict=True))
    assert host == before[1]


def make(paged: bool, batch: int, heads: int, dim: int, capacity: int, **options: Any) -> KVCache:
    if paged:
        return PagedKVCache(batch, heads, dim, capacity, page_size=32, **options)
    return KVCache(batch, heads, dim, capacity, **options)


def tokens(batch: int, heads: int, count: int, dim: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(batch, heads, count, dim, generator=generator)
    return k * torch.logspace(-1, 1, dim), torch.randn(batch, heads, count, dim, generator=generator)


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    dim = draw(st.sampled_from(DIMS))
    keys = draw(st.sampled_from([k for k in KEYS if fits(k, dim)]))
    values = draw(st.sampled_from([v for v in VALUES if fits(v, dim)]))
    options: dict[str, Any] = {"keys": keys, "values": values}
    if keys.endswith("_tensor"):
        options["k_scale"] = 0.125
    if values.endswith("_tensor"):
        options["v_scale"] = 0.03125
    options["rotate_keys"] = draw(st.booleans()) and dim % 16 == 0
    options["dtype"] = draw(st.sampled_from([torch.float16, torch.bfloat16]))
    return {"batch": draw(st.integers(0, 4)), "heads": draw(st.integers(1, 3)), "dim": dim, "capacity": 70} | options


# ------------------------------------------------------------------------------------------------------------------ append


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_queries_are_rotated_like_keys(paged: bool, dtype: torch.dtype) -> None:
    """A query is rotated as the key of its token is; queries without one stay what they are, and a refused append gives none."""
    cache = PagedKVCache(2, 2, 64, 64, page_size=32, keys="bf16") if paged else KVCache(2, 2, 64, 64, keys="bf16")
    k, v = (torch.randn(2, 2, 40, 64).to(dtype) for _ in range(2))
    q, rope = k.repeat_interleave(3, 1), rope_tables(torch.arange(40) + 3, 64)
    before = q.clone()
    rotated = cache.append(k, v, rope=rope, q=q)
    assert rotated.dtype is dtype
    assert torch.equal(q, before)
    stored = cache.dequantized()[0][:, :, :40]
    assert torch.equal(rotated.bfloat16().float(), stored.repeat_interleave(3, 1))
    assert cache.append(k[:, :, :1], v[:, :, :1]) is None
    with pytest.raises(CapacityError):
        cache.append(k, v, rope=rope, q=q)
    assert cache.lengths.tolist() == [41, 41]


def check_cut(layout: dict[str, Any], cuts: list[int], paged: bool, seed: int) -> None:
    """70 tokens at once, and cut at these places."""
    layout = {**layout, "rotate_keys": False}  # see test_rotated_keys_do_not_depend_on_the_cut
    one, many = make(paged, **layout), make(paged, **layout)
    k, v = tokens(layout["batch"], layout["heads"], 70, layout["dim"], seed)
    one.append(k, v)
    for lo, hi in zip([0, *sorted(cuts)], [*sorted(cuts), 70], strict=True):
        many.append(k[:, :, lo:hi], v[:, :, lo:hi])
    assert many.lengths.tolist() == [70] * layout["batch"]
    assert_same(one, many)
    for a, b in zip(one.dequantized(), many.dequantized(), strict=True):
        assert torch.equal(a, b)


BLOCKS = {"batch": 2, "heads": 2, "dim": 64, "capacity": 70, "keys": "int8_channel", "values": "int8", "dtype": torch.bfloat16}


@settings(max_examples=60)
@example(layout=BLOCKS, cuts=[5, 33], paged=False, seed=0)
@given(layout=layouts(), cuts=st.lists(st.integers(0, 40), max_size=5), paged=st.booleans(), seed=st.integers(0, 999))
def test_any_cut_stores_the_same_bits(layout: dict[str, Any], cuts: list[int], paged: bool, seed: int) -> None:
    check_cut(layout, cuts, paged, seed)


@settings(max_examples=60)
@given(layout=layouts(), data=st.data(), seed=st.integers(0, 999))
def test_counts_store_what_each_sequence_alone_would(layout: dict[str, Any], data: st.DataObject, seed: int) -> None:
    """Ragged appends, whatever lies beyond the counts, contiguous and paged: the same bits as one sequence at a time."""
    layout = {**layout, "rotate_keys": False}
    batch = layout["batch"]
    caches = [make(paged, **layout) for paged in (False, True)]
    alone = [KVCache(**{**_arguments(layout), "batch": 1}) for _ in range(batch)]
    for step in range(2):
        count = data.draw(st.integers(0, 35))
        counts = torch.tensor(data.draw(st.lists(st.integers(0, count), min_size=batch, max_size=batch)), dtype=torch.int32)
        k, v = tokens(batch, layout["heads"], count, layout["dim"], seed + step)
        for b, n in enumerate(counts.tolist()):
            k[b, :, n:], v[b, :, n:] = torch.nan, torch.inf
            alone[b].append(k[b : b + 1, :, :n], v[b : b + 1, :, :n])
        for cache in caches:
            cache.append(k, v, counts)
    assert_same(*caches)
    for b, single in enumerate(alone):
        assert caches[0].lengths[b] == single.lengths[0]
        assert all(same_bits(s, t) for s, t in zip(stored(caches[0], b), stored(single, 0), strict=True))


def test_rotated_keys_do_not_depend_on_the_cut() -> None:
    k, v = tokens(1, 1, 256, 256)
    one, many = (KVCache(1, 1, 256, 256, keys="fp16", rotate_keys=True) for _ in range(2))
    one.append(k, v)
    for i in range(256):
        many.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        assert torch.equal(rotate(k)[:, :, i], rotate(k[:, :, i : i + 1])[:, :, 0])
    assert_same(one, many)


def _arguments(layout: dict[str, Any]) -> dict[str, Any]:
    renamed = {"heads": "kv_heads", "dim": "head_dim"}
    return {renamed.get(name, name): value for name, value in layout.items()}


@pytest.mark.parametrize("keys", [k for k in KEYS if not k.endswith("_tensor")])
@pytest.mark.parametrize("paged", [False, True])
def test_the_cache_holds_what_quantize_makes(keys: str, paged: bool) -> None:
    dim = head_dim(keys)
    k, v = tokens(2, 2, 64, dim)
    k = k.bfloat16().float()  # the tail rounds
    cache = make(paged, 2, 2, dim, 96, keys=keys, values="int4", rotate_keys=False)
    cache.append(k, v)
    got_k, got_v = cache.dequantized()
    assert torch.equal(got_k[:, :, :64], dequantize(quantize(k, key_format(keys))))
    assert torch.equal(got_v[:, :, :64], dequantize(quantize(v, key_format("int4"))))
    assert not got_k[:, :, 64:].any()


def test_the_tail_is_the_input_in_sixteen_bits() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        cache = KVCache(1, 2, 64, 64, keys="int4_channel", dtype=dtype)
        k, v = tokens(1, 2, 40, 64)
        cache.append(k, v)
        assert torch.equal(cache.dequantized()[0][:, :, 32:40], k[:, :, 32:].to(dtype).float())


@pytest.mark.parametrize("keys", ["int8", "int4", "fp16"])
def test_rotated_keys_are_rotated_before_they_are_quantized(keys: str) -> None:
    cache, k = KVCache(1, 2, 64, 8, keys=keys, rotate_keys=True), tokens(1, 2, 8, 64)[0]
    cache.append(k, k)
    expected = dequantize(quantize(rotate(k), key_format(keys)))
    assert torch.equal(cache.dequantized()[0], rotate(expected.double()).float())
    assert not torch.equal(expected, dequantize(quantize(k, key_format(keys))))


#: Keys that a cache rotates unless it is requested otherwise: few bits, and outlier channels share scales with other channels.
ROTATED = {name for name in KEYS if re.fullmatch(r"int[24](_g\d+)?", name)}


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("keys", KEYS)
def test_which_keys_are_rotated_by_default(keys: str, paged: bool) -> None:
    for dim in (40, 64, 80, 96, 128, 256):
        if fits(keys, dim):
            cache = make(paged, 1, 2, dim, 64, keys=keys, values="int8")
            assert cache.rotate_keys is (keys in ROTATED and dim != 40)
            assert not make(paged, 1, 2, dim, 64, keys=keys, values="int8", rotate_keys=False).rotate_keys
    cache = make(paged, 2, 2, head_dim(keys), 64, keys=keys, values="int8")
    assert ("rotated" in repr(cache)) == (keys in ROTATED)
    copies = [] if paged else [cache.select(torch.tensor([1])), cache.repeat_interleave(2), cache.grown(128)]
    assert all(made.rotate_keys is (keys in ROTATED) for made in copies)
    assert not KVCache.from_buffers(cache.keys, cache.values, cache.lengths, page_table=cache.page_table).rotate_keys


@pytest.mark.parametrize("keys", ["int4", "int4_g32", "int2"])
def test_rotation_is_what_outlier_channels_need(keys: str) -> None:
    """One channel of 128 is 30 times larger in keys, and smaller in queries: exact attention does not change, INT4's does."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 2, count, 128, generator=generator) for count in (1, 200, 200))
    k[..., 7], q[..., 7] = 30 * k[..., 7], q[..., 7] / 30
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    error = {}
    for rotate_keys in (None, False):
        cache = KVCache(1, 2, 128, 200, keys=keys, values="fp16", rotate_keys=rotate_keys)
        cache.append(k, v)
        error[rotate_keys] = (decode_attention(q, cache) - exact).norm()  # type: ignore[operator]
    assert error[None] < error[False] / 2


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("keys", ["int8", "int4_channel", "int8_tensor", "fp16"])
def test_an_append_past_the_capacity_changes_nothing(paged: bool, keys: str) -> None:
    cache = make(paged, 3, 2, 64, 64, keys=keys)
    k, v = tokens(3, 2, 40, 64)
    cache.append(k, v, torch.tensor([40, 3, 0]))
    before = snapshot(cache)
    with pytest.raises(CapacityError, match=r"sequence 0 holds 40 tokens and 25 more.*capacity of 64"):
        cache.append(k, v, torch.tensor([25, 5, 5]))
    assert_unchanged(cache, before)
    cache.append(k, v, torch.tensor([24, 40, 40]))  # exactly full is fine
    assert cache.lengths.tolist() == [64, 43, 40]


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("keys", ["int8", "int4_g32", "int4_channel", "int8_tensor", "fp8", "fp16", "bf16"])
@pytest.mark.parametrize("values", ["int8_tensor", "fp16", "int4"])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_infinity_change_nothing(paged: bool, keys: str, values: str, which: str, bad: float) -> None:
    cache = make(paged, 2, 2, 64, 64, keys=keys, values=values)
    k, v = tokens(2, 2, 33, 64)
    before = snapshot(cache)  # also nothing calibrated
    for _ in range(2):
        x = {"k": k.clone(), "v": v.clone()}
        x[which][1, 1, 32, 7] = bad
        with pytest.raises(InvalidArgument, match=f"{which} holds 1 NaN or infinite"):
            cache.append(x["k"], x["v"])
        assert_unchanged(cache, before)
        cache.reset()
        cache.append(k[:, :, :7], v[:, :, :7])
        before = snapshot(cache)


@pytest.mark.parametrize("keys", ["int8", "int4", "int4_channel", "int8_channel", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [5, 32])
def test_numbers_that_a_format_cannot_hold_change_nothing(keys: str, dtype: torch.dtype, count: int) -> None:
    """Refused when they come, also where the 16-bit tail could hold them until their block is whole."""
    cache = KVCache(2, 1, 64, 64, keys=keys, dtype=dtype)
    before = snapshot(cache)
    for bad in (1e8, -1e8):
        k, v = tokens(2, 1, count, 64)
        k[1, 0, 3, 5] = bad
        with pytest.raises(InvalidArgument, match=r"k \(keys\) is too large for \w+ in sequence 1|k rounded to"):
            cache.append(k, v)
        assert_unchanged(cache, before)


@pytest.mark.parametrize("keys", ["int4_channel", "int8_channel"])
def test_numbers_that_were_appended_fit_into_their_block(keys: str) -> None:
    """The largest of both signs, whatever else comes into the block."""
    cache = KVCache(1, 1, 64, 64, keys=keys)
    largest = 65280.0 * (127 if keys == "int8_channel" else 1)
    for i in range(32):
        cache.append(torch.full((1, 1, 1, 64), largest * (-1) ** i), torch.zeros(1, 1, 1, 64))
    assert bool(cache.dequantized()[0].isfinite().all())


@pytest.mark.parametrize("kind", [KVCache, PagedKVCache])
def test_a_cache_larger_than_the_memory_is_refused_before_it_is_touched(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.device.describe", lambda device: SimpleNamespace(memory_bytes=64 * 10**9))
    monkeypatch.setattr("halfbyte.cache.new_kv_buffer", lambda *a: pytest.fail("allocated"))
    with pytest.raises(CapacityError, match=r"capacity: 2,147,483,6\d\d tokens take 227.6 GB, and cpu has 64.0 GB"):
        kind(1, 1, 64, 2**31 - 1)


@pytest.mark.parametrize("counts", [[-1, 1], [4, 1], [0, 5]])
@pytest.mark.parametrize("paged", [False, True])
def test_counts_outside_the_tokens_given_change_nothing(counts: list[int], paged: bool) -> None:
    cache = make(paged, 2, 2, 64, 64)
    before = snapshot(cache)
    with pytest.raises(InvalidArgument, match="counts runs from"):
        cache.append(*tokens(2, 2, 3, 64), torch.tensor(counts))
    assert_unchanged(cache, before)


def test_the_per_tensor_scale_is_measured_once() -> None:
    cache = KVCache(2, 2, 64, 64, keys="int8_tensor", values="fp8_tensor")
    k, v = tokens(2, 2, 5, 64)
    cache.append(k, v)
    assert cache.keys.scales is not None
    expected = quantize(k, key_format("int8_tensor"))
    assert expected.scales is not None
    assert torch.equal(cache.keys.scales, expected.scales)
    assert cache.keys.saturated is not None
    assert cache.keys.saturated.item() == 0
    cache.append(k * 2, v)
    assert torch.equal(cache.keys.scales, expected.scales)
    beyond = ((k * 2 / expected.scales.float()).round().abs() > 127).sum()
    assert cache.keys.saturated.item() == beyond > 0
    cache.reset()
    assert not cache.keys.scales.any()
    assert not cache.keys.saturated.any()
    fixed = KVCache(2, 2, 64, 64, keys="int8_tensor", k_scale=0.5)
    fixed.append(k, v)
    fixed.reset()
    assert fixed.keys.scales is not None
    assert fixed.keys.scales.tolist() == [0.5]


@pytest.mark.parametrize("how", ["no tokens", "counts of 0"])
def test_an_append_of_nothing_measures_nothing(how: str) -> None:
    cache = KVCache(2, 2, 64, 64, keys="int8_tensor", values="fp8_tensor")
    k, v = tokens(2, 2, 5, 64)
    if how == "no tokens":
        cache.append(k[:, :, :0], v[:, :, :0])
    else:
        cache.append(k, v, torch.tensor([0, 0]))
    cache.append(k, v)
    half_a_step = k.abs().max() / 254
    assert (cache.dequantized()[0][:, :, :5] - k).abs().max() < 1.01 * half_a_step


@pytest.mark.parametrize("keys", KEYS)
def test_an_append_of_no_tokens_changes_nothing(keys: str) -> None:
    dim = head_dim(keys)
    options = {"k_scale": 1.0} if keys.endswith("_tensor") else {}
    for paged in (False, True):
        cache = make(paged, 2, 2, dim, 64, keys=keys, **options)
        k, v = tokens(2, 2, 35, dim)
        cache.append(k, v)
        before = snapshot(cache)
        cache.append(k[:, :, :0], v[:, :, :0])
        assert_unchanged(cache, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_type_of_the_input_does_not_matter(dtype: torch.dtype) -> None:
    k, v = (x.to(dtype) for x in tokens(1, 2, 33, 64))
    a, b = (KVCache(1, 2, 64, 64, keys="int4_channel", values="int4_g32") for _ in range(2))
    a.append(k, v)
    b.append(k.float(), v.float())
    assert_same(a, b)


def test_strides_of_the_input_do_not_matter() -> None:
    base = torch.randn(40, 2, 3, 130)
    k = base.permute(2, 1, 0, 3)[..., 1:129]
    for keys in ("int8", "int4_channel", "int8_token"):
        a, b = KVCache(3, 2, 128, 64, keys=keys), KVCache(3, 2, 128, 64, keys=keys)
        a.append(k, k[:1].expand(3, -1, -1, -1))
        b.append(k.contiguous(), k[:1].expand(3, -1, -1, -1).contiguous())
        assert_same(a, b)


# ------------------------------------------------------------------------------------------- reset, crop, reorder, select


@settings(max_examples=40)
@given(layout=layouts(), data=st.data(), paged=st.booleans())
def test_crop_keeps_the_first_tokens(layout: dict[str, Any], data: st.DataObject, paged: bool) -> None:
    layout = {**layout, "batch": 2}
    cache, short = make(paged, **layout), make(paged, **layout)
    k, v = tokens(2, layout["heads"], 70, layout["dim"])
    counts = torch.tensor(data.draw(st.lists(st.integers(0, 70), min_size=2, max_size=2)), dtype=torch.int32)
    keep = data.draw(st.one_of(st.integers(0, 80), st.lists(st.integers(0, 80), min_size=2, max_size=2).map(torch.tensor)))
    cache.append(k, v, counts)
    whole = cache.dequantized()
    cache.crop(keep)
    left = torch.minimum(counts, torch.as_tensor(keep, dtype=torch.int32))
    assert torch.equal(cache.lengths, left)
    for got, full in zip(cache.dequantized(), whole, strict=True):
        mask = (torch.arange(full.shape[2]) < left.view(-1, 1)).view(2, 1, -1, 1)
        expected = full * mask
        if cache.keys.tail is not None and got is not None:  # a block that came back is rounded to the tail's 16 bits
            torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-6 + (2**-7 * 40 if layout["rotate_keys"] else 0))
        else:
            assert torch.equal(got, expected)
    if cache.keys.tail is None:  # and goes on as if the others had never been there
        short.append(k, v, left)
        more = tokens(2, layout["heads"], 3, layout["dim"], 9)
        limit = torch.minimum(70 - left, torch.tensor(3))
        for c in (cache, short):
            c.append(*more, limit)
        assert_same(cache, short)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("keys", ["int8_channel", "int4_channel"])
def test_crop_into_a_finished_block_brings_it_back(paged: bool, keys: str) -> None:
    k, v = tokens(2, 2, 70, 64)
    cache = make(paged, 2, 2, 64, 128, keys=keys, dtype=torch.float16)
    cache.append(k, v)
    before = cache.dequantized()[0]
    cache.crop(torch.tensor([40, 70]))
    assert cache.keys.tail is not None
    assert torch.equal(cache.keys.tail[0, :, :8].float(), before[0, :, 32:40].half().float())
    assert torch.equal(cache.dequantized()[0][1], before[1])  # the other sequence is as it was
    # New tokens finish the block from what the tail holds, and from nothing that lay behind it.
    mixed = torch.cat([cache.dequantized()[0][:1, :, 32:40], k[:1, :, :24].half().float()], 2)
    cache.append(k[:, :, :24], v[:, :, :24], torch.tensor([24, 0]))
    assert torch.equal(cache.dequantized()[0][:1, :, 32:64], dequantize(quantize(mixed, key_format(keys))))


def test_crop_of_poisoned_rows_leaks_nothing() -> None:
    k, v = tokens(1, 2, 64, 64)
    cache = KVCache(1, 2, 64, 96, keys="int8_channel", values="fp16")
    cache.append(k, v)
    cache.crop(33)
    assert cache.keys.scales is not None
    cache.keys.scales[:, :, 1:] = torch.nan
    cache.values.codes[:, :, 33:] = torch.nan
    out = decode_attention(torch.randn(1, 4, 1, 64), cache)
    assert isinstance(out, torch.Tensor)
    assert out.isfinite().all()


def test_reset_forgets() -> None:
    for paged in (False, True):
        for keys in ("int4", "int4_channel"):
            cache, fresh = make(paged, 2, 2, 64, 64, keys=keys), make(paged, 2, 2, 64, 64, keys=keys)
            cache.append(*tokens(2, 2, 40, 64, 1))
            cache.reset()
            assert cache.lengths.tolist() == [0, 0]
            assert not cache.dequantized()[0].any()
            for c in (cache, fresh):
                c.append(*tokens(2, 2, 35, 64, 2))
            assert_same(cache, fresh)


def test_a_cpu_reads_the_longest_length() -> None:
    cache = KVCache(2, 2, 64, 64)
    assert cache.length_bound == 0
    cache.append(*tokens(2, 2, 5, 64), counts=torch.tensor([3, 5], dtype=torch.int32))
    assert cache.length_bound == 5


@pytest.mark.parametrize("paged", [False, True])
def test_what_the_host_is_sure_of(paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upper bound of lengths in a GPU's memory, which a CPU stands in for, as long as nobody else can have written there."""
    recorded = [False]
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recorded[0])
    monkeypatch.setattr("halfbyte.cache.prepare", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t)
    new = torch.randn(2, 2, 5, 64)
    cache = PagedKVCache(2, 2, 64, 64, page_size=16) if paged else KVCache(2, 2, 64, 64)
    assert cache.length_bound == 0
    cache.append(new, new)
    cache.append(new, new, counts=torch.tensor([0, 5], dtype=torch.int32))
    assert cache.length_bound == 10
    recorded[0] = True
    assert cache.length_bound is None
    recorded[0] = False
    cache.lengths += 1
    assert cache.length_bound is None
    if paged:
        return
    cache.append(new, new)
    assert cache.length_bound is None  # it is not known again by appending
    cache.reset()
    cache.append(new, new)
    assert cache.length_bound == 5
    cache.crop(3)
    assert cache.length_bound is None
    recorded[0] = True
    cache._check_capacity(5, None)  # what a capture of an append runs of it
    recorded[0] = False
    cache.reset()
    assert cache.length_bound is None  # the graph may be replayed
    cache.expect_replays(False)
    cache.append(new, new)
    assert cache.length_bound == 5
    cache.expect_replays(True)
    assert cache.length_bound is None
    cache.reset()
    cache.expect_replays(False)
    theirs = KVCache.from_buffers(cache.keys, cache.values, torch.zeros_like(cache.lengths))
    for _ in range(2):
        theirs.append(new, new)
        assert theirs.length_bound is None
        theirs.reset()
    theirs = KVCache.from_buffers(cache.keys, cache.values, torch.tensor([0, 50], dtype=torch.int32))
    theirs._check_capacity(5, None)
    assert theirs._bound == 55  # of the longest, which the next append goes by
    cache.reset()
    cache.append(new, new)
    for other in (copy.deepcopy(cache), cache.select(torch.tensor([0, 1])), pickle.loads(pickle.dumps(cache))):
        assert other.length_bound is None
        other.reset()
        assert other.length_bound == 0
    theirs = KVCache(2, 2, 64, 64)
    theirs.reset()
    theirs.lengths.fill_(30)
    for other in (copy.deepcopy(theirs), copy.copy(theirs), theirs.repeat_interleave(2), pickle.loads(pickle.dumps(theirs))):
        assert other.length_bound is None  # though torch counts their writes from the beginning
    for _ in range(3):  # each may lie where the one before the last lay
        cache.lengths = torch.tensor([7, 7], dtype=torch.int32)
        assert cache.length_bound is None
    with torch.inference_mode():
        cache.lengths = torch.zeros(2, dtype=torch.int32)
        cache.reset()
    assert cache.length_bound is None
    compiled = KVCache(2, 2, 64, 64)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    compiled._check_capacity(5, None)  # what is traced of an append
    monkeypatch.undo()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    compiled.reset()
    assert compiled.length_bound is None  # a graph of the compiled code may append unseen


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("keys", KEYS)
def test_reorder(paged: bool, keys: str) -> None:
    dim = head_dim(keys)
    cache = make(paged, 3, 2, dim, 96, keys=keys)
    cache.append(*tokens(3, 2, 40, dim), torch.tensor([40, 33, 0]))
    before = [[t.clone() for t in stored(cache, b)] for b in range(3)]
    cache.reorder(torch.tensor([1, 1, 0]))
    assert cache.lengths.tolist() == [33, 33, 40]
    for b, source in enumerate([1, 1, 0]):
        assert all(same_bits(s, t) for s, t in zip(stored(cache, b), before[source], strict=True))


@pytest.mark.parametrize("keys", KEYS)
def test_select_and_repeat_copy(keys: str) -> None:
    dim = head_dim(keys)
    cache = KVCache(3, 2, dim, 96, keys=keys)
    cache.append(*tokens(3, 2, 40, dim), torch.tensor([40, 33, 0]))
    before = snapshot(cache)
    made = cache.select(torch.tensor([2, 0, 0, 1]))
    assert (made.batch, made.lengths.tolist()) == (4, [0, 40, 40, 33])
    for i, source in enumerate([2, 0, 0, 1]):
        assert all(same_bits(s, t) for s, t in zip(stored(made, i), stored(cache, source), strict=True))
    assert cache.repeat_interleave(2).lengths.tolist() == [40, 40, 33, 33, 0, 0]
    made.append(*tokens(4, 2, 9, dim, 3))
    made.crop(1)
    assert_unchanged(cache, before)  # its own memory
    assert cache.select(torch.tensor([], dtype=torch.long)).batch == cache.repeat_interleave(0).batch == 0


@pytest.mark.parametrize("keys", KEYS)
def test_a_cache_that_grew_holds_the_same(keys: str) -> None:
    dim = head_dim(keys)
    cache = KVCache(3, 2, dim, 64, keys=keys, dtype=torch.float16)
    cache.append(*tokens(3, 2, 40, dim), torch.tensor([40, 33, 0]))
    before = snapshot(cache)
    made = cache.grown(100)
    assert made.capacity == (128 if cache.keys.tail is not None else 100)
    assert all(same_bits(s, t) for b in range(3) for s, t in zip(stored(made, b), stored(cache, b), strict=True))
    for c in (made, KVCache(3, 2, dim, 200, keys=keys, dtype=torch.float16).grown(1)):
        c.reset()
        c.append(*tokens(3, 2, 64, dim, 2))
    made.append(*tokens(3, 2, 30, dim, 3))
    assert made.lengths.tolist() == [94, 94, 94]
    assert_unchanged(cache, before)  # its own memory
    assert cache.grown(1).capacity == cache.capacity
    with pytest.raises(InvalidArgument, match="capacity=0"):
        cache.grown(0)


def test_what_is_fixed_stays_fixed_in_a_cache_that_grew() -> None:
    cache = KVCache(1, 1, 64, 64, keys="int8_tensor", values="int8_tensor", k_scale=0.5).grown(128)
    cache.append(*tokens(1, 1, 4, 64))
    cache.reset()
    assert cache.keys.scales is not None
    assert cache.values.scales is not None
    assert (cache.keys.scales.item(), cache.values.scales.item()) == (0.5, 0)  # the other one is measured again


@pytest.mark.parametrize("captured", [False, True])
def test_what_the_host_counts_in_a_cache_that_grew(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts on from the tokens held, so that growing costs no read; unless replays of a graph appended unseen."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    monkeypatch.setattr("halfbyte.cache.prepare", lambda device: None)
    cache, new = KVCache(2, 2, 64, 64), torch.randn(2, 2, 5, 64)
    cache.append(new, new)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    reads: list[int] = []
    monkeypatch.setattr("halfbyte.cache.check_capacity", lambda lengths, *rest: reads.append(1))
    made = cache.grown(128)
    assert made.length_bound is None  # somebody wrote its lengths
    made.append(new, new)
    assert len(reads) == captured
    made.forget_length_bound()
    made.append(new, new)
    assert len(reads) == captured + 1


# ----------------------------------------------------------------------------------------------------- memory of an engine


def rehoused(t: torch.Tensor | None, how: str) -> torch.Tensor | None:
    """The same numbers in other memory: [B, T, H, D] inside, or a view in the middle of something larger."""
    if t is None or t.ndim < 3:
        return None if t is None else t.clone()
    if how == "transposed":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    larger = torch.full([n + 3 for n in t.shape], 77, dtype=torch.float32).to(t.dtype)
    view = larger[tuple(slice(1, n + 1) for n in t.shape)]
    view.copy_(t)
    return view


@pytest.mark.parametrize("how", ["transposed", "offset"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("keys", KEYS)
def test_wrapped_memory_gives_the_same_bits(how: str, paged: bool, keys: str) -> None:
    dim = head_dim(keys)
    options = {"k_scale": 0.5} if keys.endswith("_tensor") else {}
    native = make(paged, 2, 2, dim, 96, keys=keys, values="int4_g32", **options)
    native.append(*tokens(2, 2, 40, dim), torch.tensor([40, 0]))
    planes = [
        KVBuffer(p.format, *(rehoused(t, how) for t in (*p.tensors(), p.saturated)))  # type: ignore[arg-type]
        for p in (native.keys, native.values)
    ]
    table = native.page_table
    if table is not None:  # an engine hands out pages: give each sequence its share
        table = torch.tensor([native._held[0] + [2], [3, 4, 5]], dtype=torch.int32)  # type: ignore[attr-defined]
        assert sorted(table.flatten().tolist()) == [0, 1, 2, 3, 4, 5]
    wrapped = KVCache.from_buffers(*planes, native.lengths.clone(), page_table=table, rotate_keys=native.rotate_keys)
    assert wrapped.keys.codes.data_ptr() == planes[0].codes.data_ptr()
    assert (wrapped.capacity, wrapped.batch, wrapped.kv_heads, wrapped.head_dim) == (96, 2, 2, dim)
    more = tokens(2, 2, 9, dim, 4)
    for cache in (native, wrapped):
        cache.append(*more, torch.tensor([9, 5]))
    assert_same(native, wrapped)
    q = torch.randn(2, 4, 3, dim)
    assert torch.equal(decode_attention(q, native), decode_attention(q, wrapped))  # type: ignore[arg-type]
    wrapped.crop(33)
    native.crop(33)
    assert_same(native, wrapped)


def test_wrapped_pages_are_the_engines() -> None:
    native = PagedKVCache(2, 2, 64, 64, page_size=32)
    wrapped = KVCache.from_buffers(native.keys, native.values, native.lengths, page_table=native.page_table)
    before = snapshot(wrapped)
    with pytest.raises(InvalidArgument, match="page_table names a page outside"):  # -1: nothing allocated yet
        wrapped.append(*tokens(2, 2, 1, 64))
    assert_unchanged(wrapped, before)
    with pytest.raises(InvalidArgument, match="belong to an engine"):
        wrapped.reorder(torch.tensor([1, 0]))


@pytest.mark.parametrize("page", [-1, 99])
def test_a_crop_into_a_page_that_is_not_there_is_refused(page: int) -> None:
    """Its block would come back from whatever page stands there, as the tail."""
    cache = PagedKVCache(2, 2, 64, 64, page_size=32, keys="int4_channel")
    cache.append(*tokens(2, 2, 40, 64))
    assert cache.page_table is not None
    cache.page_table[1, 0] = page
    wrapped = KVCache.from_buffers(cache.keys, cache.values, cache.lengths, page_table=cache.page_table)
    before = snapshot(wrapped)
    with pytest.raises(InvalidArgument, match="page_table names a page outside"):
        wrapped.crop(torch.tensor([40, 20]))
    assert_unchanged(wrapped, before)
    wrapped.crop(torch.tensor([20, 40]))  # the other sequence's pages are there
    assert wrapped.lengths.tolist() == [20, 40]


@pytest.mark.parametrize("keys", ["int8", "int4_channel"])
def test_a_crop_of_lengths_beyond_the_capacity_is_refused(keys: str) -> None:
    native = KVCache(2, 2, 64, 64, keys=keys)
    native.append(*tokens(2, 2, 64, 64))
    native.crop(64)  # of a full cache
    native.lengths[1] = 1000
    with pytest.raises(InvalidArgument, match="more than the capacity of 64"):
        KVCache.from_buffers(native.keys, native.values, native.lengths).crop(500)
    assert native.lengths.tolist() == [64, 1000]


@pytest.mark.parametrize("keys", ["int8_tensor", "int4_channel"])
@pytest.mark.parametrize("kind", [KVCache, PagedKVCache])
def test_what_was_made_in_inference_mode_goes_on_outside_of_it(kind: type[KVCache], keys: str) -> None:
    """Servers wrap generation in torch.inference_mode; caches made inside are cropped, reset and appended to anywhere."""
    k, v = tokens(2, 2, 33, 64)
    with torch.inference_mode():
        made = [kind(2, 2, 64, 96, keys=keys)]
        made[0].append(k, v)
        made += [] if kind is PagedKVCache else [made[0].select(torch.tensor([1, 0]))]
    for cache in made:
        cache.append(k, v)
        cache.reorder(torch.tensor([1, 0]))
        cache.crop(5)
        assert cache.lengths.tolist() == [5, 5]
        cache.reset()
        with torch.inference_mode():
            cache.append(k, v)


@pytest.mark.parametrize("which", ["codes", "lengths"])
def test_memory_that_sequences_share_can_be_read_only(which: str) -> None:
    """A prefix of all sequences, expanded: what one appends would overwrite what another did."""
    native = KVCache(1, 2, 64, 64, keys="int8", values="int8")
    native.append(*tokens(1, 2, 5, 64))

    def wide(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t.expand(3, *t.shape[1:]) if which == "codes" else t.repeat(3, *[1] * (t.ndim - 1))

    planes = [KVBuffer(p.format, *map(wide, p.tensors())) for p in (native.keys, native.values)]  # type: ignore[arg-type]
    lengths = native.lengths.repeat(3) if which == "codes" else native.lengths.expand(3)
    shared = KVCache.from_buffers(*planes, lengths)
    assert all(torch.equal(a[i], b[0]) for i in range(3) for a, b in zip(shared.dequantized(), native.dequantized(), strict=True))
    before = snapshot(shared)
    with pytest.raises(InvalidArgument, match=f"{which} holds several elements in one place"):
        shared.append(*tokens(3, 2, 1, 64))
    assert_unchanged(shared, before)
    for change in (lambda: shared.crop(1), shared.reset, lambda: shared.reorder(torch.tensor([1, 0, 2]))):
        with pytest.raises(InvalidArgument, match="read-only"):
            change()
    assert_unchanged(shared, before)
    own = shared.select(torch.tensor([0, 2]))
    own.append(*tokens(2, 2, 1, 64))
    assert own.lengths.tolist() == [6, 6]


def test_what_does_not_fit_the_format_is_not_wrapped() -> None:
    cache = KVCache(2, 2, 64, 64, keys="int4_channel", values="int4_g32")
    k, v, n = cache.keys, cache.values, cache.lengths
    assert k.scales is not None
    bad = {
        "keys.codes": (KVBuffer(k.format, k.codes.to(torch.int8), k.scales, k.offsets, k.tail), v, n),
        "keys.codes has": (KVBuffer(k.format, k.codes[0], k.scales, k.offsets, k.tail), v, n),
        "keys.scales": (KVBuffer(k.format, k.codes, k.scales[:, :, :1], k.offsets, k.tail), v, n),
        "keys.offsets": (KVBuffer(k.format, k.codes, k.scales, None, k.tail), v, n),
        "keys.tail": (KVBuffer(k.format, k.codes, k.scales, k.offsets), v, n),
        "values.tail": (k, KVBuffer(v.format, v.codes, v.scales, v.offsets, k.tail), n),
        "keys and values differ": (k, KVBuffer(v.format, v.codes[:, :1], v.scales[:, :1], v.offsets[:, :1]), n),  # type: ignore[index]
        "lengths is": (k, v, n.long()),
        r"needs .* \[1, 2, 32, 64\]": (k, v, n[:1]),
        "for keys only": (k, k, n),
    }
    for says, (keys, values, lengths) in bad.items():
        with pytest.raises(InvalidArgument, match=says):
            KVCache.from_buffers(keys, values, lengths)
    with pytest.raises(InvalidArgument, match=r"page_table is"):
        KVCache.from_buffers(k, v, n, page_table=torch.zeros(2, dtype=torch.int32))


# ------------------------------------------------------------------------------------------------------------ a long life


ALONE = [
    k for k in KEYS if not key_format(k).token_block and not k.endswith("_tensor")
]  # whose tokens are quantized for themselves
TOGETHER = [k for k in KEYS if k not in ALONE]


def life_of_lists(keys: str, rng: random.Random, steps: int) -> None:
    """Contiguous and paged side by side against plain lists of tokens, each quantized for itself."""
    batch, heads, dim, capacity = 3, 2, head_dim(keys), 64
    formats = (keys, "int4_g32")
    caches = [make(paged, batch, heads, dim, capacity, keys=keys, values=formats[1], rotate_keys=False) for paged in (False, True)]
    model: list[torch.Tensor] = [torch.zeros(2, heads, 0, dim)] * batch  # keys and values as they are read
    drawn = tokens(batch, heads, 100, dim, rng.randrange(1000))[0]
    all_read = torch.stack([dequantize(quantize(drawn, key_format(name))) for name in formats], 1)
    for _ in range(steps):
        match rng.choice(["append", "append", "append", "crop", "reorder", "reset"]):
            case "append":
                first = rng.randint(0, 75)
                k, read = (t.narrow(-2, first, 25) for t in (drawn, all_read))
                counts = [rng.randint(0, 25) for _ in range(batch)]
                fits_in = all(m.shape[2] + n <= capacity for m, n in zip(model, counts, strict=True))
                for cache in caches:
                    if fits_in:
                        cache.append(k, k, torch.tensor(counts))
                    else:
                        with pytest.raises(CapacityError):
                            cache.append(k, k, torch.tensor(counts))
                if fits_in:
                    model = [torch.cat([m, read[b, :, :, :n]], 2) for b, (m, n) in enumerate(zip(model, counts, strict=True))]
            case "crop":
                keep = [rng.randint(0, 70) for _ in range(batch)]
                for cache in caches:
                    cache.crop(torch.tensor(keep))
                model = [m[:, :, :n] for m, n in zip(model, keep, strict=True)]
            case "reorder":
                index = [rng.randint(0, batch - 1) for _ in range(batch)]
                for cache in caches:
                    cache.reorder(torch.tensor(index))
                model = [model[i] for i in index]
            case "reset":
                for cache in caches:
                    cache.reset()
                model = [m[:, :, :0] for m in model]
        for cache in caches:
            got = torch.stack(cache.dequantized(), 1)
            for b, m in enumerate(model):
                assert cache.lengths[b] == m.shape[2]
                assert torch.equal(got[b, :, :, : m.shape[2]], m)


def life_in_pages(keys: str, rng: random.Random, steps: int) -> None:
    """Paged against contiguous, bit for bit."""
    dim = head_dim(keys)
    caches = [make(paged, 3, 2, dim, 96, keys=keys) for paged in (False, True)]
    for step in range(steps):
        action = rng.choice(["append", "append", "append", "crop", "reorder", "reset"])
        numbers = torch.tensor([rng.randint(0, 40) for _ in range(3)], dtype=torch.int32)
        for cache in caches:
            if action == "append":
                room = torch.minimum(numbers, 96 - cache.lengths)
                cache.append(*tokens(3, 2, 40, dim, step), room)
            elif action == "crop":
                cache.crop(numbers * 2)
            elif action == "reorder":
                cache.reorder(numbers % 3)
            else:
                cache.reset()
        assert_same(*caches)


@pytest.mark.parametrize("keys", ALONE)
@settings(max_examples=8)
@given(rng=st.randoms(use_true_random=False), steps=st.integers(1, 6))
def test_a_life_against_a_list_of_tokens(keys: str, rng: random.Random, steps: int) -> None:
    life_of_lists(keys, rng, steps)


@pytest.mark.parametrize("keys", TOGETHER)
@settings(max_examples=15)
@given(rng=st.randoms(use_true_random=False), steps=st.integers(1, 6))
def test_a_life_in_pages_is_a_life_in_one_piece(keys: str, rng: random.Random, steps: int) -> None:
    life_in_pages(keys, rng, steps)


@pytest.mark.parametrize("kind", [KVCache, PagedKVCache])
def test_the_signature_shows_every_option_and_its_default(kind: type[KVCache]) -> None:
    shown = inspect.signature(kind).parameters
    assert list(shown)[:4] == ["batch", "kv_heads", "head_dim", "capacity"]
    assert set(CacheOptions.__annotations__) <= set(shown)
    assert not any(p.kind is p.VAR_KEYWORD for p in shown.values())
    stated = {name: shown[name].default for name in CacheOptions.__annotations__}
    plain, spelled = kind(1, 2, 64, 64), kind(1, 2, 64, 64, **stated)
    assert repr(spelled) == repr(plain)
    assert (plain.keys.format.name, plain.values.format.name) == (stated["keys"], stated["values"])


def test_what_a_cache_says_of_itself() -> None:
    cache = KVCache(2, 3, 64, 50, keys="int8_channel", values="int4", value_dim=32)
    assert (cache.batch, cache.kv_heads, cache.head_dim, cache.value_dim) == (2, 3, 64, 32)
    assert cache.capacity == 64  # whole blocks
    assert "int8_channel" in repr(cache)
    for part, codes in ((cache.keys, [2, 3, 64, 64]), (cache.values, [2, 3, 64, 16])):
        said = repr(part)
        assert "\n" not in said
        assert f"{part.format}, codes={codes}, {part.nbytes:,} bytes" in said
    assert KVCache(1, 1, 64, 50).capacity == 50
    with pytest.raises(HalfbyteError):
        KVCache(1, 1, 40, 50, values="int4_g32")


@pytest.mark.parametrize(("formats", "per_head"), [("int8", 66), ("int8_tensor", 64), ("fp16", 128)])
def test_bytes_of_a_token_are_its_codes_and_scales(formats: str, per_head: int) -> None:
    assert KVCache(2, 3, 64, 64, keys=formats, values=formats).bytes_per_token == 2 * 3 * per_head
    facts = explanation(2, 6, 3, 64, 64, 1, formats, formats, 0, "bf16", False, H200)
    assert facts["bytes"].startswith(f"{2 * per_head} a token and KV head, ")


def test_a_number_of_copies_is_an_int32() -> None:
    cache = KVCache(0, 1, 64, 64)
    assert cache.repeat_interleave(2**31 - 1).batch == 0
    with pytest.raises(InvalidArgument, match="repeats"):
        cache.repeat_interleave(2**31)


def test_zeros_say_nothing_about_the_scale_of_a_tensor() -> None:
    cache = KVCache(1, 1, 64, 64, keys="int8_tensor", values="int8_tensor")
    zeros, ones = torch.zeros(1, 1, 3, 64), torch.ones(1, 1, 3, 64)
    cache.append(zeros, zeros)
    assert not cache.dequantized()[0].any()
    cache.append(ones, ones)
    torch.testing.assert_close(cache.dequantized()[0][:, :, :6], torch.cat([zeros, ones], 2), atol=1e-3, rtol=0)
    assert int(cache.keys.saturated or 0) == 0


def test_reset_goes_back_to_an_engines_scale() -> None:
    own = KVCache(1, 1, 64, 64, keys="int8_tensor", values="int8_tensor", k_scale=0.5, v_scale=0.25)
    cache = KVCache.from_buffers(own.keys, own.values, own.lengths)
    cache.append(torch.ones(1, 1, 1, 64), torch.ones(1, 1, 1, 64))
    cache.reset()
    assert (float(cache.keys.scales), float(cache.values.scales)) == (0.5, 0.25)  # type: ignore[arg-type]


class _Own(KVCache):
    """A subclass of a user, outside of what torch.load trusts."""


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (KVCache, {"keys": "int8_channel", "values": "int4_g32"}),
        (KVCache, {"keys": "int4", "values": "int8", "sink_tokens": 2, "recent_tokens": 8}),
        (KVCache, {"keys": "fp8_tensor", "values": "int8_tensor", "k_scale": 0.5}),
        (functools.partial(PagedKVCache, page_size=16), {"keys": "int8_token", "values": "bf16"}),
        (functools.partial(WindowKVCache, window=20), {}),
    ],
)
def test_files_of_caches_are_read_without_trust(kind: Any, options: dict[str, Any]) -> None:
    """`torch.load` runs no code of the file; what comes back is the cache, which goes on."""
    k, v = torch.randn(2, 2, 2, 37, 64).bfloat16()
    cache = kind(2, 2, 64, 64, **options)
    cache.append(k, v)
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    other = torch.load(file, weights_only=True)
    assert type(other) is type(cache)
    assert other.keys.format is cache.keys.format
    for c in (cache, other):
        c.append(k[:, :, :5], v[:, :, :5])
    assert all(torch.equal(a, b) for a, b in zip(cache.tensors(), other.tensors(), strict=True))


def test_files_of_damaged_caches_are_refused() -> None:
    cache = KVCache(1, 2, 64, 64, keys="int8", values="int8")
    restored, (kind, keys, values, state) = cache.__reduce_ex__(2)
    name, sinks, parts = keys
    damaged = {
        "of format 'int9'": (kind, ("int9", sinks, parts), values, state),
        "keys without codes": (kind, (name, sinks, parts | {"codes": 5}), values, state),
        r"keys\.scales": (kind, (name, sinks, parts | {"scales": parts["scales"][:, :, :7]}), values, state),
        r"values\.codes": (kind, keys, (name, sinks, parts | {"codes": parts["codes"].short()}), state),
        "lengths=NoneType": (kind, keys, values, {}),
        "page_table=str": (kind, keys, values, state | {"page_table": "x"}),
    }
    for message, arguments in damaged.items():
        with pytest.raises(InvalidArgument, match=message):
            restored(*arguments)


def test_a_subclass_is_copied_and_pickled() -> None:
    cache = _Own(1, 1, 64, 64)
    for other in (copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert type(other) is _Own
        assert other._lock is not cache._lock
