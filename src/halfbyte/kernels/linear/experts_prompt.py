"""What surrounds a grouped GEMM of a mixture of experts for prompts: x sorted by expert, and results back in their places.

    gathered[p, :] = x[row(order[p]), :]
    out[r, :] = sum_i gate[r, i] f(y[place[r, i], :] + bias[e(r, i), :])

`order` has the pairs of a token and an expert sorted by expert, and place says where each is; y is the GEMM's result in that
order, some columns at a time; f is the activation of pairs of columns. Without gates r is a pair, and there is one i. A pair whose
id is no expert gives zeros. Between two projections rows stay sorted: place[r] = r.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from halfbyte.kernels.common.codes import INTERPRETED, rounded
from halfbyte.kernels.common.launch import Launch
from halfbyte.kernels.linear.activated import activated
from halfbyte.plans.compiled_for import CompiledFor
from halfbyte.reference.experts import Activation, ExpertsCall

#: Numbers that a program gathers, and the most columns; rows and columns of y that it combines at a time.
_GATHERED, _COLUMNS, _ROWS, _WIDTH = 4096, 1024, 16, 128


@dataclass(frozen=True)
class CombineSpec(CompiledFor):
    """What the second kernel is compiled for: n columns of y at a time, pairs that are added, the activation (None: none)."""

    n: int
    pairs: int
    activation: Activation | None
    interpreted: bool


@triton.jit(do_not_specialize=["S"])
def _gather(x, stride, order, out, S, width, PAIRS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """x, a row for PAIRS pairs each, in the order of the pairs."""
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    pair = tl.load(order + p, mask=p < S, other=0)
    here = (p < S)[:, None] & (column < width)[None, :]
    rows = tl.load(x + (pair // PAIRS).to(tl.int64)[:, None] * stride + column[None, :], mask=here)
    tl.store(out + p.to(tl.int64)[:, None] * width + column[None, :], rows, mask=here)


@triton.jit(do_not_specialize=["rows", "E", "first", "columns"])
def _combine(y, stride, place, ids, gates, bias, out, rows, E, N, first, columns, ROWS: tl.constexpr, C: tl.constexpr):
    """Columns first .. first + columns of the product, and what becomes of them in out."""
    EACH: tl.constexpr = C.n // 2 if C.activation is not None else C.n
    HALVES: tl.constexpr = C.n // EACH
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * C.n + tl.arange(0, C.n)
    total = tl.full([ROWS, EACH], 0.0, tl.float32)
    for i in tl.range(0, C.pairs):
        pair = r.to(tl.int64) * C.pairs + i
        expert = tl.load(ids + pair, mask=r < rows, other=0).to(tl.int64)
        there = (r < rows) & (expert >= 0) & (expert < E)
        seen = there[:, None] & (column < columns)[None, :]
        row = pair
        if place is not None:
            row = tl.load(place + pair, mask=there, other=0).to(tl.int64)
        z = tl.load(y + row[:, None] * stride + column[None, :], mask=seen, other=0.0).to(tl.float32)
        if bias is not None:
            z += tl.load(bias + expert[:, None] * N + first + column[None, :], mask=seen, other=0.0).to(tl.float32)
        z = activated(z, ROWS, C)
        if gates is not None:
            z *= tl.load(gates + pair, mask=there, other=0.0).to(tl.float32)[:, None]
        total += z
    made = tl.program_id(1) * EACH + tl.arange(0, EACH)
    at = out + r.to(tl.int64)[:, None] * (N // HALVES) + first // HALVES + made[None, :]
    tl.store(at, rounded(total, out, C.interpreted), mask=(r < rows)[:, None] & (made < columns // HALVES)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _clear(y, rows, first, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zeros in y [rows, width] from column `first` on."""
    r, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), first + tl.arange(0, COLUMNS)
    here = (r < rows)[:, None] & (column < width)[None, :]
    tl.store(y + r.to(tl.int64)[:, None] * width + column[None, :], tl.zeros([ROWS, COLUMNS], y.dtype.element_ty), mask=here)


def gather(call: ExpertsCall, order: torch.Tensor, out: torch.Tensor) -> Launch:
    """out [S, K]: x, whose columns are neighbors, in `order` [S]."""
    x, pairs = call.x.reshape(-1, call.x.shape[-1]), call.ids.numel()
    columns = min(_COLUMNS, triton.next_power_of_2(x.shape[1]))
    rows = _GATHERED // columns
    arguments = (x, x.stride(0), order, out, pairs, x.shape[1], pairs // x.shape[0], rows, columns)
    return Launch(_gather, (triton.cdiv(pairs, rows), triton.cdiv(x.shape[1], columns)), arguments, {"num_warps": 4})


def clear(y: torch.Tensor, first: int) -> Launch:
    """Columns from `first` on of y [S, columns], which is contiguous, become zeros."""
    columns = triton.next_power_of_2(y.shape[1] - first)
    rows = _GATHERED // columns
    return Launch(_clear, (triton.cdiv(len(y), rows),), (y, len(y), first, y.shape[1], rows, columns), {"num_warps": 4})


def combine(call: ExpertsCall, y: torch.Tensor, place: torch.Tensor | None, first: int, out: torch.Tensor) -> Launch:
    """y [S, columns]: columns first ... of the product, sorted; their part of out. ids, gates, bias and out are contiguous.

    place: where the pairs of ids went; None: ids are sorted, too.
    """
    _, stack, ids, gates, bias, activation = call[:6]
    rows, experts, features = out.numel() // out.shape[-1], stack.shape[0], out.shape[-1] * (1 if activation is None else 2)
    spec = CombineSpec(_WIDTH, ids.numel() // rows, activation, INTERPRETED)
    arguments = (y, y.stride(0), place, ids, gates, bias, out, rows, experts, features, first, y.shape[1], _ROWS, spec)
    return Launch(_combine, (triton.cdiv(rows, _ROWS), triton.cdiv(y.shape[1], _WIDTH)), arguments, {"num_warps": 4})
