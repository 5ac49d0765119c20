"""What is refused says why, and changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as tf
from mixtures import expand
from tiny_models import LLAMA, SIZES, VOCAB, made

import halfbyte.hf as hf
from halfbyte import errors
from halfbyte.errors import HalfbyteError, InvalidArgument, Unsupported
from halfbyte.hf import attention
from halfbyte.hf.handles import Handle, mask
from halfbyte.nn import QuantLinear


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: tf.BloomConfig(), "does not call the attention functions"),
        (lambda: tf.FalconConfig(), "does not call the attention functions"),
        (lambda: tf.MptConfig(), "does not call the attention functions"),
        (lambda: tf.GPTJConfig(), "does not call the attention functions"),
        (lambda: tf.DeepseekV32Config(), r"an indexer with keys of its own picks the cached latents \(MLA\)"),
        (lambda: tf.AutoConfig.for_model("deepseek_v3", index_topk=8), r"an indexer .* picks the cached latents"),
        (lambda: tf.AutoConfig.for_model("deepseek_v3", sliding_window=8), "sliding window over latents"),
        (lambda: tf.MiniMaxM3VLTextConfig(), "an indexer .* picks the cached tokens"),
        (lambda: tf.Qwen4ExpTextConfig(), "an indexer .* picks the cached tokens"),
        (lambda: tf.DiffLlamaConfig(), "between the cache update and attention"),
        (lambda: tf.MambaConfig(), "recurrent"),
        (lambda: tf.RecurrentGemmaConfig(), "are in the model"),
        (lambda: tf.MiniMaxConfig(), "cache of its own class"),
        (lambda: tf.BambaConfig(), "none of its layers has keys and values"),
        (
            lambda: tf.LlamaConfig(layer_types=["indexed_attention"] * 32),
            "serve full_attention, sliding_attention, chunked_attention",
        ),
        (lambda: tf.T5Config(), "position bias"),
        (lambda: tf.BartConfig(), "encoder-decoder"),
        (lambda: tf.PaliGemmaConfig(), "not causal everywhere"),
    ],
)
def test_families(config, reason):
    with pytest.raises(Unsupported, match=reason):
        hf.PackedCache(config(), 64)


def test_gemma_without_its_images_is_not_refused():
    assert hf.PackedCache(tf.Gemma3TextConfig(), 64).capacity == 64


def test_a_model_that_changes_its_weights_itself_says_which_to_leave():
    """RWKV divides some in place. In 16 bits they are what transformers computes with."""
    plain = tf.AutoModelForCausalLM.from_config(tf.RwkvConfig(vocab_size=50, hidden_size=64, num_hidden_layers=2)).eval()
    ids = torch.ones(1, 5, dtype=torch.long)
    with pytest.raises(Unsupported, match=r"computes with it as a tensor .* \(skip_modules\)"):
        hf.quantize(copy.deepcopy(plain), "int8_col")(ids)
    packed = hf.quantize(copy.deepcopy(plain), "int8_col", skip_modules=("output", "value"))
    assert any(isinstance(m, QuantLinear) for m in packed.modules())
    with torch.no_grad():
        wanted = expand(packed, plain)(ids).logits
        assert (packed(ids).logits - wanted).abs().max() < 1e-4 * wanted.std()


def test_refused_model_is_unchanged():
    model = tf.AutoModelForCausalLM.from_config(tf.BloomConfig(vocab_size=50, hidden_size=64, n_layer=2, n_head=2))
    before = model.config._attn_implementation
    with pytest.raises(Unsupported, match="bloom"):
        hf.quantize(model, "nf4", keys="int8")
    assert model.config._attn_implementation == before
    assert not any(isinstance(m, QuantLinear) for m in model.modules())
    assert hf.quantize(model, "nf4") is model  # its weights alone are welcome
    assert any(isinstance(m, QuantLinear) for m in model.modules())


def test_a_model_whose_attention_cannot_be_set_is_refused(build, monkeypatch):
    """Code of its own, say from the Hub: transformers would only warn, and the cache would stay in 16 bits."""
    model = build("llama")
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda _: False))
    with pytest.raises(Unsupported, match="LlamaForCausalLM computes attention itself"):
        hf.quantize(model, "nf4", keys="int8")
    assert not any(isinstance(m, QuantLinear) for m in model.modules())


def test_shapes_that_do_not_fit_name_the_module():
    model = tf.AutoModelForCausalLM.from_config(tf.LlamaConfig(**{**LLAMA, "intermediate_size": 96}))
    with pytest.raises(
        InvalidArgument, match=r"layers\.0\.mlp\.down_proj\.weight \[64, 96\].*nf4.*int8_col would fit.*skip_modules"
    ):
        hf.quantize(model, "nf4", keys="int8")
    assert not any(isinstance(m, QuantLinear) for m in model.modules())
    assert model.config._attn_implementation != hf.NAME
    hf.quantize(model, "nf4", skip_modules=("lm_head", "down_proj"))
    assert isinstance(model.model.layers[0].mlp.up_proj, QuantLinear)
    assert isinstance(model.model.layers[0].mlp.down_proj, torch.nn.Linear)


def test_head_size_that_does_not_fit():
    config = tf.LlamaConfig(**{**LLAMA, "head_dim": 24})
    with pytest.raises(InvalidArgument, match="int4_g32"):
        hf.PackedCache(config, 64)
    assert hf.PackedCache(config, 64, values="int4").capacity == 64


def test_nan_in_a_weight_changes_nothing(build):
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = torch.nan
    with pytest.raises(InvalidArgument, match=r"layers\.1\.mlp\.up_proj.*NaN"):
        hf.quantize(model, "int4_g32")
    assert not any(isinstance(m, QuantLinear) for m in model.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "nf5"}, "weights='nf5' is not a format"),
        ({"keys": "nf4"}, "keys='nf4' is not a format"),
        ({"values": "int8_channel"}, "for keys only"),
        ({"keys": "int8", "skip_layers": [2]}, "from -2 to 1"),
        ({"keys": "int8", "fuse_qkv": True}, "needs quantized weights"),
        ({"keys": "int8", "fuse_gate_up": True}, "fuse_gate_up=True needs quantized weights"),
        ({"weights": "nf4", "rotate_keys": True}, "about the KV cache"),
        ({"weights": "nf4", "fuse_qkv": "no"}, "fuse_qkv='no'; expected True or False"),
    ],
)
def test_options(build, options, message):
    with pytest.raises(HalfbyteError, match=message):
        hf.quantize(build("llama"), **options)


def test_wrong_things():
    with pytest.raises(InvalidArgument, match="transformers model"):
        hf.quantize(torch.nn.Linear(2, 2), "nf4")
    with pytest.raises(InvalidArgument, match="model_or_config"):
        hf.PackedCache({"hidden_size": 3}, 64)
    for options in ({"skip_layers": 0}, {"rotate_keys": "yes"}):
        with pytest.raises(InvalidArgument, match=next(iter(options))):
            hf.PackedCache(tf.LlamaConfig(**LLAMA), 64, **options)
    for capacity in (0, -1, 2.5):
        with pytest.raises(InvalidArgument, match="capacity"):
            hf.PackedCache(tf.LlamaConfig(**LLAMA), capacity)


def test_twice(build):
    model = build("llama")
    hf.quantize(model, "nf4")
    with pytest.raises(InvalidArgument, match="quantized already"):
        hf.quantize(model, "int4_g32")
    assert hf.quantize(model, keys="int8") is model
    with pytest.raises(Unsupported, match=r"dequantize\(\): .* load the 16-bit model"):
        model.dequantize()


def test_answers_beyond_learned_positions(prompt):
    """The embedding of positions would fail, on a GPU by an assertion that ends the process."""
    config = tf.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=1, n_head=2, n_positions=24)
    model = hf.quantize(made(config), keys="int8", values="int8")
    assert model.generate(prompt(1), max_new_tokens=4).shape == (1, 25)
    with pytest.raises(InvalidArgument, match=r"max_new_tokens: .* 25 positions, and the model has learned 24"):
        model.generate(prompt(1), max_new_tokens=5)
    assert model.generate(prompt(1), max_new_tokens=5, eos_token_id=list(range(VOCAB))).shape == (1, 22)


def test_a_cache_of_other_sequences_is_named(build, prompt):
    model = hf.quantize(build("llama"), keys="int8")
    cache = hf.PackedCache(model, 64, values="int8")
    for _ in range(2):
        model(prompt(2), past_key_values=cache)
        with pytest.raises(InvalidArgument, match="past_key_values holds 2 sequences, and the input 1"):
            model(prompt(1), past_key_values=cache)


def test_cache_without_the_attention(build):
    with pytest.raises(InvalidArgument, match="set_attn_implementation"):
        hf.PackedCache(build("llama"), 64)


def test_handles_refuse():
    handle = Handle(None, torch.zeros(1), "keys")  # type: ignore[arg-type]
    tries = [
        lambda: handle.shape,
        lambda: handle.transpose(1, 2),
        lambda: handle[0],
        lambda: handle * 2,
        lambda: 2 + handle,
        lambda: torch.cat([handle, handle]),
        lambda: torch.matmul(torch.zeros(1), handle),
        lambda: torch.zeros(1) @ handle,
        lambda: len(handle),
        lambda: next(iter(handle)),
    ]
    for use in tries:
        with pytest.raises(Unsupported, match="transformers' own cache"):
            use()


def test_window_that_the_model_keeps_to_itself(monkeypatch):
    """A model that masks a window but does not hand it to attention would silently attend to everything."""
    monkeypatch.setattr(attention, "WINDOW_IN_MASK", frozenset())
    config = tf.PhimoeConfig(**{**SIZES, "num_key_value_heads": 2}, num_hidden_layers=1, intermediate_size=64, num_local_experts=2)
    config.sliding_window, config.pad_token_id = 4, 0
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    hf.quantize(model, keys="int8", values="int8")
    with pytest.raises(Unsupported, match="sliding window of 4"), torch.no_grad():
        model(torch.ones(1, 8, dtype=torch.long), past_key_values=hf.PackedCache(model, 64, values="int8"), use_cache=True)


def test_patterns_over_the_causal_mask():
    with pytest.raises(Unsupported, match="or_mask_function"):
        mask(1, q_length=4, kv_length=64, kv_offset=-1, use_vmap=True)


def test_a_warning_about_experts_comes_once(build, monkeypatch, recwarn):
    monkeypatch.setattr(errors, "_WARNED", set())
    skips = ("lm_head", "experts")
    model = hf.quantize(build("gpt_oss"), "int4_g32", skip_modules=skips)
    hf.quantize(build("gpt_oss"), "int4_g32", skip_modules=skips)
    assert sum("GptOssExperts" in str(w.message) for w in recwarn) == 1
    layer = model.model.layers[0]
    assert isinstance(layer.self_attn.q_proj, QuantLinear)
    assert not any(isinstance(m, QuantLinear) for m in layer.mlp.modules())


def test_continuous_batching_is_refused_and_not_done_in_16_bits(build, prompt):
    model, ids = hf.quantize(build("llama"), keys="int8", values="int8"), prompt().tolist()
    for call in (lambda: model.generate_batch(ids, max_new_tokens=2), lambda: model.init_continuous_batching()):
        with pytest.raises(Unsupported, match="generate_batch, serve"):
            call()
    model.set_attn_implementation("sdpa")
    assert isinstance(model.init_continuous_batching(), tf.ContinuousBatchingManager)
