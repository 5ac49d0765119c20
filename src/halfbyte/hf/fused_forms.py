"""Forms of a branch of a decoder block: what it is as it is, what its fused forms have in common, and that of a recurrence.

A form is a function of x and of the block's arguments by name. It gives what the last layer of the module multiplies, and that
layer, so that the sum behind it can be part of the same launch. Ranks that share a model fuse blocks together or not at all.

A recurrence is the gated delta rule, over the states that transformers keeps in a cache's layer:

    projections of x                                            one launch for up to four
    convolution, gates, the state of each head, gated norm      one (`halfbyte.ops.gated_delta`)
    the output projection                                       one, with the sum behind it

What a module has is read off it: a depthwise convolution, `A_log` and `dt_bias`, the norm of a head, and linear layers of its x,
whose widths tell which is which. Two of one width are tried both ways: results and states must be the module's own.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from halfbyte.errors import HalfbyteError
from halfbyte.hf.model_support import CACHE, ranks_of
from halfbyte.hf.structure import SCALES, Part, Reading, close, same
from halfbyte.nn import FusedProjections, FusedSlot, QuantLinear
from halfbyte.ops.all_reduce import AllReduce, of_all
from halfbyte.ops.block_linear import Rows, Unscaled, projected
from halfbyte.ops.gated_delta import gated_delta
from halfbyte.ops.linear import MOST_WEIGHTS
from halfbyte.reference.gated_delta import DeltaWeights

_LINEAR = (nn.Linear, QuantLinear, FusedProjections, FusedSlot)
#: x and the arguments of the block -> what the last layer of a branch multiplies, and that layer; None: nothing is left.
Form = Callable[[Rows, dict[str, Any]], tuple[torch.Tensor, nn.Module | None]]


def whole(form: Form, x: Rows, block: dict[str, Any]) -> torch.Tensor:
    """The result of a branch, its last layer included."""
    y, last = form(x, block)
    result: torch.Tensor = y if last is None else last(y)
    return result


#: (a form, the module, its layer, both steps, whether the form was found before) -> results of the form and what they must be.
Compared = Callable[[Any, Part, int, tuple[Reading, Reading], bool], Iterator[tuple[torch.Tensor, torch.Tensor]]]


def alike(pairs: Compared, form: Form, part: Part, number: int, steps: tuple[Reading, Reading], again: bool) -> bool:
    """Whether a form gives the numbers of the family's own. Pairs are made one by one, up to one that differs."""
    try:
        return all(close(*pair) for pair in pairs(form, part, number, steps, again))
    except (RuntimeError, ValueError, AttributeError, HalfbyteError):  # shapes that do not belong together
        return False


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
        first, *others = [whole(form, x, block) for form in self.forms]
        return sum(others, first), None


def layers_of(part: Part) -> tuple[list[Any], Any]:
    """(linear layers that a branch gives its own x, the one whose result is its own or None)."""
    calls = [call for call in part.inner if isinstance(call.module, _LINEAR)]
    first = [call.module for call in calls if same(call.x, part.call.x)]
    return first, next((call.module for call in reversed(calls) if same(call.y, part.call.y)), None)


# --------------------------------------------------------------------------------------------------------------- recurrences


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


def recurred(
    form: Recurrence, part: Part, number: int, steps: tuple[Reading, Reading], again: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Results and states of a fused recurrence in both steps, one after the other, with those of the family's own. Unless `again`,
    of larger inputs as well."""

    def results(run: Form, scale: float) -> Iterator[torch.Tensor]:
        """Over a copy of what was held before the first step."""
        layers = list(steps[0].twin.layers)
        layer = layers[form.number] = copy.deepcopy(layers[form.number])
        for step in steps:
            cache = steps[0].twin.over(layers)
            call = part.call_in(step, number)
            yield whole(run, call.x * scale, {**part.block_of(call), CACHE: cache})
            yield from (layer.conv_states[0].clone(), layer.recurrent_states[0].clone())

    for scale in SCALES[:1] if again else SCALES:
        yield from zip(results(form, scale), results(AsItIs(part), scale), strict=True)


# --------------------------------------------------------------------------------------------------------------------- ranks


_sums: WeakKeyDictionary[Any, AllReduce] = WeakKeyDictionary()


def _together(model: Any) -> bool:
    """Whether the ranks that share each layer are those of the default process group: otherwise some may do something else."""
    return dist.is_available() and dist.is_initialized() and 1 < ranks_of(model) == dist.get_world_size()


def all_reduce_of(model: Any) -> AllReduce | None:
    """How partial sums of a model's ranks are added up, kept with the model; None: as transformers does. All ranks call it."""
    if not _together(model):
        return None
    if model not in _sums:
        _sums[model] = AllReduce(model.config.get_text_config().hidden_size, model.dtype, model.device)
    return _sums[model]


def all_agree(model: Any, mine: bool) -> bool:
    """Whether all ranks of a model say so, where `all_reduce_of` adds up their sums; else `mine`. All ranks call it."""
    return all(of_all(mine, model.device)) if _together(model) else mine


def partial_layer(layer: Any) -> QuantLinear | None:
    """A row-parallel layer that gives a rank's partial sums; None for others, and with a bias, which is added behind the sum."""
    is_partial = type(layer) is QuantLinear and layer.parallel_style == "rowwise" and layer.bias is None
    return layer if is_partial else None
