"""Linear layers on quantized weights: the specification of `linear` and `qkv_projection`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import torch

from halfbyte.arguments import Mark, check_tensor
from halfbyte.errors import check
from halfbyte.formats import weight_format
from halfbyte.packing import unpack_codes
from halfbyte.reference.dequantize import block_scales, in_order
from halfbyte.reference.quantize import dequantize
from halfbyte.tensors import QuantTensor


class LinearCall(NamedTuple):
    """One GEMM, made once from its arguments and passed on: the declaration of the op.

    x [..., K] times one to four weights [N, K], each plus its bias [N] or None. impl: as requested, later the level that runs.
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


def factors(x: torch.Tensor, weight: QuantTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is multiplied, in float64: x [..., K] and the values of a weight [N, K], or both as integers times scales
    (`Format.rounds_x`).
    """
    if not rounds(x, weight):
        return x.double(), dequantize(weight, torch.float64)
    (c, token), (d, row) = rounded_x(x.reshape(-1, x.shape[-1])), rounded_weight(weight)
    return (c * token.double()[:, None]).view(x.shape), d * row.double()[:, None]


def rounds(x: torch.Tensor, weight: QuantTensor) -> bool:
    """Whether x [..., K] and a weight are multiplied as integers."""
    halves = (torch.float16, torch.bfloat16)
    return x.dtype in halves and x.ndim > 0 and weight.format.rounds(x.shape[:-1].numel(), x.shape[-1])


def rounded_x(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers of x [M, K], in float64, and the scales of its rows, fp32 [M]."""
    inverse, token = _scales(x.float().abs().amax(-1))
    return (x.double() * inverse.double()[:, None]).round(), token


def rounded_weight(weight: QuantTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of a weight [N, K] of 4-bit integers; a group's ratio to its row is rounded to fp16."""
    fmt, (features, _) = weight.format, weight.shape
    scales, code = block_scales(weight), fmt.code
    zeros = torch.full_like(scales, -code.lo) if weight.offsets is None else weight.offsets.float()
    inverse, row = _scales((scales.abs() * torch.maximum(zeros, 15 - zeros)).amax(-1))
    ratio = (scales * inverse[:, None]).half().double()
    unit = unpack_codes(weight.codes, code.bits).view(features, scales.shape[-1], -1) - zeros.double()[..., None]
    d = (unit * ratio[..., None]).round().view(weight.shape)
    return (d if weight.perm is None else in_order(d, weight.perm)), row


def _scales(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """127 over the largest magnitudes in fp32, at least 2^-100, and its inverse, NaN for what is not finite.

    torch computes `127 / largest` as a product of the reciprocal, which is rounded twice.
    """
    largest = largest.clamp(min=2.0**-100)
    return torch.full_like(largest, 127) / largest, torch.where(largest < torch.inf, largest / 127, torch.nan)


def linear(x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., K] times the values of weight [N, K], both rounded if it says so, in float64; result [..., N] in x's dtype."""
    x_values, values = factors(x, weight)
    y = x_values @ values.T
    if bias is not None:
        y = y + bias.double()
    return y.to(x.dtype)
