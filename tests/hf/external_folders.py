"""Folders of tiny models as other libraries write them, drawn at random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from safetensors.torch import load_file
from tiny_models import LLAMA

import decoders
from saved_folders import blocks, configure, store, write

__all__ = ["blocks", "gpt_oss", "tiny", "write"]

#: Sizes that every kind divides: rows of 128 and 256.
SIZES = {**LLAMA, "hidden_size": 128, "intermediate_size": 256}


def tiny(family: str = "llama", **options: Any) -> Any:
    """A random model whose layers fit every kind."""
    torch.manual_seed(3)
    if family == "gpt2":
        config: Any = tf.GPT2Config(vocab_size=101, n_embd=128, n_layer=2, n_head=2, n_positions=64)
    else:
        config = {"llama": tf.LlamaConfig, "qwen2": tf.Qwen2Config}[family](**{**SIZES, **options})
    config.eos_token_id = config.bos_token_id = None
    config.pad_token_id = 0
    return tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def gpt_oss(folder: Path) -> Any:
    """A tiny gpt-oss with its experts in MXFP4 as OpenAI stores them; returns the model with the same values."""
    torch.manual_seed(0)
    options = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "eos_token_id": None, "pad_token_id": 0}
    config = tf.GptOssConfig(**options, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(folder)
    rng, state = np.random.default_rng(0), load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, width, out = parameter.shape
            blocks = rng.integers(0, 256, (experts, out, width // 32, 16)).astype(np.uint8)
            scales = rng.integers(115, 122, (experts, out, width // 32)).astype(np.uint8)
            del state[name]
            state |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(decoders.gptoss_mxfp4(blocks, scales)).transpose(1, 2))
    store(folder, state)
    configure(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return model
