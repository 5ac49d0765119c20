"""Models that other libraries quantized: loaded by `halfbyte.hf.load` without those libraries, converted, saved, fused."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from external_folders import blocks, gpt_oss, tiny, write
from mixtures import expand
from safetensors.torch import load_file

import halfbyte.hf as hf
from checkpoint_files import KINDS, gptq
from command_line import run
from fuzz import load_damaged
from halfbyte import errors
from halfbyte.errors import CheckpointError, InvalidArgument, Unsupported
from halfbyte.experts import QuantExperts
from halfbyte.nn import FusedProjections, QuantLinear, fuse_qkv
from halfbyte.paths import resolve_model
from saved_folders import configure, edit, in_shards, same


def same_logits(a: Any, b: Any, ids: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(a.eval()(ids).logits, b.eval()(ids).logits, rtol=2e-4, atol=2e-4)


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, prompt: Any, tmp_path: Path) -> None:
    model = write(tiny(), tmp_path, blocks(kind, without="o_proj"))
    loaded = hf.load(tmp_path)
    names = {name for name, m in loaded.named_modules() if isinstance(m, QuantLinear)}
    assert len(names) == 12
    assert not any("o_proj" in name for name in names)  # what is not quantized in the files stays as it is
    same_logits(loaded, model, prompt())
    folder = hf.save(loaded, tmp_path / "own")
    again = hf.load(folder)
    with torch.no_grad():
        assert torch.equal(again(prompt()).logits, loaded(prompt()).logits)
    same(again, loaded)


@pytest.mark.parametrize("kind", ["gptq v1 act-order, group 64", "bnb nf4 nested", "ct nvfp4"])
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_biases_and_conv1d(kind: str, family: str, prompt: Any, tmp_path: Path) -> None:
    model = write(tiny(family), tmp_path, blocks(kind))
    same_logits(hf.load(tmp_path), model, prompt())


def test_tied_embeddings_and_shards(prompt: Any, tmp_path: Path) -> None:
    model = write(tiny(tie_word_embeddings=True), tmp_path, blocks("awq"))
    in_shards(tmp_path, lambda name: sum(name.encode()) % 3)
    loaded = hf.load(tmp_path, keys="int8", values="int8")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    same_logits(hf.load(tmp_path), model, prompt())
    assert loaded.generate(prompt(), max_new_tokens=3).shape == (2, 24)


def test_types_and_settings_of_generation(tmp_path: Path) -> None:
    model = tiny()
    model.config.dtype = torch.bfloat16
    write(model.bfloat16(), tmp_path, blocks("gptq v1"))
    (tmp_path / "generation_config.json").write_text('{"top_k": 7}')
    for asked, expected in (("auto", torch.bfloat16), (torch.float16, torch.float16)):
        loaded = hf.load(tmp_path, dtype=asked)
        assert loaded.model.norm.weight.dtype is expected
        assert loaded.model.layers[0].mlp.up_proj.weight_scales.dtype is torch.float16
    assert loaded.generation_config.top_k == 7


def test_modelopt_beside_a_plain_configuration(prompt: Any, tmp_path: Path) -> None:
    model = write(tiny(), tmp_path, blocks("modelopt nvfp4"))
    quantization: dict[str, Any] = {}
    configure(tmp_path, lambda config: quantization.update(config.pop("quantization_config")))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization}))
    same_logits(hf.load(tmp_path), model, prompt())


#: As modelopt, compressed-tensors, Quark and AutoRound call them.
NOT_OF_WEIGHTS = [
    *("k_proj.k_scale", "v_proj.v_scale", "q_scale", "k_zero_point", "v_zero_point", "q_zero_point"),
    *("k_proj.output_scale", "q_proj.input_scale", "q_proj.input_zero_point", "o_proj.input_global_scale", "prob_output_scale"),
]


@pytest.mark.parametrize("kind", ["modelopt nvfp4", "ct int4", "quark mxfp4", "auto-round"])
def test_scales_of_activations_are_left_out_and_told_once(kind: str, prompt: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(errors, "_WARNED", set())
    model = write(tiny(), tmp_path, blocks(kind, without="k_proj"))
    edit(tmp_path, lambda t: t.update({f"model.layers.0.self_attn.{name}": torch.ones(1) for name in NOT_OF_WEIGHTS}))
    with pytest.warns(UserWarning, match=r"k_zero_point, .*q_scale, .*v_zero_point\) are not used") as told:
        first, _ = hf.load(tmp_path), hf.load(tmp_path)
    assert len(told) == 1
    assert "v_scale" not in str(told[0].message)  # which a cache uses
    same_logits(first, model, prompt())


FP8_SCHEME = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}}
INT8_SCHEME = {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}
#: (kind, entries of quantization_config, names of the scales of keys and of values, KV format).
CACHES = [
    ("ct int4", FP8_SCHEME, "self_attn.{}_scale", "fp8_tensor"),
    ("ct int4", INT8_SCHEME, "self_attn.{}_scale", "int8_tensor"),
    ("ct int4", FP8_SCHEME, "self_attn.{}_proj.output_scale", "fp8_tensor"),
    ("modelopt nvfp4", {"kv_cache_quant_algo": "FP8"}, "self_attn.{}_proj.{}_scale", "fp8_tensor"),
    ("quark mxfp4", {"kv_cache_group": ["*k_proj", "*v_proj"]}, "self_attn.{}_proj.output_scale", "fp8_tensor"),
    ("auto-round", {"static_kv_dtype": "fp8"}, "self_attn.{}_scale", "fp8_tensor"),
    ("gptq v1", {}, "self_attn.attn.{}_scale", "fp8_tensor"),  # as vLLM names them
]
K_SCALE, V_SCALE = 0.03125, 0.015625


def with_cache_scales(folder: Path, config: dict[str, Any], name: str, k: Any = K_SCALE, v: Any = V_SCALE) -> None:
    """Scales of layer 1 of a folder, of a cache that its configuration describes."""
    scales = {f"model.layers.1.{name.replace('{}', side)}": torch.as_tensor(x) for side, x in (("k", k), ("v", v))}
    edit(folder, lambda t: t.update(scales))
    configure(folder, lambda described: described["quantization_config"].update(config))


def filled(model: Any, ids: torch.Tensor, fmt: str, **options: Any) -> list[Any]:
    """The `KVCache` of each layer after a forward."""
    hf.quantize(model, keys=fmt, values=fmt)
    cache = hf.PackedCache(model, 64, keys=fmt, values=fmt, **options)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return [layer.kv for layer in cache.packed]


@pytest.mark.parametrize(("kind", "config", "name", "fmt"), CACHES)
def test_scales_of_keys_and_values_are_used(
    kind: str, config: dict[str, Any], name: str, fmt: str, prompt: Any, tmp_path: Path
) -> None:
    """By a cache of their format, also of a model that was saved again; other formats and rotated sides measure their own."""
    write(tiny(), tmp_path, blocks(kind))
    with_cache_scales(tmp_path, config, name)
    model = hf.load(tmp_path)
    again = hf.load(hf.save(model, tmp_path / "own"))
    for one in (model, again):
        first, second = filled(one, prompt(), fmt)
        assert (float(second.keys.scales), float(second.values.scales)) == (K_SCALE, V_SCALE)
        assert float(first.keys.scales) not in (0, K_SCALE)  # measured
    other = "fp8_tensor" if fmt == "int8_tensor" else "int8_tensor"
    assert float(filled(model, prompt(), other)[1].keys.scales) != K_SCALE
    rotated = filled(model, prompt(), fmt, rotate_keys=True)[1]
    assert float(rotated.keys.scales) != K_SCALE
    assert float(rotated.values.scales) == V_SCALE


def test_a_default_cache_uses_them(prompt: Any, tmp_path: Path) -> None:
    write(tiny(), tmp_path, blocks("ct int4"))
    with_cache_scales(tmp_path, FP8_SCHEME, "self_attn.{}_scale")
    model = hf.load(tmp_path, keys="fp8_tensor", values="fp8_tensor")
    output = model.generate(prompt()[:1], max_new_tokens=2, return_dict_in_generate=True, do_sample=False)
    assert float(output.past_key_values.packed[1].kv.keys.scales) == K_SCALE


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e6, [0.5, 0.25]])
def test_scales_that_no_cache_can_store_are_measured(scale: Any, prompt: Any, tmp_path: Path) -> None:
    """vLLM's "not calibrated", and a scale for each head."""
    write(tiny(), tmp_path, blocks("ct int4"))
    with_cache_scales(tmp_path, FP8_SCHEME, "self_attn.{}_scale", k=scale)
    second = filled(hf.load(tmp_path), prompt(), "fp8_tensor")[1]
    assert 0 < float(second.keys.scales) < 1
    assert float(second.values.scales) == V_SCALE


@pytest.mark.parametrize("entry", [[], {}, {"layers": [[1, 1]]}, {"format": "fp8_tensor", "layers": [[1.0, 0.5], [None, "x"]]}])
def test_damaged_entries_of_config_are_refused(entry: Any, tmp_path: Path) -> None:
    hf.save(tiny(), tmp_path / "own")
    configure(tmp_path / "own", halfbyte_kv_scales=entry)
    with pytest.raises(CheckpointError, match="halfbyte_kv_scales"):
        hf.PackedCache(hf.load(tmp_path / "own", keys="fp8_tensor", values="fp8_tensor"), 64, keys="fp8_tensor")


@pytest.mark.parametrize("quantized", [True, False])
def test_layers_that_guess_further_tokens_are_left_out(quantized: bool, prompt: Any, tmp_path: Path) -> None:
    """Numbered or not, quantized or not, in a family that has none."""
    if quantized:
        model = write(tiny(), tmp_path, blocks("gptq v1"))
    else:
        model = tiny()
        model.save_pretrained(tmp_path)
    drawn = gptq(8, 128).tensors if quantized else {"weight": torch.ones(8, 128)}
    names = ("mtp.fc", "mtp.layers.0.mlp.up_proj", "model.mtp_layers.1.o_proj")
    further = {f"{name}.{part}": x.clone() for name in names for part, x in drawn.items()}
    edit(tmp_path, lambda t: t.update({**further, "mtp.norm.weight": torch.ones(128)}))
    same_logits(hf.load(tmp_path), model, prompt())


def test_biases_of_zeros_that_the_model_does_not_have(prompt: Any, tmp_path: Path) -> None:
    model = write(tiny(), tmp_path, blocks("gptq v1"))
    edit(tmp_path, lambda t: t.update({UP + "bias": torch.zeros(256, dtype=torch.float16)}))
    same_logits(hf.load(tmp_path), model, prompt())
    edit(tmp_path, lambda t: t[UP + "bias"][3].fill_(1))
    with pytest.raises(CheckpointError, match=r"unexpected keys: model\.layers\.0\.mlp\.up_proj\.bias"):
        hf.load(tmp_path)


def mixed(name: str) -> str | None:
    """Every projection of a GPTQ checkpoint in another way."""
    ways = {"q_proj": "gptq v1 act-order, group 64", "k_proj": "gptq v1", "v_proj": "gptq column", "o_proj": "gptq fp32 scales"}
    return next((kind for part, kind in ways.items() if name.endswith(part)), None)


def test_fusing_shards_that_differ(prompt: Any, tmp_path: Path) -> None:
    """GQA, each shard with its own groups, scales, order and format."""
    model = write(tiny(), tmp_path, mixed, group_size=None)
    loaded = hf.load(tmp_path)
    shards = [getattr(loaded.model.layers[0].self_attn, name) for name in ("q_proj", "k_proj", "v_proj")]
    assert [s.format.name for s in shards] == ["int4_g64", "int4_g32", "int4_col"]
    assert [s.out_features for s in shards] == [128, 64, 64]
    assert [s.weight.perm is not None for s in shards] == [True, False, False]
    with torch.no_grad():
        expected = loaded(prompt()).logits
        assert fuse_qkv(loaded) == 2
        assert torch.equal(loaded(prompt()).logits, expected)
    same_logits(loaded, model, prompt())


def test_fusing_act_orders_and_tensor_scales_while_loading(prompt: Any, tmp_path: Path) -> None:
    for kind in ("gptq v2 act-order", "modelopt nvfp4", "ct int4 asym g_idx"):
        folder = tmp_path / kind
        folder.mkdir()
        model = write(tiny("qwen2"), folder, blocks(kind))
        loaded = hf.load(folder, fuse_qkv=True)
        assert isinstance(loaded.model.layers[1].self_attn.q_proj, FusedProjections)
        same_logits(loaded, model, prompt())


UP = "model.layers.0.mlp.up_proj."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(UP + "scales"), r"up_proj\.scales is missing"),
        (lambda t: t.pop(UP + "qweight"), r"up_proj\.qweight is missing"),
        (lambda t: t.update({UP + "weight": torch.ones(2)}), "mismatched"),
        (lambda t: t.update({UP + "weight": torch.ones(256, 128)}), "unexpected keys"),
        (
            lambda t: t.update({"model.norm.qweight": t[UP + "qweight"].clone()}),
            r"model\.norm: LlamaForCausalLM has no linear layer 'model\.norm'",
        ),
        (lambda t: t.pop("model.norm.weight"), r"missing keys: model\.norm\.weight"),
        (lambda t: t[UP + "scales"].view(-1)[0].fill_(torch.nan), r"up_proj\.scales holds 1"),
    ],
)
def test_damaged_folders(change: Any, message: str, tmp_path: Path) -> None:
    write(tiny(), tmp_path, blocks("gptq v1"))
    edit(tmp_path, change)
    with pytest.raises((CheckpointError, Unsupported), match=message):
        hf.load(tmp_path)


def test_what_cannot_be(tmp_path: Path) -> None:
    write(tiny(), tmp_path, blocks("gptq v1"))
    with pytest.raises(InvalidArgument, match="quantized already"):
        hf.load(tmp_path, "nf4")
    write(tiny(), tmp_path, lambda name: None, quant_method="gptq", bits=4)
    with pytest.raises(CheckpointError, match="no layer has a qweight"):
        hf.load(tmp_path)
    write(tiny(tie_word_embeddings=True, vocab_size=104), tmp_path, lambda name: "gptq v1")
    with pytest.raises(CheckpointError, match=r"config\.json ties"):
        hf.load(tmp_path)


# --------------------------------------------------------------------------------------------------------- the command line


@pytest.mark.slow
def test_quantize_from(gptq_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("quantize", "--from", str(gptq_folder), "-o", str(tmp_path / "own")) == 0
    assert "equal bit for bit" in capsys.readouterr().out
    same(hf.load(tmp_path / "own"), hf.load(gptq_folder))
    outputs = []
    for folder in (gptq_folder, tmp_path / "own"):
        assert run("generate", str(folder), "--prompt", "The", "--tokens", "3") == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert run("eval", str(gptq_folder), "--windows", "1", "--length", "64", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["results"]) == 3  # 16 bits, transformers' own attention, the default cache


def test_a_full_disk_is_told_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert run("quantize", "demo", "-o", str(tmp_path / "out")) == 1
    assert "bytes, and 1,000 are free" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a MODEL"),
        (["--from", "demo", "--weights", "nf4"], "give a MODEL"),
        (["demo", "--weights", "nf4", "--from", "demo"], "give a MODEL"),
        (["--from", "demo"], "'demo' is not quantized"),
    ],
)
def test_quantize_needs_one_source(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("quantize", *arguments, "-o", str(tmp_path / "out")) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_fuzzed_folders(tmp_path: Path) -> None:
    """Damaged folders through the whole loader, fewer than the layers of tests/test_checkpoints.py: only the library's errors."""
    count, rng = int(os.environ.get("HALFBYTE_FUZZ", "30")), random.Random(int(os.environ.get("HALFBYTE_FUZZ_SEED", "4")))
    for kind in ("gptq v1 act-order, group 64", "awq", "bnb nf4 nested", "ct int4 asym g_idx", "ct nvfp4", "quark mxfp4"):
        folder = tmp_path / kind
        folder.mkdir()
        write(tiny(num_hidden_layers=1), folder, blocks(kind))
        load_damaged(folder, hf.load, count // 6, rng)


# ------------------------------------------------------------------------------------------------------------------ gpt-oss


def test_experts_of_gpt_oss(prompt: Any, greedy: Any, tmp_path: Path) -> None:
    """The codes of the files, packed; saved and loaded again; the rest is in 16 bits, and can still be quantized."""
    model, stored = gpt_oss(tmp_path / "released"), load_file(tmp_path / "released" / "model.safetensors")
    loaded = hf.load(tmp_path / "released")
    for name, layer in loaded.named_modules():
        if isinstance(layer, QuantExperts):
            assert torch.equal(layer.weight.codes, stored[f"{name}_blocks"].flatten(2))
            assert torch.equal(layer.weight.scales, stored[f"{name}_scales"])
            assert torch.equal(layer.bias, stored[f"{name}_bias"])
    plain = expand(loaded, copy.deepcopy(model).float())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.float(), plain.get_parameter(name)), name
    assert run("quantize", "--from", str(tmp_path / "released"), "-o", str(tmp_path / "converted")) == 0
    hf.quantize(loaded, keys="int8", values="int8")
    tokens, _ = greedy(loaded, prompt())
    again = hf.load(hf.save(loaded, tmp_path / "saved"))
    assert torch.equal(greedy(hf.quantize(again, keys="int8", values="int8"), prompt())[0], tokens)
    with torch.no_grad():
        wanted = model.float()(prompt()).logits
        assert (hf.load(tmp_path / "released", dtype=torch.float32)(prompt()).logits - wanted).abs().max() < 1e-4 * wanted.std()
    hf.quantize(loaded, "int4_g32")
    assert isinstance(loaded.model.layers[0].self_attn.q_proj, QuantLinear)
    formats = set(loaded.config.quantization_config.modules.values())
    assert formats == {"mxfp4", "int4_g32"}
    with pytest.raises(InvalidArgument, match="quantized already"):
        hf.quantize(loaded, "int4_g32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.0.mlp.experts.down_proj_scales"), "down_proj_scales must both be there"),
        (
            lambda t: t["model.layers.0.mlp.experts.down_proj_scales"][:1, :1, :1].fill_(255),
            "down_proj_scales holds scales that are NaN",
        ),
        (
            lambda t: t.update({n: t[n][:2].clone() for n in list(t) if "down_proj_" in n and "bias" not in n}),
            "GptOssForCausalLM has",
        ),
        (lambda t: t.update({n: t[n][..., :8].clone() for n in list(t) if n.endswith("_blocks")}), "expected"),
        (lambda t: t.update({n: t[n].flatten(2) for n in list(t) if n.endswith("_blocks")}), r"expected \[E, N, G, 16\]"),
        (lambda t: t.update({n: t[n].char() for n in list(t) if n.endswith("_blocks")}), "must both be there, of uint8"),
    ],
)
def test_damaged_experts(change: Any, message: str, tmp_path: Path) -> None:
    gpt_oss(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        hf.load(tmp_path)


def test_gguf_says_the_detour(tmp_path, monkeypatch):
    """A file, the folder of one (often with a config.json), and a model of the Hub, of which nothing is downloaded."""
    file = tmp_path / "model.Q4_K.gguf"
    file.write_bytes(b"GGUF")
    says = r"gguf_file='model\.Q4_K\.gguf'.*dequantize=True.*halfbyte\.hf\.quantize"
    for given in (file, tmp_path):
        with pytest.raises(Unsupported, match=says):
            hf.load(given)
        with pytest.raises(Unsupported, match=rf"pip install gguf accelerate.*{says}"):
            resolve_model(str(given))  # as every command does
    tiny().config.save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match=says):
        hf.load(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: str(tmp_path))
    with pytest.raises(Unsupported, match=r"from_pretrained\('some/model-GGUF', gguf_file='FILE\.gguf'"):
        hf.load("some/model-GGUF")
    tiny().save_pretrained(tmp_path)
    assert hf.load(tmp_path).num_parameters() == hf.load("some/model-GGUF").num_parameters()


@pytest.mark.parametrize(
    ("method", "advice"), [("gguf", "GgufConfig"), ("fp8", "FineGrainedFP8Config"), ("hqq", "leave weights out")]
)
def test_a_model_that_transformers_quantized(method, advice):
    model = tiny()
    config = SimpleNamespace(quant_method=method, dequantize=False)
    model.hf_quantizer, model.quantization_method = SimpleNamespace(quantization_config=config), method
    with pytest.raises(InvalidArgument, match=rf"quantized already \({method}\).*{advice}"):
        hf.quantize(model, "nf4")
    config.dequantize = True  # it was expanded while it was loaded
    assert any(isinstance(m, QuantLinear) for m in hf.quantize(model, "nf4").modules())
