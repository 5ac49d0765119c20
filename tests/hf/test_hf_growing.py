"""Caches that become too small for a conversation: `PackedCache.grow`, and `generate()`, which calls it."""

from __future__ import annotations

import pytest
import torch
from test_hf_recovery import feed
from tiny_models import left_padding

import halfbyte.hf as hf
from halfbyte.errors import InvalidArgument


@pytest.mark.parametrize(
    ("keys", "values"), [("int8", "int4_g32"), ("int4_channel", "int8_token"), ("int8_tensor", "fp8_tensor"), ("bf16", "fp16")]
)
def test_a_cache_that_grew_is_one_that_was_large(build, prompt, keys, values):
    model = hf.quantize(build("llama"), keys=keys, values=values)
    runs = []
    for capacity in (64, 200):
        cache, outs = hf.PackedCache(model, capacity, keys=keys, values=values), []
        for part in range(4):  # the third part would not fit
            if part == 2:
                cache.grow(120)
            outs.append(feed(model, prompt(2, 30, part), cache, (15, 30)))
        runs.append(torch.cat(outs, 1))
    assert torch.equal(*runs)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_conversation_outgrows_its_first_cache(build, prompt, greedy, family):
    model, ids = hf.quantize(build(family), keys="int8", values="int8"), prompt(2)
    large, held = hf.PackedCache(model, 300, keys="int8", values="int8"), None
    for turn in range(3):
        ids = torch.cat([ids, prompt(2, 5, turn)], 1)
        options = {"new": 30, "attention_mask": torch.ones_like(ids)}
        expected, _ = greedy(model, ids, past_key_values=large, **options)
        with torch.no_grad():
            settings = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
            out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=held, **settings)
        ids, held = out.sequences, out.past_key_values
        assert torch.equal(ids, expected)
    assert held.capacity == 128


def test_new_tokens_alone_behind_a_full_cache(build, prompt):
    model = hf.quantize(build("llama"), keys="int8", values="int8")
    runs = []
    for capacity in (64, 256):
        cache = hf.PackedCache(model, capacity, keys="int8", values="int8")
        feed(model, prompt(1, 60), cache, (60,))
        mask = torch.ones(1, 64, dtype=torch.long)
        with torch.no_grad():
            runs.append(
                model.generate(prompt(1, 4, 1), attention_mask=mask, max_new_tokens=50, past_key_values=cache, do_sample=False)
            )
    assert torch.equal(*runs)


@pytest.mark.parametrize("tokens", [1, 13, 20, 25])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("loop", [{"recorded": False}, {"fuse_blocks": False}], ids=["theirs", "ours"])
def test_another_text_needs_an_empty_cache(build, prompt, tokens, padding, loop):
    """transformers cuts off as many tokens as the cache holds, from the wrong end where there are fewer."""
    model = hf.quantize(build("llama"), keys="int8", values="int8")
    cache, ids = hf.PackedCache(model, 64, keys="int8", values="int8"), prompt(2, tokens, 3)
    feed(model, prompt(2, 25), cache, (25,))
    mask = left_padding(ids, padding)
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "past_key_values": cache, **loop}
    with pytest.raises(InvalidArgument, match=rf"holds 25 tokens, and the text .* has {tokens}: .* reset\(\)"):
        model.generate(ids, **options)
    cache.reset()
    model.generate(ids, **options)
