"""A decode step is one graph without breaks, and says the same as eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, left_padding
from torch._dynamo.testing import CompileCounter
from transformers import CompileConfig, StaticCache

import halfbyte.hf as hf
from halfbyte.hf.cache import _records_graphs


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _decode(model, ids, mask, step, new: int = 5) -> list[torch.Tensor]:
    """Prefill in eager, then decode with `step`; the masks are made as generate() makes them, outside the graph."""
    cache = hf.PackedCache(model, 64, keys="int8", values="int4_g32")
    outs = []
    for i in range(new):
        inputs = model.prepare_inputs_for_generation(
            ids, past_key_values=cache, attention_mask=mask, use_cache=True, is_first_iteration=i == 0,
            next_sequence_length=None if i == 0 else 1,
        )  # fmt: skip
        logits = (model if i == 0 else step)(**inputs).logits[:, -1]
        outs.append(logits.clone())
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return outs


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, "nf4", "int4_g32"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gpt_oss"])
@torch.no_grad()
def test_one_graph(build, prompt, family, weights):
    if weights and family not in ("llama", "gpt2"):
        pytest.skip("quantized weights are compiled with two families")
    model, ids = build(family), prompt(2, 18)
    hf.quantize(model, weights, keys="int8", values="int4_g32", fuse_qkv=weights is not None)
    mask = left_padding(ids, 0, 3)
    expected = _decode(model, ids, mask, model)
    counter = CompileCounter()
    got = _decode(model, ids, mask, torch.compile(model, backend=counter, fullgraph=True))
    assert counter.frame_count == 1
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@torch.no_grad()
def test_inductor(build, prompt):
    model, ids = build("llama"), prompt(2, 18)
    hf.quantize(model, "nf4", keys="int8", values="int4_g32", fuse_qkv=True, fuse_gate_up=True)
    mask = torch.ones_like(ids)
    expected = _decode(model, ids, mask, model)
    got = _decode(model, ids, mask, torch.compile(model, fullgraph=True))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=2e-2)
        assert torch.equal(a.argmax(-1), b.argmax(-1))


@pytest.mark.slow
@pytest.mark.parametrize("fuse", [False, True])
@torch.no_grad()
def test_weights_of_a_compiled_step_stay_where_they_are(build, prompt, fuse):
    """CUDA graphs copy every input whose address they do not know to be fixed: a whole model for each token."""
    model, ids = build("llama"), prompt(2, 18)
    hf.quantize(model, "nf4", keys="int8", values="int4_g32", fuse_qkv=fuse, fuse_gate_up=fuse)
    read: list[torch.fx.Node] = []

    def backend(graph, inputs):
        products = [n for n in graph.graph.nodes if str(n.target).startswith(("halfbyte.linear", "halfbyte.projections"))]
        read.extend(n for product in products for n in product.all_input_nodes if n.op == "placeholder")
        return graph.forward

    _decode(model, ids, torch.ones_like(ids), torch.compile(model, backend=backend, fullgraph=True), new=2)
    moving = [n.name for n in read if "_dynamo_static_input_type" not in n.meta["tensor_dict"]]
    assert len(read) - len(moving) == 2 * 7 * 2  # two layers of seven weights, codes and scales
    assert not moving


def _checks(model: Any, cache: Any, ids: torch.Tensor) -> list[str]:
    """What compiled code looks at before each call of a decode step, by type and name."""
    found: list[str] = []

    def look(entries: Any) -> list[bool]:
        found.extend(f"{entry.guard_type} {entry.name}" for entry in entries)
        return [True] * len(entries)

    torch._dynamo.reset()
    mask = torch.ones(2, 64, dtype=torch.long)
    model(ids, past_key_values=cache, attention_mask=torch.ones_like(ids))
    step = torch.compile(model.forward, backend="eager", fullgraph=True, options={"guard_filter_fn": look})
    step(ids[:, :1], past_key_values=cache, position_ids=torch.full((2, 1), ids.shape[1]), attention_mask=mask)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fuse", [False, True])
@torch.no_grad()
def test_compiled_code_looks_at_little_before_each_step(build, prompt, fuse):
    """What is traced of a layer is looked at again in Python before every step, 1 us or less each, while the GPU waits.

    A weight has three tensors here and the cache six, so there is more of it than of transformers' own layers.
    """
    model, ids = build("llama"), prompt(2, 18)
    plain = _checks(model, StaticCache(config=model.config, max_cache_len=64), ids)
    hf.quantize(model, "int4_g32", keys="int8", values="int4_g32", fuse_qkv=fuse, fuse_gate_up=fuse)
    packed = _checks(model, hf.PackedCache(model, 64), ids)
    second = [[check for check in found if "['1']" in check or "layers[1]" in check] for found in (packed, plain)]
    one, other = map(len, second)
    assert one < 1.5 * other, f"{one} for a layer, where transformers' own has {other}"
    # The same object reached in two ways costs most: Python code that compares the two.
    one, other = (sum(check.startswith("DUPLICATE_INPUT") for check in found) for found in second)
    assert one <= other + 3 * fuse, f"{one} objects of a layer are reached in two ways, {other} in transformers' own"


def test_what_generate_may_record(build, monkeypatch):
    """Models in 16 bits, whose attention and linear layers are kernels; nothing that only a configuration tells of."""
    model = build("llama").to(torch.float16)
    assert _records_graphs(model)
    assert not _records_graphs(model.config)
    assert not _records_graphs(build("llama"))
    monkeypatch.setenv("HALFBYTE_IMPL", "cpu")
    assert not _records_graphs(model)
    monkeypatch.undo()
    assert _records_graphs(hf.quantize(model, "nf4", keys="int8"))


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, "nf4"])
def test_generate_compiles_by_itself(build, prompt, greedy, weights):
    model, ids = build("llama"), prompt(2, 18)
    hf.quantize(model, weights, keys="int8", values="int4_g32", fuse_qkv=weights is not None)
    expected, _ = greedy(model, ids)
    config = CompileConfig(backend="eager", mode=None, fullgraph=True)
    config._compile_all_devices = True
    assert torch.equal(greedy(model, ids, compile_config=config)[0], expected)
