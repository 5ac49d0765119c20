"""Tokens of pages dequantized into dense 16-bit rows, for an attention kernel that reads nothing else (FlashAttention).

    x = scale code + offset

in fp32, rounded once. A program takes TOKENS rows of one KV head, keys and values: it reads them through the page table, and writes
row cu_seqlens_k[b] + i of [S, H, D] for the i-th of the newest tokens of sequence b. Sequence b begins with block
cu_seqlens_k[b] // TOKENS + b, as ragged queries do (`portable_rows`), so the host need not know which rows are whose.

Rotated keys are rotated back: so a key is rounded once and queries not at all, and the newest tokens, which may come unquantized,
need no rotation.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from halfbyte.kernels.common.codes import INTERPRETED, rounded, unpack
from halfbyte.kernels.common.launch import Launch
from halfbyte.kernels.decode.kv_args import KVArgs, _scales, _spread, kv_args, place_of
from halfbyte.kernels.decode.portable_rows import _rotated, block_of_rows
from halfbyte.kv_buffer import Cache
from halfbyte.plans.compiled_for import CompiledFor
from halfbyte.reference.hadamard import block_size

#: Numbers of keys, and of values, that a program writes.
_TILE = 4096

#: int32 [B] and [B, pages].
_Sequences = namedtuple("_Sequences", "lengths page_table")
#: What `place_of` reads of a call.
_Pages = namedtuple("_Pages", "sequences table0 table1 pages capacity")
#: Dense rows [S, H, D], and the strides of S and H.
_Rows = namedtuple("_Rows", "rows token head")


@dataclass(frozen=True)
class Constants(CompiledFor):
    """What the kernel is compiled for, next to its formats. tokens: of a program. rotate: the size of a Hadamard block, or 0."""

    page: int
    tokens: int
    rotate: int
    rotate_steps: int
    interpreted: bool


@triton.jit
def _numbers(place, row, seen, head, N: tl.constexpr, x: KVArgs):
    """N tokens in fp32, [N, WORDS * PARTS]; 0 where `seen` [N] is false."""
    word = tl.arange(0, x.WORDS)
    pointers = x.codes + head * x.codes1 + (place * x.codes0 + row * x.codes2)[:, None] + word.to(tl.int64)[None, :] * x.codes3
    mask = seen[:, None]
    if x.WORDS * x.PARTS != x.DIM:
        mask = mask & (word * x.PARTS < x.DIM)[None, :]
    codes = unpack(tl.load(pointers, mask=mask, other=0), x.F, x.PARTS)
    if x.F.scaled:
        offset = 0.0
        scale = _scales(x.scales, x.scales0, x.scales1, x.scales2, x.scales3, place, row, seen, head, x, 0)
        if x.offsets is not None:
            offset = _scales(x.offsets, x.offsets0, x.offsets1, x.offsets2, x.offsets3, place, row, seen, head, x, 0)
        offset += scale * x.F.centre
        scale *= x.F.step
        if x.F.spread == "group":
            scale = _spread(scale, N, x)
            offset = _spread(offset, N, x)
        else:
            scale = scale[:, None]
            offset = offset[:, None]
    parts = ()
    for j in tl.static_range(x.PARTS):
        part = codes[j].to(tl.float32)
        if x.F.scaled:
            part = part * scale + offset
        parts += (part,)
    for _ in tl.static_range(3):
        if len(parts) > 1:  # part j of word w is number PARTS * w + j
            pairs = ()
            for j in tl.static_range(len(parts) // 2):
                pairs += (tl.interleave(parts[j], parts[j + len(parts) // 2]),)
            parts = pairs
    return parts[0]


@triton.jit
def _write(x, new: _Rows, out: _Rows, first, token, own, new_row, valid, head, side: KVArgs, C: tl.constexpr):
    """The numbers x [N, width] of one side, or in their place the rows of `new` where `own` [N]; out from row `first` on."""
    d = tl.arange(0, side.WORDS * side.PARTS)
    inside = (d < side.DIM)[None, :]
    if new is not None:
        at = new.rows + head * new.head + new_row[:, None] * new.token + d[None, :]
        x = tl.where(own[:, None], tl.load(at, mask=own[:, None] & inside, other=0).to(tl.float32), x)
    if out.rows.dtype.element_ty == tl.float16 and side.F.scaled:
        # A scale, which is rounded, times the largest code may exceed what fp16 holds; NaN stays.
        x = tl.where(tl.abs(x) > 65504.0, tl.where(x > 0, 65504.0, -65504.0), x)
    at = out.rows + head * out.head + (first + token)[:, None] * out.token + d[None, :]
    tl.store(at, rounded(x, out.rows, C.interpreted), mask=valid[:, None] & inside)


@triton.jit(do_not_specialize=["heads", "count", "rows", "new_tokens", "table0", "pages", "capacity"])
def _unpack(
    keys: KVArgs, values: KVArgs, sequences: _Sequences, cu_seqlens_k, cu_seqlens_q, new_keys, new_values, key_rows, value_rows,
    heads, count, rows, new_tokens, table0, pages, capacity, C: tl.constexpr,
):  # fmt: skip
    """Rows of one KV head. `count` sequences, `rows` rows of scratch, `new_tokens` unquantized tokens."""
    N: tl.constexpr = C.tokens
    head = (tl.program_id(0) % heads).to(tl.int64)
    sequence, begin, size, first = block_of_rows(tl.program_id(0) // heads, cu_seqlens_k, count, rows, 1, N)
    if sequence < count:
        index = first + tl.arange(0, N)
        valid = index < size
        length = tl.minimum(tl.maximum(tl.load(sequences.lengths + sequence), 0), capacity)
        token = length - size + index
        seen = valid & (token >= 0)
        own = seen
        new_row = index.to(tl.int64)
        if new_keys is not None:
            start = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + sequence).to(tl.int64), 0), new_tokens)
            end = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + sequence + 1).to(tl.int64), start), new_tokens)
            new_row = start + (token - length + (end - start))
            own = seen & (new_row >= start)
            seen = seen & (new_row < start)
        call = _Pages(sequences, table0, 1, pages, capacity)
        place, row, _ = place_of(token, seen, sequence, call, C.page)
        x = _numbers(place, row, seen, head, N, keys)
        if C.rotate:
            x = _rotated(x, N, keys.WORDS * keys.PARTS, C.rotate, C.rotate_steps)
        _write(x, new_keys, key_rows, begin, index, own, new_row, valid, head, keys, C)
        y = _numbers(place, row, seen, head, N, values)
        _write(y, new_values, value_rows, begin, index, own, new_row, valid, head, values, C)


def launches(
    cache: Cache,
    cu_seqlens_k: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> list[Launch]:
    """Of the newest tokens of each sequence, cu_seqlens_k[b + 1] - cu_seqlens_k[b] of them, as rows of keys and values.

    keys [S, H, D], values [S, H, Dv]: fp16 or bf16, dims contiguous. cu_seqlens_k int32 [B + 1], B >= 1, contiguous.
    new: k [T, H, D] and v, dims contiguous, and cu_seqlens_q int32 [B + 1]: tokens in place of each sequence's newest ones.
    The cache has pages and no tails; its table has contiguous rows.
    """
    table, (rows, heads, dim) = cache.page_table, keys.shape
    assert table is not None
    count, page = len(cache.lengths), cache.keys.codes.shape[2]
    rotate = block_size(dim) if cache.rotate_keys else 0
    width = max(16, triton.next_power_of_2(max(dim, values.shape[2])))
    constants = Constants(page, max(16, _TILE // width), rotate, rotate.bit_length() - 1, INTERPRETED)
    own = (None, None, None, 0) if new is None else (new[2], _rows(new[0]), _rows(new[1]), len(new[0]))
    pages = min(cache.keys.codes.shape[0], cache.values.codes.shape[0])
    capacity = page * table.shape[1] * (pages > 0)
    arguments = (
        *(kv_args(cache.keys, keys.dtype), kv_args(cache.values, values.dtype), _Sequences(cache.lengths, table), cu_seqlens_k),
        *(*own[:3], _rows(keys), _rows(values), heads, count, rows, own[3], table.stride(0), pages, capacity, constants),
    )
    return [Launch(_unpack, ((rows // constants.tokens + count + 1) * heads,), arguments, {"num_warps": 4})]


def _rows(x: torch.Tensor) -> _Rows:
    return _Rows(x, x.stride(0), x.stride(1))
