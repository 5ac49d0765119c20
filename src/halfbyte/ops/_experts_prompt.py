"""Mixtures of experts: pairs sorted by expert, then a GEMM over codes, or over experts dequantized some rows at a time.

The latter takes x in bf16, of a multiple of 8 columns. Nothing is empty, and nothing waits for the device. Memory: that of the
dequantized rows, and of x and their products for each pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from halfbyte.ops._linear_on_gpu import contiguous, portable_workspace
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_portable import PortableTiles
from halfbyte.plans.gemm_wgmma import PairsSpec
from halfbyte.reference.experts import ExpertsCall

#: How sorted pairs are multiplied: over codes by the tuned or the portable kernel, or over so many rows of each expert, even, that
#: are dequantized at a time.
Way = GemmPlan | PortableTiles | int


class SortedPairs(NamedTuple):
    """The pairs of a token and an expert sorted by expert, those of none last; int32, and never on the host.

    order [S]       which pair stands at each place
    place [S]       where each pair stands
    starts [E + 1]  where each expert's pairs begin
    experts [S]     their experts, E for none
    blocks          the list of their blocks, see `experts_sort`; None without
    """

    order: torch.Tensor
    place: torch.Tensor
    starts: torch.Tensor
    experts: torch.Tensor
    blocks: torch.Tensor | None


#: What is called, in order: launches (`kernels.common.launch.Launch`), or torch code around some.
Steps = list[Any]


def sorting(ids: torch.Tensor, experts: int, block: int = 0) -> tuple[SortedPairs, Steps]:
    """The pairs of `ids` [T, top_k], those of an expert in their order, with the list of blocks of so many, if any; and the
    launches that write them."""
    from halfbyte.kernels.linear import experts_sort

    flat = ids.reshape(-1)
    new = partial(flat.new_empty, dtype=torch.int32)
    blocks = new(1 + len(flat) // block + min(len(flat), experts), 4) if block else None
    pairs = SortedPairs(new(len(flat)), new(len(flat)), new(experts + 1), new(len(flat)), blocks)
    return pairs, experts_sort.launches(flat, *pairs, block)


def run(call: ExpertsCall, way: Way, out: torch.Tensor) -> None:
    """One projection."""
    call = contiguous_call(call)
    pairs, steps = sorting(call.ids, call.weight.shape[0], block(way))
    x, order, gather = _rows(call, way, pairs)
    for step in (*steps, *gather, *_multiply_and_combine(call, way, x, order, pairs, pairs.place, out)):
        step()


def both(up: ExpertsCall, down: ExpertsCall, ways: tuple[Way, Way], out: torch.Tensor) -> Steps:
    """`down` of what `up` gives, whose rows stay sorted in between: ids are sorted once, and rows are moved at both ends only.

    Tensors are contiguous. Of tuned kernels alone each step is a `Launch`.
    """
    pairs, steps = sorting(up.ids, up.weight.shape[0], max(block(way) for way in ways))
    x, order, gather = _rows(up, ways[0], pairs)
    if isinstance(ways[0], int):
        inner = x.new_empty(len(x), down.weight.shape[2])
        first = _multiply_and_combine(up._replace(ids=pairs.experts.unsqueeze(1)), ways[0], x, order, pairs, None, inner)
    else:
        inner, first = _product(up, _onto(ways[0], ways[1]), x, order, pairs)
    return [*steps, *gather, *first, *_multiply_and_combine(down, ways[1], inner, None, pairs, pairs.place, out)]


def block(way: Way) -> int:
    """The pairs of a block of the list that a kernel needs; 0: none."""
    return 0 if isinstance(way, int) else way.spec.block_m if isinstance(way, GemmPlan) else way.block_m


def permuting(way: Way) -> PairsSpec | None:
    """The block of a kernel that takes x with k in the order of its operands."""
    return way.spec if isinstance(way, GemmPlan) and isinstance(way.spec, PairsSpec) else None


def _onto(way: GemmPlan | PortableTiles, last: Way) -> GemmPlan | PortableTiles:
    """With results as the kernel of the next projection takes its x."""
    order = permuting(last)
    if order is None or not isinstance(way, GemmPlan):
        return way
    return replace(way, spec=replace(way.spec, epilogue=replace(way.spec.epilogue, order=order)))


def _rows(call: ExpertsCall, way: Way, pairs: SortedPairs) -> tuple[torch.Tensor, torch.Tensor | None, Steps]:
    """x [rows, K], and in which order the portable kernel reads it; for others x of each pair, sorted by these steps."""
    from halfbyte.kernels.linear.experts_prompt import gather

    x = call.x.reshape(-1, call.x.shape[-1])
    if isinstance(way, PortableTiles):
        return x, pairs.order, []
    if spec := permuting(way):
        from halfbyte.kernels.linear.experts_wgmma import sorted_rows

        out, launch = sorted_rows(x, pairs.order, spec)
    else:
        out = x.new_empty(len(pairs.order), x.shape[1])
        launch = gather(call, pairs.order, out)
    return out, None, [launch]


def _multiply_and_combine(
    call: ExpertsCall,
    way: Way,
    x: torch.Tensor,
    order: torch.Tensor | None,
    pairs: SortedPairs,
    place: torch.Tensor | None,
    out: torch.Tensor,
) -> Steps:
    """out, of x in an order; place: see `combine`."""
    from halfbyte.kernels.linear.experts_prompt import combine

    if isinstance(way, int):
        return [partial(_combine_dequantized, call, way, x, pairs, place, out)]
    y, steps = _product(call, way, x, order, pairs)
    return [*steps, combine(call._replace(bias=None, activation=None), y, place, 0, out)]


def _product(
    call: ExpertsCall, way: GemmPlan | PortableTiles, x: torch.Tensor, order: torch.Tensor | None, pairs: SortedPairs
) -> tuple[torch.Tensor, Steps]:
    """x times the weights of its experts, sorted, with bias and activation; rows of none are left."""
    from halfbyte.kernels.linear import kernel_of, portable
    from halfbyte.kernels.linear.experts_prompt import clear
    from halfbyte.kernels.linear.ring import stack_of

    width = call.weight.shape[1] // (1 if call.activation is None else 2)
    y = x.new_empty(len(pairs.order), width)
    if isinstance(way, PortableTiles):
        partials, semaphores = portable_workspace(way, [call.weight.shape[1]], len(y), x.device)
        routing = pairs.blocks, order, call.activation
        arguments = [x], [call.weight], [call.bias], [y], way, partials, semaphores
        return y, [partial(portable.launch, *arguments, *routing)]
    kernel = kernel_of(way)
    if permuting(way) is None:
        return y, kernel.launches(x, stack_of(call.weight, call.bias, y), way, None, None, blocks=pairs.blocks)
    steps: Steps = []
    if onto := way.spec.epilogue.order:
        y = x.new_empty(len(x), -(-width // onto.chunk) * onto.chunk)
        if (written := -(-width // 64) * 64) < y.shape[1]:
            steps.append(clear(y, written))
    return y, [*steps, *kernel.launches(x, stack_of(call.weight, call.bias, y), way, call.weight.shape[2], pairs.blocks)]


def contiguous_call(call: ExpertsCall) -> ExpertsCall:
    """The call with what kernels read without strides made contiguous."""
    x, w, ids, gates, bias, _ = call[:6]
    gates, bias = (None if t is None else t.contiguous() for t in (gates, bias))
    x = x if x.stride(-1) == 1 else x.contiguous()
    return call._replace(x=x, weight=contiguous(w), ids=ids.contiguous(), gates=gates, bias=bias)


def _combine_dequantized(
    call: ExpertsCall, rows: int, x: torch.Tensor, pairs: SortedPairs, place: torch.Tensor | None, out: torch.Tensor
) -> None:
    """out, over `rows` of each expert at a time."""
    from halfbyte.kernels.linear.experts_prompt import combine

    for first, y in _dequantized_products(call, rows, x, pairs):
        combine(call, y, place, first, out)()


def _dequantized_products(call: ExpertsCall, rows: int, x: torch.Tensor, pairs: SortedPairs) -> Iterator[tuple[int, torch.Tensor]]:
    """x, sorted, times `rows` of each expert at a time: the first of them, and the product [S, some columns]."""
    from halfbyte.kernels.dequantize import launch_experts

    experts, features, width = call.weight.shape
    buffer = x.new_empty(experts * min(rows, features) * width)
    for first in range(0, features, rows):
        count = min(rows, features - first)
        values = buffer[: experts * count * width].view(experts, count, width)
        launch_experts(call.weight, pairs.starts, values, first)
        yield first, torch.nn.functional.grouped_mm(x, values.mT, offs=pairs.starts[1:])
