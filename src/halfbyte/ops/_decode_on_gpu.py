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
from halfbyte.ops._decode_blocks import part_of_ragged, run_in_blocks, run_ragged
from halfbyte.ops.declare import Op
from halfbyte.ops.launch_cache import Layout, Signature, layout, replay
from halfbyte.ops.self_check import refusal
from halfbyte.ops.small_calls import attention_error
from halfbyte.ops.workspace import floats
from halfbyte.plans.decode_attention import Division, divided, for_many_sequences
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


def run(
    call: DecodeCall,
    *,
    compiled: bool = False,
    signature: Signature | None = None,
    block: bool = False,
    into: torch.Tensor | None = None,
) -> Pair:
    """out [B, Hq, L, Dv] in q's dtype and lse float32 [B, Hq, L], by the level of the call ("auto": by the best that can).

    `compiled`: called from compiled code, behind whose back nothing may be kept. `signature`: what to store this call by.
    `block`: q holds blocks of a prompt's tokens, one sequence each. `into`: memory for out, taken if it is laid out like that.
    """
    q, (out, lse) = call.q, call.new_results()
    out = into if into is not None and _takes(into, layout(out)) else out
    if not len(call.lengths):  # ragged queries that are all padding
        return out.zero_(), lse.fill_(-math.inf)
    with torch.cuda.device_of(q):
        call = _dense(call)
        plan, queries = _checked_division(call)
        if call.cu_seqlens_q is None and plan is not None:
            plan = for_many_sequences(plan) if block and isinstance(plan, DecodePlan) else plan
            launch(call, plan, out, lse, compiled, signature)
        elif call.cu_seqlens_q is None:
            run_in_blocks(call, queries, (out, lse), partial(_run_block, compiled=compiled))
        elif isinstance(plan, TritonTiles):
            _launch_ragged(call, plan, out, lse, compiled)
        elif call.deterministic_batch and call.max_query_len == 1 and q.shape[2] == len(call.lengths):
            decodes = call._replace(q=q[0].transpose(0, 1).unsqueeze(2), cu_seqlens_q=None, max_query_len=0)
            out, lse = run(decodes, compiled=compiled, into=out[0].transpose(0, 1).unsqueeze(2))
            return out.squeeze(2).transpose(0, 1)[None], lse.squeeze(2).t()[None]
        else:
            run_ragged(call, queries, (out, lse), partial(_run_block, compiled=compiled))
    return out, lse


def _run_block(call: DecodeCall, compiled: bool) -> Pair:
    """`run` of blocks, from the launch cache if it has them."""
    signature = None if compiled else DECODE.signature(call, "blocks of decode_attention")
    results: Pair | None = None if signature is None else replay(signature, call.numbers())
    return run(call, compiled=compiled, signature=signature, block=True) if results is None else results


def _takes(out: torch.Tensor, expected: Layout) -> bool:
    """Whether kernels can write their result into `out`, which has its shape and dtype."""
    return layout(out) == expected and out.data_ptr() % 16 == 0


def _launch_ragged(call: DecodeCall, tiles: TritonTiles, out: torch.Tensor, lse: torch.Tensor, own: bool) -> None:
    """Ragged queries by the portable kernel, which assigns them to sequences on the device; as many as the workspace holds."""
    from halfbyte.kernels.decode import portable

    tokens, batch = call.q.shape[2], len(call.lengths)
    most = max(1, MOST_FLOATS // max(1, portable.workspace_floats(call.q.shape[1], call.values.dim, tiles.splits)))
    for first in range(0, tokens, most):
        those = slice(first, first + most)
        piece = call if tokens <= most else part_of_ragged(call, slice(0, batch), those)
        count = portable.workspace_floats(lse[:, :, those].numel(), call.values.dim, tiles.splits)
        portable.launch(piece, tiles, out[:, :, those], lse[:, :, those], floats(call.q.device, count, own))


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
def _division(problem: DecodeProblem, level: str, most: int, device: int, use_pdl: bool) -> Division:
    """How a call is run on GPU `device` (-1: the interpreter)."""
    return divided(problem, level, most, gpu(device), use_pdl)


def _checked_division(call: DecodeCall) -> Division:
    """The same for a call, by the portable kernel where the tuned one was found to be wrong on this GPU."""
    facts = problem_of(call), call.impl, call.max_query_len, _index(call.q), pair_launches()
    division, q = _division(*facts), call.q
    plan = division.plan
    if call.impl != "auto" or not isinstance(plan, DecodePlan):
        return division
    wrong = refusal("decode_attention", plan.spec, q.device, lambda: attention_error(call, plan, partial(launch, own=False)))
    return _division(facts[0], "triton", *facts[2:]) if wrong else division


def _index(q: torch.Tensor) -> int:
    """Of its GPU; -1: the interpreter."""
    return -1 if q.device.type == "cpu" else q.device.index


def launch(
    call: DecodeCall, plan: Plan, out: torch.Tensor, lse: torch.Tensor, own: bool, signature: Signature | None = None
) -> None:
    """Launch as planned on the current stream, and store that under `signature`. `own`: see `workspace.floats`."""
    if isinstance(plan, DecodePlan):
        from halfbyte.kernels.decode.launch import launches

        launch_cache.launch(DECODE, call, plan, launches, (out, lse), signature=signature, own=own)
    else:
        _launch_portable(call, plan, out, lse, own)


def _launch_portable(c: DecodeCall, tiles: TritonTiles, out: torch.Tensor, lse: torch.Tensor, own: bool) -> None:
    from halfbyte.kernels.decode import portable

    start = c.first_query
    c = c._replace(query_start=start)
    most = max(1, MOST_BLOCKS * tiles.block_rows // (c.q.shape[1] // c.keys.heads))
    if c.q.shape[2] <= most:
        workspace = floats(c.q.device, portable.workspace_floats(math.prod(c.q.shape[:3]), c.values.dim, tiles.splits), own)
        portable.launch(c, tiles, out, lse, workspace)
        return
    for first in range(0, c.q.shape[2], most):
        views = [t[:, :, first : first + most] for t in (out, lse)]
        parts = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in views]
        piece = c._replace(q=c.q[:, :, first : first + most], query_start=start + first)
        _launch_portable(piece, tiles, parts[0], parts[1], own)
        for view, part in zip(views, parts, strict=True):
            view.copy_(part)
