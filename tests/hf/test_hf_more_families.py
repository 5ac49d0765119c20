"""More families than the nine of the other tests, once through: the scan of the sources said that they fit, this shows it."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from tiny_models import VOCAB
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import halfbyte.hf as hf
from halfbyte.hf.model_support import EXECUTED

COMMON = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
COMMON |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.3}
COMMON |= {"pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOW = {"sliding_window": 7}
OWN = {
    "cohere2": WINDOW,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "exaone4": WINDOW,
    "gemma3_text": WINDOW | {"tie_word_embeddings": False},
    "glm4_moe": EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_inner": 128, "n_positions": 512},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ministral": WINDOW,
    "mixtral": {"num_local_experts": 4},
    "olmo3": WINDOW,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "phimoe": {"num_local_experts": 4},
    "qwen2_moe": EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3_moe": EXPERTS | {"num_experts": 4},
    "starcoder2": WINDOW,
}


@pytest.mark.slow
@pytest.mark.parametrize("family", EXECUTED)
@torch.no_grad()
def test_same_tokens(rounded, prompt, greedy, family):
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[family](**{**COMMON, **OWN.get(family, {})}), dtype=torch.float32
    ).eval()
    model.generation_config.eos_token_id = None
    ids, mask = prompt(), torch.ones(2, 21, dtype=torch.long)
    mask[1, :3] = 0
    model.set_attn_implementation("eager")
    expected, logits = greedy(model, ids, new=6, attention_mask=mask, past_key_values=rounded(model))
    hf.quantize(model, keys="bf16", values="bf16")
    got, own = greedy(model, ids, new=6, attention_mask=mask)
    assert torch.equal(got, expected)
    assert (own - logits).abs().max() < 3e-3 * logits.std()
