"""What a failed or a chunked forward leaves behind."""

from __future__ import annotations

import copy
import json
import os

import pytest
import torch
import transformers as tf

import halfbyte.hf as hf
from halfbyte.errors import CheckpointError, InvalidArgument
from saved_folders import configure, edit


def logits(model, ids, cuts, **formats) -> torch.Tensor:
    """Logits of a text fed in pieces that end at `cuts`."""
    return feed(model, ids, hf.PackedCache(model, 512, **formats), cuts)


def feed(model, ids, cache, cuts) -> torch.Tensor:
    outs, start = [], 0
    with torch.no_grad():
        for end in cuts:
            outs.append(model(ids[:, start:end], past_key_values=cache, use_cache=True).logits)
            start = end
    return torch.cat(outs, 1)


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("cuts", [(20, 40, 150), (33, 73, 150), (50, 100, 150)])
@pytest.mark.parametrize("keys", ["int8_channel", "int4_channel", "int8"])
def test_long_chunks_after_a_past(build, prompt, keys, cuts):
    """Pieces of more than 16 tokens see themselves exactly, so they cannot be further from 16 bits than pieces of 1 are."""
    model, ids = build("llama"), prompt(2, 150)
    hf.quantize(model, keys=keys, values="bf16")
    exact = logits(model, ids, cuts, keys="bf16", values="bf16")
    by_one = logits(model, ids, range(1, 151), keys=keys, values="bf16")
    in_pieces = logits(model, ids, cuts, keys=keys, values="bf16")
    assert (in_pieces - exact).norm() < 1.2 * (by_one - exact).norm()


def test_a_forward_that_fails_half_way(build, prompt):
    """Nothing goes on with tokens in some layers only; restore() forgets them."""
    model, ids = build("llama"), prompt(2, 24)
    hf.quantize(model, keys="int8", values="int8")
    cache, step = hf.PackedCache(model, 64, keys="int8", values="int8"), ids[:, -1:]
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache, use_cache=True)
        broken = model.model.layers[1].self_attn.v_proj.weight
        kept = broken.clone()
        broken.fill_(torch.nan)
        with pytest.raises(InvalidArgument, match="v holds"):
            model(step, past_key_values=cache, use_cache=True)
        broken.copy_(kept)
        with pytest.raises(InvalidArgument, match="stopped half-way"):
            model(step, past_key_values=cache, use_cache=True)
        cache.restore()
        assert cache.get_seq_length() == 23
        again = model(step, past_key_values=cache, use_cache=True).logits
        fresh = hf.PackedCache(model, 64, keys="int8", values="int8")
        model(ids[:, :-1], past_key_values=fresh, use_cache=True)
        assert torch.equal(again, model(step, past_key_values=fresh, use_cache=True).logits)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_cache_of_a_model_with_other_layers(build, prompt, layers):
    """generate() refuses it at once, forwards at the first layer that is missing or at the next step."""
    model, ids = build("llama"), prompt(2, 24)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    hf.quantize(model, keys="int8", values="int8")
    cache = hf.PackedCache(config, 64, keys="int8", values="int8")
    with pytest.raises(InvalidArgument, match=f"past_key_values has {layers} layers, and the model 2"):
        model.generate(ids, max_new_tokens=2, past_key_values=cache)
    reason = f"holds {layers} layers, and the model has more"
    if layers == 3:
        model(ids, past_key_values=cache, use_cache=True)
        reason = "2 of 3 hold any; a model of fewer layers needs its own cache"
    with pytest.raises(InvalidArgument, match=reason):
        model(ids, past_key_values=cache, use_cache=True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"skip_modules": "down_proj"}, "is a string"),
        ({"skip_modules": ("dwn_proj",)}, "names 'dwn_proj'"),
        ({"weights": None, "keys": "int8", "skip_modules": ("q_proj",)}, r"skip_modules=\('q_proj',\) is about weights"),
        ({"keys": "int8", "skip_layers": 1}, "skip_layers=1"),
        ({"keys": "int8", "rotate_keys": "yes"}, "rotate_keys='yes'"),
    ],
)
def test_options_that_mean_nothing_are_refused(build, options, says):
    model = build("llama")
    before = model.state_dict().keys()
    with pytest.raises(InvalidArgument, match=says):
        hf.quantize(model, **{"weights": "nf4", **options})
    assert model.state_dict().keys() == before


def test_modules_to_skip_are_read_once(build):
    """They may come from a generator."""
    model = hf.quantize(build("llama"), "nf4", lm_head="int8_col", skip_modules=(name for name in ("q_proj",)))
    assert not any(name.endswith("q_proj") for name in model.config.quantization_config.modules)


@pytest.mark.parametrize(
    ("options", "says"), [({"device_map": "auto"}, "device_map: no such option"), ({"dtype": "bf16"}, "dtype='bf16'")]
)
def test_options_of_load_are_looked_at_before_files(tmp_path, options, says):
    with pytest.raises(InvalidArgument, match=says):
        hf.load(tmp_path / "none", "nf4", **options)


def test_a_tensor_that_belongs_nowhere_is_refused(build, tmp_path):
    hf.save(build("llama"), tmp_path / "m")
    edit(tmp_path / "m", lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(128)}))
    with pytest.raises(CheckpointError, match="unexpected keys"):
        hf.load(tmp_path / "m")


@pytest.mark.parametrize("kind", [torch.int64, torch.float8_e4m3fn])
def test_a_weight_of_a_strange_type_is_refused(build, tmp_path, kind):
    hf.save(build("llama"), tmp_path / "m")
    edit(tmp_path / "m", lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(kind)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is stored as"):
        hf.load(tmp_path / "m")


def test_what_is_checked_is_what_is_loaded(build, tmp_path):
    """transformers takes model.safetensors where shards and their index lie beside it."""
    other = build("llama")
    with torch.no_grad():
        other.model.norm.weight.fill_(3)
    build("llama").save_pretrained(tmp_path / "m", max_shard_size="40KB")
    other.save_pretrained(tmp_path / "one")
    os.rename(tmp_path / "one" / "model.safetensors", tmp_path / "m" / "model.safetensors")
    with pytest.warns(UserWarning, match="remove the other one"):
        assert torch.equal(hf.load(tmp_path / "m").model.norm.weight, other.model.norm.weight)
    file = tmp_path / "m" / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="follow the last tensor"):
        hf.load(tmp_path / "m")


def test_files_that_lead_elsewhere_are_refused(build, tmp_path):
    """transformers would load the model that an adapter names, or other weights than model.safetensors."""
    build("llama").save_pretrained(tmp_path / "m")
    adapter = tmp_path / "m" / "adapter_config.json"
    adapter.write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "another/model"}))
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        hf.load(tmp_path / "m")
    adapter.unlink()
    configure(tmp_path / "m", transformers_weights="other.safetensors")
    with pytest.raises(CheckpointError, match="transformers_weights"):
        hf.load(tmp_path / "m")


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_configuration_chooses_no_implementation(build, tmp_path, name):
    """transformers would download a kernel of that name and run it."""
    build("llama").save_pretrained(tmp_path / "m")
    configure(tmp_path / "m", **{name: "somebody/kernel"})
    model = hf.load(tmp_path / "m")
    assert model.config._attn_implementation in ("sdpa", "eager")
    assert "/" not in str(model.config._experts_implementation)


def test_tables_far_larger_than_the_files_are_refused(tmp_path):
    """GPT-J makes a table of positions, whose length only config.json says."""
    config = tf.GPTJConfig(vocab_size=32, n_embd=64, n_head=4, n_layer=2, rotary_dim=8)
    tf.GPTJForCausalLM(config).save_pretrained(tmp_path / "m")
    hf.load(tmp_path / "m")
    configure(tmp_path / "m", n_positions=10**10)
    with pytest.raises(CheckpointError, match="bytes of tables"):
        hf.load(tmp_path / "m")
