"""Recurrences of a decoder block in few launches: the gated delta rule, over the states that transformers keeps in a cache's layer.

    projections of x                                            one launch for up to four
    convolution, gates, the state of each head, gated norm      one (`halfbyte.ops.gated_delta`)
    the output projection                                       one, with the sum behind it

What a module has is read off it: a depthwise convolution, `A_log` and `dt_bias`, the norm of a head, and linear layers of its x,
whose widths tell which is which. Two of one width are tried both ways: results and states must be the module's own.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from halfbyte.errors import HalfbyteError
from halfbyte.hf.fused_forms import AsItIs, Form, layers_of, project
from halfbyte.hf.model_support import CACHE
from halfbyte.hf.structure import SCALES, Part, Reading, close
from halfbyte.ops.block_linear import Rows, Unscaled
from halfbyte.ops.gated_delta import gated_delta
from halfbyte.reference.gated_delta import DeltaWeights

#: Factors of sigmoid(b): with 2 eigenvalues may be negative.
_BETA_SCALES = (1.0, 2.0)


class _Heads(NamedTuple):
    """Key heads, value heads of each, and their sizes."""

    key_heads: int
    group: int
    dk: int
    dv: int

    @property
    def widths(self) -> tuple[tuple[int, ...], ...]:
        """What projections have how many columns: qkv, z, b, a; or q, k, v, z, b, a; or qkvz and ba, key head by key head."""
        heads = self.key_heads * self.group
        key, value = self.key_heads * self.dk, heads * self.dv
        return (2 * key + value, value, heads, heads), (key, key, value, value, heads, heads), (2 * key + 2 * value, 2 * heads)

    def split(self, flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """q, k [B, Hk, Dk], v, z [B, Hk, group, Dv], b and a [B, Hk, group]: views of projections [B, columns]."""
        hk, group, dk, dv = self
        if len(flat) == 2:
            qkvz, ba = (t.unflatten(-1, (hk, -1)) for t in flat)
            q, k, v, z = qkvz.split((dk, dk, group * dv, group * dv), -1)
            b, a = ba.split(group, -1)
        else:
            *qkv, z, b, a = flat
            parts = qkv if len(qkv) == 3 else qkv[0].split((hk * dk, hk * dk, hk * group * dv), -1)
            q, k, v, z, b, a = (t.unflatten(-1, (hk, -1)) for t in (*parts, z, b, a))
        return [q, k, v.unflatten(-1, (group, dv)), z.unflatten(-1, (group, dv)), b, a]


class Recurrence:
    """The gated delta rule: projections, the recurrence, the output projection. Anything but one more token runs as it is."""

    def __init__(self, part: Part, layers: list[nn.Module], last: nn.Module, weights: DeltaWeights, heads: _Heads) -> None:
        self.own, self.layers, self.last, self.weights, self.heads = AsItIs(part), layers, last, weights, heads
        self.number: int = part.call.module.layer_idx  # type: ignore[assignment]
        #: Arguments of the block that were None in the step that was read, such as a mask.
        self.absent = [own for name, own in part.renames.items() if part.call.kwargs.get(name) is None]

    def __call__(self, x: Rows, block: dict[str, Any]) -> tuple[torch.Tensor, nn.Module | None]:
        cache = block[CACHE]
        layer = cache.layers[self.number]
        tokens = (x.hidden if isinstance(x, Unscaled) else x).shape[1]
        in_place = layer.has_previous_state[0] and all(
            t is not None and t.is_contiguous() for t in (layer.conv_states[0], layer.recurrent_states[0])
        )
        others = cache.is_recording_past(self.number) or any(block.get(name) is not None for name in self.absent)
        if tokens != 1 or not in_place or others:
            return self.own(x, block)
        conv_state, state = cache.get_conv_state(self.number), cache.get_recurrent_state(self.number)
        q, k, v, z, b, a = self.heads.split([t.squeeze(1) for t in project(x, self.layers)])
        return gated_delta(q, k, v, z, b, a, self.weights, conv_state, state).unsqueeze(1), self.last


def recurrences(part: Part, step: Reading) -> Iterator[Recurrence]:
    """What a branch may be as a recurrence: by the order of its projections, and by the scale of beta."""
    module, (layers, last) = part.call.module, layers_of(part)
    if last is None or CACHE not in part.renames.values() or not all(hasattr(module, name) for name in ("A_log", "layer_idx")):
        return
    columns = {id(call.module): call.y.shape[-1] for call in part.inner if any(call.module is layer for layer in layers)}
    norms = [call.module for call in part.inner if getattr(getattr(call.module, "weight", None), "ndim", 0) == 1]
    convolutions = [m for m in module.modules() if isinstance(m, nn.Conv1d)]
    state = getattr(step.twin.layers[module.layer_idx], "recurrent_states", {}).get(0)
    if state is None or state.ndim != 4 or len(norms) != 1 or len(convolutions) != 1 or len(layers) > 6:
        return
    if (heads := _heads_of(convolutions[0].weight.shape[0], state)) is None:
        return
    orders = [order for order in itertools.permutations(layers) if tuple(columns[id(m)] for m in order) in heads.widths]
    for scale, order in itertools.product(_BETA_SCALES, orders):
        yield Recurrence(part, list(order), last, _weights(module, convolutions[0], norms[0], scale), heads)


def _heads_of(channels: int, state: torch.Tensor) -> _Heads | None:
    """The heads of a state [B, H, Dk, Dv] next to a convolution of so many channels; None where they do not fit."""
    _, heads, dk, dv = state.shape
    key_heads, rest = divmod(channels - heads * dv, 2 * dk)
    fits = key_heads > 0 and rest == 0 and heads % key_heads == 0
    return _Heads(key_heads, heads // key_heads, dk, dv) if fits else None


def _weights(module: Any, conv: nn.Conv1d, norm: Any, beta_scale: float) -> DeltaWeights:
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0))
    return DeltaWeights(conv.weight.squeeze(1), conv.bias, module.A_log, module.dt_bias, norm.weight, eps, beta_scale)


def recurs_alike(form: Recurrence, part: Part, number: int, steps: tuple[Reading, Reading], again: bool) -> bool:
    """Whether a fused recurrence of layer `number` gives the results and the states of the family's own in both steps, one after
    the other. Unless `again`, for larger inputs as well."""

    def results(run: Form, scale: float) -> Iterator[torch.Tensor]:
        """Over a copy of what was held before the first step."""
        layers = list(steps[0].twin.layers)
        layer = layers[form.number] = copy.deepcopy(layers[form.number])
        for step in steps:
            cache = steps[0].twin.over(layers)
            call = next(call for call in step.blocks[number] if call.module is part.call.module)
            block = {own: call.kwargs.get(name) for name, own in part.renames.items()}
            y, last = run(call.x * scale, {**block, CACHE: cache})
            yield from (y if last is None else last(y), layer.conv_states[0].clone(), layer.recurrent_states[0].clone())

    try:
        return all(
            close(*pair)
            for scale in (SCALES[:1] if again else SCALES)
            for pair in zip(results(form, scale), results(AsItIs(part), scale), strict=True)
        )
    except (RuntimeError, ValueError, AttributeError, HalfbyteError):  # shapes that do not belong together
        return False
