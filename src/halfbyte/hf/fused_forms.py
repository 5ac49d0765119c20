"""Forms of a branch of a decoder block: what it is as it is, and what its fused forms have in common.

A form is a function of x and of the block's arguments by name. It gives what the last layer of the module multiplies, and that
layer, so that the sum behind it can be part of the same launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from halfbyte.hf.structure import Part, same
from halfbyte.nn import FusedProjections, FusedSlot, QuantLinear
from halfbyte.ops.block_linear import Rows, Unscaled, projected
from halfbyte.ops.linear import MOST_WEIGHTS

_LINEAR = (nn.Linear, QuantLinear, FusedProjections, FusedSlot)
#: x and the arguments of the block -> what the last layer of a branch multiplies, and that layer; None: nothing is left.
Form = Callable[[Rows, dict[str, Any]], tuple[torch.Tensor, nn.Module | None]]


def whole_rows(x: Rows) -> torch.Tensor:
    """Rows whose norm is finished, by a launch of its own if need be."""
    return x.normalized() if isinstance(x, Unscaled) else x


def quantized_layer(layer: Any) -> Any:
    """A layer whose weight is quantized, fused before or not, and whose output needs no other rank; else None."""
    is_known = type(layer) in (QuantLinear, FusedProjections, FusedSlot)
    return layer if is_known and layer.parallel_style in (None, "colwise") else None


def project(x: Rows, layers: Sequence[nn.Module]) -> Sequence[torch.Tensor]:
    """x [..., K] by each layer: one launch for up to four that are quantized, none of them in act-order; else one by one."""
    if len(layers) > MOST_WEIGHTS:
        return [*project(x, layers[:MOST_WEIGHTS]), *project(x, layers[MOST_WEIGHTS:])]
    quantized: list[Any] = [quantized_layer(layer) for layer in layers]
    if None in quantized or (len(layers) > 1 and any(layer.weight.perm is not None for layer in quantized)):
        x = whole_rows(x)
        return [layer(x) for layer in layers]
    return projected(x, [layer.weight for layer in quantized], [layer.bias for layer in quantized])


class AsItIs:
    """A branch that is called as the family's block does."""

    def __init__(self, part: Part) -> None:
        self.module, self.x_name, self.renames, self.constants = part.call.module, part.x_name, part.renames, part.constants
        self.is_first = bool(part.call.args) and part.call.args[0] is part.call.x  # *args have no names

    def __call__(self, x: Rows, block: dict[str, Any]) -> tuple[torch.Tensor, None]:
        arguments = {name: block.get(source) for name, source in self.renames.items()}
        given = {**self.constants, **arguments}
        x = whole_rows(x)
        y = self.module(x, **given) if self.is_first else self.module(**{self.x_name: x, **given})
        return (y[0] if isinstance(y, tuple) else y), None  # a mixture returns the scores of its router, too


class AddedForms:
    """Modules whose results are added up, each in its form."""

    def __init__(self, forms: list[Form]) -> None:
        self.forms = forms

    def __call__(self, x: Rows, block: dict[str, Any]) -> tuple[torch.Tensor, None]:
        results = [form(x, block) for form in self.forms]
        first, *others = (y if last is None else last(y) for y, last in results)
        return sum(others, first), None


def layers_of(part: Part) -> tuple[list[Any], Any]:
    """(linear layers that a branch gives its own x, the one whose result is its own or None)."""
    calls = [call for call in part.inner if isinstance(call.module, _LINEAR)]
    first = [call.module for call in calls if same(call.x, part.call.x)]
    return first, next((call.module for call in reversed(calls) if same(call.y, part.call.y)), None)
