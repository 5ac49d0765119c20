"""What `make compile-check` compiles of the kernels for mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from halfbyte.device import GPU, H200, Capability
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.kernels.compiling import CAPABILITIES, Configuration, empty, empty_weight, of_capability, recorded
from halfbyte.kernels.dequantize import launch_experts
from halfbyte.kernels.linear import experts_prompt, experts_sort, experts_wgmma, kernel_of, portable
from halfbyte.kernels.linear.ring import Routed, stack_of
from halfbyte.plans.gemm import tuned_gemm
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_portable import portable_tiles
from halfbyte.plans.gemm_problem import GemmProblem, Routing
from halfbyte.plans.gemm_wgmma import PairsSpec
from halfbyte.reference.experts import Activation, ExpertsCall

_OAI = Activation("silu", 1.702, 7.0, 1.0)
#: (E, top_k, N, K, activation, what else) of the two projections of Qwen3-30B-A3B, of GPT-OSS-20B, and of
#: DeepSeek-V2-Lite, whose second has an odd number of groups of 128.
_QWEN = ((128, 8, 1536, 2048, Activation("silu"), ""), (128, 8, 2048, 768, None, "gates"))
_OSS = ((32, 4, 5760, 2880, _OAI, "bias"), (32, 4, 2880, 2880, None, "bias gates"))
_LITE = ((64, 6, 2816, 2048, Activation("silu"), ""), (64, 6, 2048, 1408, None, "gates"))
#: (format, tokens, projection): every format for decoding, every kind of work, and prompts.
_CASES = (
    *((name, 1, projection) for name in WEIGHT_FORMATS for projection in _QWEN),
    *(("int4_g128", tokens, projection) for tokens in (16, 1024) for projection in _QWEN),
    *(("mxfp4", tokens, projection) for tokens in (1, 16, 64, 1024) for projection in _OSS),
    ("nvfp4", 1024, (128, 8, 1536, 2048, Activation("gelu"), "fp16")),
    ("nf4", 4096, (128, 8, 2048, 768, None, "gates fp16")),
    ("int4_g32", 16, (8, 2, 4096, 4096, Activation("gelu_tanh"), "fp16 bias")),
)


#: The same for the tuned kernel: blocks of 1 to 16 pairs, every kind of code and scale, every size of its table; with gates as
#: the second of two projections.
_TUNED = (
    *((name, 1, projection) for name in ("int4_g64", "int4_sym_g128", "int8_col", "nf4", "nvfp4") for projection in _QWEN),
    *(("int4_g128", tokens, projection) for tokens in (1, 16) for projection in _QWEN),
    ("int4_sym_g32", 4, _QWEN[0]),
    *(("int4_g32", tokens, projection) for tokens in (16, 64) for projection in _QWEN),
    *(("mxfp4", tokens, projection) for tokens in (1, 4, 16, 64) for projection in _OSS),
    ("nvfp4", 64, _OSS[1]),
    ("int4_g128", 1, (8, 2, 4096, 14336, None, "gates")),
    ("int4_g128", 64, (8, 2, 28672, 4096, Activation("silu"), "fp16")),
    ("mxfp4", 16, (8, 2, 28672, 4096, Activation("gelu"), "bias")),
    ("mxfp4", 1, (8, 2, 4096, 14336, None, "gates fp16")),
    ("int8_g128", 16, (8, 2, 4096, 14336, Activation("gelu_tanh"), "gates bias fp16")),
)


#: Those of other GPUs than Hopper's: codes, scales and blocks of each kind.
_ELSEWHERE = (
    ("int4_sym_g128", 1, _QWEN[0]),
    ("int8_col", 1, _QWEN[1]),
    ("nf4", 1, _QWEN[0]),
    ("nvfp4", 1, _QWEN[1]),
    ("mxfp4", 16, _OSS[0]),
    ("int4_g32", 64, _QWEN[1]),
)


#: What surrounds a grouped GEMM, and the experts it is given.
_PROMPTS = (
    *(("int4_g128", projection) for projection in _QWEN),
    *(("mxfp4", projection) for projection in _OSS),
    ("nvfp4", (8, 2, 28672, 4096, Activation("gelu"), "")),
    ("nf4_dq", (8, 2, 4096, 14336, Activation("gelu_tanh"), "gates bias")),
)


#: (format, tokens, both projections, what else) of the kernels over sorted pairs: blocks of 32 to 256.
_SORTED = (
    *((name, tokens, _QWEN, half) for name in WEIGHT_FORMATS for tokens, half in ((384, "fp16"), (512, ""), (2048, ""))),
    *(("mxfp4", tokens, _OSS, "") for tokens in (128, 256, 512, 2048)),
    *((name, 256, _LITE, "") for name in ("int4_g128", "int8_g128")),
)


def configurations() -> Iterator[Configuration]:
    """The cases' launches, which are the same on every GPU of 132 SMs; the tuned kernel's on an H100."""
    yield from _prompts()
    yield from _sorted()
    for name, tokens, (experts, top_k, features, width, activation, options) in _CASES:
        call = _call(name, tokens, experts, top_k, features, width, activation, options)
        tiles, pairs = portable_tiles(_problem(call), H200), tokens * top_k
        y = empty(pairs, features // (1 if activation is None else 2), dtype=call.x.dtype)
        given = ([call.x], [call.weight], [call.bias], [y], tiles, empty(1, dtype=torch.float32), empty(1))
        order = None if "gates" in options else empty(pairs)  # the second projection's x is sorted
        launch = partial(portable.launch, *given, empty(1 + tiles.blocks, 4), order, activation)
        yield from recorded(_name("experts", name, tokens, call, options), launch, may_spill="tiles were chosen for sm_90")
    for case in _TUNED:
        yield from _tuned(*case, (9, 0))
    for case, capability in product(_ELSEWHERE, CAPABILITIES):
        if capability != (9, 0):
            yield from _tuned(*case, capability)


def _tuned(name: str, tokens: int, projection: Any, capability: Capability) -> Iterator[Configuration]:
    """What a projection by the tuned kernel would compile on a GPU of 132 SMs."""
    experts, top_k, features, width, activation, options = projection
    call = _call(name, tokens, experts, top_k, features, width, activation, options)
    plan = tuned_gemm(_problem(call, ids_early=call.gates is not None), GPU("", 132, capability), use_pdl=True)
    if not isinstance(plan, GemmPlan):
        return
    full, workspace = _name("tuned-experts", name, tokens, call, options), (empty(1, dtype=torch.float32), empty(1))
    full, why = (full, "") if capability == (9, 0) else (f"{full}-{of_capability(capability)}", "tiles were chosen for sm_90")
    weights, routed = stack_of(call.weight, call.bias, call.new_result()), Routed(call.ids, call.gates, experts)
    for launch in kernel_of(plan).launches(call.x, weights, plan, *workspace, routed=routed):
        yield from recorded(full, launch, targets=(10 * capability[0] + capability[1],), may_spill=why)


def _sorted() -> Iterator[Configuration]:
    for name, tokens, projections, half in _SORTED:
        up, down = (_call(name, tokens, *one[:5], f"{one[5]} {half}") for one in projections)
        first, last = (tuned_gemm(_problem(call), H200, use_pdl=True) for call in (up, down))
        if isinstance(first, str) or isinstance(last, str):
            continue
        full, few = _name("sorted-experts", name, tokens, up, half), isinstance(first.spec, PairsSpec)
        cases = [("", up, first), ("-last", down, last)]
        if few:
            _, gather = experts_wgmma.sorted_rows(up.x, empty(up.ids.numel()), first.spec)
            yield from recorded(full, gather, targets=(90,))
            epilogue = replace(first.spec.epilogue, order=last.spec)
            cases.append(("-onward", up, replace(first, spec=replace(first.spec, epilogue=epilogue))))
        for kind, call, plan in cases:
            x, y = (empty(call.ids.numel(), k, dtype=call.x.dtype) for k in (call.weight.shape[2], call.weight.shape[1]))
            stack, blocks = stack_of(call.weight, call.bias, y), empty(1 + plan.blocks, 4)
            workspace = (call.weight.shape[2], blocks) if few else (None, None, None, blocks)
            for launch in kernel_of(plan).launches(x, stack, plan, *workspace):
                why = "8 bytes with Triton 3.7, none with 3.6" if few else ""
                if plan.spec.tile == 256 and plan.spec.weights[0].group in (0, 16):
                    why = "up to 88 bytes: 16 warps have 112 registers a thread"
                yield from recorded(full + kind, launch, targets=(90,), may_spill=why)


def _prompts() -> Iterator[Configuration]:
    for experts, top_k in ((128, 8), (32, 4)):
        pairs = 8192 * top_k
        given = (*(empty(n) for n in (pairs, pairs, experts + 1, pairs)),)
        launches = partial(experts_sort.launches, empty(pairs, dtype=torch.int64), *given)
        for launch in launches():
            yield from recorded(f"experts-sort-{experts}", launch)
        for block in (32, 256):
            *_, last = launches(empty(experts + pairs // block, 4), block)  # the others are the same
            yield from recorded(f"experts-sort-{experts}-{block}", last)
        few = (empty(n) for n in (256, 256, experts + 1, 256))
        (launch,) = experts_sort.launches(empty(256, dtype=torch.int64), *few, empty(experts + 16, 4), 16)
        yield from recorded(f"experts-sort-{experts}-few", launch)
    yield from recorded("experts-clear", experts_prompt.clear(empty(1024, 2944, dtype=torch.bfloat16), 2880))
    for name, (experts, top_k, features, width, activation, options) in _PROMPTS:
        call = _call(name, 8192, experts, top_k, features, width, activation, options)
        pairs, y = empty(8192 * top_k), empty(8192 * top_k, features, dtype=torch.bfloat16)
        full = _name("experts-prompt", name, 8192, call, options)
        yield from recorded(full, experts_prompt.gather(call, pairs, empty(8192 * top_k, width, dtype=torch.bfloat16)))
        yield from recorded(full, experts_prompt.combine(call, y, pairs, 0, call.new_result()))
        if call.gates is None:
            by_expert = call._replace(ids=empty(8192 * top_k, 1))
            inner = empty(8192 * top_k, features // 2, dtype=torch.bfloat16)
            yield from recorded(f"{full}-sorted", experts_prompt.combine(by_expert, y, None, 0, inner))
    for name, act_order in (*((name, False) for name in WEIGHT_FORMATS), ("int4_g128", True)):
        stack, values = (
            empty_weight(WEIGHT_FORMATS[name], (128, 1536, 2048), act_order),
            empty(128, 1024, 2048, dtype=torch.bfloat16),
        )
        given = (stack, empty(129), values, 0)
        yield from recorded(f"experts-{name}{'-act-order' * act_order}", partial(launch_experts, *given))


def _call(
    name: str, tokens: int, experts: int, top_k: int, features: int, width: int, activation: Activation | None, options: str
) -> ExpertsCall:
    """A call on tensors without memory."""
    gated = "gates" in options
    dtype = torch.float16 if "fp16" in options else torch.bfloat16
    return ExpertsCall(
        empty(tokens * (top_k if gated else 1), width, dtype=dtype),
        empty_weight(WEIGHT_FORMATS[name], (experts, features, width)),
        empty(tokens, top_k, dtype=torch.int64),
        empty(tokens, top_k, dtype=dtype) if gated else None,
        empty(experts, features, dtype=dtype) if "bias" in options else None,
        activation,
    )


def _problem(call: ExpertsCall, ids_early: bool = False) -> GemmProblem:
    (tokens, top_k), gated, half = call.ids.shape, call.gates is not None, "fp16" if call.x.dtype is torch.float16 else "bf16"
    experts, features, width = call.weight.shape
    routing = Routing(experts, top_k, shared=not gated, gated=gated, ids_early=ids_early)
    return GemmProblem(((call.weight.format, features),), tokens, width, half, routing, call.activation)


def _name(kernel: str, name: str, tokens: int, call: ExpertsCall, options: str) -> str:
    kind = "" if call.activation is None else call.activation.kind
    return "-".join([kernel, name, f"T{tokens}", "x".join(map(str, call.weight.shape)), kind, *options.split()])
