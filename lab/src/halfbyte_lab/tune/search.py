"""`python -m halfbyte_lab tune`: time the choices of a plan on this GPU, and store the fastest where it beats the analytic plan.

Calls run back to back in CUDA graphs, over copies that leave the last cache before they come round, with overlapping launches as in
decoding. Every choice must keep the accuracy promise, before and after it is timed. All choices are sampled in turn; then the
analytic plan and the two fastest others once more, with more samples, so that none wins by luck.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import halfbyte
from halfbyte.device import GPU
from halfbyte.errors import InvalidArgument
from halfbyte.formats import weight_format
from halfbyte.ops import by_plan
from halfbyte.paths import write_whole
from halfbyte.plans.gemm import tuned_gemm
from halfbyte.plans.gemm_mma import even_programs, fewest_programs
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.plans.gemm_spec import MmaSpec
from halfbyte.plans.tuning_cache import VERSION, DamagedPlans, Table, TunedEntry, check_gpu, key_of, read
from halfbyte.plans.tuning_space import CHUNKS, STAGES, TILES, WGMMA_CHUNKS, LinearChoice, with_linear_choice
from halfbyte_lab.measure.checks import Accuracy, BenchmarkRefused
from halfbyte_lab.measure.linear import copies_of, promise
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Candidate, Case, Session, reason
from halfbyte_lab.measure.timing import NOT_CAPTURED, Effort, paired_launches


def write(file: Path, table: Table) -> None:
    """Store a table, one entry a line, in place of what was there: at once, so that a kill leaves the old file or the new one."""
    lines = [json.dumps(_plain(key, entry), sort_keys=True) for key, entry in sorted(table.entries.items())]
    head = {"halfbyte plans": VERSION, "gpu": table.gpu, "multiprocessors": table.num_sms, "made with": dict(table.made_with)}
    text = json.dumps(head, indent=1).removesuffix("\n}") + ',\n "entries": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"
    write_whole(file, text)


def _plain(key: str, entry: TunedEntry) -> dict[str, Any]:
    choice = None if entry.choice is None else asdict(entry.choice)
    times = {"us": round(1e6 * entry.seconds, 3), "analytic us": round(1e6 * entry.analytic_seconds, 3)}
    return {"problem": json.loads(key), "choice": choice, **times, "date": entry.date}


@dataclass(frozen=True)
class Store:
    """The file that measured plans go to, each at once, behind those that it holds; other processes may add to it too.

    head  the table without its entries; anew: whether a file that is no table of this GPU is replaced, else refused
    """

    file: Path
    head: Table
    anew: bool = False

    def entries(self) -> Mapping[str, TunedEntry]:
        """What the file holds now. Raises `InvalidArgument` for one that is to be kept and cannot be added to."""
        if not self.file.exists():
            return {}
        try:
            table = read(self.file)
            check_gpu(table, self.head.gpu, self.head.num_sms, str(self.file))
        except DamagedPlans as error:
            if not self.anew:
                raise InvalidArgument(f"output={str(self.file)!r} is kept as it is: {error}; name another file") from error
            return {}
        return table.entries

    def add(self, problem: GemmProblem, entry: TunedEntry) -> None:
        """Store an entry in place of an older one of the same problem."""
        import fcntl  # POSIX has it, and every system with a GPU that this runs on

        self.file.parent.mkdir(parents=True, exist_ok=True)
        # The lock lies in a file of its own: the table is another file after every write.
        with self.file.with_name(f".{self.file.name}.lock").open("w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: what was measured is stored all the same
                fcntl.flock(lock, fcntl.LOCK_EX)
            write(self.file, replace(self.head, entries={**self.entries(), key_of(problem): entry}))


#: How many choices of a problem are measured.
MOST_CHOICES = 24


def linear_choices(plan: GemmPlan, problem: GemmProblem, gpu: GPU) -> list[LinearChoice]:
    """Choices worth measuring, that of the plan first: its shape and its neighbours', each cut in several ways."""
    first = linear_choice(plan)
    shapes = list(_linear_shapes(plan, first, problem, gpu))
    choices = [first]
    for shape in (first, *shapes):
        full = with_linear_choice(plan, replace(shape, programs=1), problem, gpu)
        assert isinstance(full, GemmPlan), full
        slots = gpu.num_sms * shape.blocks
        counts = [fewest_programs(full.tiles, full.steps, gpu.num_sms, shape.blocks), slots]
        counts.append(even_programs(full.tiles, full.steps, slots))
        if full.tiles <= 2 * slots:  # one tile each, or as many equal parts of each as fill the GPU once or twice
            parts = [full.tiles * n for n in range(1, 9)]
            counts += [n for n in parts if 0.5 * slots <= n <= 2 * slots][: None if shape is first else 2]
        for count in counts:
            choice = replace(shape, programs=count)
            if isinstance(with_linear_choice(plan, choice, problem, gpu), GemmPlan):
                choices.append(choice)
    return list(dict.fromkeys(choices))[:MOST_CHOICES]


def _linear_shapes(plan: GemmPlan, first: LinearChoice, problem: GemmProblem, gpu: GPU) -> Iterator[LinearChoice]:
    """Other shapes of tile, chunk and programs at once, each with as many stages as fit."""
    few = isinstance(plan.spec, MmaSpec)
    tiles = TILES[plan.spec.warps_m] if isinstance(plan.spec, MmaSpec) else (first.tile,)
    for blocks, chunk, tile in itertools.product((2, 1) if few else (1,), CHUNKS if few else WGMMA_CHUNKS, tiles):
        if (tile, chunk, blocks) == (first.tile, first.chunk, first.blocks) or (chunk == 128 and first.chunk > 128):
            continue  # pieces of 64 bytes of a row were the slowest of all
        for stages in STAGES if few else range(8, 2, -1):
            shape = LinearChoice(tile, chunk, stages, blocks, 1)
            if isinstance(with_linear_choice(plan, shape, problem, gpu), GemmPlan):
                yield shape
                break


def linear_choice(plan: GemmPlan) -> LinearChoice:
    """The choice that a plan made."""
    spec = plan.spec
    return LinearChoice(spec.tile, spec.chunk, spec.stages, plan.programs_per_sm, plan.programs)


#: How much is measured of every choice, and of those that are left.
SCREEN = Effort(seconds=0.0, repeats=5, block_seconds=5e-4, settle_seconds=0.01, settle_spread=0.05)
FINAL = Effort(seconds=0.0, repeats=21, block_seconds=5e-4, settle_seconds=0.02, settle_spread=0.02)
#: A choice is stored when it is faster by so much, and its slower samples are faster than the quick ones of the analytic plan.
GAIN = 0.02
#: How many choices are left after the first round, with the analytic plan; how many of a problem `--quick` looks at.
_LEFT, _QUICK_CHOICES = 2, 8
ANALYTIC, TUNED = "analytic plan", "tuned plan"

#: The rotation of calls by a plan, and what judges one call's result.
Calls = Callable[[Any], Sequence[Callable[[], Any]]]
Judge = Callable[[Any], Accuracy]


@dataclass(frozen=True)
class Planned:
    """One problem and its plans by their choices, the analytic one first; `refused`: in words, why there are none."""

    problem: GemmProblem
    plans: dict[LinearChoice, GemmPlan]
    refused: str = ""

    @staticmethod
    def of(problem: GemmProblem, made: Mapping[LinearChoice, GemmPlan | str], quick: bool) -> Planned:
        """The plans that can be, as many as are to be measured."""
        legal = [(choice, plan) for choice, plan in made.items() if not isinstance(plan, str)]
        return Planned(problem, dict(legal[: _QUICK_CHOICES if quick else None]))


@dataclass(frozen=True)
class LinearTuning:
    """x [rows, width] times one weight, or two or three in one launch, in one format."""

    features: tuple[int, ...]
    width: int
    formats: str
    rows: int
    store: Store
    op: str = "linear"

    @property
    def name(self) -> str:
        return f"{','.join(map(str, self.features))} x {self.width}, {self.rows} row{'s' * (self.rows > 1)}"

    def planned(self, gpu: GPU, quick: bool) -> Planned:
        """Its problem with all plans."""
        weights = tuple((weight_format(self.formats), n) for n in self.features)
        where = GemmProblem(weights, self.rows, self.width, "bf16"), gpu
        first = tuned_gemm(*where, use_pdl=True)
        own = first if isinstance(first, str) else with_linear_choice(first, linear_choice(first), *where)
        if isinstance(first, str) or isinstance(own, str):
            return Planned(where[0], {}, str(own))
        return Planned.of(where[0], {c: with_linear_choice(first, c, *where) for c in linear_choices(first, *where)}, quick)

    def measure(self, session: Session) -> Iterator[Record]:
        """The analytic plan's record, and the tuned one's where there is one."""
        shape = {"M": self.rows, "N": sum(self.features), "K": self.width}
        yield from _tuned(session, self, shape, self.store, partial(self._ready, session))

    def _ready(self, session: Session) -> tuple[int, Calls, Callable[[], Judge]]:
        device = session.device.torch
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(self.rows, self.width, generator=generator, device=device).bfloat16()
        matrices = (torch.randn(n, self.width, generator=generator, device=device).mul_(self.width**-0.5) for n in self.features)
        weights = [halfbyte.quantize(w, self.formats) for w in matrices]
        nbytes = sum(weight.nbytes for weight in weights)
        count = max(2, session.copies(nbytes))
        rotation = [list(one) for one in zip(*(copies_of(weight, count) for weight in weights), strict=True)]
        judges = [promise(x, weight) for weight in weights]
        return (
            nbytes,
            lambda plan: [partial(by_plan.linear, x, one, plan) for one in rotation],
            lambda: _judge_of(judges),
        )


def _judge_of(judges: Sequence[Callable[[torch.Tensor], Accuracy]]) -> Judge:
    """The worst of a launch's results; all calls of a rotation must give the same bits."""
    first: list[torch.Tensor] = []

    def judge(results: Sequence[torch.Tensor]) -> Accuracy:
        first.extend(() if first else (y.clone() for y in results))
        if not all(map(torch.equal, first, results)):
            raise BenchmarkRefused("copies of one weight give different results")
        accuracies = [judge(y) for judge, y in zip(judges, results, strict=True)]
        return max(accuracies, key=lambda a: math.inf if math.isnan(a.error) else a.error / a.allowed)

    return judge


# --------------------------------------------------------------------------------------------------------------- measuring


def _tuned(
    session: Session,
    job: LinearTuning,
    shape: dict[str, int],
    store: Store,
    ready: Callable[[], tuple[int, Calls, Callable[[], Judge]]],
) -> Iterator[Record]:
    """Measure one problem and store what was found; the records of the analytic plan and of what beats it."""
    session.free()
    search = job.planned(session.device.gpu, session.options.quick)
    refusal, notes, records = search.refused and f"the tuned kernels do not run it: {search.refused}", list[str](), {}
    try:
        records = {} if refusal else _timed(session, job, shape, search, ready, notes)
    except Exception as error:
        refusal = reason(error)
    if refusal:
        blank = Record(job.op, shape, job.formats, ANALYTIC, 0, session.environment, case=job.name)
        yield replace(blank, refused=f"{job.name} {job.formats}: {refusal}")
        return
    first = next(iter(search.plans))
    best = better(records, first)
    seconds, analytic = ((records[choice].seconds or 0.0) for choice in (best or first, first))
    store.add(search.problem, TunedEntry(best, seconds, analytic, session.environment.date[:10]))
    for name, choice in {ANALYTIC: first, TUNED: best}.items():
        if choice is not None:
            yield replace(records[choice], case=job.name, implementation=name, note="; ".join([str(choice), *notes]))
    session.free()


def _timed(
    session: Session,
    job: LinearTuning,
    shape: dict[str, int],
    planned: Planned,
    ready: Callable[[], tuple[int, Calls, Callable[[], Judge]]],
    notes: list[str],
) -> dict[LinearChoice, Record]:
    """The records of the finalists, the analytic plan first. Raises `BenchmarkRefused` where the analytic plan itself fails."""
    if session.device.kind == "cuda":
        by_plan.prepare(session.device.torch)  # else counters of graphs would run out, and each call would clear some of its own
    with torch.no_grad(), paired_launches(True):
        nbytes, calls, judge = ready()

        def measured(choices: Sequence[LinearChoice], effort: Effort) -> dict[LinearChoice, Record]:
            def candidates() -> list[Candidate]:
                return [Candidate(str(c), job.formats, nbytes, calls(planned.plans[c]), judge()) for c in choices]

            results = dict(zip(choices, session.part(effort).measure(Case(job.op, job.name, shape, candidates)), strict=True))
            failures = {c: r.refused or r.method for c, r in results.items() if r.refused or NOT_CAPTURED in r.method}
            if choices[0] in failures:
                raise BenchmarkRefused(failures[choices[0]])
            notes.extend(f"{c}: {why}" for c, why in failures.items())
            return {c: r for c, r in results.items() if c not in failures}

        screening = measured(list(planned.plans), SCREEN)
        notes.insert(0, f"{len(screening)} of {len(planned.plans)} choices timed")
        first, *others = screening
        others.sort(key=lambda c: screening[c].seconds or 0.0)
        return measured([first, *others[:_LEFT]], FINAL)


def better(found: Mapping[LinearChoice, Record], first: LinearChoice) -> LinearChoice | None:
    """The fastest choice, if it beats the first by `GAIN` and beyond the noise."""
    best = min(found, key=lambda c: found[c].seconds or math.inf)
    old, new = found[first], found[best]
    won = (new.seconds or math.inf) * (1 + GAIN) < (old.seconds or 0.0) and (new.p90 or math.inf) < (old.p10 or 0.0)
    return best if won else None


# ------------------------------------------------------------------------------------------------------------- what is shown

HEADERS = ("problem", "formats", "analytic us", "tuned us", "faster", "choice")


def table_rows(measured: Sequence[Record]) -> list[tuple[str, ...]]:
    """One row a problem: before and after."""
    by_case = {(r.case, r.formats): r for r in measured if r.implementation == TUNED}
    rows: list[tuple[str, ...]] = []
    for r in measured:
        if r.implementation == ANALYTIC and r.seconds:
            best = by_case.get((r.case, r.formats))
            after = ("", "", "analytic")
            if best and best.seconds:
                gain = f"{100 * (r.seconds / best.seconds - 1):.1f} %"
                after = (f"{1e6 * best.seconds:.2f}", gain, best.note.partition(";")[0])
            rows.append((r.case, r.formats, f"{1e6 * r.seconds:.2f}", *after))
    return rows


def left_out(measured: Sequence[Record]) -> list[str]:
    """The choices that failed, a line each: which problem, which choice, why."""
    analytic = [r for r in measured if r.implementation == ANALYTIC and not r.refused]
    return [f"{r.case} {r.formats}: left out: {why}" for r in analytic for why in r.note.split("; ")[2:]]


def says(measured: Sequence[Record]) -> str:
    """What was found, in one sentence."""
    rows = table_rows(measured)
    gains = [float(row[2]) / float(row[3]) for row in rows if row[3]]
    if not rows:
        return "no problem was measured"
    if not gains:
        return f"{len(rows)} problems measured; the analytic plan was the fastest of each, within {100 * GAIN:.0f} % or the noise"
    mean = math.prod(gains) ** (1 / len(gains))
    text = f"faster by {100 * (mean - 1):.1f} % in the geometric mean, {100 * (max(gains) - 1):.1f} % at most"
    return f"{len(rows)} problems measured; in {len(gains)} of them another choice is {text}"
