"""Formats by layer: each layer has its own, plans and saved models do too, and what does not fit changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import halfbyte.hf as hf
from halfbyte.cache_plan import CachePlan, LayerFormats, ModelSizes
from halfbyte.errors import CheckpointError, InvalidArgument
from halfbyte_lab.evals.calibrate import sizes_of
from saved_folders import configure

KEYS, VALUES, ROTATED = ["int8", "int4"], ["int4_g32", "bf16"], [False, True]


def formats(model):
    """(keys, values, rotated) of each layer of the cache that generate() makes."""
    cache = model.generate.cache(model, 64)
    return [(layer.key_format.name, layer.value_format.name, layer.rotate_keys) for layer in cache.layers]


def plan_for(model):
    return CachePlan(sizes_of(model), tuple(map(LayerFormats, KEYS, VALUES, ROTATED)), 8.0)


BY_LAYER = list(zip(KEYS, VALUES, ROTATED, strict=True))


def test_every_layer_reads_its_own_formats(build, prompt):
    """Codes and dequantized values of each layer are those of a cache of its formats alone."""
    model, ids = hf.quantize(build("llama"), keys=KEYS, values=VALUES, rotate_keys=ROTATED), prompt()
    cache = hf.PackedCache(model, 64, keys=KEYS, values=VALUES, rotate_keys=ROTATED)
    assert formats(model) == BY_LAYER
    assert "int4 rotated/bf16, int8/int4_g32" in repr(cache)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    for i, (keys, values, rotated) in enumerate(BY_LAYER):
        alone = hf.PackedCache(model, 64, keys=keys, values=values, rotate_keys=rotated)
        with torch.no_grad():
            model(ids, past_key_values=alone, use_cache=True)
        ours, theirs = cache.layers[i].kv, alone.layers[i].kv
        assert ours.keys.format == theirs.keys.format
        if i == 0:  # layers behind it see what came out of other formats
            assert all(torch.equal(a, b) for a, b in zip(ours.tensors(), theirs.tensors(), strict=True))
    mean = sum(hf.PackedCache(model, 64, keys=k, values=v).bytes_per_token for k, v, _ in BY_LAYER) / 2
    assert cache.bytes_per_token == mean


@pytest.mark.parametrize(("keys", "values"), [("int8_tensor", "fp8_tensor"), ("int4_channel", "int4"), ("int8_token", "int8")])
def test_bytes_of_a_token_are_those_of_the_layers(build, prompt, keys, values):
    """A scale of the whole tensor is no token's."""
    model = hf.quantize(build("llama"), keys=keys, values=values)
    cache = hf.PackedCache(model, 64, keys=keys, values=values)
    with torch.no_grad():
        model(prompt(), past_key_values=cache, use_cache=True)
    assert cache.bytes_per_token == sum(layer.kv.bytes_per_token for layer in cache.packed)


def test_a_plan_is_its_formats(build, prompt, greedy, tmp_path):
    model, ids = build("llama"), prompt()
    path = plan_for(model).write(tmp_path / "plan.json")
    by_plan = hf.quantize(build("llama"), plan=path)
    by_lists = hf.quantize(build("llama"), keys=KEYS, values=VALUES, rotate_keys=ROTATED)
    assert formats(by_plan) == formats(by_lists) == BY_LAYER
    assert torch.equal(greedy(by_plan, ids)[1], greedy(by_lists, ids)[1])


def test_sink_and_recent_tokens_of_a_plan(build, prompt, greedy, tmp_path):
    """Those of the plan, or of the call where it has none; saved with the model; both at once, or formats that do not go, fail."""
    ids, layers = prompt(1, 30), tuple(map(LayerFormats, KEYS, ["int4_g32", "int4"], ROTATED))
    bare = CachePlan(sizes_of(build("llama")), layers, 6.0)
    window = {"sink_tokens": 2, "recent_tokens": 9}
    models = [hf.quantize(build("llama"), plan=replace(bare, **window)), hf.quantize(build("llama"), plan=bare, **window)]
    models.append(hf.load(hf.save(models[0], tmp_path / "saved")))
    for model in models:
        cache = model.generate.cache(model, 64)
        assert [layer.options.window for layer in cache.layers] == [(2, 9)] * 2
        assert torch.equal(greedy(model, ids)[1], greedy(models[0], ids)[1])
    model = build("llama")
    with pytest.raises(InvalidArgument, match="leave these options out"):
        hf.quantize(model, plan=replace(bare, **window), recent_tokens=9)
    with pytest.raises(InvalidArgument, match="values='bf16' is a 16-bit format"):
        hf.quantize(model, plan=replace(plan_for(model), **window))
    assert not hasattr(model.config, "halfbyte_cache")


@pytest.mark.parametrize("options", [{"weights": "int8_col"}, {}])
def test_the_formats_are_saved_with_the_model(build, prompt, greedy, tmp_path, options):
    model, ids = build("llama"), prompt()
    hf.quantize(model, **options, keys=KEYS, values=VALUES, rotate_keys=ROTATED)
    again = hf.load(hf.save(model, tmp_path / "saved"))
    assert formats(again) == formats(model) == BY_LAYER
    assert torch.equal(greedy(again, ids)[1], greedy(model, ids)[1])
    assert formats(hf.load(tmp_path / "saved", keys="int8", values="int8")) == [("int8", "int8", False)] * 2
    assert formats(hf.load(hf.save(again, tmp_path / "twice"))) == BY_LAYER


@pytest.mark.parametrize(
    ("options", "saved", "rotated"),
    [
        ({"keys": "int4", "values": "int4"}, True, [True, True]),
        ({"keys": "int8", "values": "int4"}, False, [False, False]),
        ({"keys": "int4_channel", "values": "int4"}, False, [False, False]),
        ({"keys": "int4_g32", "values": "int8", "rotate_keys": False}, False, [False, False]),
        ({"keys": "int8", "rotate_keys": True, "skip_layers": [0]}, True, [True, True]),
        ({"keys": "int4", "skip_layers": [0]}, [False, True], [False, True]),
        ({"keys": ["int4", "int8"], "values": "int8"}, [True, False], [True, False]),
    ],
)
def test_what_is_saved_says_whether_keys_are_rotated(build, prompt, greedy, tmp_path, options, saved, rotated):
    """Never "by default", which another version may read in another way."""
    model, ids = hf.quantize(build("llama"), **options), prompt()
    folder = hf.save(model, tmp_path / "saved")
    assert json.loads((folder / "config.json").read_text())["halfbyte_cache"]["rotate_keys"] == saved
    again = hf.load(folder)
    assert [x[2] for x in formats(model)] == [x[2] for x in formats(again)] == rotated
    assert torch.equal(greedy(again, ids)[1], greedy(model, ids)[1])


def test_settings_of_before_stay_unrotated(build, tmp_path):
    """4-bit keys were saved with false as long as rotation was off by default."""
    folder = hf.save(hf.quantize(build("llama"), keys="int8", values="int8"), tmp_path / "saved")
    configure(folder, halfbyte_cache={"keys": "int4", "values": "int4", "rotate_keys": False, "skip_layers": []})
    assert formats(hf.load(folder)) == [("int4", "int4", False)] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": "int3"}, "do not fit: .*int3"),
        ({"keys": ["int8"] * 3}, "do not fit: keys has 3 entries"),
        ({"values": 7}, "do not fit"),
        ({"rotate_keys": "yes"}, "do not fit"),
        ({"skip_layers": [9]}, "do not fit: skip_layers holds 9"),
        ({"more": 1}, "expected an object with"),
    ],
)
def test_damaged_settings_in_a_file(build, tmp_path, change, message):
    folder = hf.save(hf.quantize(build("llama"), keys="int8", values="int8"), tmp_path / "saved")
    configure(folder, lambda config: config["halfbyte_cache"].update(change))
    with pytest.raises(CheckpointError, match=message):
        hf.load(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keys": ["int8"]}, "keys has 1 entries, and the model 2 layers"),
        ({"keys": "int8", "values": ["int8"] * 3}, "values has 3 entries"),
        ({"keys": "int8", "rotate_keys": [True]}, "rotate_keys has 1 entries"),
        ({"keys": ["int8", "int3"]}, "int3"),
        ({"keys": "int8", "rotate_keys": [True, 1]}, "rotate_keys=1"),
        ({"plan": "here", "keys": "int8"}, "leave these options out"),
        ({"plan": "here", "skip_layers": [0]}, "leave these options out"),
        ({"plan": "other"}, "another model: layers 7"),
        ({"plan": "none.json"}, "cannot be read"),
    ],
)
def test_what_does_not_fit_changes_nothing(build, options, message):
    model = build("llama")
    plans = {"here": plan_for(model), "other": CachePlan(ModelSizes("llama", 7, 2, 32, 32, 64), (), 4.0)}
    options = {name: plans.get(x, x) if isinstance(x, str) else x for name, x in options.items()}
    with pytest.raises(InvalidArgument, match=message):
        hf.quantize(model, "int8_col", **options)
    assert model.config._attn_implementation != hf.NAME
    assert not hasattr(model.config, "halfbyte_cache")
    assert not hasattr(model.config, "quantization_config")


def test_the_key_bias_warning_knows_the_layers(build):
    model = build("qwen2")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias[3] = 200.0
    hf.quantize(model, keys=["int4", "int8", "int4"], values="int8")  # warnings are errors in this suite where unexpected
    with pytest.warns(hf.KeyBiasWarning, match="layer 1 "):
        hf.quantize(model, keys=["int8", "int4", "int8"], values="int8")
