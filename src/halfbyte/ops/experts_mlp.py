"""`experts_mlp`: both projections of a mixture of experts in one call, so that the tokens of a prompt are sorted by expert once.

experts_linear(experts_linear(x, up, ids, activation), down, ids, gates)
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from halfbyte.arguments import check_tensor
from halfbyte.errors import check
from halfbyte.formats import weight_format
from halfbyte.ops import experts_linear as one
from halfbyte.ops._library import kernel_level
from halfbyte.ops.declare import Op
from halfbyte.reference.experts import Activation, ExpertsCall
from halfbyte.tensors import QuantTensor, weight_of


class Projection(NamedTuple):
    """A projection of all experts: the parts of its weight [E, N, K], the name of their format, and bias [E, N]."""

    parts: list[torch.Tensor]
    format: str
    bias: torch.Tensor | None = None

    def weight(self) -> QuantTensor:
        return weight_of(weight_format(self.format), self.parts)


def experts_mlp(
    x: torch.Tensor, up: Projection, down: Projection, ids: torch.Tensor, gates: torch.Tensor, activation: Activation
) -> torch.Tensor:
    """The weighted sum of the experts of each token, [T, hidden size].

    x           [T, hidden size]; fp16, bf16, fp32 or float64
    up, down    gate and up rows that alternate, [E, 2 * inner, hidden size]; and [E, hidden size, inner]
    ids, gates  [T, top_k], as in `experts_linear`

    Raises `InvalidArgument` naming the argument at fault.
    """
    y: torch.Tensor = EXPERTS_MLP(MlpCall(x, up, down, ids, gates, activation, kernel_level("experts_linear", "auto", x)))
    return y


class MlpCall(NamedTuple):
    """One call of `experts_mlp`: the declaration of the op."""

    x: torch.Tensor
    up: Projection
    down: Projection
    ids: torch.Tensor
    gates: torch.Tensor
    activation: Activation
    impl: str

    def projections(self) -> tuple[ExpertsCall, ExpertsCall]:
        """Both as calls of `experts_linear`; the second one's x is to come."""
        up = ExpertsCall(self.x, self.up.weight(), self.ids, None, self.up.bias, self.activation, self.impl)
        return up, ExpertsCall(self.x, self.down.weight(), self.ids, self.gates, self.down.bias, None, self.impl)


def _run(call: MlpCall) -> torch.Tensor:
    up, down = call.projections()
    one.check_call(up)
    (experts, rows, _), (_, features, inner) = up.weight.shape, down.weight.shape
    check(down.weight.shape[0] == experts, f"down has {down.weight.shape[0]} experts; up has {experts}")
    check(2 * inner == rows, f"down takes {inner} columns; expected {rows // 2}, half of the rows of up")
    check_tensor("gates", down.gates, tuple(up.ids.shape), device=up.x.device)
    if down.bias is not None:
        check_tensor("the bias of down", down.bias, (experts, features), device=up.x.device)
    return one.run_both(up, down)


def _fake(call: MlpCall) -> torch.Tensor:
    return call.projections()[1].new_result()


EXPERTS_MLP = Op("experts_mlp", MlpCall)
EXPERTS_MLP.register(_run, _fake)
