"""The shipped model on the GPU, in bf16 with quantized keys and values: eagerly, and as generate() compiles it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._inductor.config
from families import tiny_model
from gpu_place import DRY, PLACE
from torch._dynamo.utils import counters

import halfbyte.hf as hf
from halfbyte.hf import rehearsal
from halfbyte.hf.fused_blocks import fused_view
from halfbyte.hf.recorded_step import kept_steps
from halfbyte.paths import shipped_model

transformers = pytest.importorskip("transformers")

PROMPT = list(b"The kernels of this library read low-bit keys and values as they are stored and never expand them in memory. ")


def model(weights: str | None = None, fuse_qkv: bool = False) -> Any:
    found = transformers.AutoModelForCausalLM.from_pretrained(shipped_model(), dtype=torch.bfloat16).to(PLACE.device)
    return hf.quantize(found, weights, keys="int8", values="int4_g32", fuse_qkv=fuse_qkv)


def text(found: Any, **options: Any) -> list[int]:
    ids = torch.tensor([PROMPT], device=PLACE.device)
    options = {"do_sample": False, **options}
    return found.generate(ids, max_new_tokens=PLACE.size(48, 4), **options)[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


def test_generation_is_that_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    found = model()
    ours = text(found, disable_compile=True)
    monkeypatch.setenv("HALFBYTE_IMPL", "reference")
    assert text(found, disable_compile=True)[:8] == ours[:8]


def steps(found: Any, **options: Any) -> tuple[list[int], torch.Tensor]:
    """Tokens, and the logits [tokens, vocabulary] that each was chosen from."""
    ids = torch.tensor([PROMPT], device=PLACE.device)
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, **options}
    out = found.generate(ids, max_new_tokens=PLACE.size(48, 4), **options)
    return out.sequences[0, len(PROMPT) :].tolist(), torch.stack(out.logits, 1)[0].float()


def check_alike(a: tuple[list[int], torch.Tensor], b: tuple[list[int], torch.Tensor]) -> None:
    """Logits that differ by rounding, wherever both had the same tokens before them; two logits alike may order either way."""
    same = next((i for i, (x, y) in enumerate(zip(a[0], b[0], strict=True)) if x != y), len(a[0]))
    for i in range(min(same + 1, len(a[0]))):
        assert (a[1][i] - b[1][i]).abs().max() < 0.1 * a[1][i].std(), f"token {i}: {a[0]} and {b[0]}"


@pytest.mark.parametrize("shared", [False, True], ids=["two models", "one model"])
def test_two_threads_with_streams_of_their_own(shared: bool) -> None:
    """Recording, and replaying, beside the other thread's: the tokens of calls one after the other."""
    models = [model("nf4"), model("nf4")]
    models = [models[0], models[0]] if shared else models
    expected, together = text(model("nf4")), threading.Barrier(2)

    def run(found: Any) -> list[list[int]]:
        with nullcontext() if DRY else torch.cuda.stream(torch.cuda.Stream()):
            made = []
            for _ in range(3):
                together.wait(300)
                made.append(text(found))
            return made

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, models)) == [[expected] * 3] * 2


def test_a_model_that_was_moved_and_cast_after_its_steps() -> None:
    """To the host and back, where its weights may lie elsewhere, and to fp16."""
    found, fresh = model("nf4"), model("nf4")
    before = [text(found) for _ in range(3)]
    found.to("cpu").to(PLACE.device)
    assert text(found) == text(found) == before[0] == before[2]
    found.to(torch.float16)
    fresh.to(torch.float16)
    assert text(found) == text(found) == text(fresh)


@pytest.mark.parametrize("sample", [False, True])
def test_recorded_steps_give_the_tokens_of_generate(sample: bool) -> None:
    """CUDA graphs, replayed by this call and by later ones: the very tokens of the eager loop, alike if compiled."""
    found = model("nf4", fuse_qkv=True)
    for seed in range(3):
        made = []
        for options in ({"recorded": False}, {"fuse_blocks": False}):
            torch.manual_seed(seed)
            made.append(text(found, disable_compile=True, **{"do_sample": sample, **options}))
        assert made[0] == made[1]
        (step,) = kept_steps(found)
        (forward,) = step.forwards
        recorded = [forward.recorded, *(choice.graph for choice in forward.choices.values())]
        assert len(recorded) > 1
        assert DRY or all(one.graph is not None for one in recorded)
    if not DRY and not sample:
        check_alike(steps(found, recorded=False), steps(found, fuse_blocks=False))


@pytest.mark.parametrize("fuse_blocks", [False, True])
def test_prompt_lookup_gives_greedy_tokens(fuse_blocks: bool) -> None:
    """Recorded, and replayed by a second call: greedy tokens up to two logits that rounding may order either way."""
    found = model("nf4", fuse_qkv=True)
    expected, logits = steps(found, recorded=False, disable_compile=True)
    options = {"prompt_lookup_num_tokens": 7, "fuse_blocks": fuse_blocks}
    made, again = (text(found, **options) for _ in range(2))
    assert made == again
    assert len(made) == len(expected)
    i = next((i for i, (x, y) in enumerate(zip(made, expected, strict=True)) if x != y), 0)
    assert logits[i, expected[i]] - logits[i, made[i]] < 0.1 * logits[i].std(), f"token {i}: {made} and {expected}"
    (forward,) = kept_steps(found)[-1].forwards
    assert DRY or all(one.graph is not None for one in (forward.recorded, *(c.graph for c in forward.choices.values())))


def test_recorded_prompts_give_the_tokens_of_the_first_call() -> None:
    """Which runs them padded, too: a replayed prompt, of this length and of another one in its bucket, has the same bits."""
    found = model("nf4", fuse_qkv=True)
    for length in (len(PROMPT), len(PROMPT) - 3, len(PROMPT)):
        ids = torch.tensor([PROMPT[:length]], device=PLACE.device)
        made = [found.generate(ids, max_new_tokens=PLACE.size(24, 4), do_sample=False).tolist() for _ in range(3)]
        assert made[0] == made[1] == made[2]
    prompts = kept_steps(found)[-1].prompts
    assert DRY or (len(prompts) == 1 and prompts[0].recorded.graph is not None)


@pytest.mark.parametrize("weights", ["nf4", "int4_g128"])
def test_fused_blocks_give_logits_alike(weights: str) -> None:
    """Recorded, and replayed by a second call: the logits of plain blocks but for rounding, and the same bits each time."""
    found = model(weights, fuse_qkv=True)
    plain = steps(found, fuse_blocks=False)
    fused, again = (steps(found) for _ in range(2))
    check_alike(plain, fused)
    assert fused[0] == again[0]
    assert torch.equal(fused[1], again[1])


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen3_5_text", "qwen3_moe"])
def test_first_call_of_a_family_compiles_ahead(
    family: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Mixtures, a recurrence and latents: launches that only compile harm nothing, and blocks are fused."""
    for name in ("run", "turns"):  # of calls to come, which take a minute
        monkeypatch.setattr(rehearsal._Rehearsal, name, lambda self, calls=(): None)
    found = hf.quantize(tiny_model(family).to(PLACE.device, torch.bfloat16))
    ids = torch.arange(2, 22, device=PLACE.device).view(2, 10)
    first, again = (found.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0).tolist() for _ in range(2))
    assert first == again
    assert fused_view(found) is not None
    assert kept_steps(found)
    assert not [one for one in recwarn if "not ahead" in str(one.message)]


@torch.no_grad()
def test_many_replays_drift_nowhere() -> None:
    """A recorded step 10,000 times behind the same tokens: the same logits each time, and not a byte more memory."""
    found = model("nf4", fuse_qkv=True)
    text(found)
    step, view = kept_steps(found)[-1], fused_view(found)
    forward, caches = step.forwards[-1], [layer.kv for layer in step.cache.layers]
    assert view is not None
    assert DRY or forward.recorded.graph is not None
    position, first, wrong = forward.inputs["position_ids"], None, torch.zeros((), dtype=torch.long, device=PLACE.device)
    held = 0
    for i in range(PLACE.size(10_000, 20)):
        for kv in caches:
            kv.lengths.fill_(len(PROMPT))
        position.fill_(len(PROMPT))
        logits = forward(view)
        first = logits.clone() if first is None else first
        wrong += (logits != first).any()
        if i == 1 and not DRY:
            held = torch.cuda.memory_allocated()
    assert int(wrong) == 0
    assert first is not None
    assert first.isfinite().all()
    assert DRY or torch.cuda.memory_allocated() <= held
    assert all(kv.lengths.tolist() == [len(PROMPT) + 1] for kv in caches)


QUANTISED = [(None, False), ("nf4", False), ("nf4", True), ("int4_g128", False), ("int4_g128", True)]


@pytest.mark.parametrize(("weights", "fuse_qkv"), QUANTISED)
def test_loop_of_transformers_compiles_a_step(weights: str | None, fuse_qkv: bool) -> None:
    """With recorded=False: into CUDA graphs; dry, the same step in one graph of Dynamo.

    Inductor is told to round where eager code does: by itself it keeps fp32 between operations, and greedy text soon differs.
    """
    found = model(weights, fuse_qkv)
    assert all(layer.is_compileable for layer in hf.PackedCache(found, 64).layers)
    options: dict[str, Any] = {"recorded": False}
    if DRY:
        options["compile_config"] = transformers.CompileConfig(backend="eager", mode=None, fullgraph=True)
        options["compile_config"]._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    eager = steps(found, recorded=False, disable_compile=True)
    with torch._inductor.config.patch(emulate_precision_casts=True):
        recorded = steps(found, **options)
        again = steps(found, **options)
    check_alike(recorded, eager)
    assert recorded[0] == again[0]
    check_alike(steps(found, recorded=False, disable_compile=True), eager)  # nothing that a graph holds is used by eager calls
    assert counters["stats"]["unique_graphs"] >= 1, "nothing was compiled"
    assert not counters["inductor"]["cudagraph_skips"], "compiled, but not recorded"
