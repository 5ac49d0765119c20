"""The key bias warning: as Qwen2 needs it, and silent where it is not needed."""

from __future__ import annotations

import warnings

import pytest
import torch

import halfbyte.hf as hf
from halfbyte.hf.attention_weights import key_biases


def _with_bias(model, layer: int, size: float):
    """Qwen2's pattern: a few dims of the key bias of one layer are huge."""
    block = (model.model.layers if hasattr(model, "model") else getattr(model, "transformer", None).h)[layer]
    with torch.no_grad():
        if hasattr(block, "self_attn"):
            bias = block.self_attn.k_proj.bias
        else:
            width = block.attn.split_size
            bias = block.attn.c_attn.bias[width : 2 * width]
        bias[3] = size
        bias[5] = -size
    return model


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@pytest.mark.parametrize("keys", ["int4", "int4_g32"])
def test_warns(build, family, keys):
    last = 2 if family == "qwen2" else 1
    model = _with_bias(build(family), last, 200.0)
    with pytest.warns(hf.KeyBiasWarning, match=rf"layer {last} .*int8.*int4_channel.*skip_layers=\[{last}\]"):
        hf.quantize(model, keys=keys, values="int4_g32")


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gpt_neox", "llama", "phi3"])
@pytest.mark.parametrize("keys", ["int4", "int8", "int4_channel"])
@pytest.mark.filterwarnings("error")
def test_silent_without_need(build, family, keys):
    hf.quantize(build(family), keys=keys, values="int4_g32")


@pytest.mark.parametrize("options", [{"keys": "int8"}, {"keys": "int4_channel"}, {"keys": "int4", "skip_layers": [-1]}])
@pytest.mark.filterwarnings("error")
def test_silent_with_the_remedy(build, options):
    hf.quantize(_with_bias(build("qwen2"), 2, 200.0), **options)


def test_warns_for_quantized_weights(build):
    model = hf.quantize(_with_bias(build("qwen2"), 0, 200.0), "int8_col")
    with pytest.warns(hf.KeyBiasWarning, match="layer 0 "):
        hf.quantize(model, keys="int4")


def test_the_warning_is_right(build, prompt):
    """What is left of the keys around the biased dims: little in the format that is warned about, most in those it names."""
    model, ids = _with_bias(build("qwen2"), 2, 200.0), prompt(2, 64)
    hf.quantize(model, keys="int8")

    def keys(name: str) -> torch.Tensor:
        cache = hf.PackedCache(model, 64, keys=name, values="fp16", skip_layers=[0, 1], dtype=torch.float16)
        with torch.no_grad():
            model(ids, past_key_values=cache, use_cache=True)
        found = cache.layers[2].kv.dequantized()[0][:, 0]
        return found[..., [d for d in range(32) if d not in (3, 19, 5, 21)]]  # RoPE mixes dim d with d + 16

    exact = keys("fp16")
    error = {k: float((keys(k) - exact).norm() / exact.norm()) for k in ("int4", "int4_channel", "int8")}
    assert error["int4"] > 1  # rotated, as by default: the rounding step is larger than the keys
    assert error["int4_channel"] < 0.2
    assert error["int8"] < 0.5


def test_rotation_is_part_of_the_measure(build):
    """A rotation spreads a bias over all dims: one of moderate size in one dim ruins 4-bit keys only if they are not rotated."""
    model = build("qwen2")
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.bias[3] = 20.0
    plain, rotated = (key_biases(model, turned)[2].ratio for turned in (False, True))
    assert plain > 1 > rotated
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf.quantize(model, keys="int4")
    with pytest.warns(hf.KeyBiasWarning, match="layer 2 .* will ruin this model. Use"):
        hf.quantize(model, keys="int4", rotate_keys=False)


def test_measures_keys_not_queries(build):
    """GPT-2 and GPT-NeoX keep q, k and v in one matrix: only the rows of k count."""
    for family, attn in (("gpt2", "transformer.h.0.attn.c_attn"), ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value")):
        model = build(family)
        before = [b.ratio for b in key_biases(model)]
        rows = torch.ones(192, dtype=torch.bool)
        if family == "gpt2":
            rows[64:128] = False
        else:
            rows.view(2, 3, 32)[:, 1] = False
        with torch.no_grad():
            model.get_submodule(attn).bias[rows] = 500.0
        assert [b.ratio for b in key_biases(model)] == before
