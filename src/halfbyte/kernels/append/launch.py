"""From an append to its launches: tiles, grids, and the arguments of the kernels."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton

from halfbyte.kernels.append.arguments import (
    Head,
    Paging,
    RopeTables,
    Sequences,
    Sizes,
    Spec,
    Stored,
    StoredStrides,
    strides4,
)
from halfbyte.kernels.append.tokens import append_blocks, append_tokens, measure_tensors
from halfbyte.kernels.common.encode import codec
from halfbyte.kv_buffer import AppendCall, KVBuffer

#: Elements of a tile; a thread takes 4 of it, or 8. A warp that has one head of 128 reduces it in one instruction.
TILE = 4096


class Launch(NamedTuple):
    """A kernel, the number of its programs, its arguments, and what the compiler is given with them."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def advances(self) -> bool:
        """Whether it advances lengths, too."""
        return self.kernel is append_tokens and self.arguments[-1].advance

    def __call__(self) -> Any:
        """Launch on the current stream; returns what was compiled."""
        return self.kernel[(self.programs,)](*self.arguments, **self.options)


@dataclass(frozen=True)
class _Plan:
    """What follows from formats and sizes alone.

    tiles, blocks        programs of a sequence; of one of its heads, for blocks (0: keys are not per channel)
    warps, block_warps   of a program
    """

    spec: Spec
    tiles: int
    blocks: int
    warps: int
    block_warps: int


def _warps(elements: int, each: int, most: int) -> int:
    """Warps of a program: each has so many elements, more where there would be too many warps."""
    return max(1, min(most, elements // each))


@functools.cache
def _tiling(heads: int, tokens: int, padded: int) -> tuple[int, int, int, int]:
    """(tokens, heads, passes over the heads, warps) of a program."""
    whole = triton.next_power_of_2(heads)
    some = max(1, min(whole, TILE // padded))
    count = max(1, min(triton.next_power_of_2(tokens), TILE // (some * padded))) if some == whole else 1
    return count, some, -(-heads // some), _warps(count * some * padded, 128, 16)


def _padded(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


@functools.lru_cache(4096)
def _plan(
    formats: tuple[str, str],
    heads: int,
    tokens: int,
    dims: tuple[int, int],
    page: int,
    hadamard: bool,
    rope: bool,
    advance: bool,
    use_pdl: bool,
) -> _Plan:
    """`dims`: of a head of keys, and of values. `page`: its tokens; 0: contiguous memory."""
    (dim, value_dim), (key, value) = dims, map(codec, formats)
    count, some, passes, warps = _tiling(heads, tokens, max(map(_padded, dims)))
    tiles, half, block = -(-tokens // count), dim // 2, dim & -dim
    q = Head(dim, _padded(dim), rope, max(1, min(16, half & -half)))
    k = replace(q, hadamard=block.bit_length() - 1, factor=block**-0.5) if hadamard else q
    v = Head(value_dim, _padded(value_dim))
    spec = Spec(key, value, k, v, q, count, some, passes, page, advance and tiles == 1, use_pdl)
    blocks = -(-(key.block - 1 + tokens) // key.block) if key.block else 0
    return _Plan(spec, tiles, blocks, warps, _warps(key.block * k.padded, 256, 8))


def launches(c: AppendCall, q_out: torch.Tensor | None, amax: torch.Tensor | None, advance: bool, use_pdl: bool) -> list[Launch]:
    """The launches of an append, in order; nothing of it may be empty. The last one's `advances` says whether lengths advance too.

    `counts` and the tables of `rope` are contiguous. `amax`, int32 [2] of zeros: measure the scales of whole tensors that are 0
    (None: they are known). `advance`: the lengths should advance, which takes few tokens. `use_pdl`: programmatic dependent launch.
    q is rotated into q_out, contiguous.
    """
    (batch, heads, tokens, dim), rows = c.k.shape, c.keys.codes.shape[2]
    page, pages = (0, 1) if c.page_table is None else (rows, c.page_table.shape[1])
    formats = c.keys.format.name, c.values.format.name
    plan = _plan(formats, heads, tokens, (dim, c.v.shape[3]), page, c.rotate_keys, c.rope is not None, advance, use_pdl)
    sequences, rope = Sequences(c.counts, c.lengths), RopeTables(*c.rope or (None, None))
    sizes = Sizes(tokens, heads, plan.tiles if plan.tiles > 1 else None, rows * pages, c.lengths.stride(0))
    paging = Paging(c.keys.codes.shape[0], *(0, 0) if c.page_table is None else c.page_table.stride())
    rope_stride = c.rope[0].stride(0) if c.rope is not None and c.rope[0].ndim == 3 else 0
    k_strides, v_strides = c.k.stride(), c.v.stride()
    (keys, keys_strides), (values, values_strides) = _stored(c.keys), _stored(c.values)
    options = {"enable_fp_fusion": False, "enable_reflect_ftz": False, **({"launch_pdl": True} if use_pdl else {})}
    found = []
    if amax is not None:
        arguments: tuple[Any, ...] = (c.k, c.v, sequences, rope, keys.scales, values.scales, amax)
        arguments += (*sizes, rope_stride, k_strides, v_strides, plan.spec)
        found.append(Launch(measure_tensors, batch * plan.tiles, arguments, {**options, "num_warps": plan.warps}))
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
        found.append(Launch(append_blocks, batch * heads * plan.blocks, arguments, {**options, "num_warps": plan.block_warps}))
    query_heads = 0 if c.q is None else c.q.shape[1]
    programs = batch * plan.tiles - (-batch * tokens * query_heads // (plan.spec.tokens * plan.spec.heads))
    arguments = (c.k, c.v, c.q, q_out, sequences, c.page_table, rope, keys, values, amax)
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
        plan.spec,
    )
    found.append(Launch(append_tokens, programs, arguments, {**options, "num_warps": plan.warps, "maxnreg": 128}))
    return found


def _stored(buffer: KVBuffer) -> tuple[Stored, StoredStrides]:
    tensors = buffer.codes, buffer.scales, buffer.offsets
    return Stored(*tensors, buffer.saturated), StoredStrides(*(s for t in tensors for s in strides4(t)))
