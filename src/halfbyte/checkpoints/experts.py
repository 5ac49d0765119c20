"""Experts that files hold one a tensor, put together into the stacks that `experts_linear` reads. No code is rounded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from halfbyte.errors import Unsupported
from halfbyte.tensors import QuantTensor

#: A layer of one expert: its mixture, its number, its projection. What files call the projections: gate, up, down.
EXPERT = re.compile(r"(.+)\.(\d{1,9})\.(\w+)")
GATE, UP, DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")


def stack(name: str, experts: Sequence[Sequence[QuantTensor]]) -> QuantTensor:
    """[E, N, K] from the weights of each expert: [its projection], or [gate, up], whose rows then alternate."""
    first = experts[0][0]
    for weight in (weight for halves in experts for weight in halves):
        if weight.format != first.format:
            raise Unsupported(f"{name}: its experts have several formats ({first.format}, {weight.format})")
    if first.nested is not None:
        raise Unsupported(f"{name}: blocks of nested scales cannot be put together; quantize the 16-bit model instead")
    ordered = any(weight.perm is not None for halves in experts for weight in halves)
    stacked = [_alternating(name, halves, ordered) for halves in experts]
    parts = {part: torch.stack([weight.parts()[part] for weight in stacked]) for part in stacked[0].parts()}
    if "tensor_scale" in parts:
        parts["tensor_scale"] = torch.stack([_row_scales(halves) for halves in experts])
    return QuantTensor(first.format, (len(experts), *stacked[0].shape), **parts)


def _alternating(name: str, halves: Sequence[QuantTensor], ordered: bool) -> QuantTensor:
    """One expert: the rows of its halves in turn; with `ordered`, columns have an order, if only that of the model."""
    first = halves[0]
    perms = [_order(weight) for weight in halves] if ordered else []
    if any(not torch.equal(perm, perms[0]) for perm in perms):
        raise Unsupported(f"{name}: gate and up projections of an expert are in different act-orders")
    rows = [part for part in ("codes", "scales", "offsets") if part in first.parts()]
    parts = {part: torch.stack([weight.parts()[part] for weight in halves], 1).flatten(0, 1) for part in rows}
    shape = (sum(weight.shape[0] for weight in halves), first.shape[1])
    made = QuantTensor(first.format, shape, **parts, tensor_scale=first.tensor_scale)
    return replace(made, perm=perms[0]) if ordered else made


def _order(weight: QuantTensor) -> torch.Tensor:
    return torch.arange(weight.shape[1], dtype=torch.int32) if weight.perm is None else weight.perm


def _row_scales(halves: Sequence[QuantTensor]) -> torch.Tensor:
    """[N]: each row has the scale of its tensor."""
    scales = [weight.tensor_scale.expand(weight.shape[0]) for weight in halves if weight.tensor_scale is not None]
    return torch.stack(scales, 1).flatten()
