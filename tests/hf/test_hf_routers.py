"""Routers of mixtures in two launches: which families have them, what is read off them, and the same tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import tiny_config, tiny_model, uneven
from test_hf_fused_blocks import Launches
from torch import nn
from transformers.models.axk2.modeling_axk2 import AXK2TopkRouter
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashTopkRouter
from transformers.models.mistral4.modeling_mistral4 import Mistral4TopkRouter
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

import halfbyte.hf as hf
from halfbyte.hf import routers
from halfbyte.hf.fused_blocks import fused_view
from halfbyte.hf.routers import FusedRouter, Routers
from halfbyte.hf.structure import Call
from halfbyte.reference.route import Routing
from watched import watched

CACHE = {"keys": "int8", "values": "int4_g32"}
SUM, SIGMOID = Routing(2, "softmax", 1e-20), Routing(2, "sigmoid", 1e-20)
GROUPS = Routing(8, "sigmoid", 1e-20, 1.0, 8, 1, 2)
#: By the sizes in `families.py`: what each family's router computes.
FAMILIES: dict[str, Routing] = {
    **dict.fromkeys(("flex_olmo", "jamba", "olmoe", "qwen2_moe", "qwen3_moe", "deepseek_v2"), Routing(2, "softmax")),
    **dict.fromkeys(("aria_text", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"), SUM),
    **dict.fromkeys(("hunyuan_v1_moe", "mellum", "mixtral", "qwen3_5_moe_text", "qwen3_next", "mistral4", "qwen3_vl_moe"), SUM),
    **dict.fromkeys(("ernie4_5_moe", "ernie4_5_vl_moe"), SUM._replace(eps=1e-12)),
    **dict.fromkeys(("afmoe", "glm4_moe", "laguna", "mimo_v2_flash", "minimax_m2", "nemotron_h", "solar_open"), SIGMOID),
    **dict.fromkeys(("axk1", "deepseek_v3", "exaone_moe", "kimi_k25"), SIGMOID._replace(scale=2.5)),
    "dots1": Routing(2, "sigmoid"),
    "glm4_moe_lite": SIGMOID._replace(scale=1.8),
    "hy_v3": SIGMOID._replace(scale=2.826),
    "lfm2_moe": SIGMOID._replace(eps=1e-6),
    "bailing_hybrid": GROUPS._replace(scale=2.5),
    "kimi_linear": Routing(8, "sigmoid", 1e-20, 2.446),
}
#: Families whose mixtures keep their own router: it computes something else, or their blocks are not fused at all.
OTHERS = ("kolibri1", "cohere2_moe", "llama4_text", "longcat_flash", "phimoe", "zaya")


def fused_routers(model: Any) -> list[FusedRouter]:
    """The routers of a model's fused view, also of those of its blocks' branches that are no modules."""
    if (view := fused_view(model)) is None:
        return []
    forms = [form for block in view.modules() for form, _, _ in getattr(block, "branches", ())]
    branches = [getattr(one, "module", None) for form in forms for one in getattr(form, "forms", [form])]
    return [m for branch in branches if branch is not None for m in branch.modules() if isinstance(m, FusedRouter)]


def tokens(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(ids, do_sample=False, pad_token_id=0, max_new_tokens=12, **options)
    return found


@pytest.mark.slow(sample=6)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_by_fused_routers(family: str, prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = watched(monkeypatch, FusedRouter, "forward")
    model, ids = hf.quantize(tiny_model(family), **CACHE), prompt(2)
    fused = fused_routers(model)
    assert {router.routing for router in fused} == {FAMILIES[family]}
    ran.clear()
    plain = tokens(model, ids, fuse_blocks=False)
    assert not ran
    assert torch.equal(tokens(model, ids), plain)
    assert len(ran) == 11 * len(fused)  # the first token is the prompt's
    assert len(set(plain[:, 21:].flatten().tolist())) > 3


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_keep_their_own(family: str, prompt: Any) -> None:
    model, ids = hf.quantize(tiny_model(family), **CACHE), prompt(2)
    assert not fused_routers(model)
    assert torch.equal(tokens(model, ids), tokens(model, ids, fuse_blocks=False))


def called(kind: Any, family: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Call:
    """A call of a router with published numbers and random weights."""
    config = tiny_config(family)
    for name, value in settings.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    module = uneven(kind(config)).to(dtype)
    for p in module.parameters():
        p.data.normal_(0, 0.3)
    x = torch.randn(3, 5, config.hidden_size).to(dtype)
    x = x if "view" in kind.forward.__code__.co_names else x.flatten(0, 1)
    with torch.no_grad():
        return Call(module, (x,), {}, module(x))


EXPERTS = {"n_routed_experts": 16, "num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True}
GROUPED = {**EXPERTS, "n_group": 4, "topk_group": 2}
#: Name -> (router, family, settings, what it computes).
PUBLISHED: dict[str, tuple[Any, str, dict[str, Any], Routing]] = {
    "deepseek_v3": (DeepseekV3TopkRouter, "deepseek_v3", GROUPED, Routing(4, "sigmoid", 1e-20, 2.5, 4, 2, 2)),
    "deepseek_v2": (
        DeepseekV2TopkRouter,
        "deepseek_v2",
        {**GROUPED, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
        Routing(4, "softmax", None, 16.0, 4, 2, 1),
    ),
    "mistral4": (Mistral4TopkRouter, "mistral4", GROUPED, Routing(4, "softmax", 1e-20, 1.0, 4, 2, 2)),
    "qwen3_moe": (Qwen3MoeTopKRouter, "qwen3_moe", {**EXPERTS, "num_experts_per_tok": 8}, Routing(8, "softmax", 1e-20)),
    "lfm2_moe": (Lfm2MoeTopKRouter, "lfm2_moe", {**EXPERTS, "use_expert_bias": False}, Routing(4, "sigmoid", 1e-6)),
    "longcat": (LongcatFlashTopkRouter, "longcat_flash", GROUPED, Routing(4, "softmax", None, 6.0)),
    "gpt_oss": (GptOssTopKRouter, "gpt_oss", EXPERTS, Routing(4, "softmax", 1e-20)),
    "granite": (GraniteMoeTopKRouter, "granitemoe", EXPERTS, Routing(4, "softmax", 1e-20)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PUBLISHED)
@torch.no_grad()
def test_what_is_read_off_a_router(name: str, dtype: torch.dtype) -> None:
    """It gives what the router gives: the same logits, rounded or not, and the same types."""
    kind, family, settings, routing = PUBLISHED[name]
    call = called(kind, family, dtype, **settings)
    router = Routers([])._router(call)
    assert router is not None
    assert router.routing == routing
    (logits, gates, ids), own = router(*call.args), call.out
    assert torch.equal(logits, own[0])
    assert [t.dtype for t in (logits, gates, ids)] == [t.dtype for t in own]
    order, of_own = ids.sort(), own[2].sort()
    assert torch.equal(order.values, of_own.values)
    near = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(gates.gather(1, order.indices), own[1].gather(1, of_own.indices), **near)


@pytest.mark.parametrize(
    ("kind", "family"), [(AXK2TopkRouter, "deepseek_v3"), (PhimoeTopKRouter, "phimoe"), (Gemma4TextRouter, "gemma4_text")]
)
@torch.no_grad()
def test_a_router_that_computes_something_else_stays(kind: Any, family: str) -> None:
    """Experts of other groups count as 0; scores by a threshold; gates with a scale of each expert."""
    call = called(kind, family, **GROUPED, top_k_experts=2)
    assert Routers([])._router(call) is None


def changed(call: Call, forward: Any) -> Call:
    """The call of a router whose class has another forward."""
    module = copy.deepcopy(call.module)
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": lambda self, x: forward(self, *kind.forward(self, x))})
    return Call(module, call.args, {}, module(*call.args))


CHANGES: dict[str, Any] = {
    "another sum": lambda self, logits, gates, ids: (logits, gates / gates.norm(dim=-1, keepdim=True), ids),
    "a scale that it does not keep": lambda self, logits, gates, ids: (logits, 1.7 * gates, ids),
    "the worst of the best left out": lambda self, logits, gates, ids: (logits, gates, ids.roll(1, 0)),
    "large gates are cut": lambda self, logits, gates, ids: (logits, gates.clamp(max=0.6), ids),
    "other logits": lambda self, logits, gates, ids: (logits + 1, gates, ids),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_numbers_that_differ_refuse_a_router(change: str) -> None:
    call = called(Qwen3MoeTopKRouter, "qwen3_moe", **EXPERTS)
    assert Routers([])._router(changed(call, lambda self, *out: out)) is not None
    assert Routers([])._router(changed(call, CHANGES[change])) is None


@torch.no_grad()
def test_logits_that_round_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router in fp32 is not given logits that were rounded to 16 bits."""
    call = called(DeepseekV3TopkRouter, "deepseek_v3", torch.bfloat16, **GROUPED)
    assert Routers([])._router(call).logits is routers._wide  # type: ignore[union-attr]
    monkeypatch.setattr(routers, "_wide", routers._own)
    assert Routers([])._router(call) is None


@torch.no_grad()
def test_a_copy_is_read_and_not_the_model() -> None:
    call = called(DeepseekV3TopkRouter, "deepseek_v3", **GROUPED)
    kept = {name: t.clone() for name, t in routers.tensors_of(call).items()}
    assert Routers([])._router(call) is not None
    assert all(torch.equal(t, kept[name]) for name, t in routers.tensors_of(call).items())


@torch.no_grad()
def test_equal_scores_refuse_nothing() -> None:
    """Of equal ones torch takes any: a choice is right if no expert outside of it has a larger score."""
    call = called(Qwen3MoeTopKRouter, "qwen3_moe", **EXPERTS)
    call.module.weight.data[1:] = call.module.weight[:1]
    assert Routers([])._router(call._replace(out=call.module(*call.args))) is not None


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
@torch.no_grad()
def test_launches_of_a_branch(family: str) -> None:
    """The logits, `route`, and the experts: nothing else."""
    model = hf.quantize(tiny_model(family), "int4_g32", **CACHE).bfloat16()
    (router, *_), names = fused_routers(model), []
    view = fused_view(model)
    form = next(b for b in view.modules() if getattr(b, "branches", ())).branches[1][0]
    assert isinstance(form.module, nn.Module)
    x = torch.randn(2, 1, model.config.hidden_size).bfloat16()
    for module in (router.own[0], router):
        with Launches() as seen:
            module(x[:, 0])
        names.append(seen.names)
    own, fused = names
    assert fused == [own[0], "route"]
    assert len(own) > 2
    with Launches() as seen:
        form(x, {})
    assert seen.names == [*fused, "experts_mlp"]
