"""Launching the tuned kernels of decode attention, which take the same arguments: few query rows decode/mma.py, many
decode/wgmma.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from halfbyte.kernels.aot.compiling import Configuration, empty, recorded
from halfbyte.kernels.aot.decode_sample import Call, sample
from halfbyte.kernels.decode import mma, wgmma
from halfbyte.kv_buffer import AttentionOptions, KVBuffer
from halfbyte.plans.decode_attention import WIDEST, DecodePlan, Problem, gluon_plan
from halfbyte.plans.decode_spec import DecodeWgmmaSpec, Spec


def sizes(q: torch.Tensor, keys: KVBuffer, values: KVBuffer, page_table: torch.Tensor | None) -> tuple[int, ...]:
    """The numbers of a launch: sizes, and strides of queries, codes and scales. The same as long as the tensors' shapes are.

    q may hold several sequences for each of keys and values, one after the other: of contiguous ones, and of tails.
    """
    k, v = keys.codes.view(torch.int16), values.codes.view(torch.int16)
    return (
        *(q.shape[0], keys.heads, k.shape[0], k.shape[2] * (1 if page_table is None else page_table.shape[1])),
        _repeats(q, k if page_table is None else keys.tail),
        *q.stride()[:3],
        *(k.stride(0), k.stride(1), k.stride(2) // 8, v.stride(0), v.stride(1), v.stride(2) // 8),
        *(*_scale_strides(keys), *_scale_strides(values), 0 if page_table is None else page_table.stride(0)),
    )


def launch(
    q: torch.Tensor,
    keys: KVBuffer,
    values: KVBuffer,
    lengths: torch.Tensor,
    query_start: torch.Tensor | None,
    page_table: torch.Tensor | None,
    options: AttentionOptions,
    spec: Spec,
    programs: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    part: torch.Tensor,
    count: torch.Tensor,
) -> Any:
    """Launch on the current stream, compiling if need be; returns what was compiled.

    part: fp32, count: int32, zero before and after; the plan says how many.
    """
    o, k, v = options, keys.codes.view(torch.int16), values.codes.view(torch.int16)
    kernel = wgmma.decode if isinstance(spec, DecodeWgmmaSpec) else mma.decode
    return kernel[(programs,)](
        *(q, k, keys.scales, keys.offsets, keys.tail, v, values.scales, values.offsets, out, lse, part, count),
        *(lengths, query_start, o.starts, o.ends, page_table, o.alibi_slopes, o.sinks),
        *(o.sm_scale, o.softcap or 1.0, min(o.window or 0, WIDEST), *sizes(q, keys, values, page_table)),
        C=spec,
        num_warps=spec.warps,
        launch_pdl=spec.pair,
        maxnreg=255,  # without it the assembler spills for the sake of a third program, which shared memory has no room for
    )


def _repeats(q: torch.Tensor, shared: torch.Tensor | None) -> int:
    """Sequences of q for each of those that lie in `shared` memory, if any does."""
    return 1 if shared is None else q.shape[0] // max(1, shared.shape[0])


def _scale_strides(plane: KVBuffer) -> tuple[int, int, int]:
    """Strides of scales by batch (or page), head and token; scales of whole tokens have no heads."""
    s = plane.scales
    if s is None or s.ndim == 1:
        return 0, 0, 0
    return (s.stride(0), 0, s.stride(1)) if s.ndim == 2 else (s.stride(0), s.stride(1), s.stride(2))


#: Why a variant may spill on an architecture that its tiles were not chosen for.
_SUMS = "up to 72 bytes, where parts of a unit are added: nothing is spilled in the loop over tiles"
_CHANNELS = "up to 152 bytes, where more than 8 query rows take scales of channels; 8 bytes with 8 rows on sm_80"
_FULL = "up to 72 bytes: heads of 256, many rows, or masks by row, fill the registers; tiles were chosen for sm_90"


def configurations() -> list[Configuration]:
    """The sample's calls, as an A100, an H100 and a B200 would be given them."""
    return [c for call in sample() for c in _configurations(call)]


def _configurations(call: Call) -> Iterator[Configuration]:
    k, v, (batch, query_heads, queries, dim) = call.keys, call.values, call.q.shape
    page = 0 if call.page_table is None else k.codes.shape[2]
    o, group = call.options, query_heads // k.heads
    apart = 1 if k.codes.stride(2) == k.codes.shape[3] else k.heads
    problem = Problem(
        *("bf16", batch, k.heads, group, queries, dim, v.dim, call.capacity, k.format.name, v.format.name, page),
        *(True, o.window is not None, o.alibi_slopes is not None, o.softcap is not None, False),
        *(apart, apart, apart, apart),
    )
    lean = queries == 1 and o.alibi_slopes is None and o.softcap is None
    for capability in ((8, 0), (9, 0), (10, 0)):
        plan = gluon_plan(problem, 132, capability, True)
        if isinstance(plan, DecodePlan):
            spec = plan.spec
            part, count = empty(plan.floats, dtype=torch.float32), empty(plan.counters)
            rest = (spec, plan.programs, call.out, call.lse, part, count)
            full = capability != (9, 0) and (dim > 128 or group >= 16 or not lean)
            target, name = 10 * capability[0], f"{call.name}-{capability[0]}x"
            why = _FULL if full else _SUMS if isinstance(spec, DecodeWgmmaSpec) else ""
            if spec.keys.block and (spec.padded_rows > 8 or capability == (8, 0)):
                why = _CHANNELS
            yield from recorded(name, lambda rest=rest: launch(*call.inputs(None), *rest), targets=(target,), may_spill=why)
