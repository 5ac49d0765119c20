"""Every family generates what transformers' own attention generates, whatever the way of generating."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, left_padding
from torch import nn

import halfbyte.hf as hf
from halfbyte import errors
from halfbyte.errors import CapacityError, HalfbyteError, InvalidArgument, Unsupported
from halfbyte.hf.attention import attention

CLOSE = {"rtol": 2e-4, "atol": 2e-4}
ROUNDED = {"rtol": 1e-2, "atol": 2e-2}  # a last bit of difference can flip a rounding to 16 bits


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_bits_equal_transformers(build, prompt, rounded, greedy, family, kind):
    model, ids = build(family), prompt()
    model.set_attn_implementation("eager")  # the only one of transformers that has softcap and sinks
    expected, logits = greedy(model, ids, past_key_values=rounded(model, kind))
    assert len(set(expected[:, ids.shape[1] :].flatten().tolist())) > 3  # the text is no single token, or the test shows nothing
    hf.quantize(model, keys=kind, values=kind)
    got, own = greedy(model, ids)
    assert torch.equal(got, expected)
    torch.testing.assert_close(own, logits, **ROUNDED)


@pytest.mark.parametrize(("values", "compared"), [("int8", 12), ("int4_g32", 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_equals_single(build, prompt, greedy, family, values, compared):
    """A prompt is one at any length, of one token too: it reads itself in 16 bits, alone as among longer ones.

    Steps read codes. On processors that round products differently some flip: those of 8 bits move logits little, those of 4 bits
    may change the text, so that only what the prompt gives is compared.
    """
    model, ids = hf.quantize(build(family), keys="int8", values=values), prompt(4)
    pads = (0, 4, ids.shape[1] - 7, ids.shape[1] - 1)
    mask = left_padding(ids, *pads)
    together, logits = greedy(model, ids * mask, attention_mask=mask)
    for row, n in enumerate(pads):
        alone, single = greedy(model, ids[row : row + 1, n:])
        torch.testing.assert_close(logits[row, :compared], single[0, :compared], **ROUNDED)
        last = ids.shape[1] + compared
        assert torch.equal(together[row, n:last], alone[0, : last - n])


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_left_padding_and_blocks_of_per_channel_keys(build, prompt, family):
    """Whole blocks of 32 padding tokens change nothing. Other numbers put other tokens into a block: as accurate, not the same."""
    ids = prompt(8, 50)

    def ends(keys: str, pads: int) -> torch.Tensor:
        """Logits of the last four tokens, after a prefill of the others."""
        model = hf.quantize(build(family), keys=keys, values="bf16")
        cache, padded = hf.PackedCache(model, 192, keys=keys, values="bf16"), torch.cat([prompt(8, pads, 1), ids], 1)
        mask = left_padding(padded, *[pads] * 8)
        positions = mask.cumsum(1) - 1
        with torch.no_grad():
            for new in (slice(0, -4), slice(46 + pads, None)):
                options = {"attention_mask": mask[:, : new.stop], "position_ids": positions[:, new], "past_key_values": cache}
                logits = model(padded[:, new], **options).logits
        return logits[:, -4:]

    exact, alone = ends("bf16", 0), ends("int4_channel", 0)
    torch.testing.assert_close(ends("bf16", 5), exact, **ROUNDED)
    for pads in (32, 64):
        torch.testing.assert_close(ends("int4_channel", pads), alone, **ROUNDED)
    for pads in (5, 27):
        error, least = (ends("int4_channel", pads) - exact).norm(), (alone - exact).norm()
        assert 0.1 * least < error < 1.5 * least


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("formats", [("int8", "int4_g32"), ("int4_channel", "int4"), ("fp8", "int8_token")])
def test_low_bits_stay_close(build, prompt, greedy, family, formats):
    model, ids = build(family), prompt()
    keys, values = formats
    exact = hf.quantize(build(family), keys="bf16", values="bf16")
    expected = _logits(exact, ids, hf.PackedCache(exact, 64, keys="bf16", values="bf16"))
    hf.quantize(model, keys=keys, values=values)
    got = _logits(model, ids, hf.PackedCache(model, 64, keys=keys, values=values))
    error = (got - expected).norm() / expected.norm()
    assert 1e-5 < error < 0.7  # not exact: the low-bit cache was really read


def _logits(model, ids, cache, chunk: int = 7) -> torch.Tensor:
    with torch.no_grad():
        parts = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split(chunk, 1)]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_bit_models(build, prompt, greedy, family, dtype):
    """Models computing in 16 bits, with everything switched on."""
    model, ids = build(family).to(dtype), prompt()
    hf.quantize(model, "int4_g32", keys="int8", rotate_keys=True, fuse_qkv=True)
    with torch.no_grad():
        out = model.generate(
            ids, max_new_tokens=3, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True
        )
    assert all(torch.isfinite(x).all() and x.dtype is not torch.float64 for x in out.logits)
    formats = {(x.key_format.name, x.value_format.name) for x in out.past_key_values.layers}
    assert formats == {("int8", "fp16" if dtype is torch.float16 else "bf16")}


def test_rotated_keys_change_nothing_but_rounding(build, prompt):
    model, ids = hf.quantize(build("llama"), keys="int8"), prompt(2, 30)
    runs = [_logits(model, ids, hf.PackedCache(model, 64, keys="int8", values="bf16", rotate_keys=r)) for r in (False, True)]
    assert 1e-6 < (runs[0] - runs[1]).norm() / runs[0].norm() < 0.1


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("window", [(0, 64), (64, 0), (20, 40)])
def test_a_window_that_holds_everything_is_sixteen_bits(build, prompt, family, window):
    """With left padding and beams; and one that does not reads codes."""
    ids = prompt(2, 30)
    mask = left_padding(ids, 0, 7)
    given = {"attention_mask": mask, "max_new_tokens": 6, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    exact = hf.quantize(build(family), keys="bf16", values="bf16")
    model = hf.quantize(build(family), keys="int4", values="int4", sink_tokens=window[0], recent_tokens=window[1])
    with torch.no_grad():
        assert torch.equal(model.generate(ids * mask, **given), exact.generate(ids * mask, **given))
    caches = [hf.PackedCache(model, 64, keys="int4", values="int4", sink_tokens=s, recent_tokens=r) for s, r in (window, (3, 5))]
    logits = [_logits(model, ids, cache) for cache in caches]
    assert not torch.allclose(*logits, atol=1e-3)
    assert caches[0].nbytes > caches[1].nbytes


def test_a_window_in_compiled_layers_and_skipped_ones(build):
    cache = hf.PackedCache(build("llama").config, 64, keys="int8", values="int8", sink_tokens=2, recent_tokens=9, skip_layers=(0,))
    assert [layer.options.window for layer in cache.layers[:2]] == [(0, 0), (2, 9)]
    with pytest.raises(InvalidArgument, match="capacity of 64"):
        hf.PackedCache(build("llama").config, 64, sink_tokens=2, recent_tokens=63)
    for options, message in (
        ({"keys": "int4"}, "values='bf16' is a 16-bit format"),
        ({"weights": "int4_g32"}, "about the KV cache"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            hf.quantize(build("llama"), recent_tokens=4, **options)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("chunk", [5, 16, 18])
def test_chunked_prefill(build, prompt, greedy, family, chunk):
    model, ids = build(family), prompt(2, 40)
    hf.quantize(model, keys="int8", values="int8")
    whole, logits = greedy(model, ids, new=5)
    parts, own = greedy(model, ids, new=5, prefill_chunk_size=chunk)
    assert (own[:, 0] - logits[:, 0]).norm() < 0.1 * logits[:, 0].norm()  # parts of a prompt read those before them packed
    assert whole.shape == parts.shape


def test_chunks_read_the_same_numbers(build, prompt):
    """However the text is cut into steps of at most 16, each query sees the same packed keys; parts of a prompt see themselves."""
    model, ids = build("llama"), prompt(2, 40)
    hf.quantize(model, keys="int8", values="int4_g32")
    outs = []
    for chunk in (1, 5, 16):
        cache = hf.PackedCache(model, 40)
        cache.expect_steps(chunk if chunk > 1 else 16)
        outs.append(_logits(model, ids, cache, chunk))
    prompts = _logits(model, ids, hf.PackedCache(model, 40), 5)
    assert (prompts - outs[0]).norm() > 0.01 * outs[0].norm()
    torch.testing.assert_close(outs[0], outs[1], **CLOSE)
    torch.testing.assert_close(outs[0], outs[2], **CLOSE)


def test_turns_crop_reset_and_reuse(build, prompt, greedy):
    model, ids = build("llama"), prompt(2, 12)
    hf.quantize(model, keys="int8", values="int4_g32")
    cache = hf.PackedCache(model, 100)
    assert cache.get_max_length() == 128
    assert cache.nbytes == 0
    once, _ = greedy(model, ids, new=8, pad_token_id=None, past_key_values=cache)
    held = cache.get_seq_length()
    assert held == once.shape[1] - 1
    assert cache.nbytes == pytest.approx(cache.bytes_per_token * 2 * 128)

    turn = torch.cat([once, prompt(2, 4, 5)], 1)  # the answer, then the next question
    longer, _ = greedy(model, turn, new=8, pad_token_id=None, past_key_values=cache)
    fresh = hf.PackedCache(model, 100)
    _logits(model, turn[:, :held], fresh, 1)
    assert torch.equal(greedy(model, turn, new=8, pad_token_id=None, past_key_values=fresh)[0], longer)

    cache.crop(-(cache.get_seq_length() - 5))
    assert cache.get_seq_length() == 5
    fresh = hf.PackedCache(model, 100)
    _logits(model, ids[:, :5], fresh)
    assert torch.equal(_logits(model, ids[:, 5:], cache), _logits(model, ids[:, 5:], fresh))
    with pytest.raises(InvalidArgument, match="negative"):
        cache.crop(3)

    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(greedy(model, ids, new=8, pad_token_id=None, past_key_values=cache)[0], once)


def test_batch_changes(build, prompt):
    model, ids = build("qwen2"), prompt(2, 10)
    hf.quantize(model, keys="int4_channel", values="int4_g32")
    cache = hf.PackedCache(model, 40, keys="int4_channel", values="int4_g32")
    _logits(model, ids, cache)
    wide = copy.deepcopy(cache)
    wide.batch_repeat_interleave(2)
    more = prompt(4, 3, 9)
    rows = [_logits(model, more[i : i + 1], _only(cache, i // 2)) for i in range(4)]
    torch.testing.assert_close(_logits(model, more, wide), torch.cat(rows), **ROUNDED)
    swapped = copy.deepcopy(cache)
    swapped.reorder_cache(torch.tensor([1, 1]))
    torch.testing.assert_close(_logits(model, more[:1], _only(swapped, 0)), _logits(model, more[:1], _only(cache, 1)), **CLOSE)
    assert {layer.batch_size for layer in cache.layers} == {2}
    assert {layer.batch_size for layer in wide.layers} == {4}


def _only(cache, row: int):
    one = copy.deepcopy(cache)
    one.batch_select_indices(torch.tensor([row]))
    return one


def test_copies_and_files(build, prompt):
    model, ids = build("llama"), prompt(2, 10)
    hf.quantize(model, "nf4", keys="int8", values="int4_g32")
    cache = hf.PackedCache(model, 40)
    _logits(model, ids, cache)
    stream = io.BytesIO()
    torch.save(cache, stream)
    stream.seek(0)
    others = [copy.deepcopy(cache), torch.load(stream, weights_only=False)]
    stream.seek(0)
    with pytest.raises(pickle.UnpicklingError, match=r"halfbyte\.hf\.cache\.PackedCache"):
        torch.load(stream, weights_only=True)
    of_layer = io.BytesIO()
    torch.save(cache.layers[0].kv, of_layer)
    of_layer.seek(0)
    assert torch.equal(torch.load(of_layer, weights_only=True).keys.codes, cache.layers[0].kv.keys.codes)
    expected = _logits(model, ids[:, :3], cache)
    for other in others:
        assert torch.equal(_logits(copy.deepcopy(model), ids[:, :3], other), expected)


def test_copied_model_keeps_its_cache(build, prompt, greedy):
    model, ids = build("llama"), prompt()
    hf.quantize(model, keys="int4", values="int4")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.generate.model is twin
        assert torch.equal(greedy(model, ids)[0], greedy(twin, ids)[0])


@pytest.mark.parametrize("new", [42, 43, 44])  # 21 + 43 tokens are a whole capacity
def test_drafts_beyond_the_longest_answer(build, prompt, greedy, new):
    model, ids = hf.quantize(build("llama"), keys="bf16", values="bf16"), prompt(1)
    expected, _ = greedy(model, ids, new=new)
    assert torch.equal(greedy(model, ids, new=new, prompt_lookup_num_tokens=70)[0], expected)


def test_an_assistant_drafts_more_than_its_first_call_needs(build, prompt, greedy):
    model, ids = hf.quantize(build("llama"), keys="bf16", values="bf16"), prompt(1)
    assistant = hf.quantize(build("llama"), keys="int4", values="int4")
    expected, _ = greedy(model, ids, new=120)
    assert torch.equal(greedy(model, ids, new=120, assistant_model=assistant)[0], expected)


def test_the_models_own_cache_implementation_gives_way(build, prompt, greedy):
    """Gemma 2 folders on the Hub carry cache_implementation="hybrid" in their generation_config."""
    model, ids = build("gemma2"), prompt()
    model.generation_config.cache_implementation = "static"
    hf.quantize(model, keys="int8", values="int8")
    out = model.generate(ids, max_new_tokens=3, return_dict_in_generate=True, pad_token_id=0)
    assert isinstance(out.past_key_values, hf.PackedCache)


def test_default_cache_is_packed_and_can_be_refused(build, prompt):
    model, ids = build("llama"), prompt()
    plain = build("llama").generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    hf.quantize(model, keys="int8", values="int4_g32", skip_layers=[-1], rotate_keys=True)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    cache = model.generate(ids, **options).past_key_values
    assert isinstance(cache, hf.PackedCache)
    assert [layer.key_format.name for layer in cache.layers] == ["int8", "bf16"]
    assert all(layer.kv.rotate_keys for layer in cache.layers)
    assert cache.capacity == 64
    for own in ({"use_cache": False}, {"cache_implementation": "dynamic"}, {"cache_implementation": "static"}):
        assert torch.equal(model.generate(ids, **options, **own).sequences, plain), own


def test_plain_forward_is_transformers_own(build, prompt):
    """No cache: training, evaluation of a whole text, right padding. Softcap and sinks included."""
    for family in FAMILIES:
        model, ids = build(family), prompt(3, 20)
        mask = left_padding(ids, 0, 0, 3)
        mask[1, 15:] = 0
        model.set_attn_implementation("eager")
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        model.set_attn_implementation(hf.NAME)
        got = model(ids, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], **CLOSE)


def test_attention_that_is_not_causal_stays_so():
    """An encoder with softcap, whose tokens see each other: its mask is none where nothing is padded."""
    module, (q, k, v) = nn.Module(), torch.randn(3, 1, 2, 5, 32)
    for causal in (True, False):
        module.is_causal = causal
        seen = torch.ones(5, 5, dtype=torch.bool).tril(0 if causal else 5)
        scores = (50 * torch.tanh(q @ k.mT * 32**-0.5 / 50)).masked_fill(~seen, -torch.inf)
        expected = (scores.softmax(-1) @ v).transpose(1, 2)
        torch.testing.assert_close(attention(module, q, k, v, None, softcap=50.0)[0], expected)
        module.is_causal = True
        torch.testing.assert_close(attention(module, q, k, v, None, softcap=50.0, is_causal=causal)[0], expected)


def test_full_cache_says_so(build, prompt):
    model, ids = build("llama"), prompt(1, 60)
    hf.quantize(model, keys="int8", values="int8")
    cache = hf.PackedCache(model, 64)
    _logits(model, ids, cache)
    with pytest.raises(CapacityError, match=r"PackedCache\.grow\(n\)"):
        _logits(model, ids, cache, 60)
    assert cache.get_seq_length() == 60
    cache.grow(60)
    assert cache.capacity == 64
    with pytest.raises(InvalidArgument, match="capacity="):
        cache.grow(0)


@pytest.mark.parametrize("recorded", [True, False])
def test_per_tensor_caches_tell_that_they_saturate(build, prompt, recorded, monkeypatch):
    """The first token is tiny, and with it the scale; not told of a prompt whose numbers are like those that follow."""
    monkeypatch.setattr(errors, "_WARNED", set())
    model = hf.quantize(build("llama"), keys="int8_tensor", values="int8_tensor")
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [0], "recorded": recorded}
    with warnings.catch_warnings(record=True) as quiet:
        warnings.simplefilter("always")
        model.generate(prompt(1, 40), **options)
    assert not [w for w in quiet if "saturated" in str(w.message)]
    with torch.no_grad():
        model.model.embed_tokens.weight[0] *= 1e-6
    with pytest.warns(UserWarning, match=r"0\.\d+ of the numbers that a layer's cache holds saturated"):
        model.generate(torch.zeros(1, 1, dtype=torch.long), attention_mask=torch.ones(1, 1, dtype=torch.long), **options)


def test_two_calls_over_one_cache(build, prompt):
    """The second is refused, and the first goes on."""
    model = hf.quantize(build("llama"), keys="int8", values="int8")
    cache, options = hf.PackedCache(model, 64), {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 4}
    expected = model.generate(prompt(1), **options)
    refusals: list[str] = []

    def meanwhile(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with pytest.raises(InvalidArgument, match="in use by another call") as error:
            model.generate(prompt(1), past_key_values=cache, **options)
        refusals.append(str(error.value))
        return scores

    made = model.generate(prompt(1), past_key_values=cache, logits_processor=[meanwhile], **options)
    assert torch.equal(made, expected)
    assert len(refusals) == 4
    cache.reset()
    assert torch.equal(model.generate(prompt(1), past_key_values=cache, **options), expected)


def test_calls_that_cannot_be(build, prompt):
    model = hf.quantize(build("llama"), keys="int8", values="int8")
    with pytest.raises(Unsupported, match='cache_implementation="quantized" is a cache of transformers'):
        model.generate(prompt(1), max_new_tokens=2, cache_implementation="quantized")
    with pytest.raises(InvalidArgument, match=r"capacity=2147483647; expected the number of tokens to hold, 1 to 2\^31 - 64"):
        hf.PackedCache(model, 2**31 - 1)
    with pytest.raises(InvalidArgument, match="meta device"):
        model.to("meta").generate(prompt(1), max_new_tokens=2)


def test_bad_masks(build, prompt):
    model, ids = build("llama"), prompt(2, 20)
    hf.quantize(model, keys="int8", values="int8")

    def run(mask):
        with torch.no_grad():
            return model(ids, attention_mask=mask, past_key_values=hf.PackedCache(model, 64), use_cache=True)

    right, hole = torch.ones_like(ids), torch.ones_like(ids)
    right[0, -2:], hole[1, 4] = 0, 0
    for mask in (right, hole):
        with pytest.raises(HalfbyteError, match="left padding"):
            run(mask)
    with pytest.raises(InvalidArgument, match="columns"):
        run(torch.ones(2, 7, dtype=torch.long))
    with pytest.raises(HalfbyteError, match="2-D mask"):
        run(torch.zeros(2, 1, 20, 20))
    assert run(torch.ones_like(ids)).logits.shape == (2, 20, VOCAB)


def test_what_attention_does_not_do(build):
    model = hf.quantize(build("llama"), keys="int8", values="int8")
    module, q = model.model.layers[0].self_attn, torch.zeros(1, 4, 1, 32)
    options = {"output_attentions": True, "position_bias": torch.zeros(1), "is_causal": False, "new_option": 1}
    for name, value in options.items():
        with pytest.raises(HalfbyteError, match=name):
            attention(module, q, *_handles(model), None, **{name: value})
    with pytest.raises(HalfbyteError, match="dropout"):
        attention(module.train(), q, *_handles(model), None, dropout=0.1)


def _handles(model):
    cache = hf.PackedCache(model, 64)
    return cache.update(torch.zeros(1, 2, 1, 32), torch.zeros(1, 2, 1, 32), 0)
