"""The small cases that kernels check themselves on: the emulated kernel of a plan for a whole GPU passes its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulation import ORDERS, _sorted_by_torch, machine
from gpu_cases import Call, Case, Variant, build

import halfbyte as hb
from halfbyte.device import GPU, H200
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.kv_buffer import AttentionOptions, DecodeCall
from halfbyte.ops import _experts_prompt, _linear_on_gpu, decode_attention, small_calls
from halfbyte.ops import experts_linear as experts_op
from halfbyte.plans.decode_attention import gluon_plan, plans_of
from halfbyte.plans.decode_problem import problem_of
from halfbyte.plans.decode_spec import DecodePlan
from halfbyte.plans.gemm import tuned_gemm
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_problem import GemmProblem, Routing
from halfbyte.plans.gemm_spec import MmaSpec
from halfbyte.reference.experts import Activation, ExpertsCall
from halfbyte.reference.linear import LinearCall

ADA = GPU("NVIDIA GeForce RTX 4090", 128, (8, 9))
#: Format, rows, features, width, GPU.
PRODUCTS = (
    ("int4_g128", 1, (4096,), 4096, ADA),
    ("int4_g128", 1, (6144,), 14336, ADA),  # tiles are split
    ("nf4", 8, (4096, 1024, 1024), 1088, ADA),
    ("nvfp4", 16, (1000,), 2112, ADA),
    ("int4_sym_g32", 33, (4096,), 4096, H200),
    ("int4_g128", 24, (20000,), 1152, H200),
    ("int8_col", 300, (1024,), 1040, H200),
    ("int4_sym_g128", 192, (128,), 4096, H200),
)
ATTENTION = {
    "int4": Case(Variant("int4", "int4", group=8), 2, (900, 7)),
    "channels in pages, starts": Case(
        Variant("int8_channel", "int8", page=64, group=2, options=frozenset({"starts", "sinks"})), 2, (130, 31)
    ),
    "tokens first, windows": Case(
        Variant("int4_g32", "int4_g32", layout="BTHD", queries=3, options=frozenset({"window", "alibi"})), 2, (400, 5)
    ),
    "recent tokens, rotated": Case(Variant("int4", "int8", exact=(4, 16), options=frozenset({"rotate"})), 1, (300,)),
    "128 rows": Case(Variant("int8", "int8", group=16, queries=8), 1, (300, 9)),
}


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("case", PRODUCTS, ids=lambda c: f"{c[0]}-{c[1]}x{','.join(map(str, c[2]))}x{c[3]}")
def test_products_check_themselves(case: tuple[str, int, tuple[int, ...], int, GPU]) -> None:
    name, rows, features, width, gpu = case
    problem = GemmProblem(tuple((WEIGHT_FORMATS[name], n) for n in features), rows, width, "bf16")
    plan = tuned_gemm(problem, gpu, use_pdl=True)
    assert isinstance(plan, GemmPlan), plan
    call = LinearCall(torch.empty(1, 1, dtype=torch.bfloat16), (), [torch.empty(1)] * (rows == 33))

    def run(*args: Any) -> None:
        with machine(ORDERS[0]):
            _linear_on_gpu._run_plan(*args)

    assert small_calls.linear_error(call, problem, plan, run) <= 0.5


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_experts_check_themselves(tokens: int) -> None:
    fmt, routing = WEIGHT_FORMATS["int4_g128"], Routing(8, 2, gated=tokens > 1)
    activation = None if routing.gated else Activation("silu")
    problem = GemmProblem(((fmt, 1536),), tokens, 1024, "bf16", routing, activation)
    plan = tuned_gemm(problem, H200, use_pdl=True)
    assert isinstance(plan, GemmPlan), plan
    ids, gates = torch.zeros(tokens, 2, dtype=torch.int64), torch.ones(tokens, 2) if routing.gated else None
    weight = hb.quantize(torch.zeros(1, 2, 128), fmt)  # of the call, which the small one does not read
    call = ExpertsCall(torch.empty(1, 1, dtype=torch.bfloat16), weight, ids, gates, None, activation)

    def run(*args: Any) -> None:
        if not isinstance(plan.spec, MmaSpec) and gates is not None:
            pytest.skip("the sum over experts of a prompt is plain Triton")
        with _sorted_by_torch(), machine(ORDERS[0]):
            (experts_op._run_tuned if isinstance(plan.spec, MmaSpec) else _experts_prompt.run)(*args)

    assert small_calls.experts_error(call, problem, plan, run) <= 0.5


def decode_call(call: Call) -> DecodeCall:
    cache, given = call.cache, dict(call.options)
    options = AttentionOptions(**{"sm_scale": 1.0, "rotate_keys": cache.rotate_keys} | given)
    return DecodeCall(call.q, cache.keys, cache.values, cache.lengths, None, cache.page_table, options)


@pytest.mark.slow(sample=2)
@pytest.mark.parametrize("name", list(ATTENTION))
def test_attention_checks_itself(name: str) -> None:
    call = decode_call(build(ATTENTION[name], "cpu"))
    plan = gluon_plan(problem_of(call), H200.num_sms, H200.capability, True)
    assert isinstance(plan, DecodePlan), plan

    def run(*args: Any) -> None:
        with machine(ORDERS[0]):
            decode_attention.launch(*args, own=False)

    assert small_calls.attention_error(decode_attention._dense(call), plan, run) <= 0.5


@pytest.mark.slow
def test_blocks_of_queries_check_themselves() -> None:
    """As ragged queries, whatever the call has: a prompt that takes two blocks."""
    call = decode_call(build(Case(Variant("int8", "int4_g32", group=4, queries=40, page=16), 1, (90,)), "cpu"))
    (plan,) = plans_of(problem_of(call), "gluon", 0, H200, True)
    assert isinstance(plan, DecodePlan)
    assert (plan.blocks, plan.spec.queries) == (2, 32)

    def run(call: DecodeCall, *rest: Any) -> None:
        assert call.cu_seqlens_q is not None
        with machine(ORDERS[0]):
            decode_attention.launch(call, *rest, own=False)

    assert small_calls.attention_error(decode_attention._dense(call), plan, run) <= 0.5


def test_a_wrong_kernel_is_noticed() -> None:
    """A kernel that scales scores by 0.1 in place of 1/sqrt(128)."""
    call = decode_call(build(ATTENTION["int4"], "cpu"))
    plan = gluon_plan(problem_of(call), H200.num_sms, H200.capability, True)
    assert isinstance(plan, DecodePlan)

    def run(call: DecodeCall, plan: DecodePlan, *results: torch.Tensor) -> None:
        wrong = call._replace(options=call.options._replace(sm_scale=0.1))
        with machine(ORDERS[0]):
            decode_attention.launch(wrong, plan, *results, own=False)

    assert small_calls.attention_error(decode_attention._dense(call), plan, run) > 1
