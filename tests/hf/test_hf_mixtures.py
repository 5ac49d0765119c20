"""Mixtures of experts of transformers: quantized whole, and equal to the plain model with the same dequantized weights."""

from __future__ import annotations

import copy
import importlib
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from families import tiny_config, tiny_model
from mixtures import expand, set_stack

import halfbyte
import halfbyte.hf as hf
from halfbyte.errors import CheckpointError, HalfbyteError, InvalidArgument, Unsupported
from halfbyte.experts import QuantExperts
from halfbyte.hf.mixtures import (
    Called,
    RowsOfAll,
    SortedExperts,
    WithIdentities,
    fusible,
    is_concatenated,
    projections,
    unread_experts,
    use_experts,
)
from halfbyte.hf.quantizer import HalfbyteConfig, HalfbyteQuantizer
from halfbyte.hf.weights import packed_share, replace, select, targets
from halfbyte.memory import quantized_bytes
from halfbyte.reference.experts import Activation
from halfbyte.reference.quantize import quantize
from saved_folders import configure, same
from watched import watched

#: Families with experts that transformers does not call through its interface.
CALLED = ("llama4_text", "longcat_flash", "jetmoe")
#: Decoders that keep stacks of experts, of every kind of activation and layout.
MIXTURES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2"),
    *("hunyuan_v1_moe", "phimoe", "granitemoe", "ernie4_5_moe", "dots1", "aria_text"),
    *("deepseek_v4", "minimax_m3_vl_text", "inkling2_text"),
    *CALLED,
)
FORMATS = ("int4_g32", "int8_col", "nf4", "mxfp4", "nvfp4")
#: What a tiny model has besides experts and linear layers is much of it.
pytestmark = pytest.mark.filterwarnings("ignore:.*stay in 16 bits")
SILU, OAI = Activation("silu"), Activation("silu", 1.702, 7.0, 1.0)


def stacked(model: Any) -> list[QuantExperts]:
    return [m for m in model.modules() if isinstance(m, QuantExperts)]


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


# ------------------------------------------------------------------------------------------------------------------ families


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("family", MIXTURES)
def test_logits_of_the_dequantized_model(family: str, fmt: str, prompt: Any) -> None:
    model, plain = hf.quantize(tiny_model(family), weights=fmt), tiny_model(family)
    kept = (".experts.gate_up_proj", ".experts.down_proj", "_linear.weight")
    read = {"longcat_flash": 4}.get(family)  # it has rows for experts that return their input
    experts = sum(p[:read].numel() for name, p in plain.named_parameters() if p.ndim == 3 and name.endswith(kept))
    assert experts == sum(layer.weight.codes.numel() * layer.format.code.per_byte for layer in stacked(model)) > 0
    assert packed_share(model) > 0.8
    assert any(isinstance(m, Called | SortedExperts) for m in model.modules()) is (family in CALLED)
    wanted = logits(expand(model, plain), prompt())
    assert (logits(model, prompt()) - wanted).abs().max() < 1e-3 * wanted.std()


@pytest.mark.parametrize("family", MIXTURES)
def test_the_order_of_gates_is_found(family: str) -> None:
    """As the activation reads them, if the mixture has one: of concatenated rows the third number changes the first gated one."""
    rows = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 2.0, 1.0]])
    for mixture in (m for m in tiny_model(family).modules() if projections(m)):
        assert is_concatenated(mixture) is (family != "gpt_oss")
        if hasattr(mixture, "_apply_gate"):
            first, changed = mixture._apply_gate(rows)[:, 0]
            assert is_concatenated(mixture) is bool(first != changed)


#: Those whose cache holds latents (MLA).
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash")


@pytest.mark.parametrize(
    "family", [*("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "llama4_text", "minimax_m2", "glm4_moe"), *LATENT]
)
def test_tokens_with_packed_caches(family: str, greedy: Any, prompt: Any) -> None:
    model = hf.quantize(tiny_model(family), weights="int4_g32", keys="int8", values="int4_g32")
    plain = hf.quantize(expand(model, tiny_model(family)), keys="int8", values="int4_g32")
    tokens, scores = greedy(model, prompt())
    expected, wanted = greedy(plain, prompt())
    assert torch.equal(tokens, expected)
    assert (scores - wanted).abs().max() < 1e-1 * wanted.std()  # 4-bit codes of values at a tie may differ by one step


def test_tokens_where_only_weights_can_be_packed(greedy: Any, prompt: Any) -> None:
    """The cache stays transformers' own, and a packed one is refused before anything has changed."""
    family = "jetmoe"
    model = tiny_model(family)
    with pytest.raises(Unsupported, match=r"a packed KV cache cannot be used with .*Quantize its weights only"):
        hf.quantize(model, weights="int4_g32", keys="int8", values="int8")
    assert not stacked(model)
    tokens, scores = greedy(hf.quantize(model, weights="int4_g32"), prompt())
    expected, wanted = greedy(expand(model, tiny_model(family)), prompt())
    assert torch.equal(tokens, expected)
    assert (scores - wanted).abs().max() < 1e-3 * wanted.std()


@pytest.mark.parametrize(
    ("family", "activation"),
    [
        ("mixtral", SILU),
        ("gpt_oss", OAI),
        ("minimax_m3_vl_text", OAI),
        ("deepseek_v4", Activation("silu", 1.0, 10.0)),
        ("inkling2_text", None),
    ],
)
def test_activations_are_fused(family: str, activation: Activation | None) -> None:
    model = hf.quantize(tiny_model(family), weights="nf4")
    found = {m.gate_up_proj.activation for m in model.modules() if projections(m)}
    assert found == {activation}


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        *(("silu", SILU), ("gelu", Activation("gelu")), ("gelu_pytorch_tanh", Activation("gelu_tanh"))),
        *(("quick_gelu", Activation("silu", 1.702)), ("relu2", None), ("relu", None), ("mish", None)),
    ],
)
def test_every_activation_is_its_own(name: str, activation: Activation | None) -> None:
    mixture = mixture_of("mixtral", "MixtralExperts", hidden_act=name)
    assert fusible(mixture) == activation


#: What no tested model has: no gate; gate and up rows one after the other, transposed, with biases; a norm after each expert.
UNUSUAL = {
    "nemotron_h": "NemotronHExperts",
    "openai_privacy_filter": "OpenAIPrivacyFilterExperts",
    "muse_spark": "MuseSparkExperts",
}


def mixture_of(family: str, name: str, **own: Any) -> Any:
    """One mixture of a family, with random parameters."""
    config = tiny_config("muse_spark_text" if family == "muse_spark" else family)
    kind = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    config.update(own)
    mixture, rng = kind(config).eval(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in mixture.parameters():
            p.copy_(torch.randn(p.shape, generator=rng) * 0.3)
    return mixture


@pytest.mark.parametrize("family", UNUSUAL)
@pytest.mark.parametrize("fmt", FORMATS)
def test_unusual_mixtures(family: str, fmt: str) -> None:
    plain = mixture_of(family, UNUSUAL[family])
    packed = copy.deepcopy(plain)
    whole = torch.nn.ModuleDict({"experts": packed})
    for name, target in targets(whole).items():
        replace(whole, name, made := target.quantized(halfbyte.WEIGHT_FORMATS[fmt], None))
        set_stack(plain, target.projection, made)  # type: ignore[arg-type]
    use_experts(whole)
    hidden, experts = plain.down_proj.shape[2 if plain.is_transposed else 1], len(plain.down_proj)
    x, ids = torch.randn(5, hidden), torch.stack([torch.randperm(experts)[:2] for _ in range(5)])
    gates = torch.rand(5, 2)
    plain.config = copy.deepcopy(plain.config)
    plain.config._experts_implementation = "grouped_mm"
    with torch.no_grad():
        torch.testing.assert_close(packed(x, ids, gates), plain(x, ids, gates), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", CALLED)
def test_the_share_of_the_experts(family: str) -> None:
    """At sizes where experts are most of a model."""
    config = tiny_config(family)
    config.update({"vocab_size": 16, **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 512)})
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
        for name, target in select(model, ("lm_head",)).items():
            replace(model, name, target.empty(halfbyte.WEIGHT_FORMATS["nvfp4"]))
    left = [n for n, p in model.named_parameters() if p.ndim > 1 and ".layers." in n and ".weight_" not in n]
    assert {n.split(".")[-2] for n in left} <= {"router", "classifier", "layer"}
    assert packed_share(model) > 0.99


@pytest.mark.parametrize(("family", "router"), [("dbrx", "ffn.router"), ("zaya", "mlp.gate"), ("jetmoe", "mlp.router")])
def test_routers_stay_with_all_of_their_layers(family: str, router: str) -> None:
    parts = list(next(m for name, m in tiny_model(family).named_modules() if name.endswith(router)).named_modules())
    assert any(isinstance(m, torch.nn.Linear) for _, m in parts)
    assert not [name for name in select(tiny_model(family), ()) if f".{router}." in name]


def test_only_the_experts_that_are_hit_are_read(monkeypatch: Any) -> None:
    """Llama 4 hands the rows of all experts to all of them; LongCat's identities are not read at all."""
    called = watched(monkeypatch, QuantExperts, "forward", lambda layer, x, ids, gates=None: ids)
    rows = torch.randn(4, 3, 64)
    for token, hit in enumerate(([0, 2], [3, 1], [2])):
        rows[[e for e in range(4) if e not in hit], token] = 0
    llama: Any = hf.quantize(tiny_model("llama4_text"), "nf4").model.layers[0].feed_forward.experts
    assert isinstance(llama, RowsOfAll)
    found = llama(rows.view(12, 64)).view(4, 3, 64)
    for ids in called:
        assert ids.shape == (3, 2)
        assert [set(row) for row in ids[:2].tolist()] == [{0, 2}, {1, 3}]
        assert 2 in ids[2]
    assert torch.equal(found.ne(0).any(-1), rows.ne(0).any(-1))
    called.clear()
    longcat: Any = hf.quantize(tiny_model("longcat_flash"), "nf4").model.layers[0].mlp.experts
    assert isinstance(longcat, WithIdentities)
    x, gates = torch.randn(2, 64), torch.rand(2, 2)
    y = longcat(x, torch.tensor([[5, 2], [4, 6]]), gates)
    assert called[0].tolist() == [[2, 2], [3, 3]]
    torch.testing.assert_close(y[1], x[1] * gates[1].sum())


# -------------------------------------------------------------------------------------------------------------- save and load


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "inkling2_text", *CALLED])
def test_bit_for_bit(family: str, prompt: Any, tmp_path: Any) -> None:
    model = hf.quantize(tiny_model(family), weights="nvfp4")
    folder, expected = hf.save(model, tmp_path / "model"), logits(model, prompt())
    for again in (hf.load(folder), tf.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")):
        same(again, model)
        assert torch.equal(logits(again.eval(), prompt()), expected)
    assert torch.equal(logits(hf.load(hf.save(again, tmp_path / "again")), prompt()), expected)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other, prompt()), expected)


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("fmt", sorted(halfbyte.WEIGHT_FORMATS))
def test_every_format_loads_again(fmt: str, tmp_path: Any) -> None:
    config = tiny_config("mixtral")
    config.update({"hidden_size": 128, "num_attention_heads": 4})
    torch.manual_seed(1)
    model = hf.quantize(tf.AutoModelForCausalLM.from_config(config, dtype=torch.float16), fmt)
    same(hf.load(hf.save(model, tmp_path / "model")), model)


@pytest.mark.parametrize("family", ["qwen3_moe", *CALLED])
def test_a_plain_folder_is_quantized_on_the_way(family: str, tmp_path: Any) -> None:
    """transformers stores one tensor for each expert, and stacks them when it loads."""
    model = tiny_model(family)
    same(hf.load(hf.save(model, tmp_path / "plain"), "nf4"), hf.quantize(model, "nf4"))


def test_a_damaged_stack_is_named(tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_file

    folder = hf.save(hf.quantize(tiny_model("mixtral"), weights="int4_g32"), tmp_path / "model")
    file, tensor = folder / "model.safetensors", "model.layers.1.mlp.experts.down_proj.weight_scales"
    good = load_file(file)
    for damaged, says in (
        (good[tensor][:3], r"down_proj.weight_scales is .*\[3, 64, 4\]"),
        (good[tensor] * torch.nan, "scales of .* that are not finite"),
    ):
        save_file({**good, tensor: damaged}, file, {"format": "pt"})
        with pytest.raises(CheckpointError, match=says):
            hf.load(folder)


def test_half_of_a_mixture_is_no_mixture(tmp_path: Any) -> None:
    folder = hf.save(hf.quantize(tiny_model("mixtral"), weights="int4_g32"), tmp_path / "model")
    modules: dict[str, str] = {}
    configure(folder, lambda config: modules.update(config["quantization_config"]["modules"]))
    del modules["model.layers.1.mlp.experts.down_proj"]
    configure(folder, lambda config: config["quantization_config"].update(modules=modules))
    with pytest.raises(CheckpointError, match=r"down_proj.weight_codes is in the files, but"):
        hf.load(folder)
    quantizer = HalfbyteQuantizer(HalfbyteConfig(modules=modules))
    with pytest.raises(CheckpointError, match=r"gate_up_proj' and not 'model.layers.1.mlp.experts.down_proj'"):
        quantizer._process_model_before_weight_loading(tiny_model("mixtral"))


# ------------------------------------------------------------------------------------------------------------------ what else


def test_a_mixture_stays_as_a_whole(prompt: Any) -> None:
    for skip in ("experts", "down_proj", "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0"):
        model, plain = hf.quantize(tiny_model("mixtral"), weights="nf4", skip_modules=("lm_head", skip)), tiny_model("mixtral")
        assert len(stacked(model)) == (2 if "0" in skip else 0)
        assert isinstance(model.model.layers[0].mlp.experts.gate_up_proj, torch.nn.Parameter)
        torch.testing.assert_close(logits(model, prompt()), logits(expand(model, plain), prompt()), rtol=1e-3, atol=1e-3)


def test_a_format_that_does_not_fit_changes_nothing() -> None:
    model = tiny_model("mixtral")
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    with pytest.raises(InvalidArgument, match=r"experts.gate_up_proj.weight \[4, 256, 64\] has a last axis of 64.*skip_modules"):
        hf.quantize(model, weights="int4_g128", skip_modules=("lm_head", "self_attn"))
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before


def test_nan_in_an_expert_is_named() -> None:
    model = tiny_model("mixtral")
    model.model.layers[1].mlp.experts.down_proj.data[3, 2, 1] = torch.nan
    with pytest.raises(HalfbyteError, match=r"layers.1.mlp.experts.down_proj: .*NaN"):
        hf.quantize(model, weights="nf4")
    assert not stacked(model)


def test_other_implementations_of_experts_are_refused(prompt: Any) -> None:
    model = hf.quantize(tiny_model("mixtral"), weights="nf4")
    for name in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(name)
        with pytest.raises(Unsupported, match="set_experts_implementation"):
            logits(model, prompt())
    model.set_experts_implementation(hf.NAME)
    logits(model, prompt())


def test_gradients_pass_through(prompt: Any) -> None:
    """As for an adapter in an earlier layer: those of the plain model with the same values."""
    model = hf.quantize(tiny_model("mixtral"), weights="int4_g32")
    plain, found = expand(model, tiny_model("mixtral")), []
    for each in (model, plain):
        embedded = each.get_input_embeddings()(prompt()).detach().requires_grad_()
        each(inputs_embeds=embedded, use_cache=False).logits.square().mean().backward()
        found.append(embedded.grad)
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "inkling2_text"])
def test_compiled(family: str) -> None:
    torch._dynamo.reset()
    experts: Any = hf.quantize(tiny_model(family), weights="nf4").model.layers[1].mlp.experts
    x, ids, gates = torch.randn(5, 64), torch.stack([torch.randperm(4)[:2] for _ in range(5)]), torch.rand(5, 2)
    with torch.no_grad():
        compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)(x, ids, gates)
        torch.testing.assert_close(compiled, experts(x, ids, gates))


def test_memory_counts_them() -> None:
    model = tiny_model("mixtral")
    saved, parameters = quantized_bytes(model, halfbyte.WEIGHT_FORMATS["nvfp4"])
    before = 2 * sum(p.numel() for p in model.parameters())
    hf.quantize(model, weights="nvfp4")
    layers = [m for m in model.modules() if hasattr(m, "format_name")]
    assert parameters == sum(m.weight.codes.numel() * 2 for m in layers)
    plain = 2 * sum(p.numel() for name, p in model.named_parameters() if "weight_" not in name)
    assert before - saved == plain + sum(m.weight.nbytes for m in layers)


@pytest.mark.parametrize("family", MIXTURES)
def test_a_step_reads_the_experts_of_its_tokens(family: str) -> None:
    model = tiny_model(family)
    experts = {name: t.shape[0] for name, t in targets(model).items() if len(t.shape) == 3}
    assert experts
    assert all(0 < unread_experts(model.config.get_text_config(), count, 1) < 1 for count in experts.values())


def test_experts_of_which_a_token_uses_all_are_read() -> None:
    config = SimpleNamespace(num_experts_per_tok=8, ffn_config=None)
    assert [unread_experts(config, experts, 1) for experts in (0, 4, 8, 16)] == [0, 0, 0, 0.5]


def test_layers_hold_what_they_should() -> None:
    with pytest.raises(InvalidArgument, match=r"weight has shape \[8, 64\]; experts hold"):
        QuantExperts(quantize(torch.randn(8, 64), "nf4"))
    with pytest.raises(InvalidArgument, match=r"bias has shape \[8\]; the weight has \[2, 8, 64\]"):
        QuantExperts(quantize(torch.randn(2, 8, 64), "nf4"), torch.zeros(8))
    assert "[2, 8, 64], format=nf4" in repr(QuantExperts(quantize(torch.randn(2, 8, 64), "nf4")))
