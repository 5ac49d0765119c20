"""Saved and loaded again: the same bits, or an error that says what is wrong."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import struct
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from families import tiny_model
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, LLAMA

import halfbyte
import halfbyte.hf as hf
from fuzz import load_damaged, mutate
from halfbyte.checkpoints import safetensors_files as files
from halfbyte.errors import CheckpointError, InvalidArgument, Unsupported
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.hf.quantization_config import mark_quantized
from halfbyte.nn import QuantLinear, fuse_qkv
from saved_folders import configure, edit, same

ORDER = "model.layers.0.self_attn.q_proj.weight_perm"


@pytest.mark.parametrize("family", FAMILIES)
def test_bit_for_bit(build, prompt, tmp_path, family):
    model, ids = hf.quantize(build(family), "nf4", fuse_qkv=True), prompt()
    folder = hf.save(model, tmp_path / "model")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]  # nothing temporary is left
    with torch.no_grad():
        expected = model(ids).logits
    for again in (hf.load(folder), tf.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")):
        assert any(isinstance(m, QuantLinear) for m in again.modules())
        same(again, model)
        with torch.no_grad():
            assert torch.equal(again.eval()(ids).logits, expected)


@pytest.mark.parametrize("family", [*FAMILIES, "mixtral", "qwen3_moe"])
def test_settings_of_a_cache_over_weights_in_16_bits(prompt, tmp_path, family):
    """transformers saves those under the names of the family's checkpoints, which need not be the model's."""
    model, ids = hf.quantize(tiny_model(family), keys="int8", values="int8"), prompt()
    expected = model.generate(ids, max_new_tokens=4)
    for name in ("first", "second"):
        folder = hf.save(model, tmp_path / name)
        for model in (tf.AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), hf.load(folder)):
            assert torch.equal(model.generate(ids, max_new_tokens=4), expected)
    assert any(isinstance(m, QuantLinear) for m in hf.load(folder, "nf4").modules())


@pytest.mark.parametrize("fmt", [*sorted(WEIGHT_FORMATS), "int4_g64_a8"])
def test_every_format(tmp_path, fmt):
    torch.manual_seed(1)
    config = tf.Qwen2Config(**{**LLAMA, "hidden_size": 128})
    model = hf.quantize(tf.AutoModelForCausalLM.from_config(config, dtype=torch.float16), fmt)
    folder = hf.save(model, tmp_path / "model")
    written = load_file(folder / "model.safetensors")
    assert {n.rpartition(".")[2] for n in written} >= {"weight_codes", "weight_scales"}
    same(hf.load(folder), model)
    for name, t in hf.load(folder, dtype=torch.float32).state_dict().items():
        assert t.dtype is (written[name].dtype if "weight_" in name else torch.float32), name  # scales are never cast
        assert torch.equal(t, written[name].to(t.dtype))


def test_saved_again_after_loading(build, tmp_path):
    model = hf.quantize(build("llama"), "mxfp4", keys="int8", values="int4_g32", fuse_qkv=True)
    hf.save(model, tmp_path / "a")
    hf.save(hf.load(tmp_path / "a"), tmp_path / "b")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    same(hf.load(tmp_path / "b", keys="int8", values="int8", fuse_qkv=False), model)


def test_plain_folder_is_quantized_on_the_way(build, tmp_path):
    model = build("llama")
    hf.save(model, tmp_path / "plain")
    loaded = hf.load(tmp_path / "plain", "nf4", keys="int8", values="int4_g32", skip_modules=("lm_head", "o_proj"))
    same(loaded, hf.quantize(model, "nf4", skip_modules=("lm_head", "o_proj")))
    hf.save(loaded, tmp_path / "q")
    with pytest.raises(InvalidArgument, match="quantized already"):
        hf.load(tmp_path / "q", "nf4")


def test_a_searched_clip_is_quantizes_own_and_loads_again(build, tmp_path):
    plain, model = build("llama"), build("llama")
    hf.quantize(model, "nvfp4", clip="search")
    expected = halfbyte.quantize(plain.model.layers[1].mlp.up_proj.weight.detach(), "nvfp4", clip="search")
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight.codes, expected.codes)
    hf.save(model, tmp_path / "it")
    same(hf.load(tmp_path / "it"), model)
    with pytest.raises(InvalidArgument, match="name weights= as well"):
        hf.quantize(plain, keys="int8", clip="search")


@pytest.fixture
def act_ordered(build):
    """A model of which two layers are in act-order."""
    model = hf.quantize(build("llama"), "int4_g32")
    for layer in (model.model.layers[0].self_attn.q_proj, model.model.layers[1].mlp.down_proj):
        perm = torch.randperm(layer.in_features).int()
        layer.register_parameter("weight_perm", torch.nn.Parameter(perm, requires_grad=False))
    mark_quantized(model, dict(model.hf_quantizer.quantization_config.modules))
    return model


def test_act_order(act_ordered, prompt, tmp_path):
    folder, ids = hf.save(act_ordered, tmp_path / "model"), prompt()
    with torch.no_grad():
        expected = act_ordered(ids).logits
        for again in (hf.load(folder), tf.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()):
            same(again, act_ordered)
            assert torch.equal(again(ids).logits, expected)
            assert fuse_qkv(again) == 2
            assert torch.equal(again(ids).logits, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(ORDER), "q_proj.weight_perm is missing"),
        (lambda t: t.update({ORDER: t[ORDER].long()}), "q_proj.weight_perm is torch.int64"),
        (lambda t: t[ORDER].view(-1)[3].fill_(64), "q_proj.weight_perm is no permutation"),
        (lambda t: t[ORDER].view(-1)[3].fill_(-1), "q_proj.weight_perm is no permutation"),
        (lambda t: t[ORDER].zero_(), "q_proj.weight_perm is no permutation"),
        (lambda t: t.update({ORDER.replace("q_proj", "k_proj"): t[ORDER].clone()}), "k_proj.weight_perm is in the files"),
    ],
)
def test_wrong_act_orders(act_ordered, tmp_path, change, message):
    folder = hf.save(act_ordered, tmp_path / "model")
    edit(folder, change)
    with pytest.raises(CheckpointError, match=message):
        hf.load(folder)


def test_shards(build, tmp_path):
    model = hf.quantize(build("llama"), "nf4")
    model.save_pretrained(tmp_path / "s", max_shard_size="40KB")
    assert (tmp_path / "s" / files.INDEX).exists()
    same(hf.load(tmp_path / "s"), model)


def test_all_files_of_a_tokenizer_come_along(build, tmp_path):
    """Marian's are source.spm, target.spm and two vocabularies, Whisper has a normalizer; chat templates may be several."""
    wanted = ["vocab.json", "source.spm", "target.spm", "target_vocab.json", "normalizer.json", "sentencepiece.bpe.model"]
    others, more = ["tokenization_own.py", "pytorch_model.bin", "source.safetensors"], "additional_chat_templates/tool_use.jinja"
    (tmp_path / "from" / "additional_chat_templates").mkdir(parents=True)
    for name in (*wanted, *others, more):
        (tmp_path / "from" / name).write_text("{}")
    saved = hf.save(build("llama"), tmp_path / "to", tokenizer=tmp_path / "from")
    assert all((saved / name).exists() for name in (*wanted, more))
    assert not any((saved / name).exists() for name in others)


@pytest.mark.parametrize("change", ["fewer", "plain", "another format"])
def test_layers_that_were_replaced_are_saved_as_they_are(build, prompt, tmp_path, change):
    """The configuration named the layers that were quantized once: the folder did not load."""
    model, ids = hf.quantize(build("llama"), "nf4"), prompt(2)
    if change == "fewer":
        model.model.layers = model.model.layers[:1]
        model.config.num_hidden_layers = 1
    else:
        other = build("llama") if change == "plain" else hf.quantize(build("llama"), "int8_col")
        model.model.layers[0].mlp.up_proj = other.model.layers[0].mlp.up_proj
    again = hf.load(hf.save(model, tmp_path / "m"))
    same(model, again)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_existing_folder_and_failures_leave_nothing(build, tmp_path, monkeypatch):
    model = build("llama")
    (tmp_path / "there").mkdir()
    with pytest.raises(InvalidArgument, match="exists"):
        hf.save(model, tmp_path / "there")
    with pytest.raises(InvalidArgument, match="does not exist"):
        hf.save(model, tmp_path / "no" / "where")
    monkeypatch.setattr(type(model), "save_pretrained", lambda self, d, **k: (d / "half").write_text("x") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hf.save(model, tmp_path / "new")
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


@pytest.fixture
def folder(build, tmp_path):
    return hf.save(hf.quantize(build("llama"), "nf4"), tmp_path / "model")


NAME = "model.layers.0.mlp.up_proj.weight_"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME + "scales"), "up_proj.weight_scales is missing"),
        (lambda t: t.pop(NAME + "codes"), "up_proj.weight_codes is missing"),
        (lambda t: t.update({NAME + "codes": t[NAME + "codes"][:, :8].clone()}), "up_proj.weight_codes is torch.uint8"),
        (lambda t: t.update({NAME + "scales": t[NAME + "scales"].half()}), "up_proj.weight_scales is torch.float16"),
        (lambda t: t[NAME + "scales"].view(-1)[3].fill_(torch.nan), "up_proj.weight_scales holds 1 scales of 128 .*finite"),
        (lambda t: t[NAME + "scales"].view(-1)[3].fill_(torch.inf), "1 scales of 128 that are not finite"),
    ],
)
def test_wrong_parts(folder, change, message):
    edit(folder, change)
    for load in (hf.load, lambda f: tf.AutoModelForCausalLM.from_pretrained(f)):
        with pytest.raises(CheckpointError, match=message):
            load(folder)


def test_missing_and_misshapen_tensors(folder):
    """transformers warns and makes up random numbers; here it is an error."""
    edit(folder, lambda t: t.pop("model.layers.1.input_layernorm.weight"))
    with pytest.raises(CheckpointError, match=r"missing keys: model\.layers\.1\.input_layernorm\.weight"):
        hf.load(folder)
    edit(folder, lambda t: t.update({"model.layers.1.input_layernorm.weight": torch.ones(3)}))
    with pytest.raises(CheckpointError, match="mismatched"):
        hf.load(folder)


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": 10**6}, {"hidden_size": 2**40}, {"vocab_size": 2**50}, {"vocab_size": "x"}]
)
def test_configuration_larger_than_the_files(folder, change):
    configure(folder, **change)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        hf.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q: q.update(version=9), "version 9"),
        (lambda q: q["modules"].update({"model.layers.0.mlp.up_proj": "nf5"}), "'nf5'"),
        (lambda q: q["modules"].update({"model.norm": "nf4"}), "no linear layer"),
        (lambda q: q["modules"].update({"model.layers.0.mlp.up_proj": "int4_g128"}), "up_proj.weight"),
        (lambda q: q["modules"].pop("model.layers.0.mlp.up_proj"), "up_proj.weight"),
        (lambda q: q.update(modules=[1]), "modules"),
        (lambda q: q.update(act_order=["model.norm"]), "act_order"),
        (lambda q: q.update(act_order=3), "act_order"),
    ],
)
def test_wrong_configuration(folder, change, message):
    configure(folder, lambda config: change(config["quantization_config"]))
    with pytest.raises(CheckpointError, match=message):
        hf.load(folder)


def test_folders_that_are_none(tmp_path, build):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        hf.load(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="no such folder"):
        hf.load(tmp_path / "nothing")
    build("llama").config.save_pretrained(tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        hf.load(tmp_path / "empty")
    (tmp_path / "empty" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match="pickled"):
        hf.load(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("[" * 100000)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        hf.load(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "hqq"}}')
    save_file({"x": torch.zeros(1)}, tmp_path / "empty" / "model.safetensors")
    with pytest.raises(Unsupported, match="hqq"):
        hf.load(tmp_path / "empty")


# ------------------------------------------------------------------------------------------------------- the files alone


def _raw(header: bytes | dict, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _tensor(dtype="F32", shape=(2,), offsets=(0, 8)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "header"),
        (b"1234", "header"),
        (struct.pack("<Q", 2**63) + b"{}", "claims"),
        (struct.pack("<Q", 3) + b"{}", "claims 3 bytes, the file has 10"),
        (_raw(b"{"), "damaged"),
        (_raw(b"[]"), "object"),
        (_raw(b"\xff\xfe{}"), "damaged"),
        (_raw(b"[" * 50000), "damaged"),
        (_raw(b'{"a": %s, "a": %s}' % ((json.dumps(_tensor()).encode(),) * 2), bytes(8)), "twice"),
        (_raw({"a": _tensor(dtype="F31")}, bytes(8)), "dtype"),
        (_raw({"a": _tensor(dtype=["F32"])}, bytes(8)), "dtype"),
        (_raw({"a": _tensor(shape=[1] * 1000)}, bytes(8)), "no lists of sizes"),
        (_raw({"a": _tensor(shape=[2] + [1] * files.MAX_RANK)}, bytes(8)), "no lists of sizes"),
        (_raw({"a": _tensor(shape=[-2])}, bytes(8)), "no lists of sizes"),
        (_raw({"a": _tensor(shape=[2.0])}, bytes(8)), "no lists of sizes"),
        (_raw({"a": _tensor(shape=[True, 2])}, bytes(8)), "no lists of sizes"),
        (_raw({"a": _tensor(offsets=[0])}, bytes(8)), "no lists of sizes"),
        (_raw({"a": _tensor(offsets=[0, 8, 8])}, bytes(8)), "no lists of sizes"),
        (_raw({"a": _tensor(offsets=[0, 8.0])}, bytes(8)), "no lists of sizes"),
        (_raw({"a": _tensor(shape=[2**61, 2**61])}, bytes(8)), "needs"),
        (_raw({"a": _tensor(offsets=[0, 16])}, bytes(8)), "lies at"),
        (_raw({"a": _tensor(offsets=[8, 0])}, bytes(8)), "lies at"),
        (_raw({"a": _tensor(shape=[4], offsets=[0, 16])}, bytes(8)), "lies at 0 to 16 of 8"),
        (_raw({"a": _tensor(), "b": _tensor(offsets=[4, 12])}, bytes(12)), "overlaps"),
        (_raw({"a": _tensor(), "b": _tensor(offsets=[12, 20])}, bytes(20)), "gap"),
        (_raw({"a": _tensor()}, bytes(9)), "follow"),
        (_raw({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "described"),
        (_raw({"a": 3}), "described"),
    ],
)
def test_damaged_files(tmp_path, raw, message):
    file = tmp_path / "x.safetensors"
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=message):
        files.read_header(file)


def test_good_files(tmp_path):
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(0, 4, dtype=torch.uint8), "c": torch.ones(5, dtype=torch.bfloat16)}
    tensors["d"] = torch.ones([1] * files.MAX_RANK)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    infos = files.read_folder(tmp_path)
    assert {n: (i.shape, i.dtype) for n, i in infos.items()} == {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()}
    assert infos["a"].end - infos["a"].start == 24


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/etc/a.safetensors", "b/../a.safetensors", "..", "", "a.bin", "C:a.safetensors",
             "a\0.safetensors", "x" * 300 + ".safetensors", "gone.safetensors", "d\\a.safetensors", "a\n.safetensors"]
)  # fmt: skip
def test_shard_names(tmp_path, name):
    inside = tmp_path / "model"
    inside.mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    (inside / files.INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="shard"):
        files.read_folder(inside)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "1.safetensors", "b": "1.safetensors", "z": "1.safetensors"}, "does not hold"),
        ({"a": 3}, "weight_map"),
        ([], "weight_map"),
        (None, "weight_map"),
    ],
)
def test_indexes(tmp_path, weight_map, message):
    save_file({"a": torch.zeros(2), "b": torch.zeros(1)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "2.safetensors")
    (tmp_path / files.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message):
        files.read_folder(tmp_path)


@pytest.mark.parametrize(("fmt", "other"), [("nf4", "fp4_bnb"), ("int4_sym_g32", "mxfp4")])
def test_a_state_of_another_format_is_refused(build, tmp_path, fmt, other):
    """Whose parts may have the same shapes and types; the message names both, and the model keeps its weights."""
    first, second = (hf.quantize(build("llama"), name) for name in (fmt, other))
    torch.save(second.state_dict(), tmp_path / "state.pt")
    before = {name: t.clone() for name, t in first.state_dict().items() if "_proj" in name}
    for state in (second.state_dict(), torch.load(tmp_path / "state.pt", weights_only=True)):
        with pytest.raises(RuntimeError, match=f"q_proj.weight is {other} in the state and {fmt} in the model"):
            first.load_state_dict(state)
        assert all(torch.equal(t, before[name]) for name, t in first.state_dict().items() if name in before)
    assert first.load_state_dict(hf.quantize(build("llama"), fmt).state_dict()).missing_keys == []


def test_a_folder_says_what_to_import_and_whose_attention_it_needs(build, tmp_path):
    folder = hf.save(hf.quantize(build("llama"), "int4_g32", keys="int8"), tmp_path / "model")
    assert any("import halfbyte.hf before you load this folder" in name for name in load_file(folder / files.SINGLE))
    for given in ("sdpa", "eager"):
        with pytest.raises(InvalidArgument, match=f"attn_implementation='{given}': this folder was saved with a packed cache"):
            tf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=given)
    assert tf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=hf.NAME).config._attn_implementation == hf.NAME


@pytest.mark.parametrize("options", [{}, {"keys": "int4"}, {"weights": "nvfp4", "keys": "int4", "values": "int4"}])
def test_a_second_configuration_is_refused(build, tmp_path, options):
    """transformers would ignore it and only warn."""
    folder = hf.save(hf.quantize(build("llama"), "int4_g32", keys="int8"), tmp_path / "model")
    with pytest.raises(InvalidArgument, match=r"the folder is quantized already \(halfbyte\); leave it out"):
        tf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=hf.HalfbyteConfig(**options))
    configure(folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    with pytest.raises(InvalidArgument, match=r"quantized already \(gptq\); load it with halfbyte.hf.load"):
        tf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=hf.HalfbyteConfig(**options))


def test_a_full_disk_is_told_before_anything_is_written(build, tmp_path, monkeypatch):
    model = hf.quantize(build("llama"), "int4_g32")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match="bytes, and 1,000 are free") as full:
        hf.save(model, tmp_path / "model")
    assert full.value.errno == errno.ENOSPC
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("weights", [None, "int4_g32"])
@pytest.mark.parametrize("stale", ["0.safetensors", "9.safetensors"])
def test_the_index_decides_where_shards_hold_more(build, prompt, tmp_path, weights, stale):
    """A newer shard over older ones, which transformers reads before it or after it."""
    model = build("llama") if weights is None else hf.quantize(build("llama"), weights)
    folder = hf.save(model, tmp_path / "model")
    tensors = load_file(folder / files.SINGLE)
    (folder / files.SINGLE).rename(folder / "5.safetensors")
    old = {name: torch.zeros_like(t) for name, t in tensors.items() if "layers.0" in name}
    save_file({**old, "gone": torch.ones(3)}, folder / stale, metadata={"format": "pt"})
    places = dict.fromkeys(tensors, "5.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, folder / "7.safetensors", metadata={"format": "pt"})
    places |= {"model.norm.weight": "7.safetensors", "model.layers.0.input_layernorm.weight": stale}
    (folder / files.INDEX).write_text(json.dumps({"weight_map": places}))
    loaded, state = hf.load(folder), model.state_dict()
    assert not loaded.model.layers[0].input_layernorm.weight.any()
    assert all(torch.equal(t, state[n]) for n, t in loaded.state_dict().items() if "layers.0.input_layernorm" not in n)
    save_file(tensors, folder / files.SINGLE, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="remove the other one"):
        assert hf.load(folder).model.layers[0].input_layernorm.weight.any()


def test_fuzzed_headers_and_indexes(tmp_path):
    """Thousands of damaged files: tensors that lie inside the file, or CheckpointError. Nothing else."""
    seed = int(os.environ.get("HALFBYTE_FUZZ_SEED", "20261"))
    rng, refused, root = random.Random(seed), 0, tmp_path / "sharded"
    root.mkdir()
    save_file({"a.weight_codes": torch.zeros(4, 8, dtype=torch.uint8), "b": torch.ones(3)}, root / "1.safetensors")
    save_file({"c": torch.zeros(2, dtype=torch.int64)}, root / "2.safetensors")
    header = (root / "1.safetensors").read_bytes()
    index = json.dumps({"weight_map": {"a.weight_codes": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}).encode()
    for i in range(4000):
        single = i % 4 != 0
        target = tmp_path / files.SINGLE if single else root / files.INDEX
        target.write_bytes(mutate(header if single else index, rng))
        try:
            for info in (files.read_header(target) if single else files.read_folder(root)).values():
                assert 0 <= info.start <= info.end <= os.path.getsize(info.file), f"seed {seed}, round {i}"
                assert info.file.parent == target.parent
        except CheckpointError:
            refused += 1
        except Exception as error:
            pytest.fail(f"seed {seed}, round {i}: {type(error).__name__}: {error}")
    assert 2000 < refused < 4000  # most are refused, and harmless changes are not


def test_fuzzed_folders_through_load(folder):
    """The same through the whole loader, fewer times: only the library's own errors."""
    load_damaged(folder, hf.load, 30, random.Random(5))
