"""Measured plans: which choices there are, how they are measured and stored; what is stored can be slow, but never wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import command_line
import halfbyte
from halfbyte.cli import app as halfbyte_app
from halfbyte.device import H200, describe, sm_shared_memory
from halfbyte.errors import InvalidArgument
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.ops import by_plan
from halfbyte.paths import own_plans
from halfbyte.plans.decode_attention import gluon_plan
from halfbyte.plans.decode_problem import dense_problem
from halfbyte.plans.decode_spec import DecodePlan
from halfbyte.plans.explain import linear_explanation
from halfbyte.plans.gemm import tuned_gemm
from halfbyte.plans.gemm_mma import BLOCK_BYTES, shares
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_wgmma import wgmma_plan
from halfbyte.plans.tuning_cache import (
    VERSION,
    DamagedPlans,
    GemmProblem,
    Table,
    TunedEntry,
    _table_of,
    key_of,
    plan_by_table,
    read,
    table_of,
)
from halfbyte.plans.tuning_space import LinearChoice, with_linear_choice
from halfbyte.settings import stored_plans
from halfbyte_lab import bench, precompile
from halfbyte_lab.measure import trials as session_module
from halfbyte_lab.measure.environment import Environment
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Options, Session
from halfbyte_lab.measure.timing import NOT_CAPTURED, Work
from halfbyte_lab.tune import search as tune
from halfbyte_lab.tune.search import MOST_CHOICES, Store, linear_choice, linear_choices, write

INT4 = WEIGHT_FORMATS["int4_sym_g128"]


def analytic(name: str, features: tuple[int, ...], width: int, rows: int) -> GemmPlan:
    """Of a kernel that leaves a choice: that for large M does not."""
    problem = problem_of(name, features, width, rows)
    found = tuned_gemm(problem, H200, use_pdl=True)
    if isinstance(found, GemmPlan) and not found.spec.stream_k:
        found = wgmma_plan(problem, H200, use_pdl=True)
    assert isinstance(found, GemmPlan), found
    return found


def problem_of(name: str, features: tuple[int, ...], width: int, rows: int) -> GemmProblem:
    return GemmProblem(tuple((WEIGHT_FORMATS[name], n) for n in features), rows, width, "bf16")


# ------------------------------------------------------------------------------------------------------------------ choices


@pytest.mark.parametrize("rows", [1, 3, 8, 16, 32, 64, 130])
@pytest.mark.parametrize("name", ["int4_sym_g128", "int4_g32", "int8_col", "nf4", "mxfp4", "nvfp4"])
@pytest.mark.parametrize(("features", "width"), [((4096,), 4096), ((4096, 1024, 1024), 4096), ((57344,), 8192), ((40,), 512)])
def test_choices_of_products_are_plans(name: str, rows: int, features: tuple[int, ...], width: int) -> None:
    plan, problem = analytic(name, features, width, rows), problem_of(name, features, width, rows)
    choices = linear_choices(plan, problem, H200)
    assert choices[0] == linear_choice(plan)
    assert with_linear_choice(plan, choices[0], problem, H200) == plan
    assert len(choices) == len(set(choices)) <= MOST_CHOICES
    for choice in choices:
        made = with_linear_choice(plan, choice, problem, H200)
        assert isinstance(made, GemmPlan), made
        assert linear_choice(made) == choice
        assert made.programs_per_sm * (made.spec.shared_bytes + BLOCK_BYTES) <= sm_shared_memory((9, 0))
        assert made.tiles == sum(-(-n // made.spec.tile) for n in features) * -(-rows // made.spec.block_m)
        assert (made.steps - 1) * made.spec.step < width <= made.steps * made.spec.step
        whole, shared, each, more = shares(made.tiles, made.steps, made.programs)
        assert whole * made.programs + shared == made.tiles  # every tile is somebody's
        assert each + (more > 0) <= made.steps  # a part lies in two tiles at most, which is what workspace is planned for
        assert made.counters >= shared


@pytest.mark.parametrize(
    "changed",
    [
        {"tile": 128},
        {"tile": 48},
        {"chunk": 64},
        {"stages": 5},
        {"stages": 1},
        {"blocks": 3},
        {"blocks": 0},
        {"programs": 0},
        {"programs": -1},
        {"programs": 10**6},
        {"chunk": 512},
        {"tile": 64, "stages": 4},
    ],
)
def test_illegal_choices_are_refused(changed: dict[str, int]) -> None:
    plan = analytic("int4_sym_g128", (4096,), 4096, 1)
    choice = replace(linear_choice(plan), **changed)
    assert isinstance(with_linear_choice(plan, choice, problem_of("int4_sym_g128", (4096,), 4096, 1), H200), str)


def test_warp_groups_have_choices_of_their_own() -> None:
    plan, problem = (made("int4_sym_g128", (8192,), 8192, 32) for made in (analytic, problem_of))
    wide = linear_choice(plan)
    for changed in ({"tile": 64}, {"blocks": 2}, {"chunk": 128}, {"stages": 2}):
        assert isinstance(with_linear_choice(plan, replace(wide, **changed), problem, H200), str)
    narrow = with_linear_choice(plan, replace(wide, chunk=256, stages=4, programs=128), problem, H200)
    assert isinstance(narrow, GemmPlan)
    assert (narrow.spec.chunk, narrow.spec.stages, narrow.steps, narrow.split_tiles) == (256, 4, 32, 64)


# ------------------------------------------------------------------------------------------------------------------- tables


def entry(choice: LinearChoice | None, **more: Any) -> TunedEntry:
    return TunedEntry(choice, 4e-6, 5e-6, "2026-11-22", **more)


def table(problem: GemmProblem, choice: LinearChoice | None) -> Table:
    return Table("NVIDIA H200", 132, {key_of(problem): entry(choice, file="plans.json")})


def asked(rows: int, known: Table, weights: tuple[int, ...] = (4096,), half: str = "bf16") -> tuple[GemmPlan | str, str]:
    return plan_by_table(GemmProblem(tuple((INT4, n) for n in weights), rows, 4096, half), H200, True, known)


def test_a_table_decides() -> None:
    plan = analytic("int4_sym_g128", (4096,), 4096, 4)
    problem = GemmProblem(((INT4, 4096),), 4, 4096, "bf16")
    choice = next(c for c in linear_choices(plan, problem, H200) if c.tile != plan.spec.tile)
    known = table(problem, choice)
    made, source = asked(4, known)
    assert isinstance(made, GemmPlan)
    assert linear_choice(made) == choice != linear_choice(plan)
    assert source == "tuned for NVIDIA H200 (plans.json, 2026-11-22): 4.00 us where the analytic plan took 5.00"
    assert asked(3, known)[0] == made  # 3 and 4 rows are one variant of the kernel
    rows = {given: json.loads(key_of(problem._replace(rows=given)))["rows"] for given in (1, 9, 17, 64, 65, 130, 192)}
    assert rows == {1: 1, 9: 16, 17: 32, 64: 64, 65: 128, 130: 192, 192: 192}
    for other in (asked(2, known), asked(5, known), asked(4, known, half="fp16"), asked(4, known, (4096, 1024, 1024))):
        assert other[1] == "analytic (no entry for this problem, of 1 for NVIDIA H200)"


def test_a_table_may_say_that_the_analytic_plan_is_best() -> None:
    made, source = asked(1, table(GemmProblem(((INT4, 4096),), 1, 4096, "bf16"), None))
    assert made == analytic("int4_sym_g128", (4096,), 4096, 1)
    assert source == "analytic (nothing else was faster: plans.json, 2026-11-22)"


def test_what_does_not_fit_is_not_taken() -> None:
    """A table edited by hand, or of an older kernel."""
    problem = GemmProblem(((INT4, 4096),), 1, 4096, "bf16")
    plan = analytic("int4_sym_g128", (4096,), 4096, 1)
    made, source = asked(1, table(problem, replace(linear_choice(plan), programs=4096)))
    assert made == plan
    assert source.startswith("analytic (the entry of plans.json, 2026-11-22 does not fit: 4096 programs for 128 tiles")


@pytest.mark.parametrize("formats", [("int8", "int4"), ("int4_g32", "int4_g32"), ("fp8", "fp8"), ("int8_tensor", "int8_tensor")])
def test_a_problem_that_is_written_down_is_that_of_a_cache(formats: tuple[str, str]) -> None:
    """Else `explain` would speak of other calls."""
    cache = halfbyte.KVCache(8, 8, 128, 4096, keys=formats[0], values=formats[1])
    q = torch.zeros(8, 64, 1, 128, dtype=torch.bfloat16)
    assert by_plan.problem_of(q, cache) == dense_problem("bf16", 8, 8, 8, 1, 128, 4096, *formats)


@pytest.mark.parametrize(
    ("name", "heads", "first", "shift", "apart", "scale_stride"),
    [
        ("int4", 8, False, 0, 1, 1),
        ("int4", 8, True, 0, 8, 8),
        ("int4", 8, True, 2, 8, 8),  # scales at multiples of 4 bytes
        ("int4", 8, True, 1, 8, 0),
        ("int4", 8, False, 2, 1, 0),
        ("int4", 3, True, 0, 3, 0),  # the last head has no neighbour to share a word with
        ("int4_g32", 3, True, 0, 3, 3),
        ("int8", 1, True, 0, 1, 0),  # its distance of heads, which nobody needs, is 1
        ("int8_tensor", 8, True, 0, 8, 1),
        ("int8_token", 8, True, 0, 8, 1),
    ],
)
def test_a_problem_knows_the_order_of_tokens_and_heads(
    name: str, heads: int, first: bool, shift: int, apart: int, scale_stride: int
) -> None:
    def laid_out(t: torch.Tensor | None, shift: int) -> torch.Tensor | None:
        """The same shape, tokens before heads if they are `first`, `shift` elements into its memory."""
        if t is None or t.ndim == 1:
            return t
        swapped = first and t.ndim > 2
        shape = t.transpose(1, 2).shape if swapped else t.shape
        made = t.new_zeros(t.numel() + shift)[shift:].view(shape)
        return made.transpose(1, 2) if swapped else made

    cache = halfbyte.KVCache(4, heads, 128, 64, keys=name, values=name)
    planes = [
        replace(p, codes=laid_out(p.codes, 0), scales=laid_out(p.scales, shift), offsets=laid_out(p.offsets, shift))
        for p in (cache.keys, cache.values)
    ]
    there = halfbyte.KVCache.from_buffers(planes[0], planes[1], cache.lengths)
    found = by_plan.problem_of(torch.zeros(4, heads, 1, 128, dtype=torch.bfloat16), there)
    assert (found.k_token_stride, found.v_token_stride) == (apart, apart)
    assert (found.k_scale_stride, found.v_scale_stride) == (scale_stride, scale_stride)
    assert isinstance(gluon_plan(found, 132, (9, 0), True), DecodePlan)


# -------------------------------------------------------------------------------------------------------------------- files


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of one's own, and nothing remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HALFBYTE_PLANS", raising=False)
    _table_of.cache_clear()
    yield tmp_path
    _table_of.cache_clear()


CHOICE = LinearChoice(64, 256, 3, 2, 192)
PROBLEM, OTHER = (GemmProblem(((INT4, 4096),), m, 4096, "bf16") for m in (1, 8))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    entries = {key_of(PROBLEM): entry(CHOICE), key_of(OTHER): entry(None)}
    file = tmp_path / "new folder" / "plans.json"
    write(file, Table("NVIDIA H200", 132, entries, {"torch": "2.11"}))
    found = read(file)
    assert (found.gpu, found.num_sms, found.made_with) == ("NVIDIA H200", 132, {"torch": "2.11"})
    assert found.entries == {key: replace(one, file=str(file)) for key, one in entries.items()}
    assert [path.name for path in file.parent.iterdir()] == ["plans.json"]  # nothing half-written is left
    assert sum('"problem"' in line for line in file.read_text().splitlines()) == 2  # one entry a line
    write(file, Table("NVIDIA H200", 132))
    assert read(file).entries == {}


def test_attention_plans_that_older_versions_stored_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    write(file, Table("NVIDIA H200", 132, {key_of(PROBLEM): entry(CHOICE)}))
    data = json.loads(file.read_text())
    problem = {"op": "decode_attention", "batch": 8}
    data["entries"].append({**data["entries"][0], "problem": problem, "choice": {"tokens": 32, "stages": 3, "programs": 264}})
    file.write_text(json.dumps(data))
    assert read(file).entries == {key_of(PROBLEM): entry(CHOICE, file=str(file))}


def test_where_plans_are_looked_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = "NVIDIA Imaginary X1"
    own = own_plans(gpu)
    assert own == home / "halfbyte" / "plans" / "nvidia-imaginary-x1.json"
    assert table_of(gpu, 7) == Table(gpu, 7, note=f"nothing is stored for {gpu}")
    _table_of.cache_clear()
    write(own, Table(gpu, 7, {key_of(PROBLEM): entry(CHOICE)}))
    assert {one.file for one in table_of(gpu, 7).entries.values()} == {str(own)}
    other = home / "other.json"
    write(other, Table(gpu, 7, {key_of(OTHER): entry(None)}))
    monkeypatch.setenv("HALFBYTE_PLANS", str(other))
    assert {key: one.file for key, one in table_of(gpu, 7).entries.items()} == {key_of(OTHER): str(other)}
    monkeypatch.setenv("HALFBYTE_PLANS", "0")
    assert table_of(gpu, 7) == Table(gpu, 7, note="HALFBYTE_PLANS=0")
    monkeypatch.setenv("HALFBYTE_PLANS", str(home / "no such file"))
    with pytest.raises(InvalidArgument, match="give a file that `python -m halfbyte_lab tune` wrote, or 0"):
        stored_plans()


#: What JSON, or Python's reader of it, takes for numbers, and is no time.
NO_TIMES = ("1" + "0" * 400, "1e999", "-1e999", "NaN", "1" * 5000)


def damaged() -> dict[str, str]:
    whole = {"problem": {"op": "linear"}, "choice": asdict(CHOICE), "us": 4.0, "analytic us": 5.0, "date": "2026-11-22"}
    head = {"halfbyte plans": VERSION, "gpu": "NVIDIA Imaginary X1", "multiprocessors": 7, "made with": {}}
    good = {**head, "entries": [whole]}

    def with_entry(**changed: Any) -> str:
        return json.dumps({**good, "entries": [{**whole, **changed}]})

    return {
        "": json.dumps(good),
        "empty": "",
        "cut": json.dumps(good)[:-20],
        "no table": "[]",
        "other version": json.dumps({**good, "halfbyte plans": 0}),
        "other size": json.dumps({**good, "multiprocessors": 6}),
        "other gpu": json.dumps({**good, "gpu": "NVIDIA A100"}),
        "unknown op": with_entry(problem={"op": "sort"}),
        "unknown parameter": with_entry(choice={**asdict(CHOICE), "magic": 1}),
        "missing parameter": with_entry(choice={"tile": 32}),
        "text": with_entry(choice={**asdict(CHOICE), "tile": "32"}),
        "fraction": with_entry(choice={**asdict(CHOICE), "tile": 32.5}),
        "true": with_entry(choice={**asdict(CHOICE), "tile": True}),
        "no time": with_entry(us=None),
        **{f"time {us[:9]}": with_entry().replace('"us": 4.0', f'"us": {us}') for us in NO_TIMES},
        "brackets": "[" * 200_000,
    }


@pytest.mark.parametrize("how", [*damaged()][1:])
def test_a_damaged_file_is_left_out_with_a_warning(how: str, home: Path) -> None:
    file = own_plans("NVIDIA Imaginary X1")
    file.parent.mkdir(parents=True)
    file.write_text(damaged()[""])
    assert len(read(file).entries) == 1
    file.write_text(damaged()[how])
    with pytest.warns(UserWarning, match="measured plans are left out"):
        found = table_of("NVIDIA Imaginary X1", 7)
    assert found.entries == {}
    assert str(file) in found.note  # which is what `explain` says
    assert table_of("NVIDIA Imaginary X1", 7) == found  # warned once


# ------------------------------------------------------------------------------------------------------------------ explain


def test_explain_says_where_the_plan_is_from(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    gpu = "NVIDIA H200"
    facts = linear_explanation([4096], 4096, ["int4_sym_g128"], 1, "bf16", H200)
    assert facts["plan"] == "analytic (no plans are stored for a GPU that is described by numbers)"

    write(own_plans(gpu), Table(gpu, 132, {key_of(PROBLEM): entry(CHOICE)}))
    halfbyte_app(["explain", "--linear", "4096x4096", "--weights", "int4_sym_g128", "--json"], standalone_mode=False)
    facts = json.loads(capsys.readouterr().out)
    assert facts["plan"].startswith(f"tuned for NVIDIA H200 ({own_plans(gpu)}, 2026-11-22)")
    assert facts["programs"] == "192, 2 per multiprocessor"


# ---------------------------------------------------------------------------------------------------------------- measuring


class FakeSampler:
    """Runs its calls, and says that they take as long as `FAST` has it: 4 us for the choices in it, 5 for the others."""

    FAST: ClassVar[list[LinearChoice]] = []
    method = "fake"

    def __init__(self, work: Work) -> None:
        self.fns: Sequence[Any] = work.fns
        plan = self.fns[0].args[-1]
        self.seconds = 4e-6 if linear_choice(plan) in self.FAST else 5e-6

    def sample(self) -> float:
        return self.seconds

    def run(self) -> list[object]:
        return [fn() for fn in self.fns]


@pytest.fixture
def session(home: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A CPU with the numbers of an H200, where a plan runs as the blocked torch code and times are made up."""
    monkeypatch.setattr(session_module, "make_sampler", lambda name, work, device, effort: FakeSampler(work))
    monkeypatch.setattr(by_plan, "linear", products)
    device = replace(describe("cpu"), name="NVIDIA H200", sm_count=132, capability=(9, 0), cache_bytes=0)
    return Session(Options(quick=True, threads=1), device)


def products(x: torch.Tensor, weights: list[halfbyte.QuantTensor], plan: GemmPlan) -> list[torch.Tensor]:
    return [halfbyte.linear(x, weight) for weight in weights]


def store_at(path: Path) -> Store:
    return Store(path, Table("NVIDIA H200", 132))


def test_the_fastest_choice_is_stored(session: Session, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_at(home / "found.json")
    jobs = [tune.LinearTuning((256, 64, 64), 256, "int4_sym_g128", rows, store) for rows in (1, 4)]
    planned = [job.planned(session.device.gpu, True) for job in jobs]
    fast = [list(one.plans)[3] for one in planned]
    monkeypatch.setattr(FakeSampler, "FAST", fast)
    session.run(jobs)
    assert [(r.case, r.implementation, r.refused) for r in session.records] == [
        (f"256,64,64 x 256, {rows}", plan, "") for rows in ("1 row", "4 rows") for plan in (tune.ANALYTIC, tune.TUNED)
    ]
    assert all(r.seconds and r.error is not None and r.error <= (r.error_allowed or 0.0) for r in session.records)
    stored = read(home / "found.json")
    assert stored.gpu == "NVIDIA H200"
    assert stored.entries.keys() == store.entries().keys() == {key_of(one.problem) for one in planned}
    assert {one.choice for one in stored.entries.values()} == set(fast)
    assert all(one.seconds < one.analytic_seconds for one in stored.entries.values())
    rows = tune.table_rows(session.records)
    assert [row[0] for row in rows] == ["256,64,64 x 256, 1 row", "256,64,64 x 256, 4 rows"]
    assert all(row[4].endswith(" %") and row[5].startswith("LinearChoice(") for row in rows)
    assert tune.says(session.records).startswith("2 problems measured; in 2 of them another choice is faster by")


def test_a_wrong_result_is_never_stored(session: Session, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice that would be the fastest gives a wrong number; one more gives other bits for a copy of the weight."""
    job = tune.LinearTuning((256,), 256, "int4_sym_g128", 1, store_at(home / "found.json"))
    choices = list(job.planned(session.device.gpu, True).plans)
    seen: list[LinearChoice] = []

    def run(x: torch.Tensor, weights: list[halfbyte.QuantTensor], plan: GemmPlan) -> list[torch.Tensor]:
        choice = linear_choice(plan)
        seen.append(choice)
        (y,) = products(x, weights, plan)
        return [y + 1 if choice == choices[1] else y + 1e-2 * (seen.count(choice) % 2 == 0) if choice == choices[2] else y]

    monkeypatch.setattr(by_plan, "linear", run)
    monkeypatch.setattr(FakeSampler, "FAST", choices[1:3])
    session.run([job])
    assert not {one.choice for one in read(home / "found.json").entries.values()} & set(choices[1:3])
    assert f"{choices[1]}: {choices[1]} int4_sym_g128: relative L2 error" in session.records[0].note
    assert f"{choices[2]}: copies of one weight give different results" in session.records[0].note
    assert f"{len(choices) - 2} of {len(choices)} choices timed" in session.records[0].note


def test_a_graph_that_goes_wrong_is_not_stored(session: Session, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was timed is judged as well: here the fast choice is right until it is timed."""
    job = tune.LinearTuning((256,), 256, "int4_sym_g128", 1, store_at(home / "found.json"))
    fast = list(job.planned(session.device.gpu, True).plans)[1]
    monkeypatch.setattr(FakeSampler, "FAST", [fast])
    monkeypatch.setattr(FakeSampler, "run", lambda self: [[fn()[0] + (self.seconds < 5e-6)] for fn in self.fns])
    session.run([job])
    (line,) = tune.left_out(session.records)
    assert line.startswith(f"256 x 256, 1 row int4_sym_g128: left out: {fast}: copies of one weight give different results")
    assert [one.choice for one in read(home / "found.json").entries.values()] == [None]


def test_times_without_a_graph_are_refused(session: Session, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSampler, "method", f"cuda, {NOT_CAPTURED} (a reason)")
    session.run([tune.LinearTuning((64,), 256, "mxfp4", 1, store_at(home / "found.json"))])
    assert "not captured (a reason)" in session.records[0].refused


def test_a_wrong_analytic_plan_gets_no_figure(session: Session, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [tune.LinearTuning((64,), 256, "mxfp4", rows, store_at(home / "found.json")) for rows in (1, 2)]
    monkeypatch.setattr(by_plan, "linear", lambda x, weights, plan: [2 * y for y in products(x, weights, plan)])
    session.run(jobs)
    assert [r.seconds for r in session.records] == [None, None]
    assert "exceeds the allowed" in session.records[0].refused
    assert not (home / "found.json").exists()
    assert tune.table_rows(session.records) == tune.left_out(session.records) == []
    assert tune.says(session.records) == "no problem was measured"


def test_what_the_tuned_kernels_refuse_is_said(session: Session, home: Path) -> None:
    job = tune.LinearTuning((64,), 256, "nf4_dq", 1, store_at(home / "found.json"))
    session.run([job])
    assert "read by the portable kernel only" in session.records[0].refused


def timing(median: float, p10: float, p90: float) -> Record:
    where = Environment("fake", "", 1, {}, "", "", "")
    return Record("linear", {}, "int4", "", 1, where, median, p10, p90)


@pytest.mark.parametrize(
    ("times", "wins"),
    [((0.9, 0.89, 0.91), True), ((0.985, 0.98, 0.986), False), ((0.9, 0.8, 0.995), False), ((1.1, 1.0, 1.2), False)],
)
def test_only_what_is_faster_beyond_the_noise_wins(times: tuple[float, float, float], wins: bool) -> None:
    first, other = LinearChoice(32, 256, 4, 2, 128), CHOICE
    found = tune.better({first: timing(1.0, 0.99, 1.01), other: timing(*times)}, first)
    assert found == (other if wins else None)


def test_an_interrupt_keeps_what_was_found(session: Session, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [tune.LinearTuning((n,), 256, "mxfp4", 1, store) for store in [store_at(home / "found.json")] for n in (64, 32)]

    def run(x: torch.Tensor, weights: list[halfbyte.QuantTensor], plan: GemmPlan) -> list[torch.Tensor]:
        if weights[0].shape[0] == 32:
            raise KeyboardInterrupt
        return products(x, weights, plan)

    monkeypatch.setattr(by_plan, "linear", run)
    session.run(jobs)
    assert session.interrupted
    assert len(read(home / "found.json").entries) == 1


def test_two_processes_that_tune_at_once_keep_the_entries_of_both(home: Path) -> None:
    file, problems = home / "plans" / "gpu.json", [PROBLEM._replace(rows=2**n) for n in range(6)]
    one, other = (store_at(file) for _ in range(2))  # both have read the file before either has written
    one.add(problems[0], entry(CHOICE))
    other.add(problems[1], entry(None))
    assert read(file).entries.keys() == {key_of(p) for p in problems[:2]}
    assert other.entries().keys() == read(file).entries.keys()
    other.add(problems[0], entry(None))  # the later measurement of one problem
    assert read(file).entries[key_of(problems[0])].choice is None

    threads = [threading.Thread(target=store_at(file).add, args=(p, entry(None))) for p in problems]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(file).entries.keys() == {key_of(p) for p in problems}


def test_a_store_keeps_its_file_and_no_other(home: Path) -> None:
    file = home / "plans.json"
    head = Table("NVIDIA H200", 132, {}, {"torch": "9", "driver": "1.2"})
    Store(file, head).add(PROBLEM, entry(CHOICE))
    store = Store(file, head)
    store.add(OTHER, entry(None))
    assert len(read(file).entries) == 2
    store.add(PROBLEM, entry(None))
    assert {one.choice for one in read(file).entries.values()} == {None}
    assert read(file).made_with == {"torch": "9", "driver": "1.2"}
    with pytest.raises(InvalidArgument, match=r"output=.* is kept as it is: .* is of NVIDIA H200 with 132"):
        Store(file, replace(head, gpu="NVIDIA A100")).entries()
    file.write_text("precious")
    with pytest.raises(InvalidArgument, match="no table of measured plans"):
        Store(file, head).entries()
    assert Store(file, head, anew=True).entries() == {}
    with pytest.raises(DamagedPlans):
        read(file)


# ------------------------------------------------------------------------------------------------------------- compiled ahead


def test_what_is_compiled_ahead_is_what_a_launch_compiles() -> None:
    """Every plan has its kernels, specialised as an aligned launch is; nothing is compiled here."""
    pytest.importorskip("triton")
    device = replace(describe("cpu"), name="NVIDIA H200", sm_count=132, capability=(9, 0))
    jobs = [*(tune.LinearTuning((4096, 1024, 1024), 4096, "mxfp4", rows, store_at(Path())) for rows in (4, 32))]
    for one in (job.planned(device.gpu, True) for job in jobs):
        for plan in one.plans.values():
            found = list(precompile.configurations(one.problem, plan))
            assert [c.name.split()[-1] for c in found] in (["linear"], ["order", "linear"])
            assert all(c.options["launch_pdl"] for c in found)
    problem, plan = GemmProblem(((INT4, 4096),), 4, 4096, "bf16"), analytic("int4_sym_g128", (4096,), 4096, 4)
    bare, biased = (list(precompile.configurations(one, plan))[-1] for one in (problem, precompile.BiasedProblem(*problem)))
    assert bare.signature != biased.signature


# ------------------------------------------------------------------------------------------------------------- command line


run = partial(command_line.run, command=bench.main)


def test_the_command_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tune") == 1
    assert "tune measures kernels on an NVIDIA GPU" in capsys.readouterr().err


def test_a_dry_run_says_what_would_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("tune", "--dry-run", "--linear", "4096,1024,1024x4096,4096x4096", "--rows", "1,300")
    assert run(*command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("4096,1024,1024 x 4096, 1 row, int4_sym_g128: ")
    assert "M = 300; the kernel for large M leaves no choice" in lines[1]
    assert lines[-1].startswith("4 problems, ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--linear", "4096"], "--linear '4096'"),
        (["--dry-run", "--json"], "--json prints what was measured"),
        (["--linear", "4096,1024,1024,512x4096"], "--linear '4096,1024,1024,512x4096'"),
        (["--linear", "0x4096"], "must be above 0"),
        (["--linear", "64x4100"], "a weight"),
        (["--weights", "int3"], "weights='int3'"),
        (["--rows", "a"], "--rows 'a'"),
        (["--rows", ","], "--rows names nothing to measure"),
        (["--weights", ""], "--weights names nothing to measure"),
    ],
)
def test_bad_options_are_named(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tune", "--dry-run", *arguments) == 1
    assert named in capsys.readouterr().err
