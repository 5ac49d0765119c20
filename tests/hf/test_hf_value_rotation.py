"""Values rotated by weights: the same model but for rounding, better values at few bits, and refusals where it would not be so."""

from __future__ import annotations

import copy

import pytest
import torch
from families import FAMILIES as EVERY
from families import tiny_model
from torch import nn

import halfbyte.hf as hf
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.formats import key_format, value_format
from halfbyte.hf.attention import attention
from halfbyte.hf.cache_layers import LayerOptions, PackedLayer
from halfbyte.reference.hadamard import rotate
from saved_folders import same

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


@torch.no_grad()
def amplify(model):
    """One channel of values is 30 times larger, and what reads it smaller: the model is the same."""
    if model.config.model_type == "llama":
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight[5] *= 30
            layer.self_attn.o_proj.weight.view(64, 4, 32)[:, :2, 5] /= 30  # two query heads on KV head 0
    else:
        for attn in (block.attn for block in model.transformer.h):
            value = 2 * model.config.n_embd + 5
            attn.c_attn.weight[:, value] *= 30
            attn.c_attn.bias[value] *= 30
            attn.c_proj.weight[5] /= 30


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_outlier_channel_of_values_is_spread(build, prompt, family):
    """By weights, and by the cache where these cannot take it: else INT4 values lose the other channels."""
    ids, error = prompt(2, 40), {}
    for rotate_values in (False, True):
        model = build(family)
        amplify(model)
        exact = logits(copy.deepcopy(model), ids)
        hf.quantize(model, keys="bf16", values="int4", rotate_values=rotate_values)
        cache = model.generate.cache(model, 64)
        assert any(layer.rotate_values for layer in cache.layers) is (rotate_values and family == "gpt2")
        with torch.no_grad():
            got = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split(20, 1)]
        error[rotate_values] = (got[1] - exact[:, 20:]).norm()  # the second chunk reads the first one's codes
    assert error[True] < error[False] / 1.5


@pytest.mark.parametrize("weights", [None, "int8_col"])
def test_it_is_saved_and_done_once(build, prompt, greedy, tmp_path, weights):
    model, ids = hf.quantize(build("llama"), weights, values="int8", rotate_values=True), prompt()
    again = hf.load(hf.save(model, tmp_path / "saved"), rotate_values=True)
    same(again, model)
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


@pytest.mark.parametrize("family", [name for name in ("mamba", "xlstm", "gemma4_text") if name in EVERY])
def test_no_heads_of_one_size(family):
    with pytest.raises(Unsupported, match=f"rotate_values=True: the configuration of {family} has no heads of one size"):
        hf.quantize(tiny_model(family), "int8_col", rotate_values=True)


# ------------------------------------------------------------------------------------------- where weights cannot take it


def by_cache(model):
    """What the layers of the cache that generate() makes hold rotated values."""
    cache = model.generate.cache(model, 64)
    return [layer.rotate_values for layer in cache.layers]


@pytest.mark.parametrize("queries", [1, 30])
def test_attention_rotates_its_output_back(queries):
    """P (V H) H = P V, in float64 over what the cache holds, for a step and for a chunk that reads its own values exactly."""
    draw = torch.Generator().manual_seed(queries)
    layer = PackedLayer(64, LayerOptions(key_format("int8"), value_format("int4"), True, torch.bfloat16, rotate_values=True))
    q = torch.randn(2, 4, queries, 64, generator=draw)
    past, new = (torch.randn(2, 2, 2, n, 64, generator=draw) * torch.logspace(-1, 1, 64) for n in (20, queries))
    layer.update(*past)
    keys, values = layer.update(*new)
    out, _ = attention(nn.Module(), q, keys, values, None)
    k, v = (x[:, :, : 20 + queries].double().repeat_interleave(2, 1) for x in layer.kv.dequantized())
    v = rotate(v)
    if queries > 16:
        k[:, :, 20:], v[:, :, 20:] = (x.double().repeat_interleave(2, 1) for x in new)
    scores = (q.double() @ k.mT) / 8
    scores = scores.masked_fill(torch.ones(queries, 20 + queries).tril(20).logical_not(), -torch.inf)
    expected = (scores.softmax(-1) @ v).transpose(1, 2)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "change"),
    [("llama", gated), ("llama", clipped), ("llama", quantized), ("phi3", None), ("gpt2", None), ("qwen2", quantized)],
)
def test_the_cache_rotates_what_weights_cannot(build, prompt, greedy, tmp_path, family, change):
    """The same weights, codes of rotated values, logits as near to 16 bits; saved and loaded, it is so again."""
    model, ids = build(family), prompt(2, 30)
    if change is not None:
        change(model)
    plain = copy.deepcopy(model)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    hf.quantize(model, keys="bf16", values="int8", rotate_values=True)
    hf.quantize(plain, keys="bf16", values="int8")
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert by_cache(model) == [True] * model.config.num_hidden_layers
    assert not any(by_cache(plain))
    caches = [m.generate.cache(m, 64) for m in (plain, model)]
    runs = [*zip((plain, model), caches, strict=True), (plain, hf.PackedCache(plain, 64, keys="bf16", values="bf16"))]
    with torch.no_grad():
        chunks = [m(ids, past_key_values=cache, use_cache=True).logits for m, cache in runs]
        steps = [m(ids[:, :1], past_key_values=cache, use_cache=True).logits for m, cache in runs]
    torch.testing.assert_close(chunks[0], chunks[1], rtol=1e-4, atol=1e-4)  # a chunk reads its own values in 16 bits
    held, turned = (cache.layers[0].kv.dequantized()[1] for cache in caches)
    assert (rotate(held) - turned).norm() < 0.02 * held.norm()
    plain_error, error = ((step - steps[2]).norm() for step in steps[:2])  # a step reads codes
    assert 0 < error < 2 * plain_error
    sequences = greedy(model, ids)[0]
    if change is quantized:
        bare = hf.quantize(build(family), "int8_col")
        loaded = hf.load(hf.save(bare, tmp_path / "bare"), keys="bf16", values="int8", rotate_values=True)
        assert by_cache(loaded) == by_cache(model)
        again = hf.load(hf.save(model, tmp_path / "saved"))
        assert by_cache(again) == by_cache(model)
        assert torch.equal(greedy(again, ids)[0], sequences)
        assert "int8 rotated" in repr(again.generate.cache(again, 64))


def test_rotation_by_the_cache_needs_heads_and_quantized_values(build):
    model = hf.quantize(build("gpt2"), keys="int8", values="bf16", rotate_values=True)
    assert not any(by_cache(model))  # 16 bits have nothing to gain
    with pytest.raises(InvalidArgument, match="rotate_values=1; expected True or False"):
        hf.PackedCache(model, 64, values="int4", rotate_values=1)
    folded = hf.quantize(build("llama"), keys="int8", values="int4", rotate_values=True)
    assert not any(by_cache(folded))  # its weights have it


@torch.no_grad()
def test_a_compiled_step_rotates_too(build, prompt):
    model, ids = hf.quantize(build("gpt2"), keys="int8", values="int4", rotate_values=True), prompt(2, 18)
    outs = []
    for step in (model, torch.compile(model, backend="eager", fullgraph=True)):
        cache = model.generate.cache(model, 64)
        model(ids, past_key_values=cache, use_cache=True)
        outs.append(step(ids[:, -1:], past_key_values=cache, use_cache=True, cache_position=torch.tensor([18])).logits)
    torch._dynamo.reset()
    assert torch.equal(*outs)
