"""MTP heads in real engines: drafts that are accepted, so of weights that were read, and the texts of engines without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import assert_same, engine, generate, later, metric, quantized, save
from mtp_heads import SIXTEEN, with_head
from test_hf_expert_files import write
from test_mla import IN_TORCH, own_limits
from tiny_models import made

from halfbyte.formats import weight_format
from halfbyte.vllm.names import backend_name
from halfbyte.vllm.stored import Own
from halfbyte.vllm.weights import HalfbyteConfig

__all__ = ["own_limits"]
PROMPTS = [[1 + (7 * i * i + j * j + 3 * i * j) % 100 for j in range(5 + 13 * i)] for i in range(3)]
BACKEND = backend_name("int8", "int8")


def methods_of_draft(worker: Any) -> set[str]:
    """How layers of a draft model multiply."""
    return {type(getattr(module, "quant_method", None)).__name__ for module in worker.model_runner.drafter.model.modules()}


def formats_of_layers(worker: Any) -> list[str]:
    """Of the values of each layer with a cache."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    return [layer.impl.formats.values for layer in layers if hasattr(layer, "kv_cache")]


def folder_of(family: str, weights: str | None, root: Path) -> Path:
    """A tiny model of one layer: in fp32, in a format of halfbyte, or in another library's files."""
    model = made(SIXTEEN[family]())
    if weights == "gptq v2":
        write(root / weights, family, weights, model=model)
        return root / weights
    sixteen = save(model, root / "sixteen")
    return sixteen if weights is None else save(quantized(sixteen, weights=weights), root / weights)


@pytest.mark.parametrize(
    ("family", "weights", "of_head"),
    [
        ("glm4_moe", "int4_g32", "int4_g32"),
        later("glm4_moe", "gptq v2", "gptq v2"),
        ("mimo", "int4_g32", "int4_g32"),
        later("deepseek_v3", None, None),
        ("deepseek_v3", "int4_g32", None),
        later("deepseek_v3", "int4_g32", "int4_g32"),
        later("glm4_moe_lite", "int4_g32", "int4_g32"),
        later("exaone_moe", "int4_g32", "int4_g32"),
        later("hy_v3", "int4_g32", "int4_g32"),
        later("qwen3_next", "int4_g32", "int4_g32"),
    ],
)
def test_a_head_drafts_what_its_model_says(
    family: str, weights: str | None, of_head: str | None, tmp_path: Path, own_limits: None
) -> None:
    """Stacks of experts, names of vLLM's own, heads in 16 bits; drafts have packed pages, and latents too."""
    source = folder_of(family, weights, tmp_path)
    like = source if of_head == weights else folder_of(family, of_head, tmp_path)
    folder = with_head(family, source, like, tmp_path / "mtp")
    options: dict[str, Any] = IN_TORCH if weights != "gptq v2" else IN_TORCH | {"quantization": "halfbyte"}
    with engine(folder, BACKEND, **options) as llm:
        expected = generate(llm, PROMPTS, 40)
    speculation = {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": BACKEND}
    with engine(folder, BACKEND, speculative_config=speculation, **options) as llm:
        said = generate(llm, PROMPTS, 40)
        drafts, accepted = (metric(llm, f"vllm:spec_decode_num_{name}_tokens") for name in ("draft", "accepted"))
        formats = llm.collective_rpc(formats_of_layers)[0]
        methods = llm.collective_rpc(methods_of_draft)[0]
    assert_same(said, expected)
    assert accepted > drafts / (2 if of_head == weights else 5) > 0  # of a head that is not read, one in a hundred
    assert formats == ["int8", "int8"]
    assert ("HalfbyteLinear" in methods) == (of_head is not None)


def test_names_of_heads_in_files() -> None:
    """MiMo and ERNIE number heads by themselves; vLLM's names of Step 3.5 have a word more than those in the files."""
    files = [f"model.{layer}.mlp.up_proj" for layer in ("layers.1", "layers.3", "mtp_layers.1", "mtp_block.2")]
    config = HalfbyteConfig({name: Own(name, weight_format("int4_g32"), False) for name in files})
    asked = ("model.layers.1", "model.layers.3.mtp_block", "model.layers.4", "model.layers.5", "model.layers.6", "mtp.layers.7")
    found = [config.name_in_files(f"{layer}.mlp.up_proj", 3) for layer in asked]
    assert found == [*files, "model.layers.6.mlp.up_proj", "mtp.layers.7.mlp.up_proj"]
