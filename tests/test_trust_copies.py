"""Every public object, copied, deep-copied, pickled and sent to another process, and then used: the same bits as the original."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import halfbyte as hb
from halfbyte import engine
from halfbyte.experts import QuantExperts
from halfbyte.nn import FusedProjections, QuantLinear
from sizes import head_dim

COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda given: pickle.loads(pickle.dumps(given)),
    "deepcopy of a pickle": lambda given: copy.deepcopy(pickle.loads(pickle.dumps(given))),
}

ONE = torch.ones(1, 4, 1, 32)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled(kind: type[hb.KVCache], name: str) -> hb.KVCache:
    dim = head_dim(name)
    values = name if hb.KV_FORMATS[name].token_block is None else "fp8"
    cache = kind(2, 2, dim, 96, keys=name, values=values)
    cache.append(drawn(2, 2, 37, dim, seed=1), drawn(2, 2, 37, dim, seed=2), torch.tensor([37, 20]))
    return cache


def use_cache(cache: hb.KVCache) -> list[torch.Tensor]:
    """What attention reads before and after more tokens, and over a cache that wraps the same memory."""
    q = drawn(2, 4, 1, cache.head_dim, seed=3).half()
    results = list(hb.decode_attention(q, cache, return_lse=True))
    parts = (cache.keys, cache.values, cache.lengths)
    wrapped = hb.KVCache.from_buffers(*parts, page_table=cache.page_table, rotate_keys=cache.rotate_keys)
    results.append(hb.decode_attention(q, wrapped))
    cache.append(drawn(2, 2, 3, cache.head_dim, seed=4), drawn(2, 2, 3, cache.head_dim, seed=5))
    results.append(hb.decode_attention(q, cache))
    cache.crop(36)
    return [*results, hb.decode_attention(q, cache), cache.lengths, *cache.dequantized()]


def use_format(fmt: hb.Format) -> list[torch.Tensor]:
    """Names are shared: weights and caches may each have an int4_g32 of their own."""
    if hb.KV_FORMATS.get(fmt.name) != fmt:
        stored = hb.quantize(drawn(32, 128), fmt)
        assert stored.codes.dtype is fmt.storage
        return [*stored.parts().values(), hb.dequantize(stored)]
    dim = head_dim(fmt.name)
    stored = hb.quantize(drawn(2, 2, 64, dim), fmt)
    assert stored.codes.dtype is fmt.storage
    return [*stored.parts().values(), hb.dequantize(stored), *use_cache(hb.KVCache(2, 2, dim, 96, keys=fmt))]


def use_weight(weight: hb.QuantTensor) -> list[torch.Tensor]:
    return [weight.dequantize(), hb.linear(drawn(3, 128), weight), hb.linear(drawn(3, 128).half(), weight)]


def use_module(module: torch.nn.Module) -> list[torch.Tensor]:
    return [module(drawn(3, 128).half())]


def use_experts(experts: QuantExperts) -> list[torch.Tensor]:
    return [hb.experts_linear(drawn(3, 128).half(), experts.weight, torch.tensor([[0, 1], [2, 3], [3, 0]]))]


def view_of(layout: engine.PageLayout) -> engine.PagedView:
    """Three tokens of one sequence, in page 1."""
    memory = torch.zeros(2, 2, 16, layout.token_head_bytes, dtype=torch.uint8)
    keys, values = layout.buffers(memory)
    engine.append_slots(drawn(3, 2, 32), drawn(3, 2, 32, seed=1), keys, values, torch.tensor([16, 17, 18]))
    return engine.PagedView(keys, values, torch.tensor([3], dtype=torch.int32), torch.tensor([[1]], dtype=torch.int32))


def use_layout(layout: engine.PageLayout) -> list[torch.Tensor]:
    return [hb.decode_attention(ONE, view_of(layout))]


def tokens_in_16_bits() -> engine.ExactTokens:
    """The first and the last of the three tokens."""
    view = view_of(engine.PageLayout("fp16", "fp16", 32))
    return engine.ExactTokens(view.keys, view.values, view.page_table, torch.ones_like(view.lengths), 1, view.lengths - 1)


def use_tokens(tokens: engine.ExactTokens) -> list[torch.Tensor]:
    q, codes = ONE[0].transpose(0, 1).half(), view_of(engine.PageLayout("fp8", "int4", 32))
    return [engine.attention_varlen(q, codes, torch.tensor([0, 1], dtype=torch.int32), 1, exact_tokens=tokens)]


def objects() -> dict[str, tuple[Callable[[], Any], Callable[[Any], list[torch.Tensor]]]]:
    """How to make each object, and how to use it."""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], list[torch.Tensor]]]] = {}
    for kind, registry in (("cache", hb.KV_FORMATS), ("weight", hb.WEIGHT_FORMATS)):
        for name, fmt in registry.items():
            if fmt.is_quantized:
                found[f"format of a {kind} {name}"] = (lambda fmt=fmt: fmt, use_format)
    for name in ("fp8", "fp8_tensor", "int8", "int8_tensor", "int4_channel", "int2_g32", "bf16"):
        found[f"cache {name}"] = (lambda name=name: filled(hb.KVCache, name), use_cache)
        found[f"paged {name}"] = (lambda name=name: filled(hb.PagedKVCache, name), use_cache)
    for name in hb.WEIGHT_FORMATS:
        found[f"weight {name}"] = (lambda name=name: hb.quantize(drawn(32, 128), name), use_weight)
    for name in ("int4_g32", "nf4_dq", "nvfp4"):
        found[f"layer {name}"] = (lambda name=name: QuantLinear(hb.quantize(drawn(32, 128), name)), use_module)
    experts = drawn(4, 64, 128)
    found["experts"] = (lambda: QuantExperts(hb.quantize(experts, "int4_g32")), use_experts)
    found["weight of a parameter"] = (lambda: hb.quantize(torch.nn.Parameter(drawn(32, 128)), "int4_g32_fp32"), use_weight)
    found["layout of pages"] = (lambda: engine.PageLayout("fp8", "int4", 32), use_layout)
    found["view of pages"] = (lambda: view_of(engine.PageLayout("fp8", "int4", 32)), lambda view: [hb.decode_attention(ONE, view)])
    found["tokens in 16 bits"] = (tokens_in_16_bits, use_tokens)
    found["pages of a layer"] = (
        lambda: engine.LayerPages(engine.PageLayout("fp8", "int4", 32), rotate_keys=True),
        lambda pages: use_layout(pages.layout),
    )
    found["transform of keys"] = (
        lambda: engine.KeyTransform(drawn(2, 32, 32), drawn(2, 32, 32, seed=1), drawn(2, 32, seed=2)),
        lambda t: [engine.transform_heads(drawn(1, 2, 3, 32), t.keys, t.shift), engine.transform_heads(ONE, t.queries)],
    )
    layers = [QuantLinear(hb.quantize(drawn(32, 128, seed=i), "int4_g32")) for i in range(3)]
    found["fused"] = (lambda: FusedProjections(*copy.deepcopy(layers)), use_module)
    return found


OBJECTS = objects()


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_every_public_class_is_copied_here() -> None:
    public = [getattr(home, name) for home in (hb, engine) for name in home.__all__]
    used = {type(make()) for make, _ in OBJECTS.values()}
    assert {each for each in public if isinstance(each, type)} - {hb.HalfbyteError} <= used


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", OBJECTS)
def test_a_copy_is_used_like_its_original(name: str, how: str) -> None:
    make, use = OBJECTS[name]
    expected = use(make())
    assert same(use(COPIES[how](make())), expected)


def test_a_deep_copy_has_memory_of_its_own() -> None:
    for name in ("cache fp8", "paged int4_channel"):
        make, use = OBJECTS[name]
        cache, expected = make(), use(make())
        for how in ("deepcopy", "pickle"):
            use(COPIES[how](cache))
        assert same(use(cache), expected)


@pytest.mark.parametrize("error", [hb.HalfbyteError("a"), *(kind("a") for kind in hb.HalfbyteError.__subclasses__())], ids=repr)
def test_errors_pass_between_processes(error: Exception) -> None:
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is type(error)
    assert other.args == error.args


def answer(given: bytes) -> bytes:
    """In the other process: use every object that came."""
    torch.set_num_threads(1)
    return pickle.dumps([OBJECTS[name][1](thing) for name, thing in pickle.loads(given)])


def test_a_spawned_process_uses_them_alike() -> None:
    names = [name for name in OBJECTS if name.split()[0] in ("cache", "paged", "layer", "fused", "view") or "fp8" in name]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = [OBJECTS[name][1](OBJECTS[name][0]()) for name in names]
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            given = pickle.dumps([(name, OBJECTS[name][0]()) for name in names])
            results = pickle.loads(pool.apply_async(answer, (given,)).get(timeout=120))
    finally:
        torch.set_num_threads(threads)
    for name, theirs, ours in zip(names, results, expected, strict=True):
        assert same(theirs, ours), name
