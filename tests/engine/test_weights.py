"""Quantized folders in real engines: transformers' words, tensor parallel as well, and damaged or unfit folders."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import DTYPE, EXACT, SHIPPED, assert_same, by_transformers, engine, generate, later, quantized, refused, save
from external_folders import blocks, tiny, write
from safetensors.torch import load_file, save_file
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

from halfbyte import quantize
from halfbyte.hf import load
from halfbyte.vllm import selection, warm_up
from halfbyte.vllm.names import backend_name
from halfbyte.vllm.weights import HalfbyteLinear

#: Zero points; a table and nested scales; a scale for the whole tensor; a scale a row.
FORMATS = ("int4_g64", "nf4_dq", "nvfp4", "int8_col")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory):
    """folder(format): the shipped model with weights of that format."""
    root = tmp_path_factory.mktemp("quantized")
    return lambda fmt: save(quantized(weights=fmt), root / fmt)


#: Options of an engine of so many ranks.
RANKS: dict[int, dict[str, Any]] = {1: {}, 2: {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}}


@pytest.mark.parametrize("ranks", [1, later(2)])
@pytest.mark.parametrize("fmt", [fmt if fmt in ("nf4_dq", "nvfp4") else later(fmt) for fmt in FORMATS])
def test_an_engine_says_what_transformers_says(fmt: str, ranks: int, folder) -> None:
    """Over vLLM's own cache, which rounds nothing here."""
    with engine(folder(fmt), **RANKS[ranks]) as llm:
        found = generate(llm)
    assert_same(found, by_transformers(plain(folder(fmt))), within=1e-3)


@pytest.mark.parametrize("ranks", [later(1), 2])
def test_packed_weights_and_a_packed_cache(ranks: int, folder) -> None:
    with engine(folder("nvfp4"), backend_name("int8", "int4_g32"), additional_config=EXACT, **RANKS[ranks]) as llm:
        found = generate(llm)
    assert_same(found, by_transformers(plain(folder("nvfp4"), keys="int8", values="int4_g32")))


@pytest.mark.parametrize("ranks", [1, later(2)])
def test_a_quantized_output_layer(ranks: int, tmp_path: Path) -> None:
    folder = save(quantized(weights="int4_g64", lm_head="int8_col"), tmp_path / "head")
    with engine(folder, **RANKS[ranks]) as llm:
        found = generate(llm)
    assert_same(found, by_transformers(plain(folder)), within=1e-3)


def test_kernels_of_linear_layers_are_loaded_without_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the registry of JIT kernels, which the CPU platform does not use: else the first prompt of each size would load them."""
    loaded: list[int] = []
    method, registry = HalfbyteLinear([]), JitWarmupRegistry(None)
    method._dtype, method._most_rows = torch.bfloat16, 64
    with registry.activate():
        method._begin_to_compile(torch.nn.Module(), [quantize(torch.ones(64, 128), "int8_col")])
    monkeypatch.setattr(warm_up, "_layers", [([5, 3], loaded.append)])
    monkeypatch.setattr(warm_up, "compiling_only", nullcontext)
    for _ in range(2):  # nothing is left for the second
        registry.warmup()
    assert loaded == [5, 3]


#: Of each library: (kind of tests/checkpoint_files.py, ranks).
OTHERS = (
    later("gptq v1", 1),
    ("gptq v2 act-order", 1),
    later("gptq v2 act-order", 2),
    ("awq", 1),
    ("ct int4 asym g_idx", 1),
    later("ct int8", 1),
    later("ct nvfp4", 1),
    ("modelopt nvfp4", 1),
    later("quark mxfp4", 1),
    later("bnb fp4", 1),
    ("bnb nf4 nested", 1),
    later("bnb nf4 nested", 2),
)


@pytest.mark.parametrize(("kind", "ranks"), OTHERS)
def test_other_libraries_weights(kind: str, ranks: int, tmp_path: Path) -> None:
    """All linear layers but one kind, which the files hold in 16 bits."""
    model = write(tiny(), tmp_path, blocks(kind, without="o_proj"))
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6] * 3, list(range(1, 60))]
    with engine(tmp_path, quantization="halfbyte", **RANKS[ranks]) as llm:
        found = generate(llm, prompts)
    assert_same(found, by_transformers(model, prompts), within=1e-3)


def test_a_cache_that_the_files_name_is_passed_over(tmp_path: Path) -> None:
    """NVIDIA's folders name an FP8 cache, which is vLLM's default for them; that of the backend goes before it."""
    model = write(tiny(), tmp_path, blocks("modelopt nvfp4"), kv_cache_quant_algo="FP8")
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6] * 3, list(range(1, 60))]
    with engine(tmp_path, backend_name("fp16", "fp16"), quantization="halfbyte") as llm:
        found = generate(llm, prompts)
    assert_same(found, by_transformers(model, prompts))
    options = {"backend": backend_name("fp16", "fp16"), "quantization": "halfbyte"}
    assert "kv_cache_dtype='bfloat16'" in refused(tmp_path, kv_cache_dtype="bfloat16", **options)


def test_without_the_flag_vllm_reads_them_itself(tmp_path: Path) -> None:
    """Its own GPTQ refuses zero points."""
    write(tiny(), tmp_path, blocks("gptq v1"))
    assert "Unsupported quantization config" in refused(tmp_path)


def plain(folder: Path, **cache: str) -> Any:
    """The folder as a transformers model."""
    model = load(folder, dtype=DTYPE, **cache)
    model.generation_config.eos_token_id = None
    return model


def copied(folder: Path, to: Path, change) -> Path:
    """A copy of a folder with other tensors."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def test_a_missing_part_is_named(folder, tmp_path: Path) -> None:
    bad = copied(folder("int4_g64"), tmp_path / "bad", lambda t: t.pop("model.layers.1.mlp.up_proj.weight_scales"))
    assert "model.layers.1.mlp.up_proj" in refused(bad)


def test_scales_that_are_not_finite_are_named(folder, tmp_path: Path) -> None:
    bad = copied(
        folder("int4_g64"), tmp_path / "bad", lambda t: t["model.layers.0.self_attn.o_proj.weight_scales"].fill_(torch.inf)
    )
    assert "model.layers.0.self_attn.o_proj" in refused(bad)


def test_weights_that_nobody_quantized(folder, tmp_path: Path) -> None:
    """A 16-bit folder, a configuration that names no weights, and weights that vLLM is to make up."""
    assert "config.json has no quantization_config" in refused(SHIPPED, quantization="halfbyte")
    config = {"quantization_config": {"quant_method": "halfbyte", "weights": "int4_g64"}}
    assert "has no modules" in refused(SHIPPED, hf_overrides=config)
    assert "load_format='dummy'" in refused(folder("int4_g64"), load_format="dummy")


def test_options_of_a_cache_that_is_not_packed(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """On platforms whose backends vLLM does not ask halfbyte for."""
    monkeypatch.setattr(selection, "check_used", lambda config, backend: None)
    assert "attention backend CPU_ATTN is not" in refused(folder("int4_g64"), additional_config=EXACT)


def test_an_unknown_format_is_named(folder, tmp_path: Path) -> None:
    bad = copied(folder("int4_g64"), tmp_path / "bad", lambda _: None)
    config = json.loads((bad / "config.json").read_text())
    found = config["quantization_config"]["modules"]
    found[next(iter(found))] = "int5_g64"
    (bad / "config.json").write_text(json.dumps(config))
    assert "int5_g64" in refused(bad)
