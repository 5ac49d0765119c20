"""Study `decode-70b`: a decode step of Llama 2 70B on 2 and 4 GPUs, and of one of eight ranks, by batch and context.

The published end-to-end figure: eight ranks with 8 query heads on 1 KV head each, 80 layers, the feed-forward in FP8, batch 1 to
256, 2K to 16K tokens. Weights are random. "on 4": all layers and the all-reduce, where there are as many GPUs; `whole_model` says
how. One rank by itself: what is timed is a CUDA graph of some layers with weights and caches of their own, more bytes between two
uses of each than the L2 cache holds; the step's time is that of a layer times 80, and that of the output head, without an
all-reduce. What 80 layers take in memory is counted, and a case that a GPU cannot hold is not timed: it is marked. All caches are
written by the same launch, which rotates q and k and appends; torch's attention reads the BF16 cache, in the ways that it has.
On a CPU: one layer, few sequences, the feed-forward in bf16; and a small model on two ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch

from halfbyte_lab import precompile
from halfbyte_lab.cases import whole_model
from halfbyte_lab.cases.rank import FORMATS, NOT_HELD, ONE_OF_EIGHT, PLAIN, Entry, Model, Step, StepCase, entries
from halfbyte_lab.measure import charts
from halfbyte_lab.measure.caches import Promise, Rotation, held_by
from halfbyte_lab.measure.checks import Accuracy, BenchmarkRefused
from halfbyte_lab.measure.records import Record, with_timing
from halfbyte_lab.measure.session import Job, Session
from halfbyte_lab.measure.tables import Table
from halfbyte_lab.measure.timing import (
    MANY_GRAPHS,
    NOT_CAPTURED,
    Sampler,
    Timing,
    Work,
    fixed_threads,
    make_sampler,
    sample_in_turn,
    summary,
)
from halfbyte_lab.studies import Study

#: Batches and contexts by kind of device and whether it is to be quick.
SIZES: dict[tuple[str, bool], tuple[tuple[int, ...], tuple[int, ...]]] = {
    ("cuda", False): ((1, 8, 32, 64, 128, 256), (2048, 4096, 8192, 16384)),
    ("cuda", True): ((1, 64), (2048, 16384)),
    ("cpu", False): ((1, 4), (1024, 4096)),
    ("cpu", True): ((1, 4), (1024,)),
}
OP, LOGITS = "decode-70b", "logits of decode-70b"
#: Layers that are timed: between two uses of one cache the others' weights pass through the L2 cache, 126 MB a layer.
TIMED = 4


def jobs(session: Session) -> list[Job]:
    """One job for each batch and context of one rank, whose weights are made once; then one for each number of ranks."""
    batches, contexts = SIZES[session.device.kind, session.options.quick]
    count = TIMED if session.device.kind == "cuda" else 1
    model = Model(ONE_OF_EIGHT, session.device, count, session.copies(ONE_OF_EIGHT.head_bytes))
    return [*(StepJob(model, batch, context) for batch in batches for context in contexts), *whole_model.jobs(session)]


@dataclass
class Run:
    """A step that is ready to be timed: its layers as one sampler, its output head as another; the worst error of its attention."""

    rotation: Rotation
    layers: Sampler
    head: Sampler
    accuracy: Accuracy | None = None

    def logits(self) -> torch.Tensor:
        """Run all layers and the head once; the logits. Every layer's attention must keep its promise."""
        results = cast(list[tuple[torch.Tensor, torch.Tensor]], self.layers.run())
        accuracies = [
            Promise(q, held_by(cache)).judge([out]) for (q, out), cache in zip(results, self.rotation.caches, strict=True)
        ]
        for accuracy in accuracies:
            accuracy.require("attention of a layer")
        self.accuracy = max(accuracies, key=lambda a: a.error)
        logits = cast(torch.Tensor, self.head.run()[-1])
        if not bool(torch.isfinite(logits).all()):
            raise BenchmarkRefused("the logits are not finite")
        return logits.clone()


@dataclass(frozen=True)
class StepJob:
    """One batch and context: BF16 in every way there is, INT4 in both formats, timed in turn."""

    model: Model
    batch: int
    context: int
    formats: tuple[str, ...] = (PLAIN, *FORMATS)
    op: str = OP

    @property
    def name(self) -> str:
        return f"batch {self.batch} x {self.context:,}"

    @property
    def _case(self) -> StepCase:
        return StepCase(self.model, self.batch, self.context, OP, self.name)

    def to_compile(self, session: Session) -> Iterator[precompile.Pair]:
        """Our attention, launches overlapping."""
        shape = self.model.rank.shape(self.batch, self.context)
        for entry in entries(session.device.kind, self.formats):
            if entry.formats != PLAIN and session.wants(self.name, entry.formats, entry.implementation):
                yield from precompile.attention(session.device, shape, entry.formats, (True,))

    def measure(self, session: Session) -> Iterator[Record]:
        """A record for each way, and how far the logits of INT4 are from those of BF16."""
        selection = [e for e in entries(session.device.kind, self.formats) if session.wants(self.name, e.formats, e.implementation)]
        if not selection:
            return
        session.free()
        records = [self._case.blank(session, e) for e in selection]
        with torch.no_grad(), fixed_threads(session.threads):
            runs: dict[int, Run] = {}
            logits: dict[int, torch.Tensor] = {}
            for i, entry in enumerate(selection):
                if not records[i].refused:
                    try:
                        runs[i] = self._ready(session, entry, [(selection[j], run) for j, run in runs.items()])
                        logits[i] = runs[i].logits()
                    except Exception as error:
                        runs.pop(i, None)
                        records[i] = self._case.refused(records[i], error)
            times = _sampled(session, self.model.rank.layers, runs)
            for i, run in runs.items():
                try:
                    run.logits()  # what was timed must still be right
                    records[i] = _timed(records[i], times[i], run, self.model)
                except Exception as error:
                    records[i] = self._case.refused(records[i], error)
        yield from records
        yield from self._compared(records, logits)

    def _ready(self, session: Session, entry: Entry, others: Sequence[tuple[Entry, Run]]) -> Run:
        """The step over caches of its own, or over those of another way in the same format."""
        rotations = [run.rotation for other, run in others if other.formats == entry.formats]
        rotation = rotations[0] if rotations else self._case.filled(entry.formats, session.device.torch)
        step = Step(self.model, rotation.caches, self.context, entry.attend)
        fns = [partial(step.layer, i) for i in range(self.model.count)]
        layers = make_sampler("layers", Work(fns, rotation.restore_short), session.device, session.effort)
        if NOT_CAPTURED in layers.method:
            raise BenchmarkRefused(layers.method)
        heads = [partial(step.logits, i) for i in range(len(self.model.heads))]
        head = make_sampler("head", Work(heads), session.device, session.effort)
        return Run(rotation, layers, head)

    def _compared(self, records: Sequence[Record], logits: dict[int, torch.Tensor]) -> Iterator[Record]:
        """How far the logits of each INT4 step are from those of a BF16 step that was right."""
        right = [i for i, r in enumerate(records) if not r.refused]
        base = next((logits[i].double() for i in right if records[i].formats == PLAIN), None)
        for i in right:
            r = records[i]
            if base is not None and r.formats != PLAIN:
                error = float((logits[i].double() - base).norm() / base.norm())
                blank = Record(LOGITS, r.shape, r.formats, r.implementation, 0, r.environment, case=r.case)
                kind = f"relative L2 against the BF16 step, {self.model.count} layers"
                yield replace(blank, error=error, error_kind=kind)


def _sampled(session: Session, layers: int, runs: dict[int, Run]) -> dict[int, Timing]:
    """Seconds of a whole step: a layer times all layers, and the head."""
    samplers = {f"{part} {i}": getattr(run, part) for i, run in runs.items() for part in ("layers", "head")}
    samples = sample_in_turn(samplers, session.effort) if samplers else {}

    def step(i: int) -> list[float]:
        return [layers * layer + head for layer, head in zip(samples[f"layers {i}"], samples[f"head {i}"], strict=True)]

    return {i: summary(step(i), run.layers.method) for i, run in runs.items()}


def _timed(record: Record, timing: Timing, run: Run, model: Model) -> Record:
    """The record with its time and how it was taken."""
    assert run.accuracy is not None  # it was judged before it was timed
    scaled = f"{timing.method}; {model.count} layer{'s' * (model.count > 1)} timed, times {model.rank.layers / model.count:g}"
    how = f"{scaled}, and the output head; feed-forward in {model.feed_forward}"
    whole = with_timing(record, replace(timing, method=how), run.accuracy)
    return replace(whole, gb_per_s=record.nbytes / timing.median / 1e9)


# ------------------------------------------------------------------------------------------------------------- how it is told

NAMES = {PLAIN: "BF16", "int4": "INT4 per head", "int4_g32": "INT4, groups of 32"}
HEADERS = (
    "case",
    "BF16 attention",
    "GB, BF16",
    "GB, INT4 g32",
    "BF16, ms",
    "INT4 per head, ms",
    "INT4 g32, ms",
    "faster",
    "logits, INT4 per head",
    "logits, INT4 g32",
)
WHOLE_HEADERS = (
    "case",
    "all-reduce",
    "GB a rank, BF16",
    "GB a rank, INT4 g32",
    *HEADERS[4:8],
    "BF16, tokens/s",
    "INT4 per head, tokens/s",
    "INT4 g32, tokens/s",
    "INT4 g32 with NCCL, ms",
)
PUBLISHED = (
    "Published, for 8 H100s: decode latency drops with an INT4 cache, and BF16 runs out of memory at the largest batches and "
    "contexts; a figure without numbers."
)


def best(measured: Sequence[Record], case: str, formats: str) -> Record | None:
    """The fastest record of a case in a format; without a time, one that says why; None without any."""
    ops, mine = (OP, whole_model.OP), [r for r in measured if (r.case, r.formats) == (case, formats)]
    mine = [r for r in mine if r.op in ops and r.implementation != whole_model.BY_NCCL]
    candidates = [r for r in mine if r.seconds]
    return min(candidates, key=lambda r: r.seconds or 0.0) if candidates else next(iter(mine), None)


def cases(measured: Sequence[Record], op: str = OP) -> list[str]:
    """All cases by ranks, then in the order in which they were measured."""
    ranks = {r.case: r.shape.get("ranks", 1) for r in measured if r.op == op and r.shape}
    return sorted(ranks, key=ranks.__getitem__)


def gain(measured: Sequence[Record], case: str) -> float | None:
    """How many times faster the step is with the faster INT4 cache than with BF16."""
    times = {f: record.seconds for f in NAMES if (record := best(measured, case, f)) and record.seconds}
    plain = times.pop(PLAIN, None)
    return plain / min(times.values()) if plain and times else None


def table(measured: Sequence[Record]) -> Table:
    """One row for each batch and context of one rank."""
    return HEADERS, [_row(measured, case) for case in cases(measured)]


def _row(measured: Sequence[Record], case: str) -> tuple[str, ...]:
    plain = best(measured, case, PLAIN)
    logits = {r.formats: f"{r.error:.2g}" for r in measured if r.op == LOGITS and r.case == case and r.error is not None}
    attention = plain.implementation if plain and plain.seconds else ""
    return (case, attention, *_figures(measured, case), *(logits.get(f, "") for f in FORMATS))


def _figures(measured: Sequence[Record], case: str) -> tuple[str, ...]:
    """Bytes, milliseconds and the gain: what the tables share."""
    by_format, faster = {f: best(measured, case, f) for f in NAMES}, gain(measured, case)
    return (
        *(f"{r.nbytes / 1e9:.1f}" if (r := by_format[f]) else "" for f in (PLAIN, FORMATS[1])),
        *(_ms(r) for r in by_format.values()),
        f"{faster:.2f}x" if faster else "",
    )


def whole_table(measured: Sequence[Record]) -> Table:
    """One row for each batch and context of the whole model."""
    return WHOLE_HEADERS, [_whole_row(measured, case) for case in cases(measured, whole_model.OP)]


def _whole_row(measured: Sequence[Record], case: str) -> tuple[str, ...]:
    records = [r for f in NAMES if (r := best(measured, case, f)) and r.seconds]
    per_second = {r.formats: f"{r.shape['B'] / (r.seconds or math.inf):,.0f}" for r in records}
    backend = next((match[1] for r in records if (match := re.search(r"all-reduce: ([\w-]+)", r.method))), "")
    by_nccl = next((r for r in measured if (r.case, r.implementation) == (case, whole_model.BY_NCCL)), None)
    return (case, backend, *_figures(measured, case), *(per_second.get(f, "") for f in NAMES), _ms(by_nccl))


def _ms(r: Record | None) -> str:
    """Milliseconds, or why there are none."""
    if r is None:
        return ""
    return f"{1e3 * r.seconds:.2f}" if r.seconds else NOT_HELD if NOT_HELD in r.refused else "refused"


def drawn(measured: Sequence[Record]) -> list[str]:
    """Milliseconds a step, by batch for the whole model and by context for one rank; a line ends where its cache does not fit."""
    ends = "a line ends where its cache does not fit"
    whole = _panels(measured, whole_model.OP, "{T:,} tokens, {ranks} ranks", lambda shape: shape["B"])
    one = _panels(measured, OP, "batch {B}", lambda shape: shape["T"] / 1024)
    of_all, of_one = f"All ranks of Llama 2 70B; {ends}", f"One rank of Llama 2 70B; {ends}"
    figures = (whole, "batch", of_all), (one, "context, K tokens", of_one)
    return [charts.panels(panels, x_label=label, y_label="ms a step", title=title) for panels, label, title in figures if panels]


def _panels(
    measured: Sequence[Record], op: str, panel: str, x: Callable[[Mapping[str, int]], float]
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """By panel and cache the points (x, milliseconds). `panel`: its title, filled in from a shape."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for case in cases(measured, op):
        for formats, name in NAMES.items():
            if (r := best(measured, case, formats)) and r.seconds:
                panels.setdefault(panel.format(**r.shape), {}).setdefault(name, []).append((x(r.shape), 1e3 * r.seconds))
    return panels


def says(measured: Sequence[Record]) -> list[str]:
    """The whole model beside what was published, which is a figure without numbers; then one rank by itself."""
    sentences = _told(measured, whole_model.OP, "All layers and their all-reduces, random weights")
    return [
        *sentences,
        *([PUBLISHED] if sentences else []),
        *_told(measured, OP, "One rank with random weights and without an all-reduce"),
    ]


def _told(measured: Sequence[Record], op: str, what: str) -> list[str]:
    """The case with the most tokens that both formats hold, and what BF16 cannot hold."""
    all_cases = cases(measured, op)
    gains = {case: times for case in all_cases if (times := gain(measured, case))}
    sentences = []
    if gains:
        tokens = {r.case: r.shape["B"] * r.shape["T"] for r in measured if r.case in gains}
        case, least, most = max(reversed(gains), key=tokens.__getitem__), min(gains.values()), max(gains.values())
        plain, head, g32 = (_ms(best(measured, case, f)) for f in NAMES)
        over = f"; over {len(gains)} cases the faster one takes {1 / most:.2f} to {1 / least:.2f} of the time of BF16"
        sizes, on, ranks = case.partition(" on ")
        sentences.append(
            f"{what}: at {sizes} tokens{on}{ranks}{' ranks' * bool(on)} a step takes {plain} ms with a BF16 cache, "
            f"{head} ms with INT4 per head, {g32} ms with INT4 in groups of 32{over * (len(gains) > 1)}."
        )
    missing = [c for c in all_cases if (r := best(measured, c, PLAIN)) and not r.seconds and NOT_HELD in r.refused]
    fits = [c for c in missing if (r := best(measured, c, FORMATS[1])) and r.seconds]
    if missing:
        whole = f"{len(missing)} of {len(all_cases)} cases do not fit in this memory with a BF16 cache"
        sentences.append(f"{whole} ({'; '.join(missing)}), and {len(fits)} of these do with INT4 in groups of 32.")
    return sentences


STUDY = Study("decode-70b", whole_table, drawn, says, text_columns=2, effort=MANY_GRAPHS, also=table, jobs=jobs)
