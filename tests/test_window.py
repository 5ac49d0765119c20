"""Sink and recent tokens: the first and the last tokens of a sequence in 16 bits, all others as codes of those 16 bits."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import halfbyte as hb
from halfbyte.errors import CapacityError, HalfbyteError, InvalidArgument
from halfbyte.formats import KV_FORMATS
from halfbyte.kv_buffer import KVBuffer
from halfbyte.reference.hadamard import rotate
from halfbyte.reference.quantize import dequantize, quantize

pytestmark = pytest.mark.usefixtures("poisoned_memory")
FORMATS = [name for name, f in KV_FORMATS.items() if f.is_quantized and not f.token_block]
BATCH, HEADS, DIM, CAPACITY = 2, 2, 64, 96
SCALE = 0.125


def tokens(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, BATCH, HEADS, count, DIM, generator=torch.Generator().manual_seed(seed))
    return k * torch.logspace(-1, 1, DIM), v


class Model:
    """What a cache holds, as a list of tokens a sequence: the 16 bits [H, D] of each, from which all else follows."""

    def __init__(self, name: str, sinks: int, recent: int, dtype: torch.dtype, rotated: bool) -> None:
        self.name, self.sinks, self.recent, self.dtype, self.rotated = name, sinks, recent, dtype, rotated
        self.held: list[list[torch.Tensor]] = [[] for _ in range(BATCH)]

    def append(self, x: torch.Tensor, counts: list[int]) -> None:
        x = (rotate(x.float()) if self.rotated else x).to(self.dtype)
        for held, new, count in zip(self.held, x, counts, strict=True):
            held += new[:, :count].unbind(1)

    def coded(self, token: torch.Tensor) -> torch.Tensor:
        scale = {"scale": SCALE} if self.name.endswith("_tensor") else {}
        return dequantize(quantize(token[None, :, None].float(), KV_FORMATS[self.name], **scale))[0, :, 0]

    def is_exact(self, token: int, length: int) -> bool:
        return token < self.sinks or token >= length - self.recent

    def crop(self, length: int) -> None:
        for held in self.held:
            for t in range(min(length, len(held))):
                if self.is_exact(t, length) and not self.is_exact(t, len(held)) and length < len(held):
                    held[t] = self.coded(held[t]).to(self.dtype)
            del held[length:]

    def values(self) -> torch.Tensor:
        out = torch.zeros(BATCH, HEADS, CAPACITY, DIM)
        for b, held in enumerate(self.held):
            for t, token in enumerate(held):
                out[b, :, t] = token.float() if self.is_exact(t, len(held)) else self.coded(token)
        return rotate(out.double()).float() if self.rotated else out


def make(paged: bool, **options: Any) -> hb.KVCache:
    if paged:
        return hb.PagedKVCache(BATCH, HEADS, DIM, CAPACITY, page_size=32, **options)
    return hb.KVCache(BATCH, HEADS, DIM, CAPACITY, **options)


def assert_holds(cache: hb.KVCache, models: tuple[Model, Model]) -> None:
    assert cache.lengths.tolist() == [len(held) for held in models[0].held]
    for got, model in zip(cache.dequantized(), models, strict=True):
        assert torch.equal(got[:, :, :CAPACITY], model.values())


@settings(max_examples=60)
@given(data=st.data())
def test_a_cache_is_a_list_of_tokens(data: st.DataObject) -> None:
    """Whatever happens to it: the first and the last tokens bit for bit, the others as codes that no cut has a part in."""
    names = data.draw(st.sampled_from(FORMATS)), data.draw(st.sampled_from(FORMATS))
    sinks = data.draw(st.integers(0, 9))
    recent = data.draw(st.integers(0 if sinks else 1, 24))
    paged, rotated, dtype = (
        data.draw(st.booleans()),
        data.draw(st.booleans()),
        data.draw(st.sampled_from([torch.half, torch.bfloat16])),
    )
    scales = {f"{side}_scale": SCALE for side, name in zip("kv", names, strict=True) if name.endswith("_tensor")}
    options = {"keys": names[0], "values": names[1], "rotate_keys": rotated, "dtype": dtype, **scales}
    cache = make(paged, sink_tokens=sinks, recent_tokens=recent, **options)
    models = (Model(names[0], sinks, recent, dtype, rotated), Model(names[1], sinks, recent, dtype, False))
    steps = ["append", "append", "append", "crop", "reorder", "pickle", "reset"] + ["select", "grown"] * (not paged)
    for i in range(data.draw(st.integers(1, 7))):
        match data.draw(st.sampled_from(steps)):
            case "append":
                room = [CAPACITY - len(held) for held in models[0].held]
                counts = [data.draw(st.integers(0, min(n, data.draw(st.sampled_from([1, 5, 60]))))) for n in room]
                k, v = tokens(max([*counts, 1]), i)
                cache.append(k, v, torch.tensor(counts, dtype=torch.int32))
                for model, x in zip(models, (k, v), strict=True):
                    model.append(x, counts)
            case "crop":
                length = data.draw(st.integers(0, CAPACITY))
                cache.crop(length)
                for model in models:
                    model.crop(length)
            case "reorder" | "select" as step:
                index = data.draw(st.lists(st.integers(0, BATCH - 1), min_size=BATCH, max_size=BATCH))
                cache = cache.select(torch.tensor(index)) if step == "select" else cache
                if step == "reorder":
                    cache.reorder(torch.tensor(index))
                for model in models:
                    model.held = [list(model.held[b]) for b in index]
            case "pickle":
                cache = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
            case "grown":
                cache = cache.grown(CAPACITY + 3)
            case "reset":
                cache.reset()
                for model in models:
                    model.held = [[] for _ in range(BATCH)]
        assert_holds(cache, models)
    if isinstance(cache, hb.PagedKVCache):
        assert all(len(held) == -(-max(n - recent, 0) // 32) for held, n in zip(cache._held, cache.lengths.tolist(), strict=True))


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_a_chunk_sees_the_state_after_its_append(impl: str, queries: int) -> None:
    cache = make(False, keys="int4", values="int4", sink_tokens=3, recent_tokens=4)
    cache.append(*tokens(40, 1))
    q = torch.randn(BATCH, 4, queries, DIM)
    k, v = (x[:, :, :40].repeat_interleave(2, 1).double() for x in cache.dequantized())
    mask = torch.ones(queries, 40).tril(40 - queries).bool()
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k, v, attn_mask=mask)
    torch.testing.assert_close(hb.decode_attention(q, cache, impl=impl).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_prompt_longer_than_the_window_reads_its_past_after_its_append() -> None:
    """Chunk and past are merged; the past ends where the chunk begins, and some of it is in 16 bits."""
    cache = make(False, keys="int8", values="int8", sink_tokens=2, recent_tokens=30)
    (k0, v0), (k, v) = tokens(30, 1), tokens(20, 2)
    cache.append(k0, v0)
    cache.append(k, v)
    q = torch.randn(BATCH, 2, 20, DIM)
    past = cache.dequantized()
    keys, values = (torch.cat([p[:, :, :30], x], 2).double() for p, x in zip(past, (k, v), strict=True))
    mask = torch.ones(20, 50).tril(30).bool()
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), keys, values, attn_mask=mask)
    torch.testing.assert_close(hb.prefill_attention(q, k, v, cache).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["int8_tensor", "fp8_tensor"])
def test_a_scale_is_measured_on_the_first_append(name: str) -> None:
    """Also on what stays in 16 bits, so that one does not follow from the first token that leaves."""
    cache = make(False, keys=name, values=name, sink_tokens=0, recent_tokens=8)
    plain = make(False, keys=name, values=name)
    for c in (cache, plain):
        c.append(*tokens(5, 1))
        c.append(*tokens(20, 2))
    assert cache.keys.scales is not None
    assert plain.keys.scales is not None
    assert cache.keys.scales.item() == plain.keys.scales.item() > 0


@pytest.mark.parametrize("paged", [False, True])
def test_what_is_refused_changes_nothing(paged: bool) -> None:
    cache = make(paged, keys="int4", values="int8", sink_tokens=2, recent_tokens=5)
    k, v = tokens(CAPACITY - 3, 1)
    cache.append(k, v)
    before = [t.clone() for t in cache.tensors()]
    bad, huge = k[:, :, :1].clone(), torch.full((BATCH, HEADS, 1, DIM), 1e7)
    bad[1, 0, 0, 3] = torch.nan
    huge[..., ::2] *= -1
    refused = [(k, v, CapacityError), (bad, v[:, :, :1], InvalidArgument), (huge, v[:, :, :1], HalfbyteError)]
    for new, values, error in refused:
        with pytest.raises(error):
            cache.append(new, values)
        assert all(torch.equal(a, b) for a, b in zip(cache.tensors(), before, strict=True))
    cache.append(k[:, :, :3], v[:, :, :3])


def test_what_it_takes() -> None:
    plain = make(False, keys="int4", values="int8")
    cache = make(False, keys="int4", values="int8", sink_tokens=3, recent_tokens=5)
    assert cache.nbytes - plain.nbytes == 2 * BATCH * HEADS * 8 * DIM * 2
    assert cache.bytes_per_token == plain.bytes_per_token
    assert all(buffer.tail is None for buffer in (plain.keys, plain.values))


@pytest.mark.parametrize(("options", "message"), [
    ({"sink_tokens": -1}, "sink_tokens=-1"),
    ({"recent_tokens": -5}, "recent_tokens=-5"),
    ({"recent_tokens": 1.5}, "recent_tokens=1.5"),
    ({"sink_tokens": True}, "sink_tokens=True"),
    ({"sink_tokens": 30, "recent_tokens": 67}, "capacity of 96"),
    ({"sink_tokens": 4, "keys": "bf16"}, "keys='bf16' is a 16-bit format"),
    ({"recent_tokens": 4, "values": "fp16"}, "values='fp16' is a 16-bit format"),
    ({"recent_tokens": 4, "keys": "int4_channel"}, "keys='int4_channel' quantizes 32 tokens at once"),
])  # fmt: skip
@pytest.mark.parametrize("paged", [False, True])
def test_bad_input(options: dict[str, Any], message: str, paged: bool) -> None:
    with pytest.raises(HalfbyteError, match=message):
        make(paged, **options)


@pytest.mark.parametrize("name", ["keys", "values"])
def test_memory_of_an_engine_holds_codes_alone(name: str) -> None:
    cache = make(False, keys="int4", values="int4", sink_tokens=3)
    plain = make(False, keys="int4", values="int4")
    given: dict[str, KVBuffer] = {"keys": plain.keys, "values": plain.values, name: getattr(cache, name)}
    with pytest.raises(InvalidArgument, match=rf"{name}.tail was given, for sink or recent tokens"):
        hb.KVCache.from_buffers(given["keys"], given["values"], cache.lengths)
