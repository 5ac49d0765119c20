"""`from_pretrained(quantization_config=HalfbyteConfig(...))`: what `hf.quantize` makes, layer by layer."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from families import tiny_config
from tiny_models import FAMILIES

import halfbyte.hf as hf
from halfbyte.errors import CheckpointError, InvalidArgument, Unsupported
from halfbyte.hf.quantizer import QuantizeWhileLoading
from halfbyte.nn import FusedProjections, QuantLinear
from halfbyte.paths import shipped_model
from saved_folders import configure, same
from watched import watched

OPTIONS = {"weights": "int4_sym_g32", "keys": "int8", "values": "int4_g32", "rotate_keys": True, "skip_layers": (0,)}
pytestmark = pytest.mark.filterwarnings("ignore:halfbyte. .* stay in 16 bits")


@pytest.fixture
def plain(build, tmp_path):
    """plain(family): a folder with a 16-bit model."""

    def make(family):
        build(family).to(torch.bfloat16).save_pretrained(tmp_path / family)
        return tmp_path / family

    return make


def read(folder, **options):
    return tf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=hf.HalfbyteConfig(**options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        {"weights": "nf4", "skip_modules": ("lm_head", "o_proj")},
        {"values": "int4_g32"},
        {"values": "int4", "rotate_values": True},
        {"weights": "int4_g32", "keys": "int4", "rotate_keys": False},
        {"weights": "int8_col", "rotate_keys": False},
        {"rotate_keys": False, "lm_head": "int8_col"},
        {},
    ],
)
def test_the_same_bits_as_quantize(plain, prompt, greedy, tmp_path, options):
    folder, ids = plain("llama"), prompt()
    made = read(folder, **options)
    expected = hf.quantize(tf.AutoModelForCausalLM.from_pretrained(folder), **options)
    same(made, expected)
    assert torch.equal(greedy(made, ids)[1], greedy(expected, ids)[1])
    for written in (
        made.save_pretrained(tmp_path / "by transformers") or tmp_path / "by transformers",
        hf.save(made, tmp_path / "by us"),
    ):
        for again in (hf.load(written), tf.AutoModelForCausalLM.from_pretrained(written)):
            same(again, made)
            assert torch.equal(greedy(again, ids)[1], greedy(made, ids)[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(plain, family):
    folder = plain(family)
    made = read(folder, weights="int8_col")
    same(made, hf.quantize(tf.AutoModelForCausalLM.from_pretrained(folder), "int8_col"), in_order=False)
    assert not any(p.is_meta for p in made.parameters())


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "bart", "mllama", "llava", "persimmon"])
def test_weights_that_transformers_renames_merges_or_ties(tmp_path, family):
    torch.manual_seed(0)
    config = tiny_config(family)
    kind = tf.AutoModelForImageTextToText if family in ("mllama", "llava") else tf.AutoModelForCausalLM
    kind.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    made = kind.from_pretrained(tmp_path / "plain", quantization_config=hf.HalfbyteConfig("int8_col"))
    same(made, hf.quantize(kind.from_pretrained(tmp_path / "plain"), "int8_col"), in_order=False)


def test_fused_projections(plain, prompt):
    made, ids = read(plain("llama"), weights="nf4", fuse_qkv=True, fuse_gate_up=True), prompt()
    assert sum(isinstance(m, FusedProjections) for m in made.modules()) == 4
    with torch.no_grad():
        expected = hf.load(plain("llama"), "nf4")(ids).logits
        torch.testing.assert_close(made(ids).logits, expected, rtol=2e-2, atol=2e-2)


def test_one_layer_at_a_time_is_in_16_bits(build, tmp_path, monkeypatch):
    """The bytes of all weights that have been read, whenever another one arrives."""
    config = tf.LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=12, num_attention_heads=2)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")

    def nbytes(self, read, *, model, **options):
        return sum(p.nbytes for p in (*model.parameters(), *(t.owner.weight for t in self.targets.values())) if not p.is_meta)

    held = watched(monkeypatch, QuantizeWhileLoading, "convert", nbytes)
    made = read(tmp_path / "plain", weights="int4_g128")
    whole, packed = (sum(p.nbytes for p in m.parameters()) for m in (model, made))
    assert len(held) == 7 * 12
    assert max(held) < packed < whole / 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weights": "nf4", "rotate_values": True}, Unsupported, "changes 16-bit weights"),
        ({"rotate_values": True}, Unsupported, "changes 16-bit weights"),
        ({"weights": "nf4", "sink_tokens": 4}, InvalidArgument, "about the KV cache"),
        ({"weights": "nf4", "lm_head": "int8_col", "skip_modules": ("lm_head",)}, InvalidArgument, "name it once"),
        ({"lm_head": "int8_col", "recent_tokens": 4}, InvalidArgument, "about the KV cache"),
        ({"key": "int8"}, InvalidArgument, "key: no such option"),
        ({"weights": "int4_g96"}, InvalidArgument, "int4_g96"),
        ({"weights": "int4_g128"}, InvalidArgument, "128"),
        ({"weights": "nf4", "skip_modules": ("wrong",)}, InvalidArgument, "no module of that name"),
        ({"weights": "nf4", "rotate_keys": True}, InvalidArgument, "about the KV cache"),
        ({"keys": "int8", "fuse_qkv": True}, InvalidArgument, "needs quantized weights"),
        ({"keys": "int8", "clip": "search"}, InvalidArgument, "is about weights"),
        ({"keys": "int8", "skip_modules": ("q_proj",)}, InvalidArgument, "is about weights"),
        ({"keys": "int8", "skip_layers": (9,)}, InvalidArgument, "skip_layers holds 9"),
    ],
)
def test_bad_options_are_refused_before_a_weight_is_read(plain, monkeypatch, options, error, message):
    folder = plain("llama")
    monkeypatch.setattr(QuantizeWhileLoading, "convert", None)
    with pytest.raises(error, match=message):
        read(folder, **options)


def test_families_are_refused_first(tmp_path):
    tf.AutoModelForCausalLM.from_config(tiny_config("bloom")).save_pretrained(tmp_path / "plain")
    with pytest.raises(Unsupported, match="bloom"):
        read(tmp_path / "plain", keys="int8")


def test_a_weight_that_cannot_be_quantized_fails(build, tmp_path):
    model = build("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(RuntimeError, match="conversion"):
        read(tmp_path / "plain", weights="nf4")


# ------------------------------------------------------------------------------------------------------ formats of the cache alone


@pytest.fixture
def cached(build, tmp_path):
    model = hf.quantize(build("llama"), keys="int8", values="int4_g32", skip_layers=(-1,))
    return model, hf.save(model, tmp_path / "cached", tokenizer=shipped_model())


def test_formats_of_the_cache_come_back(cached, prompt, greedy):
    model, folder = cached
    for again in (
        hf.load(folder),
        tf.AutoModelForCausalLM.from_pretrained(folder),
        tf.pipeline("text-generation", str(folder)).model,
    ):
        assert torch.equal(greedy(again, prompt())[1], greedy(model, prompt())[1])
        assert not again.is_quantized
    packed = hf.load(folder, "nf4")  # the weights are plain
    assert sum(isinstance(m, QuantLinear) for m in packed.modules()) == 14
    cache = packed.generate(prompt(), max_new_tokens=2, return_dict_in_generate=True).past_key_values
    assert (cache.layers[0].key_format.name, cache.layers[0].value_format.name) == ("int8", "int4_g32")


def test_what_nobody_wrote_is_damage(cached):
    configure(cached[1], lambda config: config["quantization_config"].update(weights="nf4"))
    with pytest.raises(CheckpointError, match="unknown entries: weights"):
        hf.load(cached[1])
