"""`experts_mlp`: both projections of a mixture of experts in one call, so that the tokens of a prompt are sorted by expert once.

experts_linear(experts_linear(x, up, ids, activation), down, ids, gates)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from halfbyte.arguments import check_tensor
from halfbyte.errors import check
from halfbyte.formats import weight_format
from halfbyte.ops import experts_linear as one
from halfbyte.ops._library import define
from halfbyte.reference.experts import Activation, ExpertsCall
from halfbyte.tensors import QuantTensor, weight_of


class Projection(NamedTuple):
    """A projection of all experts: the parts of its weight [E, N, K], the name of their format, and bias [E, N]."""

    parts: list[torch.Tensor]
    format: str
    bias: torch.Tensor | None = None

    def weight(self) -> QuantTensor:
        """The parts as one weight."""
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
    kind, *constants = activation
    y: torch.Tensor = _op(
        *(x, up.parts, down.parts, ids, gates, up.bias, down.bias, up.format, down.format),
        *(kind, constants, one.level_of("auto", x)),
    )
    return y


def _calls(*flat: Any) -> tuple[ExpertsCall, ExpertsCall]:
    """Both calls that the op's arguments are; the second one's x is to come."""
    x, up, down, ids, gates, up_bias, down_bias, up_format, down_format, kind, constants, _ = flat
    first = ExpertsCall(x, Projection(up, up_format).weight(), ids, None, up_bias, Activation(kind, *constants))
    return first, ExpertsCall(x, Projection(down, down_format).weight(), ids, gates, down_bias)


def _run(*flat: Any) -> torch.Tensor:
    up, down = _calls(*flat)
    one.check_call(up)
    (experts, rows, _), (_, features, inner) = up.weight.shape, down.weight.shape
    check(down.weight.shape[0] == experts, f"down has {down.weight.shape[0]} experts; up has {experts}")
    check(2 * inner == rows, f"down takes {inner} columns; expected {rows // 2}, half of the rows of up")
    check_tensor("gates", down.gates, tuple(up.ids.shape), device=up.x.device)
    if down.bias is not None:
        check_tensor("the bias of down", down.bias, (experts, features), device=up.x.device)
    return one.run_both(up, down, flat[-1])


def _fake(*flat: Any) -> torch.Tensor:
    return _calls(*flat)[1].new_result()


_op = define(
    "experts_mlp(Tensor x, Tensor[] up, Tensor[] down, Tensor ids, Tensor gates, Tensor? up_bias, Tensor? down_bias, "
    "str up_format, str down_format, str activation, float[] constants, str level) -> Tensor",
    _run,
    _fake,
)
