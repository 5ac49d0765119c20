"""Decode steps of a whole model: what is timed, traced and counted."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen3_5TextConfig

import halfbyte.hf as hf
from command_line import run
from halfbyte.device import cpu_has_bf16, describe
from halfbyte.errors import InvalidArgument
from halfbyte.hf.model_support import half_type
from halfbyte.hf.recorded_step import kept_steps
from halfbyte.nn import QuantLayer
from halfbyte_lab import model_step
from halfbyte_lab.model_sizes import of_sizes
from halfbyte_lab.model_step import (
    PACKED,
    PLAIN,
    WAYS,
    Formats,
    Part,
    Steps,
    Used,
    Way,
    bytes_moved,
    load,
    parts_of,
    short_name,
    timed,
    used,
)

FORMATS = Formats("int4_g64", "int8", "int4_g32")


@pytest.mark.slow
def test_parts_of_a_step_are_counted_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's are subtracted, and what is left is divided by the steps."""
    model, steps = load("demo", describe("cpu"), FORMATS), Steps(2, 8, 3)
    hf.quantize(model, **FORMATS.options, fuse_qkv=True, fuse_gate_up=True)
    layers = model.config.num_hidden_layers
    for way in (PACKED[0], PACKED[2]):
        parts = parts_of(model, steps, way)
        times = {name: part.times for name, part in parts.items()}
        assert times["halfbyte::decode_attention"] == layers
        assert times["halfbyte::linear"] == 4 * layers  # q, k and v at once; gate and up at once
        assert [p.seconds for p in parts.values()] == sorted((p.seconds for p in parts.values()), reverse=True)
    traces = iter([{"a": Part(1.0, 4), "b": Part(1.0, 2)}, {"a": Part(4.0, 10), "b": Part(0.5, 2), "c": Part(6.0, 3)}])
    monkeypatch.setattr(model_step, "_traced", lambda run, device: next(traces))
    assert parts_of(model, Steps(1, 8, 4), PLAIN) == {"c": Part(2.0, 1), "a": Part(1.0, 2)}


def test_a_step_is_what_a_long_call_takes_beyond_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that take longer in some calls than in others never make a step look faster."""
    clock, model, late = [0.0], torch.nn.Linear(1, 1), itertools.cycle((0, 3, 3))

    def call(model: object, steps: Steps, way: object, new: int) -> object:
        return lambda: clock.__setitem__(0, clock[0] + 5 + (next(late) if new == 1 else 2 * (new - 1)))

    monkeypatch.setattr(model_step, "_call", call)
    monkeypatch.setattr(model_step.time, "perf_counter", lambda: clock[0])
    assert timed(model, Steps(1, 8, 9), PLAIN) == (5, 2)


def test_sides_are_timed_in_turn_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What slows one round slows every side of it, and the spread shows it."""
    clock, order = [0.0], []

    def call(model: object, steps: Steps, way: object, new: int) -> object:
        def run() -> None:
            order.append((way.name, new))  # type: ignore[attr-defined]
            busy = len(order) > len(sides) * (model_step._WARM_UP + 4)  # from the third round on
            clock[0] += (2 if busy else 1) * (1 + new)

        return run

    sides = [(None, PLAIN), (None, PACKED[1])]
    monkeypatch.setattr(model_step, "_call", call)
    monkeypatch.setattr(model_step.time, "perf_counter", lambda: clock[0])
    found = model_step.timed_in_turn(sides, Steps(1, 8, 9))
    warm, names = order[: 2 * model_step._WARM_UP], [way.name for _, way in sides]
    assert warm == [(name, 9) for name in names for _ in range(model_step._WARM_UP)]
    assert order[len(warm) :] == [(name, new) for name in names for new in (1, 9)] * model_step._REPEATS
    assert found[0] == found[1]
    assert min(found[0].steps) < max(found[0].steps)


@pytest.mark.slow
@pytest.mark.parametrize("ways", [WAYS[:1], WAYS[3:], WAYS[:2]])
def test_ways_that_are_chosen(monkeypatch: pytest.MonkeyPatch, ways: tuple[Way, ...]) -> None:
    """Quantized only for the ways that are; the timed calls of the recorded ones share one step and its capacity."""
    monkeypatch.setattr(model_step, "_REPEATS", 1)
    machine = describe("cpu")
    model = load("demo", machine, FORMATS)
    found = list(model_step.measure(model, FORMATS, Steps(1, 60, 12), machine, traced=False, ways=ways))
    assert [r.implementation for r in found] == [way.name for way in ways]
    assert not any(r.kernels for r in found)
    assert any(isinstance(m, QuantLayer) for m in model.modules()) == (ways != WAYS[:1])
    steps = kept_steps(model)
    assert len(steps) == (ways == WAYS[3:])
    assert all(step.forwards[0].recorded.calls == (model_step._WARM_UP + 1) * 11 for step in steps)
    assert model_step.replays(model, ways[-1], Steps(1, 60, 12)) == ()  # no graph on a CPU


def test_replays_of_a_graph_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each behind the same tokens; then the step is freed."""
    model, lengths, ran = torch.nn.Linear(1, 1), [torch.zeros(2), torch.zeros(2)], []

    def replay() -> None:
        ran.append([held.tolist() for held in lengths])
        for held in lengths:
            held.add_(1)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = len(ran)

        def elapsed_time(self, other: Event) -> float:
            return 2.0 * (other.at - self.at)

    forward = SimpleNamespace(recorded=SimpleNamespace(graph=SimpleNamespace(replay=replay)))
    cache = SimpleNamespace(packed=[SimpleNamespace(kv=SimpleNamespace(lengths=held)) for held in lengths])
    freed = []
    monkeypatch.setattr(model_step, "kept_steps", lambda model: [SimpleNamespace(cache=cache, forwards=[None, forward])])
    monkeypatch.setattr(model_step, "release", freed.append)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    model.device = torch.device("cpu")  # type: ignore[assignment]
    assert model_step.replays(model, PACKED[2], Steps(2, 60, 12), 3) == (2e-3,) * 3
    assert ran == [[[60.0, 60.0], [60.0, 60.0]]] * 3
    assert freed == [model]
    assert model_step.replays(model, PACKED[0], Steps(2, 60, 12)) == ()


def test_bytes_of_a_step() -> None:
    """Weights but for the embedding, which only looks up a token, unless it is the output layer too; and the cache."""
    model, steps = load("demo", describe("cpu"), FORMATS), Steps(3, 64, 2)
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    lookup = 0 if tied else model.get_input_embeddings().weight.nbytes
    config = model.config
    head = config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * head
    assert bytes_moved(model, steps, "bf16", "bf16", Used(0, {}), 2) == weights - lookup + 3 * 64 * token * 4
    assert bytes_moved(model, steps, "bf16", "bf16", Used(10, {})) == 20 + weights - lookup + 3 * 64 * token * 2


@pytest.mark.parametrize("weights", [None, "int8_col"])
def test_bytes_of_a_step_of_a_mixture_with_windows(weights: str | None) -> None:
    """Experts that no token of a step was routed to are not read; two of four layers see 32 tokens."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    layers = {"num_hidden_layers": 4, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
    config = GptOssConfig(num_local_experts=4, num_experts_per_tok=2, vocab_size=96, **layers, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for layer, chosen in zip(model.model.layers, ([9, 9, 0, 0], [0, 9, 0, 9], [9, 0, 9, 0], [0, 0, 9, 9]), strict=True):
        layer.mlp.router.weight.data.zero_()
        layer.mlp.router.bias.data = torch.tensor(chosen, dtype=torch.bfloat16)  # every token takes the same two experts
    way = PLAIN if weights is None else PACKED[0]
    if weights is not None:
        hf.quantize(model, weights=weights, keys="int8", values="int8")
    whole = sum(t.nbytes for t in (*model.parameters(), *model.buffers())) - 96 * 64 * 2
    experts = 4 * 4 * 3 * 64 * (64 * 2 if weights is None else 64) + (0 if weights is None else 4 * 4 * 3 * 64 * 2)
    cache, steps = 2 * 2 * (32 + 128) * 2 * (2 * 32 * 2), Steps(2, 128, 2)
    use = used(model, steps, way)
    assert use.states == 0
    assert [*use.experts.values()] == [0.5] * 4
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert bytes_moved(model, steps, "bf16", "bf16", use) == whole - experts // 2 + cache
    unknown = Used(0, {})  # used equally often, 2 sequences use 3 of 4 experts
    assert bytes_moved(model, steps, "bf16", "bf16", unknown) == whole - experts // 4 + cache


@pytest.mark.parametrize("way", [PLAIN, PACKED[0]])
def test_states_that_a_step_uses(way: Way) -> None:
    """The recurrent layer has a state [16, 8] of each of 4 heads, fp32, and 4 columns of its convolution."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    states = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8}
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    config = Qwen3_5TextConfig(vocab_size=96, **sizes, **states, **layers)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if way is not PLAIN:
        hf.quantize(model, keys="int8", values="int8")
    assert used(model, Steps(3, 8, 2), way) == Used(3 * 4 * (4 * 16 * 8 + 4 * (2 * 2 * 16 + 4 * 8)), {})


@pytest.mark.parametrize(
    ("kernel", "short"),
    [
        ("add_norm", "add_norm"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::Fill<int>, std::array<char*, 1ul> >(int, Fill)",
         "vectorized_elementwise_kernel"),
        ("triton_per_fused_add_mul_0", "triton_per_fused_add_mul_0"),
        ("void (anonymous namespace)::copy<float>(float*)", "copy"),
        ("<strange>", "<strange>"),
    ],
)  # fmt: skip
def test_names_of_kernels(kernel: str, short: str) -> None:
    assert short_name(kernel) == short


@pytest.mark.slow
def test_command(capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_step, "_WARM_UP", 1)
    monkeypatch.setattr(model_step, "_REPEATS", 1)
    monkeypatch.setattr(model_step, "_LEAST", 0.0)  # what is kept must not hang on how long a step took
    file = tmp_path / "steps.jsonl"
    options = ["--random", "--context", "8", "--new", "3", "--weights", "nf4", "--lm-head", "int8_col", "--output", str(file)]
    assert run("bench", "model", "--json", *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert [r["implementation"] for r in found] == [way.name for way in WAYS]
    assert [r["formats"] for r in found] == [
        "bf16" if cpu_has_bf16() else "fp32",
        *["nf4, int8_col lm_head, int8_channel/int8"] * 3,
    ]
    assert all(r["p10"] == r["seconds"] == r["p90"] > 0 and r["repeats"] == 1 and r["kernels"] for r in found)
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert kept == [*({**r, "kernels": {}} for r in found), *found]  # each when it was timed, and again when all were
    assert run("bench", "model", *options, "--dtype", "fp16") == 0
    said, kept = capsys.readouterr().out, [json.loads(line) for line in file.read_text().splitlines()[len(kept) :]]
    assert [r["formats"] for r in kept] == ["fp32", *["nf4, int8_col lm_head, int8_channel/int8, fp16"] * 3] * 2
    assert "A step of halfbyte, fused blocks" in said
    assert "others, and waiting" in said
    assert "25 x halfbyte::linear" in kept[-1]["kernels"]  # four of each of the 6 layers, and the output layer
    assert max(kept[-1]["kernels"], key=kept[-1]["kernels"].get) in said


def test_llama_cpp_is_refused_before_a_model_loads(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    (tmp_path / "m.gguf").touch()
    for options, said in (
        (["--gguf", str(tmp_path / "m.gguf"), "--batch", "2"], "with one sequence"),
        (["--gguf", str(tmp_path / "none.gguf")], "none.gguf' is no file"),
    ):
        assert run("bench", "model", "--device", "cpu", *options) != 0
        assert said in capsys.readouterr().err


def test_refused(tmp_path) -> None:
    machine = describe("cpu")
    with pytest.raises(InvalidArgument, match="new=1; expected at least 2"):
        Steps(1, 8, 1)
    with pytest.raises(InvalidArgument, match="int3"):
        Formats("nf4", "int3", "int8")
    with pytest.raises(InvalidArgument, match="int9"):
        Formats("nf4", "int8", "int8", "int9")
    with pytest.raises(InvalidArgument, match="dtype='fp32'; choose bf16 or fp16"):
        Formats("nf4", "int8", "int8", dtype="fp32")
    config = LlamaConfig(hidden_size=96, intermediate_size=64, num_hidden_layers=1, num_attention_heads=3, vocab_size=9)
    for formats, said in (("int4_g64", "int8", "int8"), "96"), (("int8_col", "int4_g64", "int8"), "keys='int4_g64'"):
        with pytest.raises(InvalidArgument, match=said):
            of_sizes(config, machine, Formats(*formats))
    assert half_type(load("demo", machine, Formats("nf4", "int8", "int8", dtype="fp16"))) is torch.float16
    hf.save(hf.quantize(load("demo", machine, FORMATS), "nf4"), tmp_path / "packed")
    with pytest.raises(InvalidArgument, match="is quantized already; give one of 16-bit weights"):
        load(str(tmp_path / "packed"), machine, FORMATS)
