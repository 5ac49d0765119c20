"""The memory estimate, against caches and models that are really made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import halfbyte
from halfbyte.errors import CheckpointError, InvalidArgument, Unsupported
from halfbyte.memory import estimate, parse_bytes
from halfbyte.paths import resolve_model, shipped_model

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 100,
}


def folder(path: Path, kind: str, **changes: object) -> str:
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **changes})
    config.save_pretrained(path)
    return str(path)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return folder(tmp_path / "llama", "llama")


@pytest.mark.parametrize(
    ("keys", "values"), [("int8", "int4_g32"), ("int4_channel", "int8"), ("bf16", "fp8"), ("int8_channel", "int4")]
)
def test_cache_bytes_are_those_of_a_cache(llama: str, keys: str, values: str) -> None:
    for context in (96, 100):  # whole blocks of per-channel keys, and not
        found = estimate(llama, batch=2, context=context, keys=keys, values=values)
        cache = halfbyte.KVCache(2, 2, 32, context, keys=keys, values=values)
        assert found.kv_bytes == 3 * (cache.keys.nbytes + cache.values.nbytes)
        assert found.plain_kv_bytes == 3 * 2 * 2 * 2 * context * 32 * 2
        assert found.kv_bytes_per_token == found.kv_bytes / (2 * context)


@pytest.mark.parametrize("weights", ["nf4", "int4_g64", "mxfp4", "int8_col"])
@pytest.mark.parametrize("tied", [True, False])
def test_weight_bytes_are_those_of_a_quantized_model(tmp_path: Path, weights: str, tied: bool) -> None:
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=tied), dtype=torch.bfloat16
    )
    model.config.save_pretrained(tmp_path)
    found = estimate(str(tmp_path), weights=weights)
    assert found.plain_weight_bytes == sum(p.nbytes for p in model.parameters())
    linears = [m.weight for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    packed = sum(halfbyte.quantize(w.float(), weights).nbytes for w in linears)
    assert found.weight_bytes == found.plain_weight_bytes - sum(w.nbytes for w in linears) + packed
    assert found.quantized_parameters == sum(w.numel() for w in linears)


def test_skipped_layers_keep_16_bits(llama: str) -> None:
    all_, one, plain = (estimate(llama, skip_layers=skip).kv_bytes for skip in ((), (-1,), (0, 1, 2)))
    assert one == all_ // 3 * 2 + plain // 3
    assert plain == estimate(llama).plain_kv_bytes
    with pytest.raises(InvalidArgument, match="skip_layers holds 3"):
        estimate(llama, skip_layers=(3,))


def test_tokens_that_fit(llama: str) -> None:
    found = estimate(llama, keys="int4_channel", memory=10**8)
    assert found.tokens_that_fit == int((9 * 10**7 - found.weight_bytes) / found.kv_bytes_per_token)
    assert found.plain_tokens_that_fit is not None
    assert found.tokens_that_fit > 2 * found.plain_tokens_that_fit
    assert estimate(llama, memory=10).tokens_that_fit == 0
    assert estimate(llama).tokens_that_fit is None


def test_sliding_layers_are_counted_at_what_they_keep(tmp_path: Path) -> None:
    model = folder(tmp_path, "gemma2", sliding_window=16)
    short, long = (estimate(model, context=context, keys="int8") for context in (128, 1024))
    assert long.kv_bytes == short.kv_bytes * (1024 + 2 * 128) // (3 * 128)  # two of three layers keep 128 tokens
    assert long.plain_kv_bytes == short.plain_kv_bytes * (1024 + 2 * 16) // (128 + 2 * 16)
    assert any("keep their window and 64 to 127 tokens more" in note for note in long.notes)


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "phi3"])
def test_other_families(tmp_path: Path, kind: str) -> None:
    extra = {"pad_token_id": 0} if kind == "phi3" else {}
    extra |= {"num_attention_heads": 2} if kind == "phi3" else {}
    found = estimate(folder(tmp_path, kind, **extra), weights="nf4")
    assert found.kv_layers == 3
    assert found.kv_bytes < found.plain_kv_bytes
    assert found.weight_bytes < found.plain_weight_bytes


def test_gpt2_has_its_sizes_under_other_names(tmp_path: Path) -> None:
    transformers.GPT2Config(n_embd=64, n_head=2, n_layer=2, vocab_size=100, n_positions=64).save_pretrained(tmp_path)
    found = estimate(str(tmp_path), weights="int8_col")
    assert (found.kv_layers, found.kv_heads, found.head_dim) == (2, 2, 32)
    assert found.quantized_parameters == 2 * 12 * 64 * 64


def test_weights_that_are_quantized_already_are_told(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=64, n_head=2, n_layer=2, vocab_size=100, n_positions=64)
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(tmp_path)
    assert any("already (gptq), and counted in 16 bits" in note for note in estimate(str(tmp_path)).notes)
    assert not any("already" in note for note in estimate(str(tmp_path), weights="int8_col").notes)


def test_a_folder_with_settings_of_a_cache_alone_has_16_bit_weights(tmp_path: Path) -> None:
    model = halfbyte.hf.load(shipped_model())
    path = str(halfbyte.hf.save(halfbyte.hf.quantize(model, keys="int8", values="int8"), tmp_path / "model"))
    found = estimate(path, weights="nf4")
    assert found.notes == estimate(path).notes == ()
    assert (found.weight_bytes, found.weights) == (estimate("demo", weights="nf4").weight_bytes, "nf4")


def test_the_shipped_model() -> None:
    assert shipped_model().name == "tiny"
    found = estimate("demo", keys="int8", values="int8", weights="nf4")
    assert (found.kv_layers, found.kv_heads, found.head_dim) == (6, 2, 64)
    assert found.kv_bytes_per_token == 6 * 2 * 2 * 66


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch": 0}, "batch=0"),
        ({"context": -1}, "context=-1"),
        ({"memory": 0}, "memory=0"),
        ({"keys": "int9"}, "keys='int9' is not a format; choose one of: fp16"),
        ({"values": "int4_channel"}, "for keys only"),
        ({"weights": "int3"}, "weights='int3'"),
        ({"keys": "int4_g64"}, "64"),
        ({"weights": "int4_g128"}, "q_proj.weight"),
    ],
)
def test_bad_arguments_are_named(llama: str, changes: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        estimate(llama, **changes)  # type: ignore[arg-type]


def test_models_that_cannot_be_estimated(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        estimate(str(empty))
    with pytest.raises(CheckpointError, match="there is no folder"):
        estimate(str(tmp_path / "absent"))
    (empty / "config.json").write_text("{broken")
    with pytest.raises(CheckpointError, match=r"no usable config\.json"):
        estimate(str(empty))
    (empty / "config.json").write_text(json.dumps({"model_type": "no_such_thing"}))
    with pytest.raises(CheckpointError, match=r"no usable config\.json"):
        estimate(str(empty))
    transformers.ViTConfig(hidden_size=32).save_pretrained(tmp_path / "vit")
    transformers.BloomConfig(hidden_size=32, n_head=2, n_layer=1, vocab_size=50).save_pretrained(tmp_path / "bloom")
    with pytest.raises(CheckpointError, match="'vit', which transformers has no causal language model for"):
        estimate(str(tmp_path / "vit"))
    with pytest.raises(Unsupported, match="bloom"):
        estimate(str(tmp_path / "bloom"))


@pytest.mark.parametrize(
    "damage", [{"hidden_size": "64"}, {"hidden_act": "none such"}, {"num_attention_heads": 0}, {"quantization_config": 5}]
)
def test_a_damaged_configuration_is_one_error(tmp_path: Path, damage: dict[str, object]) -> None:
    config = json.loads((shipped_model() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | damage))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        estimate(str(tmp_path))


def test_names_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model("demo") == resolve_model("tiny") == str(shipped_model())
    assert resolve_model("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        resolve_model("owner/name")  # what exists here is meant, not the Hub
    (tmp_path / "owner" / "name" / "config.json").write_text("{}")
    assert resolve_model("owner/name") == "owner/name"
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_model("file")
    for bad in ("./demo", "~/nowhere", "a/b/c", "/x"):
        with pytest.raises(CheckpointError, match="no folder"):
            resolve_model(bad)
    for bad in ("", "a b", "ä/b", "-x/y"):
        with pytest.raises(InvalidArgument, match="neither a folder"):
            resolve_model(bad)


@pytest.mark.parametrize(("text", "value"), [("24GB", 24 * 10**9), ("24 gib", 24 * 2**30), ("1.5MB", 1500000), ("7", 7)])
def test_sizes_are_read(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1 XB", "1e3GB"])
def test_bad_sizes_are_named(text: str) -> None:
    with pytest.raises(InvalidArgument, match="memory="):
        parse_bytes(text)
