"""Quantized mixtures of experts in real engines: transformers' words, and one clear error for what is not served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as tf
from engines import assert_same, by_transformers, engine, generate, later, quantized, save
from halfbyte.errors import HalfbyteError
from test_hf_expert_files import write
from test_weights import RANKS, plain, refused
from tiny_models import LLAMA, base, made

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 3, list(range(1, 60))]


SIZES = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
CONFIGS = {
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**SIZES),
    "mixtral": lambda: tf.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2),
}


@pytest.fixture(scope="session")
def mixture(tiny, tmp_path_factory: pytest.TempPathFactory):
    """mixture(family, format): the folder of a tiny mixture with weights of that format."""
    root = tmp_path_factory.mktemp("mixtures")
    return lambda family, fmt: save(quantized(plain_folder(tiny, family, root), weights=fmt), root / f"{family}-{fmt}")


def plain_folder(tiny, family: str, root: Path) -> Path:
    return save(made(CONFIGS[family]()), root / family) if family in CONFIGS else tiny(family)


@pytest.mark.parametrize(
    ("family", "fmt", "ranks"),
    [("qwen3_moe", "int4_g32", 1), ("gpt_oss", "mxfp4", 1), ("mixtral", "nvfp4", 2)],
)
def test_an_engine_says_what_transformers_says(family: str, fmt: str, ranks: int, mixture) -> None:
    folder = mixture(family, fmt)
    with engine(folder, **RANKS[ranks]) as llm:
        found = generate(llm, PROMPTS)
    assert_same(found, by_transformers(plain(folder), PROMPTS), within=1e-3)


@pytest.mark.parametrize(("family", "kind", "ranks"), [("mixtral", "gptq v2 act-order", 1), ("qwen2_moe", "ct nvfp4", 1), ("qwen3_moe", "awq", 2)])
def test_one_expert_a_tensor(family: str, kind: str, ranks: int, tmp_path: Path) -> None:
    """Files of other libraries; of qwen2_moe with a shared expert."""
    model = write(tmp_path, family, kind)
    model.generation_config.eos_token_id = None
    options = {"quantization": "halfbyte", "hf_overrides": {"architectures": [type(model).__name__]}}
    with engine(tmp_path, **options, **RANKS[ranks]) as llm:
        found = generate(llm, PROMPTS)
    assert_same(found, by_transformers(model, PROMPTS), within=1e-3)


def test_reload(mixture) -> None:
    with engine(mixture("qwen3_moe", "int4_g32")) as llm:
        first = generate(llm, PROMPTS)
        llm.collective_rpc("reload_weights")
        assert generate(llm, PROMPTS) == first
