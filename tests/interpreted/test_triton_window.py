"""Sink and recent tokens, interpreted: append writes what the reference writes, and attention reads it within its promise."""

from __future__ import annotations

from typing import Any

import pytest
import test_triton_decode as decodes
import torch

from append_levels import put, tokens
from attention_levels import decode_call, in_pages, small
from halfbyte.cache import KVCache
from halfbyte.ops.decode_attention import decode_attention

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_more_heads_than_a_tile_holds() -> None:
    options: dict[str, Any] = {"keys": "int8_token", "values": "int4", "sink_tokens": 1, "recent_tokens": 2}
    a, b = (KVCache(1, 70, 128, 8, **options) for _ in range(2))
    for step in range(3):
        k, v = tokens((1, 70, 2, 128), step)
        for cache, impl in ((a, "reference"), (b, "triton")):
            put(cache, k, v, None, impl)
    assert all(torch.equal(s, t) for s, t in zip(a.tensors(), b.tensors(), strict=True))


def test_tokens_beyond_the_capacity_are_not_written() -> None:
    """But counted, and the window is that of the tokens that are there."""
    options: dict[str, Any] = {"keys": "int8", "values": "int4", "sink_tokens": 2, "recent_tokens": 5}
    a, b = (KVCache(2, 1, 64, 20, **options) for _ in range(2))
    (k, v), (more, most) = tokens((2, 1, 18, 64)), tokens((2, 1, 4, 64), 1)
    for cache, impl in ((a, "reference"), (b, "triton")):
        put(cache, k, v, None, impl)
    put(a, more[:, :, :2], most[:, :, :2], None, "reference")
    put(b, more, most, None, "triton")
    assert b.lengths.tolist() == [22, 22]
    put(b, more, most, None, "triton")
    for s, t in zip(a.keys.tensors() + a.values.tensors(), b.keys.tensors() + b.values.tensors(), strict=True):
        assert s is None or torch.equal(s, t)


# ------------------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("scale", [2.0**-20, 3000.0])
@pytest.mark.parametrize("values", ["int8_tensor", "int4", "int4_g32"])
def test_values_of_any_size(values: str, scale: float) -> None:
    decodes.check(small(keys="int4", values=values, lengths=(50, 64), exact=(4, 20), v_scale=scale), decodes.TILES[1])


def test_pages_of_the_window_need_not_exist() -> None:
    """Of tokens that are all in 16 bits no page is read: their numbers may be those of no page."""
    call = decode_call(small(keys="int8", values="int4", lengths=(60, 64), exact=(4, 34)))
    pages = in_pages(call, 32)
    pages.page_table[:, 1:] = -1
    assert decodes.same(decodes.run(pages, decodes.TILES[1]), decodes.run(call, decodes.TILES[1]))


@pytest.mark.parametrize("values", ["int8_tensor", "fp8_tensor"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_only_token_is_the_answer(values: str, dtype: torch.dtype) -> None:
    """Its weight is 1, whatever a per-tensor scale makes of it on the way."""
    cache = KVCache(2, 1, 64, 64, keys="int8", values=values, sink_tokens=4, recent_tokens=16, v_scale=0.8281, dtype=dtype)
    k, v = 100 * torch.randn(2, 2, 1, 1, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    cache.append(k, v)
    out = decode_attention(k.expand(2, 3, 1, 64), cache, impl="triton")
    assert torch.equal(out, v.expand(2, 3, 1, 64))
