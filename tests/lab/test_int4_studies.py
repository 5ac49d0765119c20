"""The INT4 studies in small on a CPU: what is measured, what is refused, how it is told beside what was published."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from halfbyte.cache import KVCache
from halfbyte.device import Device
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.evals.environment import Environment
from halfbyte.formats import KV_FORMATS
from halfbyte.ops import by_plan
from halfbyte.plans.decode_attention import gluon_plan
from halfbyte.plans.decode_portable import TritonTiles, triton_tiles
from halfbyte.plans.decode_problem import DecodeProblem as Call
from halfbyte.plans.decode_spec import DecodePlan
from halfbyte.settings import pair_launches
from halfbyte_lab.cases import decode_variants
from halfbyte_lab.cases.decode_variants import DecodeVariant, fastest, measure_variants
from halfbyte_lab.measure import charts, compare, session, tables
from halfbyte_lab.measure.caches import DecodeCase, Inputs
from halfbyte_lab.measure.decode import DecodeShape, attend
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Options, Session
from halfbyte_lab.measure.timing import Effort
from halfbyte_lab.studies import QUESTIONS, int4_gqa, int4_ladder, published_gqa, study

BRIEF = Effort(seconds=0.0, repeats=2, block_seconds=1e-5, settle_seconds=0.0)
FAKE = Device("cpu", "fake", memory_bytes=2**30, cache_bytes=0, cores=1, threads=1)
WHERE = Environment("fake", "", 1, {"torch": "2"}, "", "halfbyte bench", "2026-01-01T00:00:00+00:00")
SMALL = DecodeCase("small", DecodeShape(2, 4, 1, 64, 48), baselines=True)


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "QUICK", BRIEF)


def quick(device: Device = FAKE, **options: Any) -> Session:
    return Session(Options(quick=True, **options), device)


def tuned(batch: int, formats: str = "int4") -> DecodePlan:
    call = Call("bf16", batch, 1, 8, 1, 128, 128, 8192, formats, formats, 0, True, *[False] * 4)
    plan = gluon_plan(call, 132, (9, 0), True)
    assert isinstance(plan, DecodePlan)
    return plan


def portable(batch: int) -> TritonTiles:
    fmt = KV_FORMATS["int4"]
    return triton_tiles(fmt, fmt, batch=batch, heads=1, rows=8, capacity=8192, dim=128, num_sms=132, capability=(9, 0))


def rec(op: str, case: str, batch: int, formats: str, by: str, us: float | None, **sizes: int) -> Record:
    shape = {"B": batch, "Hq": 8, "H": 1, "D": 128, "T": 8192, **sizes}
    seconds = None if us is None else 1e-6 * us
    rate = None if us is None else 1000.0 / us
    known = {"gb_per_s": rate, "roof_share": rate and rate / 100}
    return Record(op, shape, formats, by, 1_000_000, WHERE, seconds=seconds, p10=seconds, p90=seconds, case=case, **known)


# ------------------------------------------------------------------------------------------------------------------- ways


def test_ways_are_judged_before_and_after_they_are_timed() -> None:
    inputs = Inputs.random(SMALL, torch.device("cpu"))
    calls = 0
    paired = []

    def right(cache: KVCache) -> torch.Tensor:
        paired.append(pair_launches())
        return attend(inputs.q, cache, "cpu")

    def fails_later(cache: KVCache) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return right(cache) * (1.0 if calls <= 4 else 1.5)

    def breaks(cache: KVCache) -> torch.Tensor:
        raise Unsupported("not here")

    ways = {
        "right": DecodeVariant(right, sizes={"splits": 3}),
        "overlapping": DecodeVariant(right, paired=True),
        "wrong": DecodeVariant(lambda cache: right(cache) * 1.5),
        "wrong when timed": DecodeVariant(fails_later),
        "breaks": DecodeVariant(breaks),
    }
    found = {r.implementation: r for r in measure_variants(quick(), "op", inputs, "int4", lambda _: ways)}
    assert list(found) == list(ways)
    assert {name for name, r in found.items() if r.seconds} == {"right", "overlapping"}
    first = found["right"]
    assert (first.case, first.formats, first.shape["splits"], first.alone) == ("small", "int4", 3, first.seconds)
    assert first.nbytes == 2 * 48 * 2 * (32 + 4)
    assert first.roof_share is not None
    assert first.error is not None
    assert (found["overlapping"].alone, found["overlapping"].chained) == (None, found["overlapping"].seconds)
    assert set(paired) == {True, False}
    assert found["wrong"].refused.startswith("small int4 wrong: wrong: max abs error")
    assert "wrong when timed, as it was timed: max abs error" in found["wrong when timed"].refused
    assert found["breaks"].refused == "small int4 breaks: not here"


def test_the_fastest_of_what_was_timed_in_graphs() -> None:
    slow, fast, none = (rec("op", "c", 1, "bf16", name, us) for name, us in (("a", 2.0), ("b", 1.0), ("c", None)))
    assert fastest([slow, fast, none]) is fast
    assert fastest([slow, dataclasses.replace(fast, method="cuda, not captured (x)")]) is slow
    assert fastest([none]) is None
    assert [tables.rate_text(x) for x in (None, 3518.4, 0.654)] == ["", "3,518", "0.65"]
    assert [tables.times_text(*x) for x in ((3.0, 2.0), (None, 1.0), (1.0, None))] == ["1.50", "", ""]


# ------------------------------------------------------------------------------------------------------------------- int4-gqa


def test_published_figures_belong_to_their_shape() -> None:
    shape = DecodeShape(512, 8, 1, 128, 8192)
    assert published_gqa.published("H100", "CU INT4", shape) == 575
    assert published_gqa.published("A100", "CU INT4, 4 groups", shape) == 965
    assert published_gqa.published("H100", "CU INT4, 4 groups", shape) is None
    assert published_gqa.published("H100", "CU INT4", dataclasses.replace(shape, context=4096)) is None
    assert published_gqa.published("H100", "CU INT4", shape, published_gqa.BEFORE) == 1066
    assert published_gqa.BEFORE["A100"]["CU INT4"] == {32: 143, 64: 257, 128: 455, 256: 866, 512: 1659}
    assert published_gqa.TIMES["A100"]["CU INT4, 4 groups"] == {32: 99, 64: 161, 128: 282, 256: 509, 512: 965}
    assert published_gqa.published("H100", "CU INT4", dataclasses.replace(shape, batch=16)) is None
    whole, groups = dict(published_gqa.ladder("CU INT4", 512)), dict(published_gqa.ladder("CU INT4, 4 groups", 64))
    assert (len(whole), whole["P swizzled"]) == (11, pytest.approx(1060e-6))
    assert list(groups) == list(published_gqa.STEPS[6:])
    assert groups["P swizzled"] == pytest.approx(174e-6)


def test_published_ladders_cover_every_batch() -> None:
    for kernel, rungs in {"CU INT4": 11, "CU INT4, 4 groups": 5}.items():
        assert {batch: len(times) for batch, times in published_gqa.LADDERS[kernel].items()} == dict.fromkeys(
            published_gqa.BATCHES, rungs
        )


def test_gqa_on_a_cpu_measures_every_implementation_there() -> None:
    job = int4_gqa.BatchJob(2, 64, ("bf16", "int4"), others=True, compiled=True)
    measured = quick().run([job])
    assert all(r.seconds and r.op == int4_gqa.OP and r.case == job.name for r in measured)
    ours = [(r.formats, r.implementation) for r in measured if r.implementation.startswith("halfbyte")]
    assert ours == [(f, f"halfbyte {impl}") for f in ("bf16", "int4") for impl in ("cpu", "reference")]
    assert measured[0].implementation.startswith("torch sdpa")
    assert measured[-1].peer.startswith("torch sdpa")
    assert measured[-1].peer_seconds
    headers, rows = int4_gqa.table(measured)
    assert len(rows) == 6  # torch's two ways are one kernel
    assert [row[2] for row in rows[:2]] == ["torch sdpa", "flex attention"]
    assert all(len(row) == len(headers) for row in rows)
    assert {row[3] for row in rows} | {row[-1] for row in rows} == {""}  # nothing was published of 64 tokens
    told = int4_gqa.says(measured)
    assert told[0].startswith("On fake, row-wise INT4 takes ")
    assert "with which this does not compare" in told[1]
    times, intensity = int4_gqa.drawn(measured)
    assert "published" not in times
    assert "FLOP per byte" in intensity
    assert quick(pattern="nothing").run([job]) == []
    without = quick().run([dataclasses.replace(job, compiled=False)])
    assert "flex attention" not in {r.implementation for r in without}
    assert len(without) == len(measured) - 1


def test_gqa_sweeps_the_splits_that_need_no_other_kernel() -> None:
    whole = int4_gqa.swept(by_plan.unpaired(tuned(32)), int4_gqa.SPLITS, 8192)
    assert list(whole) == [1, 2, 4, 8, 16, 32]  # a tile has 256 tokens
    assert [plan.programs for plan in whole.values() if isinstance(plan, DecodePlan)] == [32 * count for count in whole]
    assert {plan.spec for plan in whole.values() if isinstance(plan, DecodePlan)} == {by_plan.unpaired(tuned(32)).spec}  # type: ignore[union-attr]
    assert list(int4_gqa.swept(portable(32), int4_gqa.SPLITS, 8192)) == list(int4_gqa.SPLITS)
    assert list(int4_gqa.swept(portable(32), int4_gqa.SPLITS, 256)) == [1, 2, 4]


def test_gqa_on_a_gpu_runs_each_kernel_with_each_number_of_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be launched, without a GPU to launch it."""
    planned = {"auto": tuned(32), "gluon": tuned(32), "triton": portable(32)}
    monkeypatch.setattr(by_plan, "planned", lambda q, cache, impl: planned[impl])
    job, gpu = int4_gqa.BatchJob(32, 8192, splits=(1, 32, 64)), quick(dataclasses.replace(FAKE, kind="cuda"))
    inputs = Inputs.random(SMALL, torch.device("cpu"))
    ways = job._ways(gpu, inputs, None)  # type: ignore[arg-type]
    assert {name: dict(way.sizes) for name, way in ways.items()} == {
        "halfbyte auto": {"programs": 128},
        "halfbyte gluon, 1 split": {"programs": 32},
        "halfbyte gluon, 32 splits": {"programs": 1024},
        "halfbyte triton, 1 split": {"splits": 1},
        "halfbyte triton, 32 splits": {"splits": 32},
        "halfbyte triton, 64 splits": {"splits": 64},
    }
    assert not any(way.paired for way in ways.values())
    plans = [way.call.keywords["plan"] for name, way in ways.items() if "gluon" in name]  # type: ignore[attr-defined]
    assert not any(plan.spec.use_pdl for plan in plans)
    full = int4_gqa.jobs(Session(Options(), dataclasses.replace(FAKE, kind="cuda")))
    assert [job.batch for job in full if isinstance(job, int4_gqa.BatchJob)] == [32, 64, 128, 256, 512]
    others = [(job.others, job.compiled) for job in full if isinstance(job, int4_gqa.BatchJob)]
    assert others == [(True, True), (True, False), (True, False), (True, False), (True, True)]
    assert len(int4_gqa.jobs(gpu)) == 1


def test_gqa_is_told_with_the_best_of_its_splits_beside_what_was_published() -> None:
    def one(formats: str, by: str, us: float, **sizes: int) -> Record:
        return rec(int4_gqa.OP, "int4-gqa, batch 512 x 8,192", 512, formats, by, us, **sizes)

    measured = [
        one("bf16", "torch sdpa cudnn", 480.0),
        one("bf16", "torch sdpa cudnn, folded heads", 470.0),
        one("int4", "halfbyte auto", 136.0, programs=256),
        one("int4", "halfbyte gluon, 1 split", 140.0, programs=512),
        one("int4", "halfbyte gluon, 2 splits", 150.0, programs=1024),
        one("int4", "halfbyte triton, 4 splits", 235.0, splits=4),
    ]
    work = f"{512 * 8 * 8192 * 128 * 4 / 1e6:.1f}"  # of a million bytes
    rows = [row[1:] for row in int4_gqa.table(measured)[1]]
    theirs = ("1,581", "", "362", "", "1", "756", "", "757", "", "1")
    assert rows == [
        ("bf16", "torch sdpa cudnn", "", "", "470.0", "2.1", "2.1 %", work, "1.00", *[""] * 11),
        ("int4", "halfbyte auto", "", "0.5", "136.0", "7.4", "7.4 %", work, "3.46", *[""] * 11),
        (
            "int4",
            "halfbyte gluon",
            "CU INT4",
            "1",
            "140.0",
            "7.1",
            "7.1 %",
            work,
            "3.36",
            *("930", "1,659", "616", "345", "1"),
            *("575", "1,066", "996", "537", "2"),
            "1.74",
        ),
        ("int4", "halfbyte triton", "FD INT4", "4", "235.0", "4.3", "4.3 %", work, "2.00", *theirs, "1.32"),
    ]
    assert int4_gqa.says(measured) == [
        "On fake, row-wise INT4 takes 136.0 us at batch 512 (7.4 GB/s), 3.46 times as fast as the fastest BF16 kernel.",
        "4-bit codes are a quarter of BF16; with scales and offsets the bytes are 1.00 times fewer, and 7 % of the roofline "
        "instead of 2 % leave 3.46x at batch 512.",
        "Published for an H100, not measured here: 575 us, 1.74 times as fast as Flash-Decoding in BF16.",
    ]
    swept = [one("int4", f"row-wise fbgemm, {n} splits", us) for n, us in ((8, 410.0), (16, 390.0))]
    beside = [*measured, one("int4", "fbgemm", 400.0), *swept]
    *as_before, new = int4_gqa.table(beside)[1]
    assert as_before == int4_gqa.table(measured)[1]  # one without a sweep has no row
    assert new[2:7] == ("row-wise fbgemm", "CU INT4", "16", "390.0", "2.6")
    assert int4_gqa.says(beside)[0] == int4_gqa.says(measured)[0]
    assert int4_gqa.says(beside)[2] == "FBGEMM's own kernel, with one group, takes 390.0 us at batch 512."
    times, by_splits = int4_gqa.drawn(measured)
    assert "published, H100: CU INT4" in times
    assert "halfbyte triton" in by_splits
    alone = [r for r in measured if r.formats != "bf16"]
    assert int4_gqa.says(alone)[0].endswith("(7.4 GB/s).")
    assert int4_gqa.says([]) == []
    assert int4_gqa.drawn([dataclasses.replace(r, seconds=None) for r in measured]) == []


# ------------------------------------------------------------------------------------------------------------------- int4-ladder


def test_the_ladder_ends_with_the_plan_and_changes_one_thing_at_a_time() -> None:
    plan, tiles = tuned(512), portable(512)
    rungs = [rung.plan for rung in int4_ladder.climb(plan, tiles, tiles=True).values()]
    assert rungs[:2] == [dataclasses.replace(tiles, num_stages=1, pdl=False), dataclasses.replace(tiles, pdl=False)]
    assert rungs[-1] == plan
    climbed = [r for r in rungs if isinstance(r, DecodePlan)]
    assert len(climbed) == 8
    for before, after in itertools.pairwise(climbed):
        apart = {f.name for f in dataclasses.fields(plan.spec) if getattr(before.spec, f.name) != getattr(after.spec, f.name)}
        apart |= {"programs"} if before.programs != after.programs else set()
        assert apart in ({"keys", "values"}, {"stages"}, {"tokens", "stages"}, {"programs"}, {"use_pdl"})
        assert after.spec.shared_bytes <= max(plan.spec.shared_bytes, before.spec.shared_bytes)
    assert climbed[0].spec.keys.staged
    assert climbed[0].spec.keys.token_stride == 0
    assert (climbed[0].spec.tokens, climbed[0].spec.stages, climbed[0].programs) == (16, 2, 512)


def test_the_ladder_where_programs_share_a_unit_has_a_second_launch() -> None:
    plan, tiles = tuned(32), portable(32)
    assert (tiles.splits, plan.programs) == (16, 128)
    found = int4_ladder.climb(plan, tiles, tiles=False)
    assert list(found) == [
        "portable kernel, no pipelining",
        "pipelined",
        "split, added up by a second launch",
        "tuned kernel as planned, one launch",
        "programs as planned",
        "launches overlap",
    ]
    assert [decode_variants.launches(rung.plan) for rung in found.values()] == [1, 1, 2, 1, 1, 1]
    assert [dict(rung.sizes) for rung in found.values()] == [{}, {"stages": 3}, {"splits": 16}, {}, {"programs": 128}, {}]
    alone = by_plan.unpaired(plan)
    assert isinstance(alone, DecodePlan)
    assert "launches overlap" not in int4_ladder.climb(alone, tiles, tiles=False)


def test_rungs_of_two_plans_are_the_same_things() -> None:
    plan, tiles = tuned(512), portable(512)
    other = dataclasses.replace(plan, programs=plan.programs // 2), dataclasses.replace(tiles, num_stages=tiles.num_stages + 1)
    ladders = [int4_ladder.climb(a, b, tiles=True) for a, b in ((plan, tiles), other)]
    assert list(ladders[0]) == list(ladders[1])
    assert {name: rung.sizes for name, rung in ladders[0].items()} != {name: rung.sizes for name, rung in ladders[1].items()}
    case = "int4-ladder, batch 512 x 8,192"
    runs = [
        [rec(int4_ladder.OP, case, 512, "int4", name, 10.0, rung=i, **rung.sizes) for i, (name, rung) in enumerate(found.items())]
        for found in ladders
    ]
    assert {c.verdict for c in compare.changes(*runs)} == {"same"}
    shown = [row[2] for row in int4_ladder.table(runs[0])[1]]
    assert "pipelined: 3 stages" in shown
    assert "tiles 2 times the smallest: tiles of 128 tokens, 4 stages" in shown


def test_a_ladder_is_that_of_its_last_run() -> None:
    case = "int4-ladder, batch 32 x 8,192"
    old = [rec(int4_ladder.OP, case, 32, "int4", name, 10.0, rung=i) for i, name in enumerate("ab", 1)]
    new = rec(int4_ladder.OP, case, 32, "int4", "a", 5.0, rung=1)
    new = dataclasses.replace(new, environment=dataclasses.replace(new.environment, date="2030-01-01T00:00:00+00:00"))
    assert [row[2:4] for row in int4_ladder.table(compare.latest([*old, new]))[1]] == [("a", "5.0")]


def test_the_ladder_on_a_cpu_has_rungs_of_its_own() -> None:
    measured = quick().run([int4_ladder.LadderJob(2, 48)])
    assert [r.implementation for r in measured[:2]] == ["halfbyte reference", "halfbyte cpu"]
    assert measured[2].implementation.startswith("torch sdpa")
    assert measured[2].formats == "bf16"
    assert [r.shape["rung"] for r in measured] == [1, 2, 3]
    assert all(r.seconds and r.op == int4_ladder.OP for r in measured)
    headers, rows = int4_ladder.table(measured)
    assert len(rows) == 3
    assert all(len(row) == len(headers) for row in rows)
    told = int4_ladder.says(measured)
    assert told[0].startswith("On fake: batch 2, ")
    assert '"halfbyte cpu"' in told[0]
    assert "need a GPU" in told[1]
    assert len(int4_ladder.drawn(measured)) == 1
    assert quick(pattern="nothing").run([int4_ladder.LadderJob(2, 48)]) == []


def test_steps_are_told_only_between_rungs_that_were_measured() -> None:
    case = "int4-ladder, batch 512 x 8,192"
    times = {"a": 400.0, "b": 300.0, "c": None, "d": 150.0, "e": 100.0}
    measured = [rec(int4_ladder.OP, case, 512, "int4", name, time, rung=i) for i, (name, time) in enumerate(times.items(), 1)]
    measured.append(rec(int4_ladder.OP, case, 512, "int4_g32", "four groups", 125.0, rung=6))
    rows = int4_ladder.table(list(reversed(measured)))[1]
    assert [row[2:4] + row[6:-1] for row in rows[:6]] == [
        ("a", "400.0", "", "1.00"),
        ("b", "300.0", "1.33", "1.33"),
        ("c", "refused", "", ""),
        ("d", "150.0", "", "2.67"),
        ("e", "100.0", "1.50", "4.00"),
        ("four groups", "125.0", "0.80", "3.20"),
    ]
    theirs = {row[:2]: row[2:] for row in rows[6:]}
    assert len(theirs) == 5 * (11 + 5)
    assert theirs["published, A100, batch 512", "0"] == ("before", "1659", "345", "", "", "1.00", "0.97")
    assert theirs["published, A100, batch 512", "10"][-3:] == ("1.14", "1.78", "1.73")
    assert theirs["published, A100, batch 32", "6"] == ("groups, with vector loads", "111", "322", "", "0.98", "1.29", "1.25")
    assert theirs["published, A100, batch 512, 4 groups", "6"] == ("groups, with vector loads", "1225", "", "", "", "1.00", "1.31")
    assert theirs["published, A100, batch 512, 4 groups", "10"][-3:] == ("1.10", "1.27", "1.67")
    assert int4_ladder.says(measured) == [
        'On fake: batch 512, 400.0 to 100.0 us, 4.00x, the largest step "e" with 1.50x.',
        "Published for ten other steps on an A100, not measured here: batch 512, 1,659 to 930.0 us, 1.78x, "
        'the largest step "padded shared memory for K and V" with 1.14x.',
        int4_ladder.HERE,
    ]
    mine, published = int4_ladder.drawn(measured)
    assert "100.0, 1.50x" in mine
    assert "930.0, 1.14x" in published
    assert int4_ladder.says([]) == []
    assert int4_ladder.drawn([]) == []


def test_what_a_gpu_is_asked_for() -> None:
    gpu = dataclasses.replace(FAKE, kind="cuda")
    full, small = int4_ladder.jobs(Session(Options(), gpu)), int4_ladder.jobs(quick(gpu))
    assert full == [int4_ladder.LadderJob(512, 8192, True), int4_ladder.LadderJob(32, 8192)]
    assert small == [int4_ladder.LadderJob(512, 8192)]


@pytest.mark.parametrize("name", ["int4-gqa", "int4-ladder"])
def test_both_are_known_by_name(name: str) -> None:
    assert study(name).name == name
    assert study(name).asks == QUESTIONS[name]


def test_curves_have_points_of_their_own() -> None:
    svg = charts.curves({"a": [(1, 2), (4, 8)], "b": [(2, 3)]}, x_label="x", y_label="y", title="t", dashed=["b"])
    assert svg.startswith("<svg")
    assert "stroke-dasharray" in svg
    with pytest.raises(InvalidArgument, match="line 'a' has points"):
        charts.curves({"a": [(1, 0)]}, x_label="x", y_label="y", title="t")
    with pytest.raises(InvalidArgument, match="lines is empty"):
        charts.curves({}, x_label="x", y_label="y", title="t")
