"""A day of requests compiles nothing: vLLM's warm-up compiles every variant that a drawn batch takes. On a pretended H200."""

from __future__ import annotations

import random
from contextlib import nullcontext
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import halfbyte
from halfbyte.cache_plan import LayerFormats
from halfbyte.engine import ExactTokens, PagedView, PageLayout, attention_varlen
from halfbyte.experts import QuantExperts
from halfbyte.kv_buffer import KVBuffer
from halfbyte.ops.decode_attention import decode_attention
from halfbyte.ops.experts_mlp import Projection, experts_mlp
from halfbyte.plans.gemm_problem import GemmProblem, Routing
from halfbyte.plans.prompts import bucket, groups
from halfbyte.reference.experts import Activation
from halfbyte.vllm.prompts import FlashPrompts, FlashPromptsWithExactTokens, Ragged
from halfbyte.vllm.warm_up import Limits, compile_layer, warm_up
from pretended_gpu import Variants, pretend_compiler, pretend_levels

LIMITS = Limits(requests=72, drafts=2, tokens=320, longest=1800)
HEADS, KV_HEADS, DIM = 16, 8, 128
SCRATCH = 2048


class Layer:
    """What `warm_up` takes of a layer's attention."""

    def __init__(
        self, keys: str, values: str, prefill: str, window: int | None, scratch: int, sinks: int = 0, recent: int = 0
    ) -> None:
        self.formats = LayerFormats(keys, values, False)
        self.options = SimpleNamespace(prefill=prefill, exact_tokens=(sinks, recent))
        self.num_heads, self.num_kv_heads, self.sliding_window = HEADS, KV_HEADS, window
        self.logits_soft_cap = self.sinks = self.alibi_slopes = None
        self.prompts = self._prompts(scratch, sinks, recent) if scratch else None
        self.sides, plain = (self._pages(*formats) for formats in ((keys, values), ("bf16", "bf16")))

        def of(table: torch.Tensor, code_lengths: torch.Tensor, sink_tokens: torch.Tensor) -> ExactTokens:
            return ExactTokens(*plain, table, sink_tokens if sinks else None, recent, code_lengths)

        self.exact_tokens = SimpleNamespace(of=of) if sinks or recent else None
        qkv = torch.zeros(LIMITS.tokens, HEADS + 2 * KV_HEADS, DIM, dtype=torch.bfloat16)
        self.q, self.k, self.v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)

    def _prompts(self, scratch: int, sinks: int, recent: int) -> FlashPrompts:
        """With scratch of its own, and nothing in FlashAttention's place."""

        def attention(q: torch.Tensor, return_softmax_lse: bool = False, **_: Any) -> Any:
            return (torch.zeros_like(q), q.new_zeros(HEADS, len(q), dtype=torch.float32)) if return_softmax_lse else None

        kind, more = (FlashPromptsWithExactTokens, (sinks, recent)) if sinks or recent else (FlashPrompts, ())
        rows = torch.zeros(2, scratch, KV_HEADS, DIM, dtype=torch.bfloat16)
        kind = type(kind.__name__, (kind,), {"scratch": lambda self: tuple(rows)})
        return kind(attention, {}, self.sliding_window, None, (KV_HEADS, DIM), torch.bfloat16, scratch, *more)

    @staticmethod
    def _pages(keys: str, values: str) -> tuple[KVBuffer, KVBuffer]:
        layout = PageLayout(keys, values, DIM)
        return layout.buffers(torch.zeros(64, KV_HEADS, 16, layout.token_head_bytes, dtype=torch.uint8))

    def attend_codes(
        self, cache: Any, cu_seqlens_q: Any, most: int, query: Any, new: Any, out: Any, exact: ExactTokens | None
    ) -> None:
        own = {} if new is None else {"prefill": "exact", "k": new[0], "v": new[1]}
        attention_varlen(query, cache, cu_seqlens_q, most, window=self.sliding_window, exact_tokens=exact, out=out, **own)

    def exact(self, cache: PagedView) -> ExactTokens | None:
        """Of the requests of a cache, as the builder makes it."""
        table, lengths = cache.page_table, cache.lengths
        return None if self.exact_tokens is None else self.exact_tokens.of(table, lengths.clone(), lengths.clone())

    def warm_up(self, limits: Limits) -> None:
        table = torch.zeros(1, 128, dtype=torch.int32)
        warm_up(self, limits, self.q, self.k, self.v, self.sides, table)

    def step(self, decodes: int, drafts: int, queries: list[int], past: list[int]) -> None:
        """A step as the builder divides it: `decodes` requests with as many drafts, and chunks of prompts."""
        table = torch.zeros(decodes + len(queries), 128, dtype=torch.int32)
        lengths = torch.zeros(len(table), dtype=torch.int32)
        out = torch.zeros(LIMITS.tokens, HEADS, DIM, dtype=torch.bfloat16)
        tokens = decodes * drafts
        if decodes:
            cache = PagedView(*self.sides, lengths[:decodes], table[:decodes])
            self.attend_codes(
                cache, torch.zeros(decodes + 1, dtype=torch.int32), drafts, self.q[:tokens], None, out[:tokens], self.exact(cache)
            )
        starts = list(accumulate(queries, initial=tokens))
        bounds = [n + p for n, p in zip(queries, past, strict=True)]
        limits = {"scratch": self.prompts.tokens if self.prompts else 0, "exact_tokens": sum(self.options.exact_tokens)}
        for group in groups(queries, bounds, query_heads=HEADS // KV_HEADS, drafts=LIMITS.drafts, **limits):
            mine, rows = slice(group.first, group.last), slice(starts[group.first], starts[group.last])
            cache = PagedView(*self.sides, lengths[decodes:][mine].clone(), table[decodes:][mine].clone())
            cu_seqlens, most = torch.zeros(len(cache.lengths) + 1, dtype=torch.int32), bucket(max(queries[mine]), LIMITS.drafts)
            new = (self.k[rows], self.v[rows]) if self.options.prefill == "exact" and not group.decodes else None
            if group.unpacked and self.prompts is not None:
                host = tuple(zip(queries[mine], bounds[mine], strict=True))
                part = Ragged(rows, cu_seqlens, most, cache.lengths, cache.page_table, host=host)
                self.prompts.attend(part, self.q[rows], cache, new, out[rows], self.exact(cache))
            else:
                self.attend_codes(cache, cu_seqlens, most, self.q[rows], new, out[rows], self.exact(cache))


@pytest.fixture(autouse=True)
def _first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was compiled in this process, and no linear layer waits to be."""
    monkeypatch.setattr("halfbyte.vllm.warm_up._compiled", set())
    monkeypatch.setattr("halfbyte.vllm.warm_up._layers", [])


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Variants:
    recorded = pretend_compiler(monkeypatch)
    monkeypatch.setattr("halfbyte.kernels.compiling.parallel.compile_only", lambda *_: nullcontext())
    return recorded


CASES = {
    "unpacked": ("int8", "int4_g32", "cache", None, SCRATCH),
    "exact": ("int4", "int4", "exact", None, SCRATCH),
    "window": ("fp8", "int8", "cache", 100, SCRATCH),
    "no FlashAttention": ("int8", "int8", "cache", None, 0),
    "16 bits": ("bf16", "bf16", "cache", None, SCRATCH),
    "exact, no FlashAttention": ("int8", "int4_g32", "exact", None, 0),
    "exact, window, beyond the scratch": ("int8", "int4_g32", "exact", 100, 900),
    "sink and recent tokens": ("int8", "int4_g32", "cache", None, 0, 4, 128),
    "sink and recent tokens, unpacked": ("int8", "int4_g32", "cache", None, 2 * SCRATCH, 4, 128),
    "recent tokens, window, beyond the scratch": ("int8", "int4_g32", "cache", 100, 900, 0, 64),
    "sink and recent tokens, exact": ("int8", "int4_g32", "exact", None, 900, 4, 128),
}


def flash(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of torch's FlashAttention of a chunk over itself."""
    return torch.zeros_like(q), q.new_zeros(HEADS, len(q), dtype=torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_a_day_of_requests_compiles_nothing(case: str, variants: Variants, monkeypatch: pytest.MonkeyPatch) -> None:
    if "no FlashAttention" not in case:
        monkeypatch.setattr("halfbyte.ops._fused._takes_ragged", lambda *_: True)
        monkeypatch.setattr("halfbyte.ops._fused._flash", flash)
    draw, layer = random.Random(case), Layer(*CASES[case])
    layer.warm_up(LIMITS)
    known = set(variants.keys)
    assert len(known) > 4
    for _ in range(60):
        decodes, drafts = draw.randrange(LIMITS.requests), draw.randint(1, LIMITS.drafts)
        room, queries = LIMITS.tokens - decodes * drafts, []
        if draw.random() < 0.2:  # all alike
            each = draw.choice([8, 16, 32])
            queries = [each] * min(room // each, LIMITS.requests - decodes)
            room = 0
        while room > 0 and len(queries) + decodes < LIMITS.requests and draw.random() < 0.9:
            queries.append(min(room, draw.choice([1, 2, 3, 5, 8, 16, 31, 63, 64, 65, 200])))
            room -= queries[-1]
        layer.step(decodes, drafts, queries, [draw.randrange(1500) for _ in queries])
        assert variants.keys <= known, (decodes, drafts, queries, sorted(name for name, *_ in variants.keys - known))


class Latents(Layer):
    """A layer with MLA: decodes alone, as `HalfbyteMLAImpl.attend_codes` computes them."""

    def __init__(self, keys: str, values: str) -> None:
        super().__init__("int8", "int8", "cache", None, 0)
        self.formats, self.num_kv_heads, layout = LayerFormats(keys, values, False), 1, PageLayout(keys, values, 64, 512)
        self.sides = layout.buffers(torch.zeros(64, 1, 16, layout.token_head_bytes, dtype=torch.uint8))
        self.q = torch.zeros(LIMITS.tokens, HEADS, 576, dtype=torch.bfloat16)
        self.k, self.v = (torch.zeros(1, 1, dim, dtype=torch.bfloat16) for dim in (64, 512))

    def attend_codes(
        self, cache: Any, cu_seqlens_q: Any, most: int, query: Any, new: Any, out: Any, exact: ExactTokens | None = None
    ) -> None:
        q, into = (t.unflatten(0, (-1, most)).transpose(1, 2) for t in (query, out))
        decode_attention(q, cache, sm_scale=0.1, out=into, latent=True)


@pytest.mark.parametrize(("keys", "values"), [("bf16", "int8"), ("int8", "int4"), ("int8", "int4_g32")])
def test_a_day_of_latents_compiles_nothing(keys: str, values: str, variants: Variants) -> None:
    layer = Latents(keys, values)
    layer.warm_up(LIMITS._replace(tokens=0))
    known = set(variants.keys)
    assert known
    for drafts in range(1, LIMITS.drafts + 1):
        for decodes in range(1, LIMITS.requests + 1):
            cache = PagedView(*layer.sides, torch.zeros(decodes, dtype=torch.int32), torch.zeros(decodes, 128, dtype=torch.int32))
            query = layer.q[: decodes * drafts]
            layer.attend_codes(cache, None, drafts, query, None, query.new_empty(len(query), HEADS, 512))
            assert variants.keys <= known, (decodes, drafts, sorted(name for name, *_ in variants.keys - known))


@pytest.mark.parametrize(("scratch", "longest"), [(SCRATCH, 128), (LIMITS.longest - 1, 512), (0, 512)])
def test_chunks_of_requests_beyond_the_scratch_read_codes(scratch: int, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So kernels are compiled for the longest of them, and not only up to where chunks are unpacked."""
    layer, lengths = Layer("int8", "int8", "cache", 60, scratch), set()
    monkeypatch.setattr(layer, "attend_codes", lambda cache, cu_seqlens, most, *rest: lengths.add(most))
    monkeypatch.setattr("halfbyte.vllm.warm_up.compiling_only", nullcontext)
    monkeypatch.setattr("halfbyte.vllm.warm_up._unpack", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    layer.warm_up(LIMITS)
    assert max(lengths) == longest


def test_a_layer_like_another_compiles_nothing(variants: Variants) -> None:
    for _ in range(2):
        Layer("int8", "int8", "cache", 50, SCRATCH).warm_up(LIMITS._replace(requests=9))
        variants.keys.clear()
    assert not variants.keys


@pytest.mark.parametrize(("name", "n", "k"), [("int4_g128", 1024, 4096), ("nf4", 6144, 4096), ("int8_col", 8192, 8192)])
def test_steps_of_every_size_take_gemms_that_were_compiled(name: str, n: int, k: int, variants: Variants) -> None:
    draw, weight = random.Random(name), halfbyte.quantize(torch.ones(1, k), name)
    parts = {part: t.expand(n, *t.shape[1:]).contiguous() for part, t in weight.parts().items()}
    weight = type(weight)(weight.format, torch.Size((n, k)), **parts)

    def multiply(rows: int) -> None:
        halfbyte.linear(torch.zeros(rows, k, dtype=torch.bfloat16), weight, impl="gluon")

    compile_layer([GemmProblem(((weight.format, n),), 1, k, "bf16")], False, 2048, torch.device("cuda", 0), multiply)
    known = set(variants.keys)
    assert len(known) > 3
    for rows in [*range(1, 18), 32, 33, 64, 65, 2048, *(draw.randint(17, 2048) for _ in range(40))]:
        multiply(rows)
        assert variants.keys <= known, (rows, sorted(name for name, *_ in variants.keys - known))


@pytest.mark.parametrize("name", ["int4_g64", "mxfp4", "int8_col"])
def test_prompts_of_every_length_take_experts_that_were_compiled(
    name: str, variants: Variants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixture as `HalfbyteExperts` computes it."""
    pretend_levels(monkeypatch)
    draw, (experts, top_k, inner, width) = random.Random(name), (16, 4, 256, 512)
    fmt, silu = halfbyte.quantize(torch.ones(1, 64), name).format, Activation("silu")
    shapes = (experts, 2 * inner, width), (experts, width, inner)
    stacks = [QuantExperts.empty(shape, fmt, None).weight for shape in shapes]
    up, down = (Projection([torch.zeros_like(t, device="cpu") for t in stack.parts().values()], name) for stack in stacks)

    def multiply(tokens: int) -> None:
        x, ids = torch.zeros(tokens, width, dtype=torch.bfloat16), torch.zeros(tokens, top_k, dtype=torch.int32)
        experts_mlp(x, up, down, ids, torch.empty(tokens, top_k), silu)

    routings = Routing(experts, top_k), Routing(experts, top_k, shared=False, gated=True, ids_early=True)
    problems = [
        GemmProblem(((fmt, n),), 1, k, "bf16", routing, activation)
        for (_, n, k), routing, activation in zip(shapes, routings, (silu, None), strict=True)
    ]
    compile_layer(problems, False, 2048, torch.device("cuda", 0), multiply)
    known = set(variants.keys)
    assert len(known) > 6
    for tokens in [*range(1, 70), 2048, *(draw.randint(70, 2048) for _ in range(40))]:
        multiply(tokens)
        assert variants.keys <= known, (tokens, sorted(name for name, *_ in variants.keys - known))
