"""Values rotated by weights: the same model but for rounding, better values at few bits, and refusals where it would not be so."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import halfbyte.hf as hf
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.reference.hadamard import rotate

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt_oss")


def logits(model, ids):
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_stays_the_same(build, prompt, family):
    """Weights in float64 where its experts compute in it, so that nothing but the identity is tested."""
    model, ids = build(family), prompt(2, 30)
    close = {"rtol": 1e-4, "atol": 1e-4} if family == "gpt_oss" else {"rtol": 1e-9, "atol": 1e-9}
    model = model if family == "gpt_oss" else model.double()
    expected = logits(copy.deepcopy(model), ids)
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert hf.quantize(model, rotate_values=True) is model
    changed = {name.split(".")[-2] for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"v_proj", "o_proj"}
    torch.testing.assert_close(logits(model, ids), expected, **close)


def test_values_in_the_cache_are_rotated(build, prompt):
    plain, ids = build("qwen2"), prompt(2, 30)
    turned = hf.quantize(build("qwen2"), keys="fp16", values="fp16", rotate_values=True)
    hf.quantize(plain, keys="fp16", values="fp16")
    held = []
    for model in (plain, turned):
        cache = hf.PackedCache(model, 64, keys="fp16", values="fp16", dtype=torch.float16)
        with torch.no_grad():
            model(ids, past_key_values=cache, use_cache=True)
        held.append(cache.layers[0].kv.dequantized())
    assert torch.equal(held[0][0], held[1][0])
    torch.testing.assert_close(rotate(held[0][1]), held[1][1], rtol=2e-3, atol=2e-3)


def test_an_outlier_channel_of_values_is_spread(build, prompt):
    """One channel of v_proj is 30 times larger, the columns of o_proj that read it smaller: INT4 values lose the other channels."""
    ids, error = prompt(2, 40), {}
    for rotate_values in (False, True):
        model = build("llama")
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.v_proj.weight[5] *= 30
                layer.self_attn.o_proj.weight.view(64, 4, 32)[:, :2, 5] /= 30  # two query heads on KV head 0
        exact = logits(copy.deepcopy(model), ids)
        hf.quantize(model, keys="fp16", values="int4", rotate_values=rotate_values)
        cache = hf.PackedCache(model, 64, keys="fp16", values="int4", dtype=torch.float16)
        with torch.no_grad():
            got = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split(20, 1)]
        error[rotate_values] = (got[1] - exact[:, 20:]).norm()  # the second chunk reads the first one's codes
    assert error[True] < error[False] / 1.5


@pytest.mark.parametrize("weights", [None, "int8_col"])
def test_it_is_saved_and_done_once(build, prompt, greedy, tmp_path, weights):
    model, ids = hf.quantize(build("llama"), weights, values="int8", rotate_values=True), prompt()
    again = hf.load(hf.save(model, tmp_path / "saved"), rotate_values=True)
    parts = again.state_dict()
    assert all(torch.equal(t, parts[name]) for name, t in model.state_dict().items())
    assert torch.equal(greedy(again, ids)[1], greedy(model, ids)[1])


def gated(model):
    model.model.layers[1].self_attn.gate = nn.Linear(64, 128)


def doubled(model):
    model.model.layers[1].self_attn.q_proj = nn.Linear(64, 256)


def clipped(model):
    model.config.clip_qkv = 8.0


def shared(model):
    model.model.layers[1].self_attn = model.model.layers[0].self_attn


def quantized(model):
    hf.quantize(model, "int8_col")


@pytest.mark.parametrize(
    ("family", "change", "error", "message"),
    [
        ("llama", gated, Unsupported, "layer 1 has gate, which may change values"),
        ("llama", doubled, Unsupported, r"layer 1: .*\(64, 128, 256\) features"),
        ("llama", clipped, Unsupported, "clip_qkv=8.0"),
        ("llama", shared, Unsupported, "share their weights"),
        ("llama", quantized, InvalidArgument, "layer 0: v_proj is a QuantLinear; .* pass it with weights="),
        ("phi3", lambda _: None, Unsupported, "layer 0 has no attention with v_proj and o_proj"),
        ("gpt2", lambda _: None, Unsupported, "layer 0 has no attention with v_proj and o_proj"),
    ],
)
def test_what_cannot_be_rotated_says_why_and_stays(build, family, change, error, message):
    model = build(family)
    change(model)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(error, match=message):
        hf.quantize(model, None if change is quantized else "int8_col", rotate_values=True)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    with pytest.raises(InvalidArgument, match="rotate_values='yes'"):
        hf.quantize(model, keys="int8", rotate_values="yes")
