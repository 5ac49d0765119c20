"""Weights whose rows files hold in several tensors, such as experts, put together without rounding a code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from halfbyte.checkpoints.integers import widest_format
from halfbyte.errors import Unsupported
from halfbyte.formats import INT4, INT4_SYM, WEIGHT_FORMATS, Code, Format
from halfbyte.reference.dequantize import block_scales
from halfbyte.tensors import QuantTensor

#: A layer of one expert: its mixture, its number, its projection. What files call the projections: gate, up, down.
EXPERT = re.compile(r"(.+)\.(\d{1,9})\.(\w+)")
GATE, UP, DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")

#: Weights [N, K] of one width, by the names of their layers.
Weights = Mapping[str, QuantTensor]


def stack(name: str, experts: Sequence[Weights], rows: Sequence[torch.Tensor]) -> QuantTensor:
    """[E, N, K]: expert e has the rows `rows[e]`, integers [N], of its weights one below the other. `name` is for errors."""
    fmt = _common_format(name, [weight for weights in experts for weight in weights.items()])
    has_perm = any(weight.perm is not None for weights in experts for weight in weights.values())
    matrices = [_parts(name, weights, fmt, index, has_perm) for weights, index in zip(experts, rows, strict=True)]
    parts = {part: torch.stack([matrix[part] for matrix in matrices]) for part in matrices[0]}
    return QuantTensor(fmt, (*parts["codes"].shape[:2], parts["codes"].shape[2] * fmt.code.per_byte), **parts)


def joined(name: str, weights: Weights, rows: torch.Tensor) -> QuantTensor:
    """[N, K]: the rows `rows`, integers [N], of weights one below the other."""
    first = next(iter(weights.values()))
    if len(weights) == 1 and torch.equal(rows, torch.arange(first.shape[0])):
        return first
    fmt = _common_format(name, list(weights.items()))
    parts = _parts(name, weights, fmt, rows, any(weight.perm is not None for weight in weights.values()))
    if (scales := parts.pop("tensor_scale", None)) is not None:
        if bool((scales != scales[0]).any()):
            raise Unsupported(f"{name}: {', '.join(weights)} have scales of their own ({fmt}), and the model computes them as one")
        parts["tensor_scale"] = scales[:1]
    return QuantTensor(fmt, (len(rows), first.shape[1]), **parts)


def alternating(halves: int, rows: int) -> torch.Tensor:
    """The rows of so many weights in turn: gate and up of an expert, as `experts_linear` reads them."""
    return torch.arange(halves * rows).view(halves, rows).T.flatten()


def without_nested_scales(weight: QuantTensor) -> QuantTensor:
    """The same values with scales in fp32: nested scales come in blocks that run across rows, so that they cannot be cut."""
    if weight.nested is None:
        return weight
    scale = weight.format.scale
    assert scale is not None
    plain = replace(weight.format, scale=replace(scale, nested=None))
    fmt = next(f for f in WEIGHT_FORMATS.values() if replace(f, name=plain.name) == plain)
    return QuantTensor(fmt, weight.shape, weight.codes, block_scales(weight), perm=weight.perm)


def _common_format(name: str, weights: Sequence[tuple[str, QuantTensor]]) -> Format:
    """The format that holds all of several weights exactly: as fine as the finest, with zero points if one of them has some."""
    formats = {without_nested_scales(weight).format: layer for layer, weight in weights}
    if len(formats) == 1:
        return next(iter(formats))
    codes = {fmt.code for fmt in formats}
    code: Code | None = INT4 if codes == {INT4, INT4_SYM} else codes.pop() if len(codes) == 1 else None
    scales = [fmt.scale for fmt in formats if fmt.scale is not None]
    storage = torch.float32 if any(scale.storage is torch.float32 for scale in scales) else torch.float16
    widest = None if code is None else widest_format(code, storage, min(scale.group or weights[0][1].shape[1] for scale in scales))
    if widest is None:
        layers = ", ".join(f"{layer} is {fmt}" for fmt, layer in formats.items())
        raise Unsupported(f"{name}: no format holds its parts exactly: {layers}; quantize the 16-bit model instead")
    return widest


def _parts(name: str, weights: Weights, fmt: Format, rows: torch.Tensor, ordered: bool) -> dict[str, torch.Tensor]:
    """The parts of one matrix, its columns in one order if `ordered`, its tensor scale [N]: that of each row."""
    alike = [_in_format(without_nested_scales(weight), fmt) for weight in weights.values()]
    perms = [torch.arange(w.shape[1], dtype=torch.int32) if w.perm is None else w.perm for w in alike] if ordered else []
    if any(not torch.equal(perm, perms[0]) for perm in perms):
        raise Unsupported(f"{name}: {', '.join(weights)} are in different act-orders, and the model computes them as one")
    layers = [{name: part for name, part in w.parts().items() if name not in ("perm", "tensor_scale")} for w in alike]
    for parts, weight in zip(layers, alike, strict=True):
        if weight.tensor_scale is not None:
            parts["tensor_scale"] = weight.tensor_scale.expand(weight.shape[0])
    matrix = {name: torch.cat([parts[name] for parts in layers]).index_select(0, rows) for name in layers[0]}
    return {**matrix, "perm": perms[0]} if ordered else matrix


def _in_format(weight: QuantTensor, fmt: Format) -> QuantTensor:
    """The same values with scales repeated for narrower groups, in a wider type, and with zero points."""
    if weight.format == fmt:
        return weight
    assert weight.scales is not None and fmt.scale is not None
    repeat = fmt.scale_shape(weight.shape)[1] // weight.scales.shape[1]
    scales = weight.scales.to(fmt.scale.storage).repeat_interleave(repeat, 1)
    offsets = weight.offsets
    if fmt.offset == "int":
        offsets = torch.full_like(scales, 8, dtype=torch.uint8) if offsets is None else offsets.repeat_interleave(repeat, 1)
    return QuantTensor(fmt, weight.shape, weight.codes, scales, offsets, perm=weight.perm)
