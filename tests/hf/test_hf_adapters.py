"""Adapters of PEFT on quantized weights and over a packed cache. Skipped where PEFT is not installed."""

from __future__ import annotations

import copy
import inspect
import sys

import pytest
import torch

import halfbyte.hf as hf
from halfbyte.errors import Unsupported
from halfbyte.hf.quantization_config import register_lora
from halfbyte.nn import FusedProjections, QuantLinear

peft = pytest.importorskip("peft", reason="PEFT is not installed; pip install peft", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TARGETS = ["q_proj", "v_proj", "down_proj"]


def lora(**options):
    return peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "target_modules": TARGETS, "init_lora_weights": False, **options})


def expanded(model, plain):
    """The plain model with the values of the quantized weights, in float64."""
    plain = copy.deepcopy(plain).double()
    for name, layer in model.named_modules():
        if isinstance(layer, QuantLinear):
            plain.get_submodule(name).weight.data = layer.weight.dequantize(torch.float64)
    return plain


@pytest.mark.parametrize("options", [{}, {"fuse_qkv": True}])
def test_lora_trains_through_packed_weights(build, prompt, options):
    """The gradients of every adapter weight, against those of the dequantized model in float64."""
    model, ids = hf.quantize(build("llama"), "nf4", **options), prompt()
    assert any(isinstance(m, FusedProjections) for m in model.modules()) is bool(options)
    plain = peft.get_peft_model(expanded(model, build("llama")), lora())
    model = peft.get_peft_model(model, lora())
    adapters = {n: p.double() for n, p in model.state_dict().items() if "lora_" in n}
    plain.load_state_dict(adapters, strict=False)
    for trained in (model, plain):
        trained(input_ids=ids, labels=ids).loss.backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys() == adapters.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() < 1e-4 * expected[name].norm(), name


def test_lora_is_saved_loaded_and_merged_into_a_16_bit_copy(build, prompt, tmp_path, greedy):
    base, ids = hf.quantize(build("llama"), "nf4", keys="int8", values="int8"), prompt()
    model = peft.get_peft_model(copy.deepcopy(base), lora()).eval()
    made = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    assert isinstance(made.past_key_values, hf.PackedCache)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        model.save_pretrained(tmp_path / "adapter")
        again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter").eval()
        assert torch.equal(again(input_ids=ids).logits, expected)
        merged = peft.PeftModel.from_pretrained(expanded(base, build("llama")), tmp_path / "adapter").merge_and_unload()
        torch.testing.assert_close(merged(ids).logits.float(), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(Unsupported, match="load the model in 16 bits"):
        model.merge_and_unload()


@pytest.mark.parametrize("option", [{"use_dora": True}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}])
def test_variants_that_compute_with_the_weight_are_refused(build, option):
    ((name, choice),) = option.items()
    with pytest.raises(Unsupported, match=f"{name}={choice!r} computes with the weight itself"):
        peft.get_peft_model(hf.quantize(build("llama"), "nf4"), lora(**option))


def test_peft_may_be_imported_after_the_model_was_quantized(build, monkeypatch, recwarn):
    model = hf.quantize(build("llama"), "nf4")
    for module, name in (("lora.model", "dispatch_default"), ("tuners_utils", "_maybe_include_all_linear_layers")):
        module = sys.modules[f"peft.tuners.{module}"]
        monkeypatch.setattr(module, name, inspect.unwrap(getattr(module, name)))
    adapted = peft.get_peft_model(model, lora(target_modules="all-linear"))
    assert sum(isinstance(getattr(m, "base_layer", None), QuantLinear) for m in adapted.modules()) == 14
    assert not any("Unsupported layer type" in str(w.message) for w in recwarn)


@pytest.mark.parametrize("options", [{}, {"skip_modules": ("k_proj",)}, {"lm_head": "int8_col"}])
def test_all_linear_layers_get_adapters_but_the_head(build, options):
    """The usual setting of QLoRA, and the default of families that PEFT does not know."""
    plain, packed = build("llama"), hf.quantize(build("llama"), "nf4", **options)
    for model in (plain, packed, copy.deepcopy(packed)):
        config = lora(target_modules="all-linear")
        names = {name for name, _ in peft.get_peft_model(model, config).named_modules() if name.endswith("lora_A")}
        assert len(names) == 14
        assert not any("lm_head" in name for name in names)


@pytest.mark.parametrize("options", [{}, {"lm_head": "int8_col"}])
def test_a_second_adapter_on_all_layers(build, prompt, options):
    """A layer that has an adapter is one of them, too; and the second changes nothing of the first."""
    packed, ids = hf.quantize(build("llama"), "nf4", **options), prompt()
    model = peft.get_peft_model(packed, lora(target_modules="all-linear")).eval()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        model.add_adapter("second", lora(target_modules="all-linear", r=2))
        names = [name for name, m in model.named_modules() if name.endswith("lora_A") and "second" in m]
        assert len(names) == 14
        assert torch.equal(model(input_ids=ids).logits, expected)
        model.set_adapter("second")
        assert not torch.equal(model(input_ids=ids).logits, expected)


@pytest.mark.parametrize(("saved", "name"), [("q_proj", "q_proj"), ("mlp", "mlp"), ("lm_head", "lm_head")])
def test_quantized_modules_cannot_be_trained_whole(build, saved, name):
    model = hf.quantize(build("llama"), "nf4", lm_head="int8_col")
    with pytest.raises(Unsupported, match=rf"modules_to_save=\['{saved}'\] trains whole modules, and .*{name} is quantized"):
        peft.get_peft_model(model, lora(target_modules=["v_proj"], modules_to_save=[saved]))
    assert not any(parameter.requires_grad for parameter in model.lm_head.parameters())
    peft.get_peft_model(hf.quantize(build("llama"), "nf4"), lora(target_modules=["v_proj"], modules_to_save=["lm_head", "norm"]))


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"])
def test_other_kinds_of_adapters_are_refused(build, targets):
    model = hf.quantize(build("llama"), "nf4")
    with pytest.raises(Unsupported, match="peft_type=LOHA: quantized layers take LoRA adapters only"):
        peft.get_peft_model(model, peft.LoHaConfig(target_modules=targets, task_type="CAUSAL_LM"))
    peft.get_peft_model(hf.quantize(build("llama"), "nf4", skip_modules=("v_proj",)), peft.LoHaConfig(target_modules=["v_proj"]))


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
@pytest.mark.parametrize("options", [{"weights": "nf4"}, {"keys": "int8", "values": "int8"}])
def test_prompt_and_prefix_tuning(build, prompt, kind, options):
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model, ids = peft.get_peft_model(hf.quantize(build("llama"), **options), config), prompt()
    made = model.generate(input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    assert made.sequences.shape[1] == ids.shape[1] + 3
    assert isinstance(made.past_key_values, hf.PackedCache) is ("keys" in options and kind == "PromptTuningConfig")
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_other_layers_keep_peft_s_own_adapter(build):
    register_lora()
    register_lora()
    made = peft.get_peft_model(build("llama"), lora())
    assert type(made.base_model.model.model.layers[0].self_attn.q_proj).__name__ == "Linear"
