"""Recurrences of hybrids in few launches: tokens and states of the family's own, in each layer that is one, and in no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import tiny_model
from tiny_models import left_padding

import halfbyte.hf as hf
from halfbyte.hf import fused_forms
from halfbyte.hf.fused_blocks import fused_view
from halfbyte.hf.fused_forms import Recurrence
from halfbyte.hf.structure import close
from watched import watched

#: By families with the gated delta rule: launches for the projections of a token, and weights in each.
FAMILIES = {"qwen3_5_text": [4], "qwen3_5_moe_text": [4], "qwen3_next": [2], "olmo_hybrid": [4, 2]}
STEPS = 6


def packed(family: str, weights: str | None = "int8_col", change: Any = None) -> Any:
    model = tiny_model(family)
    if change is not None:
        change(recurrence(model))
    return hf.quantize(model, weights, keys="int8", values="int8")


def recurrence(model: Any) -> Any:
    return next(m for m in model.modules() if hasattr(m, "A_log"))


def forms(model: Any) -> list[Any]:
    return [form for block in fused_view(model).get_decoder().layers for form, _, _ in block.branches]


def generated(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    settings = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": STEPS, "return_dict_in_generate": True}
    return model.generate(ids, attention_mask=left_padding(ids, 4), **settings, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_states_are_those_of_the_modules(family, prompt, monkeypatch):
    model, ids = packed(family), prompt(3)
    assert sum(isinstance(form, Recurrence) for form in forms(model)) == 1
    plain = generated(model, ids, fuse_blocks=False)
    ran = watched(monkeypatch, fused_forms, "gated_delta", lambda *_, **options: 1)
    projections = watched(monkeypatch, fused_forms, "projected", lambda x, weights, *a: len(weights))
    out = generated(model, ids)
    assert torch.equal(out.sequences, plain.sequences)
    assert len(ran) == STEPS - 1  # the first token is of the prompt's forward
    assert projections[: len(FAMILIES[family])] == FAMILIES[family]
    number = recurrence(model).layer_idx
    mine, theirs = (one.past_key_values.layers[number] for one in (out, plain))
    for kind in ("conv_states", "recurrent_states"):
        torch.testing.assert_close(getattr(mine, kind)[0], getattr(theirs, kind)[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_rounded_where_the_modules_round(dtype, prompt):
    model = hf.quantize(tiny_model("qwen3_5_text").to(dtype), "int8_col", keys="int8", values="int8")
    assert isinstance(forms(model)[0], Recurrence)
    found = {}
    for fused in (False, True):
        cache = hf.PackedCache(model, 64)
        with torch.no_grad():
            model(prompt(2), past_key_values=cache)
            step = fused_view(model) if fused else model
            found[fused] = [step(prompt(2, 1, seed), past_key_values=cache).logits for seed in range(3)]
    assert all(close(*pair) for pair in zip(found[True], found[False], strict=True))


@pytest.mark.parametrize("family", ["qwen3_5_text", "olmo_hybrid"])
def test_projections_of_their_own(family, prompt):
    """In 16 bits; some of them quantized, of which one is in another format."""
    model, ids = packed(family, None), prompt(2)
    assert isinstance(forms(model)[0], Recurrence)
    assert torch.equal(generated(model, ids).sequences, generated(model, ids, fuse_blocks=False).sequences)
    skips = [name for name, m in model.named_modules() if name.rpartition(".")[2] in ("in_proj_a", "a_proj")]
    hf.quantize(model, "int4_g32", skip_modules=skips)
    assert isinstance(forms(model)[0], Recurrence)
    assert torch.equal(generated(model, ids).sequences, generated(model, ids, fuse_blocks=False).sequences)


@pytest.mark.parametrize("case", ["a step", "nothing held", "several tokens", "a mask", "the past is recorded"])
def test_what_is_no_step_runs_as_it_is(case, prompt, monkeypatch):
    model = packed("qwen3_5_text")
    form, module = forms(model)[0], recurrence(model)
    cache, other = (hf.PackedCache(model, 64) for _ in range(2))
    ran = watched(monkeypatch, fused_forms, "gated_delta", lambda *_, **options: 1)
    with torch.no_grad():
        for one in (cache, other) if case != "nothing held" else ():
            model(prompt(2), past_key_values=one)
            if case == "the past is recorded":
                one.activate_past_recording()
        x = torch.randn(2, 3 if case == "several tokens" else 1, 64)
        mask = torch.zeros(2, 1) if case == "a mask" else None
        y, last = form(x, {"past_key_values": cache, "attention_mask": mask})
        y = y if last is None else last(y)
        torch.testing.assert_close(y, module(x, cache_params=other, attention_mask=mask), rtol=1e-4, atol=1e-4)
    assert (len(ran), last is not None) == ((1, True) if case == "a step" else (0, False))
    for kind in ("conv_states", "recurrent_states"):
        mine, theirs = (getattr(one.layers[module.layer_idx], kind)[0] for one in (cache, other))
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


CHANGES = {
    "another activation of the gate": lambda m: setattr(m.norm, "activation", "gelu"),
    "another activation of the convolution": lambda m: setattr(m, "activation", "gelu"),
    "another size of the norm": lambda m: setattr(m.norm, "variance_epsilon", 0.3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_numbers_decide(change, prompt):
    """What computes something else stays its own; eps is read off the module."""
    model, ids = packed("qwen3_5_text", change=CHANGES[change]), prompt(2)
    assert isinstance(forms(model)[0], Recurrence) == (change == "another size of the norm")
    assert torch.equal(generated(model, ids).sequences, generated(model, ids, fuse_blocks=False).sequences)


def test_states_decide(monkeypatch):
    """Of two steps: a state that is not the family's is seen, whatever the result was."""
    model = packed("qwen3_5_text")
    inner = fused_forms.gated_delta

    def forgets(*args: Any) -> torch.Tensor:
        out = inner(*args)
        args[-1].mul_(0.9)
        return out

    monkeypatch.setattr(fused_forms, "gated_delta", forgets)
    assert not isinstance(forms(model)[0], Recurrence)
