"""Packed latents (MLA) in real engines: transformers' words, bytes that pay off, and results that no schedule changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import EXACT, assert_same, by_transformers, engine, generate, later, metric, plan_for, quantized, refused, save
from families import tiny_model
from vllm.platforms.cpu import CpuPlatform

from halfbyte.engine import PageLayout
from halfbyte.vllm import mla
from halfbyte.vllm.names import PLAN, backend_name
from halfbyte.vllm.options import layer_index
from test_experts import sixteen_bits

#: The rotation of vLLM 0.32's CPU platform is wrong for the strided queries of MLA; that in torch is not.
IN_TORCH = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
#: Prompts of many lengths that share no beginning.
MANY = [[1 + (7 * i * i + j * j + 3 * i * j) % 100 for j in range(3 + 13 * i)] for i in range(8)]
#: Dims of a rotary key and of a latent.
DIMS = 64, 512


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(sixteen_bits("deepseek_v3"), tmp_path_factory.mktemp("mla") / "deepseek_v3")


@pytest.fixture
def own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU platform takes chunks, prefix caching and the size of blocks from models with MLA, as its own kernels need it."""
    check = CpuPlatform.check_and_update_config

    def check_and_restore(_: Any, config: Any) -> None:
        scheduler, cache = config.scheduler_config, config.cache_config
        before = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching, cache.block_size
        check(config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching, cache.block_size = before

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_restore))


PAIRS = [("int8", "int8"), ("bf16", "int4_g32"), later("fp8", "fp8"), later("int4_g64", "int4"), later("bf16", "bf16")]


@pytest.mark.parametrize(("keys", "values"), PAIRS)
def test_an_engine_says_what_transformers_says(keys: str, values: str, deepseek: Path) -> None:
    """Prompts as transformers computes them; steps read packed latents."""
    with engine(deepseek, backend_name(keys, values), additional_config=EXACT, **IN_TORCH) as llm:
        found = generate(llm, MANY[2:6])
    assert_same(found, by_transformers(quantized(deepseek, keys=keys, values=values, rotate_keys=False), MANY[2:6]))


def test_rotated_rotary_keys(deepseek: Path) -> None:
    options = {"halfbyte": {"prefill": "exact", "rotate_keys": True}}
    with engine(deepseek, backend_name("int8", "int4_g32"), additional_config=options, **IN_TORCH) as llm:
        found = generate(llm, MANY[2:4])
    assert_same(found, by_transformers(quantized(deepseek, keys="int8", values="int4_g32", rotate_keys=True), MANY[2:4]))


def test_formats_by_layer(deepseek: Path, tmp_path: Path) -> None:
    """A cache plan, whose layers have pages of different sizes; and a layer that stays in 16 bits."""
    plan = plan_for(deepseek, tmp_path, [("int8", "int4_g32"), ("bf16", "int8")])
    options = {"halfbyte": {"prefill": "exact", "plan": str(plan)}}
    with engine(deepseek, PLAN, additional_config=options, **IN_TORCH) as llm:
        found = generate(llm, MANY[2:4])
    assert_same(found, by_transformers(quantized(deepseek, plan=plan), MANY[2:4]))
    pair, skipped = backend_name("int8", "int4_g32"), {"kv_cache_dtype_skip_layers": ["0"]}
    with engine(deepseek, pair, additional_config=EXACT, **skipped, **IN_TORCH) as llm:
        found = generate(llm, MANY[2:4])
    model = quantized(deepseek, keys="int8", values="int4_g32", rotate_keys=False, skip_layers=(0,))
    assert_same(found, by_transformers(model, MANY[2:4]))


#: What vLLM reads in a published config.json, and transformers does not.
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {},
    "glm4_moe_lite": {"first_k_dense_replace": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}


@pytest.mark.cpu_platform
@pytest.mark.parametrize("family", PUBLISHED)
def test_families(family: str, tmp_path: Path) -> None:
    """Latents of other sizes, and queries without a latent of their own."""
    folder = save(tiny_model(family), tmp_path / family)
    pair, published = backend_name("int8", "int4_g32"), PUBLISHED[family]
    with engine(folder, pair, additional_config=EXACT, hf_overrides=published, **IN_TORCH) as llm:
        found = generate(llm, MANY[2:4])
    assert_same(found, by_transformers(quantized(folder, keys="int8", values="int4_g32", rotate_keys=False), MANY[2:4]))


@pytest.mark.cpu_platform
def test_tokens_that_fit_grow_by_the_ratio_of_bytes(deepseek: Path) -> None:
    """Pages of vLLM's own backends have other sizes on processors with AMX."""
    tokens = {}
    for backend in ("CPU_MLA", backend_name("bf16", "int8"), backend_name("int4", "int4_g32")):
        with engine(deepseek, backend, dtype="bfloat16") as llm:
            cache = llm.llm_engine.vllm_config.cache_config
            tokens[backend] = cache.num_gpu_blocks * cache.block_size
    for pair in (("bf16", "int8"), ("int4", "int4_g32")):
        ratio = sum(DIMS) * 2 / PageLayout(*pair, *DIMS).token_head_bytes
        assert tokens[backend_name(*pair)] == pytest.approx(ratio * tokens["CPU_MLA"], rel=1e-3)


@pytest.fixture(scope="module")
def at_once(deepseek: Path):
    """What an engine with room for everything says to MANY."""
    with engine(deepseek, backend_name("int8", "int8_g64"), **IN_TORCH) as llm:
        return generate(llm, MANY, 40)


SCHEDULES: dict[str, Any] = {
    "chunks of 32 tokens": {"max_num_batched_tokens": 32, "max_num_seqs": 8},
    "pages of 64 tokens": {"block_size": 64, "max_num_batched_tokens": 64},
    "tensor parallelism": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    "speculation": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    },
}


@pytest.mark.parametrize("schedule", [later(s) if s == "tensor parallelism" else s for s in SCHEDULES])
def test_schedules_change_nothing(schedule: str, deepseek: Path, at_once, own_limits) -> None:
    with engine(deepseek, backend_name("int8", "int8_g64"), **SCHEDULES[schedule], **IN_TORCH) as llm:
        assert_same(generate(llm, MANY, 40), at_once)
        if "speculative_config" in SCHEDULES[schedule]:
            assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0


def test_preemption_and_prefix_hits_change_nothing(deepseek: Path, at_once, own_limits) -> None:
    """A pool in which the requests do not fit; the second time the pages of the prompts are found."""
    with engine(deepseek, backend_name("int8", "int8_g64"), block_size=16, num_gpu_blocks_override=24, **IN_TORCH) as llm:
        assert_same(generate(llm, MANY, 40), at_once)
        assert metric(llm, "vllm:num_preemptions") > 0
        assert_same(generate(llm, MANY[-1:], 40), at_once[-1:])
        before = metric(llm, "vllm:prefix_cache_hits")
        assert_same(generate(llm, MANY[-1:], 40), at_once[-1:])
        assert metric(llm, "vllm:prefix_cache_hits") >= before + 80


def test_layers_of_blocks_with_two() -> None:
    """LongCat's, which vLLM's CPU platform does not run."""
    names = ("model.layers.3.self_attn.attn", "model.layers.3.self_attn.0.attn", "model.layers.3.self_attn.1.attn")
    assert [layer_index(name) for name in names] == [3, 6, 7]


def test_what_is_refused(deepseek: Path) -> None:
    """Formats that fit no page, another cache beside them, calibrated keys, sink tokens, sparse indexers."""
    assert "values='int8_tensor' cannot be stored in pages" in refused(backend=backend_name("int8", "int8_tensor"), model=deepseek)
    assert "kv_cache_dtype='bfloat16'" in refused(backend=backend_name("int8", "int8"), model=deepseek, kv_cache_dtype="bfloat16")
    tokens = {"additional_config": {"halfbyte": {"sink_tokens": 4}}}
    assert "are not implemented for latents (MLA)" in refused(backend=backend_name("int8", "int8"), model=deepseek, **tokens)
    backend = getattr(mla, backend_name("int8", "int8"))
    reason = backend.supports_combination(576, torch.bfloat16, "auto", 64, True, False, use_sparse=True)
    assert "a sparse indexer picks" in str(reason)
