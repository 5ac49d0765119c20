"""Calibrated keys in the append kernel, interpreted: what is stored, in which launches, against float64."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from halfbyte.cache import KVCache
from halfbyte.calibrated_keys import key_transform
from halfbyte.engine import PagedView, PageLayout, append_slots, attention_varlen
from halfbyte.errors import InvalidArgument
from halfbyte.kv_buffer import HeadNorms, Rope
from halfbyte.ops.append import append_
from halfbyte.plans.append import takes_matrix
from halfbyte.reference.block import Norm, rms_norm
from halfbyte.reference.rope import apply_rope
from halfbyte.tensors import KeyTransform
from watched import watched


def transform_of(heads: int, dim: int, dtype: torch.dtype, shift: bool = True) -> KeyTransform:
    matrix = torch.eye(dim) + torch.randn(heads, dim, dim) / dim
    return key_transform(matrix, torch.randn(heads, dim) if shift else None).like(torch.empty(0, dtype=dtype))


def step(batch: int, heads: int, group: int, tokens: int, dim: int, dtype: torch.dtype, norms: bool) -> dict[str, Any]:
    """Arguments of an append, heads and tokens as a projection leaves them."""
    q, k, v = (torch.randn(batch, tokens, n, dim).to(dtype).transpose(1, 2) for n in (heads * group, heads, heads))
    rope = Rope(*torch.randn(2, batch, tokens, dim // 2))
    head_norms = HeadNorms(*torch.rand(2, dim).to(dtype), 1e-6, "rounded") if norms else None
    return {"k": k, "v": v, "q": q, "rope": rope, "norms": head_norms}


@pytest.mark.parametrize(("shape", "formats", "window", "dtype", "norms"), [
    ((3, 2, 4, 1, 64), ("int4", "int4"), (0, 0), torch.bfloat16, True),
    ((20, 2, 3, 1, 128), ("int2_g32", "int4_g32"), (0, 0), torch.bfloat16, False),
    ((2, 2, 1, 8, 80), ("int4", "int8"), (2, 8), torch.float16, True),
    ((3, 1, 2, 5, 32), ("int4_g32", "fp8"), (4, 4), torch.bfloat16, False),
    ((9, 1, 2, 2, 256), ("int8", "int4"), (0, 0), torch.bfloat16, False),
])  # fmt: skip
def test_keys_and_queries_are_multiplied_in_the_launch_of_the_append(
    shape: tuple[int, ...], formats: tuple[str, str], window: tuple[int, int], dtype: torch.dtype, norms: bool, monkeypatch: Any
) -> None:
    """In one launch, lengths included where few tokens come; stored as by the reference but for codes beside each other."""
    launches = watched(monkeypatch, GridExecutor, "__call__")
    torch.manual_seed(0)
    batch, heads, group, tokens, dim = shape
    options = {"keys": formats[0], "values": formats[1], "rotate_keys": False, "dtype": dtype}
    expected, actual = (KVCache(batch, heads, dim, 64, sink_tokens=window[0], recent_tokens=window[1], **options) for _ in range(2))
    transform = transform_of(heads, dim, dtype, norms)
    for number in range(3):
        new = step(batch, heads, group, tokens, dim, dtype, norms)
        counts = torch.arange(batch, dtype=torch.int32) % (tokens + 1) if number == 1 else None
        queries = []
        for cache, impl in ((expected, "reference"), (actual, "triton")):
            where = (cache.keys, cache.values, cache.lengths)
            inputs = {x: new[x] for x in ("q", "rope", "norms")}
            queries.append(append_(new["k"], new["v"], *where, counts=counts, **inputs, transform=transform, impl=impl))
        assert len(launches) == number + 1
        bound = 2 * torch.finfo(dtype).eps * queries[0].abs().amax()
        assert bool(((queries[1].double() - queries[0].double()).abs() <= bound).all())
        assert torch.equal(expected.lengths, actual.lengths)
    for one, other in zip(expected.dequantized(), actual.dequantized(), strict=True):
        assert float((one != other).double().mean()) < 2e-3


def test_scores_are_those_of_the_keys_as_they_come() -> None:
    """q . k in float64, but for what 16 bits cost: stored in 8 bits, with norms and rotation ahead."""
    torch.manual_seed(0)
    transform, dtype = transform_of(2, 64, torch.float16, shift=False), torch.float16
    cache, new = KVCache(2, 2, 64, 32, keys="int8", values="int8", dtype=dtype), step(2, 2, 3, 7, 64, dtype, True)
    where = (cache.keys, cache.values, cache.lengths)
    q = append_(new["k"], new["v"], *where, q=new["q"], rope=new["rope"], norms=new["norms"], transform=transform, impl="triton")
    stored = cache.dequantized()[0][:, :, :7]
    norms, by = new["norms"], (new["rope"].cos.unsqueeze(1), new["rope"].sin.unsqueeze(1))
    plain = [apply_rope(rms_norm(x, Norm(w, 1e-6, "rounded")), *by) for x, w in ((new["q"], norms.q), (new["k"], norms.k))]
    exact = plain[0].double().unflatten(1, (2, 3)) @ plain[1].double()[:, :, None].mT
    scores = q.double().unflatten(1, (2, 3)) @ stored.double()[:, :, None].mT
    assert (scores - exact).abs().max() < 0.02 * exact.abs().max()


def test_slots_of_an_engine() -> None:
    """Attention over pages as over the keys as they come, in one launch for keys and queries; a shift changes no softmax."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(21, heads, 64).half() for heads in (6, 2, 2))
    layout, transform = PageLayout("int8", "int8", 64), transform_of(2, 64, torch.float16)
    slots = torch.arange(21)
    slots[18:] = torch.tensor([40, -1, 47])
    table, lengths = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32), torch.tensor([18, 16], dtype=torch.int32)
    results = []
    for t, impl in ((None, "triton"), (transform, "triton"), (transform, "reference")):
        sides = layout.buffers(torch.zeros(4, 2, 16, layout.token_head_bytes, dtype=torch.uint8))
        queries = append_slots(k, v, *sides, slots, q=None if t is None else q, transform=t, impl=impl)
        view = PagedView(*sides, lengths[:1], table[:1])
        results.append(
            attention_varlen((q if queries is None else queries)[:18], view, torch.tensor([0, 18], dtype=torch.int32), 18)
        )
    torch.testing.assert_close(results[1], results[0], atol=0.02, rtol=0.02)
    torch.testing.assert_close(results[1], results[2], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(("keys", "values", "dtype"), [
    ("int8_token", "int8", torch.bfloat16), ("int4_channel", "int8", torch.bfloat16), ("int8", "int8", torch.float32),
])  # fmt: skip
def test_what_the_kernel_does_not_multiply_is_multiplied_ahead_with_a_warning(keys: str, values: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    transform, new = transform_of(2, 32, dtype), step(2, 2, 2, 3, 32, dtype, True)
    assert dtype is torch.float32 or not takes_matrix((keys, values), (32, 32))
    caches = [KVCache(2, 2, 32, 64, keys=keys, values=values, rotate_keys=False) for _ in range(2)]
    queries = []
    for cache, impl in zip(caches, ("reference", "triton"), strict=True):
        where = (cache.keys, cache.values, cache.lengths)
        options = {x: new[x] for x in ("q", "rope", "norms")}
        with nullcontext() if impl == "reference" else pytest.warns(UserWarning, match="each step takes more launches"):
            queries.append(append_(new["k"], new["v"], *where, **options, transform=transform, impl=impl))
    torch.testing.assert_close(*queries, atol=0.05, rtol=0.02)
    for one, other in zip(*(cache.dequantized() for cache in caches), strict=True):
        torch.testing.assert_close(one[:, :, :3], other[:, :, :3], atol=0.1 * float(one.abs().max()), rtol=0)


def test_transforms_are_looked_at() -> None:
    cache, new = KVCache(1, 2, 32, 8, keys="int8", values="int8"), step(1, 2, 2, 1, 32, torch.float16, False)
    transform = transform_of(2, 32, torch.float16)
    for wrong, says in (
        (transform[:2], "transform is a tuple; expected a halfbyte.tensors.KeyTransform"),
        (transform_of(3, 32, torch.float16), r"transform.keys has shape \[3, 32, 32\]"),
        (transform._replace(shift=torch.zeros(2, 16)), r"transform.shift has shape"),
        (transform._replace(queries=transform.queries.mT), "transform.queries is not contiguous"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            cache.append(new["k"], new["v"], q=new["q"], transform=wrong)  # type: ignore[arg-type]
    assert not cache.lengths.any()
    assert cache.append(new["k"], new["v"], q=new["q"], transform=transform).shape == new["q"].shape
