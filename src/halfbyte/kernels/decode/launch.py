"""Launching the tuned kernels of decode attention: few query rows mma.py, many wgmma.py, over latents (MLA) latents.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.common.launch import Launch
from halfbyte.kernels.decode.arguments import (
    KV,
    UNSPECIALIZED,
    Call,
    PerHead,
    Queries,
    Results,
    Sequences,
    arguments,
)
from halfbyte.kernels.decode.blocks import blocks_of
from halfbyte.kernels.decode.latents import decode_latents
from halfbyte.kernels.decode.mma import decode_few_rows
from halfbyte.kernels.decode.wgmma import decode_many_rows
from halfbyte.kv_buffer import DecodeCall, KVBuffer
from halfbyte.plans.decode_spec import DecodePlan


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def decode(
    q: Queries, keys: KV, values: KV, sequences: Sequences, per_head: PerHead, results: Results, sm_scale, softcap, window, batch,
    heads, pages, capacity, k_scale_token, v_scale_token, page_table_stride, C: gl.constexpr,
):  # fmt: skip
    """One program's share of the work: work item after work item, from where its share begins to where it ends."""
    call = Call(
        q, keys, values, sequences, per_head, results, sm_scale, softcap, window, batch,
        heads, pages, capacity, k_scale_token, v_scale_token, page_table_stride,
    )  # fmt: skip
    if C.latent:
        decode_latents(call, C)
    elif C.wgmma:
        decode_many_rows(call, C)
    else:
        decode_few_rows(call, C)


def launches(
    call: DecodeCall, plan: DecodePlan, results: Sequence[torch.Tensor], workspace: Sequence[torch.Tensor]
) -> list[Launch]:
    """The launches of a plan. results: out and lse, contiguous; workspace: plan.floats fp32, and plan.counters int32 zeros."""
    spec, blocks = plan.spec, None
    if plan.blocks:
        blocks = blocks_of(call, plan)
        call = blocks.call
    if spec.latent:
        call = _in_blocks(call, call.q.shape[1] * spec.queries // spec.rows)
    # Without maxnreg the assembler spills for the sake of a third program, which shared memory has no room for.
    options = {"num_warps": spec.warps, "launch_pdl": spec.use_pdl, "maxnreg": 255}
    records = None if blocks is None else blocks.records
    attention = Launch(decode, (plan.programs,), arguments(call, results, workspace, spec, records), options)
    return [attention] if blocks is None else [blocks.launch, attention]


def _in_blocks(call: DecodeCall, blocks: int) -> DecodeCall:
    """A call over latents with its KV head as so many, all of them the same memory, each for some of the query heads."""
    return call._replace(keys=_repeated(call.keys, blocks), values=_repeated(call.values, blocks))


def _repeated(side: KVBuffer, heads: int) -> KVBuffer:
    def of(t: torch.Tensor | None) -> torch.Tensor | None:
        return t if t is None or t.ndim < 3 else t.expand(-1, heads, *[-1] * (t.ndim - 2))

    codes = of(side.codes)
    assert codes is not None
    return replace(side, codes=codes, scales=of(side.scales), offsets=of(side.offsets))
