"""Which linear layers are quantized, in models of several towers and of unusual parts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as tf
from tiny_models import LLAMA, VOCAB
from torch import nn

import halfbyte.hf as hf
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.nn import QuantLinear

TEXT: dict[str, Any] = {k: v for k, v in LLAMA.items() if k != "max_position_embeddings"}
SEQ2SEQ: dict[str, Any] = {"vocab_size": VOCAB, "d_model": 64, "pad_token_id": 0}
HEADS: dict[str, Any] = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}


def llava() -> Any:
    """As many layers in the vision tower, which comes first, as in the language model."""
    vision = tf.CLIPVisionConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=16)
    return tf.LlavaForConditionalGeneration(tf.LlavaConfig(vision_config=vision, text_config=tf.LlamaConfig(**TEXT)))


def quantized(model: nn.Module, below: str) -> int:
    return sum(isinstance(m, QuantLinear) for m in model.get_submodule(below).modules())


def test_the_language_model_is_quantized_and_not_a_vision_tower_of_as_many_layers():
    model = hf.quantize(llava(), weights="int8_col")
    assert quantized(model, "model.language_model") == 14
    assert quantized(model, "model.vision_tower") == quantized(model, "model.multi_modal_projector") == 0


def test_the_key_biases_are_those_of_the_language_model():
    assert hf.key_biases(llava()) == []  # the vision tower has some, Llama none


@pytest.mark.parametrize("encoder_layers", [2, 3])
def test_both_halves_of_an_encoder_decoder_are_quantized(encoder_layers):
    model = tf.BartModel(tf.BartConfig(**SEQ2SEQ, **HEADS, encoder_layers=encoder_layers, decoder_layers=2))
    hf.quantize(model, weights="int8_col")
    assert (quantized(model, "encoder"), quantized(model, "decoder")) == (6 * encoder_layers, 10 * 2)


@pytest.mark.parametrize(
    ("config", "wanted", "stays"),
    [
        (tf.FalconConfig(vocab_size=VOCAB, hidden_size=64, num_attention_heads=4, num_hidden_layers=2), 8, ()),
        (tf.MambaConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2), 6, ("dt_proj",)),
    ],
    ids=["falcon", "mamba"],
)
def test_linear_layers_of_unusual_kinds(config, wanted, stays, prompt):
    """Falcon has a class of its own; Mamba multiplies by the weight of one layer without calling it."""
    config.initializer_range = 0.3
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = prompt()
    with torch.no_grad():
        exact = model(ids).logits
        got = hf.quantize(model, weights="int8_col")(ids).logits
    assert quantized(model, "") == wanted
    assert all(isinstance(m, nn.Linear) for n, m in model.named_modules() if n.endswith(stays or ("lm_head",)))
    assert 1e-4 < (got - exact).norm() / exact.norm() < 0.1


def test_a_model_without_linear_layers_is_refused():
    model = tf.BertModel(tf.BertConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4))
    model.encoder.layer = nn.ModuleList([nn.LayerNorm(4), nn.LayerNorm(4)])
    with pytest.raises(Unsupported, match="no linear layers"):
        hf.quantize(model, weights="int8_col")


class Lora(nn.Module):
    """A layer as PEFT wraps it."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 8, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(8, base_layer.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Wrapper(nn.Module):
    """A model as PEFT wraps it: everything is handed through, `generate` runs inside."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.generate(*args, **kwargs)


def with_adapters(model: Any) -> Any:
    for block in model.model.layers:
        block.self_attn.q_proj = Lora(block.self_attn.q_proj)
    return model


def test_adapters_stay_and_what_they_wrap_is_quantized(build, prompt, tmp_path):
    model = with_adapters(build("llama")).eval()
    with torch.no_grad():
        exact = model(prompt()).logits
        got = hf.quantize(model, weights="int8_col")(prompt()).logits
    assert quantized(model, "") == 14
    assert not any(isinstance(m, QuantLinear) for n, m in model.named_modules() if "lora_" in n)
    assert (got - exact).norm() / exact.norm() < 0.1
    with pytest.raises(InvalidArgument, match="adapters"):
        hf.save(model, tmp_path / "new")


def test_a_wrapped_model_generates_with_a_packed_cache(build, prompt, greedy):
    plain = with_adapters(build("llama"))
    wrapper = hf.quantize(Wrapper(copy.deepcopy(plain)), keys="int8", values="int8")
    assert isinstance(wrapper, Wrapper)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    out = wrapper.generate(prompt(), return_dict_in_generate=True, **options)
    assert isinstance(out.past_key_values, hf.PackedCache)
    assert torch.equal(out.sequences, hf.quantize(plain, keys="int8", values="int8").generate(prompt(), **options))
    assert wrapper.generate(prompt(), use_cache=False, **options).shape == out.sequences.shape


def test_models_that_are_saved_under_other_names_load_again(prompt, tmp_path):
    """transformers saves Llava as language_model.model...., and loads that as model.language_model...."""
    model = hf.quantize(llava().eval(), weights="int8_col")
    with torch.no_grad():
        expected = model(input_ids=prompt()).logits
    hf.save(model, tmp_path / "first")
    again = tf.LlavaForConditionalGeneration.from_pretrained(tmp_path / "first")
    hf.save(again, tmp_path / "second")
    last = tf.LlavaForConditionalGeneration.from_pretrained(tmp_path / "second")
    for loaded in (again, last):
        with torch.no_grad():
            assert torch.equal(loaded(input_ids=prompt()).logits, expected)
