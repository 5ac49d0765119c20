"""Layers with a sliding window keep the window: the tokens of transformers, far beyond it, and the memory of a window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from families import tiny_config, tiny_model
from rounded_cache import check_generation, packed_and_plain, rounded_cache, turns, two_texts
from test_hf_gemma import TEXTS, model_of
from tiny_models import VOCAB

import halfbyte.hf as hf
from halfbyte import errors
from halfbyte.errors import Unsupported
from halfbyte.hf.fused_blocks import fused_view
from halfbyte.memory import packed_layers
from halfbyte.paging import WindowKVCache

#: All have a window of 7 tokens, so that rings hold 128.
FAMILIES = ("cohere2", "gemma2", "gemma3_text", "gpt_oss", "llama4_text", "mimo_v2_flash", "mistral", "olmo3", "phimoe")
MODELS: dict[str, Any] = {
    **{family: lambda family=family: tiny_model(family) for family in FAMILIES},
    **{family: lambda family=family: model_of(TEXTS[family]) for family in ("gemma4-31b", "gemma4-e2b")},
}
LONG = 300


def models(family: str, fmt: str) -> tuple[Any, Any]:
    plain = MODELS[family]()
    plain.generation_config.eos_token_id = None
    return packed_and_plain(plain, keys=fmt, values=fmt)


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("family", MODELS)
def test_far_beyond_the_window(family: str, fmt: str) -> None:
    packed, plain = models(family, fmt)
    cache = hf.PackedCache(packed, 512, keys=fmt, values=fmt)
    sides = (packed, cache), (plain, rounded_cache(plain, fmt))
    for result, expected in zip(*(turns(*side, (LONG, 1, 1, 150, 1, 16, 1), (1,)) for side in sides), strict=True):
        assert (result - expected).abs().max() < {"int8": 2e-2, "int4": 1e-1}[fmt] * expected.std()
    rings = [layer.kv for layer in cache.packed if isinstance(layer.kv, WindowKVCache)]
    assert {kv.ring for kv in rings} == {2}
    assert packed_layers(packed.config, fmt, fmt, ()).nbytes(2, 512) == cache.nbytes
    with pytest.raises(Unsupported, match="needs others"):
        cache.crop(-200)


@pytest.mark.parametrize("family", ["mistral", "gemma4-e2b", "llama4_text"])
def test_generate_with_beams_sampling_lookup_and_recorded_steps(family: str) -> None:
    packed, plain = models(family, "int8")
    lookup = {"prompt_lookup_num_tokens": 5}
    if family == "llama4_text":  # whose queries are scaled by the length of one sequence
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        alone = two_texts(200)[:1]
        assert torch.equal(packed.generate(alone, **options, **lookup), packed.generate(alone, **options))
        with pytest.raises(Unsupported, match="queries are scaled by the length of the first sequence"):
            packed.generate(two_texts(200), **options, **lookup)
        lookup = {}
    check_generation(packed, plain, 200, 0, {"recorded": False}, lookup)


@pytest.mark.parametrize(
    "own", [{"keys": "int8_channel"}, {"keys": "int8", "sink_tokens": 4, "recent_tokens": 16}], ids=["blocks", "recent"]
)
@pytest.mark.parametrize("size", [7, 64])
def test_later_turns_over_chunks_whose_tokens_are_in_16_bits(size: int, own: dict[str, Any]) -> None:
    """A turn moves the tail on: what was in it before the turn is in the codes by then."""
    config = tiny_config("llama4_text")
    config.update({"moe_layers": [], "attention_chunk_size": size})
    torch.manual_seed(0)
    plain = tf.Llama4ForCausalLM(config).eval()
    packed, _ = packed_and_plain(plain, values="int8", **own)
    ids = two_texts(200)
    with torch.no_grad():
        expected = plain(ids).logits
        for past in (20, 30, 90):
            for new in (5, 30, 100):
                cache = hf.PackedCache(packed, 256, values="int8", **own)
                packed(ids[:, :past], past_key_values=cache)
                later = slice(past, past + new)
                logits = packed(ids[:, later], past_key_values=cache).logits
                assert (logits - expected[:, later]).abs().max() < 0.15 * expected.std(), (past, new)


@pytest.mark.parametrize("family", ["mistral", "llama4_text"])
def test_assisted_decoding_takes_drafts_back_within_the_ring(family: str) -> None:
    packed, plain = models(family, "int8")
    assistant = tiny_model("mistral")
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    ids = two_texts(200)[:1]
    expected = plain.generate(ids, **options, past_key_values=rounded_cache(plain, "int8"))
    assert torch.equal(packed.generate(ids, **options, assistant_model=assistant), expected)


def test_memory_at_sixteen_times_the_window() -> None:
    """What transformers' own 16-bit cache takes beside it: a window in each layer."""
    config = tf.MistralConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    )
    config.sliding_window = 256
    torch.manual_seed(0)
    model = hf.quantize(tf.MistralForCausalLM(config).eval(), keys="int8", values="int4_g32")
    cache = hf.PackedCache(model, 16 * 256, keys="int8", values="int4_g32")
    with torch.no_grad():
        model(two_texts(16 * 256)[:1], past_key_values=cache, logits_to_keep=1)
    assert cache.nbytes == sum(layer.kv.bytes_per_token for layer in cache.packed if layer.kv is not None) * (256 + 64)
    assert cache.nbytes * 12 < cache.bytes_per_token * 16 * 256


def test_images_of_llama_4(recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are tokens like others; their encoder has no cache, and nobody is warned of that."""
    monkeypatch.setattr(errors, "_WARNED", set())
    config = tiny_config("llama4")
    config.image_token_index, sizes = 5, dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 64)
    config.vision_config.update({**sizes, "image_size": 32, "patch_size": 8, "intermediate_size": 256})
    torch.manual_seed(0)
    plain = tf.Llama4ForConditionalGeneration(config).eval()
    plain.generation_config.eos_token_id = None
    packed, _ = packed_and_plain(plain, keys="int8", values="int8")
    ids = two_texts(30).masked_fill(two_texts(30) == 5, 6)
    ids[:, [3, 4, 5, 6, 14, 15, 16, 17]] = 5
    options = {"pixel_values": torch.randn(4, 3, 32, 32), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = plain.generate(ids, **options, past_key_values=rounded_cache(plain, "int8"))
    assert torch.equal(packed.generate(ids, **options), expected)
    assert not any("no packed KV cache" in str(w.message) for w in recwarn)


def test_queries_that_grow_with_the_text_are_not_fused() -> None:
    """Two steps near the start of a text, by which blocks are read, do not show it."""
    config = tiny_config("llama4_text")
    config.update({"moe_layers": [], "attn_scale": 4.0})
    torch.manual_seed(0)
    plain = tf.Llama4ForCausalLM(config).eval()
    plain.generation_config.eos_token_id = None
    packed, _ = packed_and_plain(plain, keys="int8", values="int8")
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = plain.generate(two_texts(20), **options, past_key_values=rounded_cache(plain, "int8"))
    assert torch.equal(packed.generate(two_texts(20), **options), expected)
    assert fused_view(packed) is not None


def test_a_model_that_attends_beyond_its_configuration_is_refused() -> None:
    packed, _ = models("mistral", "int8")
    cache = hf.PackedCache(packed, 512, keys="int8", values="int8")
    packed.config.sliding_window = 9
    with torch.no_grad(), pytest.raises(Unsupported, match="attends to 9 tokens, and the cache keeps the last 7"):
        packed(two_texts(5), past_key_values=cache)
