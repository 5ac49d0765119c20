"""The blocks of a decoder in few launches, the same tokens.

On a CPU the fused ops are torch code in the modules' order of rounding, and what is tested is how a block is put together; the
kernels themselves are in tests/interpreted/.
"""

from __future__ import annotations

import copy
import functools
import re
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers as tf
from families import tiny_config, tiny_model
from tiny_models import CONFIGS, LLAMA, left_padding
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import halfbyte.hf as hf
from halfbyte import KVCache
from halfbyte.errors import InvalidArgument
from halfbyte.hf import fused_blocks, fused_forms, fused_parts
from halfbyte.hf.fused_blocks import FusedBlock, fused_view, why_not_fused
from halfbyte.hf.recorded_step import kept_steps
from halfbyte.hf.structure import norm_of
from halfbyte.ops import block_linear
from watched import watched

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "transformers.md"
CACHE = {"keys": "int8", "values": "int4_g32"}
#: By their sizes in `families.py`.
LIKE_LLAMA = (
    *("apertus", "arcee", "aria_text", "cwm", "dots1", "emu3", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo"),
    *("gemma", "glm", "glm4", "glm4_moe", "granite_swa", "granitemoe", "helium", "hy_v3", "hyperclovax", "mellum", "minimax_m2"),
    *("ministral", "mixtral", "olmoe", "phi4_multimodal", "qwen2_moe", "qwen3_moe", "seed_oss", "solar_open", "vaultgemma"),
)


def _changed(config: Any, **settings: Any) -> Any:
    vars(config).update(settings)
    return config


DESCRIBED: dict[str, Any] = {
    **{name: CONFIGS[name] for name in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "gpt_oss")},
    "granite": lambda: tf.GraniteConfig(
        **LLAMA, residual_multiplier=0.22, attention_multiplier=0.1, embedding_multiplier=3.0, logits_scaling=2.0
    ),
    "olmo2": lambda: tf.Olmo2Config(**LLAMA),
    "olmo3": lambda: tf.Olmo3Config(**LLAMA, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "gemma3_text": lambda: tf.Gemma3TextConfig(
        **{**LLAMA, "num_hidden_layers": 3},
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        tie_word_embeddings=False,
    ),
    **{name: functools.partial(tiny_config, name) for name in LIKE_LLAMA},
    "smollm3": lambda: tf.SmolLM3Config(**{**LLAMA, "num_hidden_layers": 4, "pad_token_id": 0}, no_rope_layer_interval=2),
    "phi3 partial": lambda: tf.Phi3Config(**LLAMA, pad_token_id=0, partial_rotary_factor=0.5),
    "hyperclovax without norms": lambda: _changed(tiny_config("hyperclovax"), use_post_norm=False),
    "exaone4 windows": lambda: tf.Exaone4Config(
        **{**LLAMA, "num_hidden_layers": 4}, sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "olmoe clipped": lambda: _changed(tiny_config("olmoe"), clip_qkv=0.5),
    "llama biases": lambda: tf.LlamaConfig(**{**LLAMA, "num_key_value_heads": 4}, attention_bias=True, mlp_bias=True),
}


@functools.cache
def base(family: str) -> Any:
    torch.manual_seed(3)
    config = DESCRIBED[family]()
    config.initializer_range = 0.3
    config.eos_token_id = None
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or name.endswith(("bias", "sinks")):
                p.add_(0.3 * torch.randn(p.shape))  # norms are 1 or 0 otherwise
    model.generation_config.eos_token_id = None
    return model


def packed(family: str, weights: str | None = "int4_g32", **options: Any) -> Any:
    return hf.quantize(copy.deepcopy(base(family)), weights, **{**CACHE, **options})


def tokens(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    given = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 20}
    found: torch.Tensor = model.generate(ids, **{**given, **options})
    return found


def padded(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"attention_mask": left_padding(ids, 5)}


@pytest.fixture(autouse=True)
def _op_by_op(monkeypatch):
    """As on a GPU: on a CPU compiled loops take the place of ops, and have tests of their own."""
    monkeypatch.setattr(fused_parts.BlockLoops, "__call__", lambda *_: None)


@pytest.fixture
def blocks_ran(monkeypatch: pytest.MonkeyPatch) -> list[FusedBlock]:
    """The fused blocks that were called."""
    return watched(monkeypatch, FusedBlock, "forward", lambda block, *_, **options: block)


def forms(model: Any) -> list[list[str]]:
    """By fused block: how its branches are computed."""
    view = fused_view(model)
    return [[type(form).__name__ for form, _, _ in m.branches] for m in view.modules() if isinstance(m, FusedBlock)]


#: Whose MLPs have no gate; and those of every layer, or of all but the first, are mixtures.
UNGATED = ("apertus", "arcee")
MIXTURES = (
    *("aria_text", "flex_olmo", "gpt_oss", "granitemoe", "minimax_m2", "mixtral"),
    *("olmoe", "olmoe clipped", "qwen2_moe", "qwen3_moe"),
)
LATER_MIXTURES = ("dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "hy_v3", "mellum", "solar_open")


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("family", DESCRIBED)
def test_every_block_of_these_families_is_fused(family):
    found = forms(packed(family, weights=None))
    assert len(found) == base(family).config.num_hidden_layers
    assert {attention for attention, _ in found} == {"AsItIs" if "clipped" in family else "Heads"}
    mlps = {mlp for _, mlp in found}
    if family in (*UNGATED, *MIXTURES):
        assert mlps == {"AsItIs"}
    elif family not in LATER_MIXTURES:
        assert mlps == {"GatedMlp"}


#: Families whose blocks came in without a word about them: convolutions and other recurrences are called as they are.
HYBRIDS = {
    "qwen3_5_text": [["Recurrence", "GatedMlp"], ["Heads", "GatedMlp"]],
    "qwen3_next": [["Recurrence", "AsItIs"], ["Heads", "AsItIs"]],
    "granitemoehybrid": [["AsItIs", "AddedForms"], ["Heads", "AddedForms"]],
    "nemotron_h": [["AsItIs"], ["AsItIs"], ["Heads"], ["AsItIs"]],
    "lfm2": [["AsItIs", "GatedMlp"], ["Heads", "GatedMlp"]],
    "bamba": [["AsItIs", "GatedMlp"], ["Heads", "GatedMlp"]],
    "olmo_hybrid": [["Recurrence", "GatedMlp"], ["Heads", "GatedMlp"]],
    "mimo_v2_flash": [["AsItIs", "GatedMlp"], ["AsItIs", "AsItIs"]],
    "ministral3": [["Heads", "GatedMlp"]] * 2,
    "afmoe": [["AsItIs", "GatedMlp"], ["AsItIs", "AsItIs"]],
}


@pytest.mark.slow(sample=3)
@pytest.mark.parametrize("family", HYBRIDS)
def test_other_families_are_fused_around_what_is_their_own(family, prompt, blocks_ran):
    model, ids = hf.quantize(tiny_model(family), **CACHE), prompt(2)
    assert forms(model) == HYBRIDS[family]
    assert torch.equal(tokens(model, ids, **padded(ids)), tokens(model, ids, fuse_blocks=False, **padded(ids)))
    assert blocks_ran


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", DESCRIBED)
def test_the_same_tokens(family, batch, prompt, blocks_ran):
    model, ids = packed(family), prompt(batch)
    given = padded(ids) if batch > 1 else {}
    plain = tokens(model, ids, fuse_blocks=False, **given)
    assert not blocks_ran
    (step,) = kept_steps(model)
    assert torch.equal(tokens(model, ids, **given), plain)
    assert torch.equal(tokens(model, ids, **given), plain)  # by the step that was kept
    assert kept_steps(model) == [step]
    assert len(step.forwards) == 2  # of plain blocks, and of fused ones
    assert len(blocks_ran) == 2 * 19 * model.config.num_hidden_layers  # the first token is the prompt's
    assert len(set(plain[:, 21:].flatten().tolist())) > 5


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("family", DESCRIBED)
def test_hidden_states_within_the_promise_in_16_bits(family, prompt):
    """Against the same weights and cache in 32 bits, the error is at most twice that of the plain modules."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model, ids = packed(family).to(dtype), prompt(2)
        for fused in (False, True):
            cache = hf.PackedCache(model, 64, **CACHE)
            with torch.no_grad():
                model(ids[:, :-1], past_key_values=cache)
                step = fused_view(model) if fused else model
                found[dtype, fused] = step(ids[:, -1:], past_key_values=cache).logits.double()
    truth = found[torch.float32, False]
    assert torch.allclose(found[torch.float32, True], truth, rtol=1e-4, atol=1e-4 * float(truth.abs().max()))
    plain, fused = ((found[torch.bfloat16, which] - truth).norm() for which in (False, True))
    assert fused < 2 * plain


@pytest.mark.parametrize(
    "options", [{"fuse_qkv": True, "fuse_gate_up": True}, {"weights": None}, {"skip_modules": ("k_proj", "up_proj")}]
)
def test_projections_fused_quantized_or_not(options, prompt, blocks_ran):
    model, ids = packed("llama", **options), prompt(2)
    assert torch.equal(tokens(model, ids), tokens(model, ids, fuse_blocks=False))
    assert blocks_ran


def test_one_launch_for_the_projections_of_one_input(prompt, monkeypatch):
    calls = []
    for owner, name in ((fused_forms, "projected"), (fused_parts, "gated_projection")):
        watched(monkeypatch, owner, name, lambda x, weights, *_, name=name: calls.append((name, len(weights))))
    model = packed("qwen3")
    fused_view(model)
    calls.clear()
    tokens(model, prompt(1), max_new_tokens=2)
    assert calls == [("projected", 3), ("gated_projection", 2)] * 2


def test_a_view_changes_nothing(prompt):
    model = packed("gemma2")
    modules, keys = dict(model.named_modules()), list(model.state_dict())
    view = fused_view(model)
    assert view.model.embed_tokens is model.model.embed_tokens
    assert view.lm_head is model.lm_head
    assert all(isinstance(block, FusedBlock) for block in view.model.layers)
    assert dict(model.named_modules()) == modules
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_a_family_with_other_blocks_runs_as_before_and_says_nothing(build, family, prompt):
    model, ids = hf.quantize(build(family), "int4_g32", **CACHE), prompt(2)
    assert fused_view(model) is None
    assert all("not branches one after the other" in reason for reason in why_not_fused(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(tokens(model, ids), tokens(model, ids, fuse_blocks=False))


def test_whoever_watches_or_changes_a_forward_keeps_the_plain_blocks(prompt):
    model, seen = packed("llama"), []
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *a: seen.append(1))
    assert fused_view(model) is None
    tokens(model, prompt(1), max_new_tokens=3)
    assert len(seen) == 3
    hook.remove()
    assert fused_view(model) is not None
    model.model.forward = model.model.forward  # as accelerate does it
    assert fused_view(model) is None
    del model.model.forward
    norm = model.model.layers[0].input_layernorm
    norm.forward = functools.partial(norm.forward)  # which has no name
    assert fused_view(model) is None
    del norm.forward
    assert fused_view(model.train()) is None


def changed(model: Any, path: str, forward: Any) -> Any:
    """The model with another forward in the class of one of its modules."""
    module = model.get_submodule(path)
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": lambda self, *a, **k: forward(self, kind.forward, *a, **k)})
    return model


def test_a_block_is_fused_if_it_gives_the_numbers_whoever_wrote_it():
    model = packed("llama", weights=None)
    first = type(model.model.layers[0])
    model.model.layers[0].__class__ = type("Mine", (first,), {"__module__": "somewhere.modeling"})
    assert why_not_fused(model) == ["", ""]
    changed(model, "model.layers.1", lambda self, forward, hidden, **k: 1.1 * forward(self, hidden, **k))
    hf.quantize(model, "int4_g32")  # other weights: read anew
    assert why_not_fused(model)[0] == ""
    assert "its result is not the sum" in why_not_fused(model)[1]


@pytest.mark.parametrize("name", ["readings", "structure_of"])
def test_memory_that_is_short_decides_nothing(name, prompt, monkeypatch):
    """It is raised, and the next call fuses the blocks."""
    model, ids = packed("llama"), prompt(1)
    with monkeypatch.context() as patch:
        patch.setattr(fused_blocks, name, Mock(side_effect=torch.OutOfMemoryError("no room")))
        with pytest.raises(torch.OutOfMemoryError):
            fused_view(model)
    assert tokens(model, ids) is not None
    assert why_not_fused(model) == [""] * 2


def test_an_mlp_that_clamps_large_numbers_stays_its_own():
    model = packed("llama", weights=None)
    changed(model, "model.layers.0.mlp.act_fn", lambda self, forward, x: forward(self, x).clamp(max=40))
    assert forms(model) == [["Heads", "AsItIs"], ["Heads", "GatedMlp"]]


def test_attention_that_scales_queries_of_late_positions_stays_its_own():
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 64}
    config = tiny_config("ministral3")
    config.rope_parameters = {**(config.rope_parameters or {}), **rope}
    model = hf.quantize(tf.AutoModelForCausalLM.from_config(config).eval(), **CACHE)
    assert forms(model) == [["AsItIs", "GatedMlp"]] * 2


def test_numbers_that_agree_for_some_weights_only_are_read_anew():
    """HunYuan normalizes heads behind the rotation, which is the same as before it while weights of norms are 1."""
    model = hf.quantize(tiny_model("hunyuan_v1_dense"), **CACHE)
    assert forms(model) == [["Heads", "GatedMlp"]] * 2
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    assert forms(model) == [["AsItIs", "GatedMlp"]] * 2


class Wrapped(torch.nn.Module):
    """A module whose results are changed, without a weight of its own, as steering and ablation do it."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        return (3 * out[0], *out[1:]) if isinstance(out, tuple) else 3 * out


#: Changes of a model that move no weight: (part of a block, attribute, its new value from the old).
CHANGES: dict[str, tuple[str, str, Any]] = {
    "an MLP": ("", "mlp", Wrapped),
    "attention": ("", "self_attn", Wrapped),
    "a layer of a fused branch": ("mlp", "down_proj", Wrapped),
    "an activation": ("mlp", "act_fn", lambda old: torch.nn.Sigmoid()),
    "a number of a norm": ("input_layernorm", "variance_epsilon", lambda old: 500.0),
    "a number of a router": ("mlp.gate", "top_k", lambda old: 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_replaced_after_a_call_is_used_by_the_next(change, prompt):
    path, name, value = CHANGES[change]
    model, ids = packed("qwen3_moe" if "router" in change else "llama"), prompt(2)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    before = model.generate(ids, **options)
    owner = model.model.layers[1].get_submodule(path)
    setattr(owner, name, value(getattr(owner, name)))
    tokens = model.generate(ids, **options)
    assert torch.equal(tokens, model.generate(ids, fuse_blocks=False, **options))
    assert not torch.equal(tokens, before)
    assert torch.equal(tokens, model.generate(ids, **options))
    assert len(kept_steps(model)) == 1


@pytest.mark.parametrize("family", ["llama", "olmo2", "gemma2"])
def test_kinds_of_norms_are_told_apart_in_16_bits(family):
    norm = base(family).to(torch.bfloat16).model.norm
    base(family).float()
    kind = {"llama": "rounded", "olmo2": "exact", "gemma2": "offset"}
    assert norm_of(copy.deepcopy(norm).bfloat16()).kind == kind[family]
    assert norm_of(torch.nn.LayerNorm(8)) is None


def test_an_error_in_a_step_leaves_a_cache_that_can_be_restored(prompt):
    """Positions are rotated and appended in one call, which is checked like any other."""
    model, ids = packed("llama"), prompt(1)
    cache = hf.PackedCache(model, 64, **CACHE)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        view = fused_view(model)
        with pytest.raises(InvalidArgument, match="NaN or infinite"):
            view(inputs_embeds=torch.full((1, 1, 64), torch.nan), past_key_values=cache)
    cache.restore()
    assert int(cache.get_seq_length()) == 21


class Launches(TorchDispatchMode):
    """The ops that a GPU would launch something for: neither views nor empty tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aliases = [result.alias_info for result in func._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in aliases)
        if not (view or "empty" in func._schema.name or "_unsafe_view" in func._schema.name):
            self.names.append(func.name().split("::")[1].split(".")[0])
        return func(*args, **(kwargs or {}))


#: Launches of one block in a decode step: of the modules one by one, with fused projections where a family has several; fused,
#: with a launch for each op of `halfbyte.ops.block`; and where projections do what surrounds them.
LAUNCHES = {
    **dict.fromkeys(("llama", "cwm", "emu3", "ministral", "seed_oss", "mistral", "qwen2", "smollm3"), (36, 9, 6)),
    **dict.fromkeys(("phi3", "phi3 partial", "phi4_multimodal", "granite"), (38, 9, 6)),
    "arcee": (36, 10, 9),
    "exaone4": (52, 9, 8),
    "ernie4_5": (44, 9, 6),
    **dict.fromkeys(("gemma", "glm", "helium", "vaultgemma"), (40, 9, 6)),
    "glm4": (56, 9, 8),
    "hyperclovax": (54, 9, 8),
    "gemma2": (60, 9, 8),
    "qwen3": (52, 9, 6),
    **dict.fromkeys(("olmo2", "olmo3"), (54, 10, 9)),
    "gemma3_text": (80, 9, 8),
}


def test_the_guide_says_how_many_launches():
    rows = re.findall(r"^\| ([a-z0-9_, ]+) \| (\d+) \| (\d+) \| (\d+) \|$", GUIDE.read_text(), re.MULTILINE)
    said = {family: tuple(map(int, counts)) for families, *counts in rows for family in families.split(", ")}
    assert said == {family.removesuffix("_text"): counts for family, counts in LAUNCHES.items() if " " not in family}


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("family", LAUNCHES)
def test_launches_of_a_block(family, tuned, prompt, monkeypatch):
    """Registered ops of halfbyte are one launch each; so are an append and the ops around projections, which are not registered."""

    def as_one(owner, name):
        inner = getattr(owner, name)

        def run(*args, **kwargs):
            torch.zeros(1)  # counted
            with _disable_current_modes():
                return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    def counted(owner):
        forward = owner.forward

        def run(self, *args, **kwargs):
            with Launches() as launches:
                out = forward(self, *args, **kwargs)
            found.append(len(launches.names))
            return out

        monkeypatch.setattr(owner, "forward", run)

    own = family.startswith("phi")  # whose projections are fused in the checkpoint
    model, found = packed(family, fuse_qkv=not own, fuse_gate_up=not own).bfloat16(), []
    view = fused_view(model)
    owners = [(fused_blocks, "add_norm"), (fused_blocks, "norm_rows"), (fused_parts, "norm_rows"), (fused_parts, "gated")]
    for owner, name in owners:
        as_one(owner, name)
        if not tuned:
            as_one(block_linear, name)
    tuned_ops = [(fused_blocks, "add_projection"), (fused_forms, "projected"), (fused_parts, "gated_projection")]
    for owner, name in tuned_ops if tuned else ():
        as_one(owner, name)
    as_one(KVCache, "append")
    cache = hf.PackedCache(model, 64, **CACHE)
    ids = prompt(2)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        counted(type(model.model.layers[0]))
        counted(FusedBlock)
        for step in (model, view):
            step(ids[:, -1:], past_key_values=cache)
    layers = model.config.num_hidden_layers
    which = -2 if family == "smollm3" else -1  # the last of its layers has no positions
    modules, *fused = LAUNCHES[family]
    assert (found[:layers][which], found[layers:][which]) == (modules, fused[tuned])
    assert found[layers] <= fused[tuned] + 3  # the first block normalizes its own input, and makes cos and sin for all
