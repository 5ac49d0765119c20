"""Plain `generate()` takes recorded steps and fused blocks, however a model was quantized; one argument switches back."""

from __future__ import annotations

import warnings
from contextlib import ExitStack

import pytest
import torch
import transformers as tf
from families import tiny_config, tiny_model
from tiny_models import VOCAB

import halfbyte.hf as hf
from halfbyte import errors
from halfbyte.hf import default_cache, fused_blocks
from halfbyte.hf.fused_blocks import FusedBlock, fused_view
from halfbyte.hf.model_support import model_class
from halfbyte.hf.recorded_step import Forward
from watched import watched

FORMATS = {"weights": "int4_g32", "keys": "int8", "values": "int8"}
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def ran(monkeypatch):
    """What ran: "step" for each recorded step, "block" for each fused block, none of which may run as it is."""
    seen = []
    monkeypatch.setattr(fused_blocks, "warn_once", pytest.fail)
    for kind, name in ((Forward, "step"), (FusedBlock, "block")):
        method = "__call__" if kind is Forward else "forward"
        watched(monkeypatch, kind, method, lambda *a, _name=name, **k: seen.append(_name))
    return seen


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch):
    """Neither Dynamo nor Inductor is on the way."""
    monkeypatch.setattr(torch, "compile", lambda *a, **k: pytest.fail("it compiles"))
    monkeypatch.setattr(tf.PreTrainedModel, "get_compiled_call", lambda *a, **k: pytest.fail("it compiles"))


def taken(ran, model, layers=2):
    """Whether five steps behind a prompt were recorded ones of fused blocks, and nothing else ran."""
    fused = bool(fused_view(model))
    found = ran == ["step", *["block"] * layers * fused] * 5
    ran.clear()
    return found


def test_a_model_quantized_in_memory_or_loaded(build, prompt, ran, tmp_path):
    model, ids = hf.quantize(build("llama"), **FORMATS), prompt(2)
    expected = model.generate(ids, **OPTIONS)
    assert taken(ran, model)
    folder = hf.save(model, tmp_path / "packed")
    for again in (hf.load(folder), tf.AutoModelForCausalLM.from_pretrained(folder)):
        again.generation_config.eos_token_id = None
        ran.clear()
        assert torch.equal(again.generate(ids, **OPTIONS), expected)
        assert taken(ran, again)
    build("llama").save_pretrained(tmp_path / "plain")
    config = hf.HalfbyteConfig(**FORMATS)
    while_loading = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    while_loading.generation_config.eos_token_id = None
    assert torch.equal(while_loading.generate(ids, **OPTIONS), expected)
    assert taken(ran, while_loading)


def test_a_pipeline(build, ran):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", unk_token="0")
    model = hf.quantize(build("llama"), **FORMATS)
    answer = tf.pipeline("text-generation", model, tokenizer=tokenizer)
    answer("5 17 33", max_new_tokens=6, do_sample=False)
    assert taken(ran, model)


def test_one_argument_switches_back(build, prompt, ran):
    model, ids = hf.quantize(build("llama"), **FORMATS), prompt(2)
    plain = model.generate(ids, recorded=False, disable_compile=True, **OPTIONS)
    assert not ran
    assert torch.equal(model.generate(ids, fuse_blocks=False, **OPTIONS), plain)
    assert ran == ["step"] * 5


def test_what_is_not_recorded_says_so_once(build, prompt, ran, monkeypatch):
    monkeypatch.setattr(errors, "_WARNED", set())
    model = hf.quantize(build("llama"), **FORMATS)
    with pytest.warns(UserWarning, match="transformers' own loop.*beam_search"):
        model.generate(prompt(2), num_beams=2, **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(prompt(2), num_beams=2, **OPTIONS)
    assert not ran


def test_two_methods_of_a_model_are_replaced(build):
    plain, model = build("llama"), hf.quantize(build("llama"), **FORMATS)
    methods = {name for name, x in vars(model).items() if callable(x) and name not in vars(plain)}
    assert methods == {"generate", "init_continuous_batching"}
    view = model.generate.view(True, ExitStack())
    assert isinstance(view, default_cache.Prepared)
    assert (type(view).__name__, view.model, view.lm_head) == (type(model).__name__, model.model, model.lm_head)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl"])
def test_prompts_with_images(family, ran):
    """The prompt takes its image, and steps are recorded, whose positions have three axes."""
    config = tiny_config(family)
    config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id = 5, 8, 6, 7
    torch.manual_seed(0)
    model = hf.quantize(model_class(config)._from_config(config).eval(), keys="int8", values="int8")
    model.generation_config.eos_token_id = None
    ids = torch.tensor([[11, 12, 6, 5, 5, 5, 5, 7, 13, 14, 15]])
    image = {"image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": (ids == 5).long()}
    answers = []
    for seed in range(2):
        image["pixel_values"] = torch.randn(16, 3 * 2 * 16 * 16, generator=torch.Generator().manual_seed(seed))
        plain = model.generate(ids, recorded=False, disable_compile=True, **image, **OPTIONS)
        assert not ran
        assert torch.equal(model.generate(ids, **image, **OPTIONS), plain)
        assert taken(ran, model)
        answers.append(plain)
    without = model.generate(ids, **OPTIONS)
    assert not all(torch.equal(answer, without) for answer in answers), "the image changes nothing, so the test shows nothing"


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl", "mistral3", "qwen3_moe", "gpt_oss"])
def test_what_generate_passes_to_blocks(family, ran):
    """More than a decoder needs: what a vision tower has encoded, of nothing here; whether routers tell their scores."""
    model, ids = hf.quantize(tiny_model(family), keys="int8", values="int8"), torch.arange(5, 24).view(1, -1)
    plain = model.generate(ids, recorded=False, disable_compile=True, **OPTIONS)
    assert not ran
    assert torch.equal(model.generate(ids, **OPTIONS), plain)
    assert taken(ran, model)
