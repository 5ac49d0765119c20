"""Assisted decoding is its own greedy decoding, whatever the formats, and leaves no trace of rejected drafts in the cache."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from tiny_models import left_padding
from torch.testing import assert_close

import halfbyte.hf as hf
from halfbyte.errors import InvalidArgument, Unsupported

CASES = {
    "per-channel": {"keys": "int4_channel", "values": "int8"},
    "a token": {"keys": "int4", "values": "int4_g32"},
    "window": {"keys": "int8", "values": "int8", "sink_tokens": 2, "recent_tokens": 20},
}
SOURCES = ("lookup", "long lookup", "assistant")


def drafts(source, build, family):
    """Options of generate(). The assistant is the model itself with a 16-bit cache, so it is right now and then, not always."""
    if source == "assistant":
        return {"assistant_model": build(family)}
    return {"prompt_lookup_num_tokens": 20 if source == "long lookup" else 7}


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize(
    ("family", "case", "source"), [*itertools.product(["llama"], CASES, SOURCES), ("gpt_oss", "per-channel", "lookup")]
)
def test_drafts_change_no_token(build, prompt, greedy, family, case, source):
    """Prompts of which attention reads itself packed (9 tokens) and exactly (21, of them 5 padding), and answers that finish a
    block of keys.
    """
    model = hf.quantize(build(family), **CASES[case])
    for tokens, pads in ((9, 0), (21, 5)):
        ids = prompt(1, tokens)
        mask = left_padding(ids, pads)
        expected, logits = greedy(model, ids, new=26, attention_mask=mask)
        got, own = greedy(model, ids, new=26, attention_mask=mask, **drafts(source, build, family))
        assert torch.equal(got, expected)
        assert_close(own, logits, rtol=1e-2, atol=5e-2)


@pytest.mark.parametrize("case", CASES)
def test_one_draft_behind_a_prompt_leaves_no_trace(build, prompt, greedy, case):
    """It is no token that was chosen; here it finishes a block of keys, and pushes a recent token out."""
    model, ids = hf.quantize(build("llama"), **CASES[case]), prompt(1, 31)
    assistant = build("qwen2")  # which is wrong
    assistant.generation_config.num_assistant_tokens = 1
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    expected, logits = greedy(model, ids, new=5, fuse_blocks=False)
    got, own = greedy(model, ids, new=5, assistant_model=assistant)
    assert torch.equal(got, expected)
    assert_close(own, logits, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_a_conversation_goes_on_after_drafts(build, prompt, greedy, case):
    """The next call has none. Drafts over a cache that holds tokens are refused: transformers' own caches hold those twice then."""
    model, own = hf.quantize(build("llama"), **CASES[case]), {"new": 30, "pad_token_id": None}
    caches, turns = [hf.PackedCache(model, 64, **CASES[case]) for _ in range(2)], []
    for cache, options in zip(caches, ({}, {"prompt_lookup_num_tokens": 7}), strict=True):
        first, _ = greedy(model, prompt(1, 20), **own, past_key_values=cache, **options)
        turns.append(greedy(model, torch.cat([first, prompt(1, 20, 1)], 1), **own, past_key_values=cache))
    assert torch.equal(turns[0][0], turns[1][0])
    with pytest.raises(Unsupported, match="holds 99 tokens"):
        greedy(model, turns[0][0], **own, past_key_values=caches[0], prompt_lookup_num_tokens=7)


def state(cache):
    """Tokens, codes and tails as attention can see them."""
    kept = [layer.kv for layer in cache.layers]
    lengths = [kv.lengths.tolist() for kv in kept]
    return lengths, [t for kv in kept for t in kv.dequantized()]


@pytest.mark.parametrize("rejected", [1, 4, 6])
@pytest.mark.parametrize("case", CASES)
def test_rejected_drafts_leave_no_trace(build, prompt, case, rejected):
    """Seven tokens, the last six of them drafts, which finish a block of 32 keys. Two rounds: the second sees the first's tails."""
    model, ids = hf.quantize(build("llama"), **CASES[case]), prompt(1, 48)
    cache, plain = (hf.PackedCache(model, 64, **CASES[case]) for _ in range(2))
    cache.expect_drafts(28)
    with torch.no_grad():
        model(ids[:, :28], past_key_values=cache)
        model(ids[:, :28], past_key_values=plain)
        for _ in range(2):
            held = cache.get_seq_length()
            model(ids[:, held : held + 7], past_key_values=cache)
            cache.crop(-rejected)
            for at in range(held, held + 7 - rejected):
                model(ids[:, at : at + 1], past_key_values=plain)
    lengths, found = state(cache)
    assert lengths == state(plain)[0]
    for got, expected in zip(found, state(plain)[1], strict=True):
        assert_close(got, expected, rtol=0, atol=1e-2 * float(expected.abs().max()))  # 16-bit rounding of 1 and of 7 tokens at once


def test_drafts_that_stop_half_way_must_be_restored(build, prompt):
    model, ids = hf.quantize(build("llama"), **CASES["per-channel"]), prompt(1, 40)
    cache = hf.PackedCache(model, 64, **CASES["per-channel"])
    cache.expect_drafts(30)
    with torch.no_grad():
        model(ids[:, :30], past_key_values=cache)
        broken = copy.deepcopy(model)
        broken.model.layers[1].self_attn.k_proj.weight.fill_(torch.nan)
        with pytest.raises(InvalidArgument, match="NaN"):
            broken(ids[:, 30:35], past_key_values=cache)
        with pytest.raises(InvalidArgument, match="half-way"):
            model(ids[:, 30:35], past_key_values=cache)
        cache.restore()
        assert model(ids[:, 30:35], past_key_values=cache).logits.isfinite().all()
