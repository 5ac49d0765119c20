"""Cutting and joining stored weights [N, K], or stacks [E, N, K]: what one rank of a tensor-parallel layer computes with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfbyte.errors import Unsupported
from halfbyte.tensors import QuantTensor

#: The parts whose first axis is that of the out features.
BY_ROW = ("codes", "scales", "offsets")


def rows_of(weight: QuantTensor, ranges: Sequence[tuple[int, int]]) -> QuantTensor:
    """The rows begin .. end of each of `ranges`, one after the other; of a stack, those of every expert."""
    *experts, rows, width = weight.shape
    if list(ranges) == [(0, rows)]:
        return weight
    axis = len(experts)
    by_row = (*BY_ROW, "tensor_scale") if experts else BY_ROW
    cut = weight.parts()
    for name in set(by_row) & set(cut):
        cut[name] = torch.cat([cut[name].narrow(axis, begin, end - begin) for begin, end in ranges], axis)
    return QuantTensor(weight.format, (*experts, cut["codes"].shape[axis], width), **cut)


def columns_of(weight: QuantTensor, begin: int, end: int, name: str) -> QuantTensor:
    """The stored columns begin .. end, without their order. Raises `Unsupported`, naming the weight, where they cut a group."""
    fmt = weight.format
    by_channel = fmt.granularity == "out_channel"
    group = fmt.code.per_byte if by_channel else fmt.group_size(weight.shape[-1])
    if begin % group or end % group:
        raise Unsupported(
            f"{name} ({fmt}) cannot be cut into in features {begin} to {end}: that splits groups of {group}; "
            f"use fewer ranks, or a format with smaller groups"
        )
    per_column = {"codes": fmt.code.per_byte} | ({} if by_channel else {"scales": group, "offsets": group})
    parts = {n: p for n, p in weight.parts().items() if n != "perm"}
    cut = {
        n: p[..., begin // per_column[n] : end // per_column[n]].contiguous() if n in per_column else p for n, p in parts.items()
    }
    return QuantTensor(fmt, (*weight.shape[:-1], end - begin), **cut)


def merged(weights: Sequence[QuantTensor]) -> list[QuantTensor]:
    """One weight with the rows of all, or the weights as they are, where something belongs to each of them as a whole."""
    first = weights[0]
    if len(weights) == 1 or any(w.format != first.format or set(w.parts()) - set(BY_ROW) for w in weights):
        return list(weights)
    parts = {n: torch.cat([w.parts()[n] for w in weights]) for n in first.parts()}
    return [QuantTensor(first.format, (parts["codes"].shape[0], first.shape[1]), **parts)]
