"""Tiny random mixtures of experts, and the plain model with the values of a quantized one."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch
import transformers as tf
from tiny_models import VOCAB
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from halfbyte.experts import QuantExperts
from halfbyte.nn import QuantLinear

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 6),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size"), 64),
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
OWN: dict[str, dict[str, Any]] = {
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "sliding_window": 7},
}
#: A model of each is quantized in the tests; all of them keep stacks of experts.
MIXTURES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2"),
    *(
        "hunyuan_v1_moe",
        "phimoe",
        "granitemoe",
        "ernie4_5_moe",
        "dots1",
        "aria_text",
        "deepseek_v4",
        "minimax_m3_vl_text",
        "inkling2_text",
    ),
)


def tiny_config(family: str, **own: Any) -> Any:
    kind = CONFIG_MAPPING[family]
    known = {f.name for f in dataclasses.fields(kind)}
    named = {kind.attribute_map.get(name, name): size for name, size in SIZES.items()}
    return kind(**{**{name: size for name, size in named.items() if name in known}, **OWN.get(family, {}), **own})


@functools.cache
def _base(family: str) -> Any:
    torch.manual_seed(3)
    model = tf.AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_(0, 0.3)
    return model


def tiny_mixture(family: str) -> Any:
    """In float32, a copy of its own."""
    return copy.deepcopy(_base(family))


def expand(packed: Any, plain: Any) -> Any:
    """Give the plain model the values of the quantized weights, in its own order of rows."""
    for name, layer in packed.named_modules():
        if isinstance(layer, QuantLinear):
            plain.get_submodule(name).weight.data = layer.weight.dequantize(torch.float32)
        elif isinstance(layer, QuantExperts):
            parent, _, child = name.rpartition(".")
            set_stack(plain.get_submodule(parent), child, layer)
    return plain


def set_stack(mixture: Any, name: str, layer: QuantExperts) -> None:
    values = layer.weight.dequantize(torch.float32)
    if name == "gate_up_proj" and mixture.is_concatenated:
        values = torch.cat((values[:, ::2], values[:, 1::2]), 1)
    getattr(mixture, name).data = (values.mT if mixture.is_transposed else values).contiguous()
