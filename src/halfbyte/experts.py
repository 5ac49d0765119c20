"""`QuantExperts`: one projection of all experts of a mixture with quantized weights, as a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

from halfbyte.errors import check
from halfbyte.formats import Format
from halfbyte.nn import NoTensor, QuantLayer, stored
from halfbyte.ops.experts_linear import experts_linear, experts_of_parts
from halfbyte.ops.experts_mlp import Projection, experts_mlp
from halfbyte.reference.experts import Activation, ExpertsCall
from halfbyte.reference.experts import experts_linear as in_torch
from halfbyte.reference.quantize import quantize
from halfbyte.tensors import QuantTensor

#: Weights that are quantized at a time.
_PIECE = 1 << 26


class QuantExperts(QuantLayer):
    """`experts_linear` with its own weight [E, N, K] and, if gate and up rows alternate, the activation of the projection."""

    activation: Activation | None = None

    def __init__(self, weight: QuantTensor, bias: torch.Tensor | None = None) -> None:
        check(len(weight.shape) == 3, f"weight has shape {list(weight.shape)}; experts hold [experts, out_features, in_features]")
        super().__init__(weight, bias)

    @classmethod
    def from_stack(
        cls,
        weight: torch.Tensor,
        fmt: Format,
        bias: torch.Tensor | None = None,
        *,
        clip: str | None = None,
        order: Callable[[torch.Tensor], torch.Tensor] = lambda piece: piece,
    ) -> Self:
        """Quantize a stack of as many matrices as there are experts, some at a time; `clip` as in `quantize`.

        order: from a piece of the stack, as the model has it, to [some experts, out_features, in_features].
        """
        nested = fmt.scale is not None and fmt.scale.nested is not None  # blocks of nested scales run across experts
        step = max(1, len(weight) if nested else _PIECE // max(1, weight[0].numel()))
        pieces = [quantize(order(piece).contiguous(), fmt, clip=clip) for piece in weight.detach().split(step)]
        parts = {name: torch.cat([piece.parts()[name] for piece in pieces]) for name in pieces[0].parts()}
        return cls(QuantTensor(fmt, (len(weight), *pieces[0].shape[1:]), **parts), bias)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor | None = None) -> torch.Tensor:
        """As `experts_linear`. Gradients of x and gates are supported, by torch code that dequantizes one expert at a time."""
        if torch.compiler.is_compiling():
            parts, bias = stored(self._parameters)
            return experts_of_parts(x, parts, ids, gates, bias, self.format_name, self.activation)
        if torch.is_grad_enabled() and (x.requires_grad or (gates is not None and gates.requires_grad)):
            return in_torch(ExpertsCall(x, self.weight, ids, gates, self._bias(), self.activation), torch.float32)
        return experts_linear(x, self.weight, ids, gates, bias=self._bias(), activation=self.activation)

    def _refuse(self, *args: object) -> Any:
        raise NoTensor(
            "the experts are quantized, and only halfbyte's function reads them: model.set_experts_implementation('halfbyte')"
        )

    __getitem__ = transpose = _refuse
    device = property(_refuse)

    def extra_repr(self) -> str:
        return f"{list(self.weight.shape)}, format={self.format.name}, bias={self.bias is not None}, activation={self.activation}"


def mlp(up: QuantExperts, down: QuantExperts, x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """down(up(x, ids), ids, gates), in one call unless a gradient is needed, code is compiled, or the modules have hooks."""
    compiling, has_hooks = torch.compiler.is_compiling(), any(map(_is_watched, (up, down)))
    if up.activation is None or compiling or has_hooks or (torch.is_grad_enabled() and (x.requires_grad or gates.requires_grad)):
        out: torch.Tensor = down(up(x, ids), ids, gates)
        return out
    first, last = (Projection([*m.weight.parts().values()], m.format_name, m._bias()) for m in (up, down))
    return experts_mlp(x, first, last, ids, gates, up.activation)


def _is_watched(module: torch.nn.Module) -> bool:
    """Whether a module has hooks, or another forward (accelerate's offloading)."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
