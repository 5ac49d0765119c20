"""What both tuned kernels of decode attention take: one call, of structs of tensors and strides and of numbers.

Triton specialises a kernel on integers in structs that are 1 or divisible by 16, as addresses are made of them. Other integers are
arguments of their own (`UNSPECIALIZED`), because a kernel for each value would be compiled for nothing; device code makes a `Call`
of them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from halfbyte.kv_buffer import DecodeCall, KVBuffer
from halfbyte.plans.decode_spec import DecodeSpec

#: Arguments that no vector of addresses is made of.
UNSPECIALIZED = ["window", "batch", "heads", "pages", "capacity", "k_scale_token", "v_scale_token", "page_table_stride"]


class Queries(NamedTuple):
    """[B, Hq, L, D] and its strides; dims are contiguous."""

    rows: Any
    batch: Any
    head: Any
    token: Any


class KV(NamedTuple):
    """Keys or values: codes as 16-bit words [B or pages, H, T, words]; the token's stride is in eights of words.

    scales, offsets  fp16 [B or pages, (H,) T, (groups)], or [1]; of the same strides
    tail             tokens in 16 bits, [B, H, rows, D], contiguous, if there are any (`KVBuffer`)
    """

    codes: Any
    scales: Any
    offsets: Any
    tail: Any
    batch: Any
    head: Any
    token8: Any
    scale_batch: Any
    scale_head: Any


class Sequences(NamedTuple):
    """int32 [B] each, and the page table, int32 [B, pages of a sequence].

    blocks  records (`kernels/decode/blocks.py`), where sequences are blocks of queries: vectors are theirs, the page table is not
    """

    lengths: Any
    query_start: Any
    page_table: Any
    starts: Any
    ends: Any
    blocks: Any = None


class PerHead(NamedTuple):
    """fp32 [Hq] each."""

    alibi_slopes: Any
    sinks: Any


class Results(NamedTuple):
    """What a launch writes.

    out, lse    [B, Hq, L, Dv] and fp32 [B, Hq, L], contiguous
    partial     fp32: two partial results a program
    semaphores  int32, one a work item and two for every `reduce_fanin` programs; zero before and after
    """

    out: Any
    lse: Any
    partial: Any
    semaphores: Any


class Call(NamedTuple):
    """A launch's arguments as device code passes them on."""

    q: Queries
    k: KV
    v: KV
    sequences: Sequences
    per_head: PerHead
    results: Results
    sm_scale: Any
    softcap: Any
    window: Any
    batch: Any
    heads: Any
    pages: Any
    capacity: Any
    k_scale_token: Any
    v_scale_token: Any
    page_table_stride: Any


def arguments(
    call: DecodeCall,
    results: Sequence[torch.Tensor],
    workspace: Sequence[torch.Tensor],
    spec: DecodeSpec,
    blocks: torch.Tensor | None = None,
) -> tuple[Any, ...]:
    """All arguments of a kernel, its constant last. blocks: records, if sequences are blocks."""
    q, keys, values, table, o = call.q, call.keys, call.values, call.page_table, call.options
    (k, k_scale_token), (v, v_scale_token) = _stored(keys), _stored(values)
    q_batch = q.stride(0) if call.cu_seqlens_q is None else 0
    return (
        Queries(q, q_batch, *q.stride()[1:3]), k, v,
        Sequences(call.lengths, call.query_start, table, o.starts, o.ends, blocks), PerHead(o.alibi_slopes, o.sinks),
        Results(*results, *workspace), *call.numbers(), len(call.lengths), keys.heads, k.codes.shape[0], call.capacity,
        k_scale_token, v_scale_token, 0 if table is None else table.stride(0), spec,
    )  # fmt: skip


def _stored(buffer: KVBuffer) -> tuple[KV, int]:
    """A buffer as kernels take it, and the stride of scales by token."""
    codes, s = buffer.codes.view(torch.int16), buffer.scales
    batch = head = token = 0
    if s is not None and s.ndim > 1:  # scales of whole tokens have no heads
        batch, head, token = (s.stride(0), 0, s.stride(1)) if s.ndim == 2 else s.stride()[:3]
    strides = codes.stride(0), codes.stride(1), codes.stride(2) // 8, batch, head
    return KV(codes, buffer.scales, buffer.offsets, buffer.tail, *strides), token
