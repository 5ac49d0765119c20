"""Experts that transformers does not call through its interface, quantized: one class for each way of calling them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from halfbyte.experts import QuantExperts


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
        mixed: torch.Tensor = self.down_proj(self._first(hidden_states, ids), ids, gates)
        passed = (top_k_weights * ~real).sum(-1, keepdim=True)
        return mixed + hidden_states * passed.to(hidden_states.dtype)


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
