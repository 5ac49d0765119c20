"""The studies of INT8 attention, in small on a CPU: what is measured, what is refused, how it is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from benches import CPU, GPU, WHERE, quick

from halfbyte.kv_buffer import AttentionOptions
from halfbyte.plans.decode_attention import gluon_plan
from halfbyte.plans.decode_portable import TritonTiles
from halfbyte.plans.decode_problem import DecodeProblem
from halfbyte.plans.decode_spec import DecodePlan
from halfbyte.reference import attention
from halfbyte_lab.measure import compare
from halfbyte_lab.measure.caches import DecodeCase
from halfbyte_lab.measure.decode import DecodeShape
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Options, Session
from halfbyte_lab.studies import int8_granularity as gran
from halfbyte_lab.studies import int8_splitk as splitk
from watched import watched

# ---------------------------------------------------------------------------------------------------------------- int8-splitk


def small(problem: DecodeCase) -> DecodeCase:
    runs = tuple((n, tokens // 8) for n, tokens in problem.runs)
    return replace(
        problem, shape=replace(problem.shape, q_heads=4, kv_heads=2, dim=32, context=problem.shape.context // 8), runs=runs
    )


def test_splitk_on_a_cpu_runs_every_problem_and_cuts_nothing() -> None:
    jobs = splitk.jobs(quick())
    problems = (splitk.ONE, splitk.HALF, splitk.TOKENS_FIRST, splitk.VARIED, splitk.EVEN)
    assert [job.name for job in jobs] == [p.name for p in problems]
    jobs = [replace(job, problem=small(job.problem), splits=(1, 2)) for job in jobs if isinstance(job, splitk.AttendJob)]
    measured = quick().run(jobs)
    assert [(r.implementation, r.refused) for r in measured] == [("halfbyte cpu", "")] * 5
    assert all(r.seconds and r.error is not None and r.error_allowed and r.error <= r.error_allowed for r in measured)
    assert [r.case for r in measured] == [job.name for job in jobs]
    headers, rows = splitk.table(measured)
    assert all(len(row) == len(headers) for row in rows)
    assert rows[-2][:8] == (splitk.EXPECTED, "a design, not measured", "32", "2", "30 %", "", "", "1.3 - 1.5")
    assert len(splitk.drawn(measured)) == 1
    first, second = splitk.says(measured)
    assert first.startswith("halfbyte cpu takes ")
    assert first.endswith("; the published design expects 1.3 to 1.5 us of an A100.")
    assert "(the design: 6 to 8); FP16 queries take " in second
    assert " times as long as BF16; lengths of 128 to 1,024 take " in second


def test_splitk_has_queries_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(monkeypatch, splitk, "attend", lambda q, *_, **options: q.dtype)
    job = splitk.AttendJob(small(splitk.HALF), baselines=True, half=True)
    measured = quick().run([job])
    assert not any(r.refused for r in measured)
    assert set(seen) == {torch.float16}
    assert {r.formats for r in measured} == {"fp16", splitk.FORMAT}


def test_splitk_asks_the_gpu_for_little_when_quick() -> None:
    assert [job.name for job in splitk.jobs(quick(GPU))] == [splitk.EMPTY, splitk.ONE.name]
    full = splitk.jobs(Session(Options(), GPU))
    assert [job.name for job in full] == [splitk.EMPTY, *(job.name for job in splitk.jobs(quick()))]


def test_splitk_times_an_empty_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitk, "bare_launch", lambda _: lambda: None)
    (record,) = quick().run([splitk.EmptyJob()])
    assert record.seconds
    assert (record.case, record.implementation, record.refused) == (splitk.EMPTY, "empty kernel", "")
    assert splitk.table([record])[1][-1][:2] == (splitk.EMPTY, "empty kernel")
    assert quick(pattern="int8_tensor").run([splitk.EmptyJob()]) == []


def test_splitk_counts_the_programs_that_have_work() -> None:
    p = DecodeProblem("bf16", 1, 8, 4, 1, 128, 128, 1024, "int8_tensor", "int8_tensor", 0, True, False, False, False, False)
    plan = gluon_plan(p, 132, (9, 0), True)
    assert isinstance(plan, DecodePlan)
    found = splitk.cuts(plan, (1, 4, 16, 64), 1024)
    assert list(found) == [splitk.PLANNED, ", 1 split", ", 4 splits", ", 16 splits"]
    counted = [splitk.sizes(cut, splitk.ONE) for cut in found.values()]
    assert counted[0] == {"programs": 72, "launches": 1}  # 264 are planned; 8 units of 8 tiles cost 9 tiles each
    assert [sizes["programs"] for sizes in counted[1:]] == [8, 32, 128]
    tiles = TritonTiles(64, 16, 4, 0, 4, 3)
    assert splitk.sizes(tiles, splitk.VARIED) == {"programs": 256, "launches": 2}


def test_splitk_tells_what_a_program_takes_of_an_sm() -> None:
    """Compiled for a GPU that is not here: as many warps as registers, and shared memory, leave room for."""
    pytest.importorskip("triton")
    h200 = replace(CPU, kind="cuda", capability=(9, 0), sm_count=132)
    p = DecodeProblem("fp16", 1, 8, 4, 1, 128, 128, 1024, "int8_tensor", "int8_tensor", 0, True, False, False, False, False)
    plan = gluon_plan(p, 132, (9, 0), False)
    assert isinstance(plan, DecodePlan)
    found = splitk.occupancy(h200, splitk.HALF, plan, half=True)
    assert found["SMs"] == 132
    assert 32 < found["registers"] <= 255
    assert found["warps"] in {round(100 * n * 128 / 2048) for n in range(1, 65536 // (found["registers"] * 128) + 1)}
    assert splitk.occupancy(h200, splitk.TOKENS_FIRST, plan) == {"SMs": 132}
    assert splitk.occupancy(h200, splitk.ONE, TritonTiles(64, 16, 4, 0, 4, 3)) == {"SMs": 132}
    sizes = {"programs": 64, "launches": 1, **found}
    record = made(splitk.HALF, f"halfbyte gluon{splitk.PLANNED}", 5e-6, **sizes)
    assert splitk.table([record])[1][0][2:8] == ("64", "1", "48 %", str(found["registers"]), f"{found['warps']} %", "5.00")


def made(problem: DecodeCase, name: str, seconds: float, **sizes: int) -> Record:
    shape = {**problem.shape.sizes, **sizes}
    times = {"seconds": seconds, "p10": seconds, "p90": seconds, "error": 1e-3, "roof_gb_per_s": 1000.0, "roof_share": 0.5}
    known: dict[str, Any] = {**times, "case": problem.name, "method": "cuda graph"}
    return Record(splitk.OP, shape, splitk.FORMAT, name, 2_097_152, WHERE, **known)


# ----------------------------------------------------------------------------------------------------------- int8-granularity


def one(heads: str = "GQA", context: int = 64, **what: bool) -> gran.CaseJob:
    return gran.CaseJob(heads, DecodeShape(gran.DISTINCT, 4, 2, 32, context), **what)


def test_granularity_measures_every_format_and_both_errors() -> None:
    measured = quick().run([one(), one(alibi=True), one(outliers=True)])
    assert not any(r.refused for r in measured)
    ours = [r for r in measured if r.op == gran.OP and r.implementation == gran.OURS]
    assert [r.formats for r in ours] == 3 * list(gran.SCALES)
    assert all(r.seconds and r.error is not None and r.error_allowed and r.error <= r.error_allowed for r in ours)
    assert [r.nbytes for r in ours[:5]] == [65536, 32772, 33792, 34816, 34816]  # scales: 2, 2 x 256 twice, 4 x 256 as D = 32
    peers = {(r.case, r.implementation) for r in measured if r.op == gran.OP and r.implementation != gran.OURS}
    plain = {(job.name, "torch sdpa") for job in (one(), one(outliers=True))}
    assert peers == plain | {(one(alibi=True).name, "torch sdpa, folded heads, bias")}

    def error(job: gran.CaseJob, formats: str) -> float:
        found = gran.error_of(measured, job.name, formats)
        assert found is not None
        return found

    for job in (one(), one(alibi=True), one(outliers=True)):
        assert error(job, "fp16") < 1e-3 < error(job, "int8") < error(job, "int8_tensor") < 0.3
    assert len(gran.drawn(measured)) == 1  # of errors; one context draws no line
    without = [r for r in measured if r.implementation == gran.OURS or r.case != one(alibi=True).name]
    said = [any("torch's attention" in sentence for sentence in gran.says(some)) for some in (measured, without)]
    assert said == [False, True]
    # Outliers change no exact result, but take the room of other channels.
    assert error(one(outliers=True), "fp16") == pytest.approx(error(one(), "fp16"), rel=0.05)
    assert error(one(outliers=True), "int8") > 2 * error(one(), "int8")


def test_large_caches_are_given_to_peers_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = gran.sdpa_variants

    def counted(*given: Any) -> dict[str, Any]:
        return {name: lambda *kv, way=way: calls.append(kv[1].shape[0]) or way(*kv) for name, way in real(*given).items()}

    monkeypatch.setattr(gran, "sdpa_variants", counted)
    monkeypatch.setattr(gran, "_MOST_NUMBERS", 3 * 2 * 64 * 32 + 1)  # three sequences of the four
    measured = quick(pattern="fp16").run([one()])
    assert not any(r.refused for r in measured)
    assert set(calls) == {3, 1}


def test_granularity_with_alibi_is_another_result() -> None:
    inputs, slopes = one()._inputs(quick()), gran.slopes_of(4, torch.device("cpu"))
    assert slopes.tolist() == [0.25, 0.0625, 0.015625, 0.00390625]
    without, biased = gran.exactly(inputs, None), gran.exactly(inputs, slopes)
    assert float((biased - without).norm() / without.norm()) > 0.1
    ((k, v),) = inputs.spans
    options = AttentionOptions(32**-0.5, alibi_slopes=slopes)
    lengths = torch.full((gran.DISTINCT,), 64)
    ref, _ = attention.attend(inputs.q.double(), k.double(), v.double(), lengths, lengths - 1, options)
    torch.testing.assert_close(biased, ref)


def test_granularity_skips_what_does_not_fit_and_says_how_much_it_needs() -> None:
    job = one(context=512)
    needed = job.needs("fp16", quick())
    measured = quick(replace(CPU, memory_bytes=2 * needed - 2)).run([job])
    skipped = [r for r in measured if r.refused]
    assert [(r.formats, r.seconds) for r in skipped] == [("fp16", None)]
    assert skipped[0].refused == f"{job.name} fp16: skipped: {needed:,} bytes are needed and {needed - 1:,} are free"
    assert gran.table(measured)[1][0][4] == "skipped"
    assert all(row[5] == "" for row in gran.table(measured)[1])  # nothing to be held against
    assert gran.says(measured) == ["FP16 was not measured, so that nothing can be held against it."]
    nothing = quick(replace(CPU, memory_bytes=2)).run([job])
    assert all("skipped" in r.refused for r in nothing)
    assert len(nothing) == len(gran.SCALES)


def test_granularity_has_all_cases_on_a_gpu() -> None:
    names = [job.name for job in gran.jobs(Session(Options(), GPU))]
    assert len(names) == len(set(names)) == 18 + 3
    assert names[0] == "int8-granularity, MHA 32/32, 128"
    assert names[-2:] == ["int8-granularity, GQA 32/8, 32,768, ALiBi", "int8-granularity, GQA 32/8, 2,048, outlier keys"]
    assert [job.name for job in gran.jobs(quick(GPU))] == [f"int8-granularity, GQA 32/8, {n}" for n in ("512", "8,192")]
    assert all(job.shape.batch == gran.DISTINCT for job in gran.jobs(quick()) if isinstance(job, gran.CaseJob))
    largest = gran.CaseJob("MHA", DecodeShape(128, 32, 32, 128, 131072))
    assert largest.needs("fp16", quick()) > 2 * 274_877_906_944


def of_every_case() -> list[Record]:
    """Records as a large GPU would give them."""
    measured, here = [], quick()
    for job in gran.jobs(Session(Options(), GPU)):
        assert isinstance(job, gran.CaseJob)
        for n, formats in enumerate(gran.SCALES):
            blank = replace(job._blank(here, formats), implementation=gran.OURS)
            seconds = blank.nbytes / 4e12 + 5e-6
            measured.append(replace(blank, seconds=seconds, p10=seconds, p90=seconds, error=1e-3, gb_per_s=4000.0))
            measured.append(replace(blank, op=gran.QUALITY, error=(0.1 + n) * 0.01 * (1 + 3 * job.outliers)))
    return measured


def test_granularity_tells_no_error_of_a_result_that_is_refused_since() -> None:
    measured = of_every_case()
    later = replace(measured[0].environment, date="2030-01-01T00:00:00+00:00")
    wrong = {"seconds": None, "refused": "int8: its error exceeds the allowed", "environment": later}
    again = [replace(r, **wrong) for r in measured if r.op == gran.OP and r.formats == "int8"]  # type: ignore[arg-type]
    kept = compare.latest([*measured, *again])
    assert [r.op for r in kept if r.formats == "int8" and not r.refused] == [gran.QUALITY] * 21  # of the run before
    rows = [row for row in gran.table(kept)[1] if row[1] == "int8"]
    assert {(row[4], row[11]) for row in rows} == {("refused", "")}
    assert "token and head" not in gran.says(kept)[1]
    assert not any("INT8 per token and head" in chart for chart in gran.drawn(kept))
