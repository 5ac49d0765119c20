"""The GPU levels of `decode_attention`: from a call to a plan, to a workspace, to a launch. Nothing here waits for the device.

In decoding the same call comes once a layer and token, with other addresses only. So what the first such call found out (the plan,
the compiled kernel, all sizes and strides) is stored in the launch cache; later ones only fill in addresses and do not pass here.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch

from halfbyte.device import gpu
from halfbyte.errors import Unsupported
from halfbyte.kv_buffer import DecodeCall
from halfbyte.ops import launch_cache
from halfbyte.ops._decode_blocks import blocks_of, blocks_of_ragged, from_blocks, most_sequences, put
from halfbyte.ops.declare import Op
from halfbyte.ops.launch_cache import Layout, Signature, layout, replay
from halfbyte.ops.workspace import floats
from halfbyte.plans.decode_attention import (
    DecodePlan,
    for_many_sequences,
    gluon_plan,
    queries_of_a_block,
    ragged_blocks,
)
from halfbyte.plans.decode_portable import TritonTiles, portable_plan
from halfbyte.plans.decode_problem import DTYPES, DecodeProblem, problem_of
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
    with torch.cuda.device_of(q):
        call = _dense(call)
        if call.cu_seqlens_q is not None:
            one_each = call.deterministic_batch and call.max_query_len == 1 and q.shape[2] == len(call.lengths)
            if one_each and _queries_of_a_ragged_block(call):
                decodes = call._replace(q=q[0].transpose(0, 1).unsqueeze(2), cu_seqlens_q=None, max_query_len=0)
                out, lse = run(decodes, compiled=compiled, into=out[0].transpose(0, 1).unsqueeze(2))
                return out.squeeze(2).transpose(0, 1)[None], lse.squeeze(2).t()[None]
            _run_ragged(call, out, lse, compiled)
            return out, lse
        problem = problem_of(call)
        if call.impl != "triton" and (queries := _queries_of_a_block(problem, _index(q))):
            for piece, parts in blocks_of(call, queries, (out, lse)):
                for whole, part in zip(parts, _run_block(piece, compiled), strict=True):
                    put(whole, part)
            return out, lse
        plan = _plan(problem, call.impl, _index(q), pair_launches())
        plan = for_many_sequences(plan) if block and isinstance(plan, DecodePlan) else plan
        launch(call, plan, out, lse, compiled, signature)
    return out, lse


def _run_block(call: DecodeCall, compiled: bool) -> Pair:
    """`run` of blocks, from the launch cache if it has them."""
    signature = None if compiled else DECODE.signature(call, "blocks of decode_attention")
    results: Pair | None = None if signature is None else replay(signature, call.numbers())
    return run(call, compiled=compiled, signature=signature, block=True) if results is None else results


def _takes(out: torch.Tensor, wanted: Layout) -> bool:
    """Whether kernels can write their result into `out`, which has its shape and dtype."""
    return layout(out) == wanted and out.data_ptr() % 16 == 0


def _run_ragged(call: DecodeCall, out: torch.Tensor, lse: torch.Tensor, own: bool) -> None:
    """Ragged queries: in blocks by the tuned kernel, or by the portable one, which assigns queries to sequences on the device."""
    if not len(call.lengths):
        out.zero_()
        lse.fill_(-math.inf)
    elif queries := _queries_of_a_ragged_block(call):
        if call.deterministic_batch:
            _run_ragged_pieces(call, queries, out, lse, own)
            return
        blocks, places = blocks_of_ragged(call, queries)
        for whole, part, otherwise in zip((out, lse), _run_block(blocks, own), (0, -math.inf), strict=True):
            whole[0].transpose(0, 1).copy_(from_blocks(part, places, otherwise))
    else:
        _launch_ragged(call, out, lse, own)


def _run_ragged_pieces(call: DecodeCall, queries: int, out: torch.Tensor, lse: torch.Tensor, own: bool) -> None:
    """Blocks of ragged queries, in several launches if needed, so that their number never changes the kernel."""
    bounds, tokens, batch = call.cu_seqlens_q, call.q.shape[2], len(call.lengths)
    assert bounds is not None
    assert call.page_table is not None
    found = out[0].transpose(0, 1), lse[0].transpose(0, 1)
    for whole, otherwise in zip(found, (0, -math.inf), strict=True):
        whole.fill_(otherwise)
    most = most_sequences(call.keys.heads, call.capacity)
    some = max(1, min(batch, most // 2))
    many = max(1, most - some) * queries
    for b, first in itertools.product(range(0, batch, some), range(0, tokens, many)):
        here, those = slice(b, b + some), slice(first, first + many)
        begin, lengths = bounds[b : b + some + 1], call.lengths[here]
        piece = call._replace(
            q=call.q[:, :, those],
            lengths=lengths,
            query_start=lengths - begin.diff() + (first - begin[:-1]).clamp_min(0),
            page_table=call.page_table[here],
            cu_seqlens_q=(begin - first).clamp(0, min(many, tokens - first)),
            options=call.options._replace(starts=_part(call.options.starts, here), ends=_part(call.options.ends, here)),
        )
        blocks, places = blocks_of_ragged(piece, queries)
        for whole, part in zip(found, _run_block(blocks, own), strict=True):
            rows = whole[those]
            rows.copy_(torch.where(places[2].view(-1, *[1] * (rows.ndim - 1)), rows, from_blocks(part, places, 0.0)))


def _part(t: torch.Tensor | None, some: slice) -> torch.Tensor | None:
    return None if t is None else t[some]


def _queries_of_a_ragged_block(call: DecodeCall) -> int:
    """New tokens per block of the tuned kernel; 0: it does not support the call."""
    if call.impl == "triton" or call.page_table is None or call.keys.tail is not None:
        return 0
    return _ragged_block(problem_of(call), call.max_query_len, call.impl, _index(call.q), pair_launches())


@functools.lru_cache(maxsize=1024)
def _ragged_block(problem: DecodeProblem, most: int, level: str, device: int, use_pdl: bool) -> int:
    if device < 0 or problem.dtype not in DTYPES.values():
        return 0
    blocks = ragged_blocks(problem, most, gpu(device).capability)
    return blocks.queries if isinstance(_plan(blocks, level, device, use_pdl), DecodePlan) else 0


def _launch_ragged(call: DecodeCall, out: torch.Tensor, lse: torch.Tensor, own: bool) -> None:
    """Launch the portable kernel, on as many tokens at a time as the workspace takes."""
    from halfbyte.kernels.decode import portable

    bounds, lengths, tokens = call.cu_seqlens_q, call.lengths, call.q.shape[2]
    assert bounds is not None
    tiles = plan_of(call, pair_launches())
    assert isinstance(tiles, TritonTiles)
    most = max(1, MOST_FLOATS // max(1, portable.workspace_floats(call.q.shape[1], call.values.dim, tiles.splits)))
    for first in range(0, tokens, most):
        piece = call
        if tokens > most:
            start = lengths - bounds.diff() + (first - bounds[:-1]).clamp_min(0)
            piece = call._replace(
                q=call.q[:, :, first : first + most],
                query_start=start,
                cu_seqlens_q=(bounds - first).clamp(0, min(most, tokens - first)),
            )
        into = [t[:, :, first : first + most] for t in (out, lse)]
        count = portable.workspace_floats(into[1].numel(), call.values.dim, tiles.splits)
        portable.launch(piece, tiles, into[0], into[1], floats(call.q.device, count, own))


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
def _queries_of_a_block(problem: DecodeProblem, device: int) -> int:
    """New tokens per block, for a call with more than a tuned kernel holds; 0: run the call as it is."""
    if device < 0 or problem.dtype not in DTYPES.values():
        return 0
    return queries_of_a_block(problem, gpu(device).capability)


def plan_of(call: DecodeCall, use_pdl: bool) -> Plan:
    """The plan of a call. Raises `Unsupported` when its level cannot run it."""
    return _plan(problem_of(call), call.impl, _index(call.q), use_pdl)


def _index(q: torch.Tensor) -> int:
    """Of its GPU; -1: the interpreter."""
    return -1 if q.device.type == "cpu" else q.device.index


@functools.lru_cache(maxsize=1024)
def _plan(problem: DecodeProblem, level: str, device: int, use_pdl: bool) -> Plan:
    """The plan of a problem on GPU `device` (-1: the interpreter). Raises `Unsupported` when the requested level cannot run it."""
    if problem.dtype not in DTYPES.values():
        raise Unsupported(f"q is {problem.dtype}; the {level} kernel takes float16 and bfloat16 queries; use impl='auto'")
    _, num_sms, capability = gpu(device)
    if level != "triton":
        tuned = gluon_plan(problem, num_sms, capability, use_pdl)
        if isinstance(tuned, DecodePlan):
            return tuned
        if level == "gluon":
            raise Unsupported(f"impl='gluon' cannot run this call: {tuned}; use impl='auto', which takes the portable kernel here")
    return portable_plan(problem, num_sms, capability if use_pdl else (8, 0))


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
        into = [t[:, :, first : first + most] for t in (out, lse)]
        made = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in into]
        piece = c._replace(q=c.q[:, :, first : first + most], query_start=start + first)
        _launch_portable(piece, tiles, made[0], made[1], own)
        for t, part in zip(into, made, strict=True):
            t.copy_(part)
