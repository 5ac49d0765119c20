"""CUDA graphs, streams, torch.compile: what was captured once gives what a fresh call gives, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_cases import Call, Case, build, differs, same_bits, variants
from gpu_place import PLACE

import halfbyte as hb
from halfbyte.errors import InvalidArgument, Unsupported

FORMATS = [("int8", "int4_g32"), ("int4", "int4"), ("int4_channel", "int8"), ("fp8", "fp8"), ("bf16", "bf16")]
needs_gpu = pytest.mark.skipif(PLACE.dry, reason="a CPU has no streams")


class Captured:
    """`function` as a CUDA graph on a stream; without a GPU, the function called again. `result` is overwritten by each replay."""

    def __init__(self, function: Callable[[], Any], stream: Any = None) -> None:
        self._function, self.result = function, None
        if PLACE.dry:
            return
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self.result = function()

    def replay(self) -> Any:
        if PLACE.dry:
            self.result = self._function()
        else:
            self._graph.replay()
        return self.result


class Decoding:
    """A layer that decodes: each step appends one token to a cache and attends over it, from inputs with fixed addresses."""

    def __init__(self, formats: tuple[str, str], steps: int, impl: str, batch: int = 3, seed: int = 0) -> None:
        rng = torch.Generator(PLACE.device).manual_seed(seed)
        self.pool = torch.randn(64, batch, 12, 1, 128, generator=rng, device=PLACE.device).bfloat16()
        self.input = torch.zeros_like(self.pool[0])  # 8 query heads, then 2 of keys, 2 of values
        self.impl = impl
        keys, values = formats
        self.cache = hb.KVCache(batch, 2, 128, steps + 2, keys=keys, values=values, device=PLACE.device)

    def step(self) -> Any:
        q, k, v = self.input.split((8, 2, 2), 1)
        self.cache.append(k, v)
        return hb.decode_attention(q, self.cache, return_lse=True, impl=self.impl)

    def feed(self, i: int) -> None:
        self.input.copy_(self.pool[i % len(self.pool)])

    def captured(self, stream: Any = None) -> Captured:
        """The step as a graph, after one eager call (which compiles) has been forgotten."""
        self.feed(0)
        self.step()
        self.cache.reset()
        PLACE.sync()
        graph = Captured(self.step, stream)
        self.cache.reset()
        return graph


def side_by_side(replayed: Decoding, graph: Captured, eager: Decoding, steps: int, check_every: int) -> Iterator[int]:
    """Steps of a graph and of eager calls, compared at every step on the device and looked at every so many."""
    different = torch.zeros((), dtype=torch.bool, device=PLACE.device)
    for i in range(steps):
        replayed.feed(i)
        eager.feed(i)
        out, lse = graph.replay()
        expected = eager.step()
        different |= differs(out, expected[0]) | differs(lse, expected[1])
        if i % check_every == check_every - 1:
            assert not different, f"within the {check_every} steps up to {i}"
        yield i
    assert int(replayed.cache.lengths.min()) == int(replayed.cache.lengths.max()) == steps
    assert not different
    for a, b in zip(replayed.cache.tensors(), eager.cache.tensors(), strict=True):
        assert same_bits(a, b)


def grow(formats: tuple[str, str], steps: int, impl: str, check_every: int) -> None:
    replayed, eager = Decoding(formats, steps, impl), Decoding(formats, steps, impl)
    used: list[int] = []
    for i in side_by_side(replayed, replayed.captured(), eager, steps, check_every):
        if not PLACE.dry and i in (steps // 10, steps - 1):
            used.append(torch.cuda.memory_allocated())
    assert len(set(used)) <= 1, f"memory drifts: {used} bytes"


def grow_in_threads(steps: int, impl: str, check_every: int, seed: int = 0) -> None:
    """Two layers at once, each in a thread and on a stream of its own. Memory is the device's."""
    pairs = [[Decoding(FORMATS[i], steps, impl, seed=seed + i) for _ in range(2)] for i in range(2)]
    streams = [contextlib.nullcontext() if PLACE.dry else torch.cuda.stream(torch.cuda.Stream()) for _ in pairs]
    graphs = [replayed.captured() for replayed, _ in pairs]  # one at a time: nothing else may run while a graph is recorded
    PLACE.sync()

    def decode(i: int, steps: int) -> None:
        replayed, eager = pairs[i]
        with streams[i]:
            for _ in side_by_side(replayed, graphs[i], eager, steps, check_every):
                pass
            replayed.cache.reset()
            eager.cache.reset()
        PLACE.sync()

    used: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        for count in (1, steps, steps):
            list(pool.map(decode, range(2), (count, count)))
            used.append(0 if PLACE.dry else torch.cuda.memory_allocated())
    assert len(set(used)) == 1, f"memory drifts: {used} bytes"


@pytest.mark.timeout(600)
def test_twenty_thousand_steps_of_one_graph() -> None:
    grow(FORMATS[0], PLACE.size(20_000, 70), PLACE.impls[-1], PLACE.size(500, 10))


@pytest.mark.compile_first
@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_a_growing_cache_in_a_graph(formats: tuple[str, str], impl: str) -> None:
    try:
        grow(formats, PLACE.size(700, 70), impl, PLACE.size(100, 10))
    except (Unsupported, InvalidArgument) as error:
        if impl == "auto":
            raise
        pytest.skip(str(error))


@needs_gpu
def test_two_streams_at_once(impl: str) -> None:
    """Two layers decode on two streams; each gets what it gets alone."""
    steps, streams = 1500, [torch.cuda.Stream(), torch.cuda.Stream()]
    layers = [Decoding(FORMATS[i], steps, impl, batch=5, seed=i) for i in range(2)]
    graphs = [layer.captured(stream) for layer, stream in zip(layers, streams, strict=True)]
    kept: list[list[torch.Tensor]] = [[], []]
    PLACE.sync()
    for i in range(steps):
        for n, (layer, stream, graph) in enumerate(zip(layers, streams, graphs, strict=True)):
            with torch.cuda.stream(stream):
                layer.feed(i)
                out, _ = graph.replay()
                kept[n].append(out.clone())
    PLACE.sync()
    different = torch.zeros((), dtype=torch.bool, device=PLACE.device)
    for n in range(2):
        alone = Decoding(FORMATS[n], steps, impl, batch=5, seed=n)
        for i in range(steps):
            alone.feed(i)
            different |= differs(alone.step()[0], kept[n][i])
    assert not different


@pytest.mark.compile_first
@pytest.mark.parametrize("number", range(PLACE.size(12, 3)))
def test_a_replay_reads_the_lengths_of_today(number: int, impl: str) -> None:
    """Lengths, starts and page tables live on the device: a graph must not keep the plan of the day it was captured."""
    variant = replace(variants(PLACE.size(12, 3), seed=11)[number], queries=1)
    if variant.dtype == "float32":
        variant = replace(variant, dtype="bfloat16")  # torch code runs those, which no graph can record
    top = PLACE.size(4000, 100)
    case = Case(variant, 2, (top, top, 40), seed=number)
    call = build(case, PLACE.device)
    try:
        call.run(impl)
        graph = Captured(lambda: hb.decode_attention(call.q, call.cache, return_lse=True, impl=impl, **call.options))
    except (Unsupported, InvalidArgument) as error:
        pytest.skip(str(error))
    changes = [(1, top, 0), (top, 3, 40), (0, 0, 0), (top // 2, 65, 39), (top, top, 40)]
    if hb.key_format(variant.keys).token_block:
        changes = changes[-1:]  # a tail belongs to one length
    for lengths in changes:
        call.cache.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        out, lse = (t.clone() for t in graph.replay())
        expected = hb.decode_attention(call.q, call.cache, return_lse=True, impl=impl, **call.options)
        assert same_bits(out, expected[0])
        assert same_bits(lse, expected[1])
        assert not Call(call.q, call.cache, call.options).wrong(out, lse)


@pytest.mark.compile_first
@pytest.mark.parametrize("formats", FORMATS[:3], ids="-".join)
def test_compiled_equals_eager(formats: tuple[str, str], impl: str) -> None:
    """torch.compile without a graph break, mutation of the cache included."""
    eager, compiled = (Decoding(formats, 40, impl) for _ in range(2))
    torch._dynamo.reset()

    def step(hidden: torch.Tensor) -> Any:
        q, k, v = (hidden * 1).split((8, 2, 2), 1)
        compiled.cache.append(k, v)
        return hb.decode_attention(q, compiled.cache, return_lse=True, impl=impl)

    fast = torch.compile(step, fullgraph=True, backend="aot_eager" if PLACE.dry else "inductor")
    for i in range(35):
        eager.feed(i)
        out, lse = fast(eager.input)
        expected = eager.step()
        assert same_bits(out, expected[0])
        assert same_bits(lse, expected[1])
    for a, b in zip(eager.cache.tensors(), compiled.cache.tensors(), strict=True):
        assert same_bits(a, b)


@needs_gpu
def test_the_current_stream_is_used(impl: str) -> None:
    """On a side stream that is kept busy first: a kernel on any other stream would read what is not there yet."""
    for seed in range(20):
        layer, expected = Decoding(FORMATS[0], 40, impl, seed=seed), Decoding(FORMATS[0], 40, impl, seed=seed)
        expected.feed(1)
        wanted = expected.step()[0]
        stream = torch.cuda.Stream()
        PLACE.sync()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # about 10 ms
            layer.feed(1)
            out, _ = layer.step()
        stream.synchronize()
        assert same_bits(out, wanted)
