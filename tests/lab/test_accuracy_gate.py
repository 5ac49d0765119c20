"""No study gives a figure to kernels whose outputs are 3 % too large, or wrong in one head of one sequence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benches import CPU, quick

from halfbyte.device import Device
from halfbyte.ops import _fused
from halfbyte_lab.cases import qkv_cases, qkv_layers
from halfbyte_lab.cases.engine_step import Requests
from halfbyte_lab.cases.rank import Model, Rank
from halfbyte_lab.evals.quality import Setting
from halfbyte_lab.measure.caches import DecodeCase, Inputs, Promise, fill, held_by
from halfbyte_lab.measure.decode import DecodeShape
from halfbyte_lab.measure.records import Record, Verdict
from halfbyte_lab.measure.session import Job
from halfbyte_lab.studies import (
    QUESTIONS,
    accuracy,
    capacity,
    decode_70b,
    engines,
    evidence,
    int4_gqa,
    int4_ladder,
    prompts,
    quality_per_bit,
    step,
    study,
    w4a16_splitk,
)
from halfbyte_lab.studies import int8_granularity as granularity
from halfbyte_lab.studies import int8_splitk as splitk

LAYER = qkv_layers.AttentionShape("small layer", 128, 4, 2, 32, 24)
RANK = Rank(hidden=128, q_heads=4, kv_heads=1, dim=32, ffn=64, layers=6, vocabulary=48)
WEIGHTS = (Setting(weights="int4_g64"),)


def of_quality(outliers: Any = None) -> list[Job]:
    caches = (Setting("int8", "int8"), Setting("int4", "int4", rotate_keys=True))
    return [
        accuracy.QualityJob("caches", caches, 2, 32, outliers=outliers),
        accuracy.QualityJob("weights", WEIGHTS, 2, 32, outliers=outliers),
        accuracy.KeysJob(accuracy.PLAIN, (("int8", False), ("int4", True)), 2, 32, outliers=outliers),
    ]


#: Every study in small, on a CPU.
SMALL: dict[str, Callable[[], Sequence[Job]]] = {
    "int4-gqa": lambda: [int4_gqa.BatchJob(3, 64)],
    "int4-ladder": lambda: [int4_ladder.LadderJob(3, 64)],
    "int8-granularity": lambda: [
        granularity.CaseJob("GQA", DecodeShape(granularity.DISTINCT, 4, 2, 32, 64), alibi) for alibi in (False, True)
    ],
    "int8-splitk": lambda: [
        splitk.AttendJob(DecodeCase("even", DecodeShape(1, 4, 2, 32, 64))),
        splitk.AttendJob(DecodeCase("varied", DecodeShape(3, 4, 2, 32, 64), runs=((2, 16), (1, 64)))),
    ],
    "prompts": lambda: [prompts.CaseJob(2, 20, 0), prompts.CaseJob(2, 20, 33)],
    "decode-70b": lambda: [decode_70b.StepJob(Model(RANK, CPU, 2, 3), 3, 64)],
    "engines": lambda: [engines.StepJob(Requests(2, 20)), engines.StepJob(Requests(2, 20, prompt=6, past=15))],
    "capacity": lambda: [capacity.CapacityJob(Model(RANK, CPU, 2, 3), 64, f, 2 * 10**6) for f in ("bf16", "int4")],
    "step": lambda: [step.StepJob(step.Case("step", "demo", 2, 16))],
    "w4a16-splitk": lambda: [w4a16_splitk.SizeJob(256, 256, (1, 3))],
    "fused-qkv": lambda: [
        qkv_cases.VariantsJob(qkv_layers.random_weights(LAYER), "auto", ("nf4",)),
        qkv_cases.FusedJob(LAYER, "auto", (1, 3), ("nf4",)),
    ],
    "accuracy": of_quality,
    "quality-per-bit": lambda: [
        *of_quality(quality_per_bit.MODELS["Qwen3"]),
        quality_per_bit.PlansJob("plans", (7.0,), 1, 32),
        quality_per_bit.ContinuationsJob("written", (Setting("int8", "int8"),), 160),
    ],
    "evidence": lambda: [
        evidence.TextJob("prose", "bf16", evidence.LADDER[:2], 1, 32),
        evidence.TextJob("prose", "bf16", (Setting(weights="nf4"),), 1, 32, evidence.OF_WEIGHTS),
    ],
}
#: What runs no kernel.
NOTHING_RUNS = {"memory"}


def too_large(out: torch.Tensor, heads: int) -> torch.Tensor:
    return 1.03 * out


def one_wrong_head(out: torch.Tensor, heads: int) -> torch.Tensor:
    """The last head of the last sequence is the first. `heads`: of rows that hold them side by side; 0 for [B, heads, L, D]."""
    made = out.clone().unflatten(-1, (heads, -1)) if heads else out.clone()
    made[-1, -1] = made[-1, 0]
    return made.flatten(-2) if heads else made


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, brief: None, two_layers: Path) -> None:
    monkeypatch.setattr("halfbyte.paths.shipped_model", lambda: two_layers)
    monkeypatch.setattr(quality_per_bit, "FORMATS", ("int8", "int4"))
    for name, size in (("DIM", 64), ("KV_HEADS", 1), ("Q_HEADS", 2)):
        monkeypatch.setattr(prompts, name, size)
        monkeypatch.setattr(engines, name, size)


def seed(monkeypatch: pytest.MonkeyPatch, fault: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """The fault in everything that attention and linear layers give on a CPU."""
    attention: dict[str, Any] = sys.modules["halfbyte.ops._decode_in_torch"].LEVELS
    products: dict[str, Any] = sys.modules["halfbyte.ops.linear"]._LEVELS

    def attend(right: Any) -> Any:
        def wrong(op: Any, *args: Any) -> Any:
            out, lse = op(*args)
            return fault(out, 0), lse

        return SimpleNamespace(**{name: partial(wrong, getattr(right, name)) for name in ("decode_attention", "chunk_attention")})

    def of_prompts(*args: Any) -> Any:
        part = by_torch(*args)
        return None if part is None else (fault(part[0], 0), part[1])

    by_torch = _fused.on_cpu
    monkeypatch.setattr(_fused, "on_cpu", of_prompts)
    for name, right in list(attention.items()):
        monkeypatch.setitem(attention, name, attend(right))
    for name, product in list(products.items()):
        monkeypatch.setitem(products, name, lambda *args, product=product: fault(product(*args), 2))


def measured(name: str) -> list[Record]:
    """What halfbyte's kernels have a part in."""
    ours = ("halfbyte", "two-kernel", "one launch", "three launches")
    found = quick().run(SMALL[name]())
    return [r for r in found if r.implementation.startswith(ours) or r.refused]


def test_every_study_is_here_by_its_name() -> None:
    assert set(SMALL) | NOTHING_RUNS == set(QUESTIONS)
    for name in QUESTIONS:
        found = study(name)
        assert (found.title, found.asks, list(found.charts([]))) == (name, QUESTIONS[name], [])


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("name", SMALL)
def test_what_is_right_is_measured_and_told(name: str) -> None:
    records = quick().run(SMALL[name]())
    assert [r.refused for r in records if r.refused] == []
    tables = [study(name).table(records), study(name).also(records)]
    assert any(rows for _, rows in tables)
    assert all(len(row) == len(headers) for headers, rows in tables for row in rows)
    assert "" not in study(name).says(records)
    assert all(chart.startswith("<svg") for chart in study(name).charts(records))


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("fault", [too_large, one_wrong_head])
@pytest.mark.parametrize("name", SMALL)
def test_what_is_wrong_is_refused(name: str, fault: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    seed(monkeypatch, fault)
    found = measured(name)
    assert found
    for r in found:
        assert "exceeds the allowed" in r.refused, r
        assert (r.seconds, r.perplexity, r.bits, r.by_layer) == (None, None, None, ()), r


@pytest.mark.parametrize("sequence", range(7))
def test_all_sequences_are_judged_head_by_head(sequence: int) -> None:
    inputs = Inputs.random(DecodeCase("varied", DecodeShape(7, 4, 2, 32, 96), runs=((3, 96), (4, 40))), torch.device("cpu"))
    cache = fill(inputs, "int4+int8")
    promise = Promise(inputs.q, held_by(cache))
    out = promise._ref.bfloat16()
    assert promise.judge([out]).ok
    for wrong in (1.03 * out[sequence, 2], out[sequence, 1], torch.full_like(out[sequence, 2], torch.nan)):
        other = out.clone()
        other[sequence, 2] = wrong
        assert not promise.judge([out, other]).ok


def test_sequences_are_widened_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs.random(DecodeCase("varied", DecodeShape(7, 4, 2, 32, 96), runs=((3, 96), (4, 40))), torch.device("cpu"))
    cache = fill(inputs, "int4_g32")
    assert [k.shape[:3] for k, _ in held_by(cache)] == [(3, 2, 96), (4, 2, 40)]
    whole = Promise(inputs.q, held_by(cache))
    monkeypatch.setattr("halfbyte_lab.measure.caches._WIDE", 2 * 2 * 96 * 32)
    assert [k.shape[0] for k, _ in held_by(cache)] == [2, 1, 2, 2]
    torch.testing.assert_close(Promise(inputs.q, held_by(cache))._ref, whole._ref)


def test_times_of_a_cpu_are_not_judged_by_the_targets_of_a_gpu() -> None:
    bars = (Verdict("gain", 1.0, 2.0, met=True),)
    for kind, kept in (("cpu", ()), ("cuda", bars)):
        s = quick()
        s.device = Device(kind, "fake", 2**30, 0, 1, 1)  # type: ignore[arg-type]
        s.keep(Record("op", {}, "int4", "halfbyte", 1, s.environment, bars=bars))
        assert s.records[0].bars == kept
