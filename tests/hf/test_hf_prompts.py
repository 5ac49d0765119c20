"""Recorded prompts: padded on the right to a bucket of tokens, with the tokens and the cache of a prompt without padding.

On a CPU the recorded forward is an ordinary call; everything around it is what runs on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from families import tiny_model
from tiny_models import left_padding

import halfbyte.hf as hf
from halfbyte.errors import Unsupported
from halfbyte.hf import default_cache, graph_generate
from halfbyte.hf.recorded_step import MOST_PROMPT, MOST_PROMPTS, kept_steps, prompt_bucket
from watched import watched

OPTIONS = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 12}


@pytest.fixture(autouse=True)
def _recorded(monkeypatch):
    monkeypatch.setattr(graph_generate, "records_prompts", lambda prompts: True)


@pytest.fixture
def packed(build):
    return lambda family="llama", **options: hf.quantize(build(family), **{"keys": "int8", "values": "int4_g32", **options})


def recorded_prompts(model):
    """The forwards of prompts that the newest step holds."""
    return kept_steps(model)[-1].prompts


def codes(model):
    """Lengths and contents of the cache of the last call."""
    return [(layer.kv.lengths.clone(), *layer.kv.dequantized()) for layer in kept_steps(model)[-1].cache.packed]


CACHES = [
    {},
    {"keys": "int8_channel", "values": "int8"},
    {"keys": "int4_channel"},
    {"keys": "int8", "values": "int8", "rotate_keys": True},
    {"sink_tokens": 4, "recent_tokens": 16},
    {"rotate_values": True},
]


@pytest.mark.parametrize("options", CACHES, ids=str)
def test_prompts_of_one_bucket_are_one_forward(packed, prompt, options):
    """Tokens and cache of the model's own prompt, for every length, and again for the one before."""
    model, other = packed(**options), packed(**options)
    for tokens, forwards in ((18, 1), (21, 1), (32, 1), (33, 2), (18, 2), (140, 1)):  # the last has a cache of its own
        ids = prompt(2, tokens, tokens)
        made = model.generate(ids, **OPTIONS)
        assert torch.equal(made, other.generate(ids, fuse_blocks=False, **OPTIONS))
        assert len(recorded_prompts(model)) == forwards
        for mine, theirs in zip(codes(model), codes(other), strict=True):
            assert mine[0].tolist() == [tokens + 11] * 2
            assert torch.equal(mine[0], theirs[0])
            for a, b in zip(mine[1:], theirs[1:], strict=True):
                assert torch.allclose(a[:, :, : tokens + 11], b[:, :, : tokens + 11], atol=0.05)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "phi3", "gpt2", "gpt_neox"])
def test_families(packed, prompt, family):
    model = packed(family)
    ids = prompt(3, 23)
    mask = left_padding(ids, 5, 2)
    made = [model.generate(ids, attention_mask=mask, **OPTIONS) for _ in range(2)]
    assert torch.equal(*made)
    assert torch.equal(made[0], model.generate(ids, attention_mask=mask, fuse_blocks=False, **OPTIONS))


def test_what_is_not_recorded(packed, prompt, monkeypatch):
    """A state, a measured scale or a window would see the padding; long prompts keep the GPU busy anyway."""
    for model, options in (
        (packed(), {"fuse_blocks": False}),
        (packed(), {"prefill_chunk_size": 8}),
        (packed(keys="int8_tensor", values="int8_tensor"), {}),
        (packed("mistral"), {}),
        (hf.quantize(tiny_model("olmo_hybrid"), keys="int8", values="int8"), {}),
    ):
        model.generate(prompt(1), **OPTIONS, **options)
        assert not recorded_prompts(model)
    model = packed()
    monkeypatch.setattr("halfbyte.hf.recorded_step.MOST_PROMPT", 40)
    model.generate(prompt(2, 21), **OPTIONS)
    assert not recorded_prompts(model)


def test_few_lengths_are_kept(packed, prompt):
    model = packed()
    for tokens in range(8, 8 + 16 * (MOST_PROMPTS + 2), 16):
        model.generate(prompt(1, tokens), **{**OPTIONS, "max_new_tokens": 200 - tokens})
    assert len(recorded_prompts(model)) == MOST_PROMPTS
    assert [len(one.inputs["input_ids"][0]) for one in recorded_prompts(model)][-1] == prompt_bucket(tokens)


def test_buckets_waste_a_quarter_at_most():
    for tokens in range(1, MOST_PROMPT + 1):
        assert tokens <= prompt_bucket(tokens) <= max(16, 1.25 * tokens + 16)


def test_rows_of_several_texts_are_refused(packed, prompt):
    positions = torch.tensor([[*range(10), *range(11)]])
    with pytest.raises(Unsupported, match="start again within a row"):
        packed().generate(prompt(1, 21), position_ids=positions, **OPTIONS)


def test_the_next_default_cache_is_made_of_the_last(packed, prompt, monkeypatch):
    """Unless the model's cache was set otherwise, or the model cast."""
    model, made = packed(), watched(monkeypatch, default_cache, "new_cache")
    for tokens in (5, 50, 400):
        model.generate(prompt(2, tokens), **OPTIONS)
    assert len(made) == 1
    model.bfloat16().generate(prompt(2), **OPTIONS)
    assert len(made) == 2
    hf.quantize(model, keys="int8", values="int8")
    model.generate(prompt(2), **OPTIONS)
    assert len(made) == 3
    assert {layer.kinds for layer in kept_steps(model)[-1].cache.packed} == {"int8/int8"}
