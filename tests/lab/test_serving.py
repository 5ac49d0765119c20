"""Modes of `halfbyte_lab.serving`, and the folders that engines load for them."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers as tf

import halfbyte.hf
from halfbyte.errors import HalfbyteError
from halfbyte_lab.serving import folders
from halfbyte_lab.serving.modes import Mode

WORDS = ("bf16", "bf16/fp8", "bf16/int8+int4_g32", "gptq/int4+int4", "int4_g128+int8_col/int8+int4_g32")


@pytest.mark.parametrize("word", WORDS)
def test_a_mode_is_its_word(word):
    assert str(Mode.parse(word)) == word


def test_a_mode_says_what_the_engine_gets():
    assert Mode.parse("bf16").options == {}
    assert Mode.parse("awq/fp8").options == {"kv_cache_dtype": "fp8"}
    options = Mode.parse("nvfp4/int8+int4_g32").options
    assert options == {"quantization": "halfbyte", "attention_backend": "HALFBYTE_INT8__INT4_G32"}


@pytest.mark.parametrize("word", ["int5", "bf16+int8_col", "bf16/int8+int3", "int4_g128+int9"])
def test_a_part_that_names_nothing_is_refused(word):
    with pytest.raises(HalfbyteError, match=r"int5|bf16\+int8_col|int3|int9"):
        Mode.parse(word)


@pytest.mark.parametrize("word", ["int4_g128+int8_col", "gptq", "awq"])
def test_packed_folders_load_and_speak(word, tmp_path):
    sizes = tf.LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, vocab_size=96)
    folder = folders.write(sizes, Mode.parse(word), tmp_path, 2)
    assert folders.write(sizes, Mode.parse(word), tmp_path, 2) == folder
    model = halfbyte.hf.load(folder)
    assert len(model.model.layers) == 2
    first, second = (layer.self_attn.q_proj.weight.dequantize() for layer in model.model.layers)
    assert not torch.equal(first, second)
    assert 0.01 < first.float().std() < 0.04
    assert model(torch.arange(9)[None]).logits.isfinite().all()


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}


@pytest.mark.parametrize("word", ["int4_g64", "gptq"])
def test_packed_folders_of_mixtures_load_and_speak(word, tmp_path):
    experts = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
    sizes = tf.Qwen3MoeConfig(**SIZES, hidden_size=256, num_key_value_heads=2, head_dim=64, **experts)
    model = halfbyte.hf.load(folders.write(sizes, Mode.parse(word), tmp_path, 2))
    stacks = [layer.mlp.experts.gate_up_proj.weight.dequantize() for layer in model.model.layers]
    experts = [expert for stack in stacks for expert in stack]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(experts, 2))
    assert model(torch.arange(9)[None]).logits.isfinite().all()


def test_latents_and_biases_of_experts_have_files(tmp_path):
    """DeepSeek V2 Lite and gpt-oss in small."""
    experts = {"intermediate_size": 128, "moe_intermediate_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2}
    parts = {"q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    latent = tf.DeepseekV2Config(**SIZES, hidden_size=128, **experts, **parts)
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 32}
    oss = tf.GptOssConfig(**SIZES, **sizes)
    for sizes in (latent, oss):
        model = halfbyte.hf.load(folders.write(sizes, Mode.parse("int4_g32"), tmp_path, 2))
        assert model(torch.arange(9)[None]).logits.isfinite().all()
    with pytest.raises(HalfbyteError, match="experts in gptq"):
        folders.write(oss, Mode.parse("gptq"), tmp_path, 2)


def test_16_bit_folders_hold_the_configuration_alone(tmp_path):
    sizes = tf.Qwen3Config(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2, vocab_size=50)
    folder = folders.write(sizes, Mode.parse("bf16"), tmp_path, 1)
    wider = tf.Qwen3Config(hidden_size=128, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2, vocab_size=50)
    assert folders.write(wider, Mode.parse("bf16"), tmp_path, 1) != folder
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    config = tf.AutoConfig.from_pretrained(folder)
    assert (config.num_hidden_layers, config.architectures, config.dtype) == (1, ["Qwen3ForCausalLM"], torch.bfloat16)
