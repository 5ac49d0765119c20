"""From an append to its launches: grids, and the arguments of the kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from halfbyte.kernels.append.arguments import Paging, RopeTables, Sequences, Sizes, Stored, StoredStrides, Tails, strides4
from halfbyte.kernels.append.tokens import append_blocks, append_tokens, measure_tensors
from halfbyte.kv_buffer import AppendCall, KVBuffer, Rope
from halfbyte.plans.append import append_plan


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


def launches(c: AppendCall, q_out: torch.Tensor | None, amax: torch.Tensor | None, advance: bool, use_pdl: bool) -> list[Launch]:
    """The launches of an append, in order; nothing of it may be empty. The last one's `advances` says whether lengths advance too.

    `counts` and the tables of `rope` are contiguous. `amax`, int32 [2] of zeros: measure the scales of whole tensors that are 0
    (None: they are known). `advance`: the lengths should advance, which takes few tokens. `use_pdl`: programmatic dependent launch.
    q is rotated into q_out, contiguous.
    """
    (batch, heads, tokens, dim), (pool, _, rows, _) = c.k.shape, c.keys.codes.shape
    page, pages = (rows, pool) if c.by_slot else (0, 1) if c.page_table is None else (rows, c.page_table.shape[1])
    formats = c.keys.format.name, c.values.format.name
    window, dims = (c.values.sink_tokens, c.values.recent_tokens), (dim, c.v.shape[3])
    weights, norm = ((None, None), ("", 0.0)) if c.norms is None else (c.norms[:2], (c.norms.kind, c.norms.eps))
    cos, sin, interleaved = (None, None, False) if c.rope is None else Rope(*c.rope)
    rotary = 0 if cos is None else 2 * cos.shape[-1], interleaved
    plan = append_plan(formats, heads, tokens, dims, page, window, c.rotate_keys, rotary, advance, use_pdl, norm)
    sequences, rope = Sequences(c.counts, c.lengths), RopeTables(cos, sin, *weights)
    sizes = Sizes(tokens, heads, plan.tiles if plan.tiles > 1 else None, rows * pages, c.lengths.stride(0))
    paging = Paging(pool, *(0, 0) if c.page_table is None else c.page_table.stride())
    rope_stride = cos.stride(0) if cos is not None and cos.ndim == 3 else 0
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
    tails = [None if c.values.tail is None else b.tail for b in (c.keys, c.values)]
    arguments = (c.k, c.v, c.q, q_out, sequences, c.page_table, rope, keys, values, Tails(*tails), amax)
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
    found.append(Launch(append_tokens, programs, arguments, {**options, "num_warps": plan.warps, "maxnreg": 128}))
    return found


def _stored(buffer: KVBuffer) -> tuple[Stored, StoredStrides]:
    tensors = buffer.codes, buffer.scales, buffer.offsets
    return Stored(*tensors, buffer.saturated), StoredStrides(*(s for t in tensors for s in strides4(t)))
