"""Appends that are launched like an earlier one: what makes them alike, and that no other append is taken for one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime.jit import JITFunction

from halfbyte import KV_FORMATS, KVCache, PagedKVCache
from halfbyte.errors import CapacityError, InvalidArgument
from halfbyte.kv_buffer import AppendCall, KVBuffer
from halfbyte.ops import _launch_cache
from halfbyte.ops import append as public
from relaunching import ENVIRONMENT, WAYS, Compiled, Gpu, Watched, addresses, pages, watch_launches

Change = Callable[["Asked"], "Asked"]
Options = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """Everything that a request is made of."""

    k: torch.Tensor
    v: torch.Tensor
    keys: KVBuffer
    values: KVBuffer
    lengths: torch.Tensor
    counts: torch.Tensor | None
    page_table: torch.Tensor | None
    rotate_keys: bool
    rope: Any
    q: torch.Tensor | None

    def request(self) -> _launch_cache.Signature | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", True)
            return public.signature_of(AppendCall(**{f.name: getattr(self, f.name) for f in fields(self)}, measure=False))

    @property
    def key(self) -> Any:
        found = self.request()
        assert found is not None
        return found.key


def full() -> Asked:
    """An append with every tensor there is, at addresses of its own."""
    k, v, q = (torch.zeros(2, heads, 1, 64).bfloat16() for heads in (2, 2, 8))
    lengths, counts = (torch.zeros(2, dtype=torch.int32) for _ in range(2))
    table, rope = torch.zeros(2, 4, dtype=torch.int32), (torch.zeros(1, 32), torch.zeros(1, 32))
    return Asked(k, v, pages("int8_tensor"), pages("int4_g32"), lengths, counts, table, False, rope, q)


def part(where: str, name: str, change: Callable[[Any], Any]) -> Change:
    """One tensor of an append changed: a field of it, of a plane, or the cosines or sines."""

    def changed(asked: Asked) -> Asked:
        if where == "rope":
            cos, sin = asked.rope
            return replace(asked, rope=(change(cos), sin) if name == "cos" else (cos, change(sin)))
        owner = getattr(asked, where) if where else asked
        made = replace(owner, **{name: change(getattr(owner, name))})
        return replace(asked, **{where: made}) if where else made

    return changed


TENSORS = [
    *(("", name) for name in ("k", "v", "lengths", "counts", "page_table", "q")),
    *(("keys", name) for name in ("codes", "scales", "saturated")),
    *(("values", name) for name in ("codes", "scales", "offsets")),
    *(("rope", name) for name in ("cos", "sin")),
]
CHANGES: dict[str, Change] = {
    **{f"{name} of {where or 'the append'}: {way}": part(where, name, WAYS[way]) for where, name in TENSORS for way in WAYS},
    **{f"no {name}": part(where, name, lambda _: None) for where, name in TENSORS if name in ("counts", "page_table", "q")},
    "no rope": lambda a: replace(a, rope=None),
    "format of the keys": lambda a: replace(a, keys=replace(a.keys, format=KV_FORMATS["fp8_tensor"])),
    "a format of the same name": lambda a: replace(a, values=replace(a.values, format=replace(a.values.format))),
    "rotated keys": lambda a: replace(a, rotate_keys=True),
}


def test_other_addresses_are_the_same_append() -> None:
    first, second = full(), full()
    assert first.key == second.key
    assert hash(first.key) == hash(second.key)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_fact_makes_another_append(change: Change) -> None:
    asked = full()
    assert change(asked).key != asked.key


@pytest.mark.parametrize(("variable", "value"), ENVIRONMENT)
def test_the_environment_makes_another_append(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = full()
    monkeypatch.delenv(variable, raising=False)
    before = asked.key
    monkeypatch.setenv(variable, value)
    assert asked.key != before


@pytest.mark.parametrize(
    "change",
    [
        lambda a: replace(a, keys=replace(a.keys, tail=torch.zeros(1))),
        lambda a: replace(a, rope=list(a.rope)),
        lambda a: replace(a, rope=(*a.rope, a.rope[0])),
        lambda a: replace(a, rope=(None, a.rope[1])),
        lambda a: replace(a, q=a.q.float().requires_grad_()),
        lambda a: replace(a, counts=[1, 1]),
        *(part(where, name, lambda t: t.as_subclass(Watched)) for where, name in TENSORS),
    ],
)
def test_what_is_never_like_another(change: Change) -> None:
    assert change(full()).request() is None


def test_a_query_that_wants_a_gradient_may_without_recording() -> None:
    asked = full()
    with torch.no_grad():
        assert replace(asked, q=asked.q.clone().requires_grad_()).key == asked.key  # type: ignore[union-attr]


def test_compiled_code_does_not_look_for_earlier_appends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert full().request() is None


# ------------------------------------------------------------------------------------------------------------- launches


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu(Compiled())

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Compiled:
        made.first.append((args, (*grid, 1, 1)[:3]))
        return made.kernel

    monkeypatch.setattr(JITFunction, "run", run)
    watch_launches(monkeypatch)
    monkeypatch.setattr(public, "stream_of", lambda device: 7)
    monkeypatch.setattr(public, "level", lambda op, impl, device: "triton")
    monkeypatch.setattr(public, "_supports_pdl", lambda device: True)
    monkeypatch.setattr(KVCache, "_capturing", lambda self: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # which is the index of a CPU's tensors
    return made


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on tensors say that they are on a GPU."""
    return lambda: monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: t.device.type == "cpu"))


def token(seed: int = 0, tokens: int = 1, heads: int = 2) -> torch.Tensor:
    return torch.randn(2, heads, tokens, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


def cache(paged: bool = False, **options: Any) -> KVCache:
    formats = {"keys": "int8", "values": "int4_g32", **options}
    return PagedKVCache(2, 2, 64, 64, pages=8, page_size=16, **formats) if paged else KVCache(2, 2, 64, 64, **formats)


OPTIONS: dict[str, Callable[[], Options]] = {
    "plain": dict,
    "counts": lambda: {"counts": torch.tensor([1, 0]).int()},
    "rope": lambda: {"rope": (torch.rand(1, 32), torch.rand(1, 32))},
    "queries": lambda: {"rope": (torch.rand(2, 1, 32), torch.rand(2, 1, 32)), "q": token(heads=8)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_the_same_arguments_at_other_addresses(options: Callable[[], Options], gpu: Gpu, on_gpu: Callable[[], None]) -> None:
    """Another layer with other tokens: launched as the long way would have launched it."""
    caches = cache(), cache()
    on_gpu()
    caches[0].append(token(), token(1), **options())
    k, v, given = token(2), token(3), options()
    q_out = caches[1].append(k, v, **given)
    assert len(gpu.first) == len(gpu.kernel.launched) == 1
    _launch_cache._launches.clear()
    caches[1].append(k, v, **given)
    (expected, grid), launched = gpu.first[1], gpu.kernel.launched[0]
    assert launched[:9] == (*grid, 7, 11, (4, 1, 100), None, None, None)
    wanted = list(addresses(expected))
    if q_out is not None:
        wanted[3] = q_out.data_ptr()
        assert q_out.shape == given["q"].shape
        assert q_out.dtype is given["q"].dtype
    assert list(launched[9:]) == wanted
    assert (q_out is None) == ("q" not in given)


@pytest.mark.parametrize("first", ["one token for both", "one table for both"])
def test_what_was_one_tensor_may_be_two(first: str, gpu: Gpu, on_gpu: Callable[[], None]) -> None:
    """A first append of the same memory twice, as in a warm-up, is like one of two tensors: each goes where it belongs."""
    made = cache()
    on_gpu()
    k, v, cos, sin = token(), token(1), torch.rand(1, 32), torch.rand(1, 32)
    made.append(k, k if first == "one token for both" else v, rope=(cos, cos if first == "one table for both" else sin))
    made.append(k, v, rope=(cos, sin))
    launched = gpu.kernel.launched[0][9:]
    assert launched[:2] == (k.data_ptr(), v.data_ptr())
    assert launched[6] == (cos.data_ptr(), sin.data_ptr())


def test_what_needs_more_than_one_launch_is_not_remembered(gpu: Gpu, on_gpu: Callable[[], None]) -> None:
    """A scale of the whole tensor to be measured, per-channel keys, more tokens than one program takes, converted tensors."""
    measured, channels, prompt, converted = cache(keys="int8_tensor"), cache(keys="int4_channel"), KVCache(2, 2, 64, 96), cache()
    on_gpu()
    cosines = torch.rand(1, 64)[:, ::2]
    for _ in range(2):
        measured.append(token(), token())
        channels.append(token(), token())
        prompt.append(token(tokens=48), token(tokens=48))
        converted.append(token(), token(), counts=torch.ones(2).long())
        converted.append(token(), token(), rope=(cosines, cosines))
    assert not _launch_cache._launches
    assert not gpu.kernel.launched


BAD: dict[str, tuple[Callable[[], Options], str]] = {
    "k of another batch": (lambda: {"k": token()[:1]}, "k has shape"),
    "v of three axes": (lambda: {"v": token()[0]}, "v has shape"),
    "k a list": (lambda: {"k": [1.0]}, "k is a list"),
    "v of integers": (lambda: {"v": token().to(torch.int16)}, "v is"),
    "more tokens of k": (lambda: {"k": token(tokens=2)}, "k has 2 tokens"),
    "counts too many": (lambda: {"counts": torch.ones(3).int()}, "counts has shape"),
    "a rope of one": (lambda: {"rope": (torch.rand(1, 32),)}, "rope is"),
    "a rope in fp64": (lambda: {"rope": (torch.rand(1, 32).double(),) * 2}, "rope"),
    "q of another batch": (lambda: {"q": token(heads=8)[:1]}, "q has shape"),
}


@pytest.mark.parametrize(("bad", "message"), BAD.values(), ids=BAD.keys())
def test_wrong_arguments_raise_after_a_right_append(
    bad: Callable[[], Options], message: str, gpu: Gpu, on_gpu: Callable[[], None]
) -> None:
    made = cache()
    on_gpu()
    right = {"k": token(), "v": token(), "counts": torch.ones(2).int(), **OPTIONS["queries"]()}
    for _ in range(2):
        made.append(**right)
    assert len(gpu.kernel.launched) == 1
    with pytest.raises(InvalidArgument, match=message):
        made.append(**right | bad())
    assert len(gpu.kernel.launched) == 1


def test_a_full_cache_is_refused_as_ever(gpu: Gpu, on_gpu: Callable[[], None]) -> None:
    made = KVCache(1, 2, 64, 3, keys="int8", values="int8")
    on_gpu()
    for _ in range(3):
        made.append(token()[:1], token()[:1])
    made.lengths.fill_(3)  # what no kernel did here
    with pytest.raises(CapacityError):
        made.append(token()[:1], token()[:1])
    assert len(gpu.kernel.launched) == 2


def test_pages_are_taken_before_the_launch(gpu: Gpu, on_gpu: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    made = cache(paged=True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t)
    on_gpu()
    for _ in range(17):
        made.append(token(), token())
    assert len(gpu.first) == 1
    assert len(gpu.kernel.launched) == 16
    assert (made.page_table[:, :2] >= 0).all()
    assert (made.page_table[:, 2:] < 0).all()


def test_another_device_is_made_the_current_one(gpu: Gpu, on_gpu: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    made = cache()
    on_gpu()
    made.append(token(), token())
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "device_of", lambda t: asked.append(t) or nullcontext())
    k = token()
    made.append(k, token())
    assert [t is k for t in asked] == [True]
    assert len(gpu.kernel.launched) == 1


def test_nothing_keeps_a_cache_alive(gpu: Gpu, on_gpu: Callable[[], None]) -> None:
    made = cache()
    on_gpu()
    for _ in range(2):
        made.append(token(), token())
    codes = weakref.ref(made.keys.codes)
    gpu.first.clear()
    del made
    gc.collect()
    assert codes() is None
    assert len(_launch_cache._launches) == 1
