"""Mixtures of experts in transformers: found by their structure, and computed by `experts_linear`.

transformers keeps the weights of all experts of a layer in two stacked parameters, gate_up_proj (up_proj where nothing is gated)
and down_proj, of a module that calls the function which `config._experts_implementation` names. Quantized, both parameters are
`QuantExperts` modules of the same names, with the biases next to them, and that function is `forward`. The module keeps its
activation, which is fused into the first projection if it is one of `experts_linear`, and its norm.

A few families call their experts in ways of their own. Those are known by the arguments of `forward`, and a `Called` takes the
place of theirs: one class for each way.
"""

from __future__ import annotations

import inspect
import itertools
import math
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from halfbyte.checkpoints.adapters import OWN as NAME
from halfbyte.experts import QuantExperts, mlp
from halfbyte.formats import Format, Shape
from halfbyte.reference.experts import KINDS, Activation


class Called(nn.Module):
    """In place of a mixture outside of the interface. The attributes are those of the interface."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True

    def __init__(self, mixture: Any, owner: Any) -> None:
        """`mixture` with quantized projections, in the module `owner`."""
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act_fn = mixture.gate_up_proj, mixture.down_proj, mixture.act_fn
        self.train(mixture.training)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up  # type: ignore[no-any-return]

    def _first(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The activation of the first projection, [T, top_k, N]."""
        y: torch.Tensor = self.gate_up_proj(x, ids)
        return y if self.gate_up_proj.activation else self._apply_gate(torch.cat((y[..., ::2], y[..., 1::2]), -1))


class RowsOfAll(Called):
    """Llama 4: every expert gets the rows of all tokens times its gate, which is 0 where it was not chosen: [E * T, hidden size].

    Rows of zeros give zeros, so the experts of a token are found in its rows, and no others are computed.
    """

    is_transposed = True

    def __init__(self, mixture: Any, owner: Any) -> None:
        super().__init__(mixture, owner)
        self.top_k = int(owner.top_k)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.view(self.down_proj.weight.shape[0], -1, hidden_states.shape[-1]).transpose(0, 1)
        ids = (rows != 0).any(-1).int().topk(self.top_k).indices
        index = ids.unsqueeze(-1).expand(-1, -1, rows.shape[-1])
        y = self.down_proj(self._first(rows.gather(1, index), ids), ids)
        return torch.zeros_like(rows).scatter(1, index, y).transpose(0, 1).reshape(hidden_states.shape)


class WithIdentities(Called):
    """LongCat: ids from the number of experts on stand for experts that return their input."""

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        last = int(self.down_proj.weight.shape[0]) - 1
        real = top_k_index <= last
        lowest = top_k_index.amin(-1, keepdim=True).clamp(max=last)  # an expert that the token reads anyway, if there is one
        ids, gates = torch.where(real, top_k_index, lowest), top_k_weights * real
        out: torch.Tensor = self.down_proj(self._first(hidden_states, ids), ids, gates)
        share = (top_k_weights * ~real).sum(-1, keepdim=True)
        return out + hidden_states * share.to(hidden_states.dtype)


class SortedExperts(QuantExperts):
    """JetMoE: a layer [experts, out features, in features] for rows that are sorted by expert, of which each has so many."""

    def forward(self, inputs: torch.Tensor, expert_size: list[int]) -> torch.Tensor:  # type: ignore[override]
        counts = torch.tensor(expert_size, device=inputs.device)
        ids = torch.arange(len(expert_size), device=inputs.device).repeat_interleave(counts, output_size=len(inputs))
        y: torch.Tensor = super().forward(inputs, ids.unsqueeze(1))
        return y.squeeze(1)


#: Arguments of `forward` -> what takes the place of a mixture that is called so.
_CLASSES: dict[tuple[str, ...], type[Called]] = {
    ("hidden_states",): RowsOfAll,
    ("hidden_states", "top_k_index", "top_k_weights"): WithIdentities,
}


def called(module: nn.Module) -> type[Called] | None:
    """The class for the place of a mixture outside of the interface; None for any other module."""
    kind = _CLASSES.get(_arguments(module))
    if kind is None or isinstance(module, Called) or not hasattr(module, "act_fn"):
        return None
    first, last = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    others = {name for name, _ in module.named_parameters(recurse=False)} - {"gate_up_proj", "down_proj"}
    if first is None or last is None or others:
        return None
    if isinstance(first, torch.Tensor) and isinstance(last, torch.Tensor):
        a, b = ((t.mT if kind.is_transposed else t).shape for t in (first, last))
        return kind if a[1:] == (2 * b[-1], b[-2]) else None
    return kind


def is_sorted(module: nn.Module) -> bool:
    """Whether a module is a stack of matrices whose rows come sorted by expert."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 3 and _arguments(module) == ("inputs", "expert_size")


def _arguments(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


#: What every module has that calls the registered function, and says how it keeps its weights.
_INTERFACE = ("has_gate", "has_bias", "is_transposed")
#: How configurations call the experts that a token uses: most; Gemma 4; Aria; DBRX, in its `ffn_config`.
_USED = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")
#: Of x * sigmoid(1.702 x), a GELU; and of gpt-oss, whose up projections get 1 added.
_ALPHA, _SHIFTS = 1.702, (0.0, 1.0)


def layout(module: Any) -> Any:
    """What says how the weights of a mixture are kept (`_INTERFACE`): the module, or the class for its place; None of others."""
    return module if all(hasattr(module, name) for name in _INTERFACE) else called(module)


def projections(module: Any) -> tuple[str, str] | None:
    """The names of the two projections of a mixture of experts; None for any other module."""
    if (kind := layout(module)) is None:
        return None
    names = ("gate_up_proj" if kind.has_gate else "up_proj", "down_proj")
    stacks = [getattr(module, name, None) for name in names]
    is_stack = all(isinstance(t, QuantExperts) or (isinstance(t, torch.Tensor) and t.ndim == 3) for t in stacks)
    return names if is_stack else None


def stack_shape(module: Any, name: str) -> Shape:
    """[experts, out, in features] of a projection that is not quantized yet. LongCat's has rows more, which nothing reads."""
    (_, *matrix), both = getattr(module, name).shape, (getattr(module, each) for each in projections(module) or ())
    experts = min(len(stack) for stack in both if isinstance(stack, torch.Tensor))
    return (experts, *(reversed(matrix) if layout(module).is_transposed else matrix))


def unread_experts(config: Any, experts: int, sequences: int) -> float:
    """Expected share of so many experts that a step does not read, if all are used equally often; 0 where top_k is not known."""
    config = getattr(config, "ffn_config", None) or config
    top_k = next((n for name in _USED if isinstance(n := getattr(config, name, None), int)), 0)
    return (1 - min(1.0, top_k / experts)) ** sequences if top_k and experts else 0.0


def quantize_stack(module: Any, name: str, experts: int, fmt: Format, clip: str | None) -> QuantExperts:
    """One projection of a mixture, quantized; gate and up rows alternate."""

    def order(piece: torch.Tensor) -> torch.Tensor:
        return in_order(module, name, piece.mT if layout(module).is_transposed else piece)

    bias = in_order(module, name, getattr(module, f"{name}_bias").detach()) if layout(module).has_bias else None
    return QuantExperts.from_stack(getattr(module, name)[:experts], fmt, bias, clip=clip, order=order)


def empty_stack(module: Any, name: str, shape: Shape, fmt: Format, act_order: bool) -> QuantExperts:
    """A projection for a checkpoint to be loaded into."""
    bias_dtype = getattr(module, f"{name}_bias").dtype if layout(module).has_bias else None
    return QuantExperts.empty(shape, fmt, bias_dtype, act_order=act_order)


def in_order(module: Any, name: str, rows: torch.Tensor) -> torch.Tensor:
    """Rows [experts, N, ...] of a projection as the model has them, in the order of `experts_linear`: g0, u0, g1, u1, ..."""
    if name != "gate_up_proj" or not is_concatenated(module):
        return rows
    return alternate(rows)


def alternate(rows: torch.Tensor) -> torch.Tensor:
    """All gate rows, then all up rows [experts, N, ...] -> the two in turn."""
    gate, up = rows.chunk(2, dim=1)
    return torch.stack((gate, up), 2).flatten(1, 2)


def is_concatenated(module: Any) -> bool:
    """Whether all gates come before all up projections; in gpt-oss they alternate."""
    return bool(layout(module).is_concatenated)


def use_experts(model: nn.Module) -> None:
    """Let the mixtures of a model whose projections are quantized compute with them."""
    for name, module in list(model.named_modules()):
        names = projections(module)
        first: Any = None if names is None else getattr(module, names[0])
        if not isinstance(first, QuantExperts):
            continue
        if (kind := layout(module)) is not module:
            parent, _, child = name.rpartition(".")
            setattr(owner := model.get_submodule(parent), child, module := kind(module, owner))
        first.activation = fusible(module)
        if not isinstance(module, Called):
            config: Any = module.config
            config._experts_implementation = NAME


def fusible(module: Any) -> Activation | None:
    """The `Activation` that equals the module's own at many gates and up projections, with its attributes as numbers, or None."""
    if not module.has_gate:
        return None
    numbers = [float(v) for v in vars(module).values() if isinstance(v, int | float) and not isinstance(v, bool) and 0 < v <= 100]
    values = torch.tensor([0.0, 0.01, 0.3, 1.0, 2.5, 5.0, *numbers, *(1.5 * n for n in numbers)], dtype=torch.float64)
    pairs = torch.cartesian_prod(torch.cat([values, -values]), torch.cat([values, -values]))  # of a gate and its up projection
    with torch.no_grad():
        expected = module._apply_gate(pairs).double()
        candidates = itertools.product(KINDS, [1.0, _ALPHA, *numbers], [math.inf, *numbers], _SHIFTS)
        activation = (Activation(*each) for each in candidates)  # type: ignore[arg-type]
        return next((a for a in activation if torch.allclose(a(pairs), expected, rtol=1e-5, atol=1e-5)), None)


def forward(module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """What `config._experts_implementation` names: the mixture of hidden_states [T, hidden size] by its experts [T, top_k]."""
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    first, last = (getattr(module, name) for name in names)
    if not isinstance(first, QuantExperts):  # left in 16 bits by skip_modules
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
    has_norm = getattr(module, "has_post_expert_norm", False)
    if first.activation is not None and not has_norm:
        return mlp(first, last, hidden_states, top_k_index, top_k_weights)
    y = first(hidden_states, top_k_index)
    if first.activation is None:
        y = _activated(module, y)
    if not has_norm:
        mixture: torch.Tensor = last(y, top_k_index, top_k_weights)
        return mixture
    y = module.post_expert_norm(last(y, top_k_index))
    mixture = (y * top_k_weights.unsqueeze(-1)).sum(1)
    return mixture.to(hidden_states.dtype)


def _activated(module: Any, y: torch.Tensor) -> torch.Tensor:
    """The module's own activation of [T, top_k, N]."""
    if not module.has_gate:
        return module.act_fn(y)  # type: ignore[no-any-return]
    if is_concatenated(module):
        y = torch.cat((y[..., ::2], y[..., 1::2]), -1)
    return module._apply_gate(y)  # type: ignore[no-any-return]


ALL_EXPERTS_FUNCTIONS.register(NAME, forward)
