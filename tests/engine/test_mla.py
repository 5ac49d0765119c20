"""Packed latents (MLA) in real engines: transformers' words, bytes that pay off, and results that no schedule changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import EXACT, assert_same, by_transformers, engine, generate, later, metric, plan_for, quantized, save
from families import tiny_model
from safetensors.torch import load_file, save_file
from test_refusals import refused
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


@pytest.mark.parametrize("family", PUBLISHED)
def test_families(family: str, tmp_path: Path) -> None:
    """Latents of other sizes, and queries without a latent of their own."""
    folder = save(tiny_model(family), tmp_path / family)
    pair, published = backend_name("int8", "int4_g32"), PUBLISHED[family]
    with engine(folder, pair, additional_config=EXACT, hf_overrides=published, **IN_TORCH) as llm:
        found = generate(llm, MANY[2:4])
    assert_same(found, by_transformers(quantized(folder, keys="int8", values="int4_g32", rotate_keys=False), MANY[2:4]))


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
    assert "values='int8_tensor' cannot be stored in pages" in refused(backend_name("int8", "int8_tensor"), model=deepseek)
    assert "kv_cache_dtype='bfloat16'" in refused(backend_name("int8", "int8"), model=deepseek, kv_cache_dtype="bfloat16")
    tokens = {"additional_config": {"halfbyte": {"sink_tokens": 4}}}
    assert "are not implemented for latents (MLA)" in refused(backend_name("int8", "int8"), model=deepseek, **tokens)
    backend = getattr(mla, backend_name("int8", "int8"))
    reason = backend.supports_combination(576, torch.bfloat16, "auto", 64, True, False, use_sparse=True)
    assert "a sparse indexer picks" in str(reason)


def with_draft_layer(folder: Path, plain: Path, to: Path) -> Path:
    """A copy of a folder with a layer more, as DeepSeek's MTP head: its last one, behind a projection of token and hidden state.

    Experts of the draft layer are those of `plain`, the folder in 16 bits.
    """
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    count, width = config["num_hidden_layers"], config["hidden_size"]
    last, own, experts = f"model.layers.{count - 1}.", f"model.layers.{count}.", f"model.layers.{count - 1}.mlp.experts."
    read = {name: t for name, t in tensors.items() if name.startswith(last) and not name.startswith(experts)}
    read |= {name: t for name, t in load_file(plain / "model.safetensors").items() if name.startswith(experts)}
    tensors |= {own + name.removeprefix(last): t.clone() for name, t in read.items()}
    tensors[own + "eh_proj.weight"] = torch.cat((torch.eye(width), torch.eye(width)), 1)
    tensors |= {own + name: torch.ones(width) for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    tensors[own + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[own + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    modules = config.get("quantization_config", {}).get("modules", {})
    modules |= {
        own + name.removeprefix(last): fmt
        for name, fmt in modules.items()
        if own + name.removeprefix(last) + ".weight_codes" in tensors
    }
    to.mkdir()
    (to / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def methods_of_draft(worker: Any) -> set[str]:
    """How layers of a draft model multiply."""
    return {type(getattr(module, "quant_method", None)).__name__ for module in worker.model_runner.drafter.model.modules()}


@pytest.mark.parametrize("weights", [None, "int4_g32"])
def test_an_mtp_head_drafts(weights: str | None, deepseek: Path, tmp_path: Path, own_limits) -> None:
    """Its weights are read as they are stored, and its latents lie in packed pages."""
    folder = deepseek if weights is None else save(quantized(deepseek, weights=weights), tmp_path / weights)
    folder, backend = with_draft_layer(folder, deepseek, tmp_path / "mtp"), backend_name("int8", "int8_g64")
    with engine(folder, backend, **IN_TORCH) as llm:
        expected = generate(llm, MANY[2:6], 40)
    speculation = {"method": "mtp", "num_speculative_tokens": 2, "attention_backend": backend}
    with engine(folder, backend, speculative_config=speculation, **IN_TORCH) as llm:
        said = generate(llm, MANY[2:6], 40)
        assert metric(llm, "vllm:spec_decode_num_draft_tokens") > 0
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        formats = [layer.impl.formats.values for layer in layers.values() if hasattr(layer, "kv_cache")]
        assert formats == ["int8_g64"] * 3
        methods = llm.collective_rpc(methods_of_draft)[0]
        assert ("HalfbyteLinear" in methods) == (weights is not None)
    assert_same(said, expected)
