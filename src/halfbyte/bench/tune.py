"""`halfbyte tune`: time the choices of a plan on this GPU, and store the fastest where it beats the analytic plan.

What is timed is calls back to back in CUDA graphs, over copies that leave the last cache before they come round, with launches
that overlap as they do in decoding. Every choice must keep the accuracy promise before it is timed. All of a problem's choices are
sampled in turn; then the analytic plan and the two fastest others once more, with more samples, so that none wins by luck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import torch

import halfbyte
from halfbyte.bench import splits
from halfbyte.bench.bars import Problem as Case
from halfbyte.bench.caches import Inputs, Promise, Rotation, fill, held_by
from halfbyte.bench.checks import Accuracy, BenchmarkRefused
from halfbyte.bench.decode import DecodeShape, parse_formats
from halfbyte.bench.linear import promise
from halfbyte.bench.linear_peers import copies_of
from halfbyte.bench.records import Record
from halfbyte.bench.run_bars import free, with_timing
from halfbyte.bench.session import Job, Session, reason
from halfbyte.bench.store import Store
from halfbyte.bench.timing import NOT_CAPTURED, Effort, Sampler, Timing, Work, fixed_threads, make_sampler, sample_in_turn, summary
from halfbyte.device import Device
from halfbyte.errors import Unsupported
from halfbyte.formats import weight_format
from halfbyte.ops import _linear_on_gpu
from halfbyte.ops._decode_problem import problem_of
from halfbyte.ops._workspace import prepare
from halfbyte.plans.decode_attention import DecodePlan, DecodeProblem, dense_problem, gluon_plan
from halfbyte.plans.linear_spec import LinearPlan
from halfbyte.plans.linear_wgmma import tuned_linear
from halfbyte.plans.tuning_cache import Entry, LinearProblem
from halfbyte.plans.tuning_space import Choice, Plan, decode_choices, linear_choices, with_decode_choice, with_linear_choice

#: How much is measured of every choice, and of those that are left.
SCREEN = Effort(seconds=0.0, repeats=5, block_seconds=5e-4, settle_seconds=0.01, settle_spread=0.05)
FINAL = Effort(seconds=0.0, repeats=21, block_seconds=5e-4, settle_seconds=0.02, settle_spread=0.02)
#: A choice is stored when it is faster by so much, and its slower samples are faster than the quick ones of the analytic plan.
GAIN = 0.02
#: How many choices are left after the first round, beside the analytic plan; how many of a problem `--quick` looks at.
_LEFT, _QUICK_CHOICES = 2, 8

Results = Sequence[torch.Tensor]


# ---------------------------------------------------------------------------------------------------------------- problems


class Tuning(Job, Protocol):
    """Something that can be tuned: a job whose plans are known before anything is measured."""

    @property
    def formats(self) -> str: ...
    def plans(self, device: Device, quick: bool) -> list[Planned]:
        """Its problems with all their plans."""


@dataclass(frozen=True)
class Planned:
    """One problem and its plans by their choices, the analytic one first; `refused`: in words, why there are none."""

    name: str
    problem: LinearProblem | DecodeProblem
    plans: dict[Choice, Plan]
    refused: str = ""


@dataclass(frozen=True)
class LinearTuning:
    """x [rows, width] times one weight, or two or three in one launch, in one format, for several numbers of rows."""

    features: tuple[int, ...]
    width: int
    formats: str
    rows: tuple[int, ...]
    store: Store
    op: str = "linear"

    @property
    def name(self) -> str:
        return f"{','.join(map(str, self.features))} x {self.width} {self.formats}"

    def plans(self, device: Device, quick: bool) -> list[Planned]:
        """One problem for each number of rows."""
        return [self._planned(device, rows, quick) for rows in self.rows]

    def _planned(self, device: Device, rows: int, quick: bool) -> Planned:
        num_sms, capability = facts_of(device)
        weights = [(weight_format(self.formats), n) for n in self.features]
        gpu: dict[str, Any] = {"num_sms": num_sms, "capability": capability, "use_pdl": True}
        first = tuned_linear(weights, m=rows, width=self.width, dtype="bf16", **gpu)
        name = f"{','.join(map(str, self.features))} x {self.width}, {rows} row{'s' * (rows > 1)}"
        problem = LinearProblem.of(weights, rows, self.width, "bf16")
        if isinstance(first, str):
            return Planned(name, problem, {}, first)
        choices = linear_choices(first, self.features, self.width, num_sms, capability)
        made = {c: with_linear_choice(first, c, self.features, self.width, num_sms, capability) for c in choices}
        return Planned(name, problem, _kept(made, quick))

    def measure(self, session: Session) -> Iterator[Record]:
        """By rows: the analytic plan's record, and the tuned one's where there is one."""
        free(session)
        with torch.no_grad(), fixed_threads(session.threads):
            device = session.device.torch
            generator = torch.Generator(device).manual_seed(0)
            x = torch.randn(max(self.rows), self.width, generator=generator, device=device).bfloat16()
            rotation, judges = self._weights(session, x, generator)
            nbytes = sum(weight.nbytes for weight in rotation[0])
            for rows, planned in zip(self.rows, self.plans(session.device, session.options.quick), strict=True):
                shape = {"M": rows, "N": sum(self.features), "K": self.width}
                blank = Record("linear", shape, self.formats, "", nbytes, session.environment, case=planned.name)
                calls = partial(_products, x[:rows], rotation)
                yield from tuned(session, self.store, blank, planned, calls, partial(_judge_products, judges))
        free(session)

    def _weights(
        self, session: Session, x: torch.Tensor, generator: torch.Generator
    ) -> tuple[list[list[halfbyte.QuantTensor]], list[Callable[[torch.Tensor], Accuracy]]]:
        """The rotation, each with all weights of a launch, and a judge for each weight."""
        drawn = (torch.randn(n, self.width, generator=generator, device=x.device).mul_(self.width**-0.5) for n in self.features)
        weights = [halfbyte.quantize(w, self.formats) for w in drawn]
        count = max(2, session.copies(sum(weight.nbytes for weight in weights)))
        rotation = [list(one) for one in zip(*(copies_of(weight, count) for weight in weights), strict=True)]
        return rotation, [promise(x, weight.dequantize) for weight in weights]


def _products(x: torch.Tensor, rotation: Sequence[Sequence[halfbyte.QuantTensor]], plan: Plan) -> list[Callable[[], Results]]:
    return [partial(_linear_on_gpu.run_plan, x, weights, cast(LinearPlan, plan)) for weights in rotation]


def _judge_products(judges: Sequence[Callable[[torch.Tensor], Accuracy]], results: Sequence[Results]) -> Accuracy:
    """The worst of a launch's products; all calls of a rotation must give the same bits."""
    for other in results[1:]:
        if not all(map(torch.equal, results[0], other)):
            raise BenchmarkRefused("copies of one weight give different results")
    return max((judge(y) for judge, y in zip(judges, results[0], strict=True)), key=lambda a: _badness(a.error / a.allowed))


def _badness(share: float) -> float:
    return math.inf if math.isnan(share) else share


@dataclass(frozen=True)
class AttentionTuning:
    """One new token over a full cache, in one pair of formats."""

    shape: DecodeShape
    formats: str
    store: Store
    op: str = "decode_attention"

    @property
    def name(self) -> str:
        return f"{self.shape} {self.formats}"

    @property
    def problem(self) -> DecodeProblem:
        """What a plan needs to know."""
        s, (keys, values) = self.shape, parse_formats(self.formats)
        return dense_problem("bf16", s.batch, s.kv_heads, s.q_heads // s.kv_heads, 1, s.dim, s.context, keys.name, values.name)

    def plans(self, device: Device, quick: bool) -> list[Planned]:
        """One problem."""
        num_sms, capability = facts_of(device)
        first = gluon_plan(self.problem, num_sms, capability, True)
        if isinstance(first, str):
            return [Planned(str(self.shape), self.problem, {}, first)]
        made = {c: with_decode_choice(first, c, num_sms, capability) for c in decode_choices(first, num_sms, capability)}
        return [Planned(str(self.shape), self.problem, _kept(made, quick))]

    def measure(self, session: Session) -> Iterator[Record]:
        """The analytic plan's record, and the tuned one's where there is one."""
        free(session)
        (planned,) = self.plans(session.device, session.options.quick)
        case = Case(str(self.shape), self.shape)
        with torch.no_grad(), fixed_threads(session.threads):
            inputs = Inputs.random(case, session.device.torch)
            cache = fill(inputs, self.formats)
            if (found := problem_of(splits.call_of(inputs.q, cache))) != planned.problem:
                raise Unsupported(f"the cache is {found} and the plan would be for {planned.problem}")
            nbytes = round(case.tokens * cache.bytes_per_token)
            rotation = Rotation(cache, inputs, max(2, session.copies(nbytes)))
            blank = Record(self.op, self.shape.sizes, self.formats, "", nbytes, session.environment, case=planned.name)
            calls = partial(_attentions, inputs.q, rotation)
            yield from tuned(
                session, self.store, blank, planned, calls, partial(_judge_attention, Promise(inputs.q, held_by(cache)))
            )
        free(session)


def _attentions(q: torch.Tensor, rotation: Rotation, plan: Plan) -> list[Callable[[], Results]]:
    return [partial(_attend, q, cache, cast(DecodePlan, plan)) for cache in rotation.caches]


def _attend(q: torch.Tensor, cache: halfbyte.KVCache, plan: DecodePlan) -> Results:
    return [splits.attend(q, cache, plan)]


def _judge_attention(promised: Promise, results: Sequence[Results]) -> Accuracy:
    return promised.judge([out for (out,) in results])


def facts_of(device: Device) -> tuple[int, tuple[int, int]]:
    """(multiprocessors, compute capability)."""
    return device.sm_count or 1, device.capability or (0, 0)


def _kept(made: Mapping[Any, Plan | str], quick: bool) -> dict[Choice, Plan]:
    """The plans that can be, as many as are to be measured."""
    legal = [(choice, plan) for choice, plan in made.items() if not isinstance(plan, str)]
    return dict(legal[: _QUICK_CHOICES if quick else None])


# --------------------------------------------------------------------------------------------------------------- measuring


def tuned(
    session: Session,
    store: Store,
    blank: Record,
    planned: Planned,
    calls: Callable[[Plan], Sequence[Callable[[], Results]]],
    judge: Callable[[Sequence[Results]], Accuracy],
) -> Iterator[Record]:
    """Measure one problem and store what was found; the records of the analytic plan and of what beats it.

    calls  the rotation of a plan; judge: the worst of all results of one pass over it.
    """
    refused = f"the tuned kernels do not run it: {planned.refused}" if planned.refused else ""
    try:
        found = None if refused else _measured(session, planned, calls, judge)
    except Exception as error:
        found, refused = None, reason(error)
    if found is None:
        yield replace(blank, implementation=ANALYTIC, refused=f"{planned.name} {blank.formats}: {refused}")
        return
    first, best = found.first, better(found.times, found.first)
    seconds, analytic = found.times[best or first].median, found.times[first].median
    store.add(planned.problem, Entry(best, seconds, analytic, session.environment.date[:10]))
    for name, choice in {ANALYTIC: first, TUNED: best}.items():
        if choice is not None:
            record = replace(blank, implementation=name, note="; ".join([str(choice), *found.notes]))
            record = with_timing(record, found.times[choice], found.accuracies[choice])
            yield replace(record, gb_per_s=blank.nbytes / found.times[choice].median / 1e9)


@dataclass(frozen=True)
class _Found:
    """What was measured of one problem: times and errors of the choices that came through."""

    first: Choice
    times: dict[Choice, Timing]
    accuracies: dict[Choice, Accuracy]
    notes: list[str]


def _measured(
    session: Session,
    planned: Planned,
    calls: Callable[[Plan], Sequence[Callable[[], Results]]],
    judge: Callable[[Sequence[Results]], Accuracy],
) -> _Found:
    """Time all choices, and the best of them again. Raises where the analytic plan itself fails."""
    first, samplers, notes = next(iter(planned.plans)), dict[Choice, Sampler](), list[str]()
    for choice, plan in planned.plans.items():
        try:
            samplers[choice] = _sampler(session, calls(plan), judge)
        except Exception as error:
            if choice == first:
                raise
            notes.append(f"{choice}: {reason(error)}")
    times = _times({choice: samplers[choice] for choice in _finalists(_times(samplers, SCREEN), first)}, FINAL)
    accuracies: dict[Choice, Accuracy] = {}
    for choice in list(times):
        try:
            accuracy = judge(cast(list[Results], samplers[choice].run()))
            accuracy.require("its graph")
            accuracies[choice] = accuracy
        except Exception as error:
            if choice == first:
                raise
            del times[choice]
            notes.append(f"{choice}: {reason(error)}")
    return _Found(first, times, accuracies, [f"{len(samplers)} of {len(planned.plans)} choices timed", *notes])


def _sampler(session: Session, fns: Sequence[Callable[[], Results]], judge: Callable[[Sequence[Results]], Accuracy]) -> Sampler:
    """A choice ready to be timed. Raises `BenchmarkRefused` for a wrong result, and what its kernel raises."""
    judge([fn() for fn in fns]).require("its result")
    if session.device.kind == "cuda":
        prepare(session.device.torch)  # else counters of graphs would run out, and each call would clear some of its own
    sampler = make_sampler("choice", Work(fns, paired=True), session.device, SCREEN)
    if NOT_CAPTURED in sampler.method:
        raise BenchmarkRefused(sampler.method)
    return sampler


def _times(samplers: dict[Choice, Sampler], effort: Effort) -> dict[Choice, Timing]:
    named = {str(choice): sampler for choice, sampler in samplers.items()}
    samples = sample_in_turn(named, effort)
    return {choice: summary(samples[str(choice)], sampler.method) for choice, sampler in samplers.items()}


def _finalists(times: dict[Choice, Timing], first: Choice) -> list[Choice]:
    """The analytic plan's choice and the fastest others."""
    return [first, *sorted((c for c in times if c != first), key=lambda c: times[c].median)[:_LEFT]]


def better(times: dict[Choice, Timing], first: Choice) -> Choice | None:
    """The fastest choice, if it beats the first by `GAIN` and beyond the noise."""
    best = min(times, key=lambda c: times[c].median)
    won = times[best].median * (1 + GAIN) < times[first].median and times[best].p90 < times[first].p10
    return best if won else None


# ------------------------------------------------------------------------------------------------------------- how it is told

ANALYTIC, TUNED = "analytic plan", "tuned plan"
HEADERS = ("problem", "formats", "analytic us", "tuned us", "faster", "choice")


def table_rows(measured: Sequence[Record]) -> list[tuple[str, ...]]:
    """One row a problem: before and after."""
    found = {(r.case, r.formats): r for r in measured if r.implementation == TUNED}
    rows: list[tuple[str, ...]] = []
    for r in measured:
        if r.implementation == ANALYTIC and r.seconds:
            best = found.get((r.case, r.formats))
            head = (r.case, r.formats, f"{1e6 * r.seconds:.2f}")
            if best is None or not best.seconds:
                rows.append((*head, "", "", "analytic"))
            else:
                gain = f"{100 * (r.seconds / best.seconds - 1):.1f} %"
                rows.append((*head, f"{1e6 * best.seconds:.2f}", gain, best.note.partition(";")[0]))
    return rows


def left_out(measured: Sequence[Record]) -> list[str]:
    """The choices that failed, a line each: which problem, which choice, why."""
    analytic = [r for r in measured if r.implementation == ANALYTIC and not r.refused]
    return [f"{r.case} {r.formats}: left out: {why}" for r in analytic for why in r.note.split("; ")[2:]]


def says(measured: Sequence[Record]) -> str:
    """What was found, in one sentence."""
    before = {(r.case, r.formats): r.seconds for r in measured if r.implementation == ANALYTIC and r.seconds}
    gains = [before[r.case, r.formats] / r.seconds for r in measured if r.implementation == TUNED and r.seconds]
    if not before:
        return "no problem was measured"
    if not gains:
        return f"{len(before)} problems measured; the analytic plan was the fastest of each, within {100 * GAIN:.0f} % or the noise"
    mean = math.exp(sum(map(math.log, gains)) / len(gains))
    text = f"faster by {100 * (mean - 1):.1f} % in the geometric mean, {100 * (max(gains) - 1):.1f} % at most"
    return f"{len(before)} problems measured; in {len(gains)} of them another choice is {text}"
