"""Plans by other choices than the analytic one, as `python -m halfbyte_lab tune` measures them: right, and the same bits again."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import poisoned, same_bits
from gpu_place import PLACE
from test_gpu_graphs import Captured, needs_gpu

import halfbyte as hb
from accuracy import check_product
from halfbyte.device import describe
from halfbyte.ops import _linear_on_gpu
from halfbyte.plans.gemm import tuned_gemm
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.plans.tuning_space import with_linear_choice
from halfbyte_lab.tune.search import linear_choices


@needs_gpu
@pytest.mark.compile_first
@pytest.mark.parametrize(
    ("name", "rows", "features", "width"),
    [
        ("int4_g128", 3, (1000, 200, 40), 1024),
        ("mxfp4", 1, (12345,), 2176),
        ("nf4", 16, (12345,), 2176),
        ("int8_col", 8, (1000, 200, 40), 1024),
        ("int4_sym_g128", 32, (12345,), 2176),
    ],
)
def test_every_choice_of_a_product_is_right(name: str, rows: int, features: tuple[int, ...], width: int) -> None:
    gpu = describe("cuda").gpu
    rng = torch.Generator(PLACE.device).manual_seed(rows)
    x = torch.randn(rows, width, generator=rng, device=PLACE.device).bfloat16()
    weights = [hb.quantize(torch.randn(n, width, generator=rng, device=PLACE.device) * 0.1, name) for n in features]
    problem = GemmProblem(tuple((w.format, w.shape[0]) for w in weights), rows, width, "bf16")
    first = tuned_gemm(problem, gpu, use_pdl=True)
    if isinstance(first, str):
        pytest.skip(first)
    for choice in linear_choices(first, problem, gpu):
        plan = with_linear_choice(first, choice, problem, gpu)
        assert isinstance(plan, GemmPlan), plan
        with poisoned():
            once = _linear_on_gpu.run_plan(x, weights, plan)
        for out, weight in zip(once, weights, strict=True):
            check_product(out, x, weight)
        graph = Captured(lambda plan=plan: _linear_on_gpu.run_plan(x, weights, plan))  # type: ignore[misc]
        for _ in range(3):
            assert all(same_bits(a, b) for a, b in zip(graph.replay(), once, strict=True)), choice
