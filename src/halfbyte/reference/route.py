"""The router of a mixture of experts, from its logits on: the specification of `route`."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import torch

from halfbyte.arguments import Mark

#: The functions that `Routing.score` names.
SCORES = ("softmax", "sigmoid")


class Routing(NamedTuple):
    """How a router chooses top_k of E experts by their logits, and weights them.

        s = score(logits)                      over all experts
        gates = scale * s / (sum(s) + eps)     of those that are chosen; without eps: scale * s

    They are the largest of s + bias, or of the logits where there is neither a bias nor a choice of groups: scores may round to one
    number. Experts are `groups` groups of neighbors; only those of the `top_groups` best may be chosen, by the sum of the `best`
    largest s + bias of each. Of equal numbers the first is taken; NaN is above all, as in `torch.topk`.
    """

    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    eps: float | None = None
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    best: int = 1


class RouteCall(NamedTuple):
    """One call of `route`, see there: the declaration of the op. dtype: that of the gates, by its name in torch."""

    logits: Annotated[torch.Tensor, Mark.DIFFERENTIABLE]
    routing: Routing
    bias: torch.Tensor | None = None
    dtype: str = "float32"
    impl: str = "auto"


def route(call: RouteCall) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int64, gates) [T, top_k] of logits [T, E], in fp32, or float64 if the logits are."""
    wide = call.logits if call.logits.dtype is torch.float64 else call.logits.float()
    scores = scores_of(wide, call.routing)
    ids = choice(wide, scores, call.routing, call.bias)
    return ids.contiguous(), gates_of(scores, ids, call.routing).to(getattr(torch, call.dtype))


def scores_of(logits: torch.Tensor, routing: Routing) -> torch.Tensor:
    """s [T, E]."""
    return logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()


def choice(logits: torch.Tensor, scores: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> torch.Tensor:
    """The experts [T, top_k] that are chosen, the best first."""
    if bias is None and routing.groups == 1:
        return _order(logits)[:, : routing.top_k]
    keys = scores if bias is None else scores + bias.to(scores.dtype)
    by_group = keys.unflatten(1, (routing.groups, -1))
    groups = _order(by_group.topk(routing.best).values.sum(-1))[:, : routing.top_groups]
    is_open = torch.zeros_like(by_group[..., 0], dtype=torch.int8).scatter(1, groups, 1)
    order = _order(keys)
    first = _order(is_open.repeat_interleave(by_group.shape[2], 1).gather(1, order))
    return order.gather(1, first)[:, : routing.top_k]


def gates_of(scores: torch.Tensor, ids: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The gates of experts `ids`."""
    gates = scores.gather(1, ids)
    if routing.eps is not None:
        gates = gates / (gates.sum(-1, keepdim=True) + routing.eps)
    return gates * routing.scale


def _order(keys: torch.Tensor) -> torch.Tensor:
    """The columns of each row, the largest first; of equal ones the first."""
    return keys.sort(dim=-1, descending=True, stable=True).indices
