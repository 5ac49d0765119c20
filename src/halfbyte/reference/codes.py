"""Codes of numbers that are divided by their scale: the nearest, stored or as its value."""

from __future__ import annotations

import functools

import torch

from halfbyte.formats import Code
from halfbyte.packing import pack_codes


def encode_unit(unit: torch.Tensor, code: Code) -> torch.Tensor:
    """Stored codes of values already divided by their scale: nearest, saturating; codes of less than 8 bits packed."""
    if code.kind == "affine":
        q = unit.round().clamp(code.lo, code.hi) + code.bias
        return q.to(torch.int8) if code.dtype is torch.int8 else pack_codes(q.to(torch.uint8), code.bits)
    if code.is_e4m3:
        return unit.clamp(-code.reach, code.reach).to(code.dtype).view(torch.uint8)
    return pack_codes(_nearest(unit, code), code.bits)


def _nearest(unit: torch.Tensor, code: Code) -> torch.Tensor:
    """Index of the nearest value of a lookup code; -0 is written as code 0."""
    order, bounds, signed = sorted_table(code)
    x = unit.abs() if signed else unit
    index = torch.zeros_like(x, dtype=torch.uint8)
    for bound in bounds:  # ten times as fast as a binary search for each number
        index += x > bound
    q = index if order == sorted(order) else torch.tensor(order, dtype=torch.uint8, device=unit.device)[index.int()]
    return q + 8 * (unit < 0).to(torch.uint8) if signed else q


@functools.cache
def sorted_table(code: Code) -> tuple[list[int], list[float], bool]:
    """(codes ordered by value, the largest number that each but the last encodes, whether values are magnitudes)."""
    assert code.values is not None
    signed = code.values[8] == 0  # sign-magnitude: search magnitudes, add the sign bit
    ascending, order = torch.tensor(code.values[:8] if signed else code.values, dtype=torch.float32).sort()
    bounds = (ascending[1:] + ascending[:-1]) / 2
    if code.ties == "even":  # else a tie goes to the lower value
        bounds[1::2] = bounds[1::2].nextafter(bounds.new_zeros(()))
    return order.tolist(), bounds.tolist(), signed


def to_grid(unit: torch.Tensor, zero: torch.Tensor | None, code: Code, scratch: torch.Tensor) -> torch.Tensor:
    """`unit`, which is scratch[0], rounded to the values of codes: as `encode_unit` and `decode_unit`, without packing them."""
    if code.kind == "affine":
        unit.round_()
        return unit.clamp_(code.lo, code.hi) if zero is None else unit.add_(zero).clamp_(code.lo, code.hi).sub_(zero)
    order, bounds, _ = sorted_table(code)
    values = [code.values[i] for i in order] if code.values else []
    above, value = scratch[1], scratch[2].fill_(values[0])
    for bound, low, high in zip(bounds, values, values[1:], strict=False):
        value.add_(torch.gt(unit, bound, out=above), alpha=high - low)
    return value


def nearest_values(unit: torch.Tensor, zero: torch.Tensor | None, code: Code) -> torch.Tensor:
    """`to_grid` in few launches, for a GPU and few numbers; of a code of magnitudes, `unit` may be negative."""
    if code.kind == "affine":
        q = unit.round()
        return q.clamp_(code.lo, code.hi) if zero is None else q.add_(zero).clamp_(code.lo, code.hi).sub_(zero)
    bounds, values, signed = _table_on(code, unit.device)
    nearest = values[torch.bucketize(unit.abs() if signed else unit, bounds)]
    return nearest.copysign_(unit) if signed else nearest


@functools.cache
def _table_on(code: Code, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """(bounds, values in ascending order, whether they are magnitudes), on a device."""
    order, bounds, signed = sorted_table(code)
    return torch.tensor(bounds, device=device), code.codebook()[order].to(device), signed
