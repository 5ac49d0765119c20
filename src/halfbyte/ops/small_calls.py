"""Small calls for a kernel to check itself on, made like a call that it is about to run: as many formats, heads, rows and options.

Numbers are drawn without torch's global generator. Nothing of the call's own memory is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from halfbyte.formats import Format
from halfbyte.kv_buffer import AppendCall, Cache, DecodeCall, KVBuffer, PagedView
from halfbyte.ops.self_check import excess
from halfbyte.plans.decode_spec import DecodePlan
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.plans.small_gemm import small_gemm
from halfbyte.reference import append, attention, experts, linear
from halfbyte.reference.experts import ExpertsCall
from halfbyte.reference.linear import LinearCall
from halfbyte.reference.quantize import quantize
from halfbyte.tensors import QuantTensor

#: Tokens of the longer of two sequences, besides the queries.
_TOKENS = 192
#: How many tokens precede an append, and the share of stored numbers that may differ: kernels compute angles in other orders.
_START, _DIFFERING = 5, 0.01


class _Numbers:
    """Normally distributed numbers, the same on every call."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._generator = device, torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device).to(dtype)

    def weight(self, fmt: Format, *shape: int) -> QuantTensor:
        """[..., N, K], so that products with normal numbers are about 1."""
        return quantize(self.normal(*shape) * shape[-1] ** -0.5, fmt)

    def below(self, limit: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(limit, shape, generator=self._generator, device=self.device).to(dtype)


def settle(device: torch.device) -> None:
    """Wait for what was written: kernels read weights and caches before the kernel that precedes them has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def linear_error(
    call: LinearCall, problem: GemmProblem, plan: GemmPlan, run: Callable[[LinearCall, GemmPlan, Sequence[torch.Tensor]], object]
) -> float:
    """How far `run` of a small GEMM by the kernel of a plan is from the reference (`excess`)."""
    plan, problem = small_gemm(plan, problem)
    numbers = _Numbers(call.x.device)
    weights = [numbers.weight(fmt, n, problem.width) for fmt, n in problem.weights]
    bias = next((b.dtype for b in call.biases if b is not None), None)
    biases = [None if bias is None else numbers.normal(w.shape[0], dtype=bias) for w in weights]
    small = LinearCall(numbers.normal(problem.rows, problem.width, dtype=call.x.dtype), weights, biases)
    outs = small.new_results()
    settle(call.x.device)
    run(small, plan, outs)
    return max(excess(out, linear.linear(small.x, weight, bias)) for out, weight, bias in zip(outs, weights, biases, strict=True))


def experts_error(
    call: ExpertsCall, problem: GemmProblem, plan: GemmPlan, run: Callable[[ExpertsCall, GemmPlan, torch.Tensor], object]
) -> float:
    """The same of a projection of a mixture of experts."""
    plan, problem = small_gemm(plan, problem)
    numbers, ((fmt, features),), routing = _Numbers(call.x.device), problem.weights, problem.routing
    assert routing is not None
    pairs = problem.rows, routing.top_k
    small = ExpertsCall(
        numbers.normal(*(pairs[:1] if routing.shared else pairs), problem.width, dtype=call.x.dtype),
        numbers.weight(fmt, routing.experts, features, problem.width),
        numbers.below(routing.experts, *pairs, dtype=call.ids.dtype),
        None if call.gates is None else numbers.normal(*pairs, dtype=call.gates.dtype),
        None if call.bias is None else numbers.normal(routing.experts, features, dtype=call.bias.dtype),
        call.activation,
    )
    out = small.new_result()
    settle(call.x.device)
    run(small, plan, out)
    return excess(out, experts.experts_linear(small))


def attention_error(
    call: DecodeCall, plan: DecodePlan, run: Callable[[DecodeCall, DecodePlan, torch.Tensor, torch.Tensor], object]
) -> float:
    """The same of attention, of ragged queries if the plan has blocks; two programs share a work item."""
    spec = plan.spec
    small = even = small_attention(call, spec.queries)
    sequences = batch = len(small.lengths)
    if plan.blocks:
        q, sequences = even.q.transpose(1, 2).flatten(0, 1), 2 * batch + 1
        bounds = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * spec.queries
        small = even._replace(q=q.transpose(0, 1)[None], cu_seqlens_q=bounds, max_query_len=spec.queries + 1)
    items = sequences * small.q.shape[1] * spec.queries // spec.rows // spec.heads
    groups = -(-small.capacity // (spec.split * spec.reduce_fanin)) if spec.split else 0
    plan = replace(plan, programs=2 * items, work_items=items, groups=groups, blocks=plan.blocks and sequences, first_block=0)
    results = small.new_results()
    settle(call.q.device)
    run(small, plan, *results)
    if plan.blocks:
        results = tuple(x[0].transpose(0, 1).unflatten(0, (batch, spec.queries)).transpose(1, 2) for x in results)
    return max(excess(one, other) for one, other in zip(results, attention.decode_attention(even), strict=True))


def small_attention(call: DecodeCall, queries: int) -> DecodeCall:
    """A call of up to two sequences with the formats, strides, heads and options of `call`, over a filled cache."""
    numbers, o, q = _Numbers(call.q.device), call.options, call.q
    batch = min(2, len(call.lengths))  # kernels are compiled for as many sequences at most
    keys, values, table, capacity = _memory(call, batch, _TOKENS + queries)
    lengths = torch.tensor([capacity - 5, max(queries, 37)][:batch], dtype=torch.int32, device=q.device)
    k, v = (numbers.normal(batch, side.heads, capacity, side.dim, dtype=q.dtype) for side in (keys, values))
    append.append_(k, v, lengths, keys, values, torch.zeros_like(lengths), table, o.rotate_keys)
    options = o._replace(
        sm_scale=q.shape[3] ** -0.5,
        alibi_slopes=None if o.alibi_slopes is None else torch.exp2(-8 * torch.arange(q.shape[1], device=q.device) / q.shape[1]),
        sinks=None if o.sinks is None else numbers.normal(q.shape[1]),
        starts=None if o.starts is None else torch.full_like(lengths, 3),
        ends=None if o.ends is None else lengths,
    )
    start = None if call.query_start is None else lengths - queries
    new = numbers.normal(batch, q.shape[1], queries, q.shape[3], dtype=q.dtype)
    small = call._replace(q=new, keys=keys, values=values, lengths=lengths, query_start=start, page_table=table, options=options)
    return small._replace(cu_seqlens_q=None, max_query_len=0)


def append_error(call: AppendCall, run: Callable[[AppendCall], object], reference: Callable[[AppendCall], object]) -> float:
    """The same of an append: the share of stored numbers that differ, over what is allowed, and `excess` of rotated queries."""
    small = small_append(call)
    expected = small._replace(impl="reference", keys=_copy(small.keys), values=_copy(small.values), lengths=small.lengths.clone())
    small, expected = (c._replace(rotated_q=next(iter(c.new_results()), None)) for c in (small, expected))
    settle(call.k.device)
    run(small)
    reference(expected)
    error = 0.0 if small.rotated_q is None or expected.rotated_q is None else excess(small.rotated_q, expected.rotated_q)
    table, lengths = small.page_table, _START + (small.k.shape[2] if small.counts is None else small.counts)
    if small.by_slot:
        table = torch.arange(len(small.keys.codes), device=call.k.device, dtype=torch.int32).unsqueeze(0)
        lengths = table.numel() * small.keys.codes.shape[2]
    ends = torch.zeros(1 if small.by_slot else len(small.k), dtype=torch.int32, device=call.k.device) + lengths
    for one, other in ((small.keys, expected.keys), (small.values, expected.values)):
        differ = attention.read(one, ends, table) != attention.read(other, ends, table)
        error = max(error, float(differ.double().mean()) / _DIFFERING)
    return error


def small_append(call: AppendCall) -> AppendCall:
    """An append to up to two sequences with the formats, strides, heads and options of `call`; `lengths` is not written."""
    numbers, (batch, _, tokens, _) = _Numbers(call.k.device), call.k.shape
    batch, tokens = min(2, batch), min(tokens, 128)
    keys, values, table, _ = _memory(call, batch, tokens + _START)
    if not call.measure:
        for side in (keys, values):
            if side.format.granularity == "tensor" and side.scales is not None:
                side.scales.fill_(0.05)
    lengths = torch.full((batch,), _START, dtype=call.lengths.dtype, device=call.k.device)
    if call.by_slot:
        lengths += torch.arange(batch, device=lengths.device)
    counts = None if call.counts is None else torch.full_like(call.counts[:batch], max(1, tokens // 2))
    rope = call.rope
    if rope is not None:
        angles = numbers.normal(*(batch, tokens, rope.cos.shape[-1])[3 - rope.cos.ndim :])
        rope = rope._replace(cos=angles.cos(), sin=angles.sin())
    norms = call.norms
    if norms is not None:
        q_norm, k_norm = (1 + 0.1 * numbers.normal(len(w)) for w in norms[:2])
        norms = norms._replace(q=q_norm.to(norms.q.dtype), k=k_norm.to(norms.k.dtype))
    k, v = (numbers.normal(batch, t.shape[1], tokens, t.shape[3], dtype=t.dtype) for t in (call.k, call.v))
    q = None if call.q is None else numbers.normal(batch, call.q.shape[1], tokens, call.q.shape[3], dtype=call.q.dtype)
    small = call._replace(k=k, v=v, q=q, keys=keys, values=values, lengths=lengths, counts=counts, page_table=table)
    return small._replace(rope=rope, norms=norms, rotated_q=None)


def unpack_error(call: Any, run: Callable[[Any], object], reference: Callable[[Any], object]) -> float:
    """The same of pages that are dequantized: a full sequence, and some tokens of another; the newest from outside, as in call."""
    cache, dtype, device = call.cache, call.keys.dtype, call.keys.device
    numbers, (keys, values, table, capacity) = _Numbers(device), _memory(cache, 2, _TOKENS)
    lengths = torch.tensor([capacity, 37], dtype=torch.int32, device=device)
    bounds = torch.tensor([0, capacity, capacity + 30], dtype=torch.int32, device=device)
    k, v = (numbers.normal(2, side.heads, capacity, side.dim, dtype=dtype) for side in (keys, values))
    append.append_(k, v, lengths, keys, values, torch.zeros_like(lengths), table, cache.rotate_keys)
    newest = (*(x[0, :, :9].transpose(0, 1) for x in (k, v)), bounds.new_tensor([0, 4, 9])) if call.new else None
    view = PagedView(keys, values, lengths, table, cache.rotate_keys)
    rows = [[x.new_zeros(capacity + 30, x.shape[1], x.shape[3]) for x in (k, v)] for _ in range(2)]
    settle(device)
    for into, unpack in zip(rows, (run, reference), strict=True):
        unpack(type(call)(*into, bounds, view, newest))
    return max(excess(one, other) for one, other in zip(*rows, strict=True))


def _memory(call: DecodeCall | AppendCall | Cache, batch: int, tokens: int) -> tuple[KVBuffer, KVBuffer, torch.Tensor | None, int]:
    """Empty keys and values for so many tokens of each sequence, the page table and the capacity."""
    paged = call.page_table is not None or (isinstance(call, AppendCall) and call.by_slot)
    rows = -(-tokens // 64) * 64
    page = call.keys.codes.shape[2] if paged else rows
    count = -(-rows // page)
    table = None
    if call.page_table is not None:
        table = torch.arange(batch * count, dtype=torch.int32, device=call.keys.codes.device).flip(0).view(batch, count)
    keys, values = (_empty_like(side, batch * count, page, batch) for side in (call.keys, call.values))
    return keys, values, table, count * page


def _copy(side: KVBuffer) -> KVBuffer:
    names = ("codes", "scales", "offsets", "tail", "saturated")
    return replace(side, **{name: t.clone() for name in names if (t := getattr(side, name)) is not None})


def _empty_like(side: KVBuffer, pages: int, rows: int, batch: int) -> KVBuffer:
    """A zeroed buffer of `pages` (or sequences) of so many tokens, whose axes lie in memory as those of `side` do."""
    fmt, shape = side.format, (pages, side.heads, rows, side.dim)
    tail = None if side.tail is None else side.tail.new_zeros(batch, *side.tail.shape[1:])
    scales, offsets = (None if t is None else _zeros(t, fmt.scale_shape(shape)) for t in (side.scales, side.offsets))
    codes = _zeros(side.codes, fmt.codes_shape(shape))
    return replace(
        side,
        codes=codes,
        scales=scales,
        offsets=offsets,
        tail=tail,
        saturated=None if side.saturated is None else torch.zeros_like(side.saturated),
    )


def _zeros(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros whose axes are ordered in memory like those of a tensor."""
    strides = like.stride()
    order = sorted(range(like.ndim), key=lambda axis: (-strides[axis], axis))
    dense = like.new_zeros([shape[axis] for axis in order])
    return dense.permute([order.index(axis) for axis in range(like.ndim)])
