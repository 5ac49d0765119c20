"""The INT4 studies in small on a CPU: what is measured, what is refused, how it is told beside what was published."""

from __future__ import annotations

import dataclasses
import itertools
from unittest.mock import Mock

import pytest
import torch
from benches import CPU, WHERE, quick

from halfbyte.cache import KVCache
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.formats import KV_FORMATS
from halfbyte.ops import by_plan
from halfbyte.plans.decode_attention import gluon_plan
from halfbyte.plans.decode_portable import TritonTiles, triton_tiles
from halfbyte.plans.decode_problem import DecodeProblem as Call
from halfbyte.plans.decode_spec import DecodePlan
from halfbyte.settings import pair_launches
from halfbyte_lab.cases import decode_variants
from halfbyte_lab.cases.decode_variants import DecodeVariant, fastest, measure_variants
from halfbyte_lab.measure import charts, compare, tables
from halfbyte_lab.measure.caches import DecodeCase, Inputs
from halfbyte_lab.measure.decode import DecodeShape, attend
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Options, Session
from halfbyte_lab.studies import int4_gqa, int4_ladder, published_gqa

SMALL = DecodeCase("small", DecodeShape(2, 4, 1, 64, 48), baselines=True)


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
    paired, calls = [], itertools.count()

    def right(cache: KVCache) -> torch.Tensor:
        paired.append(pair_launches())
        return attend(inputs.q, cache, "cpu")

    def fails_later(cache: KVCache) -> torch.Tensor:
        return right(cache) * (1.0 if next(calls) < 4 else 1.5)

    breaks = Mock(side_effect=Unsupported("not here"))
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
    job, gpu = int4_gqa.BatchJob(32, 8192, splits=(1, 32, 64)), quick(dataclasses.replace(CPU, kind="cuda"))
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
    full = int4_gqa.jobs(Session(Options(), dataclasses.replace(CPU, kind="cuda")))
    assert [job.batch for job in full if isinstance(job, int4_gqa.BatchJob)] == [32, 64, 128, 256, 512]
    others = [(job.others, job.compiled) for job in full if isinstance(job, int4_gqa.BatchJob)]
    assert others == [(True, True), (True, False), (True, False), (True, False), (True, True)]
    assert len(int4_gqa.jobs(gpu)) == 1


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


def test_what_a_gpu_is_asked_for() -> None:
    gpu = dataclasses.replace(CPU, kind="cuda")
    full, small = int4_ladder.jobs(Session(Options(), gpu)), int4_ladder.jobs(quick(gpu))
    assert full == [int4_ladder.LadderJob(512, 8192, True), int4_ladder.LadderJob(32, 8192)]
    assert small == [int4_ladder.LadderJob(512, 8192)]


def test_curves_have_points_of_their_own() -> None:
    svg = charts.curves({"a": [(1, 2), (4, 8)], "b": [(2, 3)]}, x_label="x", y_label="y", title="t", dashed=["b"])
    assert svg.startswith("<svg")
    assert "stroke-dasharray" in svg
    with pytest.raises(InvalidArgument, match="line 'a' has points"):
        charts.curves({"a": [(1, 0)]}, x_label="x", y_label="y", title="t")
    with pytest.raises(InvalidArgument, match="lines is empty"):
        charts.curves({}, x_label="x", y_label="y", title="t")
