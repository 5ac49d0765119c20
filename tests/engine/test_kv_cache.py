"""The packed KV cache in real engines: transformers' words, bytes that pay off, and results that no schedule changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    DTYPE,
    EXACT,
    PROMPTS,
    SHIPPED,
    TEXT,
    assert_same,
    by_transformers,
    engine,
    generate,
    later,
    metric,
    plan_for,
    quantized,
    save,
)
from tiny_models import LLAMA, made
from transformers import AutoModelForCausalLM, BloomConfig, MiMoV2FlashConfig
from vllm.config import VllmConfig, cache, set_current_vllm_config
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVQuantMode

from halfbyte.engine import PageLayout
from halfbyte.hf import load
from halfbyte.vllm import backend as backends
from halfbyte.vllm import register
from halfbyte.vllm.backend import HalfbyteBackend
from halfbyte.vllm.names import PLAN, backend_name, cache_dtype
from halfbyte_lab.evals.calibrate_keys import calibrate_keys

#: Prompts of many lengths that share no beginning.
MANY = [list(TEXT[1000 * i : 1000 * i + 3 + 13 * i]) for i in range(8)]


#: Keys and values. Where two programs are compared, here and below, keys have 8 bits: which way a number in the middle between two
#: codes is rounded depends on the CPU, and a key of 4 bits that goes the other way moves a log probability by up to 0.06.
PAIRS = [("int8", "int4_g32"), later("int8", "int4"), ("fp8", "bf16"), later("int8", "int8"), later("int8_g64", "fp8")]


@pytest.mark.parametrize(("keys", "values"), PAIRS)
def test_an_engine_says_what_transformers_says(keys: str, values: str) -> None:
    """Prompts as transformers computes them, the cache read from packed pages."""
    with engine(backend=backend_name(keys, values), additional_config=EXACT) as llm:
        found = generate(llm)
    assert_same(found, by_transformers(quantized(keys=keys, values=values, rotate_keys=False)))


def test_blocks_are_told_beside_those_of_vllms_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 + 2 bytes of INT8 keys with a scale and 32 + 4 of INT4 values, against 256 in 16 bits and 128 in fp8."""
    said = list[str]()
    monkeypatch.setattr(backends.logger, "info_once", lambda text, *values: said.append(text % values))
    layout = PageLayout("int8", "int4", 64)
    backends.log_blocks(layout, 12_800, torch.bfloat16)
    each = layout.token_head_bytes
    assert said == [
        f"KV cache in int8 / int4: 12,800 blocks; the same memory has {50 * each:,} in bfloat16 and {100 * each:,} in fp8"
    ]


def test_blocks_grow_by_the_ratio_of_bytes() -> None:
    blocks = {}
    for backend in (None, backend_name("int8", "int4_g32"), backend_name("int4", "int4")):
        with engine(backend=backend, dtype="bfloat16") as llm:
            blocks[backend] = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    for pair in (("int8", "int4_g32"), ("int4", "int4")):
        ratio = 2 * 64 * 2 / PageLayout(*pair, 64).token_head_bytes
        assert blocks[backend_name(*pair)] == pytest.approx(ratio * blocks[None], rel=1e-3)


@pytest.fixture(scope="module")
def at_once():
    """What an engine with room for everything says to MANY."""
    with engine(backend=backend_name("int4", "int4")) as llm:
        return generate(llm, MANY, 40)


SCHEDULES = {
    "chunks of 32 tokens": {"max_num_batched_tokens": 32},
    "pages of 16 tokens": {"block_size": 16},
    "one request at a time": {"max_num_seqs": 1},
    "speculation": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    },
    "a draft model": {"speculative_config": {"method": "draft_model", "model": str(SHIPPED), "num_speculative_tokens": 3}},
}


@pytest.mark.parametrize("schedule", [later(s) if s == "one request at a time" else s for s in SCHEDULES])
def test_schedules_change_nothing(schedule: str, at_once) -> None:
    with engine(backend=backend_name("int4", "int4"), **SCHEDULES[schedule]) as llm:
        assert_same(generate(llm, MANY, 40), at_once, within=1e-4)
        if "speculative_config" in SCHEDULES[schedule]:
            assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0


def test_compiled() -> None:
    said = []
    for eager in (True, False):
        with engine(backend=backend_name("int8", "int8"), enforce_eager=eager) as llm:
            said.append(generate(llm))
    assert_same(said[1], said[0])


def test_preemption_changes_nothing(at_once) -> None:
    """A pool in which the requests do not fit."""
    with engine(
        backend=backend_name("int4", "int4"), block_size=16, num_gpu_blocks_override=24, enable_prefix_caching=False
    ) as llm:
        assert_same(generate(llm, MANY, 40), at_once, within=1e-4)
        assert metric(llm, "vllm:num_preemptions") > 0


def test_prefix_hits_change_nothing() -> None:
    """The second time the pages of the prompts are found; a prompt that shares a beginning reads another one's pages."""
    prompts = [list(TEXT[:150]), list(TEXT[:130]) + list(b"return")]
    with engine(backend=backend_name("int4", "int4"), block_size=16) as llm:
        first = generate(llm, prompts[:1])
        assert metric(llm, "vllm:prefix_cache_hits") == 0
        again = generate(llm, prompts)
        assert metric(llm, "vllm:prefix_cache_hits") >= 144 + 128
    with engine(backend=backend_name("int4", "int4"), block_size=16, enable_prefix_caching=False) as llm:
        alone = generate(llm, prompts[1:])
    assert_same(again, first + alone, within=1e-4)


def test_several_samples_share_a_prompt() -> None:
    with engine(backend=backend_name("int8", "int4_g32")) as llm:
        found = generate(llm, PROMPTS[1:2], n=4, temperature=1.0, seed=1)
        assert len(found) == 4
        assert len({said.tokens for said in found}) > 1
        assert found == generate(llm, PROMPTS[1:2], n=4, temperature=1.0, seed=1)


#: What vLLM reads in config.json of MiMo-V2, and transformers does not write.
MIMO: dict[str, Any] = {
    "hybrid_layer_pattern": [0, 1],
    "moe_layer_freq": [0, 0],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 96,
    "swa_v_head_dim": 64,
    "sliding_window_size": 16,
    "add_swa_attention_sink_bias": True,
    "rope_theta": 5e6,
    "swa_rope_theta": 1e4,
    "partial_rotary_factor": 0.334,
    "layernorm_epsilon": 1e-5,
}


@pytest.mark.parametrize("weights", [None, "int4_g32"])
def test_values_with_fewer_dims_than_keys(weights: str | None, tmp_path: Path) -> None:
    """MiMo-V2 takes a backend of vLLM's whatever is selected; with sinks, whose name transformers changes."""
    layers = {"layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "dense"]}
    sizes = LLAMA | {"head_dim": 96, "v_head_dim": 64, "sliding_window": 16, "attention_value_scale": None, "rms_norm_eps": 1e-5}
    folder = save(made(MiMoV2FlashConfig(**sizes, **layers)), tmp_path / "sixteen")
    if weights is not None:
        folder = save(quantized(folder, weights=weights), tmp_path / weights)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | MIMO))
    prompts = [list(range(1, 40)), [3, 1, 4, 1, 5]]
    with engine(folder, backend_name("int8", "int8"), additional_config=EXACT) as llm:
        found = generate(llm, prompts)
    cache_options = {"keys": "int8", "values": "int8", "rotate_keys": False}
    if weights is None:
        model = quantized(folder, **cache_options)
    else:
        model = load(folder, dtype=DTYPE, **cache_options)
        model.generation_config.eos_token_id = None
    assert_same(found, by_transformers(model, prompts))


def test_rotated_keys() -> None:
    options = {"halfbyte": {"prefill": "exact", "rotate_keys": True}}
    with engine(backend=backend_name("int8", "int4"), additional_config=options) as llm:
        found = generate(llm)
    assert_same(found, by_transformers(quantized(keys="int8", values="int4", rotate_keys=True)))


@pytest.mark.parametrize("prefill", ["exact", "cache"])
def test_calibrated_keys(prefill: str, tmp_path: Path) -> None:
    """Keys are stored, and queries read them, as in halfbyte.hf; a prompt reads its own keys unquantized, or as they are stored."""
    model = quantized(keys="int8", values="int8")
    file = calibrate_keys(model, torch.tensor([list(TEXT[5000:5400])]), 64).write(tmp_path / "keys.safetensors")
    options = {"halfbyte": {"prefill": prefill, "calibration": str(file)}}
    with engine(backend=backend_name("int8", "int8"), additional_config=options) as llm:
        found = generate(llm)
    if prefill == "exact":
        assert_same(found, by_transformers(quantized(keys="int8", values="int8", calibration=file)))
    with engine(backend=backend_name("int8", "int8"), additional_config={"halfbyte": {"prefill": prefill}}) as llm:
        assert generate(llm) != found


def test_formats_by_layer(tmp_path: Path) -> None:
    """A cache plan, whose layers have pages of different sizes."""
    plan = plan_for(SHIPPED, tmp_path, [("int8", "int4_g32"), ("int8_g32", "fp8"), ("bf16", "int4")])
    with engine(backend=PLAN, additional_config={"halfbyte": {"prefill": "exact", "plan": str(plan)}}) as llm:
        found = generate(llm)
    assert_same(found, by_transformers(quantized(plan=plan)))


def test_formats_by_layer_where_windows_alternate(tiny, tmp_path: Path) -> None:
    """Pages of the smaller layers are padded."""
    folder = tiny("gemma2")
    plan = plan_for(folder, tmp_path, [("int8", "int4_g32"), ("int8_g32", "fp8")])
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6] * 3, list(range(1, 60))]
    with engine(folder, PLAN, additional_config={"halfbyte": {"prefill": "exact", "plan": str(plan)}}, block_size=16) as llm:
        found = generate(llm, prompts)
    assert_same(found, by_transformers(quantized(folder, plan=plan), prompts))


def test_layers_that_stay_in_16_bits() -> None:
    with engine(backend=backend_name("int8", "int4"), additional_config=EXACT, kv_cache_dtype_skip_layers=["0"]) as llm:
        found = generate(llm)
    assert_same(found, by_transformers(quantized(keys="int8", values="int4", rotate_keys=False, skip_layers=(0,))))


@pytest.mark.parametrize("family", ["mistral", "gemma2", "phi3", "gpt_oss"])
def test_families(family: str, tiny) -> None:
    """A sliding window; softcap with alternating windows; one stored projection for q, k and v; sinks and experts."""
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6] * 3, list(range(1, 60))]
    with engine(tiny(family), backend_name("int8", "int4_g32"), additional_config=EXACT, block_size=16) as llm:
        found = generate(llm, prompts)
    assert_same(found, by_transformers(quantized(tiny(family), keys="int8", values="int4_g32"), prompts))


@pytest.mark.cpu_platform
def test_alibi(tmp_path: Path) -> None:
    """Bloom, by vLLM's own attention in fp32: halfbyte.hf has no models with ALiBi."""
    torch.manual_seed(7)
    config = BloomConfig(vocab_size=101, hidden_size=64, n_layer=2, n_head=2, initializer_range=0.3)
    folder = save(AutoModelForCausalLM.from_config(config, dtype=torch.float32), tmp_path / "bloom")
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6] * 3, list(range(1, 60))]
    found = []
    for backend in (None, backend_name("bf16", "bf16")):
        with engine(folder, backend, block_size=32) as llm:
            found.append(generate(llm, prompts, 12))
    assert_same(found[1], found[0], within=0.05)


@pytest.mark.cpu_platform
@pytest.mark.parametrize("name", ["CPU_ATTN", "FLEX_ATTENTION"])
def test_a_cache_dtype_selects_the_backend(name: str) -> None:
    """As vLLM 0.33 lets plugins register its names; without it each backend is vLLM's own."""
    register()
    config = VllmConfig()
    with set_current_vllm_config(config):
        assert not issubclass(AttentionBackendEnum[name].get_class(), HalfbyteBackend)
        config.cache_config.cache_dtype = cache_dtype(backend_name("int8", "int4_g32"))
        backend = AttentionBackendEnum[name].get_class()
        assert backend.get_name() == "HALFBYTE_INT8__INT4_G32"
        options = (64, torch.bfloat16), (64, False, False, False, False, None)
        for dtype, refused in ((config.cache_config.cache_dtype, False), ("halfbyte_int8__int8", True), ("fp8", True)):
            reason = backend.supports_combination(*options[0], dtype, *options[1])
            assert (reason is not None and f"kv_cache_dtype={dtype!r}" in reason) == refused


def test_cache_dtypes_are_registered_where_vllm_has_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each, although vLLM calls the plugin in every process and several times."""
    found: dict[str, Any] = {}

    def decorate(name: str) -> Any:
        assert name not in found
        return lambda handler: found.setdefault(name, handler())

    monkeypatch.setattr(cache, "register_kv_cache_dtype", decorate, raising=False)
    monkeypatch.setattr(cache, "KV_CACHE_DTYPES", found, raising=False)
    for _ in range(2):
        register()
    assert {"halfbyte_int8__int4_g32", "halfbyte_plan"} <= set(found)
    handler = found["halfbyte_int8__int4_g32"]
    assert (handler.torch_dtype(), handler.quant_mode()) == (torch.uint8, KVQuantMode.NONE)
