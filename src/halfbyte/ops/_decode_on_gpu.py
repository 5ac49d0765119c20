"""The GPU levels of `decode_attention`: from a call to a plan, to a workspace, to a launch. Nothing here waits for the device.

In decoding the same call comes once a layer and token, with other addresses only. So what the first such call found out (the plan,
the compiled kernel, all sizes and strides) is stored in the launch cache; later ones only fill in addresses and do not pass here.
"""

from __future__ import annotations

import functools
import math
from functools import partial

import torch

from halfbyte.device import gpu
from halfbyte.kv_buffer import DecodeCall
from halfbyte.ops import launch_cache
from halfbyte.ops.declare import Op
from halfbyte.ops.launch_cache import Signature, layout
from halfbyte.ops.self_check import refusal
from halfbyte.ops.small_calls import attention_error
from halfbyte.ops.workspace import floats
from halfbyte.plans.decode_attention import plans_of
from halfbyte.plans.decode_portable import TritonTiles
from halfbyte.plans.decode_problem import DecodeProblem, problem_of
from halfbyte.plans.decode_spec import DecodePlan
from halfbyte.settings import pair_launches

Plan = DecodePlan | TritonTiles
Pair = tuple[torch.Tensor, torch.Tensor]

#: The op; compiled code calls it by `Op.of_parts`.
DECODE = Op("decode_attention", DecodeCall)
#: Blocks of query rows in one launch of the portable kernel: CUDA's limit on the second axis of a grid. 131,072 queries of 16 heads
#: a KV head are one block more.
MOST_BLOCKS = 65_535
#: fp32 numbers of workspace for ragged queries, 256 MiB: splits of fixed size take some of every token for all of the capacity.
MOST_FLOATS = 1 << 26


def run(call: DecodeCall, *, compiled: bool = False, signature: Signature | None = None, into: torch.Tensor | None = None) -> Pair:
    """out [B, Hq, L, Dv] in q's dtype and lse float32 [B, Hq, L], by the level of the call ("auto": by the best that can).

    `compiled`: called from compiled code, behind whose back nothing may be kept. `signature`: what to store this call by.
    `into`: memory for out, taken if it is laid out like that.
    """
    out, lse = call.new_results()
    if into is not None and layout(into) == layout(out) and into.data_ptr() % 16 == 0:
        out = into
    if not len(call.lengths):  # ragged queries that are all padding
        return out.zero_(), lse.fill_(-math.inf)
    with torch.cuda.device_of(call.q):
        call = _dense(call)
        plans = _checked_plans(call)
        for plan in plans:
            launch(call, plan, out, lse, compiled, signature if len(plans) == 1 else None)
    return out, lse


def _dense(call: DecodeCall) -> DecodeCall:
    """The call as kernels read it: contiguous vectors, slopes and sinks in fp32."""
    o, table = call.options, call.page_table
    lengths, query_start, starts, ends = (
        None if t is None else t.contiguous() for t in (call.lengths, call.query_start, o.starts, o.ends)
    )
    slopes, sinks = (None if t is None else t.to(torch.float32).contiguous() for t in (o.alibi_slopes, o.sinks))
    assert lengths is not None
    return call._replace(
        lengths=lengths,
        query_start=query_start,
        cu_seqlens_q=None if call.cu_seqlens_q is None else call.cu_seqlens_q.contiguous(),
        page_table=table if table is None or table.stride(1) == 1 else table.contiguous(),
        options=o._replace(alibi_slopes=slopes, sinks=sinks, starts=starts, ends=ends),
    )


@functools.lru_cache(maxsize=1024)
def _plans(problem: DecodeProblem, level: str, most: int, device: int, use_pdl: bool) -> tuple[Plan, ...]:
    """The launches of a call on GPU `device` (-1: the interpreter)."""
    return plans_of(problem, level, most, gpu(device), use_pdl)


def _checked_plans(call: DecodeCall) -> tuple[Plan, ...]:
    """The same for a call, by the portable kernel where the tuned one was found to be wrong on this GPU."""
    facts = problem_of(call), call.impl, call.max_query_len, _index(call.q), pair_launches()
    plans = _plans(*facts)
    plan = plans[0]
    if call.impl != "auto" or isinstance(plan, TritonTiles):
        return plans
    spec = (plan.spec, "blocks") if plan.blocks else plan.spec
    wrong = refusal("decode_attention", spec, call.q.device, lambda: attention_error(call, plan, partial(launch, own=False)))
    return _plans(facts[0], "triton", *facts[2:]) if wrong else plans


def _index(q: torch.Tensor) -> int:
    """Of its GPU; -1: the interpreter."""
    return -1 if q.device.type == "cpu" else q.device.index


def launch(
    call: DecodeCall, plan: Plan, out: torch.Tensor, lse: torch.Tensor, own: bool, signature: Signature | None = None
) -> None:
    """Launch as planned on the current stream, and store that under `signature`. `own`: see `workspace.floats`."""
    if isinstance(plan, TritonTiles):
        _launch_portable(call, plan, out, lse, own)
        return
    from halfbyte.kernels.decode.launch import launches

    launch_cache.launch(DECODE, call, plan, launches, (out, lse), signature=signature, own=own)


def _launch_portable(call: DecodeCall, tiles: TritonTiles, out: torch.Tensor, lse: torch.Tensor, own: bool) -> None:
    """The portable kernel, over and over with as many queries as the grid, or the workspace of ragged ones, holds."""
    from halfbyte.kernels.decode import portable

    (_, heads, queries, _), ragged = call.q.shape, call.cu_seqlens_q is not None
    room, per_query = MOST_BLOCKS * tiles.block_rows, heads // call.keys.heads
    if ragged:
        room, per_query = MOST_FLOATS, portable.workspace_floats(heads, call.values.dim, tiles.splits)
    most = max(1, room // max(1, per_query))
    call = call if ragged else call._replace(query_start=call.first_query)
    for first in range(0, queries, most):
        piece, results = call, [out, lse]
        if queries > most:
            piece, results = _of_queries(call, slice(first, first + most)), [t[:, :, first : first + most] for t in (out, lse)]
        parts = [t if ragged or t.is_contiguous() else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in results]
        count = portable.workspace_floats(parts[1].numel(), call.values.dim, tiles.splits)
        portable.launch(piece, tiles, parts[0], parts[1], floats(call.q.device, count, own))
        for result, part in zip(results, parts, strict=True):
            if part is not result:
                result.copy_(part)


def _of_queries(call: DecodeCall, some: slice) -> DecodeCall:
    """The call of some of the queries, which of ragged ones may be no sequence's."""
    q, bounds, first = call.q[:, :, some], call.cu_seqlens_q, some.start
    if bounds is None:
        return call._replace(q=q, query_start=call.first_query + first)
    start = call.lengths - bounds.diff() + (first - bounds[:-1]).clamp_min(0)
    return call._replace(q=q, query_start=start, cu_seqlens_q=(bounds - first).clamp(0, q.shape[2]))
