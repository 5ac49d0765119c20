"""Multi-head latent attention (MLA) over packed latents: the tokens of transformers over the same latents, dequantized."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import tiny_model
from rounded_cache import check_generation, packed_and_plain, rounded_cache, turns, two_texts
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer

import halfbyte.hf as hf
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.hf.handles import announce, newest_layer
from halfbyte.hf.latents import heads_of
from halfbyte.memory import packed_layers
from halfbyte.reference.hadamard import rotate
from halfbyte_lab.evals.calibrate_keys import calibrate_keys

FAMILIES = ("deepseek_v2", "glm4_moe_lite", "kimi_k25", "kimi_linear", "longcat_flash", "minicpm3", "mistral4", "youtu")
#: Of tiny models: dims of a latent and of a rotary key, and layers.
RANK, ROTARY, LAYERS = 64, 32, 2


def models(family: str, keys: str = "int8", values: str = "int8", **options: Any) -> tuple[Any, Any]:
    return packed_and_plain(tiny_model(family), keys=keys, values=values, **options)


@pytest.mark.slow(sample=8)
@pytest.mark.parametrize("fmt", ["int8", "int4", "fp8", "int4_g32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_turns_and_crops(family: str, fmt: str) -> None:
    packed, plain = models(family)
    cache, has_states = hf.PackedCache(packed, 128, keys=fmt, values=fmt), family == "kimi_linear"
    sides, behind_a_crop = ((packed, cache), (plain, rounded_cache(plain, fmt))), () if has_states else (1, 7)
    pairs = zip(*(turns(*side, (40, 1, 1, 25, 1), behind_a_crop) for side in sides), strict=True)
    for result, expected in pairs:
        assert (result - expected).abs().max() < (1e-1 if "int4" in fmt else 2e-2) * expected.std()


def test_a_latent_is_stored_once() -> None:
    """And counted so: by the cache, by its formats, and by the estimate from a configuration."""
    packed, _ = models("deepseek_v3")
    for keys, values, nbytes in (
        ("int8", "int8", RANK + 2 + ROTARY + 2),
        ("bf16", "int4_g32", RANK // 2 + 4 * RANK // 32 + 2 * ROTARY),
    ):
        cache = hf.PackedCache(packed, 128, keys=keys, values=values)
        with torch.no_grad():
            packed(two_texts(9), past_key_values=cache)
        assert cache.bytes_per_token == LAYERS * nbytes
        sizes = packed_layers(packed.config, keys, values, ())
        assert cache.nbytes == sizes.nbytes(2, 128)
        assert sizes.plain_nbytes(1, 1) == LAYERS * 2 * (RANK + ROTARY)
        assert [(kv.kv_heads, kv.head_dim, kv.value_dim) for kv in (layer.kv for layer in cache.packed)] == [
            (1, ROTARY, RANK)
        ] * LAYERS


class Stored(DynamicLayer):
    """A layer of transformers' cache that holds what a packed one does, its newest token included."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        rotary, latents = layer.kv.dequantized()
        self.count = int(layer.kv.lengths[0])
        latents = rotate(latents) if layer.rotate_values else latents
        self.contents = latents[:, :, : self.count], rotary[:, :, : self.count]

    def update(self, *args: Any, **kwargs: Any) -> Any:
        return self.contents

    def get_seq_length(self) -> int:
        return self.count - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.count, 0


@pytest.mark.parametrize(
    "options",
    [
        {"keys": "bf16", "values": "int8"},
        {"keys": "int8_channel", "values": "int8", "rotate_keys": True},
        {"keys": "int8", "values": "int4", "sink_tokens": 2, "recent_tokens": 8},
        {"keys": "int4", "values": "int4", "rotate_values": True},
        {"keys": "int8_tensor", "values": "fp8_tensor"},
        {"keys": "int4", "values": "int8_g32", "skip_layers": [0]},
    ],
    ids=str,
)
def test_steps_read_what_is_stored(options: dict[str, Any]) -> None:
    """With rotations, tails, scales of tensors and of channels, rotary keys in 16 bits."""
    packed, plain = models("deepseek_v3")
    cache, mask = hf.PackedCache(packed, 128, **options), torch.ones(2, 128, dtype=torch.long)
    mask[1, :5] = 0
    with torch.no_grad():
        for seed, count in enumerate((40, 1, 1, 25, 1, 1)):
            part = {"input_ids": two_texts(count, seed), "attention_mask": mask[:, : int(cache.get_seq_length()) + count]}
            result = packed(**part, past_key_values=cache).logits
            if count == 1:
                stored = DynamicCache()
                stored.layers = [Stored(layer) for layer in cache.layers]
                expected = plain(**part, past_key_values=stored).logits
                assert (result - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize("family", ["deepseek_v3", "longcat_flash"])
def test_generate_with_beams_sampling_lookup_and_own_loop(family: str) -> None:
    packed, plain = models(family)
    check_generation(packed, plain, 30, 4, {"recorded": False}, {"fuse_blocks": False}, {"prompt_lookup_num_tokens": 3})


def test_a_conversation_through_generate() -> None:
    packed, plain = models("deepseek_v2")
    ours, theirs, ids = hf.PackedCache(packed, 64, keys="int8", values="int8"), rounded_cache(plain, "int8"), two_texts(12)
    for seed in range(3):
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
        ids, expected = (m.generate(ids, **options, past_key_values=c) for m, c in ((packed, ours), (plain, theirs)))
        assert torch.equal(ids, expected)
        ids = torch.cat([ids, two_texts(6, seed)], 1)


def test_weights_that_changed_and_weights_in_4_bits() -> None:
    """The matrices of heads are read off the module at every prompt, whatever its layers are."""
    packed, plain = models("youtu", weights="int4_g32")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones(2, 20, dtype=torch.long)}
    packed.generate(two_texts(20), **options)
    again = hf.quantize(copy.deepcopy(plain), keys="int8", values="int8")
    cache = hf.PackedCache(again, 64, keys="int8", values="int8")
    again.generate(two_texts(20), **options, past_key_values=cache)
    before = [t.data_ptr() for layer in cache.packed for t in layer.latent_heads]
    for model in (again, plain):
        for module in model.modules():
            if hasattr(module, "kv_b_proj"):
                module.kv_b_proj.weight.data.mul_(-0.5)
    cache.reset()
    result = again.generate(two_texts(20), **options, past_key_values=cache)
    assert torch.equal(result, plain.generate(two_texts(20), **options, past_key_values=rounded_cache(plain, "int8")))
    assert before == [t.data_ptr() for layer in cache.packed for t in layer.latent_heads]


class Expanding(nn.Module):
    """An attention module's `expand_kv`: 3 heads of 16 + 8 dims from latents of 32."""

    def __init__(self, bias: float = 0.0, swapped: bool = False) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.keys, self.values = (torch.randn(3, 32, dim, generator=rng, dtype=torch.float64) for dim in (16, 12))
        self.bias, self.swapped = bias, swapped

    def expand_kv(self, latents: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [latents @ self.keys + self.bias, rotary.expand(-1, 3, -1, -1)]
        return torch.cat(parts[::-1] if self.swapped else parts, -1), latents @ self.values


def test_matrices_of_heads() -> None:
    module, like = Expanding(), torch.empty(0, dtype=torch.float64)
    plain, rotated = (heads_of(module, 32, 8, like, is_rotated) for is_rotated in (False, True))
    assert torch.equal(plain.keys, module.keys)
    assert torch.equal(plain.values, module.values)
    latents = torch.randn(5, 32, dtype=torch.float64)
    for own, other in zip(plain, rotated, strict=True):
        torch.testing.assert_close(rotate(latents) @ other, latents @ own)
    for wrong in (Expanding(bias=1.0), Expanding(swapped=True)):
        with pytest.raises(Unsupported, match="not a product with the latent"):
            heads_of(wrong, 32, 8, like, False)


def test_what_is_refused() -> None:
    packed, _ = models("deepseek_v3")
    ids, options = two_texts(9), {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with pytest.raises(Unsupported, match="drafts"):
        packed.generate(ids[:1], **options, assistant_model=tiny_model("deepseek_v3"))
    with pytest.raises(Unsupported, match="calibrated keys over a cache of latents"):
        calibrate_keys(packed, torch.ones(1, 512, dtype=torch.long))
    with pytest.raises(Unsupported, match="calibrated keys over a cache of latents"):
        hf.PackedCache(packed, 64, calibration="keys.safetensors")
    cache = hf.PackedCache(packed, 64, keys="int8", values="int8")
    with pytest.raises(Unsupported, match="4 heads where its configuration says latents"):
        cache.update(torch.zeros(1, 4, 2, 64), torch.zeros(1, 4, 2, 32), 0)
    view = announce(object(), torch.zeros(2))
    with pytest.raises(Unsupported, match="has no method expand_kv"):
        newest_layer(nn.Linear(1, 1))
    del view


def test_a_forward_that_failed_leaves_nothing_to_read() -> None:
    """Attention of the next forward, without a cache, is not given the cache of the one that failed."""
    packed, plain = models("deepseek_v3")
    cache, ids = hf.PackedCache(packed, 64, keys="int8", values="int8"), two_texts(9)
    module = next(m for m in packed.modules() if hasattr(m, "expand_kv"))
    module.expand_kv = None  # as an error between the cache and attention
    with pytest.raises(TypeError):
        packed(ids, past_key_values=cache)
    del module.expand_kv
    with torch.no_grad():
        result, expected = (model(two_texts(12, 1), use_cache=False).logits for model in (packed, plain))
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(InvalidArgument, match="stopped half-way"):
        packed(ids, past_key_values=cache)
