"""Attention over disjoint sets of keys, merged by log-sum-exp, in one launch: every part is read once.

    lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) out_i        with a sink: out / (1 + exp(sink - lse))

A program merges some rows, of the B * Hq * L of each part. Where a part saw no key (lse_i = -inf) its row is not even read: it may
hold anything. Sums are in fp32, in the order of the parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from halfbyte.kernels.common.codes import INTERPRETED, rounded

#: Numbers that a program holds of each part.
_TILE = 2048


@triton.jit(do_not_specialize=["heads", "queries", "rows"])
def merge(
    outs,  # of each part: [B, Hq, L, Dv], of any strides but the last, which is 1
    lses,  # [B, Hq, L]
    strides,  # of each out by B, Hq and L
    lse_strides,
    sinks,  # [Hq]
    out,  # [B, Hq, L, Dv], contiguous, as lse fp32 [B, Hq, L]
    lse,
    heads, queries, rows, dim,
    D: tl.constexpr, ROWS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the result."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)[None, :]
    real = row < rows
    head = row // queries % heads
    b, q = row // queries // heads, row % queries
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    parts = ()
    for i in tl.static_range(len(outs)):
        at = b * lse_strides[i][0] + head * lse_strides[i][1] + q * lse_strides[i][2]
        parts += (tl.load(lses[i] + at, mask=real, other=float("-inf")).to(tl.float32),)
        peak = tl.maximum(peak, parts[i])
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.zeros([ROWS], tl.float32)
    for i in tl.static_range(len(outs)):
        total += tl.exp(parts[i] - peak)
    whole = tl.where(total == 0, float("-inf"), peak + tl.log(total))
    scale = 1 / tl.where(total == 0, 1.0, total)
    tl.store(lse + row, whole, mask=real)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
        scale = tl.where(total == 0, 0.0, scale / (1 + tl.exp(sink - whole)))
    merged = tl.zeros([ROWS, D], tl.float32)
    for i in tl.static_range(len(outs)):
        weight = tl.exp(parts[i] - peak) * scale
        at = b * strides[i][0] + head * strides[i][1] + q * strides[i][2]
        seen = (real & (weight != 0))[:, None] & (d < dim)
        merged += tl.load(outs[i] + at[:, None] + d, mask=seen, other=0.0).to(tl.float32) * weight[:, None]
    tl.store(out + row[:, None] * dim + d, rounded(merged, out, INTERPRETED), mask=real[:, None] & (d < dim))


def launch(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """out [B, Hq, L, Dv] and lse fp32 [B, Hq, L], contiguous; parts of the same shapes, their last strides 1. Nothing is empty."""
    (_, heads, queries, dim), rows = out.shape, lse.numel()
    columns = triton.next_power_of_2(dim)
    tile = max(1, _TILE // columns)
    strides = tuple(part.stride()[:3] for part in outs), tuple(part.stride() for part in lses)
    merge[(triton.cdiv(rows, tile),)](
        tuple(outs), tuple(lses), *strides, sinks, out, lse, heads, queries, rows, dim,
        D=columns, ROWS=tile, INTERPRETED=INTERPRETED, num_warps=4,
    )  # fmt: skip
