"""Quantized mixtures of experts in real engines: transformers' words, and one clear error for what is not served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from engines import ON_GPU, assert_same, by_transformers, engine, generate, later, quantized, refused, save
from external_folders import gpt_oss
from families import tiny_model
from mixtures import expand
from safetensors.torch import load_file
from test_hf_expert_files import ONE, drop, write
from test_weights import RANKS, copied, plain
from tiny_models import LLAMA, made

import halfbyte.hf

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 3, list(range(1, 60))]
#: As DeepSeek-V3 routes: groups of experts by their sigmoids, a bias for the choice alone, a shared expert; a dense layer first.
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 128,
}
#: vLLM's own latent attention on a CPU has latents of this size only, and on a GPU heads of 128 in prompts; `topk_method` and
#: `scoring_func` tell it how tokens are routed.
LATENT: dict[str, Any] = {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128 if ON_GPU else 32,
    "v_head_dim": 128 if ON_GPU else 32,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_key_value_heads": LLAMA["num_attention_heads"],
    "head_dim": 64,
}
#: Its published files have another name for the bias than transformers.
EXAONE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
CONFIGS = {
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**LLAMA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128),
    "mixtral": lambda: tf.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "glm4_moe": lambda: tf.Glm4MoeConfig(**LLAMA, **DEEPSEEK),
    "exaone_moe": lambda: tf.ExaoneMoeConfig(**LLAMA, **EXAONE, mlp_layer_types=["dense", "sparse"]),
    "deepseek_v3": lambda: tf.DeepseekV3Config(**{**LLAMA, **DEEPSEEK, **LATENT}),
}


def sixteen_bits(family: str) -> Any:
    """A tiny mixture whose experts are not chosen by their scores alone."""
    model = made(CONFIGS[family]())
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(torch.linspace(-0.2, 0.2, len(bias)))
    return model


@pytest.fixture(scope="session")
def mixture(tiny, tmp_path_factory: pytest.TempPathFactory):
    """mixture(family, format): the folder of a tiny mixture with weights of that format."""
    root = tmp_path_factory.mktemp("mixtures")

    def folder(family: str, fmt: str) -> Path:
        sixteen = save(sixteen_bits(family), root / family) if family in CONFIGS else tiny(family)
        return save(quantized(sixteen, weights=fmt), root / f"{family}-{fmt}")

    return folder


@pytest.mark.parametrize(
    ("family", "fmt", "ranks"),
    [
        ("qwen3_moe", "int4_g32", 1),
        later("qwen3_moe", "nf4_dq", 2),
        ("gpt_oss", "mxfp4", 1),
        later("gpt_oss", "int8_col", 2),
        later("mixtral", "nvfp4", 2),
        ("glm4_moe", "nvfp4", 2),
        ("exaone_moe", "int4_g32", 1),
    ],
)
def test_an_engine_says_what_transformers_says(family: str, fmt: str, ranks: int, mixture) -> None:
    """Stacks in folders of halfbyte; gpt-oss has biases and an activation of its own."""
    folder = mixture(family, fmt)
    with engine(folder, **RANKS[ranks]) as llm:
        found = generate(llm, PROMPTS)
    assert_same(found, by_transformers(plain(folder), PROMPTS), within=1e-3)


@pytest.mark.parametrize(
    ("family", "kind", "ranks"),
    [("mixtral", "gptq v2 act-order", 1), later("qwen2_moe", "ct nvfp4", 1), later("qwen3_moe", "awq", 2)],
)
def test_one_expert_a_tensor(family: str, kind: str, ranks: int, tmp_path: Path) -> None:
    """Files of other libraries; qwen2_moe has a shared expert."""
    model = write(tmp_path, family, kind)
    model.generation_config.eos_token_id = None
    with engine(tmp_path, **foreign(model), **RANKS[ranks]) as llm:
        found = generate(llm, PROMPTS)
    assert_same(found, by_transformers(model, PROMPTS), within=1e-3)


def biases(worker: Any) -> list[torch.Tensor]:
    """Copies of the biases of a model's routers."""
    return [p.data.clone() for n, p in worker.get_model().named_parameters() if n.endswith("e_score_correction_bias")]


def test_a_bias_of_the_router_that_the_experts_hold(tmp_path: Path) -> None:
    """That of Laguna, whose router does not run on a CPU."""
    model = tiny_model("laguna")
    expected = [t for n, t in model.state_dict().items() if n.endswith("e_score_correction_bias")]
    folder = save(halfbyte.hf.quantize(model, weights="int4_g32"), tmp_path / "laguna")
    with engine(folder) as llm:
        (found,) = llm.collective_rpc(biases)
    assert len(found) == 1
    assert torch.equal(found[0], expected[0])


@pytest.mark.nightly
def test_experts_of_deepseek(mixture, tmp_path: Path) -> None:
    """vLLM's own latent attention on a CPU is not that of transformers, so the same values in 16 bits are what is compared with."""
    folder = mixture("deepseek_v3", "int4_g32")
    same = save(expand(plain(folder), sixteen_bits("deepseek_v3")), tmp_path / "same")
    said = []
    for one in (folder, same):
        with engine(one, "CPU_MLA") as llm:
            said.append(generate(llm, PROMPTS))
    assert_same(*said, within=1e-3)


def foreign(model: Any) -> dict[str, Any]:
    """Options for a folder of another library, whose config.json names no class."""
    return {"quantization": "halfbyte", "hf_overrides": {"architectures": [type(model).__name__]}}


def stacks(worker: Any) -> dict[str, torch.Tensor]:
    """Copies of the parts of stacks, by their names in files."""
    found = {n: p.data.clone() for n, p in worker.get_model().named_parameters() if "_stack_" in n}
    return {n.replace("routed_experts.", "").replace("_stack_", ".weight_"): t for n, t in found.items()}


def test_weights_of_another_folder_are_loaded_in_place(mixture, tmp_path: Path) -> None:
    first = mixture("qwen3_moe", "int4_g32")

    def flip(state: dict[str, torch.Tensor]) -> None:
        state.update({name: t.flip(0) for name, t in state.items() if ".experts." in name})

    second = copied(first, tmp_path / "second", flip)
    with engine(first) as llm:
        (before,) = llm.collective_rpc(stacks)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})
        (found,) = llm.collective_rpc(stacks)
    stored = load_file(second / "model.safetensors")
    assert len(found) == 2 * 2 * 3
    assert all(torch.equal(t, stored[name]) and not torch.equal(t, before[name]) for name, t in found.items())


def test_a_missing_part_is_named(mixture, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    bad = copied(mixture("qwen3_moe", "int4_g32"), tmp_path / "bad", lambda state: state.pop(f"{name}.weight_scales"))
    assert name in refused(bad)


def test_what_is_not_served(mixture, tmp_path: Path) -> None:
    assert "does not serve with LoRA" in refused(mixture("qwen3_moe", "int4_g32"), enable_lora=True)
    gpt_oss(tmp_path / "theirs")
    assert "vLLM reads them itself, leave --quantization out" in refused(tmp_path / "theirs", quantization="halfbyte")
    model = write(tmp_path / "partly", "qwen2_moe", "gptq v1", drop(ONE))
    assert "expert 2 is missing" in refused(tmp_path / "partly", **foreign(model))
