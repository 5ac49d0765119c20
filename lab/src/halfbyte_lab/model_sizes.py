"""Sizes of known models, and models of any sizes with random weights: their steps take as long as others'."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from halfbyte.device import Device
from halfbyte.formats import plain_format
from halfbyte_lab.model_step import Formats, checked, computing

_LLAMA: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
_QWEN: dict[str, Any] = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
SIZES: dict[str, PretrainedConfig] = {
    "llama-3-8b": LlamaConfig(hidden_size=4096, intermediate_size=14336, **_LLAMA),
    "llama-3-70b": LlamaConfig(
        hidden_size=8192, intermediate_size=28672, **{**_LLAMA, "num_hidden_layers": 80, "num_attention_heads": 64}
    ),
    "qwen3-0.6b": Qwen3Config(hidden_size=1024, intermediate_size=3072, **_QWEN),
    "qwen3-1.7b": Qwen3Config(hidden_size=2048, intermediate_size=6144, **_QWEN),
    # three of four layers are recurrent: 32 states [128, 128] of a sequence
    "qwen3.5-9b": Qwen3_5TextConfig(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        vocab_size=248320,
        max_position_embeddings=262144,
        tie_word_embeddings=False,
    ),
    "qwen3-30b-a3b": Qwen3MoeConfig(
        hidden_size=2048,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        **{**_QWEN, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "tie_word_embeddings": False},
    ),
    "deepseek-v2-lite": DeepseekV2Config(
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=6,
        n_shared_experts=2,
        num_hidden_layers=27,
        first_k_dense_replace=1,
        num_attention_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        vocab_size=102400,
        max_position_embeddings=163840,
    ),
    "gpt-oss-20b": GptOssConfig(num_hidden_layers=24, num_local_experts=32, hidden_size=2880, intermediate_size=2880),
}
#: Share of a GPU's free memory that 16-bit weights may take; quantizing, prompts and caches need the rest.
_MOST_IN_16_BITS = 0.7


def of_sizes(config: Any, machine: Device, formats: Formats) -> Any:
    """A model of a configuration, with random weights; otherwise as `model_step.load`.

    Where the 16-bit weights of all blocks do not fit on a GPU, every block has those of the first one. Quantized, each has its own.
    """
    dtype = plain_format(formats.dtype).code.dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    if machine.kind == "cuda" and nbytes > _MOST_IN_16_BITS * torch.cuda.mem_get_info(machine.torch)[0]:
        return checked(_repeated(model, machine), formats)
    with machine.torch:
        return checked(computing(AutoModelForCausalLM.from_config(config, dtype=dtype).eval(), machine), formats)


def _repeated(model: Any, machine: Device) -> Any:
    """`model`, which has no weights yet, with those of a model of one block."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    with machine.torch:
        one = AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
    weights, state = one.state_dict(), model.state_dict()
    model.load_state_dict({name: weights[re.sub(r"\.\d+\.", ".0.", name)] for name in state}, assign=True)
    for name, module in model.named_modules():
        for buffer, _ in module.named_buffers(recurse=False):
            setattr(module, buffer, getattr(one.get_submodule(re.sub(r"\.\d+(?=\.|$)", ".0", name)), buffer))
    return model
