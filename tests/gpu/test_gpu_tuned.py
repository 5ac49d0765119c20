"""Plans by other choices than the analytic one, as `python -m benchmarks tune` measures them: right, and the same bits again."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import poisoned, same_bits
from gpu_place import PLACE
from test_gpu_graphs import Captured, needs_gpu

import halfbyte as hb
from accuracy import check_product
from benchmarks.tuning_choices import decode_choices, linear_choices
from halfbyte.device import describe
from halfbyte.measure.caches import Promise, held_by
from halfbyte.ops import _linear_on_gpu, by_plan
from halfbyte.plans.decode_attention import DecodePlan, gluon_plan
from halfbyte.plans.linear_spec import LinearPlan
from halfbyte.plans.linear_wgmma import tuned_linear
from halfbyte.plans.tuning_space import with_decode_choice, with_linear_choice


@needs_gpu
@pytest.mark.compile_first
@pytest.mark.parametrize(
    ("name", "rows", "features", "width"),
    [
        ("int4_g128", 3, (1000, 200, 40), 1024),
        ("mxfp4", 1, (12345,), 2176),
        ("nf4", 16, (12345,), 2176),
        ("int8_col", 8, (1000, 200, 40), 1024),
        ("int4_sym_g128", 40, (12345,), 2176),
    ],
)
def test_every_choice_of_a_product_is_right(name: str, rows: int, features: tuple[int, ...], width: int) -> None:
    gpu = describe("cuda")
    num_sms, capability = gpu.sm_count or 1, gpu.capability or (0, 0)
    rng = torch.Generator(PLACE.device).manual_seed(rows)
    x = torch.randn(rows, width, generator=rng, device=PLACE.device).bfloat16()
    weights = [hb.quantize(torch.randn(n, width, generator=rng, device=PLACE.device) * 0.1, name) for n in features]
    given = {"m": rows, "width": width, "dtype": "bf16", "num_sms": num_sms, "capability": capability, "use_pdl": True}
    first = tuned_linear([(w.format, w.shape[0]) for w in weights], **given)  # type: ignore[arg-type]
    if isinstance(first, str):
        pytest.skip(first)
    for choice in linear_choices(first, features, width, num_sms, capability):
        plan = with_linear_choice(first, choice, features, width, num_sms, capability)
        assert isinstance(plan, LinearPlan), plan
        with poisoned():
            once = _linear_on_gpu.run_plan(x, weights, plan)
        for out, weight in zip(once, weights, strict=True):
            check_product(out, x, weight)
        graph = Captured(lambda plan=plan: _linear_on_gpu.run_plan(x, weights, plan))  # type: ignore[misc]
        for _ in range(3):
            assert all(same_bits(a, b) for a, b in zip(graph.replay(), once, strict=True)), choice


@needs_gpu
@pytest.mark.compile_first
@pytest.mark.parametrize(
    ("formats", "lengths", "heads"),
    [
        *((("int8", "int4_g32"), (1, 5000, 64, 777), 2), (("int4", "int4"), (8192,), 1), (("fp8", "fp8"), (100,) * 40, 8)),
        *((("int2", "int2"), (4000, 33, 2048), 2), (("int4", "int2_g64"), (1, 3000), 2)),
    ],
)
def test_every_choice_of_attention_is_right(formats: tuple[str, str], lengths: tuple[int, ...], heads: int) -> None:
    gpu = describe("cuda")
    num_sms, capability = gpu.sm_count or 1, gpu.capability or (0, 0)
    rng = torch.Generator(PLACE.device).manual_seed(heads)
    batch, longest = len(lengths), max(lengths)
    cache = hb.KVCache(batch, heads, 128, longest, keys=formats[0], values=formats[1], device=PLACE.device)
    k, v = torch.randn(2, batch, heads, longest, 128, generator=rng, device=PLACE.device).bfloat16()
    cache.append(k, v)
    cache.lengths.copy_(torch.tensor(lengths))
    q = 4 * torch.randn(batch, 4 * heads, 1, 128, generator=rng, device=PLACE.device).bfloat16()
    first = gluon_plan(by_plan.problem_of(q, cache), num_sms, capability, True)
    assert isinstance(first, DecodePlan), first
    promise = Promise(q, held_by(cache))
    for choice in decode_choices(first, num_sms, capability):
        plan = with_decode_choice(first, choice, num_sms, capability)
        assert isinstance(plan, DecodePlan), plan
        with poisoned():
            once = by_plan.attend(q, cache, plan)
        promise.judge([once]).require(str(choice))
        graph = Captured(lambda plan=plan: by_plan.attend(q, cache, plan))  # type: ignore[misc]
        for _ in range(3):
            assert same_bits(graph.replay(), once), choice
