"""Every variant of a kernel that a layer can meet, compiled in vLLM's warm-up, in parallel.

Plans are pure functions, and the builder passes few values of `max_query_len` (`halfbyte.plans.prompts.bucket`): so the calls
below, on requests without tokens, reach every variant, whatever an engine of these limits is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from halfbyte.engine import PagedView
from halfbyte.kv_buffer import KVBuffer
from halfbyte.ops.by_plan import rows_of_plans
from halfbyte.ops.compiling import compiling_only, counts
from halfbyte.plans.decode_portable import MANY_ROWS
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.plans.prompts import ROWS, bucket, scratch_tokens
from halfbyte.vllm.prompts import Ragged, merged

#: Work items up to which plans may differ from one number to the next: they compare them with multiprocessors.
_ITEMS = 400

#: Layers that are compiled, by all that decides which kernels they take.
_compiled: set[tuple[Any, ...]] = set()
#: Layers whose kernels are not loaded yet: values of M that take every variant, and a call of the layer with one of them.
_layers: list[tuple[list[int], Callable[[int], object]]] = []


class Limits(NamedTuple):
    """Of an engine: most requests of a step; tokens of a decoding request with its drafts; most tokens of a step, of a request."""

    requests: int
    drafts: int
    tokens: int
    longest: int

    @classmethod
    def of_engine(cls, config: Any) -> Limits:
        """Those of vLLM's configuration."""
        speculation, scheduler = config.speculative_config, config.scheduler_config
        drafts = 0 if speculation is None else speculation.num_speculative_tokens or 0
        if getattr(speculation, "parallel_drafting", False) and not getattr(config, "use_v2_model_runner", False):
            drafts *= 2  # with slots of masks, as vLLM's max_decode_query_len counts
        return cls(scheduler.max_num_seqs, 1 + drafts, scheduler.max_num_batched_tokens, config.model_config.max_model_len)


class Batch(NamedTuple):
    """A call of `attention_varlen`, without its tokens."""

    requests: int
    max_query_len: int
    tokens: int


def batches(limits: Limits, heads: tuple[int, int], unpacked: bool) -> Iterator[Batch]:
    """The calls that an engine can make, one or more for each plan. heads: of queries and KV. unpacked: all long chunks are, and
    none takes a kernel that reads codes."""
    query_heads, few = heads[0] // heads[1], -(-_ITEMS // heads[1])
    for drafts in range(1, limits.drafts + 1):
        yield from (Batch(requests, drafts, requests * drafts) for requests in counts(limits.requests, few))
    longest = min(limits.tokens, -(-ROWS // query_heads)) if unpacked else limits.tokens
    if limits.drafts > 1 and limits.tokens:  # decodes with drafts, not all with as many
        yield from (Batch(blocks, limits.drafts, 1) for blocks in counts(2 * limits.requests, few))
    for most in (1 << n for n in range(3, bucket(longest).bit_length())):
        even = min(limits.requests, limits.tokens // most)
        yield from (Batch(requests, most, requests * most) for requests in counts(even, few))
        for blocks in counts(limits.requests + limits.tokens // 8, few):
            yield Batch(blocks, most, 1)
            yield _of_tiles(blocks, most, limits.tokens, query_heads)


def _of_tiles(blocks: int, most: int, tokens: int, query_heads: int) -> Batch:
    """Chunks of at most so many blocks of the portable kernel's taller tiles, and of more, up to twice as many, of the others."""
    tokens = min(tokens, blocks * MANY_ROWS * most // (query_heads * most + MANY_ROWS))
    return Batch(tokens // most + 1, most, max(tokens, 1))


def warm_up(
    impl: Any,
    limits: Limits,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sides: tuple[KVBuffer, KVBuffer],
    table: Any,
    wait: bool = True,
) -> None:
    """Compile what a layer needs, once for all that are like it. query, key, value, table: of some step; sides: keys and values.

    wait=False: in the background, while vLLM does other things, and without what needs the memory of prompts.
    """
    strides = [t.stride() for side in sides for t in side.tensors() if t is not None]
    like: tuple[Any, ...] = (
        impl.formats,
        impl.options.prefill,
        None if impl.exact_tokens is None else impl.options.exact_tokens,
        query.shape[1:],
        query.stride(),
        query.dtype,
        key.stride(),
        value.stride(),
    )
    like += (impl.sliding_window is None, impl.logits_soft_cap is None, impl.sinks is None, impl.alibi_slopes is None)
    like += (table.shape[1], limits, None if impl.prompts is None else impl.prompts.tokens, *strides)
    if like in _compiled or not query.is_cuda:
        return
    _compiled.add(like)
    with compiling_only(wait):
        _attention(impl, limits, query, key, value, sides, table)
        if impl.prompts is not None and wait:
            _unpack(impl, query, key, value, sides, table)
        if wait:
            _call_layers()


class _LayerKernels:
    """As vLLM's registry of JIT kernels calls it in its warm-up; without halfbyte's attention nothing else loads these kernels."""

    def get_warmup_keys(self) -> list[str]:
        return ["all"] if _layers else []

    def compile_many(self, keys: object) -> None:
        with compiling_only():
            _call_layers()


#: For vLLM's registry.
KERNELS = _LayerKernels()


def _call_layers() -> None:
    while _layers:
        numbers, multiply = _layers.pop()
        for rows in numbers:
            multiply(rows)


def compile_layer(
    problems: Sequence[GemmProblem], biased: bool, most: int, device: torch.device, multiply: Callable[[int], object]
) -> None:
    """Compile in the background what a linear layer or a mixture needs, once for all that are like it; vLLM's warm-up loads it.

    problems: weights, K and the type of x, one for each GEMM; most: the largest M; multiply: calls the layer with an M.
    """
    key = (*problems, biased)
    if device.type != "cuda" or key in _compiled:
        return
    _compiled.add(key)
    each = {rows for problem in problems for rows in rows_of_plans(problem, most, device)}
    numbers = sorted(each, reverse=True)  # vLLM's first step is the largest
    with compiling_only(wait=False):
        for rows in numbers:
            multiply(rows)
    _layers.append((numbers, multiply))


def _attention(
    impl: Any,
    limits: Limits,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sides: tuple[KVBuffer, KVBuffer],
    table: Any,
) -> None:
    largest = max(limits.tokens, limits.requests * limits.drafts)
    q, k, v = (
        torch.empty_strided((largest, *x.shape[1:]), x.stride(), dtype=x.dtype, device=x.device) for x in (query, key, value)
    )
    zeros = torch.zeros(limits.requests + limits.tokens + 1, dtype=torch.int32, device=query.device)
    row = torch.zeros(1, table.shape[1], dtype=torch.int32, device=query.device)
    out = torch.empty(largest, impl.num_heads, sides[1].dim, dtype=query.dtype, device=query.device)
    most = scratch_tokens(limits.tokens, limits.longest, sum(impl.options.exact_tokens))
    unpacked = impl.prompts is not None and most <= impl.prompts.tokens
    for batch in batches(limits, (impl.num_heads, impl.num_kv_heads), unpacked):
        pages = row.expand(batch.requests, -1)
        cache = PagedView(*sides, zeros[: batch.requests].clone(), pages, impl.formats.rotate_keys)
        exact = None
        if impl.exact_tokens is not None:
            exact = impl.exact_tokens.of(pages, zeros[: batch.requests].clone(), zeros[: batch.requests].clone())
        some = slice(0, batch.tokens)
        impl.attend_codes(cache, zeros[: batch.requests + 1].clone(), batch.max_query_len, q[some], None, out[some], exact)
        if impl.options.prefill == "exact" and batch.max_query_len > limits.drafts:
            impl.attend_codes(
                cache, zeros[: batch.requests + 1].clone(), batch.max_query_len, q[some], (k[some], v[some]), out[some], exact
            )


def _unpack(
    impl: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sides: tuple[KVBuffer, KVBuffer], table: Any
) -> None:
    zeros, pages = torch.zeros(2, dtype=torch.int32, device=key.device), table[:1].clone()
    part = Ragged(slice(0), zeros, 16, zeros[:1], pages, host=((16, 16),))
    exact = None if impl.exact_tokens is None else impl.exact_tokens.of(pages, zeros[:1], zeros[:1])
    impl.prompts.compile(part, PagedView(*sides, zeros[:1], pages, impl.formats.rotate_keys), (key, value), exact)
    if exact is not None:
        out, sums = query.new_empty(16, *query.shape[1:]), query.new_empty(impl.num_heads, 16, dtype=torch.float32)
        merged([(out, sums)] * 2, impl.sinks)
