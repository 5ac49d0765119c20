"""Tiny random models of each family that is executed, in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from packaging.version import Version

VOCAB = 101
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512}
LLAMA: dict[str, Any] = {**SIZES, "intermediate_size": 128, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 32}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**LLAMA),
    "mistral": lambda: tf.MistralConfig(**LLAMA, sliding_window=7),
    "qwen2": lambda: tf.Qwen2Config(**{**LLAMA, "num_hidden_layers": 3}),
    "qwen3": lambda: tf.Qwen3Config(**LLAMA),
    "gemma2": lambda: tf.Gemma2Config(
        **LLAMA, sliding_window=7, query_pre_attn_scalar=32, attn_logit_softcapping=5.0, tie_word_embeddings=False
    ),
    "phi3": lambda: tf.Phi3Config(**LLAMA, pad_token_id=0),
    "gpt_oss": lambda: tf.GptOssConfig(
        **{**LLAMA, "num_hidden_layers": 4}, sliding_window=7, num_local_experts=4, num_experts_per_tok=2, rope_parameters=ROPE
    ),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=2, n_positions=512, scale_attn_by_inverse_layer_idx=True
    ),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**{**SIZES, "num_attention_heads": 2}, intermediate_size=128, num_hidden_layers=2),
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES = tuple(CONFIGS)


@functools.cache
def base(family: str) -> Any:
    return made(CONFIGS[family]())


def made(config: Any) -> Any:
    """A random model of these sizes."""
    torch.manual_seed(7)
    config.initializer_range = 0.3  # large enough that greedy text does not repeat one token
    config.eos_token_id = config.bos_token_id = None
    config.pad_token_id = 0
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                p.normal_(0, 0.3)
    model.generation_config.eos_token_id = None
    return model


def left_padding(ids: torch.Tensor, *pads: int) -> torch.Tensor:
    """The mask of prompts whose first rows begin with so many tokens of padding."""
    mask = torch.ones_like(ids)
    for row, n in enumerate(pads):
        mask[row, :n] = 0
    return mask


def before(version: str) -> bool:
    """Whether this transformers is older, and has a fault of its own that a test would meet."""
    return Version(tf.__version__) < Version(version)
