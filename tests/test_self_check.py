"""Kernels that check themselves on a GPU that nobody tested: what is checked and kept, and what runs in place of a wrong one."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import halfbyte as hb
from gpu.gpu_cases import build, draw, exact_variants, narrow_variants, variants
from halfbyte import errors
from halfbyte.device import GPU, H200, datasheet_name, describe
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.kv_buffer import AttentionOptions, DecodeCall
from halfbyte.ops import compiling, launch_cache, self_check, small_calls
from halfbyte.ops._linear_on_gpu import LINEAR
from halfbyte.ops.decode_attention import DECODE
from halfbyte.paths import own_checks
from halfbyte.plans.decode_problem import problem_of
from halfbyte.plans.gemm import tuned_gemm
from halfbyte.plans.gemm_mma import with_copies
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_problem import GemmProblem, Routing
from halfbyte.plans.gemm_spec import MmaSpec
from halfbyte.plans.gemm_wgmma import wgmma_staged
from halfbyte.plans.small_gemm import small_gemm
from halfbyte.reference import attention, linear
from pretended_gpu import Gpu, pretend_gpu

ADA = GPU("NVIDIA GeForce RTX 4090", 128, (8, 9))
CPU = torch.device("cpu")
#: Formats that no tuned kernel reads.
NEVER_TUNED = ("int4_col", "nf4_dq")


# ------------------------------------------------------------------------------------------------- what small cases are like


@pytest.mark.parametrize("name", list(WEIGHT_FORMATS))
@pytest.mark.parametrize("gpu", [ADA, H200], ids=lambda gpu: gpu.name)
def test_a_small_gemm_has_the_spec_of_the_whole(gpu: GPU, name: str) -> None:
    """What a spec says of the sizes of a problem is true of the small one, and it splits tiles if the whole does."""
    fmt, split = WEIGHT_FORMATS[name], set()
    for width in (1024, 4096, 5120, 14336, 28672 + 64):
        for rows, features in (
            (1, (4096,)),
            (4, (4096, 1024, 1024)),
            (16, (14336,)),
            (33, (1000,)),
            (130, (28672,)),
            (513, (4096,)),
        ):
            whole = GemmProblem(tuple((fmt, n) for n in features), rows, width, "bf16")
            plan = tuned_gemm(whole, gpu, use_pdl=True)
            if not isinstance(plan, GemmPlan):
                continue
            small, p = small_gemm(plan, whole)
            spec = small.spec
            assert spec == plan.spec
            assert all(n < 4 * spec.tile for n in p.features)
            assert p.width <= 2 * max(2048, 16 * spec.weights[0].group)
            assert small.tiles == p.tiles(spec.tile) * small.blocks
            assert bool(small.split_tiles) is bool(plan.split_tiles)
            split.add(bool(small.split_tiles))
            if isinstance(spec, MmaSpec):
                assert with_copies(spec, p.width) == spec
            else:
                assert spec.whole_tiles == all(n % spec.tile == 0 for n in p.features)
                assert spec.whole == (not small.split_tiles if spec.kernel == "wgmma_large" else small.programs == small.tiles)
                assert spec.kernel == "wgmma_large" or wgmma_staged(replace(spec, scales_per_load=1), p.width) == spec
    assert split == (set() if name in NEVER_TUNED else {False, True})


@pytest.mark.parametrize("tokens", [1, 8, 64, 700])
def test_a_small_mixture_has_the_spec_of_the_whole(tokens: int) -> None:
    routing = Routing(128, 8, gated=True)
    whole = GemmProblem(((WEIGHT_FORMATS["int4_g128"], 4096),), tokens, 7168, "bf16", routing)
    plan = tuned_gemm(whole, H200, use_pdl=True)
    assert isinstance(plan, GemmPlan), plan
    small, p = small_gemm(plan, whole)
    assert p.routing is not None
    assert (p.routing.experts, p.routing.top_k, small.spec) == (8, 8, plan.spec)
    assert p.pairs <= 512
    assert small.tiles == small.blocks * p.tiles(small.spec.tile)


def call_of(case: Any) -> DecodeCall:
    made = build(case, "cpu")
    given = dict(made.options)
    start = given.pop("query_start", None)
    options = AttentionOptions(**{"sm_scale": 1.0, "rotate_keys": made.cache.rotate_keys} | given)
    return DecodeCall(made.q, made.cache.keys, made.cache.values, made.cache.lengths, start, made.cache.page_table, options)


def test_small_attention_has_the_facts_of_the_whole() -> None:
    """Calls of the GPU's suite: formats, strides, pages, windows, options. Only sizes differ, and no result is NaN."""
    grid = [*variants(60), *narrow_variants(10), *exact_variants(10)]
    for case in draw(len(grid), grid, longest=256, elements=1 << 18):
        call = call_of(case)
        if not len(call.lengths) or call.q.dtype is torch.float32:
            continue
        small = small_calls.small_attention(call, call.q.shape[2])
        whole, facts = problem_of(call), problem_of(small)
        sizes = {name: getattr(whole, name) for name in ("batch", "capacity", "aligned")}
        for name in ("k_token_stride", "v_token_stride", "k_scale_stride", "v_scale_stride"):
            if not getattr(whole, name):  # a kernel that is told strides takes any
                sizes[name] = 0
        assert replace(facts, **sizes) == whole, case
        assert facts.aligned or not whole.aligned
        out, _ = attention.decode_attention(small)
        assert out.isfinite().all()
        assert out.any()


def test_excess_tells_wrong_from_rounded() -> None:
    truth = torch.randn(64, 256)
    assert self_check.excess(truth.bfloat16(), truth) < 0.5
    part = truth.clone()
    part.view(-1)[truth.abs().argmin()] += 0.08  # where the number itself is small
    assert self_check.excess(part, truth) > 1
    assert self_check.excess(0.9 * truth, truth) > 1
    part[3, 7] = torch.nan
    assert self_check.checked(lambda: self_check.excess(part, truth)) == self_check._FAILED


# ----------------------------------------------------------------------------------------------------------------- what runs


def test_tested_gpus_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    self_check.untested.cache_clear()
    for name, expected in (
        ("NVIDIA H200", False),
        ("NVIDIA H100 80GB HBM3", False),
        ("NVIDIA GeForce RTX 4090", True),
        ("NVIDIA GH200", True),
    ):
        monkeypatch.setattr(self_check, "describe", lambda device, name=name: replace(describe("cpu"), name=name))
        device = torch.device("cuda", 0)
        assert (self_check.untested(device) is not None) is expected
        self_check.untested.cache_clear()
    assert not self_check.untested(CPU)
    assert {datasheet_name(f"NVIDIA {name.upper()}") for name in self_check.TESTED} == self_check.TESTED


@pytest.fixture
def unknown_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gpu:
    """A GPU that nobody tested; nothing is stored yet."""
    gpu = pretend_gpu(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HALFBYTE_CHECK", raising=False)
    monkeypatch.setattr(self_check, "untested", describe)
    monkeypatch.setattr(self_check, "_results", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(errors, "_WARNED", set())
    return gpu


def kernels(monkeypatch: pytest.MonkeyPatch, factor: float = 1.0) -> list[Any]:
    """Tuned kernels, whose results are wrong by a factor; their calls."""
    calls = []

    def launch(op: Any, call: Any, plan: Any, launches: Any, results: Sequence[torch.Tensor], **_: Any) -> None:
        calls.append(call)
        if op is LINEAR:
            right: Any = [linear.linear(call.x, w, b) for w, b in zip(call.weights, call.biases, strict=True)]
        else:
            assert op is DECODE
            right = attention.decode_attention(call)
        for result, truth in zip(results, right, strict=True):
            result.copy_(factor * truth)

    monkeypatch.setattr(launch_cache, "launch", launch)
    return calls


CACHE = hb.KVCache(1, 2, 64, 128, keys="int8", values="int4")  # made before a CPU says that it is a GPU
X, WEIGHT = torch.randn(2, 256, dtype=torch.bfloat16), hb.quantize(torch.randn(64, 256), "int4_g128")


def multiply(impl: str = "auto") -> torch.Tensor:
    return hb.linear(X, WEIGHT, impl=impl)


def attend(impl: str = "auto") -> Any:
    return hb.decode_attention(torch.ones(1, 4, 1, 64, dtype=torch.bfloat16), CACHE, impl=impl)


RUNS = {"linear": multiply, "decode_attention": attend}
every_op = pytest.mark.parametrize("op", list(RUNS))


@every_op
def test_a_wrong_kernel_is_left_alone(op: str, unknown_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, then the portable kernel; the next process knows without a run."""
    calls = kernels(monkeypatch, 1.5)
    with pytest.warns(UserWarning, match=f"{op} differs from the reference on .*doctor --check") as heard:
        RUNS[op]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RUNS[op]()
    assert len(heard) == 1
    assert unknown_gpu.first == [((), ())] * 2  # the portable kernel
    assert len(calls) == 1  # the small case
    lines = own_checks(describe(CPU).name).read_text().splitlines()
    assert [json.loads(line)["kernel"] for line in lines] == [op]
    assert json.loads(lines[0])["error"] > 1

    self_check._results.clear()
    errors._WARNED.clear()
    with pytest.warns(UserWarning, match="differs"):
        RUNS[op]()
    assert len(calls) == 1


@every_op
def test_a_right_kernel_is_checked_once(op: str, unknown_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = kernels(monkeypatch)
    for _ in range(2):
        RUNS[op]()
        assert not unknown_gpu.first
    assert len(calls) == 3  # the small case, and two calls
    self_check._results.clear()
    RUNS[op]()
    assert len(calls) == 4


@every_op
def test_what_is_not_checked(op: str, unknown_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is requested by name, the capture of a graph, compilation ahead of a launch, HALFBYTE_CHECK=0, a tested GPU."""
    calls = kernels(monkeypatch, 1.5)
    RUNS[op]("gluon")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        RUNS[op]()
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "active", lambda: True)
        RUNS[op]()
    with monkeypatch.context() as patch:
        patch.setenv("HALFBYTE_CHECK", "0")
        RUNS[op]()
    with monkeypatch.context() as patch:
        patch.setattr(self_check, "untested", lambda device: None)
        RUNS[op]()
    assert len(calls) == 5
    assert not unknown_gpu.first
    assert not own_checks(describe(CPU).name).exists()


@pytest.mark.parametrize(("error", "portable"), [(RuntimeError("ptxas died"), True), (torch.OutOfMemoryError("full"), False)])
def test_a_kernel_that_does_not_compile_is_wrong(
    error: Exception, portable: bool, unknown_gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is full nothing was found out: the next process asks again."""
    calls = kernels(monkeypatch)
    monkeypatch.setattr("halfbyte.ops._linear_on_gpu.linear_error", Mock(side_effect=error))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        multiply()
    assert bool(unknown_gpu.first) is portable
    assert bool(calls) is not portable
    assert own_checks(describe(CPU).name).exists() is portable


def test_damaged_files_and_full_disks_do_no_harm(unknown_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, file = kernels(monkeypatch), own_checks(describe(CPU).name)
    file.parent.mkdir(parents=True)
    file.write_bytes(b'{"key": "a"}\n[]\nnonsense\xff\n{"key": 1, "error": "x"}\n{"key": "b", "error": 2.5}\n')
    multiply()
    assert len(calls) == 2
    assert self_check._results[describe(CPU).name]["b"] == 2.5
    assert json.loads(file.read_text(errors="replace").splitlines()[-1])["kernel"] == "linear"
    monkeypatch.setattr(self_check, "append_line", Mock(side_effect=OSError(28, "No space left on device")))
    self_check._results.clear()
    file.unlink()
    multiply()
    assert len(calls) == 4


def test_another_version_or_code_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    self_check._key.cache_clear()
    keys = [self_check._key(*of, "580") for of in (("linear", "spec"), ("linear", "other"), ("append", "spec"))]
    keys.append(self_check._key("linear", "spec", "590"))
    self_check._key.cache_clear()
    monkeypatch.setattr(hb, "__version__", "0.0.0")
    keys.append(self_check._key("linear", "spec", "580"))
    self_check._key.cache_clear()
    assert len(set(keys)) == 5


def test_nothing_of_the_callers_is_touched(unknown_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither torch's global generator, nor the cache of the call."""
    kernels(monkeypatch)
    state = torch.get_rng_state()
    multiply()
    attend()
    assert torch.equal(torch.get_rng_state(), state)


# -------------------------------------------------------------------------------------------------- append, pages


def test_a_wrong_append_is_left_to_the_reference(unknown_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from halfbyte.ops import append as op

    def cache_of(wrong: Callable[[Any], None] | None) -> hb.KVCache:
        if wrong is not None:
            monkeypatch.setattr(op, "_launch", lambda c, advance, signature=None: wrong(c) or False)
            monkeypatch.setattr(op, "untested", describe)
        cache = copy.deepcopy(CACHE)
        cache.append(*torch.randn(2, 1, 2, 5, 64, generator=torch.Generator().manual_seed(0)))
        return cache

    with pytest.warns(UserWarning, match="append differs"):
        cache = cache_of(lambda c: None)  # it writes nothing
    assert cache.lengths.tolist() == [5]
    assert cache.keys.codes.any()
    errors._WARNED.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        self_check._results.clear()
        own_checks(describe(CPU).name).unlink()
        right = cache_of(op._run_reference)
    assert torch.equal(right.keys.codes, cache.keys.codes)
