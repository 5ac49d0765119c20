"""Tiny models of one decoder layer with an MTP head that drafts what they say: a copy of the layer, over the next token alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tiny_models import LLAMA

from test_experts import DEEPSEEK, LATENT

ONE_LAYER: dict[str, Any] = {**LLAMA, "hidden_size": 128, "num_hidden_layers": 1}
ROUTED: dict[str, Any] = {**DEEPSEEK, "first_k_dense_replace": 0}


class Head(NamedTuple):
    """What a family calls the head's tensors: its layer, and what is around it."""

    layer: str
    combine: str
    token_norm: str
    hidden_norm: str
    norm: str
    token_first: bool = True


def _around(prefix: str, layer: str, *names: str, **options: Any) -> Head:
    return Head(layer, *(prefix + name for name in names), **options)


_LAST = "model.layers.1."
_OF_DEEPSEEK = _around(_LAST, _LAST, "eh_proj", "enorm", "hnorm", "shared_head.norm")
_OF_QWEN = _around("mtp.", "mtp.layers.0.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
_OF_MIMO = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
HEADS = {
    "deepseek_v3": _OF_DEEPSEEK,
    "glm4_moe": _OF_DEEPSEEK,
    "glm4_moe_lite": _OF_DEEPSEEK,
    "exaone_moe": _OF_QWEN,
    "hy_v3": _around(_LAST, _LAST, "eh_proj", "enorm", "hnorm", "final_layernorm"),
    "qwen3_next": _OF_QWEN,
    "mimo": _around("model.mtp_layers.0.", "model.mtp_layers.0.", *_OF_MIMO, token_first=False),
}
_GATED = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
_QWEN = {**ONE_LAYER, "layer_types": ["full_attention"], **_GATED}
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
_SHARED = {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "moe_intermediate_size": 64}
SIXTEEN = {
    "deepseek_v3": lambda: tf.DeepseekV3Config(**{**ONE_LAYER, **ROUTED, **LATENT}),
    "glm4_moe": lambda: tf.Glm4MoeConfig(**{**ONE_LAYER, **ROUTED}),
    "glm4_moe_lite": lambda: tf.Glm4MoeLiteConfig(**{**ONE_LAYER, **ROUTED, **LATENT}, mlp_layer_types=["sparse"]),
    "exaone_moe": lambda: tf.ExaoneMoeConfig(**ONE_LAYER, **_SHARED, first_k_dense_replace=1, mlp_layer_types=["dense"]),
    "hy_v3": lambda: tf.HYV3Config(**ONE_LAYER, **_SHARED, mlp_layer_types=["sparse"]),
    "qwen3_next": lambda: tf.Qwen3NextConfig(**_QWEN, **_MIXTURE),
    "mimo": lambda: tf.Qwen2Config(**ONE_LAYER, tie_word_embeddings=False),
}
#: What vLLM reads in a published config.json, and transformers does not write.
PUBLISHED: dict[str, dict[str, Any]] = {
    "glm4_moe": {"architectures": ["Glm4MoeForCausalLM"]},
    "glm4_moe_lite": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "hy_v3": {"first_k_dense_replace": 0, "qk_norm": True, "expert_hidden_dim": 64, "route_norm": True},
    "mimo": {"architectures": ["MiMoForCausalLM"]},
}


def with_head(family: str, source: Path, like: Path, to: Path) -> Path:
    """A copy of `source`, a folder of this family with one layer, and a head whose weights are those of the layer of `like`."""
    head, tensors, others = HEADS[family], load_file(source / "model.safetensors"), load_file(like / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    width, layer = config["hidden_size"], "model.layers.0."
    copies = {head.layer + name.removeprefix(layer): t.clone() for name, t in others.items() if name.startswith(layer)}
    halves = torch.eye(width), torch.zeros(width, width)
    copies[f"{head.combine}.weight"] = torch.cat(halves if head.token_first else halves[::-1], 1)
    is_offset = family == "qwen3_next"  # its norms multiply by 1 + weight
    scale = tensors["model.embed_tokens.weight"].square().mean().sqrt().item() - is_offset
    copies[f"{head.token_norm}.weight"] = torch.full((width,), scale)
    copies[f"{head.hidden_norm}.weight"] = torch.full((width,), 1.0 - is_offset)
    copies[f"{head.norm}.weight"] = tensors["model.norm.weight"].clone()
    if head is _OF_DEEPSEEK:
        copies[f"{_LAST}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        copies[f"{_LAST}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    if source == like:
        modules = config.get("quantization_config", {}).get("modules", {})
        modules |= {head.layer + name.removeprefix(layer): fmt for name, fmt in modules.items() if name.startswith(layer)}
    to.mkdir()
    (to / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1} | PUBLISHED.get(family, {})))
    save_file(tensors | copies, to / "model.safetensors", {"format": "pt"})
    return to
