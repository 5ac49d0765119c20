"""What the append kernels take: structs of pointers, of sizes and of strides."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

Pointer = torch.Tensor | None
#: By batch (or page), head, token and dimension.
Strides4 = tuple[int, ...]


class Sequences(NamedTuple):
    """What is known of each sequence, [B]. arrived: int32 counters, 0 between launches, where programs share sequences."""

    counts: Pointer
    lengths: torch.Tensor
    arrived: Pointer = None


class RopeTables(NamedTuple):
    """Contiguous fp32 tables [L, D/2] or [B, L, D/2], the weights [D] of norms before, and a `KeyTransform` behind."""

    cos: Pointer
    sin: Pointer
    q_weight: Pointer
    k_weight: Pointer
    q_matrix: Pointer = None
    k_matrix: Pointer = None
    shift: Pointer = None


class Stored(NamedTuple):
    """The tensors of a `KVBuffer` but its tail."""

    codes: torch.Tensor
    scales: Pointer
    offsets: Pointer
    saturated: Pointer


class Tails(NamedTuple):
    """Of keys and of values, where sink or recent tokens stay in 16 bits: the tails, or their strides.

    Not named `keys` and `values`: a tuple of Triton has a `values` of its own.
    """

    k: Any
    v: Any


class Sizes(NamedTuple):
    """Integers that kernels are not specialised on. Triton allows that for an argument of its own, not in a tuple: spread them.

    tokens, heads      of k and v
    tiles              programs of a sequence (of one of its heads, where blocks of tokens are quantized); None: one
    capacity           tokens that a sequence can hold
    """

    tokens: int
    heads: int
    tiles: int | None
    capacity: int
    lengths_stride: int


class Paging(NamedTuple):
    """The same of pages: how many the pool has, and the strides of the page table."""

    pages: int
    table_stride_b: int
    table_stride_p: int


class StoredStrides(NamedTuple):
    """Of the tensors of a `KVBuffer`, by batch (or page), head, token and dimension (or group)."""

    codes_b: int
    codes_h: int
    codes_t: int
    codes_d: int
    scales_b: int
    scales_h: int
    scales_t: int
    scales_d: int
    offsets_b: int
    offsets_h: int
    offsets_t: int
    offsets_d: int


def strides4(t: Any) -> Strides4:
    """Four strides of a tensor of a buffer. Per-token scales [B, T] have none for heads; what is not there has zeros."""
    if t is None or t.ndim == 1:
        return 0, 0, 0, 0
    if t.ndim == 2:
        return t.stride(0), 0, t.stride(1), 0
    return (*t.stride(), 0)[:4]
