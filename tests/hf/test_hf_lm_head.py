"""A quantized output layer: the same bits however it came to be, tied or not, saved and loaded, or refused in words."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers as tf
from families import tiny_config
from tiny_models import FAMILIES, LLAMA, SIZES

import halfbyte
import halfbyte.hf as hf
from halfbyte.errors import CheckpointError, InvalidArgument, Unsupported
from halfbyte.hf.weights import weight_bytes
from halfbyte.memory import estimate
from halfbyte.nn import QuantLinear
from halfbyte.paths import shipped_model
from halfbyte_lab.evals.quality import Setting, evaluate
from saved_folders import configure, same

pytestmark = pytest.mark.filterwarnings("ignore:halfbyte. .* stay in 16 bits")


def tiny(tied, **changes):
    torch.manual_seed(3)
    config = tf.LlamaConfig(**{**LLAMA, **changes}, tie_word_embeddings=tied)
    return tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def tied(family):
    config = tiny_config(family)
    config.tie_word_embeddings = True
    return config


def head(model):
    return model.get_output_embeddings()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", [None, "nf4"])
@pytest.mark.parametrize("fmt", ["int8_col", "int4_g32"])
def test_its_codes_and_nothing_else(prompt, tied, weights, fmt):
    plain, ids = tiny(tied), prompt()
    embedding, expected = plain.model.embed_tokens.weight.clone(), halfbyte.quantize(plain.lm_head.weight.detach(), fmt)
    model = hf.quantize(tiny(tied), weights, lm_head=fmt)
    assert isinstance(head(model), QuantLinear)
    assert torch.equal(head(model).weight.codes, expected.codes)
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    assert isinstance(model.model.layers[0].mlp.up_proj, QuantLinear) == (weights is not None)
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
        assert torch.equal(model(ids).logits, halfbyte.linear(hidden, expected))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", [None, "int4_g32"])
def test_saved_and_loaded(prompt, greedy, tmp_path, tied, weights):
    tiny(tied).save_pretrained(tmp_path / "plain")
    options, ids = {"lm_head": "int8_col", "keys": "int8", "clip": "search"}, prompt()
    made = hf.quantize(tiny(tied), weights, **options)
    hf.save(made, tmp_path / "ours")
    made.save_pretrained(tmp_path / "theirs")
    config = hf.HalfbyteConfig(weights, **options)
    for again in (
        hf.load(tmp_path / "plain", weights, **options),
        tf.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config),
        *(hf.load(tmp_path / folder) for folder in ("ours", "theirs")),
        *(tf.AutoModelForCausalLM.from_pretrained(tmp_path / folder) for folder in ("ours", "theirs")),
    ):
        again.tie_weights()  # of transformers: must find nothing to tie
        assert isinstance(head(again), QuantLinear)
        same(again, made)
        assert torch.equal(greedy(again, ids)[1], greedy(made, ids)[1])
    hf.save(hf.load(tmp_path / "ours"), tmp_path / "again")
    files = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("ours", "again")]
    assert files[0] == files[1]


@pytest.mark.parametrize("tied", [False, True])
def test_without_halfbyte_the_folder_does_not_load(tmp_path, tied):
    hf.save(hf.quantize(tiny(tied), lm_head="int8_col"), tmp_path / "it")
    config = tf.AutoConfig.from_pretrained(tmp_path / "it")
    del config.quantization_config
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        tf.LlamaForCausalLM.from_pretrained(tmp_path / "it", config=config)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(build, prompt, greedy, tmp_path, family):
    plain, ids = build(family), prompt()
    plain.set_attn_implementation("eager")  # before transformers 5.20, others leave out the softcap of Gemma 2
    model = hf.quantize(build(family), lm_head="int8_col", keys="int8", values="int8")
    with torch.no_grad():
        exact = plain(ids).logits
        error = (model(ids, use_cache=False).logits - exact).norm() / exact.norm()
    assert 0 < error < 0.02  # of INT8 with a scale a row
    again = hf.load(hf.save(model, tmp_path / "it"))
    assert torch.equal(greedy(again, ids)[0], greedy(model, ids)[0])


def test_after_the_weights_and_once(build):
    model = hf.quantize(build("llama"), "nf4", fuse_qkv=True)
    same(hf.quantize(model, lm_head="int8_col"), hf.quantize(build("llama"), "nf4", lm_head="int8_col"))
    with pytest.raises(InvalidArgument, match=r"lm_head='nf4'.*quantized already \(int8_col\)"):
        hf.quantize(model, lm_head="nf4")
    other = hf.quantize(build("llama"), lm_head="int8_col")
    same(hf.quantize(other, "nf4"), model)
    assert set(model.config.quantization_config.modules) == set(other.config.quantization_config.modules)


def unchanged(model, options, error, message):
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(error, match=message):
        hf.quantize(model, **options)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lm_head": "int3"}, InvalidArgument, "int3"),
        ({"lm_head": "int8"}, InvalidArgument, "int8"),
        ({"lm_head": "int4_g128"}, InvalidArgument, r"lm_head.*\[101, 64\]"),
        ({"lm_head": "int8_col", "skip_modules": ("lm_head",)}, InvalidArgument, "skip_modules leaves in 16 bits"),
        ({"lm_head": "int8_col", "clip": "half"}, InvalidArgument, "clip='half'"),
    ],
)
def test_what_does_not_fit_changes_nothing(build, options, error, message):
    unchanged(build("llama"), {"weights": "nf4", **options}, error, message)


def test_nan_in_a_head_changes_nothing():
    model = tiny(False)
    with torch.no_grad():
        model.lm_head.weight[3, 5] = torch.inf
    with pytest.raises(InvalidArgument, match="lm_head"):
        hf.quantize(model, "nf4", lm_head="int8_col")
    assert not any(isinstance(m, QuantLinear) for m in model.modules())
    assert isinstance(model.lm_head, torch.nn.Linear)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tf.AutoModel.from_config(tf.LlamaConfig(**LLAMA)), "no single linear output layer"),
        (lambda: tf.AutoModelForCausalLM.from_config(tf.BertConfig(**SIZES, num_hidden_layers=2, is_decoder=True)), "ties more"),
        (lambda: tf.AutoModelForSeq2SeqLM.from_config(tied("bart")), "ties more"),
    ],
)
def test_models_without_a_head_of_their_own(make, message):
    unchanged(make(), {"lm_head": "int8_col"}, Unsupported, message)


def test_the_hook_of_accelerate_moves_with_it():
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed; pip install accelerate")
    model, hook, calls = tiny(True), hooks.ModelHook(), []
    hook.pre_forward = lambda module, *args, **options: calls.append(module) or (args, options)
    hooks.add_hook_to_module(model.lm_head, hook)
    hf.quantize(model, "nf4", lm_head="int8_col")
    assert isinstance(model.lm_head, QuantLinear)
    model(torch.zeros(1, 3, dtype=torch.long))
    assert calls == [model.lm_head]


def test_while_loading_refuses_before_it_reads(tmp_path):
    tiny(True).save_pretrained(tmp_path)
    for options, error, message in (
        ({"lm_head": "int4_g128"}, InvalidArgument, r"lm_head.*\[101, 64\]"),
        ({"lm_head": "int8_col", "clip": "half"}, InvalidArgument, "clip='half'"),
        ({"lm_heads": "int8_col"}, InvalidArgument, "lm_heads: no such option"),
    ):
        with pytest.raises(error, match=message):
            tf.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=hf.HalfbyteConfig("nf4", **options))


def test_a_folder_that_still_ties(tmp_path):
    """config.json edited by hand: the head in the files must not be replaced by the embedding in silence."""
    made = hf.quantize(tiny(True), lm_head="int8_col")
    hf.save(made, tmp_path / "it")
    configure(tmp_path / "it", tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        hf.load(tmp_path / "it")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", ["bf16", "nf4"])
def test_memory_counts_it(tmp_path, tied, weights):
    model = tiny(tied)
    model.config.save_pretrained(tmp_path)
    before, found = estimate(str(tmp_path), weights=weights), estimate(str(tmp_path), weights=weights, lm_head="int8_col")
    made = hf.quantize(model, None if weights == "bf16" else weights, lm_head="int8_col")
    assert found.weight_bytes == weight_bytes(made) == sum(p.nbytes for p in made.parameters())
    assert found.plain_weight_bytes == before.plain_weight_bytes
    assert found.quantized_parameters == before.quantized_parameters + (0 if tied else 101 * 64)
    packed = head(made).weight.nbytes
    assert found.weight_bytes - before.weight_bytes == (packed if tied else packed - 2 * 101 * 64)
    assert any("tied" in note for note in found.notes) == tied


def test_evaluated():
    model = hf.load(shipped_model(), dtype=torch.float32)
    model.set_attn_implementation(hf.NAME)
    tokens = torch.randint(model.config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(0))
    plain, eight, four = evaluate(model, [Setting(), Setting(lm_head="int8_col"), Setting(lm_head="int4_g32")], tokens)
    assert 0 < eight.kl_mean < four.kl_mean
    assert plain.weight_bytes < four.weight_bytes < eight.weight_bytes  # tied: a second head on top
    assert (eight.setting.name, Setting("int8", "int8", weights="nf4", lm_head="int8_col").name) == (
        "int8_col lm_head",
        "int8 + nf4 + int8_col lm_head",
    )


def test_the_vocabulary_is_not_resized(build, tmp_path):
    """Refused before the embedding is replaced, also in a copy and a loaded folder; a head in 16 bits is resized."""
    model = hf.quantize(build("llama"), "int4_g32", lm_head="int8_col")
    rows = len(model.get_input_embeddings().weight)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), hf.load(hf.save(model, tmp_path / "model"))):
        with pytest.raises(Unsupported, match="resize the 16-bit model"):
            each.resize_token_embeddings(rows + 3)
        assert len(each.get_input_embeddings().weight) == each.config.vocab_size == rows
    model = hf.quantize(build("llama"), "int4_g32")
    model.resize_token_embeddings(rows + 3)
    assert len(model.lm_head.weight) == rows + 3
