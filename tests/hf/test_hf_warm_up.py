"""A conversation compiles nothing: the first call compiles every variant that others take. On a pretended H200."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers as tf
from families import tiny_config, tiny_model
from tiny_models import left_padding

import halfbyte.hf as hf
from command_line import refusal, run
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.hf import graph_generate, rehearsal
from halfbyte.hf.fused_blocks import fused_view, why_not_fused
from halfbyte.kernels.compiling import parallel
from halfbyte.ops.compiling import active, compiling_only
from pretended_gpu import pretend_compiler, pretend_levels

pytest.importorskip("triton")

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
#: Formats, and more options of `hf.quantize`.
CASES: dict[str, dict[str, Any]] = {
    "int4": {"weights": "int4_g128", "keys": "int8", "values": "int4_g32", "fuse_qkv": True, "fuse_gate_up": True},
    "default formats": {"weights": "nvfp4", "keys": "int8_channel", "values": "int8"},
    "rotated, output layer": {"weights": "nf4", "keys": "int4", "values": "int4", "rotate_values": True, "lm_head": "int8_col"},
    "mixture": {"weights": "int4_g128", "keys": "int8", "values": "int4_g32", "fuse_qkv": True},
}
#: Families of configurations, and sizes of their own.
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "default formats": (tf.Qwen3Config, {}),
    "mixture": (tf.Qwen3MoeConfig, {"moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4}),
}


def quantized(case: str) -> Any:
    torch.manual_seed(0)
    family, sizes = FAMILIES.get(case, (tf.LlamaConfig, {}))
    config = family(**SIZES, **sizes, tie_word_embeddings=False)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    return hf.quantize(model, **CASES[case])


def call(model: Any, batch: int, tokens: int, new: int = 3, padding: int = 0, **options: Any) -> None:
    ids = torch.ones(batch, tokens, dtype=torch.long)
    mask = left_padding(ids, padding)
    model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0, **options)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """pretend(model): from now on it runs on an H200 with an empty cache of kernels, where no process may be started.

    New memory holds NaN and the largest integers, as results of launches that only compile may.
    """

    def begin(model: Any) -> None:
        assert fused_view(model) is not None  # by its numbers, which are none on a pretended GPU
        pretend_compiler(monkeypatch)
        pretend_levels(monkeypatch)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=141 << 30))
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(parallel, "cores", lambda: 1)
        monkeypatch.setattr(parallel, "_begun", [])
        monkeypatch.setattr(parallel, "_open", [])
        monkeypatch.setattr(rehearsal, "_why_not", lambda model, seen: "")
        monkeypatch.setattr(rehearsal, "cores", lambda: 8)
        monkeypatch.setattr(rehearsal, "stamp_of", lambda *facts: tmp_path / "all")
        monkeypatch.setattr(rehearsal, "_LONG", 2**13)
        monkeypatch.setattr(graph_generate, "records_prompts", lambda prompts: True)
        note = graph_generate._Loop._note_nan  # which raises for what no kernel writes, but not where kernels are only compiled
        monkeypatch.setattr(graph_generate._Loop, "_note_nan", lambda *given: note(*given) if active() else None)
        torch.use_deterministic_algorithms(True, warn_only=True)

    yield begin
    torch.use_deterministic_algorithms(False)


def variants(ahead: parallel.Ahead) -> dict[Path, str]:
    return {job.stamp: str(job.variant[:400]) for job in ahead.jobs}


def chat(model: Any) -> None:
    """Turns of a conversation over a cache of its own."""
    cache = hf.PackedCache(model, 4096, **{name: CASES["int4"][name] for name in ("keys", "values")})
    for tokens in (300, 45, 7, 1030, 12):
        model(input_ids=torch.ones(1, tokens, dtype=torch.long), past_key_values=cache, use_cache=True, logits_to_keep=1)


@torch.no_grad()
@pytest.mark.parametrize("case", ["int4", *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case != "int4")])
def test_a_conversation_compiles_nothing(case: str, pretend: Any) -> None:
    """Neither prompts of nine lengths, in batches of all sizes, nor later turns."""
    model = quantized(case)
    pretend(model)
    call(model, 1, 20)
    (ahead,) = parallel._begun
    known = variants(ahead)
    assert len(known) > 40
    cases = [(1, 9), (1, 33), (1, 100), (2, 61), (3, 128), (4, 257), (7, 700), (16, 40), (1, 3000)]
    with compiling_only(wait=False) as later:
        for batch, tokens in cases:
            for padding in (0, 5) if batch > 1 else (0,):
                call(model, batch, tokens, padding=padding)
                assert variants(later).keys() <= known.keys(), (batch, tokens, padding, {**variants(later), **known})
        if case == "int4":
            chat(model)
    assert later.jobs
    assert variants(later).keys() <= known.keys()
    assert (parallel._begun, parallel._open) == ([ahead], [later])  # and no call began another


@pytest.mark.slow
def test_a_large_batch_and_other_weights_are_compiled_for(pretend: Any) -> None:
    """A call with more sequences than others, and one of a model whose weights have moved; each once."""
    model = quantized("int4")
    pretend(model)
    for _ in range(2):
        call(model, 1, 20)
        call(model, 33, 20)
    small, large = parallel._begun
    assert variants(large).keys() - variants(small).keys()
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    call(model, 1, 20)
    assert len(parallel._begun) == 3


def test_what_an_earlier_process_compiled_is_not_rehearsed(pretend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized("int4")
    pretend(model)
    (tmp_path / "all").touch()
    monkeypatch.setattr(rehearsal._Rehearsal, "run", None)
    call(model, 1, 20)
    assert not parallel._begun


def test_where_the_rehearsal_fails_launches_compile(pretend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized("int4")
    pretend(model)
    monkeypatch.setattr(rehearsal._Rehearsal, "run", Mock(side_effect=RuntimeError("other inputs")))
    with pytest.warns(UserWarning, match="one by one, and not ahead: other inputs"):
        call(model, 1, 20)
    assert not parallel._begun


@torch.no_grad()
@pytest.mark.parametrize(
    "family", ["deepseek_v3", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gpt_oss", "mimo_v2_flash", "qwen3_5_text"))]
)
def test_rehearsals_of_a_family_run(family: str, pretend: Any) -> None:
    """Latents, whose matrices are products that nobody computes; mixtures; values of fewer dims than keys; a recurrence."""
    model = hf.quantize(tiny_model(family).to(torch.bfloat16), "nvfp4", keys="int8", values="int8")
    pretend(model)
    ahead, _ = rehearsal._begin(model, [rehearsal.Prompts(1, 9, 64)], 16, fuse_blocks=True)
    assert ahead is not None
    assert ahead.jobs


@torch.no_grad()
@pytest.mark.parametrize("kinds", [("linear_attention", "full_attention"), ("full_attention", "linear_attention")])
def test_blocks_of_a_rehearsal_get_what_their_kind_takes(kinds: tuple[str, str]) -> None:
    """Masks go by a block's place in the whole model: of states 2-D, of a packed cache where texts start."""
    config = tiny_config("qwen3_5_text")
    config.layer_types = [kinds[0]] * 3 + [kinds[1]] + [kinds[0], kinds[1]]
    config.num_hidden_layers = len(config.layer_types)
    model = hf.quantize(tf.AutoModelForCausalLM.from_config(config).eval(), keys="int8", values="int8")
    small = rehearsal._Rehearsal(model, fuse_blocks=True).model
    kept = [layer.block_type for layer in small.model.layers]
    assert kept == [kinds[0], kinds[1], kinds[0], kinds[1]]
    ids = torch.ones(2, 5, dtype=torch.long)
    small(ids, attention_mask=left_padding(ids, 2), past_key_values=hf.PackedCache(model, 64))
    assert why_not_fused(small) == [""] * 4


@torch.no_grad()
@pytest.mark.parametrize("family", ["zamba", "zamba2"])
def test_blocks_of_a_rehearsal_are_told_their_place(family: str) -> None:
    """Zamba counts its blocks and tells each its number: then keys went to a layer with a state."""
    config = tiny_config(family)
    config.layers_block_type = ["linear_attention"] * 2 + ["hybrid", "linear_attention", "hybrid", "linear_attention", "hybrid"]
    config.layer_types = list(config.layers_block_type)
    config.num_hidden_layers, config.hybrid_layer_ids = 7, [2, 4, 6]
    model = hf.quantize(tf.AutoModelForCausalLM.from_config(config).eval(), keys="int8", values="int8")
    small, cache = rehearsal._Rehearsal(model, fuse_blocks=True).model, hf.PackedCache(model, 64)
    assert len(small.model.layers) == 4
    for tokens in (5, 1, 1):
        small(torch.ones(2, tokens, dtype=torch.long), past_key_values=cache)
    assert [n for n, layer in enumerate(cache.layers) if layer in cache.packed and layer.kv is not None] == [2, 6]
    assert not any("cannot be read" in reason for reason in why_not_fused(small))


def test_a_model_that_cannot_be_compiled_for_says_why() -> None:
    with pytest.raises(Unsupported, match="kernels are not compiled ahead: the model is not on one GPU"):
        hf.warm_up(quantized("int4"))
    with pytest.raises(InvalidArgument, match="batch=0"):
        hf.warm_up(None, batch=0)


def test_the_command_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert "warmup compiles kernels for the GPU of this machine, and torch finds none" in refusal(capsys, "warmup", "demo")


@pytest.mark.parametrize("weights", ["int4_g32", "bf16"])
def test_the_command_needs_a_configuration_alone(
    weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of it has the first and the last block of each kind, in the formats that were named."""
    models: list[Any] = []

    def compiled(model: Any, batch: int) -> rehearsal.Compiled:
        models.append((batch, [type(m).__name__ for m in model.model.layers[1].self_attn.children()]))
        assert model.generate.settings.keys == "int8"
        assert len({id(layer) for layer in model.model.layers}) == 2
        assert all(p.isfinite().all() for p in model.parameters() if p.is_floating_point())
        return rehearsal.Compiled(3, 2.0, "/cache")

    here = SimpleNamespace(kind="cuda", torch=torch.device("cpu"), name="a GPU")
    monkeypatch.setattr("halfbyte.device.describe", lambda device: here)
    monkeypatch.setattr(hf, "warm_up", compiled)
    tf.LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    assert run("warmup", str(tmp_path), "--weights", weights, "--keys", "int8", "--batch", "4") == 0
    if weights == "bf16":
        assert models == [(4, ["Linear"] * 4)]
    else:
        plain, fused = ["QuantLinear"] * 4, ["FusedProjections", "FusedSlot", "FusedSlot", "QuantLinear"]
        assert models == [(4, plain), (4, fused)]
    expected = f"compiled {3 * len(models)} kernels in {2 * len(models)} s for a GPU, in /cache"
    assert " ".join(capsys.readouterr().out.split()).endswith(expected)


def test_tokens_of_a_replayed_prompt_are_no_beginning() -> None:
    """The first step behind a recorded prompt, which runs no Python of the cache, reads its token as it is stored."""
    cache = hf.PackedCache(quantized("int4"), 64, keys="int8", values="int8")
    layer = cache.packed[0]
    k = torch.randn(1, 2, 3, 128, dtype=torch.bfloat16)
    layer.update(k, k)
    assert layer.begins
    cache.reset()
    cache.expect_replays(True)
    layer.update(k, k)
    assert not layer.begins
