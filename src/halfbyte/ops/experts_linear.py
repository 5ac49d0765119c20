"""`experts_linear`: the projections of a mixture of experts with quantized weights; reads only the experts that are hit.

One op serves both projections. All experts are one weight [E, N, K], and the ids stay on the device: a launch needs no pointers to
experts, no token order from the host, and no shape that depends on the ids, so it can be captured in a CUDA graph. The epilogue
applies the gated activation, whose two halves are neighboring rows of the weight, or adds up the experts of a token in a fixed
order. Decoding takes one launch per projection, and one for the sum; prompts sort their tokens by expert first, and long ones
dequantize experts for a 16-bit grouped GEMM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from halfbyte.arguments import check_tensor
from halfbyte.cpu import experts as cpu
from halfbyte.device import gpu
from halfbyte.errors import InvalidArgument, Unsupported, check
from halfbyte.formats import weight_format
from halfbyte.ops import _experts_prompt, launch_cache
from halfbyte.ops import _linear_on_gpu as gemm
from halfbyte.ops._experts_prompt import Way
from halfbyte.ops._library import kernel_level, refuse_capture
from halfbyte.ops.declare import Op
from halfbyte.ops.self_check import refusal
from halfbyte.ops.small_calls import experts_error
from halfbyte.plans.gemm_mma import MOST_TOKENS
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_problem import GemmProblem, Routing
from halfbyte.plans.gemm_slabs import dequantized_rows
from halfbyte.plans.gemm_spec import MmaSpec
from halfbyte.reference import experts as reference
from halfbyte.reference.experts import KINDS, Activation, ExpertsCall
from halfbyte.tensors import QuantTensor

#: Numbers of x that are gathered at a time in act-order; each takes an index of 8 bytes.
_INDICES = 1 << 24
_LEVELS: dict[str, Callable[..., torch.Tensor]] = {"cpu": cpu.experts_linear, "reference": reference.experts_linear}


def experts_linear(
    x: torch.Tensor,
    weight: QuantTensor,
    ids: torch.Tensor,
    gates: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    activation: str | Activation | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Each token's row times the quantized weights of its experts: [T, top_k, N], or with gates their weighted sum [T, N].

    x           [T, K], one row for all experts of a token, or [T, top_k, K], one for each; fp16, bf16, fp32 or float64
    weight      [E, N, K], `halfbyte.quantize` of a stack; bias [E, N]
    ids         [T, top_k] integers: the experts of each token. One out of range raises on a CPU; on a GPU it gives zeros and adds
                nothing to the sum
    gates       [T, top_k]: the weights of the sum over a token's experts, which is computed in fp32 in the order of ids
    activation  "silu", "gelu", "gelu_tanh" or an `Activation`, for a weight whose rows alternate between the gate and the up
                projection: g0, u0, g1, u1, ... The result has N / 2 columns then
    impl        "auto"; the GPU's kernels for fp16 and bf16, "gluon" (tuned: up to 64 tokens, 512 pairs; on Hopper any) and
                "triton" (portable); "cpu", or "reference" (float64). From 96 pairs per expert in bf16, "auto" dequantizes experts
                with act-order and on Blackwell: at most 512 MiB at a time (or 128 rows of each)

    Raises `InvalidArgument` naming the argument at fault.
    """
    call = ExpertsCall(x, weight, ids, gates, bias, _activation(activation), impl)
    check_call(call)
    y: torch.Tensor = EXPERTS(call._replace(impl=kernel_level("experts_linear", impl, x)))
    return y


def experts_of_parts(
    x: torch.Tensor,
    parts: list[torch.Tensor],
    ids: torch.Tensor,
    gates: torch.Tensor | None,
    bias: torch.Tensor | None,
    fmt: str,
    activation: Activation | None,
) -> torch.Tensor:
    """`experts_linear` as compiled code calls it, see `linear_of_parts`."""
    names = {} if activation is None else {f"activation_{name}": value for name, value in activation._asdict().items()}
    tensors = {"x": x, "weight": parts, "ids": ids, "gates": gates, "bias": bias}
    y: torch.Tensor = EXPERTS.of_parts(
        {**tensors, "weight_format": fmt, **names, "impl": kernel_level("experts_linear", "auto", x)}
    )
    return y


def _activation(activation: str | Activation | None) -> Activation | None:
    if activation is None:
        return None
    whole = Activation(activation) if isinstance(activation, str) else activation  # type: ignore[arg-type]
    good = isinstance(whole, Activation) and whole.kind in KINDS and not any(v != v for v in whole[1:]) and whole.limit > 0
    check(good, f"activation={activation!r}; expected None, one of {', '.join(KINDS)}, or an Activation with a limit above 0")
    return whole


def check_call(call: ExpertsCall) -> None:
    """Raise `InvalidArgument` for arguments that no level takes."""
    x, weight, ids, gates, bias, activation = call[:6]
    stack = isinstance(weight, QuantTensor) and len(weight.shape) == 3
    what = list(weight.shape) if isinstance(weight, QuantTensor) else type(weight).__name__
    check(stack, f"weight is {what}; expected a stack [E, N, K] from halfbyte.quantize")
    experts, features, width = weight.shape
    weight_format(weight.format, "the format of weight")
    check_tensor("ids", ids, ("tokens", "top_k"), "integer", weight.device)
    tokens, top_k = ids.shape
    flat = isinstance(x, torch.Tensor) and x.ndim == 2
    check_tensor("x", x, (tokens, width) if flat else (tokens, top_k, width), device=weight.device)
    if gates is not None:
        check_tensor("gates", gates, (tokens, top_k), device=x.device)
    if bias is not None:
        check_tensor("bias", bias, (experts, features), device=x.device)
    check(activation is None or features % 2 == 0, f"weight has {features} rows; an activation takes pairs of them")
    if ids.device.type == "cpu" and not torch.compiler.is_compiling() and ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= experts:
            raise InvalidArgument(f"ids holds {low if low < 0 else high}; the weight has experts 0 to {experts - 1}")


def run(call: ExpertsCall, ids_early: bool = False) -> torch.Tensor:
    """Of checked arguments. ids_early: see `Routing`."""
    if call.impl in _LEVELS:
        refuse_capture("experts_linear", call.x.device)
        return _LEVELS[call.impl](call)
    return _run_on_gpu(call, ids_early)


EXPERTS = Op("experts_linear", ExpertsCall)
EXPERTS.register(run, ExpertsCall.new_result)


# ---------------------------------------------------------------------------------------------------------------------- the GPU


def _run_on_gpu(call: ExpertsCall, ids_early: bool = False) -> torch.Tensor:
    """Run "gluon", "triton", or "auto": the tuned kernel if it supports the call."""
    x, weight, ids, impl = call.x, call.weight, call.ids, call.impl
    if x.element_size() > 2:
        raise Unsupported(f"x is {x.dtype}; the {impl} kernel takes float16 and bfloat16; use impl='auto'")
    out = call.new_result()
    if not out.numel():
        return out
    if not ids.shape[1] or not weight.shape[0] or not weight.shape[2]:  # nothing to add up but biases
        return cpu.experts_linear(call)
    with torch.cuda.device_of(x):
        if impl == "auto" and (rows := _rows_to_dequantize(call)):
            _experts_prompt.run(call, rows, out)
            return out
        call = _dense(call)
        plan = _plan_of(call, ids_early) if impl != "triton" else "the portable kernel was requested"
        if isinstance(plan, GemmPlan):
            run_tuned = _run_tuned if isinstance(plan.spec, MmaSpec) else _experts_prompt.run
            run_tuned(call, plan, out)
        elif impl == "gluon":
            raise Unsupported(f"impl='gluon' cannot run this call: {plan}; use impl='auto', which takes the portable kernel here")
        else:
            _experts_prompt.run(call, gemm.tiles_of(_problem_of(call), x.device), out)
    return out


def _rows_to_dequantize(call: ExpertsCall) -> int:
    """Rows of each expert that "auto" dequantizes at a time; 0: codes are multiplied. Act-order would gather x for each pair."""
    rows = dequantized_rows(_problem_of(call), gpu(call.x.device.index).capability)
    return rows if rows and (call.weight.perm is not None or isinstance(_plan_of(call), str)) else 0


def _dense(call: ExpertsCall) -> ExpertsCall:
    """The call with contiguous tensors where kernels take no strides, and x gathered in the stored column order of each expert."""
    x, w, ids, gates, bias, _ = call[:6]
    if w.perm is not None:
        x = _in_stored_order(x, w.perm.long().clamp(0, w.shape[2] - 1), ids.long().clamp(0, w.shape[0] - 1))
    weight = gemm.contiguous(replace(w, perm=None), "nested", "tensor_scale")
    gates, bias = (None if t is None else t.contiguous() for t in (gates, bias))
    return call._replace(x=x, weight=weight, ids=ids.contiguous(), gates=gates, bias=bias)


def _in_stored_order(x: torch.Tensor, perm: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """x [T, K] or [T, top_k, K] as [T, top_k, K]: of each pair in the order perm [E, K] of its expert, some tokens at a time."""
    copies = x.new_empty(*experts.shape, x.shape[-1])
    step = max(1, _INDICES // copies[0].numel())
    for part, rows, numbers in zip(copies.split(step), x.split(step), experts.split(step), strict=True):
        torch.gather((rows.unsqueeze(1) if x.ndim == 2 else rows).expand_as(part), 2, perm[numbers], out=part)
    return copies


# ---------------------------------------------------------------------------------------------------------------- the tuned kernel


def _plan_of(call: ExpertsCall, ids_early: bool = False) -> GemmPlan | str:
    """How a tuned kernel runs a call, or why none does."""
    problem = _problem_of(call, ids_early)
    plan = gemm.tuned_plan(problem, [call.weight], call.x.device)
    if isinstance(plan, str) or call.impl != "auto":
        return plan
    run = _run_tuned if isinstance(plan.spec, MmaSpec) else _experts_prompt.run
    return refusal("experts_linear", plan.spec, call.x.device, lambda: experts_error(call, problem, plan, run)) or plan


def ways_of(up: ExpertsCall, down: ExpertsCall) -> tuple[Way, Way] | None:
    """How both projections multiply a prompt's sorted pairs, if both do, in blocks of one size. x of `down` is not read."""
    x, sizes = up.x, (*up.weight.shape, *down.weight.shape, *up.ids.shape)
    if up.impl != "auto" or x.element_size() != 2 or not min(sizes) or len(x) <= MOST_TOKENS:
        return None
    first, last = _way_of(up), _way_of(down)
    blocks = {_experts_prompt.block(way) for way in (first, last)} - {0}
    alike = len(blocks) < 2 and len({_experts_prompt.permuting(way) is None for way in (first, last)}) == 1
    return (first, last) if first and last and alike else None


def _way_of(call: ExpertsCall) -> Way:
    """How a prompt's sorted pairs are multiplied; 0: they are not, or x has to be gathered for each pair."""
    if rows := _rows_to_dequantize(call):
        return rows
    if call.weight.perm is not None:
        return 0
    plan = _plan_of(call)
    if isinstance(plan, str):
        return gemm.tiles_of(_problem_of(call), call.x.device)
    return 0 if isinstance(plan.spec, MmaSpec) else plan


def _problem_of(call: ExpertsCall, ids_early: bool = False) -> GemmProblem:
    experts, features, width = call.weight.shape
    tokens, top_k = call.ids.shape
    routing = Routing(experts, top_k, shared=call.x.ndim == 2, gated=call.gates is not None, ids_early=ids_early)
    return GemmProblem(((call.weight.format, features),), tokens, width, gemm.HALVES[call.x.dtype], routing, call.activation)


def _run_tuned(call: ExpertsCall, plan: GemmPlan, out: torch.Tensor) -> None:
    x = call.x.reshape(-1, call.x.shape[-1])
    if x.stride(1) != 1 or x.stride(0) % 16 or x.data_ptr() % 16 or 2 * x.stride(0) * x.shape[0] >= 2**31:
        x = x.clone(memory_format=torch.contiguous_format)
    call, w = call._replace(x=x), call.weight
    sizes = w.shape, x.stride(0), call.ids.shape[1]
    types = tuple(None if t is None else (t.dtype, t.data_ptr() % 16) for t in (call.ids, call.gates, call.bias, w.tensor_scale))
    launch_cache.launch(EXPERTS, call, plan, _launches, [out], key=(plan, x.device, sizes, types))


def _launches(
    call: ExpertsCall, plan: GemmPlan, results: Sequence[torch.Tensor], workspace: Sequence[torch.Tensor]
) -> Sequence[Any]:
    from halfbyte.kernels.linear.mma import launches
    from halfbyte.kernels.linear.ring import Routed, stack_of

    routing = Routed(call.ids, call.gates, call.weight.shape[0])
    floats, counters = workspace
    return launches(call.x, stack_of(call.weight, call.bias, results[0]), plan, floats, counters, routed=routing)
