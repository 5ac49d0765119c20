"""What an engine cannot do with halfbyte's cache is one clear error at its start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import SHIPPED, engine, generate, later, plan_for, quantized, refused, save
from tiny_models import LLAMA, made
from transformers import AutoConfig, Llama4TextConfig, LlamaConfig
from vllm.v1.attention.selector import _cached_get_attn_backend

from halfbyte.calibrated_keys import CalibratedKeys, key_transform
from halfbyte.errors import HalfbyteError
from halfbyte.hf.model_support import model_sizes
from halfbyte.settings import KEYS, VALUES
from halfbyte.vllm.names import PLAN, backend_name

PAIR = backend_name("int8", "int8")


def test_an_unknown_pair_of_formats() -> None:
    assert "HALFBYTE_INT3__INT8" in refused(backend="HALFBYTE_INT3__INT8")


def test_formats_that_do_not_live_in_a_page() -> None:
    """The default of `hf.quantize` among them."""
    assert f"keys={KEYS!r} cannot be stored in pages: the 16-bit tail" in refused(backend=backend_name(KEYS, VALUES))
    assert "values='int8_tensor' cannot be stored in pages: one scale for all pages" in refused(
        backend=backend_name("int8", "int8_tensor")
    )
    assert "values='int4_channel' is for keys only" in refused(backend=backend_name("int8", "int4_channel"))


def test_a_cache_dtype_beside_the_formats() -> None:
    for dtype in ("fp8", "bfloat16"):
        assert f"kv_cache_dtype='{dtype}'" in refused(backend=PAIR, kv_cache_dtype=dtype)


def test_layers_that_the_model_does_not_have() -> None:
    said = refused(backend=PAIR, kv_cache_dtype_skip_layers=["0", "99"])
    assert "kv_cache_dtype_skip_layers names layers 99; the model has layers 0 to" in said
    said = refused(backend=PAIR, kv_cache_dtype_skip_layers=["sliding_window", "-1", "00", "model.layers.0"])
    assert "names layers -1, 00, model.layers.0;" in said


def test_heads_that_fit_no_page(tmp_path: Path) -> None:
    folder = save(made(LlamaConfig(**LLAMA | {"head_dim": 48})), tmp_path / "llama")
    assert "values has a last axis of 48, which groups of 32 (int4_g32) do not divide" in refused(
        backend=backend_name("int8", "int4_g32"), model=folder
    )


def test_chunked_attention(tmp_path: Path) -> None:
    sizes = {"head_dim": 32, "intermediate_size_mlp": 128, "num_local_experts": 2, "attention_chunk_size": 64}
    folder = save(made(Llama4TextConfig(**LLAMA | sizes)), tmp_path / "llama4")
    assert "chunked attention, or another that vLLM builds" in refused(backend=PAIR, model=folder)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prefil": "exact"}, "prefil"),
        ({"plan": "plan.json"}, "a plan goes with attention backend HALFBYTE_PLAN"),
        ({"prefill": "always"}, "prefill='always'"),
        ({"rotate_keys": 1}, "rotate_keys=1"),
        ({"sink_tokens": -1}, "sink_tokens=-1"),
        ({"recent_tokens": "32"}, "recent_tokens='32'"),
        ({1: 2, "x": 3}, "halfbyte options [1, 'x']"),
    ],
)
def test_wrong_options(options: dict[str, object], said: str) -> None:
    assert said in refused(backend=PAIR, additional_config={"halfbyte": options})


def test_sink_and_recent_tokens_that_vllm_cannot_keep() -> None:
    """Beside 16-bit formats, without the manager of two kinds of pages, and with a connector that moves one kind."""
    tokens = {"additional_config": {"halfbyte": {"sink_tokens": 4, "recent_tokens": 32}}}
    assert "values='bf16' is a 16-bit format" in refused(backend=backend_name("int8", "bf16"), **tokens)
    assert "need vLLM's hybrid KV cache manager" in refused(backend=PAIR, disable_hybrid_kv_cache_manager=True, **tokens)
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    assert "KV connectors do not move the pages of sink_tokens" in refused(backend=PAIR, kv_transfer_config=connector, **tokens)


@pytest.mark.parametrize("options", [None, "exact"])
def test_options_that_are_no_object(options: object) -> None:
    assert f"halfbyte={options!r}; expected an object" in refused(backend=PAIR, additional_config={"halfbyte": options})


@pytest.mark.parametrize("name", ["prefill", "HalfByte"])
def test_options_in_another_place(name: str) -> None:
    assert f"additional_config has ['{name}']; expected" in refused(backend=PAIR, additional_config={name: "exact"})


def test_options_without_the_backend() -> None:
    """In a process whose first engine it is: vLLM keeps the answer about backends."""
    _cached_get_attn_backend.cache_clear()
    assert "attention backend CPU_ATTN is not halfbyte's" in refused(
        backend=None, additional_config={"halfbyte": {"prefill": "exact"}}
    )


def test_a_plan_backend_without_a_plan() -> None:
    assert "halfbyte option plan=None" in refused(backend=PLAN)


def test_a_plan_that_does_not_fit(tiny, tmp_path: Path) -> None:
    """One for another model, one whose formats need more than pages, and one that says rotate_keys itself."""
    other = plan_for(tiny("mistral"), tmp_path, [("int8", "int8")])
    assert "plan was made for another model" in refused(backend=PLAN, additional_config={"halfbyte": {"plan": str(other)}})
    channel = plan_for(SHIPPED, tmp_path, [("int8", "int8"), ("int4_channel", "int8")])
    assert "plan, layer 1" in refused(backend=PLAN, additional_config={"halfbyte": {"plan": str(channel)}})
    assert "rotate_keys" in refused(backend=PLAN, additional_config={"halfbyte": {"plan": str(channel), "rotate_keys": True}})


def test_calibrated_keys_that_do_not_fit(tiny, tmp_path: Path) -> None:
    """Of a model of other sizes, of the same sizes with other norms, and of no file."""
    files = []
    for name, sizes in (
        ("mistral", model_sizes(AutoConfig.from_pretrained(tiny("mistral")))),
        ("shipped", model_sizes(AutoConfig.from_pretrained(SHIPPED))),
    ):
        shape = sizes.kv_heads, sizes.head_dim, sizes.head_dim
        layers = tuple(key_transform(torch.eye(shape[1]).expand(shape), None) for _ in range(sizes.layers))
        files.append(CalibratedKeys(sizes, "0" * 16, layers).write(tmp_path / f"{name}.safetensors"))
    for file, said in zip(
        (*files, tmp_path / "none"), ("model_type mistral", "other weights of its norms", "cannot be read"), strict=True
    ):
        assert said in refused(backend=PAIR, additional_config={"halfbyte": {"calibration": str(file)}})


@pytest.mark.parametrize("weights", [later(None), "int4_g64"])
def test_a_saved_packed_cache_is_not_replaced_in_silence(weights: str | None, tmp_path: Path) -> None:
    folder = save(quantized(weights=weights, keys="int8", values="int4_g32"), tmp_path / "packed")
    with (
        pytest.raises((ValueError, RuntimeError, HalfbyteError), match="attention-backend HALFBYTE_INT8__INT4_G32"),
        engine(folder),
    ):
        pass
    with engine(folder, backend_name("int8", "int4_g32")) as llm:
        assert generate(llm)
