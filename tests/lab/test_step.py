"""Study `step`: its cases, what the filter chooses, and how records are told."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from benches import CPU, GPU
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig

import halfbyte.hf as hf
from halfbyte_lab import model_step
from halfbyte_lab.measure.checks import BenchmarkRefused
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Options, Session
from halfbyte_lab.model_sizes import SIZES
from halfbyte_lab.model_step import ALONE, PACKED, PLAIN, Formats, Steps, checked
from halfbyte_lab.studies import step
from watched import watched

#: Cases of one rank.
ONE_RANK = [case.name for case in step.CASES if case.ranks == 1]


def parameters(config: Any, layers: int, formats: Formats) -> int:
    """Of a model of so many of its layers, which the formats fit."""
    fewer = deepcopy(config)
    fewer.num_hidden_layers = layers
    if getattr(fewer, "layer_types", None):
        fewer.layer_types = fewer.layer_types[:layers]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(fewer, dtype=torch.bfloat16)
    return sum(p.numel() for p in checked(model, formats).parameters())


def test_cases_can_be_built() -> None:
    """The formats of each fit its sizes, which are those of the published model."""
    found: dict[str, float] = {}
    for case in step.CASES:
        config = SIZES[case.model]
        if case.model not in found:
            few, more = (parameters(config, layers, case.formats) for layers in (4, 8))
            found[case.model] = (few + (more - few) * (config.num_hidden_layers - 4) / 4) / 1e9
        assert case.context + step.NEW <= config.max_position_embeddings
        Steps(case.batch, case.context, step.NEW)
    published = {"llama-3-8b": 8.03, "llama-3-70b": 70.6, "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.72}
    published |= {"qwen3.5-9b": 8.95, "qwen3-30b-a3b": 30.5, "gpt-oss-20b": 20.9}
    assert found == {name: pytest.approx(size, rel=0.005) for name, size in published.items()}


def test_experts_that_are_wrong_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of the first block of each kind are judged, and experts among them."""
    case = step.Case("m-2", "gpt-oss-20b", 2, 32, weights="int4_g32")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 64}
    config = GptOssConfig(**sizes, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, vocab_size=96)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    hf.quantize(model, **case.formats.options)
    right = step.run
    judged = watched(monkeypatch, step, "run")
    step.judge(case, model)
    assert [call.gates is None for call, _ in judged] == [True, False] * 2  # both projections of a layer with a window, and without
    monkeypatch.setattr(step, "run", lambda call, impl: 1.1 * right(call, impl))
    with pytest.raises(BenchmarkRefused, match=r"m-2: QuantExperts\("):
        step.judge(case, model)


@pytest.mark.parametrize(("pattern", "names"), [("", ONE_RANK), ("8b-8 .*fused", ["8b-8"]), ("8b-(1|8) ", ["8b-1", "8b-8"])])
def test_the_last_case_of_a_filter_is_traced(pattern: str, names: list[str]) -> None:
    found = step.jobs(Session(Options(pattern=pattern), GPU))
    assert [job.name for job in found] == names
    assert [job.traced for job in found] == [False] * (len(names) - 1) + [True]  # type: ignore[attr-defined]


def test_ranks_run_where_there_are_gpus_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    found = step.jobs(Session(Options(pattern="70b"), GPU))
    assert [job.name for job in found] == ["70b-1", "70b-1 on 2", "70b-1 on 4"]
    assert [job.traced for job in found] == [True, False, False]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_two_ranks_are_measured() -> None:
    """In two processes; ranks whose logits differ are refused there."""
    session = Session(Options(pattern="demo-2 on 2", threads=1), CPU)
    (record,) = session.run(step.jobs(session))
    assert record.shape == {"B": 2, "T": 64, "layers": 6, "ranks": 2}
    assert record.seconds


def test_sizes_that_ranks_cannot_share_are_refused() -> None:
    config = LlamaConfig(num_attention_heads=6, num_key_value_heads=3, hidden_size=384)
    with pytest.raises(BenchmarkRefused, match="num_key_value_heads=3"):
        step.share(config, 2, CPU, step.CASES[0].formats)


@pytest.mark.slow
def test_ways_are_measured_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_step, "_REPEATS", 1)
    monkeypatch.setattr(model_step, "_WARM_UP", 1)
    monkeypatch.setattr(step, "NEW_ON_CPU", 65)  # steps are what a long call takes beyond a short one, which a busy host blurs
    session = Session(Options(pattern="demo-2 (?!on).*(transformers|fused)", threads=1), CPU)
    measured = session.run(step.jobs(session))
    assert [r.implementation for r in measured] == 2 * [PLAIN.name, PACKED[2].name]
    assert [bool(r.kernels) for r in measured] == [False, False, True, True]
    headers, rows = step.table(measured[2:])
    assert [len(row) for row in rows] == 2 * [len(headers)]
    assert rows[0][5] == "1.00"
    other = replace(measured[2], environment=replace(measured[2].environment, date="another day"))
    assert [row[5] for row in step.table([other, measured[3]])[1]] == ["1.00", ""]  # 16 bits of another run
    assert len(step.drawn(measured)) == 1
    fused = step.kinds(measured[3])
    assert fused["linear"] > 0 < fused["attention"]
    assert sum(fused.values()) == pytest.approx(1e6 * (measured[3].seconds or 0), rel=0.5)


@pytest.mark.parametrize(
    ("target", "met", "missed"),
    [("600 tokens/s", 1 / 601, 1 / 599), ("2.7 ms", 2.69e-3, 2.71e-3), ("3x 16 bits", 0.99e-3, 1.01e-3)],
)
def test_a_target_is_met_or_missed(target: str, met: float, missed: float) -> None:
    blank = Record("generate", {"B": 1}, "f", step.FASTEST, 10**9, Session(Options(), CPU).environment)
    assert step._is_met(target, replace(blank, seconds=met), 3e-3)
    assert not step._is_met(target, replace(blank, seconds=missed), 3e-3)
    share = [step._is_met("55 % of the roofline", replace(blank, roof_share=share), None) for share in (0.55, 0.54)]
    assert share == [True, False]


def test_launches_by_kind() -> None:
    kernels = {"129 x linear": 1e-3, "32 x decode": 3e-4, "32 x append_tokens": 1e-4, "64 x add_norm": 2e-4}
    kernels |= {"32 x gated": 5e-5, "7 x copy": 1e-5}
    record = Record("generate", {"B": 1}, "f", "halfbyte, fused blocks", 10**9, Session(Options(), CPU).environment, seconds=2e-3)
    traced = replace(record, kernels=kernels, roof_share=0.5, case="8b-1", note="first token 101.5 ms")
    found = {kind: round(us) for kind, us in step.kinds(traced).items()}
    assert found == {"linear": 1000, "attention": 300, "append": 100, "norm": 200, "activation": 50, "other": 10, "gaps": 340}
    (row,) = step.table([traced])[1]
    assert row == ("8b-1", "halfbyte, fused blocks", "f", "2.00", "500", "", "1.00", "50%", "101.5", "600 tokens/s: missed")
    alone = replace(record, implementation=record.implementation + ALONE, seconds=1.8e-3, case="8b-1")
    assert step.says([traced, alone]) == []
    (said,) = step.says([traced, replace(alone, seconds=2.1e-3)])
    assert said.startswith("The graph alone takes longer than its step in 8b-1, ")
    assert step.drawn([record]) == []
    assert step.kinds(replace(traced, seconds=1e-3))["linear"] == pytest.approx(1000)  # traced slower than timed: no gap
