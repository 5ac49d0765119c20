"""Steps of whole blocks by compiled loops have the results of the ops one by one, and leave to these what they do not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_hf_fused_blocks import packed, padded

import halfbyte.hf as hf
from halfbyte.cpu import linear as cpu
from halfbyte.cpu.step import BlockStep
from halfbyte.cpu.threads import compiler_works
from halfbyte.errors import CapacityError, InvalidArgument
from halfbyte.hf.fused_blocks import fused_view
from halfbyte.hf.fused_parts import BlockLoops

pytestmark = pytest.mark.skipif(not compiler_works(), reason="loops are compiled by numba: pip install halfbyte[cpu]")
#: Weights, keys and values.
FORMATS = [
    ("int4_g32", "int8_channel", "int8"),
    ("nvfp4", "int4_g32", "bf16"),
    ("nf4", "fp8", "int4"),
    ("int8_col", "int8", "int8_g32"),
]
FAMILIES = ("llama", "llama biases", "qwen2", "qwen3", "phi3", "phi3 partial", "granite", "smollm3", "glm")


@pytest.fixture(params=["tiles", "codes", "fp32"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Of a model: bf16, whose x is multiplied in tiles or by the codes, or fp32."""
    if request.param == "tiles" and not (cpu._amx_works() or cpu._tiles_work()):
        pytest.skip("this CPU has no instructions for bf16")
    if request.param == "codes":
        for name in ("_amx_works", "_tiles_work"):
            monkeypatch.setattr(cpu, name, lambda: False)
    return torch.float32 if request.param == "fp32" else torch.bfloat16


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of a `BlockStep` ran to its end."""
    done: list[bool] = []
    run = BlockStep.__call__

    def seen(*args: Any) -> Any:
        state = run(*args)
        done.append(state is not None)
        return state

    monkeypatch.setattr(BlockStep, "__call__", seen)
    return done


def logits(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Of eight steps."""
    given = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 9, "output_logits": True, "return_dict_in_generate": True}
    found: torch.Tensor = torch.stack(model.generate(ids, **given, **options).logits)
    return found


def by_ops(monkeypatch: pytest.MonkeyPatch, model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(BlockLoops, "__call__", lambda *_: None)
        return logits(model, ids, **options)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_of_the_ops_one_by_one(family, batch, dtype, prompt, steps, monkeypatch):
    """But for norms of heads, whose sums have another order."""
    model, ids = packed(family).to(dtype), prompt(batch)
    given = padded(ids) if batch > 1 else {}
    found = logits(model, ids, **given)
    assert steps == [True] * 8 * model.config.num_hidden_layers
    expected = by_ops(monkeypatch, model, ids, **given)
    near = 0.1 if dtype is torch.bfloat16 else 1e-4
    assert torch.equal(found, expected) or (family == "qwen3" and torch.allclose(found, expected, rtol=near, atol=near))
    assert len(steps) == 8 * model.config.num_hidden_layers


@pytest.mark.parametrize("weights", ["nvfp4", "int8_col"])
def test_as_many_sequences_as_are_multiplied_by_codes(weights, dtype, prompt, steps, monkeypatch):
    """A step of more is of the ops, unless it is in tiles."""
    model = packed("llama", weights).to(dtype)
    for batch in (cpu.SMALL_M, cpu.SMALL_M + 1):
        steps.clear()
        found = logits(model, prompt(batch))
        runs = batch <= cpu.SMALL_M or (dtype is torch.bfloat16 and (cpu._amx_works() or cpu._tiles_work()))
        assert steps == [True] * 16 * runs
        assert torch.equal(found, by_ops(monkeypatch, model, prompt(batch)))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("weights", "keys", "values"), FORMATS)
def test_formats(weights, keys, values, fused, dtype, prompt, steps, monkeypatch):
    options = {"fuse_qkv": fused, "fuse_gate_up": fused}
    model = packed("llama", weights, keys=keys, values=values, **options).to(dtype)
    for ids in (prompt(1), prompt(2)):
        steps.clear()
        found = logits(model, ids)
        assert steps == [True] * 16
        assert torch.equal(found, by_ops(monkeypatch, model, ids))


def test_more_tokens_than_a_split(dtype, prompt, steps, monkeypatch):
    """Partial results take other memory from there on."""
    model, ids = packed("llama").to(dtype), prompt(1).repeat(1, 49)[:, :1020]
    found = logits(model, ids)
    assert steps == [True] * 16
    assert torch.equal(found, by_ops(monkeypatch, model, ids))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mistral", {}),  # a window
        ("llama", {"skip_modules": ("k_proj",)}),
        ("llama", {"keys": "int8_tensor"}),
    ],
)
def test_what_the_loops_do_not_take(family, options, prompt, steps):
    model, ids = packed(family, **options).to(torch.bfloat16), prompt(1)
    logits(model, ids)
    assert not any(steps)


def test_values_that_are_rotated_are_left_to_the_ops(prompt, steps):
    model, ids = packed("llama").to(torch.bfloat16), prompt(1)
    logits(model, ids, past_key_values=hf.PackedCache(model, 64, values="int4_g32", rotate_values=True))
    assert not steps


def test_weights_that_are_written_to(dtype, prompt, steps, monkeypatch):
    """nvfp4 has a scale of the whole weight, which a step copies."""
    model, ids = packed("llama", "nvfp4").to(dtype), prompt(1)
    cache = hf.PackedCache(model, 64, keys="int8", values="int8")
    found = []
    with torch.no_grad():
        model(ids, past_key_values=cache)
        view = fused_view(model)
        for is_written in (False, True):
            if is_written:
                model.model.layers[1].mlp.down_proj.weight_tensor_scale.mul_(2)
            view(ids[:, -1:], past_key_values=cache)
            cache.crop(-1)
            found.append(view(ids[:, -1:], past_key_values=cache).logits.clone())
            cache.crop(-1)
            with monkeypatch.context() as patch:
                patch.setattr(BlockLoops, "__call__", lambda *_: None)
                assert torch.equal(view(ids[:, -1:], past_key_values=cache).logits, found[-1])
            cache.crop(-1)
    assert steps == [True] * 8
    assert not torch.equal(*found)


def test_errors_are_those_of_the_ops(dtype, prompt, steps):
    model, ids = packed("llama").to(dtype), prompt(1)
    cache = hf.PackedCache(model, 64, keys="int8", values="int8")
    with torch.no_grad():
        model(ids, past_key_values=cache)
        view = fused_view(model)
        with pytest.raises(InvalidArgument, match="NaN or infinite"):
            view(inputs_embeds=torch.full((1, 1, 64), torch.nan, dtype=dtype), past_key_values=cache)
        cache.restore()
        for _ in range(cache.capacity - int(cache.get_seq_length())):
            view(ids[:, -1:], past_key_values=cache)
        with pytest.raises(CapacityError, match="past_key_values"):
            view(ids[:, -1:], past_key_values=cache)
    assert steps.count(False) == 2
    assert int(cache.get_seq_length()) == cache.capacity


def test_a_profile_names_what_loops_run(prompt, steps):
    model, ids = packed("llama").to(torch.bfloat16), prompt(1)
    logits(model, ids)
    steps.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        logits(model, ids)
    assert steps
    assert all(steps)
    assert {"halfbyte::linear", "halfbyte::append_", "halfbyte::decode_attention"} <= {
        event.key for event in profile.key_averages()
    }
