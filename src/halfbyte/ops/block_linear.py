"""Projections of a decoder block with what surrounds them, in one launch each where a tuned kernel runs, for M up to 16.

Elsewhere the launches of `linear`, `projections`, `add_norm`, `norm_rows` and `gated` one by one, with their rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from halfbyte.arguments import check_tensor
from halfbyte.cpu import block as cpu
from halfbyte.errors import InvalidArgument, check
from halfbyte.ops import _linear_on_gpu as gpu
from halfbyte.ops._library import can_bypass_dispatcher, can_bypass_on_cpu, level
from halfbyte.ops.block import add_norm, check_norm, gated, norm_rows
from halfbyte.ops.linear import linear, projections
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_spec import Epilogue, MmaSpec
from halfbyte.reference.block import ACTIVATIONS, Norm
from halfbyte.reference.experts import Activation
from halfbyte.reference.linear import LinearCall
from halfbyte.tensors import QuantTensor


class Unscaled(NamedTuple):
    """norm(hidden) without the factor 1 / sqrt(mean(hidden^2) + eps) of each row, which the GEMM that follows applies.

    hidden    [..., N]
    weighted  [..., N], hidden * norm.weight (1 + weight for "offset"), rounded once
    squares   fp32 [parts, M], sums of squares of parts of each row of hidden
    """

    hidden: torch.Tensor
    weighted: torch.Tensor
    squares: torch.Tensor
    norm: Norm

    def normalized(self) -> torch.Tensor:
        """norm(hidden) [..., N], by a launch of its own."""
        return norm_rows([self.hidden], [self.norm])[0]


#: Rows with a norm applied, or with a factor of it left.
Rows = torch.Tensor | Unscaled


def add_projection(
    x: torch.Tensor,
    weight: QuantTensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    before: Norm | None,
    *,
    multiplier: float = 1.0,
) -> tuple[torch.Tensor, Rows | None]:
    """hidden = residual + multiplier * (x W^T + bias), and before(hidden): x [..., K], weight [N, K], residual [..., N].

    hidden has the bits of `linear` and `add_norm`. With `before` None the second result is None; in bf16, where one launch does
    it all, it is `Unscaled`. Raises `InvalidArgument` naming the argument at fault.
    """
    own = None if before is None else before.weight
    if _runs_on_cpu(x, bias, residual, own) and (sums := cpu.add_projection(x, weight, bias, residual, before, multiplier)):
        return sums
    call = LinearCall(x, (weight,), (bias,))
    call.check(("",))
    check_tensor("residual", residual, (*x.shape[:-1], weight.shape[0]), device=x.device)
    check(residual.dtype is x.dtype, f"residual is {residual.dtype} and x {x.dtype}; they must have the same type")
    if before is not None:
        check_norm("before", before, residual)
    plan = _plan(call, residual, own)
    # fp16 could overflow in hidden * weight.
    if plan is None or not (before is None or x.dtype is before.weight.dtype is torch.bfloat16):
        return add_norm(linear(x, weight, bias), residual, before, multiplier=multiplier)
    residual = residual.contiguous()
    hidden = torch.empty_like(residual)
    if before is None:
        gpu.run_with(Epilogue(adds=True, multiplier=multiplier), call, plan, [hidden], residual=residual)
        return hidden, None
    rows = Unscaled(hidden, torch.empty_like(hidden), x.new_empty(plan.tiles, _count(x), dtype=torch.float32), before)
    epilogue = Epilogue(adds=True, multiplier=multiplier, norm=before.kind)
    around = {"residual": residual, "weight": before.weight, "weighted": rows.weighted, "own_squares": rows.squares}
    gpu.run_with(epilogue, call, plan, [hidden], **around)
    return hidden, rows


def projected(x: Rows, weights: Sequence[QuantTensor], biases: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor]:
    """`projections` of rows, [..., N] of each weight."""
    if isinstance(x, torch.Tensor):
        outs = cpu.projections(x, weights, biases) if _runs_on_cpu(x, *biases) else None
        return projections(x, weights, biases) if outs is None else outs
    call = LinearCall(x.weighted, weights, biases)
    plan = _plan(call)
    if plan is None:
        return projections(x.normalized(), weights, biases)
    results = call.new_results()
    gpu.run_with(_scaling(x), call, plan, results, squares=x.squares)
    return results


def gated_projection(
    x: Rows, weights: Sequence[QuantTensor], biases: Sequence[torch.Tensor | None], activation: str
) -> torch.Tensor:
    """activation(gate) * up [..., N] of rows [..., K]: gate and up their products with two weights [N, K], plus biases [N].

    It has the bits of `projected` and `gated` unless the plan splits tiles along K. Raises `InvalidArgument` naming the argument
    at fault.
    """
    check(len(weights) == len(biases) == 2, f"{len(weights)} weights and {len(biases)} biases were given; pass two of each")
    if activation not in ACTIVATIONS:
        raise InvalidArgument(f"activation={activation!r}; choose one of: {', '.join(ACTIVATIONS)}")
    if isinstance(x, torch.Tensor) and _runs_on_cpu(x, *biases):
        product = cpu.gated_projection(x, weights, biases, activation)
        if product is not None:
            return product
    call = LinearCall(x if isinstance(x, torch.Tensor) else x.weighted, weights, biases)
    call.check(("gate ", "up "))
    check(weights[0].shape == weights[1].shape, f"up has shape {list(weights[1].shape)} and gate {list(weights[0].shape)}")
    plan = _plan(call, alternating=True)
    if plan is None:
        gate, up = projected(x, weights, biases)
        return gated(gate, up, activation)
    out = call.new_results()[0]
    squares = {} if isinstance(x, torch.Tensor) else {"squares": x.squares}
    epilogue = replace(_scaling(x), activation=Activation(activation))  # type: ignore[arg-type]
    gpu.run_with(epilogue, call, plan, [out], **squares)
    return out


def halves(weight: QuantTensor, bias: torch.Tensor | None) -> tuple[list[QuantTensor], list[torch.Tensor | None]]:
    """The weights and biases of gate and up, views of one weight [2 N, K] without double quantization, and of its bias."""
    n, width = weight.shape[0] // 2, weight.shape[1]
    rows = [slice(0, n), slice(n, 2 * n)]
    parts = weight.parts()
    own = [{name: t if name in ("tensor_scale", "perm") else t[r] for name, t in parts.items()} for r in rows]
    return [QuantTensor(weight.format, (n, width), **p) for p in own], [None if bias is None else bias[r] for r in rows]


def _scaling(x: Rows) -> Epilogue:
    return Epilogue() if isinstance(x, torch.Tensor) else Epilogue(parts=len(x.squares), eps=x.norm.eps)


def _count(x: torch.Tensor) -> int:
    return x.numel() // x.shape[-1]


def _runs_on_cpu(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether the ops run their `cpu` level, and may skip the dispatcher."""
    return can_bypass_on_cpu(x, *others) and level("linear", "auto", x.device) == "cpu"


def runs_loops(hidden: torch.Tensor) -> bool:
    """Whether a block's step may be compiled loops, for rows [B, 1, N] on a CPU."""
    is_step = hidden.dtype in cpu.NUMBERS and hidden.ndim == 3 and hidden.shape[1] == 1 and hidden.is_contiguous()
    return is_step and _runs_on_cpu(hidden)


def _plan(call: LinearCall, *others: torch.Tensor | None, alternating: bool = False) -> GemmPlan | None:
    """How one launch of the kernel for small M runs a call and what surrounds it; None where it does not."""
    x = call.x
    if not x.numel() or not can_bypass_dispatcher(x, *call.biases, *others) or level("linear", "auto", x.device) != "gluon":
        return None
    with torch.cuda.device_of(x):
        plan = gpu.plan_of(call._replace(x=x.reshape(-1, x.shape[-1])), alternating)
    if not isinstance(plan, GemmPlan) or not isinstance(plan.spec, MmaSpec):
        return None
    # Odd rows of scales that begin 2 bytes off a multiple of 4 are not those of one weight.
    return None if alternating and (plan.spec.odd_scales or plan.spec.odd_zeros) else plan
