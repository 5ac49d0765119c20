"""`experts_linear` for prompts: pairs sorted by expert, and experts dequantized for a 16-bit grouped GEMM, some rows at a time."""

from __future__ import annotations

import torch

from halfbyte.reference.experts import ExpertsCall
from halfbyte.tensors import QuantTensor


def run(call: ExpertsCall, rows: int, out: torch.Tensor) -> None:
    """x in bf16, of a multiple of 8 columns; `rows` of each expert at a time, even. Nothing is empty; nothing waits for the device.

    Memory: that of the dequantized rows, and of x and their products for each pair.
    """
    from halfbyte.kernels.dequantize import launch_experts
    from halfbyte.kernels.linear.experts_prompt import combine, gather

    experts, features, width = call.weight.shape
    order, starts = sorted_pairs(call.ids, experts)
    call, weight = _contiguous(call)
    x, place = call.x.new_empty(call.ids.numel(), width), torch.empty_like(order)
    gather(call, order, x, place)
    buffer = x.new_empty(experts * min(rows, features) * width)
    for first in range(0, features, rows):
        count = min(rows, features - first)
        values = buffer[: experts * count * width].view(experts, count, width)
        launch_experts(weight, starts, values, first)
        y = torch.nn.functional.grouped_mm(x, values.mT, offs=starts[1:])
        combine(call, y, place, first, out)


def sorted_pairs(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs sorted by expert, those of none last, and where each expert's begin, [E + 1]; int32, and never on the host."""
    flat, dtype = ids.flatten().long(), torch.int16 if experts < 2**15 else torch.int32  # sorting takes time by the byte
    keys, order = flat.masked_fill((flat < 0) | (flat >= experts), experts).to(dtype).sort(stable=True)
    starts = torch.searchsorted(keys, torch.arange(experts + 1, dtype=dtype, device=keys.device), out_int32=True)
    return order.to(torch.int32), starts


def _contiguous(call: ExpertsCall) -> tuple[ExpertsCall, QuantTensor]:
    """The call and its weight with what kernels read without strides made contiguous."""
    x, w, ids, gates, bias, _ = call
    weight = QuantTensor(w.format, w.shape, **{name: part.contiguous() for name, part in w.parts().items()})
    gates, bias = (None if t is None else t.contiguous() for t in (gates, bias))
    x = x if x.stride(-1) == 1 else x.contiguous()
    return call._replace(x=x, ids=ids.contiguous(), gates=gates, bias=bias), weight
