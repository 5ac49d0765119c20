"""QuantLinear and FusedProjections as modules: what they hold, how they move, that fusing changes nothing."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from transformers.pytorch_utils import Conv1D

import halfbyte
import halfbyte.hf as hf
from halfbyte.errors import HalfbyteError, InvalidArgument
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.nn import FusedProjections, FusedSlot, QuantLinear, fuse_gate_up, fuse_qkv, unfuse


@pytest.mark.parametrize("fmt", sorted(WEIGHT_FORMATS))
def test_linear_and_conv1d(fmt):
    torch.manual_seed(0)
    conv, lin = Conv1D(48, 128), nn.Linear(128, 48)
    with torch.no_grad():
        lin.weight.copy_(conv.weight.T)
        lin.bias.copy_(conv.bias.normal_())
    x = torch.randn(2, 3, 128)
    made = [QuantLinear.from_linear(layer, fmt) for layer in (lin, conv)]
    expected = nn.functional.linear(x, made[0].weight.dequantize(), lin.bias)
    for layer in made:
        assert (layer.in_features, layer.out_features) == (128, 48)
        assert all(p.shape[0] == 48 or p.numel() < 48 for p in layer.parameters())  # out features first
        assert not any(p.requires_grad for p in layer.parameters())
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    assert fmt in repr(made[0])
    for other in (copy.deepcopy(made[0]), pickle.loads(pickle.dumps(made[0]))):
        assert torch.equal(other(x), made[0](x))
        assert other.weight.codes is other.weight_codes


def test_casting_never_touches_scales():
    layer = QuantLinear.from_linear(nn.Linear(128, 16), "nf4")
    scales, x = layer.weight_scales.clone(), torch.randn(2, 128)
    layer.half()
    assert layer.bias.dtype is torch.float16
    assert layer.weight_scales.dtype is torch.float32
    assert torch.equal(layer.weight_scales, scales)
    assert layer(x.half()).dtype is torch.float16
    layer.to(torch.float64)
    assert torch.equal(layer.weight_scales, scales)


def test_parameters_that_peft_casts_are_cast_back():
    """prepare_model_for_kbit_training replaces the data of every 16-bit parameter; other types would be read as numbers."""
    layer, x = QuantLinear.from_linear(nn.Linear(128, 16), "int4_g32"), torch.randn(2, 128)
    scales, expected = layer.weight_scales.clone(), layer(x)
    for wider in (torch.float32, torch.float64):
        for p in layer.parameters():
            p.data = p.data.to(wider) if p.dtype is torch.float16 else p.data
        assert torch.equal(layer(x), expected)
        assert torch.equal(layer.weight_scales, scales)
    layer.weight_scales.data = layer.weight_scales.data.bfloat16()
    with pytest.raises(InvalidArgument, match=r"scales is torch\.bfloat16"):
        layer(x)


def test_loading_a_state_dict():
    first, second = (QuantLinear.from_linear(nn.Linear(128, 16), "nf4_dq") for _ in range(2))
    x = torch.randn(2, 128)
    assert not torch.equal(first(x), second(x))
    for assign in (False, True):
        target = copy.deepcopy(second)
        target(x)
        target.load_state_dict(first.state_dict(), assign=assign)
        assert torch.equal(target(x), first(x))


def test_wrong_layers():
    with pytest.raises(InvalidArgument, match="Embedding"):
        QuantLinear.from_linear(nn.Embedding(3, 4), "nf4")
    with pytest.raises(HalfbyteError, match="bias"):
        QuantLinear(halfbyte.quantize(torch.randn(4, 64), "nf4"), torch.zeros(5))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt_oss"])
def test_fused_model_is_the_same_model(build, prompt, family):
    model, ids = hf.quantize(build(family), "int4_g32"), prompt()
    names = list(model.state_dict())
    with torch.no_grad():
        expected = model(ids).logits
        assert fuse_qkv(model) == model.config.num_hidden_layers
        assert isinstance(model.model.layers[0].self_attn.q_proj, FusedProjections)
        pairs = fuse_gate_up(model)
        assert pairs == (0 if family == "gpt_oss" else model.config.num_hidden_layers)  # which keeps experts in 3-D parameters
        assert not pairs or isinstance(model.model.layers[0].mlp.up_proj, FusedSlot)
        assert sorted(model.state_dict()) == sorted(names)
        assert not any(module.training for module in model.modules())
        assert torch.equal(model(ids).logits, expected)
        assert torch.equal(copy.deepcopy(model)(ids).logits, expected)
        assert torch.equal(pickle.loads(pickle.dumps(model))(ids).logits, expected)
        assert unfuse(model) == model.config.num_hidden_layers + pairs
        assert type(model.model.layers[0].self_attn.k_proj) is QuantLinear
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("fused", [False, True])
def test_hooks_stay_with_a_layer_that_is_replaced(build, prompt, fused):
    """Those of the user; pruning's would look for the 16-bit weight."""
    model, calls = build("llama"), []
    layer = model.model.layers[0].self_attn
    handle = layer.k_proj.register_forward_hook(lambda module, args, kwargs, out: calls.append(out.shape), with_kwargs=True)
    layer.o_proj.register_forward_pre_hook(lambda *args: calls.append("o"))
    prune.random_unstructured(layer.q_proj, "weight", 0.5)
    hf.quantize(model, "int4_g32", fuse_qkv=fused)
    model(prompt())
    assert calls == [(2, 21, 64), "o"]
    handle.remove()
    model(prompt())
    assert calls[2:] == ["o"]


def test_a_layer_whose_call_was_replaced_is_refused(build, prompt):
    """It would not be called; in 16 bits it is."""
    model = build("llama")
    layer = model.model.layers[0].mlp.up_proj
    layer.forward = lambda x: torch.zeros(*x.shape[:-1], layer.out_features)
    with pytest.raises(HalfbyteError, match=r"model.layers.0.mlp.up_proj.forward was replaced.*skip_modules="):
        hf.quantize(model, "int4_g32")
    hf.quantize(model, "int4_g32", skip_modules=("model.layers.0.mlp.up_proj",))
    model.lm_head.forward = lambda x: x
    with pytest.raises(HalfbyteError, match=r"lm_head.forward was replaced.*without lm_head="):
        hf.quantize(model, lm_head="int8_col")
    assert not model.model.layers[0].mlp(torch.randn(1, 2, 64)).any()


@pytest.mark.parametrize("wrapped", [("q_proj",), ("k_proj", "v_proj"), ("q_proj", "k_proj", "v_proj")])
def test_adapters_are_unfused_inside(wrapped):
    """As PEFT wraps layers: those of a fused launch, all or some."""

    class Adapter(nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer = base_layer

        def forward(self, x):
            return self.base_layer(x) * 2

    torch.manual_seed(0)
    model, x = nn.Module(), torch.randn(2, 64)
    for name, n in (("q_proj", 16), ("k_proj", 8), ("v_proj", 8)):
        setattr(model, name, QuantLinear.from_linear(nn.Linear(64, n), "int4_g32"))
    assert fuse_qkv(model) == 1
    for name in wrapped:
        setattr(model, name, Adapter(getattr(model, name)))
    expected = [getattr(model, name)(x) for name in ("q_proj", "k_proj", "v_proj")]
    assert unfuse(model) == 1
    assert not any(isinstance(module, FusedProjections | FusedSlot) for module in model.modules())
    for name, before in zip(("v_proj", "k_proj", "q_proj"), expected[::-1], strict=True):  # in any order, by now
        assert torch.equal(getattr(model, name)(x), before)
        assert isinstance(getattr(model, name), Adapter) == (name in wrapped)


def test_shards_of_different_formats():
    torch.manual_seed(0)
    layers = [QuantLinear.from_linear(nn.Linear(64, n, bias=n > 8), f) for n, f in ((16, "nvfp4"), (8, "nf4"), (24, "int8_col"))]
    x = torch.randn(2, 64)
    fused = FusedProjections(*layers)
    outs = [fused(x), fused.slots[0](x), fused.slots[1](x)]
    for out, layer in zip(outs, layers, strict=True):
        assert torch.equal(out, layer(x))
    with pytest.raises(HalfbyteError, match="before the one that computes it"):
        fused.slots[0](x)
    assert isinstance(fused.slots[0], FusedSlot)
    for layer in layers:  # each with an act-order of its own
        layer.register_parameter("weight_perm", nn.Parameter(torch.randperm(64).int(), requires_grad=False))
    apart, fused = [layer(x) for layer in layers], FusedProjections(*layers)
    assert not torch.equal(apart[0], outs[0])
    for out, expected in zip([fused(x), fused.slots[0](x), fused.slots[1](x)], apart, strict=True):
        assert torch.equal(out, expected)
    with pytest.raises(InvalidArgument, match="in features"):
        FusedProjections(layers[0], QuantLinear.from_linear(nn.Linear(128, 8), "nf4"), layers[2])


def three() -> FusedProjections:
    torch.manual_seed(0)
    return FusedProjections(*(QuantLinear.from_linear(nn.Linear(64, n), "int8_col") for n in (16, 8, 24)))


def test_fused_projections_of_two_threads_do_not_mix():
    fused, mine, theirs = three(), torch.randn(2, 64), torch.randn(2, 64)
    expected = [(fused(x), fused.slots[0](x), fused.slots[1](x)) for x in (mine, theirs)]

    def whole(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return fused(x), fused.slots[0](x), fused.slots[1](x)

    fused(mine)
    with ThreadPoolExecutor(1) as other:  # between this thread's q and its k
        assert all(map(torch.equal, other.submit(whole, theirs).result(), expected[1]))
    assert torch.equal(fused.slots[0](mine), expected[0][1])
    assert torch.equal(fused.slots[1](mine.view(2, 64)), expected[0][2])


def test_fused_projections_of_different_inputs_are_refused():
    """Cross-attention: q reads one thing, k and v another."""
    fused, x = three(), torch.randn(2, 64)
    fused(x)
    with pytest.raises(HalfbyteError, match="another input"):
        fused.slots[0](torch.randn(2, 64))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_projections_of_different_inputs_are_refused(backend):
    """As in eager, instead of the products of the first one's input."""
    torch._dynamo.reset()
    fused, x = three(), torch.randn(2, 64)

    def project(x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return fused(x), fused.slots[0](other), fused.slots[1](other)

    expected, compiled = project(x, x), torch.compile(project, backend=backend)
    assert all(map(torch.equal, compiled(x, x), expected))
    assert all(map(torch.equal, compiled(x, x.view(2, 64)), expected))
    with pytest.raises(HalfbyteError, match="another input"):
        compiled(x, torch.randn(2, 64))
    assert all(map(torch.equal, compiled(x, x), expected))


@pytest.mark.parametrize("compiled", [0, 1, 2])
def test_one_of_fused_projections_is_compiled_without_the_others(compiled):
    """Where a graph breaks between them and one is left to eager, or one module is compiled by itself."""
    torch._dynamo.reset()
    fused, x = three(), torch.randn(2, 64)
    expected = (fused(x), fused.slots[0](x), fused.slots[1](x))
    [fused, *fused.slots][compiled].compile(backend="eager")
    for _ in range(2):
        assert all(map(torch.equal, (fused(x), fused.slots[0](x), fused.slots[1](x)), expected))
    fused(x)
    again = pickle.loads(pickle.dumps(fused))
    with pytest.raises(HalfbyteError, match="before the one that computes it"):
        again.slots[0](x)


def test_compiled_layers_know_their_parameters_by_name():
    """One that is taken off and put back, as tools that share out or wrap parameters do, is the last of them."""
    torch._dynamo.reset()
    layer, fused, x = QuantLinear.from_linear(nn.Linear(64, 16), "int4_g32"), three(), torch.randn(2, 64)
    expected = (layer(x), fused(x), fused.slots[0](x), fused.slots[1](x))
    for each in (layer, fused, *fused.slots):
        for name in ("weight_codes", "bias", "weight_scales"):
            part = getattr(each, name)
            delattr(each, name)
            each.register_parameter(name, part)
        each.register_parameter("another", nn.Parameter(torch.ones(1), requires_grad=False))
    compiled = torch.compile(lambda x: (layer(x), fused(x), fused.slots[0](x), fused.slots[1](x)), backend="eager", fullgraph=True)
    assert all(map(torch.equal, compiled(x), expected))


@pytest.fixture
def offload():
    """Parameters come before a call and leave after it."""
    return pytest.importorskip("accelerate", reason="accelerate is not installed; pip install accelerate").cpu_offload


def test_offloaded_weights_do_not_stay_behind(build, tmp_path, offload):
    layer, x = QuantLinear.from_linear(nn.Linear(64, 16), "nf4"), torch.randn(2, 64)
    expected = layer(x)
    assert layer._weight is not None
    offload(layer, "cpu")
    assert torch.equal(layer(x), expected)
    assert layer._weight is None  # else it would hold what was brought for the call
    fused = three()
    for slot in fused.slots:
        offload(slot, "cpu")
    with pytest.raises(HalfbyteError, match="unfuse"):
        fused(x)
    model = hf.quantize(build("llama"), weights="nf4")
    offload(model.model.layers[0].mlp.up_proj, "cpu")
    with pytest.raises(InvalidArgument, match="meta device"):
        hf.save(model, tmp_path / "m")
    with pytest.raises(InvalidArgument, match="offloaded them, quantize before"):
        hf.quantize(build("llama").to("meta"), weights="nf4")


def test_a_model_with_all_weights_offloaded_generates(build, prompt, greedy, offload):
    """One that is merely on the meta device is refused."""
    model, ids = hf.quantize(build("llama"), "nf4", keys="int8", values="int8"), prompt()
    expected, _ = greedy(model, ids)
    offload(model, "cpu")
    assert torch.equal(greedy(model, ids)[0], expected)


def test_what_a_layer_gives_may_be_changed_in_place():
    layer, x = QuantLinear.from_linear(nn.Linear(64, 16), "nf4"), torch.randn(2, 3, 64, requires_grad=True)
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (layer(x) + 1, layer(x).add_(1))]
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    "use",
    [
        lambda w, x: nn.functional.linear(x, w),
        lambda w, x: x @ w.T,
        lambda w, x: w @ x.mT,
        lambda w, x: x.to(w.dtype),
        lambda w, x: w.div_(2),
        lambda w, x: x.new_zeros(w.size()),
    ],
)
def test_a_quantized_weight_is_no_tensor(use):
    """As in RWKV, which divides weights, in PEFT, which casts its input to one's type, and in resize_token_embeddings."""
    layer, x = QuantLinear.from_linear(nn.Linear(64, 16), "nf4"), torch.randn(2, 64)
    with pytest.raises(HalfbyteError, match=r"weight \[16, 64\].*skip_modules"):
        use(layer.weight, x)
    assert not hasattr(layer.weight, "dtype")
    assert torch.equal(halfbyte.linear(x, layer.weight, layer.bias), layer(x))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize(
    "options",
    [
        {"weights": "int4_g32", "keys": "fp8", "values": "fp8", "fuse_qkv": True, "fuse_gate_up": True},
        {"weights": "nvfp4", "keys": "int4", "values": "int2", "sink_tokens": 4, "recent_tokens": 16},
    ],
    ids=["fused", "window"],
)
def test_copies_of_models_and_of_their_caches_are_used_like_the_originals(build, prompt, greedy, options, how):
    def copied(thing):
        return copy.deepcopy(thing) if how == "deepcopy" else pickle.loads(pickle.dumps(thing))

    def step(cache):
        """Of the model over this cache, which grows; the bits that come out."""
        with torch.no_grad():
            return model(ids[:, -1:], past_key_values=cache).logits

    model, ids = hf.quantize(build("llama"), **options), prompt(2, 29)
    expected = greedy(model, ids)
    assert all(map(torch.equal, greedy(copied(model), ids), expected))
    with torch.no_grad():
        cache = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, return_dict_in_generate=True).past_key_values
    other = copied(cache)
    first = step(other)
    assert torch.equal(step(cache), first)
    assert not torch.equal(step(other), first)
