"""Gemma 3 and 4 as published: layers of several sizes, shared keys and values, and images whose tokens see each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from rounded_cache import packed_and_plain, rounded_cache
from tiny_models import LLAMA, VOCAB, left_padding

import halfbyte.hf as hf
from halfbyte.errors import Unsupported
from halfbyte.memory import packed_layers

IMAGE, PATCHES = VOCAB - 1, 4
_SIZES: dict[str, Any] = {
    **LLAMA,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "sliding_window": 7,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
_GEMMA4: dict[str, Any] = {**_SIZES, "global_head_dim": 64, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 0}
_GLOBAL: dict[str, Any] = {"num_global_key_value_heads": 1, "attention_k_eq_v": True}
_EXPERTS: dict[str, Any] = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
_SHARED: dict[str, Any] = {
    "num_hidden_layers": 7,
    "layer_types": [*["sliding_attention", "full_attention"] * 3, "full_attention"],
    "num_kv_shared_layers": 4,
    "hidden_size_per_layer_input": 16,
}
_VISION4: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "pooling_kernel_size", "patch_size"), 2),
    "head_dim": 16,
    "num_hidden_layers": 1,
    "position_embedding_size": 16,
}
_VISION3: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


def gemma4(**sizes: Any) -> Any:
    return tf.Gemma4ForCausalLM(tf.Gemma4TextConfig(**{**_GEMMA4, **sizes}))


def gemma3n() -> Any:
    sizes = {**_SIZES, **_SHARED, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 7, "vocab_size_per_layer_input": VOCAB}
    return tf.Gemma3nForCausalLM(tf.Gemma3nTextConfig(**sizes))


def gemma4_images(**sizes: Any) -> Any:
    text = {**_GEMMA4, **_GLOBAL, "use_bidirectional_attention": "vision", **sizes}
    return tf.Gemma4ForConditionalGeneration(
        tf.Gemma4Config(text_config=text, vision_config=_VISION4, audio_config=None, image_token_id=IMAGE)
    )


def gemma3_images() -> Any:
    text = {**_SIZES, "query_pre_attn_scalar": 32}
    return tf.Gemma3ForConditionalGeneration(
        tf.Gemma3Config(text_config=text, vision_config=_VISION3, mm_tokens_per_image=PATCHES, image_token_index=IMAGE)
    )


TEXTS: dict[str, Any] = {
    "gemma4-31b": lambda: gemma4(**_GLOBAL),
    "gemma4-26b-a4b": lambda: gemma4(**_GLOBAL, **_EXPERTS),
    "gemma4-e2b": lambda: gemma4(**_SHARED, use_double_wide_mlp=True),
    "gemma3n": gemma3n,
}
IMAGES: dict[str, Any] = {
    "gemma4": gemma4_images,
    "gemma4-shared": lambda: gemma4_images(**{**_SHARED, "attention_k_eq_v": False}),
    "gemma3": gemma3_images,
}


def model_of(build: Any) -> Any:
    torch.manual_seed(0)
    model = build().eval()
    model.generation_config.eos_token_id = None
    return model


def prompt(length: int, image: bool, model: Any) -> dict[str, torch.Tensor]:
    """Two prompts, one padded on the left; with an image of `PATCHES` tokens in each."""
    ids = torch.randint(3, IMAGE, (2, length), generator=torch.Generator().manual_seed(length))
    mask = left_padding(ids, 0, 3)
    if not image:
        return {"input_ids": ids * mask, "attention_mask": mask}
    ids[0, 4:8] = ids[1, 7:11] = IMAGE
    inputs = {"input_ids": ids * mask, "attention_mask": mask}
    noise = torch.Generator().manual_seed(1)
    if isinstance(model, tf.Gemma3ForConditionalGeneration):
        return {**inputs, "token_type_ids": (ids == IMAGE).long(), "pixel_values": torch.randn(2, 3, 8, 8, generator=noise)}
    column = torch.arange(4)
    grid = torch.stack(torch.meshgrid(column, column, indexing="xy"), -1).view(1, 16, 2).expand(2, -1, -1).contiguous()
    pixels = torch.rand(2, 16, 12, generator=noise)
    return {**inputs, "mm_token_type_ids": (ids == IMAGE).long(), "pixel_values": pixels, "image_position_ids": grid}


def generate(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
    settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True, **options}
    with torch.no_grad():
        return model.generate(**inputs, **settings)


def check_close(result: Any, expected: Any, fmt: str) -> None:
    logits, plain = (torch.stack(out.logits, 1) for out in (result, expected))
    assert torch.equal(result.sequences, expected.sequences)
    assert (logits - plain).abs().max() < {"int8": 2e-2, "int4": 1e-1}[fmt] * plain.std()


def models(build: Any, fmt: str) -> tuple[Any, Any]:
    return packed_and_plain(model_of(build), keys=fmt, values=fmt)


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("family", TEXTS)
def test_text(family: str, fmt: str) -> None:
    packed, plain = models(TEXTS[family], fmt)
    inputs = prompt(21, False, plain)
    check_close(generate(packed, inputs), generate(plain, inputs, past_key_values=rounded_cache(plain, fmt)), fmt)


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize(("family", "length"), [*((family, 25) for family in IMAGES), ("gemma3", 14)])
def test_images(family: str, length: int, fmt: str) -> None:
    """A layer in which tokens see each other reads a prompt of any length exactly; what the image changes is no rounding."""
    packed, plain = models(IMAGES[family], fmt)
    inputs = prompt(length, True, plain)
    cache, rounded = hf.PackedCache(packed, 64, keys=fmt, values=fmt), rounded_cache(plain, fmt)
    first, expected = generate(packed, inputs, past_key_values=cache), generate(plain, inputs, past_key_values=rounded)
    check_close(first, expected, fmt)
    types = next(name for name in inputs if name.endswith("token_type_ids"))
    causal = generate(packed, {**inputs, types: torch.zeros_like(inputs[types])})
    assert (causal.logits[0] - first.logits[0]).abs().max() > 0.05 * first.logits[0].std()


def test_a_later_turn_with_an_image() -> None:
    """The past is packed, and the image behind it sees itself."""
    packed, plain = models(IMAGES["gemma4"], "int8")
    inputs = prompt(25, True, plain)
    cache, rounded = hf.PackedCache(packed, 64, keys="int8", values="int8"), rounded_cache(plain, "int8")
    generate(packed, inputs, past_key_values=cache), generate(plain, inputs, past_key_values=rounded)
    with torch.no_grad():
        logits = []
        for model, past in ((packed, cache), (plain, rounded)):
            held = int(past.get_seq_length())
            ids = torch.cat([torch.ones(2, held, dtype=torch.long), inputs["input_ids"]], 1)
            new = {
                "input_ids": ids[:, held:],
                "attention_mask": left_padding(ids, 0, 3),
                "mm_token_type_ids": (ids == IMAGE).long(),
            }
            pictures = {name: inputs[name] for name in ("pixel_values", "image_position_ids")}
            logits.append(model(**new, **pictures, past_key_values=past).logits)
    assert (logits[0] - logits[1]).abs().max() < 2e-2 * logits[1].std()


@pytest.mark.parametrize("family", ["gemma4-31b", "gemma4-e2b"])
def test_bytes_are_those_of_the_layers_that_store(family: str) -> None:
    model = hf.quantize(model_of(TEXTS[family]), keys="int8", values="int4_g32")
    out = generate(model, prompt(21, False, model))
    cache, text = out.past_key_values, model.config
    modes = text.kv_sharing_modes
    assert [layer.kv.head_dim for layer in cache.packed] == [
        text.per_layer_config[i].head_dim for i, mode in enumerate(modes) if mode != "reuse"
    ]
    sizes = packed_layers(text, "int8", "int4_g32", ())
    assert sizes.nbytes(2, cache.capacity) == cache.nbytes
    assert cache.bytes_per_token == sum(layer.kv.bytes_per_token for layer in cache.packed)


def test_an_assistant_with_other_keys_and_values_is_refused() -> None:
    packed, plain = models(TEXTS["gemma4-e2b"], "int8")
    inputs = prompt(21, False, plain)
    with pytest.raises(Unsupported, match="share keys and values"):
        packed.generate(inputs["input_ids"][:1], assistant_model=model_of(TEXTS["gemma4-31b"]), max_new_tokens=3)


def test_a_plan_is_for_layers_of_one_size() -> None:
    for family, reason in (("gemma4-31b", "heads of several"), ("gemma4-e2b", "keys and values of their own")):
        with pytest.raises(Unsupported, match=reason):
            hf.model_support.model_sizes(model_of(TEXTS[family]).config)
