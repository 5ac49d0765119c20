"""Calls of attention that are launched like an earlier one: what makes them alike, and that no other call is taken for one.

A CPU stands in for a GPU: kernels are neither compiled nor run, and what they would be launched with is written down.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton import knobs
from triton.runtime.jit import JITFunction

from halfbyte import KV_FORMATS, KVCache, decode_attention, prefill_attention
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.kernels.common.compat import launcher
from halfbyte.kv_buffer import AttentionOptions, DecodeCall, KVBuffer
from halfbyte.ops import _decode_on_gpu, _launch_cache, workspace
from halfbyte.ops import decode_attention as public
from relaunching import ENVIRONMENT, WAYS, Compiled, Gpu, Watched, pages, watch_launches

Change = Callable[["Asked"], "Asked"]

#: Where the tail of the keys and the results are among all arguments of the kernel, those in structs one by one.
TAIL, RESULTS = 7, 29


def flat(arguments: Any) -> Iterator[Any]:
    """The arguments of a kernel, those in structs one by one."""
    for one in arguments:
        yield from flat(one) if isinstance(one, tuple) else [one]


@dataclass(frozen=True)
class Asked:
    """Everything that a signature is made of."""

    q: torch.Tensor
    keys: KVBuffer
    values: KVBuffer
    lengths: torch.Tensor
    query_start: torch.Tensor | None
    page_table: torch.Tensor | None
    options: AttentionOptions
    impl: str = "auto"
    deterministic_batch: bool = False

    def signature(self) -> _launch_cache.Signature | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", True)
            return public._signature(DecodeCall(*(getattr(self, f.name) for f in fields(self))))

    @property
    def key(self) -> Any:
        found = self.signature()
        assert found is not None
        return found.key


def full() -> Asked:
    """A call with every tensor there is, at addresses of its own."""
    lengths, query_start, starts, ends = (torch.zeros(2, dtype=torch.int32) for _ in range(4))
    keys = replace(pages("int8"), tail=torch.zeros(2, 2, 32, 64).bfloat16())
    return Asked(
        *(torch.zeros(2, 8, 1, 64).bfloat16(), keys, pages("int4_g32"), lengths, query_start),
        torch.zeros(2, 4, dtype=torch.int32),
        AttentionOptions(0.5, 30.0, torch.zeros(8), 20, starts, ends, torch.zeros(8)),
    )


def part(where: str, name: str, change: Callable[[torch.Tensor], Any]) -> Change:
    """One tensor of a call changed: a field of it, of a plane or of the options."""

    def changed(asked: Asked) -> Asked:
        owner = getattr(asked, where) if where else asked
        made = replace(owner, **{name: change(getattr(owner, name))})
        return replace(asked, **{where: made}) if where else made

    return changed


def option(**changes: Any) -> Change:
    return lambda asked: replace(asked, options=replace(asked.options, **changes))


TENSORS = [
    *(("", name) for name in ("q", "lengths", "query_start", "page_table")),
    *(("keys", name) for name in ("codes", "scales", "tail")),
    *(("values", name) for name in ("codes", "scales", "offsets")),
    *(("options", name) for name in ("starts", "ends", "alibi_slopes", "sinks")),
]
MISSING = ("query_start", "page_table", "starts", "ends", "alibi_slopes", "sinks", "offsets", "tail")
CHANGES: dict[str, Change] = {
    **{f"{name} of {where or 'the call'}: {way}": part(where, name, WAYS[way]) for where, name in TENSORS for way in WAYS},
    **{f"no {name}": part(where, name, lambda _: None) for where, name in TENSORS if name in MISSING},
    "format of the keys": lambda a: replace(a, keys=replace(a.keys, format=KV_FORMATS["fp8"])),
    "format of the values": lambda a: replace(a, values=replace(a.values, format=KV_FORMATS["int4"])),
    "a format of the same name": lambda a: replace(a, keys=replace(a.keys, format=replace(a.keys.format))),
    "no window": option(window=None),
    "no softcap": option(softcap=None),
    "starts and ends swapped for one": option(ends=None, starts=torch.zeros(3, dtype=torch.int32)),
    "impl": lambda a: replace(a, impl="gluon"),
}


def test_other_addresses_and_numbers_are_the_same_call() -> None:
    first, second = full(), full()
    assert first.key == second.key
    assert hash(first.key) == hash(second.key)
    assert first.key == option(sm_scale=0.25, softcap=1.0, window=7)(second).key
    one, other = first.signature(), second.signature()
    assert one is not None
    assert other is not None
    assert not {a for a in one.addresses if a} & {a for a in other.addresses if a}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_fact_makes_another_call(change: Change) -> None:
    asked = full()
    assert change(asked).key != asked.key


@pytest.mark.parametrize(("where", "name"), TENSORS)
def test_a_tensor_of_another_device_makes_another_call(where: str, name: str) -> None:
    """As if it were on GPU 5, its address as it is."""
    asked = full()
    tensor = getattr(getattr(asked, where) if where else asked, name)
    before = asked.key
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "get_device", lambda t: 5 if t is tensor else -1)
        assert asked.key != before


@pytest.mark.parametrize(("variable", "value"), ENVIRONMENT)
def test_the_environment_makes_another_call(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = full()
    monkeypatch.delenv(variable, raising=False)
    before = asked.key
    monkeypatch.setenv(variable, value)
    assert asked.key != before


@pytest.mark.parametrize(
    "change",
    [
        option(rotate_keys=True),
        lambda a: replace(a, deterministic_batch=True),
        lambda a: replace(a, impl="triton"),
        lambda a: replace(a, impl=["auto"]),
        *(part(where, name, lambda t: t.as_subclass(Watched)) for where, name in TENSORS),
        part("options", "starts", lambda _: [0, 0]),
        part("", "page_table", lambda _: "abc"),
    ],
)
def test_what_is_never_like_another(change: Change) -> None:
    assert change(full()).signature() is None


def test_a_parameter_is_a_tensor() -> None:
    asked = full()
    assert part("options", "sinks", lambda t: torch.nn.Parameter(t))(asked).key == asked.key


# ------------------------------------------------------------------------------------------------------------- launches


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu(Compiled())

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Compiled:
        made.first.append((tuple(flat(args)), grid))
        return made.kernel

    monkeypatch.setattr(JITFunction, "run", run)
    watch_launches(monkeypatch)
    monkeypatch.setattr(_decode_on_gpu, "shared", made.shared)
    monkeypatch.setattr(public, "level_of", lambda impl, q: impl)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # which is the index of a CPU's tensors
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: t.device.type == "cpu"))
    return made


def cache_of(seed: int = 0, **options: Any) -> KVCache:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", False)
        cache = KVCache(2, 2, 64, 64, **{"keys": "int8", "values": "int4_g32", **options})
        cache.append(*torch.randn(2, 2, 2, 40, 64, generator=torch.Generator().manual_seed(seed)))
    return cache


def query(tokens: int = 1) -> torch.Tensor:
    return torch.randn(2, 8, tokens, 64).bfloat16()


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "numbers": lambda: {"sm_scale": 0.3, "window": 9, "softcap": 20.0},
    "heads": lambda: {"alibi_slopes": torch.rand(8), "sinks": torch.rand(8)},
    "places": lambda: {"starts": torch.tensor([1, 2]).int(), "query_start": torch.tensor([30, 31]).int()},
    "gluon": lambda: {"impl": "gluon"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_the_same_arguments_at_other_addresses(options: Callable[[], dict[str, Any]], gpu: Gpu) -> None:
    """Another layer with another query: launched as the long way would have launched it."""
    decode_attention(query(), cache_of(), **options())
    q, cache, given = query(), cache_of(1), options()
    out, lse = decode_attention(q, cache, return_lse=True, **given)
    assert len(gpu.first) == len(gpu.kernel.launched) == 1
    _launch_cache._launches.clear()
    decode_attention(q, cache, **given)
    (expected, grid), launched = gpu.first[1], gpu.kernel.launched[0]
    assert launched[:9] == (*grid, 1, 1, 7, 11, (4, 1, 100), None, None, None)
    made = (out, lse, gpu.floats, gpu.counters)
    wanted = [*expected[:RESULTS], *made, *expected[RESULTS + 4 :]]
    assert list(flat(launched[9:])) == [t.data_ptr() if isinstance(t, torch.Tensor) else t for t in wanted]
    assert out.shape == q.shape
    assert out.dtype is q.dtype
    assert out.is_contiguous()
    assert lse.shape == q.shape[:3]
    assert lse.dtype is torch.float32
    assert lse.is_contiguous()


def test_a_tail_is_that_of_each_call(gpu: Gpu) -> None:
    first, other = (cache_of(keys="int4_channel") for _ in range(2))
    for cache in (first, other):
        decode_attention(query(), cache)
    (expected, _), (launched,) = gpu.first[0], gpu.kernel.launched
    assert first.keys.tail is expected[TAIL]
    assert other.keys.tail is not None
    assert list(flat(launched[9:]))[TAIL] == other.keys.tail.data_ptr()


def test_numbers_are_those_of_each_call(gpu: Gpu) -> None:
    q, cache = query(), cache_of()
    decode_attention(q, cache, sm_scale=0.5, window=3, softcap=4.0)
    decode_attention(q, cache, sm_scale=0.25, window=2**31 - 1, softcap=5.0)
    (again,) = gpu.kernel.launched
    assert list(flat(again[9:]))[RESULTS + 4 :][:3] == [0.25, 5.0, 2**30]


def test_a_prefill_is_launched_again_in_both_parts(gpu: Gpu) -> None:
    for seed in range(2):
        k, v = torch.randn(2, 2, 2, 3, 64).bfloat16()
        prefill_attention(query(3), k, v, cache_of(seed))
    assert len(gpu.first) == len(gpu.kernel.launched) == 2


BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "q of another batch": (lambda: {"q": query()[:1]}, "q has shape"),
    "q of three axes": (lambda: {"q": query()[0]}, "q has shape"),
    "q of no head": (lambda: {"q": query()[:, :0]}, "q has 0 heads"),
    "q of heads that do not divide": (lambda: {"q": query()[:, :7].contiguous()}, "q has 7 heads"),
    "q of integers": (lambda: {"q": query().to(torch.int16)}, "q is"),
    "q a list": (lambda: {"q": [1.0]}, "q is a list"),
    "no cache": (lambda: {"cache": {}}, "cache is a dict"),
    "window 0": (lambda: {"window": 0}, "window=0"),
    "window True": (lambda: {"window": True}, "window=True"),
    "window 3.0": (lambda: {"window": 3.0}, "window=3.0"),
    "softcap 0": (lambda: {"softcap": 0.0}, "softcap=0"),
    "softcap NaN": (lambda: {"softcap": float("nan")}, "softcap=nan"),
    "sm_scale infinite": (lambda: {"sm_scale": float("inf")}, "sm_scale=inf"),
    "sm_scale a string": (lambda: {"sm_scale": "1"}, "sm_scale='1'"),
    "slopes too many": (lambda: {"alibi_slopes": torch.rand(9)}, "alibi_slopes has shape"),
    "slopes a list": (lambda: {"alibi_slopes": [0.0] * 8}, "alibi_slopes is a list"),
    "sinks of integers": (lambda: {"sinks": torch.zeros(8).int()}, "sinks is"),
    "starts floating": (lambda: {"starts": torch.zeros(2)}, "starts is"),
    "query_start of another batch": (lambda: {"query_start": torch.zeros(3).int()}, "query_start has shape"),
}


@pytest.mark.parametrize(("bad", "message"), BAD.values(), ids=BAD.keys())
def test_wrong_arguments_raise_after_a_right_call(bad: Callable[[], dict[str, Any]], message: str, gpu: Gpu) -> None:
    q, cache = query(), cache_of()
    zeros = {name: torch.zeros(2).int() for name in ("starts", "query_start")}
    right: dict[str, Any] = {
        **{name: torch.rand(8) for name in ("alibi_slopes", "sinks")},
        **zeros | {"q": q, "cache": cache, "window": 1, "softcap": 3.0, "sm_scale": 1.0},
    }
    for _ in range(2):
        decode_attention(**right)
    assert len(gpu.kernel.launched) == 1
    with pytest.raises(InvalidArgument, match=message):
        decode_attention(**right | bad())
    assert len(gpu.kernel.launched) == 1


CONVERTED: dict[str, Callable[[], dict[str, Any]]] = {
    "starts of 64 bits": lambda: {"starts": torch.zeros(2).long()},
    "query_start of 64 bits": lambda: {"query_start": torch.zeros(2).long()},
    "slopes of 16 bits": lambda: {"alibi_slopes": torch.rand(8).half()},
    "sinks not contiguous": lambda: {"sinks": torch.rand(16)[::2]},
    "deterministic": lambda: {"deterministic_batch": True},
}


@pytest.mark.parametrize("options", CONVERTED.values(), ids=CONVERTED.keys())
def test_what_was_converted_on_the_way_is_not_remembered(
    options: Callable[[], dict[str, Any]], gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_decode_on_gpu, "_launch_portable", lambda *_: None)
    given = options()
    for _ in range(2):
        decode_attention(query(), cache_of(), **given)
    assert not _launch_cache._launches
    assert not gpu.kernel.launched


def test_tensors_of_two_devices_are_not_remembered() -> None:
    """Host memory that is pinned can be read by a GPU; what is not pinned looks the same and cannot."""
    made = full().signature()
    assert made is not None
    assert made.covers(made.tensors)
    there = (made.tensors[0].to("meta"), *made.tensors[1:])
    assert not made._replace(tensors=there).covers(made.tensors)


def test_another_length_of_lengths_that_is_not_dense(gpu: Gpu) -> None:
    cache = cache_of()
    cache.lengths = torch.zeros(4, dtype=torch.int32)[::2]
    for _ in range(2):
        decode_attention(query(), cache)
    assert not _launch_cache._launches
    assert len(gpu.first) == 2


def test_while_a_graph_is_recorded_calls_take_the_long_way(gpu: Gpu) -> None:
    q, cache = query(), cache_of()
    decode_attention(q, cache)
    gpu.recording = True
    decode_attention(q, cache)
    assert len(gpu.first) == 2
    assert not gpu.kernel.launched
    gpu.recording = False
    decode_attention(q, cache)
    assert len(gpu.first) == 2
    assert len(gpu.kernel.launched) == 1


def test_memory_that_is_not_aligned_takes_the_long_way(gpu: Gpu) -> None:
    q, cache = query(), cache_of()
    decode_attention(q, cache)
    gpu.counters = gpu.counters[1:]
    decode_attention(q, cache)
    assert len(gpu.first) == 2
    assert not gpu.kernel.launched


def test_another_device_is_made_the_current_one(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    q, cache = query(), cache_of()
    decode_attention(q, cache)
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "device_of", lambda t: asked.append(t) or nullcontext())
    decode_attention(q, cache)
    assert [t is q for t in asked] == [True]
    assert len(gpu.kernel.launched) == 1


def test_gradients_and_subclasses_take_the_long_way(gpu: Gpu) -> None:
    q, cache = query(), cache_of()
    decode_attention(q, cache)
    wanting = q.clone().requires_grad_()
    call = DecodeCall(wanting, cache.keys, cache.values, cache.lengths, None, None, AttentionOptions(1.0))
    assert public._signature(call) is None
    with torch.no_grad():
        assert public._signature(call) is not None
    assert public._signature(call._replace(q=q.as_subclass(Watched))) is None


def test_queries_of_32_bits_are_not_stored(gpu: Gpu) -> None:
    cache = cache_of()
    for _ in range(2):
        with pytest.raises(Unsupported, match="takes float16 and bfloat16"):
            decode_attention(query().float(), cache)
    assert not _launch_cache._launches


def test_compiled_code_does_not_look_for_earlier_calls(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    cache = cache_of()
    assert (
        public._signature(DecodeCall(query(), cache.keys, cache.values, cache.lengths, None, None, AttentionOptions(1.0))) is None
    )


def test_nothing_keeps_a_cache_alive(gpu: Gpu) -> None:
    q, cache = query(), cache_of()
    for _ in range(2):
        decode_attention(q, cache)
    codes = weakref.ref(cache.keys.codes)
    gpu.first.clear()
    del cache
    gc.collect()
    assert codes() is None
    assert len(_launch_cache._launches) == 1


def test_so_many_calls_are_remembered_and_then_none(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch_cache, "_CAPACITY", 3)
    cache = cache_of()
    for tokens in (1, 2, 3):
        decode_attention(query(tokens), cache)
    assert len(_launch_cache._launches) == 3
    decode_attention(query(4), cache)
    assert len(_launch_cache._launches) == 1


# ------------------------------------------------------------------------------------------------- what it is built on


def test_hooks_of_a_profiler_are_called() -> None:
    kernel = Compiled()
    launch = launcher(kernel, (3, 1, 1))

    def hook(metadata: Any) -> None: ...

    launch(7, 1, 2)
    knobs.runtime.launch_exit_hook.add(hook)
    try:
        launch(7, 3, 4)
    finally:
        knobs.runtime.launch_exit_hook.remove(hook)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs.runtime, "launch_enter_hook", hook)
        launch(7, 5, 6)
        patch.setattr(knobs.runtime, "launch_enter_hook", None)
        launch(7, 7, 8)
    assert kernel.launched == [(3, 1, 1, 7, 11, (4, 1, 100), None, None, None, *pair) for pair in ((1, 2), (7, 8))]
    assert kernel.hooked == [((3, 1, 1), 7, pair) for pair in ((3, 4), (5, 6))]


def test_a_workspace_is_shared_by_a_stream_if_it_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    device, recording = torch.device("cuda", 1), False
    part, count = torch.zeros(100), torch.zeros(10, dtype=torch.int32)
    monkeypatch.setattr(workspace, "_floats", {(device, 7): part})
    monkeypatch.setattr(workspace, "_counters", {(device, 7): count})
    monkeypatch.setattr(workspace, "stream_of", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
    stream = 7
    found = workspace.shared(device, 100, 10)
    assert found is not None
    assert found[0] == 7
    assert found[1] is part
    assert found[2] is count
    assert workspace.shared(device, 101, 10) is None
    assert workspace.shared(device, 100, 11) is None
    assert workspace.shared(torch.device("cuda", 0), 100, 10) is None
    stream = 8
    assert workspace.shared(device, 100, 10) is None
    stream, recording = 7, True
    assert workspace.shared(device, 100, 10) is None
