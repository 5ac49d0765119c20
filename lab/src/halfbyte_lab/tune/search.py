"""`python -m halfbyte_lab tune`: time the choices of a plan on this GPU, and store the fastest where it beats the analytic plan.

Calls run back to back in CUDA graphs, over copies that leave the last cache before they come round, with overlapping launches as in
decoding. Every choice must keep the accuracy promise, before and after it is timed. All choices are sampled in turn; then the
analytic plan and the two fastest others once more, with more samples, so that none wins by luck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import halfbyte
from halfbyte.device import GPU
from halfbyte.formats import weight_format
from halfbyte.ops import by_plan
from halfbyte.plans.linear_spec import LinearPlan, LinearProblem
from halfbyte.plans.linear_wgmma import tuned_linear
from halfbyte.plans.tuning_cache import TunedEntry
from halfbyte.plans.tuning_space import LinearChoice, with_linear_choice
from halfbyte_lab.measure.checks import Accuracy, BenchmarkRefused
from halfbyte_lab.measure.linear import copies_of, promise
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Candidate, Case, Session, reason
from halfbyte_lab.measure.timing import NOT_CAPTURED, Effort, paired_launches
from halfbyte_lab.tune.choices import linear_choices
from halfbyte_lab.tune.store import Store

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

    problem: LinearProblem
    plans: dict[LinearChoice, LinearPlan]
    refused: str = ""

    @staticmethod
    def of(problem: LinearProblem, made: Mapping[LinearChoice, LinearPlan | str], quick: bool) -> Planned:
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
        where = LinearProblem(weights, self.rows, self.width, "bf16"), gpu
        first = tuned_linear(*where, use_pdl=True)
        if isinstance(first, str):
            return Planned(where[0], {}, first)
        return Planned.of(where[0], {c: with_linear_choice(first, c, *where) for c in linear_choices(first, *where)}, quick)

    def measure(self, session: Session) -> Iterator[Record]:
        """The analytic plan's record, and the tuned one's where there is one."""
        shape = {"M": self.rows, "N": sum(self.features), "K": self.width}
        yield from _tuned(session, self, shape, self.store, partial(self._ready, session))

    def _ready(self, session: Session) -> tuple[int, Calls, Callable[[], Judge]]:
        device = session.device.torch
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(self.rows, self.width, generator=generator, device=device).bfloat16()
        drawn = (torch.randn(n, self.width, generator=generator, device=device).mul_(self.width**-0.5) for n in self.features)
        weights = [halfbyte.quantize(w, self.formats) for w in drawn]
        nbytes = sum(weight.nbytes for weight in weights)
        count = max(2, session.copies(nbytes))
        rotation = [list(one) for one in zip(*(copies_of(weight, count) for weight in weights), strict=True)]
        judges = [promise(x, weight.dequantize) for weight in weights]
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
        found = [judge(y) for judge, y in zip(judges, results, strict=True)]
        return max(found, key=lambda a: math.inf if math.isnan(a.error) else a.error / a.allowed)

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
    planned = job.planned(session.device.gpu, session.options.quick)
    refused, notes, records = planned.refused and f"the tuned kernels do not run it: {planned.refused}", list[str](), {}
    try:
        records = {} if refused else _timed(session, job, shape, planned, ready, notes)
    except Exception as error:
        refused = reason(error)
    if refused:
        blank = Record(job.op, shape, job.formats, ANALYTIC, 0, session.environment, case=job.name)
        yield replace(blank, refused=f"{job.name} {job.formats}: {refused}")
        return
    first = next(iter(planned.plans))
    best = better(records, first)
    seconds, analytic = ((records[choice].seconds or 0.0) for choice in (best or first, first))
    store.add(planned.problem, TunedEntry(best, seconds, analytic, session.environment.date[:10]))
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

            found = dict(zip(choices, session.part(effort).measure(Case(job.op, job.name, shape, candidates)), strict=True))
            failed = {c: r.refused or r.method for c, r in found.items() if r.refused or NOT_CAPTURED in r.method}
            if choices[0] in failed:
                raise BenchmarkRefused(failed[choices[0]])
            notes.extend(f"{c}: {why}" for c, why in failed.items())
            return {c: r for c, r in found.items() if c not in failed}

        screened = measured(list(planned.plans), SCREEN)
        notes.insert(0, f"{len(screened)} of {len(planned.plans)} choices timed")
        first, *others = screened
        others.sort(key=lambda c: screened[c].seconds or 0.0)
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
    found = {(r.case, r.formats): r for r in measured if r.implementation == TUNED}
    rows: list[tuple[str, ...]] = []
    for r in measured:
        if r.implementation == ANALYTIC and r.seconds:
            best = found.get((r.case, r.formats))
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
