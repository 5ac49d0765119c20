"""Mixtures for prompts: pairs sorted by expert, then a grouped GEMM over codes, or over experts dequantized some rows at a time.

The latter takes x in bf16, of a multiple of 8 columns. Nothing is empty, and nothing waits for the device. Memory: that of the
dequantized rows, and of x and their products for each pair.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from halfbyte.ops._linear_on_gpu import contiguous
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_spec import WgmmaSpec
from halfbyte.reference.experts import ExpertsCall
from halfbyte.tensors import QuantTensor


class SortedPairs(NamedTuple):
    """The pairs of a token and an expert sorted by expert, those of none last; int32, and never on the host.

    order [S]       which pair stands at each place
    starts [E + 1]  where each expert's pairs begin
    experts [S]     their experts, E for none
    """

    order: torch.Tensor
    starts: torch.Tensor
    experts: torch.Tensor


def sorted_pairs(ids: torch.Tensor, experts: int, table: torch.Tensor | None = None, block: int = 1) -> SortedPairs:
    """The pairs of `ids` [T, top_k], those of an expert in their order; table: their blocks, see `experts_sort`."""
    from halfbyte.kernels.linear import experts_sort

    flat, columns = ids.reshape(-1), experts_sort.bins(experts)
    new = functools.partial(flat.new_empty, dtype=torch.int32)
    pairs = SortedPairs(new(len(flat)), new(experts + 1), new(len(flat)))
    experts_sort.launch(flat, new(-(-len(flat) // experts_sort.BLOCK), columns), *pairs, new(columns), table, block)
    return pairs


def run(call: ExpertsCall, rows: int, out: torch.Tensor) -> None:
    """One projection: `rows` of each expert at a time, even."""
    from halfbyte.kernels.linear.experts_prompt import combine

    pairs = sorted_pairs(call.ids, call.weight.shape[0])
    call = _contiguous(call)
    x, place = _gathered(call, pairs)
    for first, y in _products(x, call.weight, pairs, rows):
        combine(call, y, place, first, out)


def run_both(up: ExpertsCall, down: ExpertsCall, rows: tuple[int, int], out: torch.Tensor) -> None:
    """`down` of what `up` gives, whose rows stay sorted in between: ids are sorted once, and rows are moved at both ends only."""
    from halfbyte.kernels.linear.experts_prompt import combine

    pairs = sorted_pairs(up.ids, up.weight.shape[0])
    up, down = _contiguous(up), _contiguous(down)
    x, place = _gathered(up, pairs)
    inner = x.new_empty(len(x), down.weight.shape[2])
    by_expert = up._replace(ids=pairs.experts.unsqueeze(1))
    for first, y in _products(x, up.weight, pairs, rows[0]):
        combine(by_expert, y, None, first, inner)
    for first, y in _products(inner, down.weight, pairs, rows[1]):
        combine(down, y, place, first, out)


def run_wgmma(call: ExpertsCall, plan: GemmPlan, out: torch.Tensor) -> None:
    """One projection by the grouped kernel over codes."""
    x, place, table = _gathered_in_order(call, plan)
    _multiply_and_combine(call, plan, x, place, table, out)


def run_both_wgmma(up: ExpertsCall, down: ExpertsCall, plans: tuple[GemmPlan, GemmPlan], out: torch.Tensor) -> None:
    """As `run_both`, by the grouped kernel over codes."""
    from halfbyte.kernels.linear.experts_wgmma import launch

    first, last = plans
    x, place, table = _gathered_in_order(up, first)
    width, chunk = down.weight.shape[2], last.spec.chunk
    inner = x.new_empty(len(x), -(-width // chunk) * chunk)
    inner[:, -(-width // 64) * 64 :].zero_()
    launch(_contiguous(up), x, table, _in_order_of(first, last), inner)
    _multiply_and_combine(down, last, inner, place, table, out)


def _in_order_of(plan: GemmPlan, last: GemmPlan) -> GemmPlan:
    """The plan whose results are the x of `last`, in its order."""
    assert isinstance(plan.spec, WgmmaSpec)
    assert isinstance(last.spec, WgmmaSpec)
    return replace(plan, spec=replace(plan.spec, epilogue=replace(plan.spec.epilogue, order=last.spec)))


def _gathered_in_order(call: ExpertsCall, plan: GemmPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x of each pair, sorted and in the kernel's order; where each pair went [S]; and the table of blocks."""
    from halfbyte.kernels.linear.experts_wgmma import sorted_rows

    assert isinstance(plan.spec, WgmmaSpec)
    x, ids = call.x.reshape(-1, call.x.shape[-1]), call.ids.contiguous()
    table = ids.new_empty(1 + plan.blocks, 4, dtype=torch.int32)
    order = sorted_pairs(ids, call.weight.shape[0], table, plan.spec.block_m).order
    place = torch.empty_like(order)
    return sorted_rows(x if x.stride(-1) == 1 else x.contiguous(), order, place, plan.spec), place, table


def _multiply_and_combine(
    call: ExpertsCall, plan: GemmPlan, x: torch.Tensor, place: torch.Tensor, table: torch.Tensor, out: torch.Tensor
) -> None:
    """out, of sorted rows in the kernel's order."""
    from halfbyte.kernels.linear.experts_prompt import combine
    from halfbyte.kernels.linear.experts_wgmma import launch

    call = _contiguous(call)
    y = x.new_empty(len(place), call.weight.shape[1] // plan.spec.epilogue.halves)
    launch(call, x, table, plan, y)
    combine(call._replace(bias=None, activation=None), y, place, 0, out)


def _contiguous(call: ExpertsCall) -> ExpertsCall:
    """The call with what kernels read without strides made contiguous."""
    x, w, ids, gates, bias, _ = call[:6]
    gates, bias = (None if t is None else t.contiguous() for t in (gates, bias))
    x = x if x.stride(-1) == 1 else x.contiguous()
    return call._replace(x=x, weight=contiguous(w), ids=ids.contiguous(), gates=gates, bias=bias)


def _gathered(call: ExpertsCall, pairs: SortedPairs) -> tuple[torch.Tensor, torch.Tensor]:
    """x of each pair [S, K], sorted, and where each pair went [S]."""
    from halfbyte.kernels.linear.experts_prompt import gather

    x, place = call.x.new_empty(call.ids.numel(), call.x.shape[-1]), torch.empty_like(pairs.order)
    gather(call, pairs.order, x, place)
    return x, place


def _products(x: torch.Tensor, weight: QuantTensor, pairs: SortedPairs, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
    """x, sorted, times `rows` of each expert at a time: the first of them, and the product [S, some columns]."""
    from halfbyte.kernels.dequantize import launch_experts

    experts, features, width = weight.shape
    buffer = x.new_empty(experts * min(rows, features) * width)
    for first in range(0, features, rows):
        count = min(rows, features - first)
        values = buffer[: experts * count * width].view(experts, count, width)
        launch_experts(weight, pairs.starts, values, first)
        yield first, torch.nn.functional.grouped_mm(x, values.mT, offs=pairs.starts[1:])
