"""LoRA adapters of vLLM over halfbyte's cache and weights: what a model says into which the adapter was merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engines import SHIPPED, assert_same, engine, generate, quantized, save
from safetensors.torch import save_file

from halfbyte.nn import QuantLinear
from halfbyte.vllm.names import backend_name

RANK, ALPHA = 8, 16
TARGETS = ("q_proj", "v_proj", "down_proj")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(an adapter of the shipped model, the model with it merged)."""
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("lora")
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, layer in model.named_modules():
        if name.endswith(TARGETS):
            a = torch.randn(RANK, layer.in_features, generator=generator) / layer.in_features**0.5
            b = torch.randn(layer.out_features, RANK, generator=generator) * 0.05
            tensors |= {f"base_model.model.{name}.lora_{n}.weight": t for n, t in (("A", a), ("B", b))}
            layer.weight.data += ALPHA / RANK * b @ a
    adapter = root / "adapter"
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS, "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return adapter, save(model, root / "merged")


def test_over_a_packed_cache(adapted: tuple[Path, Path]) -> None:
    """In INT8: the sums of an adapter and of a merged weight round differently, and a code of INT4 that flips is a large step."""
    adapter, merged = adapted
    with engine(backend=backend_name("int8", "int8"), enable_lora=True, max_lora_rank=RANK) as llm:
        plain, found = generate(llm), generate(llm, lora=adapter)
    assert [said.tokens for said in plain] != [said.tokens for said in found]
    with engine(merged, backend_name("int8", "int8")) as llm:
        assert_same(found, generate(llm))


@pytest.mark.nightly
def test_over_packed_weights(adapted: tuple[Path, Path], tmp_path: Path) -> None:
    """Against an engine over the values of these weights in fp32."""
    adapter, _ = adapted
    model = quantized(weights="int8_col")
    with engine(save(model, tmp_path / "packed"), enable_lora=True, max_lora_rank=RANK) as llm:
        found = generate(llm, lora=adapter)
    with engine(dequantized(model, tmp_path / "plain"), enable_lora=True, max_lora_rank=RANK) as llm:
        assert_same(found, generate(llm, lora=adapter), within=1e-3)


def dequantized(model: torch.nn.Module, folder: Path) -> Path:
    """The shipped model with the values that a quantized one computes with."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    for name, layer in model.named_modules():
        if isinstance(layer, QuantLinear):
            plain.get_submodule(name).weight.data.copy_(layer.weight.dequantize())
    return save(plain, folder)
