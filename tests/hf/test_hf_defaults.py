"""`hf.quantize(model)` without a format: what it takes, what it leaves, and that nothing of its size does better."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import halfbyte.hf as hf
from halfbyte.errors import InvalidArgument
from halfbyte.formats import weight_format
from halfbyte.hf import quantize_model
from halfbyte.hf.default_cache import cache_settings
from halfbyte.nn import FusedProjections, QuantLinear
from halfbyte.settings import CLIP, CPU_WEIGHTS, KEYS, VALUES, WEIGHTS
from halfbyte.text import heldout_text, windows
from halfbyte_lab.evals.model import load
from halfbyte_lab.evals.outliers import PROFILES, with_outliers
from halfbyte_lab.evals.quality import Setting, evaluate


def weights(model):
    return {m.weight.format.name for m in model.modules() if isinstance(m, QuantLinear)}


def cache(model):
    """(key format, value format) of the first layer of the cache that generate() makes; None: transformers' own."""
    settings = cache_settings(model)
    return settings and (settings.keys, settings.values)


def test_a_model_alone_gets_the_best_of_both(build, prompt, greedy):
    model = hf.quantize(build("llama"))
    assert (weights(model), cache(model)) == ({CPU_WEIGHTS}, (KEYS, VALUES))
    named = hf.quantize(build("llama"), CPU_WEIGHTS, KEYS, VALUES, clip=CLIP)
    assert torch.equal(greedy(model, prompt())[1], greedy(named, prompt())[1])


def test_what_nobody_named_is_told_in_a_line(build, capsys, monkeypatch):
    monkeypatch.setattr("transformers.utils.logging.is_progress_bar_enabled", lambda: True)
    hf.quantize(build("llama"))
    line = f"no format was named; weights become {CPU_WEIGHTS}, for a CPU, and the cache has {KEYS} keys and {VALUES} values\n"
    assert line in capsys.readouterr().err
    hf.quantize(build("llama"), CPU_WEIGHTS)
    assert "no format was named" not in capsys.readouterr().err
    for text in (hf.quantize.__doc__, (Path(__file__).parents[2] / "docs/guides/transformers.md").read_text()):
        words = " ".join(text.replace("`", "").split())
        assert all(x in words for x in (WEIGHTS, CPU_WEIGHTS, f'clip="{CLIP}"', f"{KEYS} keys", f"{VALUES} values"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"weights": "nf4"}, ({"nf4"}, None)),
        ({"keys": "int8"}, (set(), ("int8", "bf16"))),
        ({"values": "int8"}, (set(), ("bf16", "int8"))),
        ({"keys": ["int8", "int4"], "values": "int8"}, (set(), (("int8", "int4"), "int8"))),
        ({"skip_layers": [0]}, ({CPU_WEIGHTS}, (KEYS, VALUES))),
        ({"skip_modules": ["self_attn", "lm_head"]}, ({CPU_WEIGHTS}, (KEYS, VALUES))),
    ],
)
def test_one_side_alone_leaves_the_other(build, options, expected):
    model = hf.quantize(build("llama"), **options)
    assert (weights(model), cache(model)) == expected


def test_weights_that_are_quantized_stay(build, tmp_path):
    model = hf.quantize(build("llama"), weights="int8_col")
    hf.quantize(model, fuse_qkv=True)
    assert cache(model) is None
    assert any(isinstance(m, FusedProjections) for m in model.modules())
    hf.quantize(model)
    assert cache(model) == (KEYS, VALUES)
    assert not any(p.format.name == CPU_WEIGHTS for m in model.modules() if isinstance(m, QuantLinear) for p in [m.weight])
    loaded = hf.quantize(hf.load(hf.save(hf.quantize(build("llama"), weights="nf4"), tmp_path / "saved")))
    assert (weights(loaded), cache(loaded)) == ({"nf4"}, (KEYS, VALUES))
    other = build("llama")
    other.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(dequantize=False))
    assert (weights(hf.quantize(other)), cache(other)) == (set(), (KEYS, VALUES))


def test_default_weights_that_do_not_divide_a_layer_fall_to_the_nearest(build, monkeypatch, prompt, greedy, tmp_path):
    monkeypatch.setattr(quantize_model, "CPU_WEIGHTS", "int4_g128")  # hidden_size is 64
    with pytest.warns(UserWarning, match=r"int4_g128 does not divide \d+ of \d+ weights, which are quantized \d+ to int4_g\d+"):
        model = hf.quantize(build("llama"))
    widths = {m.weight.shape[-1]: m.weight.format.name for m in model.modules() if isinstance(m, QuantLinear)}
    assert widths == {last: weight_format("int4_g128").nearest(last).name for last in widths}
    assert set(widths.values()) == {"int4_g64", "int4_g128"}
    loaded = hf.load(hf.save(model, tmp_path / "saved"))
    assert torch.equal(greedy(loaded, prompt())[1], greedy(model, prompt())[1])
    with pytest.raises(InvalidArgument, match=r"groups of 128 \(int4_g128\) do not divide"):
        hf.quantize(build("llama"), weights="int4_g128")


def test_a_model_alone_can_be_fused(build):
    model = hf.quantize(build("llama"), fuse_qkv=True)
    assert any(isinstance(m, FusedProjections) for m in model.modules())


def test_a_head_that_does_not_fit_changes_nothing(build):
    model = build("llama")
    model.config.head_dim = 33
    with pytest.raises(InvalidArgument, match="33"):
        hf.quantize(model, WEIGHTS, "int4_channel", VALUES)
    assert (weights(model), cache(model)) == (set(), None)


@pytest.mark.slow
@pytest.mark.parametrize("outliers", [None, *PROFILES], ids=lambda p: p.name if p else "plain")
def test_no_uniform_choice_of_its_size_diverges_less(outliers):
    """Of those that come close on the plain model: as large as the default, or smaller."""
    torch.set_num_threads(1)
    model = load("demo")[0]
    model = model if outliers is None else with_outliers(model, outliers)
    caches = [Setting("int8", "int8"), Setting("int8", "int8", rotate_keys=True), Setting("fp8", "fp8")]
    caches = [Setting(KEYS, VALUES), *caches, Setting("int4_channel", "int8"), Setting("int8_channel", "int4")]
    layers = [Setting(weights=WEIGHTS, clip=CLIP), *(Setting(weights=name) for name in ("nvfp4", "nf4", "nf4_dq"))]
    ids = windows(list(heldout_text().encode()), 256, 3)
    for settings, chunk in ((caches, 16), (layers, 256)):  # how weights diverge is the same in any chunks
        ours, *theirs = evaluate(model, [Setting(), *settings], ids, chunk=chunk)[1:]
        assert all(
            (other.kv_bytes_per_token, other.weight_bytes) <= (ours.kv_bytes_per_token, ours.weight_bytes) for other in theirs
        )
        assert all(other.kl_mean > ours.kl_mean for other in theirs)
