"""Tiny random models of every decoder family that the installed transformers has.

The sizes below go to every configuration that knows their names; what a family needs besides is in `OWN`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers as tf
from tiny_models import VOCAB
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.hf.model_support import model_class
from halfbyte.hf.weights import packed_share, replace, select

#: Every model type for which transformers has a causal language model.
FAMILIES: tuple[str, ...] = tuple(sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
#: Those that also see images or hear, and encoder-decoders.
OTHERS: tuple[str, ...] = tuple(
    sorted(
        {
            *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
            *modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
            *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
            *modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        }
        - {*FAMILIES}
    )
)
#: More parameters than this are no tiny model: a size of the family is missing below.
MOST = 20_000_000

_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
}
_LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
_STATES = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128, "mamba_d_state": 16, "mamba_chunk_size": 16}
_INDEXER = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 8}
_TOWERS = {
    **dict.fromkeys(("image_size", "crop_size"), 32),
    **dict.fromkeys(("embed_dim", "out_hidden_size", "projection_dim", "output_channels"), 64),
    **dict.fromkeys(("depth", "num_heads"), 2),
    "patch_size": 16,
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 7),
    "is_decoder": True,
    **dict.fromkeys(("initializer_range", "init_std"), 0.3),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "d_ff", "n_inner", "mlp_dim"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("d_model", "word_embed_proj_dim"), 64),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("vocab_size_per_layer_input", "unpadded_vocab_size"), VOCAB),
    "hidden_size_per_layer_input": 0,
    "num_layers": 2,
    "tie_word_embeddings": False,
    **_EXPERTS,
    **_LATENT,
    **_INDEXER,
    **_STATES,
    **_TOWERS,
}
_HYBRID, _LINEAR = ["linear_attention", "hybrid"], ["linear_attention", "full_attention"]
_PICTURES: dict[str, Any] = {
    "vocabulary_map": {"<image>": 0},
    "vq_config": {"base_channels": 32, "channel_multiplier": [1], "num_embeddings": 16, "embed_dim": 16},
}
_COMPASS = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}
_THREE_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [5, 5, 6]}
_LOCAL_GLOBAL = ["sliding_attention", "full_attention"] * 2
_SHARES = {"num_hidden_layers": 4, "layer_types": _LOCAL_GLOBAL, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
_GEMMA4 = {**_SHARES, "global_head_dim": 64}
_LLAMA4 = {"num_hidden_layers": 4, "floor_scale": 16}
_STAGES = {
    "num_heads": [2, 2],
    "num_groups": [2, 2],
    "embed_dim": [32, 64],
    "depths": [1, 1],
    "patch_size": [7, 3],
    "patch_stride": [4, 2],
    "patch_padding": [3, 1],
    "patch_prenorm": [False, True],
}
OWN: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 64, "vocab_size": 260},
    "bailing_hybrid": {"layer_types": _LINEAR},
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"n_head": 4, "rotary_dim": 16},
    "cohere_compass": {"text_config": _COMPASS},
    "cohere_compass_text": _COMPASS,
    "cosmos3_edge": {"text_config": {"rope_parameters": _THREE_AXES}},
    "dbrx": {"attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8}},
    "chameleon": _PICTURES,
    "dots3_note": {"text_config": {"per_layer_config": {}}},
    "emu3": _PICTURES,
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [64, 64], "rope_parameters": _THREE_AXES}},
    "florence2": {"vision_config": _STAGES},
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 64, "intermediate_size": 16}},
    "gemma3n_text": {**_SHARES, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 64}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 16},
    "granitemoehybrid": {"layer_types": _LINEAR},
    "hrm_text": {"initializer_range": 0.1},  # its many rounds magnify differences
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "kimi_linear": {"layer_types": _LINEAR},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "sliding_attention"]},
    "llama4": {"text_config": _LLAMA4},
    "llama4_text": _LLAMA4,
    "longcat_flash": {"zero_expert_num": 3, "num_layers": 2},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1},
    "mimo_v2_flash": {"head_dim": 96, "v_head_dim": 64, "num_key_value_heads": 1},
    "minimax": {"layer_types": _LINEAR},
    "molmo2": {"vision_config": {"image_size": [32, 32]}, "adapter_config": {"vision_feature_layer": [1, 0]}},
    "moshi": {"audio_vocab_size": 32},
    "nemotron_h": {"layer_types": ["linear_attention", "moe", "full_attention", "mlp"], "num_hidden_layers": 4},
    "olmo_hybrid": {"layer_types": _LINEAR},
    "qwen3_5": {"text_config": {"layer_types": _LINEAR}},
    "qwen3_5_moe": {"text_config": {"layer_types": _LINEAR}},
    "qwen3_5_moe_text": {"layer_types": _LINEAR},
    "qwen3_5_text": {"layer_types": _LINEAR},
    "qwen3_next": {"layer_types": _LINEAR},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (8, 64)},
    "roc_bert": {"shape_vocab_size": 32, "pronunciation_vocab_size": 32, "shape_embed_dim": 32, "pronunciation_embed_dim": 32},
    "xlstm": {"num_heads": 2, "num_blocks": 2},
    "zamba": {"layers_block_type": _HYBRID, "attention_hidden_size": 128, "attention_head_dim": 64},
    "zamba2": {"layers_block_type": _HYBRID, "attention_hidden_size": 128, "attention_head_dim": 64},
    "zaya": {"num_experts_per_tok": 1},
}


def sizes(cls: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a configuration class: those of `SIZES` that it has, its parts likewise, and `own`."""
    names = {f.name for f in dataclasses.fields(cls)}
    given = {cls.attribute_map.get(name, name): size for name, size in SIZES.items()}
    made = {name: size for name, size in given.items() if name in names}
    for part, kind in _parts(cls).items():
        made[part] = {**sizes(kind, own.get(part, {})), "model_type": kind.model_type}
    return {**made, **{name: size for name, size in own.items() if name not in _parts(cls)}}


@functools.cache
def _parts(cls: Any) -> dict[str, Any]:
    """The configurations inside of one: name -> class; what `AutoConfig` stands for is asked of the default."""
    found = dict(cls.sub_configs or {})
    if any(kind is tf.AutoConfig for kind in found.values()):
        whole = cls()
        found = {name: type(getattr(whole, name)) if kind is tf.AutoConfig else kind for name, kind in found.items()}
    return {name: kind for name, kind in found.items() if dataclasses.is_dataclass(kind) and kind.model_type}


def tiny_config(family: str) -> Any:
    """A small configuration of `family`; skips the test where this transformers does not have it."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {tf.__version__} has no {family}")
    cls = CONFIG_MAPPING[family]
    return cls(**sizes(cls, OWN.get(family, {})))


@functools.lru_cache(maxsize=1)
def _model(family: str) -> Any:
    config = tiny_config(family)
    kind = model_class(config)
    with torch.device("meta"):
        count = sum(p.numel() for p in kind._from_config(config).parameters())
    assert count < MOST, f"{family} has {count:,} parameters; give its sizes in OWN"
    torch.manual_seed(0)
    model = kind._from_config(config, dtype=torch.float32).eval()
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    if hasattr(model, "set_default_language"):
        model.set_default_language(next(iter(config.languages)))
    return uneven(model)


def uneven(model: Any) -> Any:
    """The model with another bias for the choice of each expert, as trained ones have: scores that round to 1 would be alike."""
    rng = torch.Generator().manual_seed(0)
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("expert_bias", "e_score_correction_bias")):
            t.data.copy_(0.5 * torch.randn(t.shape, generator=rng))
    return model


def tiny_model(family: str) -> Any:
    """A tiny random model of `family` in float32, a copy of its own."""
    return copy.deepcopy(_model(family))


def default_share(family: str) -> float | None:
    """The share of the weights that `quantize` packs in a model of the family's default sizes; None without such a model."""
    try:
        with torch.device("meta"):
            model = tf.AutoModelForCausalLM.from_config(CONFIG_MAPPING[family]())
            for name, target in select(model, ("lm_head",)).items():
                replace(model, name, target.empty(WEIGHT_FORMATS["int8_col"]))
        return round(packed_share(model), 3)
    except Exception:
        return None
