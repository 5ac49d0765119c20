"""`route`: the router of a mixture of experts, from its logits on. One launch on a GPU; torch code elsewhere."""

from __future__ import annotations

import torch

from halfbyte.arguments import check_tensor, integer, number
from halfbyte.errors import check
from halfbyte.ops._library import level, pairs_launches
from halfbyte.ops.compiling import active
from halfbyte.ops.declare import Op
from halfbyte.reference import route as reference
from halfbyte.reference.route import SCORES, RouteCall, Routing

#: What a program holds in the registers of one warp.
MOST_EXPERTS, MOST_CHOSEN = 1024, 16
#: Types that the kernel reads and writes.
_KNOWN = ("float16", "bfloat16", "float32")


def route(
    logits: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, ids int64 [T, top_k], the best first, and their gates in `dtype`: what `experts_linear` takes.

    logits  [T, E], any float type: computed in fp32, or float64 if they are. Without a finite largest logit, gates may be NaN; ids
            are experts all the same
    bias    [E], any float type: for the choice only

    The kernel, "triton", takes up to 1,024 experts and a top_k of up to 16, and no float64; "auto" runs torch code for others.
    Raises `InvalidArgument` naming the argument at fault.
    """
    check_tensor("logits", logits, ("T", "E"))
    experts = logits.shape[1]
    if bias is not None:
        check_tensor("bias", bias, (experts,), device=logits.device)
    _check_routing(routing, experts)
    check(dtype.is_floating_point and dtype.itemsize > 1, f"dtype={dtype}; expected fp16, bf16, fp32 or float64")
    best = level("route", impl, logits.device)
    call = RouteCall(logits, routing, bias, str(dtype).removeprefix("torch."), best)
    if best == "triton" and (refusal := _refusal(call)):
        check(impl == "auto", f"impl={impl!r}: {refusal}; use impl='auto'")
        call = call._replace(impl="reference")
    ids, gates = ROUTE(call)
    return ids, gates


def _check_routing(routing: Routing, experts: int) -> None:
    top_k, score, eps, scale, groups, top_groups, best = routing
    check(score in SCORES, f"routing.score={score!r}; choose one of: {', '.join(SCORES)}")
    number("routing.scale", scale, -3e38, 3e38, "a finite number")
    if eps is not None:
        number("routing.eps", eps, 0, 1, "None, or a number from 0 to 1")
    integer("routing.groups", groups, 1, experts, f"a divisor of the {experts} experts")
    check(experts % groups == 0, f"routing.groups={groups}; expected a divisor of the {experts} experts")
    integer("routing.top_groups", top_groups, 1, groups, f"1 to {groups} groups")
    width = experts // groups
    integer("routing.best", best, 1, width, f"1 to {width} experts of a group")
    integer("routing.top_k", top_k, 1, top_groups * width, f"1 to {top_groups * width} experts, in the groups that are chosen")


def _refusal(call: RouteCall) -> str:
    """Why the kernel does not take a call; "" where it does."""
    types = [call.dtype, *(str(t.dtype).removeprefix("torch.") for t in (call.logits, call.bias) if t is not None)]
    if any(name not in _KNOWN for name in types):
        return "the kernel of route takes and gives float16, bfloat16 and float32"
    if call.logits.shape[1] > MOST_EXPERTS or call.routing.top_k > MOST_CHOSEN:
        sizes = f"{call.routing.top_k} of {call.logits.shape[1]} experts"
        return f"the kernel of route takes up to {MOST_CHOSEN} of {MOST_EXPERTS:,} experts; this call has {sizes}"
    return ""


def _run(call: RouteCall) -> tuple[torch.Tensor, torch.Tensor]:
    ids, gates = _fake(call)
    if not ids.numel():
        return ids, gates
    if call.impl != "triton":
        return reference.route(call)
    from halfbyte.kernels.block.route import launch

    dense = call.logits if call.logits.stride(1) == 1 else call.logits.contiguous()
    bias = None if call.bias is None else call.bias.contiguous()
    with torch.cuda.device_of(dense):
        launch(call._replace(logits=dense, bias=bias), ids, gates, pairs_launches(dense.device))
    if active():  # nothing ran, and what reads ids takes them for experts
        ids.zero_()
    return ids, gates


def _fake(call: RouteCall) -> tuple[torch.Tensor, torch.Tensor]:
    shape, device = (call.logits.shape[0], call.routing.top_k), call.logits.device
    ids = torch.empty(shape, dtype=torch.int64, device=device)
    return ids, torch.empty(shape, dtype=getattr(torch, call.dtype), device=device)


ROUTE = Op("route", RouteCall)
ROUTE.register(_run, _fake)
