"""`generate()` of models that changed after their steps were recorded, and of several threads at once.

The tokens are those of a model that was so from the beginning, or one error says why not.
"""

from __future__ import annotations

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

import halfbyte.hf as hf
from halfbyte.hf import fused_blocks, structure
from halfbyte.hf.recorded_step import Recorded, kept_steps

CACHE = {"keys": "int8", "values": "int8"}
OPTIONS = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 16}
#: Changes of a model in place.
CHANGES = {
    "half": lambda m: m.to(torch.float16),
    "float": lambda m: m.to(torch.float32),
    "cast there and back": lambda m: m.to(torch.float16).to(torch.bfloat16),
    "moved": lambda m: m._apply(torch.clone),
    "a norm": lambda m: m.model.layers[0].input_layernorm.weight.data.mul_(0.5),
    "a weight in place": lambda m: scale(m.model.layers[0].mlp.down_proj),
    "weights again": lambda m: hf.quantize(m, keys="int4", values="int4"),
}


def scale(layer):
    """Multiply a layer by 4, quantized or not."""
    with torch.no_grad():
        (layer.weight if isinstance(layer, torch.nn.Linear) else layer.weight.scales).mul_(4)


@pytest.fixture(params=[None, "int8_col"], ids=["16-bit weights", "int8_col"])
def packed(request, build):
    """In bf16, so that blocks run as compiled loops where they can, which keep weights in an order of their own."""
    return lambda family="llama": hf.quantize(build(family).bfloat16(), request.param, **CACHE)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "recorded"])
@pytest.mark.parametrize("change", CHANGES)
def test_models_that_change_after_their_steps(packed, prompt, change, fused):
    """Twice before, so that kept steps are used, and twice afterwards."""
    model, fresh, ids = packed(), packed(), prompt(2)
    for _ in range(2):
        model.generate(ids, **OPTIONS, fuse_blocks=fused)
    assert kept_steps(model)
    CHANGES[change](model)
    CHANGES[change](fresh)
    expected = fresh.generate(ids, **OPTIONS, fuse_blocks=fused)
    for _ in range(2):
        assert torch.equal(model.generate(ids, **OPTIONS, fuse_blocks=fused), expected)
    assert model.dtype is fresh.dtype


def test_the_short_casts_of_quantized_models_are_refused_by_transformers(build, prompt):
    """By one sentence, and the model goes on."""
    model, ids = hf.quantize(build("llama"), "int8_col", **CACHE), prompt(2)
    before = model.generate(ids, **OPTIONS)
    with pytest.raises(ValueError, match="is not supported for quantized model"):
        model.half()
    assert torch.equal(model.generate(ids, **OPTIONS), before)


def test_adapters_after_steps(packed, prompt):
    """Added, turned off and removed, by PEFT's own names and by the model's."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed", exc_type=ImportError)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model, ids = packed(), prompt(2)
    before = model.generate(ids, **OPTIONS)
    model.generate(ids, **OPTIONS)
    adapted = peft.get_peft_model(model, lora).eval()
    found = [adapted.generate(input_ids=ids, **OPTIONS) for _ in range(2)]
    expected = adapted.generate(input_ids=ids, **OPTIONS, recorded=False)
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], expected)
    assert not torch.equal(expected, before)
    with adapted.disable_adapter():
        assert torch.equal(adapted.generate(input_ids=ids, **OPTIONS), before)
    assert torch.equal(adapted.generate(input_ids=ids, **OPTIONS), expected)
    assert torch.equal(adapted.unload().generate(ids, **OPTIONS), before)


def test_one_thread_records_at_a_time(monkeypatch):
    """Where another thread's recording is under way, waiting for the GPU, as each does first, is an error of CUDA."""
    inside, most, together = [], [], threading.Barrier(2)

    @contextmanager
    def recording(*_, **__):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        yield

    def run():
        together.wait(60)
        Recorded(0, None)(lambda: 1, SimpleNamespace(type="cuda"))

    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    with ThreadPoolExecutor(2) as pool:
        for made in [pool.submit(run) for _ in range(2)]:
            made.result(60)
    assert most == [1, 1]


def test_a_step_that_another_thread_records_is_not_watched(packed):
    """Else a call that begins meanwhile would run unfused, and round in another way."""
    model = packed("llama")
    with fused_blocks._recording(list(model.modules())):
        assert not any(map(structure.has_hooks, model.modules()))
        hook = model.lm_head.register_forward_hook(lambda *_: None)
        assert structure.has_hooks(model.lm_head)
        hook.remove()


@pytest.mark.parametrize("shared", [False, True], ids=["two models", "one model"])
def test_two_threads_at_once(packed, prompt, shared):
    """Each has its own prompts, lengths and batch; calls begin together, the first ones included."""
    models = [packed("llama"), packed("qwen3")]
    models = [models[0], models[0]] if shared else models
    prompts = [[prompt(1 + k % 2, 9 + 4 * k, seed=10 * i + k) for k in range(4)] for i in range(2)]
    expected = [
        [copy.deepcopy(model).generate(ids, **OPTIONS) for ids in mine] for model, mine in zip(models, prompts, strict=True)
    ]
    together = threading.Barrier(2)

    def run(i):
        found = []
        for ids in prompts[i] * 2:
            together.wait(60)
            found.append(models[i].generate(ids, **OPTIONS))
        return found

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, range(2)))
    for found, own in zip(results, expected, strict=True):
        for tokens, right in zip(found, own * 2, strict=True):
            assert torch.equal(tokens, right)
