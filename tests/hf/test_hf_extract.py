"""`halfbyte extract`: the projections of one layer are those that the model multiplies with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tiny_models import base

from halfbyte.errors import CheckpointError, InvalidArgument, Unsupported
from halfbyte_lab.extract import Projections, extract, load_layer


def attention(model: Any, layer: int) -> Any:
    return [m for m in model.modules() if hasattr(m, "c_attn") or hasattr(m, "q_proj")][layer]


def multiplied(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """q, k, v as the model itself computes them."""
    if hasattr(module, "c_attn"):
        return list(module.c_attn(x).chunk(3, -1))
    return [module.q_proj(x), module.k_proj(x), module.v_proj(x)]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "gemma2"])
@torch.no_grad()
def test_the_projections_are_the_models_own(family: str, tmp_path: Path) -> None:
    model, x = base(family), torch.randn(5, 64)
    for layer in (0, -1):
        found = extract(model, family, layer)
        for y, w, b in zip(multiplied(attention(model, layer), x), found.weights, found.biases, strict=True):
            torch.testing.assert_close(x @ w.T + b, y)
    m = found.metadata
    assert m.layer == len([n for n, _ in model.named_modules() if n.endswith(("self_attn", ".attn"))]) - 1
    assert m.bias == (family in ("gpt2", "qwen2"))
    assert found.weights[0].shape == (m.heads * m.head_dim, m.hidden_size)
    assert found.weights[1].shape == (m.kv_heads * m.head_dim, m.hidden_size)
    found.save(tmp_path / "x")
    again = Projections.load(tmp_path / "x")
    assert again.metadata == m
    assert all(map(torch.equal, (*again.weights, *again.biases), (*found.weights, *found.biases)))
    assert sorted(p.name for p in (tmp_path / "x").iterdir()) == [
        *("bk.npy", "bq.npy", "bv.npy", "metadata.json", "wk.npy", "wq.npy", "wv.npy")
    ]


def test_one_head_comes_with_the_kv_head_it_reads() -> None:
    whole, one = extract(base("llama"), "llama"), extract(base("llama"), "llama", head=3)  # 4 heads on 2, of 32
    assert (one.metadata.heads, one.metadata.kv_heads, one.metadata.head) == (1, 1, 3)
    assert torch.equal(one.weights[0], whole.weights[0][96:128])
    assert torch.equal(one.weights[1], whole.weights[1][32:64])
    assert torch.equal(one.weights[2], whole.weights[2][32:64])


def test_what_cannot_be_extracted() -> None:
    with pytest.raises(Unsupported, match="has no attention with q_proj"):
        extract(base("gpt_neox"), "neox")
    with pytest.raises(InvalidArgument, match="layer=2; llama has 2 attention layers"):
        extract(base("llama"), "llama", 2)
    with pytest.raises(InvalidArgument, match="head=4; llama has 4 query heads"):
        extract(base("llama"), "llama", head=4)
    with pytest.raises(CheckpointError, match="there is no folder"):
        load_layer("./no-such-folder")


def test_quantized_projections_are_refused() -> None:
    import copy

    from halfbyte import hf

    model = hf.quantize(copy.deepcopy(base("llama")), weights="nf4")
    with pytest.raises(InvalidArgument, match="a projection is a QuantLinear"):
        extract(model, "llama")


def test_weights_that_the_files_lack_are_not_made_up(tmp_path: Path) -> None:
    """transformers fills in random numbers for what is missing, with a warning only."""
    model = base("llama")
    state = {name: t.contiguous() for name, t in model.state_dict().items() if not name.endswith("0.self_attn.v_proj.weight")}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(CheckpointError, match=r"missing keys: .*v_proj"):
        load_layer(str(tmp_path))


def test_the_projections_are_the_language_models() -> None:
    """A vision tower has attention layers too, and comes first."""
    vision = tf.CLIPVisionConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16)
    text = tf.LlamaConfig(vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = tf.LlavaForConditionalGeneration(tf.LlavaConfig(vision_config=vision, text_config=text))
    found = extract(model, "tiny")
    assert torch.equal(found.weights[0], model.model.language_model.layers[0].self_attn.q_proj.weight)
