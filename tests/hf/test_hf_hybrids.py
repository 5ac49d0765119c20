"""Hybrids: packed keys and values where a layer has attention, and transformers' own states (recurrent, convolutional)."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from families import OWN, _model, tiny_model
from rich.console import Console
from rounded_cache import rounded_cache
from test_hf_families import CLOSE, greedy
from tiny_models import VOCAB, left_padding
from torch._dynamo.testing import CompileCounter

import halfbyte.hf as hf
from halfbyte import errors, memory
from halfbyte.errors import CapacityError, InvalidArgument, Unsupported
from halfbyte.hf.cache_layers import EmptyLayer, HybridLayer, PackedLayer
from halfbyte.hf.fused_blocks import fused_view, why_not_fused
from halfbyte.hf.model_support import blocks
from halfbyte.text import ByteTokenizer
from halfbyte_lab.evals.advice import advise
from halfbyte_lab.evals.own_attention import agreement
from halfbyte_lab.evals.suite import Suite, measure

#: A recurrence, a convolution, layers without any cache, and a state next to the keys and values of the same layer.
KINDS = ("qwen3_next", "lfm2", "nemotron_h", "zaya")
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def prompts(rows: int = 2, tokens: int = 21) -> torch.Tensor:
    return torch.randint(1, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(2))


def packed(family: str, **formats: Any) -> Any:
    return hf.quantize(tiny_model(family), **(formats or {"keys": "int8", "values": "int8"}))


@pytest.mark.parametrize("family", KINDS)
def test_layers_hold_what_they_need(family):
    cache = hf.PackedCache(packed(family), 64)
    kinds = cache.layers and [type(layer).__name__ for layer in cache.layers]
    assert (
        kinds
        == {
            "qwen3_next": ["LinearAttentionLayer", "PackedLayer"],
            "lfm2": ["LinearAttentionLayer", "PackedLayer"],
            "nemotron_h": ["LinearAttentionLayer", EmptyLayer.__name__, "PackedLayer", EmptyLayer.__name__],
            "zaya": ["HybridLayer", "HybridLayer"],
        }[family]
    )
    assert cache.has_states
    assert len(cache.packed) == sum(isinstance(layer, PackedLayer) for layer in cache.layers)


@pytest.mark.parametrize("family", KINDS)
def test_a_text_in_chunks(family):
    """States go on from chunk to chunk, as with a cache that is rounded in the same way."""
    model, plain = packed(family), tiny_model(family)
    plain.set_attn_implementation("eager")
    ids, cache = prompts(tokens=40), rounded_cache(plain, "int8")
    with torch.no_grad():
        wanted = torch.cat([plain(part, past_key_values=cache).logits for part in ids.split(17, 1)], 1)
        with hf.packed_forwards(model, 17):
            logits = model(ids).logits
    assert (logits - wanted).abs().max() < CLOSE["int8"] * wanted.std()


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_calls_and_their_options(family):
    """The loop of recorded steps, twice, because it keeps its cache; a continued conversation; beams."""
    model, ids = packed(family), prompts()
    expected, _ = greedy(model, recorded=False)
    for _ in range(2):
        tokens, _ = greedy(model)
        assert torch.equal(tokens, expected)
        plain = model.generate(ids, attention_mask=torch.ones_like(ids), recorded=False, **OPTIONS)
        kept = model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS)
        assert torch.equal(kept, plain)
    mask, cache = torch.ones(1, 34, dtype=torch.long), hf.PackedCache(model, 64, keys="bf16", values="bf16")
    first = model.generate(ids[:1], attention_mask=mask[:, :21], past_key_values=cache, **OPTIONS)
    more = torch.cat([first, ids[1:, :7]], 1)
    again = model.generate(more, attention_mask=mask, past_key_values=cache, **OPTIONS)
    fresh = hf.PackedCache(model, 64, keys="bf16", values="bf16")
    assert torch.equal(again, model.generate(more, attention_mask=mask, past_key_values=fresh, **OPTIONS))
    plain_model = tiny_model(family)
    plain_model.set_attn_implementation("eager")
    beams = {"attention_mask": torch.ones_like(ids), "num_beams": 3, **OPTIONS}
    wanted = plain_model.generate(ids, past_key_values=rounded_cache(plain_model, "int8"), **beams)
    assert torch.equal(model.generate(ids, **beams), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
@torch.no_grad()
def test_a_step_is_one_graph(family):
    model, ids = packed(family, weights="int8_col", keys="int8", values="int4_g32"), prompts()
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    cache, other = (hf.PackedCache(model, 64, keys="int8") for _ in range(2))
    for i in range(4):
        part = ids if i == 0 else ids[:, i : i + 1]
        expected = model(part, past_key_values=cache).logits
        assert torch.equal((model if i == 0 else compiled)(part, past_key_values=other).logits, expected)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_drafts_over_convolutions_are_taken_back():
    model, ids = packed("lfm2", keys="int4_channel", values="int8"), prompts(1).repeat(1, 2)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS)
    options = {**OPTIONS, "prompt_lookup_num_tokens": 3, "return_dict_in_generate": True}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(out.sequences, expected)
    cache, one = out.past_key_values, expected[:, -1:]
    with torch.no_grad():
        model(one, past_key_values=cache)  # its drafts are over


def test_recorded_steps_take_no_drafts(monkeypatch):
    """transformers' own loop can take them back from a convolution, and refuses them for a recurrence."""
    ids, options = prompts(1).repeat(1, 2), {**OPTIONS, "prompt_lookup_num_tokens": 3}
    options["attention_mask"] = torch.ones_like(ids)
    model = packed("lfm2")
    monkeypatch.setattr(errors, "_WARNED", set())
    with pytest.warns(UserWarning, match="cannot take drafts back"):
        tokens = model.generate(ids, **options)
    assert torch.equal(tokens, model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS))
    with pytest.raises(ValueError, match="stateful"):
        packed("qwen3_next").generate(ids, **options)


@pytest.mark.parametrize("family", ["qwen3_next", "zaya"])
def test_a_forward_that_failed_is_not_continued(family):
    """A state has moved on, and cannot go back."""
    model, ids = packed(family), prompts(1, 60)
    cache = hf.PackedCache(model, 64)
    with torch.no_grad():
        expected = model(ids, past_key_values=cache).logits
        with pytest.raises(CapacityError):
            model(ids[:, :9], past_key_values=cache)
        with pytest.raises(InvalidArgument, match=r"half-way.*call reset\(\)"):
            model(ids[:, :2], past_key_values=cache)
        with pytest.raises(Unsupported, match="cannot go back"):
            cache.restore()
        cache.reset()
        assert torch.equal(model(ids, past_key_values=cache).logits, expected)


#: Layers of states before, between and behind those with keys and values; a state and keys in one layer; a fused recurrence.
ORDERS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 3},
    "zamba2": {**OWN["zamba2"], "layers_block_type": ["linear_attention", "hybrid", "linear_attention"], "num_hidden_layers": 3},
    "qwen3_5_text": {"layer_types": ["linear_attention"] * 2 + ["full_attention"], "num_hidden_layers": 3},
    "zaya": {**OWN["zaya"], "num_hidden_layers": 3},
}


def interrupted(model: Any, number: int, call: Any) -> None:
    """A call that ends before block `number`."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = blocks(model)[number].register_forward_pre_hook(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        hook.remove()


@pytest.mark.parametrize("family", ORDERS)
@torch.no_grad()
def test_a_forward_that_was_interrupted_is_not_continued(family, monkeypatch):
    """Before any layer, in a prompt, a step and a later turn: the states of those before it have moved on."""
    monkeypatch.setitem(OWN, family, ORDERS[family])
    _model.cache_clear()
    model, ids, cache = packed(family), prompts(1, 30), hf.PackedCache(packed(family), 64)
    _model.cache_clear()
    parts = [ids[:, :20], ids[:, 20:21], ids[:, 21:]]
    expected = [model(part, past_key_values=cache).logits for part in parts]
    for stopped in range(3):
        for number in range(3):
            cache.reset()
            for part, wanted in zip(parts[:stopped], expected, strict=False):
                assert torch.equal(model(part, past_key_values=cache).logits, wanted)
            interrupted(model, number, lambda at=stopped: model(parts[at], past_key_values=cache))
            if number:  # else nothing has moved
                with pytest.raises(InvalidArgument, match=r"half-way.*call reset\(\)"):
                    model(parts[stopped], past_key_values=cache)
                continue
            for part, wanted in list(zip(parts, expected, strict=True))[stopped:]:
                assert torch.equal(model(part, past_key_values=cache).logits, wanted)


def test_a_fused_step_that_was_interrupted_is_not_continued(monkeypatch):
    """A fused recurrence moves its states on without a call of the cache's methods."""
    monkeypatch.setitem(OWN, "qwen3_5_text", ORDERS["qwen3_5_text"])
    _model.cache_clear()
    model, ids = packed("qwen3_5_text"), prompts(1, 9)
    _model.cache_clear()
    assert why_not_fused(model) == [""] * 3
    view, cache = fused_view(model), hf.PackedCache(model, 64)
    with torch.no_grad():
        view(ids, past_key_values=cache)
        view(ids[:, :1], past_key_values=cache)
        interrupted(view, 1, lambda: view(ids[:, :1], past_key_values=cache))
        with pytest.raises(InvalidArgument, match=r"half-way.*call reset\(\)"):
            view(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("family", KINDS)
def test_sequences_are_chosen_with_their_states(family):
    """In another order, some of them twice, as each goes on alone."""
    model, ids, cache = packed(family), prompts(3, 9), hf.PackedCache(packed(family), 64)
    cache.batch_repeat_interleave(2)  # nothing is held yet
    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.batch_select_indices(torch.tensor([2, 1, 0]))
        turned = model(ids.flip(0)[:, :2], past_key_values=cache).logits
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 3, 5, 4]))
        more = model(ids[[2, 1, 0, 0], :1], past_key_values=cache).logits
        for row in range(3):
            alone, own = hf.PackedCache(model, 64), ids[row : row + 1]
            model(own, past_key_values=alone)
            assert (model(own[:, :2], past_key_values=alone).logits - turned[2 - row]).abs().max() < 1e-3
            expected = model(own[:, :1], past_key_values=alone).logits
            assert (expected - more[[2, 1, 0].index(row)]).abs().max() < 1e-3
    assert torch.allclose(more[2], more[3], atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "nemotron_h"])
def test_a_cache_of_other_sequences_is_named(family):
    """Though the first layer has a state; and the states stay as they are. Zaya joins its own before it asks the cache."""
    model, ids, cache = packed(family), prompts(3, 9), hf.PackedCache(packed(family), 64)
    with torch.no_grad():
        expected = model(ids, past_key_values=hf.PackedCache(model, 64)).logits
        for _ in range(2):
            model(ids, past_key_values=cache)
            for rows in (1, 2):
                with pytest.raises(InvalidArgument, match=f"past_key_values holds 3 sequences, and the input {rows}"):
                    model(ids[:rows], past_key_values=cache)
            cache.reset()
        with pytest.raises(InvalidArgument, match="holds 3 sequences, and the input 6"):
            model.generate(ids, past_key_values=cache, num_beams=2, **OPTIONS)
        assert torch.equal(model(ids, past_key_values=cache).logits, expected)


@pytest.mark.parametrize("kinds", [("full_attention", "linear_attention"), ("linear_attention", "full_attention")])
def test_a_crop_that_cannot_be_changes_nothing(kinds, monkeypatch):
    """Whichever layer is the first; and where states are recorded, of which those of recurrences are not."""
    monkeypatch.setitem(OWN, "qwen3_5_text", {"layer_types": list(kinds)})
    _model.cache_clear()
    model, ids, cache = packed("qwen3_5_text"), prompts(2, 9), hf.PackedCache(packed("qwen3_5_text"), 64)
    _model.cache_clear()
    with torch.no_grad():
        model(ids, past_key_values=cache)
        for record in (False, True):
            if record:
                cache.activate_past_recording()
            with pytest.raises(Unsupported, match=r"crop\(-2\): recurrent and convolutional states cannot go back"):
                cache.crop(-2)
        assert cache.packed[0].kv.lengths.tolist() == [9, 9]


def test_capacity_grows_and_bytes_are_counted():
    model, ids = packed("zaya"), prompts()
    cache = hf.PackedCache(model, 64)
    assert cache.nbytes == 0
    with torch.no_grad():
        expected = model(torch.cat([ids, ids], 1), past_key_values=hf.PackedCache(model, 128)).logits[:, 21:]
        model(ids, past_key_values=cache)
        states = [t for layer in cache.layers for t in (*layer.conv_states.values(), *layer.recurrent_states.values())]
        assert all(isinstance(layer, HybridLayer) for layer in cache.layers)
        assert cache.nbytes == sum(layer.kv.nbytes for layer in cache.layers) + sum(t.nbytes for t in states)
        cache.grow(100)
        assert cache.capacity == 128
        assert model(ids, past_key_values=cache).logits.shape == expected.shape


def test_formats_by_layer_and_a_saved_folder(tmp_path):
    model = packed("qwen3_next", weights="int8_col", keys=["bf16", "int4_g32"], values="int8", skip_layers=(0,))
    expected, _ = greedy(model)
    again = hf.load(hf.save(model, tmp_path / "model"))
    again.generation_config.eos_token_id = None
    tokens, _ = greedy(again)
    assert torch.equal(tokens, expected)


def test_estimates_count_layers_with_keys_and_values(tmp_path):
    model = tiny_model("qwen3_next")
    model.config.save_pretrained(tmp_path)
    found = memory.estimate(str(tmp_path), keys="int8", values="int8", context=64)
    assert found.kv_layers == 1
    assert found.kv_bytes_per_token == hf.PackedCache(packed("qwen3_next"), 64, values="int8").bytes_per_token
    assert any("states of 1 recurrent" in note for note in found.notes)


@pytest.mark.parametrize("family", KINDS)
def test_an_evaluation_is_checked_against_transformers(family):
    """Only keys and values are rounded, in layers that have some."""
    assert agreement(packed(family, keys="bf16", values="bf16"), prompts(), 6) == (12, 12)


def test_a_card_and_advice(tmp_path):
    """Sizes of a card are those of any model; only a plan has formats for every layer."""
    model = packed("qwen3_next", keys="bf16", values="bf16")
    model.config.save_pretrained(tmp_path)
    made = measure(model, ByteTokenizer(), Suite("a", "text", [], prompts(), 16, 0), Console(file=io.StringIO()))
    found = advise(str(tmp_path), gpu="24GB", card=made)
    assert found.card == "a"
    assert all(c.evidence is not None for c in found.choices if c.weights == "bf16")


@pytest.mark.parametrize("family", ["bamba", "jamba", "zamba"])
def test_a_family_that_forgets_its_chunks_is_refused(family):
    """The premise: of a text in two parts, the second is computed as if there was no first."""
    plain, ids = tiny_model(family), prompts(1)
    with torch.no_grad():
        whole = plain(ids).logits
        first = plain(ids[:, :11], use_cache=True)
        parts = plain(ids[:, 11:], past_key_values=first.past_key_values).logits
    assert (parts - whole[:, 11:]).abs().max() > 0.1 * whole.std(), "it continues now; take it from WHOLE_PROMPTS"
    with pytest.raises(Unsupported, match="as if nothing came before"), hf.packed_forwards(packed(family)):
        pass


def test_padding_is_not_fed_to_a_state_alone():
    model, ids = packed("qwen3_next"), prompts()
    with hf.packed_forwards(model, 1), pytest.raises(Unsupported, match="chunk=1"):
        model(ids, attention_mask=left_padding(ids, 3))


def test_plans_are_for_models_with_keys_and_values_in_every_layer():
    from halfbyte_lab.evals.calibrate import sizes_of

    with pytest.raises(Unsupported, match="some of qwen3_next have no keys and values"):
        sizes_of(tiny_model("qwen3_next"))
    assert sizes_of(tiny_model("zaya")).layers == 2
