"""Sink and recent tokens in 16 bits in real engines: transformers' words, and results that no schedule changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import EXACT, SHIPPED, TEXT, assert_same, by_transformers, engine, generate, later, metric, plan_for, quantized, save
from test_kv_cache import MANY, SCHEDULES
from test_serving import eagle_head
from vllm.v1.core.block_pool import BlockPool

from halfbyte.cache_plan import read_plan
from halfbyte.vllm.exact_tokens import ExactTokensLayer, ExactTokensManager, ExactTokensSpec
from halfbyte.vllm.names import PLAN, backend_name
from halfbyte_lab.evals.calibrate_keys import calibrate_keys

#: More than a page of recent tokens, fewer than the longer prompts have.
EXACT_TOKENS = {"sink_tokens": 4, "recent_tokens": 40}


def options(prefill: str = "cache", **others: Any) -> dict[str, Any]:
    return {"additional_config": {"halfbyte": {"prefill": prefill, **EXACT_TOKENS, **others}}, "block_size": 16}


@pytest.mark.parametrize("tokens", [EXACT_TOKENS, later({"sink_tokens": 20}), later({"recent_tokens": 8})])
def test_an_engine_says_what_transformers_says(tokens: dict[str, int]) -> None:
    """`halfbyte.hf.quantize` with the same options; fewer log probabilities differ than without them."""
    settings = {"additional_config": {"halfbyte": {"prefill": "exact", **tokens}}, "block_size": 16}
    with engine(backend=backend_name("int8", "int4_g32"), **settings) as llm:
        found = generate(llm)
    assert_same(found, by_transformers(quantized(keys="int8", values="int4_g32", rotate_keys=False, **tokens)))


@pytest.fixture(scope="module")
def at_once():
    """What an engine with room for everything says to MANY."""
    with engine(backend=backend_name("int4", "int4"), **options()) as llm:
        return generate(llm, MANY, 40)


@pytest.mark.parametrize("schedule", ["chunks of 32 tokens", "speculation"])
def test_schedules_change_nothing(schedule: str, at_once) -> None:
    """Chunks shorter than the recent tokens; drafts that are rejected."""
    with engine(backend=backend_name("int4", "int4"), **options(), **SCHEDULES[schedule]) as llm:
        assert_same(generate(llm, MANY, 40), at_once, within=1e-4)
        if "speculative_config" in SCHEDULES[schedule]:
            assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0


@pytest.mark.parametrize("draft", [later("a draft model"), later("an EAGLE head")])
def test_layers_of_drafts_have_none(draft: str, at_once, tmp_path: Path) -> None:
    """With packed pages: on a CPU vLLM's own have no layout in common with pages of two kinds."""
    speculation = SCHEDULES["a draft model"]["speculative_config"] | {"attention_backend": backend_name("int4", "int4")}
    if draft == "an EAGLE head":
        speculation |= {"method": "eagle", "model": str(eagle_head(tmp_path / "eagle"))}
    with engine(backend=backend_name("int4", "int4"), **options(), speculative_config=speculation) as llm:
        assert_same(generate(llm, MANY, 40), at_once, within=1e-4)
        assert metric(llm, "vllm:spec_decode_num_draft_tokens") > 0
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        target = llm.llm_engine.vllm_config.model_config.hf_text_config.num_hidden_layers
        assert sum(isinstance(layer, ExactTokensLayer) for layer in layers.values()) == target


def test_preemption_changes_nothing(at_once) -> None:
    """A pool in which the requests do not fit; those that come back find some of their pages."""
    with engine(backend=backend_name("int4", "int4"), num_gpu_blocks_override=120, max_model_len=160, **options()) as llm:
        assert_same(generate(llm, MANY, 40), at_once, within=1e-4)
        assert metric(llm, "vllm:num_preemptions") > 0


def test_prefix_hits_change_nothing() -> None:
    """The pages of sink and recent tokens are found again; those before a shared beginning's end once vLLM has seen it shared."""
    prompts = [list(TEXT[:150]), list(TEXT[:150]) + list(TEXT[5000:5040])]
    prompts += [list(TEXT[:130]) + list(end) for end in (b"return", b"import")]
    with engine(backend=backend_name("int4", "int4"), **options()) as llm:
        first = generate(llm, prompts[:1])
        assert metric(llm, "vllm:prefix_cache_hits") == 0
        again = generate(llm, prompts[:3])
        assert metric(llm, "vllm:prefix_cache_hits") >= 144 + 144
        before = metric(llm, "vllm:prefix_cache_hits")
        again += generate(llm, prompts[3:])
        assert metric(llm, "vllm:prefix_cache_hits") - before == 128
    with engine(backend=backend_name("int4", "int4"), enable_prefix_caching=False, **options()) as llm:
        alone = generate(llm, prompts[1:])
    assert_same(again, first + alone, within=1e-4)


def test_windows(tiny) -> None:
    """A window in each other layer, shorter than the recent tokens of the others."""
    folder, prompts = tiny("gemma2"), [[3, 1, 4, 1, 5, 9, 2, 6] * 3, list(range(1, 60))]
    with engine(folder, backend_name("int8", "int8"), **options("exact")) as llm:
        found = generate(llm, prompts)
    expected = by_transformers(quantized(folder, keys="int8", values="int8", rotate_keys=False, **EXACT_TOKENS), prompts)
    assert_same(found, expected)


def test_a_saved_model_names_them(tmp_path: Path) -> None:
    """Without options of the engine."""
    model = quantized(keys="int8", values="int8", rotate_keys=False, **EXACT_TOKENS)
    folder = save(model, tmp_path / "packed")
    with engine(folder, backend_name("int8", "int8"), additional_config=EXACT) as llm:
        assert_same(generate(llm), by_transformers(model))


def test_a_plan_names_them(tmp_path: Path) -> None:
    """Layers with formats of their own, pages of which are of several sizes; one layer in 16 bits has none."""
    plan = plan_for(SHIPPED, tmp_path, [("int8", "int4_g32"), ("int8_g32", "fp8"), ("bf16", "bf16")])
    plan = replace(read_plan(plan), **EXACT_TOKENS).write(plan)
    with engine(backend=PLAN, additional_config={"halfbyte": {"prefill": "exact", "plan": str(plan)}}) as llm:
        found = generate(llm)
    assert_same(found, by_transformers(quantized(plan=plan)))


@pytest.mark.parametrize("prefill", ["exact", later("cache")])
def test_calibrated_keys(prefill: str, tmp_path: Path) -> None:
    model = quantized(keys="int8", values="int8")
    file = calibrate_keys(model, torch.tensor([list(TEXT[5000:5400])]), 64).write(tmp_path / "keys.safetensors")
    with engine(backend=backend_name("int8", "int8"), **options(prefill, calibration=str(file))) as llm:
        found = generate(llm)
    assert_same(found, by_transformers(quantized(keys="int8", values="int8", calibration=file, **EXACT_TOKENS)))


def test_more_sink_tokens_than_a_request_has() -> None:
    """As many blocks as it has."""
    spec = ExactTokensSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.bfloat16, sliding_window=16, sink_tokens=10**9)
    assert spec.max_admission_blocks_per_request(32, 256) <= 4 + 256 // 16


def test_blocks_of_first_tokens_are_kept_and_found_again() -> None:
    """20 sink tokens and a window of 17: a token behind 96 others needs blocks 0, 1 and 5, and without 0 there is no hit."""
    spec = ExactTokensSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=17, sink_tokens=20)
    pool = BlockPool(10, enable_caching=True, hash_block_size=16)
    manager = ExactTokensManager(spec, block_pool=pool, enable_caching=True, kv_cache_group_id=0, scheduler_block_size=16)
    first = SimpleNamespace(request_id="first", block_hashes=[b"%d" % i for i in range(6)], shared_prefix_boundary=None)

    def found() -> list[Any]:
        return ExactTokensManager.find_longest_cache_hit(first.block_hashes, 96, [0], pool, spec, False, 16)[0][0]

    held = manager.allocate_new_blocks("first", 96, 96)
    manager.cache_blocks(first, 96, replay_boundaries=())
    manager.remove_skipped_blocks("first", 96)
    needed = [block if i in (0, 1, 5) else pool.null_block for i, block in enumerate(held)]
    assert manager.req_to_blocks["first"] == needed
    assert found() == needed
    manager.free("first")
    assert manager.get_num_blocks_to_allocate("second", 97, needed, 96, 96, 97) == 1 + 3
    manager.add_local_computed_blocks("second", needed, 96, 0)
    assert manager.req_to_blocks["second"] == needed
    assert manager.get_num_blocks_to_allocate("third", 97, needed, 96, 96, 97) == 1
    manager.free("second")
    pool.evict_blocks({held[0].block_id})
    assert found() == []
