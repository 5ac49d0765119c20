"""`experts_mlp`: both projections of a mixture of experts in one call, so that the tokens of a prompt are sorted by expert once.

experts_linear(experts_linear(x, up, ids, activation), down, ids, gates)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from halfbyte.arguments import check_tensor
from halfbyte.errors import check
from halfbyte.formats import weight_format
from halfbyte.ops import _experts_prompt, launch_cache
from halfbyte.ops import experts_linear as one
from halfbyte.ops._experts_prompt import Way
from halfbyte.ops._library import kernel_level
from halfbyte.ops.declare import Op
from halfbyte.ops.launch_cache import Signature
from halfbyte.plans.gemm_plan import GemmPlan
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

    def contiguous(self) -> MlpCall:
        """With what kernels read without strides made contiguous."""
        calls = up, down = [_experts_prompt.contiguous_call(call) for call in self.projections()]
        first, last = (Projection([*c.weight.parts().values()], c.weight.format.name, c.bias) for c in calls)
        assert down.gates is not None
        return self._replace(x=up.x, up=first, down=last, ids=up.ids, gates=down.gates)

    def new_results(self) -> list[torch.Tensor]:
        return [self.projections()[1].new_result()]


class PromptPlan(NamedTuple):
    """How both projections multiply sorted pairs. There is no workspace."""

    ways: tuple[Way, Way]
    floats: int = 0
    counters: int = 0


def _run(call: MlpCall, signature: Signature | None = None) -> torch.Tensor:
    up, down = call.projections()
    one.check_call(up)
    (experts, rows, _), (_, features, inner) = up.weight.shape, down.weight.shape
    check(down.weight.shape[0] == experts, f"down has {down.weight.shape[0]} experts; up has {experts}")
    check(2 * inner == rows, f"down takes {inner} columns; expected {rows // 2}, half of the rows of up")
    check_tensor("gates", down.gates, tuple(up.ids.shape), device=up.x.device)
    if down.bias is not None:
        check_tensor("the bias of down", down.bias, (experts, features), device=up.x.device)
    return run(call, signature)


def run(call: MlpCall, signature: Signature | None = None) -> torch.Tensor:
    """Of checked arguments: a prompt's pairs are sorted once for both projections. signature: what to store the launches by."""
    up, down = call.projections()
    with torch.cuda.device_of(call.x):
        if ways := one.ways_of(up, down):
            plan, results = PromptPlan(ways), call.new_results()
            signature = signature if all(isinstance(way, GemmPlan) for way in ways) else None
            launch_cache.launch(EXPERTS_MLP, call.contiguous(), plan, _launches, results, signature=signature)
            return results[0]
    ids = up.ids.contiguous()  # here and not between the launches, the second of which may read it before the first has ended
    return one.run(down._replace(x=one.run(up._replace(ids=ids)), ids=ids), ids_early=True)


def _launches(call: MlpCall, plan: PromptPlan, results: Sequence[torch.Tensor], workspace: Sequence[torch.Tensor]) -> Sequence[Any]:
    return _experts_prompt.both(*call.projections(), plan.ways, results[0])


def _fake(call: MlpCall) -> torch.Tensor:
    return call.projections()[1].new_result()


EXPERTS_MLP = Op("experts_mlp", MlpCall)
EXPERTS_MLP.register(_run, _fake, replays=True)
