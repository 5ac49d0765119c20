"""From an append to its launches: grids, and the arguments of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from halfbyte.kernels.append.arguments import Paging, RopeTables, Sequences, Sizes, Stored, StoredStrides, Tails, strides4
from halfbyte.kernels.append.tokens import append_blocks, append_tokens, measure_tensors
from halfbyte.kernels.common.launch import Launch
from halfbyte.kv_buffer import AppendCall, KVBuffer
from halfbyte.plans.append import AppendPlan, append_plan


def plan_of(c: AppendCall, advance: bool, use_pdl: bool) -> AppendPlan:
    """The plan of an append. advance: lengths should advance, which takes few tokens. use_pdl: programmatic dependent launch."""
    _, heads, tokens, dim = c.k.shape
    rows = c.keys.codes.shape[2]
    page = rows if c.by_slot or c.page_table is not None else 0
    formats = c.keys.format.name, c.values.format.name
    window = c.values.sink_tokens, c.values.recent_tokens
    norm = ("", 0.0) if c.norms is None else (c.norms.kind, c.norms.eps)
    rotary = (0, False) if c.rope is None else (2 * c.rope.cos.shape[-1], c.rope.interleaved)
    facts = (formats, heads, tokens, (dim, c.v.shape[3]), page, window, c.rotate_keys, rotary, advance, use_pdl, norm)
    return append_plan(*facts, len(c.k) * tokens if c.transform else 0)


def launches(c: AppendCall, plan: AppendPlan, results: Sequence[torch.Tensor], workspace: Sequence[torch.Tensor]) -> list[Launch]:
    """The launches of an append, in order; nothing of it may be empty.

    `counts` and the tables of `rope` are contiguous. `c.measure`: scales of whole tensors that are 0 are measured first. results:
    memory for what q becomes, contiguous, if there is a q. workspace: counters, where the plan has some.
    """
    (batch, heads, tokens, _), (pool, _, rows, _) = c.k.shape, c.keys.codes.shape
    pages = pool if c.by_slot else 1 if c.page_table is None else c.page_table.shape[1]
    weights = (None, None) if c.norms is None else c.norms[:2]
    cos, sin = (None, None) if c.rope is None else c.rope[:2]
    k_matrix, q_matrix, shift = c.transform or (None, None, None)
    sequences, rope = Sequences(c.counts, c.lengths, *workspace[1:]), RopeTables(cos, sin, *weights, q_matrix, k_matrix, shift)
    tiles = plan.tiles if plan.tiles > 1 or plan.spec.by_head else None
    sizes = Sizes(tokens, heads, tiles, rows * pages, c.lengths.stride(0))
    paging = Paging(pool, *(0, 0) if c.page_table is None else c.page_table.stride())
    rope_stride = cos.stride(0) if cos is not None and cos.ndim == 3 else 0
    k_strides, v_strides = c.k.stride(), c.v.stride()
    (keys, keys_strides), (values, values_strides) = _stored(c.keys), _stored(c.values)
    options = {"enable_fp_fusion": False, "enable_reflect_ftz": False, **({"launch_pdl": True} if plan.spec.use_pdl else {})}
    some, amax = [], None
    if c.measure and "tensor" in (c.keys.format.granularity, c.values.format.granularity):
        amax = torch.zeros(2, dtype=torch.int32, device=c.k.device)
        arguments: tuple[Any, ...] = (c.k, c.v, sequences, rope, keys.scales, values.scales, amax)
        arguments += (*sizes, rope_stride, k_strides, v_strides, plan.spec)
        some.append(Launch(measure_tensors, (batch * plan.tiles,), arguments, {**options, "num_warps": plan.warps}))
    if plan.blocks:
        arguments = (c.k, sequences, c.page_table, rope, keys, c.keys.tail)
        arguments += (
            *sizes._replace(tiles=plan.blocks),
            *paging,
            rope_stride,
            k_strides,
            keys_strides,
            strides4(c.keys.tail),
            plan.spec,
        )
        grid = (batch * heads * plan.blocks,)
        some.append(Launch(append_blocks, grid, arguments, {**options, "num_warps": plan.block_warps}))
    query_heads = 0 if c.q is None else c.q.shape[1]
    if plan.spec.by_head:
        programs = heads * (plan.tiles - (-batch * tokens * (query_heads // heads) // plan.spec.query_rows))
    else:
        programs = batch * plan.tiles - (-batch * tokens * query_heads // (plan.spec.tokens * plan.spec.heads))
    tails = [None if c.values.tail is None else b.tail for b in (c.keys, c.values)]
    arguments = (c.k, c.v, c.q, results[0] if results else None, sequences, c.page_table, rope, keys, values, Tails(*tails), amax)
    arguments += (
        *sizes,
        *paging,
        batch,
        query_heads,
        rope_stride,
        k_strides,
        v_strides,
        strides4(c.q),
        keys_strides,
        values_strides,
        Tails(*(None if t is None else strides4(t) for t in tails)),
        plan.spec,
    )
    registers = {} if plan.spec.by_head else {"maxnreg": 128}
    some.append(Launch(append_tokens, (programs,), arguments, {**options, **registers, "num_warps": plan.warps}))
    return some


def _stored(buffer: KVBuffer) -> tuple[Stored, StoredStrides]:
    tensors = buffer.codes, buffer.scales, buffer.offsets
    return Stored(*tensors, buffer.saturated), StoredStrides(*(s for t in tensors for s in strides4(t)))
