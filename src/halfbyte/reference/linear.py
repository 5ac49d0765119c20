"""Linear layers on quantized weights: the specification of `linear` and `qkv_projection`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import torch

from halfbyte.arguments import Mark, check_tensor
from halfbyte.errors import check
from halfbyte.formats import weight_format
from halfbyte.reference.quantize import dequantize
from halfbyte.tensors import QuantTensor


class LinearCall(NamedTuple):
    """One GEMM, made once from its arguments and passed on: the declaration of the op.

    x [..., K] times one to three weights [N, K], each plus its bias [N] or None. impl: as requested, later the level that runs.
    """

    x: Annotated[torch.Tensor, Mark.DIFFERENTIABLE]
    weights: Sequence[QuantTensor]
    biases: Annotated[Sequence[torch.Tensor | None], Mark.DIFFERENTIABLE]
    impl: str = "auto"
    row_invariant: bool = False

    @property
    def replayable(self) -> bool:
        """Whether an unchecked call could be one launch of a tuned kernel like an earlier one."""
        return not self.row_invariant and self.impl in ("auto", "gluon") and len(self.weights) == len(self.biases)

    def check(self, names: Sequence[str]) -> None:
        """Raise `InvalidArgument` naming the argument at fault. names: of weights, followed by "weight", and of biases."""
        for name, weight, bias in zip(names, self.weights, self.biases, strict=False):
            _check_weight(self.x, weight, bias, f"{name}weight", f"{name}bias")

    def new_results(self) -> list[torch.Tensor]:
        """Memory for [..., N] of each weight."""
        return [self.x.new_empty(*self.x.shape[:-1], w.shape[0]) for w in self.weights]


def _check_weight(x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None, weight_name: str, bias_name: str) -> None:
    check(
        isinstance(weight, QuantTensor), f"{weight_name} is {type(weight).__name__}; expected a QuantTensor from halfbyte.quantize"
    )
    check(len(weight.shape) == 2, f"{weight_name} has shape {list(weight.shape)}; expected [N, K]")
    out_features, in_features = weight.shape
    weight_format(weight.format, f"the format of {weight_name}")
    leading: Sequence[int | str] = x.shape[:-1] if isinstance(x, torch.Tensor) else ["..."]
    check_tensor("x" if weight_name == "weight" else f"x (for {weight_name})", x, (*leading, in_features), device=weight.device)
    if bias is not None:
        check_tensor(bias_name, bias, (out_features,), device=x.device)


def linear(x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., K] times the values of weight [N, K], in float64; result [..., N] in x's dtype."""
    y = x.double() @ dequantize(weight, torch.float64).T
    if bias is not None:
        y = y + bias.double()
    return y.to(x.dtype)
