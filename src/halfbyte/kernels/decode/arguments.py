"""What both tuned kernels of decode attention take: one call, of structs of tensors and strides and of numbers.

Triton specialises a kernel on integers in structs that are 1 or divisible by 16, as addresses are made of them. Other integers are
arguments of their own (`UNSPECIALIZED`), because a kernel for each value would be compiled for nothing; device code makes a `Call`
of them all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from halfbyte.kv_buffer import AttentionOptions, DecodeCall, KVBuffer
from halfbyte.plans.decode_attention import WIDEST
from halfbyte.plans.decode_spec import DecodeSpec

#: Arguments that no vector of addresses is made of, and those whose alignment does not matter.
UNSPECIALIZED = ["window", "batch", "heads", "pages", "capacity", "k_scale_token", "v_scale_token", "page_table_stride"]
UNALIGNED = ["repeats"]


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
    """int32 [B] each, and the page table, int32 [B, pages of a sequence]."""

    lengths: Any
    query_start: Any
    page_table: Any
    starts: Any
    ends: Any


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
    """A launch's arguments as device code passes them on. repeats: sequences of q for each of keys and values, pages separately."""

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
    repeats: Any
    k_scale_token: Any
    v_scale_token: Any
    page_table_stride: Any


class Fixed(NamedTuple):
    """What stays the same as long as shapes and strides of all tensors do: numbers.

    q, keys, values  stand behind the tensors of a struct
    scalars          arguments of their own, the last of them the kernel's constant
    """

    q: tuple[int, ...]
    keys: tuple[int, ...]
    values: tuple[int, ...]
    scalars: tuple[Any, ...]


def fixed_of(call: DecodeCall, spec: DecodeSpec) -> Fixed:
    """q may hold several sequences for each of keys and values, one after the other: of contiguous ones, and of tails."""
    q, keys, values, table = call.q, call.keys, call.values, call.page_table
    k, v = keys.codes.view(torch.int16), values.codes.view(torch.int16)
    (*k_scale, k_scale_token), (*v_scale, v_scale_token) = _scale_strides(keys), _scale_strides(values)
    shared = k if table is None else keys.tail
    repeats = 1 if shared is None else q.shape[0] // max(1, shared.shape[0])
    return Fixed(
        q.stride()[:3],
        (k.stride(0), k.stride(1), k.stride(2) // 8, *k_scale),
        (v.stride(0), v.stride(1), v.stride(2) // 8, *v_scale),
        (
            *(q.shape[0], keys.heads, k.shape[0], call.capacity, repeats, k_scale_token, v_scale_token),
            *(0 if table is None else table.stride(0), spec),
        ),
    )


def _scale_strides(buffer: KVBuffer) -> tuple[int, int, int]:
    """Strides of scales by batch (or page), head and token; scales of whole tokens have no heads."""
    s = buffer.scales
    if s is None or s.ndim == 1:
        return 0, 0, 0
    return (s.stride(0), 0, s.stride(1)) if s.ndim == 2 else (s.stride(0), s.stride(1), s.stride(2))


def arguments(tensors: tuple[Any, ...], results: tuple[Any, ...], o: AttentionOptions, fixed: Fixed) -> tuple[Any, ...]:
    """All arguments of a kernel, as plain tuples: of tensors, or of their addresses, ordered as `DecodeCall.tensors`."""
    return (
        tensors[:1] + fixed.q,
        tensors[1:5] + fixed.keys,
        tensors[5:9] + fixed.values,
        tensors[9:14],
        tensors[14:],
        results,
        o.sm_scale,
        o.softcap or 1.0,
        min(o.window or 0, WIDEST),
        *fixed.scalars,
    )


def structs(q: Any, keys: Any, values: Any, sequences: Any, per_head: Any, results: Any, *scalars: Any) -> tuple[Any, ...]:
    """`arguments` with names, by which the compiler finds them."""
    keys, values = (KV(codes.view(torch.int16), *rest) for codes, *rest in (keys, values))
    return Queries(*q), keys, values, Sequences(*sequences), PerHead(*per_head), Results(*results), *scalars
