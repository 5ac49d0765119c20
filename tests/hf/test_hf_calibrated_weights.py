"""Weights rounded by their inputs: less divergence on other text, block by block, and refusals of what has no known inputs."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from transformers.utils import logging

import halfbyte.hf as hf
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.hf import calibrated_weights
from halfbyte.hf.weights import select, show_progress
from halfbyte.nn import QuantLinear
from halfbyte.paths import shipped_model
from halfbyte.reference.quantize import quantize
from halfbyte.text import heldout_text
from saved_folders import same


def logits(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits.log_softmax(-1)


def divergence(model, expected, ids):
    return float((expected.exp() * (expected - logits(model, ids))).sum(-1).mean())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "gpt2", "gpt_neox"])
def test_other_text_diverges_less(build, prompt, family):
    """Fused projections of Phi-3, transposed weights of GPT-2, parallel branches of GPT-NeoX."""
    model, ids, other = build(family), prompt(8, 160), prompt(4, 160, seed=1)
    expected = logits(model, other)
    plain, calibrated = copy.deepcopy(model), copy.deepcopy(model)
    hf.quantize(plain, "nvfp4")
    hf.quantize(calibrated, "nvfp4", calibrate=ids)
    assert divergence(calibrated, expected, other) < 0.8 * divergence(plain, expected, other)


@pytest.mark.parametrize("fmt", ["int4_g32", "int4_col", "nf4_dq", "mxfp4", "int8_col"])
def test_every_format_is_saved_and_loaded_bit_for_bit(build, prompt, tmp_path, fmt):
    model, other = build("llama"), prompt(2, 64, seed=1)
    hf.quantize(model, fmt, calibrate=prompt(8, 160))
    assert {m.format.name for m in model.modules() if isinstance(m, QuantLinear)} == {fmt}
    hf.save(model, tmp_path / "it")
    assert torch.equal(logits(hf.load(tmp_path / "it"), other), logits(model, other))


def test_each_block_gets_what_the_quantized_ones_before_it_give(build, prompt):
    """The weights of the last block, from the inputs of a model whose other blocks are quantized."""
    model, ids = build("llama"), prompt(8, 160)
    half = copy.deepcopy(model)
    hf.quantize(model, "int4_g32", calibrate=ids)
    first = half.model.layers[0]
    for name, layer in list(first.named_modules()):
        if isinstance(layer, nn.Linear):
            layer.weight.data = model.model.layers[0].get_submodule(name).weight.dequantize()
    last, sums = half.model.layers[1], {}
    for name in ("self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"):
        last.get_submodule(name).register_forward_pre_hook(
            lambda layer, args, name=name: sums.update({name: args[0].flatten(0, 1)})
        )
    logits(half, ids)
    for name, x in sums.items():
        expected = quantize(last.get_submodule(name).weight.detach(), "int4_g32", hessian=x.T @ x)
        actual = model.model.layers[1].get_submodule(name).weight
        assert (actual.codes == expected.codes).float().mean() > 0.995, name  # sums of windows are rounded in another order


def test_layers_of_one_input_share_its_sum(build, prompt, monkeypatch):
    sums = []
    original = calibrated_weights._inputs_of
    monkeypatch.setattr(calibrated_weights, "_inputs_of", lambda *args: sums.append(original(*args)) or sums[-1])
    hf.quantize(build("llama"), "int4_g32", calibrate=prompt(8, 160))
    assert [len(inputs.sums) for inputs in sums] == [4, 4]  # q, k, v; o; gate and up; down


def test_blocks_that_share_a_weight_and_a_tied_output_layer(build, prompt):
    model, ids = build("llama"), prompt(8, 160)
    model.lm_head.weight = model.model.embed_tokens.weight
    model.config.tie_word_embeddings = True
    model.model.layers[1].mlp.up_proj = model.model.layers[0].mlp.up_proj
    embedding = model.model.embed_tokens.weight.clone()
    hf.quantize(model, "int4_g32", lm_head="int8_col", calibrate=ids)
    assert model.model.layers[1].mlp.up_proj is model.model.layers[0].mlp.up_proj
    assert torch.equal(model.lm_head.weight.codes, quantize(embedding, "int8_col").codes)
    assert torch.equal(model.model.embed_tokens.weight, embedding)


def test_texts_of_a_model_with_a_tokenizer(tmp_path):
    """The shipped model reads bytes: the same weights as from the tokens themselves."""
    text = heldout_text()[:3000]
    plain = hf.load(shipped_model())
    del plain.model.layers[1:]
    plain.config.num_hidden_layers = 1
    hf.save(plain, tmp_path / "plain")
    models = [hf.load(tmp_path / "plain") for _ in range(2)]
    hf.quantize(models[0], "int4_g64", calibrate=[text[:2000], text[2000:]])
    hf.quantize(models[1], "int4_g64", calibrate=torch.tensor([*text.encode()][:2048]).view(2, 1024))
    same(*models)


@pytest.mark.parametrize(
    ("calibrate", "message"),
    [
        ("a text", "this model was not loaded from a folder with a tokenizer"),
        ([], "calibrate is a list; expected texts, or tokens"),
        (["text", 3], "calibrate is a list; expected texts, or tokens"),
        (7, "calibrate is a int; expected texts"),
        (torch.zeros(2048, dtype=torch.int64), r"calibrate is torch.int64 \[2048\]"),
        (torch.zeros(2, 1024), r"calibrate is torch.float32 \[2, 1024\]"),
        (torch.ones(2, 300, dtype=torch.int64), "calibrate has 600 tokens, too few"),
    ],
)
def test_what_is_no_text_is_refused(build, calibrate, message):
    model = build("llama")
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(InvalidArgument, match=message):
        hf.quantize(model, "nf4", calibrate=calibrate)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_short_texts_and_missing_tokenizers(tmp_path, build):
    with pytest.raises(InvalidArgument, match="calibrate has 6 tokens, too few"):
        hf.load(shipped_model(), weights="nf4", calibrate="a text")
    hf.save(build("llama"), tmp_path / "plain")
    with pytest.raises(InvalidArgument, match="has no tokenizer"):
        hf.load(tmp_path / "plain", weights="nf4", calibrate="a text")


def test_an_error_on_the_way_leaves_the_model_as_it_was(build, prompt, monkeypatch):
    model, ids = build("llama"), prompt(8, 160)
    before, weight = logits(model, ids), model.model.layers[1].mlp.down_proj.weight
    weight.data[3, 5] = torch.nan
    with pytest.raises(InvalidArgument, match=r"layers\.1\.mlp\.down_proj: x holds 1 NaN"):
        hf.quantize(model, "nf4", calibrate=ids)
    weight.data[3, 5] = 0
    assert not any(isinstance(m, QuantLinear) for m in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    weight.data[3, 5] = build("llama").model.layers[1].mlp.down_proj.weight[3, 5]
    assert torch.equal(logits(model, ids), before)


def test_what_has_no_known_inputs_is_refused(build, prompt):
    ids = prompt(8, 160)
    with pytest.raises(Unsupported, match=r"experts.gate_up_proj is a mixture of experts.*skip_modules=\('model.layers.0.mlp"):
        hf.quantize(build("gpt_oss"), "int4_g32", calibrate=ids)
    model = build("gpt_oss")
    hf.quantize(model, "int4_g32", calibrate=ids, skip_modules=("experts",))
    assert isinstance(model.model.layers[0].self_attn.q_proj, QuantLinear)

    model = build("llama")
    model.model.layers[0].mlp.extra = nn.Linear(64, 64)
    with pytest.raises(Unsupported, match=r"no token reaches model.layers.0.mlp.extra by a call of it; .*skip_modules"):
        hf.quantize(model, "int4_g32", calibrate=ids)

    model = build("llama")
    model.model.layers[1].register_forward_pre_hook(lambda block, args: (args[0] * 2, *args[1:]))
    with pytest.raises(Unsupported, match="block 1 of LlamaForCausalLM does not get what the block before it returns"):
        hf.quantize(model, "int4_g32", calibrate=ids)

    with pytest.raises(InvalidArgument, match="calibrate is about weights in the blocks"):
        hf.quantize(build("llama"), lm_head="int8_col", calibrate=ids)


def test_a_clip_that_changes_nothing_is_told(build, monkeypatch):
    monkeypatch.setattr("halfbyte.errors._WARNED", set())
    with pytest.warns(UserWarning, match="clip='search' changes nothing in nf4: groups of more than 32 keep their range"):
        hf.quantize(build("llama"), "nf4", clip="search")


def test_progress_is_told_where_it_is_wanted(build, prompt, monkeypatch, capsys):
    """Of loading, an evaluation shows none; of calibrating, how long it takes."""
    monkeypatch.setattr("halfbyte.hf.weights._PATIENCE", 0.0)
    logging.disable_progress_bar()
    try:
        hf.quantize(build("llama"), "nvfp4", clip="search", calibrate=prompt(8, 160))
        assert not capsys.readouterr().err
        with show_progress():
            hf.quantize(build("llama"), "nvfp4", clip="search", calibrate=prompt(8, 160))
    finally:
        logging.enable_progress_bar()
    said = capsys.readouterr().err
    for action in ("Reading: 100%.* windows", "Calibrating: 100%.* blocks", "Quantizing: 100%.* weights"):
        assert re.search(action, said)


def test_weights_are_not_calibrated_while_they_are_loaded(build, prompt, tmp_path):
    from transformers import AutoModelForCausalLM

    hf.save(build("llama"), tmp_path / "plain")
    config = hf.HalfbyteConfig(weights="nf4", calibrate=prompt(8, 160))
    with pytest.raises(Unsupported, match="calibrate needs the whole model in 16 bits"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)


def test_experts_are_the_only_weights_that_are_no_layers(build):
    assert all(target.projection for name, target in select(build("gpt_oss"), ()).items() if "experts" in name)
