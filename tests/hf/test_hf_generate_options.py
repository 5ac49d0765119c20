"""Every option of `generate()` over a packed cache: the tokens that transformers makes with a cache rounded in the same way.

It walks what GenerationConfig and `generate()` offer; an option that it does not know, say of a later version, fails a test. `make
hf-suite` runs all families, and transformers' own tests of generation: packed_generation.py.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest
import torch
import transformers as tf
from families import tiny_model
from rounded_cache import rounded_cache
from tiny_models import VOCAB, left_padding

import halfbyte.hf as hf
from halfbyte.errors import Unsupported

ALL = os.environ.get("HALFBYTE_FAMILIES") == "all"
FAMILIES = ["llama", "gpt_oss"] + ALL * [
    *("gemma2", "gpt2", "gpt_neox", "mistral", "mixtral", "olmo2", "opt", "phi3", "qwen2", "qwen3")
]
SAMPLE, BEAMS = {"do_sample": True}, {"num_beams": 3}
#: With many ends of a text, some options have something to prevent.
ENDS = {"eos_token_id": list(range(2, 60))}
STATIC = {"cache_implementation": "static", "max_cache_len": 64}

#: Option -> arguments of a call that uses it.
CASES: dict[str, dict[str, Any]] = {
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(2, 99))},
    "bad_words_ids": {"bad_words_ids": [[i] for i in range(2, 60)]},
    "bos_token_id": {"bos_token_id": 1},
    "cache_implementation": {"cache_implementation": "dynamic"},
    "disable_compile": {"disable_compile": True},
    "do_sample": SAMPLE,
    "early_stopping": {**BEAMS, **ENDS, "early_stopping": True},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 9.0},
    "eos_token_id": ENDS,
    "epsilon_cutoff": {**SAMPLE, "epsilon_cutoff": 0.05},
    "eta_cutoff": {**SAMPLE, "eta_cutoff": 0.05},
    "exponential_decay_length_penalty": {"eos_token_id": 2, "exponential_decay_length_penalty": (2, 3.0)},
    "forced_eos_token_id": {"forced_eos_token_id": 2},
    "guidance_scale": {"guidance_scale": 3.0},
    "length_penalty": {**BEAMS, **ENDS, "length_penalty": -9.0},
    "logits_processor": {"logits_processor": tf.LogitsProcessorList([lambda ids, scores: -scores])},
    "max_cache_len": STATIC,
    "max_length": {"max_length": 25, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 3},
    "max_time": {"max_time": 0.0},
    "min_length": {**ENDS, "min_length": 28},
    "min_new_tokens": {**ENDS, "min_new_tokens": 6},
    "min_p": {**SAMPLE, "min_p": 0.1},
    "negative_prompt_ids": {"guidance_scale": 3.0, "negative_prompt_ids": torch.arange(1, 13).view(2, 6)},
    "negative_prompt_attention_mask": {
        "guidance_scale": 3.0,
        "negative_prompt_ids": torch.arange(1, 13).view(2, 6),
        "negative_prompt_attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]),
    },
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "num_beams": BEAMS,
    "num_return_sequences": {**BEAMS, "num_return_sequences": 2},
    "output_hidden_states": {"output_hidden_states": True},
    "output_logits": {"output_logits": True},
    "output_scores": {"output_scores": True, "temperature": 0.5, **SAMPLE},
    "pad_token_id": {**ENDS, "pad_token_id": 5},
    "prefill_chunk_size": {"prefill_chunk_size": 17},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: [3, 5 + row, 7 + len(ids)]},
    "remove_invalid_values": {
        "logits_processor": tf.LogitsProcessorList([lambda ids, scores: scores.index_fill(1, ids[:, -1], torch.nan)]),
        "remove_invalid_values": True,
    },
    "renormalize_logits": {**BEAMS, "top_k": 2, **SAMPLE, "renormalize_logits": True},
    "repetition_penalty": {"repetition_penalty": 5.0},
    "return_dict_in_generate": {"return_dict_in_generate": True},
    "sequence_bias": {"sequence_bias": [[[7], 50.0]]},
    "stopping_criteria": {"stopping_criteria": tf.StoppingCriteriaList([lambda ids, scores: ids[:, -1] % 2 == 0])},
    "suppress_tokens": {"suppress_tokens": list(range(2, 60))},
    "temperature": {**SAMPLE, "temperature": 5.0},
    "top_h": {**SAMPLE, "top_h": 0.3},
    "top_k": {**SAMPLE, "top_k": 2},
    "top_p": {**SAMPLE, "top_p": 0.3},
    "typical_p": {**SAMPLE, "typical_p": 0.2},
    "use_cache": {"use_cache": False},
    "watermarking_config": {"watermarking_config": tf.WatermarkingConfig(bias=9.0)},
}
#: Options of drafts, which change no token.
DRAFTS: dict[str, dict[str, Any]] = {
    "assistant_model": {},
    "assistant_confidence_threshold": {"assistant_confidence_threshold": 0.9},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "max_matching_ngram_size": {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 1},
    "num_assistant_tokens": {"num_assistant_tokens": 3},
    "num_assistant_tokens_schedule": {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic"},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 4},
}
#: transformers' loop over the layers of these ignores the number of layers that it sets for drafts: IndexError, with any cache.
NO_EARLY_EXIT = {"gpt2", "gpt_neox", "gpt_oss", "opt"}
#: Without a packed cache: the call asks for another one, or for none.
UNPACKED = {"cache_implementation", "max_cache_len", "use_cache"}
#: They change what comes back besides tokens, or nothing that a CPU shows.
SAME_TOKENS = UNPACKED | {
    *("bos_token_id", "disable_compile", "output_hidden_states", "output_logits", "prefill_chunk_size", "return_dict_in_generate"),
    "early_stopping",
}
_HUB = "transformers runs code from the Hub for it"
_TWO = "is about encoder-decoders, which transformers gives their own cache"
LEFT_OUT = {
    **dict.fromkeys(("low_memory", "penalty_alpha", "dola_layers", "diversity_penalty", "num_beam_groups"), _HUB),
    **dict.fromkeys(("constraints", "force_words_ids"), _HUB),
    **dict.fromkeys(("decoder_start_token_id", "encoder_no_repeat_ngram_size", "forced_bos_token_id"), _TWO),
    **dict.fromkeys(("assistant_lookbehind", "target_lookbehind"), "needs models of two vocabularies"),
    **dict.fromkeys(("stop_strings", "token_healing"), "needs a tokenizer: tests/hf/test_hf_silent.py"),
    "assistant_ensemble_weight": "mixes the assistant's logits into the answer, so drafts change tokens",
    "cache_config": "is about other caches",
    "compile_config": "tests/hf/test_hf_compile.py",
    "continuous_batching_config": "is refused: tests/hf/test_hf_refusals.py",
    "custom_generate": "is a loop of somebody else's",
    "is_assistant": "is set by transformers",
    "output_attentions": "is refused: below",
    "streamer": "is for one sequence: tests/hf/test_hf_graph_generate.py",
    "speculation_type": "needs a model with heads for drafts",
    "synced_gpus": "needs several GPUs",
    "transformers_version": "is no option",
    "use_mtp": "needs a model with heads for drafts",
    **dict.fromkeys(("generation_config", "inputs"), "every call has them"),
}


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask) of two prompts of 21 and 18 tokens, padded on the left."""
    ids = torch.randint(1, VOCAB, (2, 21), generator=torch.Generator().manual_seed(0))
    mask = left_padding(ids, 0, 3)
    return ids * mask, mask


def generate(model: Any, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> Any:
    torch.manual_seed(0)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, **options}
    with torch.no_grad():
        return model.generate(ids, attention_mask=mask, **settings)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """(a model of transformers, the same with an INT8 cache)."""
    plain = tiny_model(request.param)
    plain.set_attn_implementation("eager")
    return plain, hf.quantize(tiny_model(request.param), keys="int8", values="int8")


def own_cache(plain: Any, option: str) -> dict[str, Any]:
    return {} if option in UNPACKED else {"past_key_values": rounded_cache(plain, "int8")}


def test_every_option_is_here_or_left_out_for_a_reason() -> None:
    known = {name for name in vars(tf.GenerationConfig()) if not name.startswith("_")}
    known |= {*inspect.signature(tf.GenerationMixin.generate).parameters} - {"self", "kwargs"}
    listed = [*CASES, *DRAFTS, *LEFT_OUT]
    assert len(listed) == len(set(listed))
    assert known == set(listed)


@pytest.mark.slow
@pytest.mark.parametrize("option", CASES)
def test_tokens_of_transformers(pair: tuple[Any, Any], option: str) -> None:
    (plain, packed), inputs = pair, prompts()
    expected = generate(plain, *inputs, **own_cache(plain, option), **CASES[option])
    found = generate(packed, *inputs, **CASES[option])
    assert torch.equal(found.sequences, expected.sequences)
    assert isinstance(found.past_key_values, hf.PackedCache) is (option not in UNPACKED)
    for kind in ("logits", "scores"):
        if (wanted := getattr(expected, kind)) is not None:
            torch.testing.assert_close(getattr(found, kind), wanted, rtol=1e-2, atol=5e-2)
    if option not in SAME_TOKENS and plain.config.model_type == "llama":
        base = generate(
            plain, *inputs, **own_cache(plain, option), do_sample=option != "do_sample" and CASES[option].get("do_sample", False)
        )
        assert not torch.equal(expected.sequences, base.sequences), "the option changes nothing, so the case shows nothing"


@pytest.mark.slow
@pytest.mark.parametrize("option", DRAFTS)
def test_drafts_change_no_token(pair: tuple[Any, Any], option: str) -> None:
    (plain, packed), given = pair, DRAFTS[option]
    if option == "assistant_early_exit" and plain.config.model_type in NO_EARLY_EXIT:
        pytest.skip("transformers raises IndexError for this family with its own caches, too")
    ids, mask = prompts()
    expected = generate(plain, ids[:1], mask[:1], past_key_values=rounded_cache(plain, "int8"), max_new_tokens=20)
    assistant = {} if {"prompt_lookup_num_tokens", "assistant_early_exit"} & given.keys() else {"assistant_model": plain}
    assert torch.equal(generate(packed, ids[:1], mask[:1], max_new_tokens=20, **given, **assistant).sequences, expected.sequences)


def test_embeddings_in_place_of_tokens(pair: tuple[Any, Any]) -> None:
    (plain, packed), (ids, mask) = pair, prompts()
    made = [
        generate(model, None, mask, inputs_embeds=model.get_input_embeddings()(ids), **cache)
        for model, cache in ((plain, own_cache(plain, "")), (packed, {}))
    ]
    assert torch.equal(made[0].sequences, made[1].sequences)


def test_right_padding(pair: tuple[Any, Any]) -> None:
    """Moved to the left, with the tokens of each prompt alone."""
    packed, pads = pair[1], (0, 9, 4)
    ids = torch.randint(1, VOCAB, (3, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row, n in enumerate(pads):
        mask[row, 30 - n :] = 0
    together = generate(packed, ids * mask, mask, output_logits=True)
    for row, n in enumerate(pads):
        alone = generate(packed, ids[row : row + 1, : 30 - n], mask[row : row + 1, : 30 - n], output_logits=True)
        assert torch.equal(together.sequences[row, n:], alone.sequences[0])
        logits = [torch.stack(made.logits, 1) for made in (together, alone)]
        torch.testing.assert_close(logits[0][row], logits[1][0], rtol=1e-2, atol=2e-2)


def test_attention_weights_are_refused(pair: tuple[Any, Any]) -> None:
    with pytest.raises(Unsupported, match="output_attentions"):
        generate(pair[1], *prompts(), output_attentions=True)
