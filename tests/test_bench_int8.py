"""The studies of INT8 attention, in small on a CPU: what is measured, what is refused, how it is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from halfbyte.bench import session
from halfbyte.bench.records import Environment, Record
from halfbyte.bench.session import Options, Session
from halfbyte.bench.studies import int8_splitk as splitk
from halfbyte.bench.studies import study
from halfbyte.bench.timing import Effort
from halfbyte.device import Device
from halfbyte.plans.decode_attention import GluonPlan, Problem, gluon_plan
from halfbyte.plans.triton_decode import TritonTiles

BRIEF = Effort(seconds=0.0, repeats=2, block_seconds=1e-5, settle_seconds=0.0)
FAKE = Device("cpu", "fake", memory_bytes=2**30, cache_bytes=0, cores=1, threads=1)
GPU = Device("cuda", "fake", memory_bytes=2**36, cache_bytes=0, cores=1, threads=1, index=0)
WHERE = Environment("fake", "", 1, {"torch": "2"}, "", "halfbyte bench", "2026-01-01T00:00:00+00:00")


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "QUICK", BRIEF)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # tests/interpreted has the kernels


def quick(device: Device = FAKE, **options: Any) -> Session:
    return Session(Options(quick=True, **options), device)


# ---------------------------------------------------------------------------------------------------------------- int8-splitk


def small(problem: splitk.Problem) -> splitk.Problem:
    runs = tuple((n, tokens // 8) for n, tokens in problem.runs)
    return replace(
        problem, shape=replace(problem.shape, q_heads=4, kv_heads=2, dim=32, context=problem.shape.context // 8), runs=runs
    )


def test_splitk_on_a_cpu_runs_every_problem_and_cuts_nothing() -> None:
    jobs = splitk.jobs(quick())
    assert [job.name for job in jobs] == [p.name for p in (splitk.ONE, splitk.TOKENS_FIRST, splitk.VARIED, splitk.EVEN)]
    measured = quick().run([splitk.AttendJob(small(job.problem), (1, 2)) for job in jobs if isinstance(job, splitk.AttendJob)])
    assert [(r.implementation, r.refused) for r in measured] == [("halfbyte cpu", "")] * 4
    assert all(r.seconds and r.error is not None and r.error_allowed and r.error <= r.error_allowed for r in measured)
    assert [r.case for r in measured] == [job.name for job in jobs]
    headers, rows = splitk.table(measured)
    assert all(len(row) == len(headers) for row in rows)
    assert rows[-2][:5] == (splitk.EXPECTED, "a design, not measured", "", "2", "1.3 - 1.5")
    assert len(splitk.drawn(measured)) == 1
    first, second = splitk.says(measured)
    assert first.startswith("halfbyte cpu takes ")
    assert first.endswith("; the published design expects 1.3 to 1.5 us of an A100.")
    assert "(the design: 6 to 8); lengths of 128 to 1,024 take " in second


def test_splitk_has_no_time_for_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitk, "attend", lambda q, cache, impl: torch.zeros_like(q))
    measured = quick().run([splitk.AttendJob(small(splitk.ONE))])
    assert [r.seconds for r in measured] == [None]
    assert "exceeds the allowed" in measured[0].refused
    assert splitk.table(measured)[1][0][4] == "refused"
    assert splitk.drawn(measured) == []
    assert splitk.says(measured) == ["No kernel gave a right result in time that could be measured."]


def test_splitk_asks_the_gpu_for_little_when_quick() -> None:
    assert [job.name for job in splitk.jobs(quick(GPU))] == [splitk.EMPTY, splitk.ONE.name]
    full = splitk.jobs(Session(Options(), GPU))
    assert [job.name for job in full] == [splitk.EMPTY, *(job.name for job in splitk.jobs(quick()))]


def test_splitk_counts_the_programs_that_have_work() -> None:
    p = Problem("bf16", 1, 8, 4, 1, 128, 128, 1024, "int8_tensor", "int8_tensor", 0, True, False, False, False, False, False, False)
    plan = gluon_plan(p, 132, (9, 0), True)
    assert isinstance(plan, GluonPlan)
    found = splitk.cuts(plan, (1, 4, 16, 64), 1024)
    assert list(found) == [splitk.PLANNED, ", 1 split", ", 4 splits", ", 16 splits"]
    counted = [splitk.sizes(cut, splitk.ONE) for cut in found.values()]
    assert counted[0] == {"programs": 72, "launches": 1}  # 264 are planned; 8 units of 8 tiles cost 9 tiles each
    assert [sizes["programs"] for sizes in counted[1:]] == [8, 32, 128]
    tiles = TritonTiles(64, 16, 4, 0, 4, 3)
    assert splitk.sizes(tiles, splitk.VARIED) == {"programs": 256, "launches": 2}


def made(problem: splitk.Problem, name: str, seconds: float, **sizes: int) -> Record:
    shape = {**problem.shape.sizes, **sizes}
    common = {"seconds": seconds, "p10": seconds, "p90": seconds, "error": 1e-3, "case": problem.name, "method": "cuda graph"}
    return Record(
        splitk.OP,
        shape,
        splitk.FORMAT,
        name,
        2_097_152,
        WHERE,
        roof_gb_per_s=1000.0,
        roof_share=0.5,
        **common,  # type: ignore[arg-type]
    )


def on_a_gpu() -> list[Record]:
    found = [Record(splitk.OP, {"launches": 1}, "", "empty kernel", 0, WHERE, seconds=1e-6, case=splitk.EMPTY)]
    for n, problem in enumerate((splitk.ONE, splitk.TOKENS_FIRST, splitk.VARIED), 1):
        for impl, launches in (("gluon", 1), ("triton", 2)):
            found.append(made(problem, f"halfbyte {impl}{splitk.PLANNED}", n * launches * 4e-6, programs=72, launches=launches))
            for count in splitk.SPLITS:
                name = f"halfbyte {impl}, {count} split{'s' * (count > 1)}"
                found.append(made(problem, name, n * launches * (3e-6 + 6e-6 / count), programs=8 * count, launches=launches))
    found.append(made(splitk.EVEN, f"halfbyte gluon{splitk.PLANNED}", 4e-6, programs=1, launches=1))
    found.append(made(splitk.ONE, f"halfbyte gluon{splitk.PLANNED}{splitk.OVERLAPPING}", 2e-6, programs=72, launches=1))
    return found


def test_splitk_tells_splits_and_floors() -> None:
    measured = on_a_gpu()
    headers, rows = splitk.table(measured)
    assert all(len(row) == len(headers) for row in rows)
    assert rows[0] == (splitk.ONE.name, "halfbyte gluon, as planned", "72", "1", "4.00", "2.00", "50 %", "1.00", "0.001")
    assert rows[1][4:8] == ("9.00", "", "50 %", "2.25")
    assert [row[4] for row in rows[-3:]] == ["1.3 - 1.5", "1.00", "2.10"]
    assert not any(splitk.OVERLAPPING in row[1] for row in rows)
    first, second = splitk.says(measured)
    assert first == (
        "halfbyte gluon, 16 splits takes 3.38 us, halfbyte gluon, as planned 4.00 us, only reading its 2.10 MB 2.10 us, "
        "an empty launch 1.00 us; the published design expects 1.3 to 1.5 us of an A100."
    )
    assert second == (
        "[B,T,H,D] takes 2.00 times as long as [B,H,T,D] (the design: 6 to 8); lengths of 128 to 1,024 take 3.00 times as long as "
        "576 each; halfbyte triton, 16 splits, in two launches, takes 2.00 times as long as halfbyte gluon, 16 splits, in one."
    )
    by_splits, floors = splitk.drawn(measured)
    assert all(f">{text}<" in by_splits for text in ("[B,H,T,D]", "[B,T,H,D]", "128 to 1,024 tokens", "gluon, as planned"))
    assert "an empty launch" in floors


def test_the_studies_are_found_by_their_names() -> None:
    assert study("int8-splitk") is splitk.STUDY
    assert "splits" in splitk.STUDY.asks
