"""Study `decode-70b`: a decode step of one of eight tensor-parallel ranks of Llama 2 70B, by batch and context.

The published end-to-end figure: 8 query heads on 1 KV head, 80 layers, the feed-forward in FP8, batch 1 to 256, 2K to 16K tokens.
What is timed is a CUDA graph of some layers with weights and caches of their own, more bytes between two uses of each than the L2
cache holds; the step's time is that of a layer times 80, and that of the output head. Weights are random. There is no all-reduce.
What 80 layers take in memory is counted, and a case that this GPU cannot hold is not timed: it is marked. Both caches are written
by the same launch, which rotates q and k and appends; torch's attention reads the BF16 cache, in the ways that it has.
On a CPU: one layer, few sequences, the feed-forward in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch

from benchmarks.rank import Attend, Model, Rank, Step
from benchmarks.studies import Study
from halfbyte.measure import charts, precompile
from halfbyte.measure.caches import DecodeCase, Inputs, Promise, Rotation, fill, held_by
from halfbyte.measure.checks import Accuracy, BenchmarkRefused
from halfbyte.measure.decode import Attend as Attention
from halfbyte.measure.decode import attend, sdpa_variants
from halfbyte.measure.precompile import Pair
from halfbyte.measure.records import Record, with_timing
from halfbyte.measure.session import Job, Session, reason
from halfbyte.measure.tables import Table
from halfbyte.measure.timing import (
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

#: "per head" and "in groups of 32": the published row-wise scales and four groups of 128 numbers.
FORMATS = ("int4", "int4_g32")
PLAIN = "bf16"
#: Batches and contexts by kind of device and whether it is to be quick.
SIZES: dict[tuple[str, bool], tuple[tuple[int, ...], tuple[int, ...]]] = {
    ("cuda", False): ((1, 8, 32, 64, 128, 256), (2048, 4096, 8192, 16384)),
    ("cuda", True): ((1, 64), (2048, 16384)),
    ("cpu", False): ((1, 4), (1024, 4096)),
    ("cpu", True): ((1, 4), (1024,)),
}
OP, LOGITS, NOT_HELD = "decode-70b", "logits of decode-70b", "does not fit"
#: Layers that are timed: between two uses of one cache the others' weights pass through the L2 cache, 126 MB a layer.
TIMED = 4


def jobs(session: Session) -> list[Job]:
    """One job for each batch and context; the weights are made once, and shared."""
    batches, contexts = SIZES[session.device.kind, session.options.quick]
    rank = Rank()
    model = Model(rank, session.device, TIMED if session.device.kind == "cuda" else 1, session.copies(rank.head_bytes))
    return [StepJob(model, batch, context) for batch in batches for context in contexts]


@dataclass(frozen=True)
class Entry:
    """One way to run a step: which attention over caches in which format."""

    implementation: str
    formats: str
    attend: Attend


def entries(kind: str, formats: Sequence[str] = (PLAIN, *FORMATS)) -> list[Entry]:
    """torch's attention over a BF16 cache, which on a GPU reads a key once for all query heads; then ours over other formats."""

    def over(way: Attention) -> Attend:
        return lambda q, cache: way(q, cache.keys.codes, cache.values.codes)

    peers = [Entry(name, PLAIN, over(way)) for name, way in sdpa_variants(kind, groups=kind == "cpu").items()]
    ours = [Entry("halfbyte auto", name, partial(attend, impl="auto")) for name in formats if name != PLAIN]
    return (peers if PLAIN in formats else []) + ours


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
        found = [Promise(q, held_by(cache)).judge([out]) for (q, out), cache in zip(results, self.rotation.caches, strict=True)]
        for accuracy in found:
            accuracy.require("attention of a layer")
        self.accuracy = max(found, key=lambda a: a.error)
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

    def to_compile(self, session: Session) -> Iterator[Pair]:
        """Our attention, launches overlapping."""
        shape = self.model.rank.shape(self.batch, self.context)
        for entry in entries(session.device.kind, self.formats):
            if entry.formats != PLAIN and session.wants(self.name, entry.formats, entry.implementation):
                yield from precompile.attention(session.device, shape, entry.formats, (True,))

    def measure(self, session: Session) -> Iterator[Record]:
        """A record for each way, and how far the logits of INT4 are from those of BF16."""
        wanted = [e for e in entries(session.device.kind, self.formats) if session.wants(self.name, e.formats, e.implementation)]
        if not wanted:
            return
        session.free()
        records = [self._blank(session, e) for e in wanted]
        with torch.no_grad(), fixed_threads(session.threads):
            runs: dict[int, Run] = {}
            logits: dict[int, torch.Tensor] = {}
            for i, entry in enumerate(wanted):
                if not records[i].refused:
                    try:
                        runs[i] = self._ready(session, entry, [(wanted[j], run) for j, run in runs.items()])
                        logits[i] = runs[i].logits()
                    except Exception as error:
                        runs.pop(i, None)
                        records[i] = replace(records[i], refused=self._why(entry, error))
            times = _sampled(session, self.model.rank.layers, runs)
            for i, run in runs.items():
                try:
                    run.logits()  # what was timed must still be right
                    records[i] = _timed(records[i], times[i], run, self.model)
                except Exception as error:
                    records[i] = replace(records[i], refused=self._why(wanted[i], error))
        yield from records
        yield from self._compared(records, logits)

    def _blank(self, session: Session, entry: Entry) -> Record:
        """The record without a time; refused already where 80 layers do not fit."""
        model, shape = self.model, self.model.rank.shape(self.batch, self.context)
        nbytes = model.rank.step_bytes(self.batch, self.context, entry.formats, model.fp8)
        held = model.rank.held_bytes(self.batch, self.context, entry.formats, model.fp8)
        record = Record(OP, shape.sizes, entry.formats, entry.implementation, nbytes, session.environment, case=self.name)
        if session.device.kind != "cuda" or held <= session.device.memory_bytes:
            return record
        why = f"{NOT_HELD}: {model.rank.layers} layers take {held / 1e9:.1f} GB of {session.device.memory_bytes / 1e9:.1f}"
        return replace(record, refused=f"{self.name} {entry.formats}: {why}")

    def _why(self, entry: Entry, error: Exception) -> str:
        known = f"{NOT_HELD}: out of memory" if isinstance(error, torch.OutOfMemoryError) else reason(error)
        return f"{self.name} {entry.formats} {entry.implementation}: {known}"

    def _ready(self, session: Session, entry: Entry, others: Sequence[tuple[Entry, Run]]) -> Run:
        """The step over caches of its own, or over those of another way in the same format."""
        shared = [run.rotation for other, run in others if other.formats == entry.formats]
        rotation = shared[0] if shared else self._filled(session, entry.formats)
        step = Step(self.model, rotation.caches, self.context, entry.attend)
        fns = [partial(step.layer, i) for i in range(self.model.count)]
        layers = make_sampler("layers", Work(fns, rotation.restore_short), session.device, session.effort)
        if NOT_CAPTURED in layers.method:
            raise BenchmarkRefused(layers.method)
        heads = [partial(step.logits, i) for i in range(len(self.model.heads))]
        head = make_sampler("head", Work(heads), session.device, session.effort)
        return Run(rotation, layers, head)

    def _filled(self, session: Session, formats: str) -> Rotation:
        """A cache for each layer that is timed."""
        inputs = Inputs.random(DecodeCase(self.name, self.model.rank.shape(self.batch, self.context)), session.device.torch)
        return Rotation(fill(inputs, formats), inputs, self.model.count)

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
    how = f"{scaled}, and the output head; feed-forward in {'FP8' if model.fp8 else 'bf16'}"
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


def best(measured: Sequence[Record], case: str, formats: str) -> Record | None:
    """The fastest record of a case in a format; without a time, one that says why; None without any."""
    mine = [r for r in measured if r.op == OP and (r.case, r.formats) == (case, formats)]
    timed = [r for r in mine if r.seconds]
    return min(timed, key=lambda r: r.seconds or 0.0) if timed else next(iter(mine), None)


def cases(measured: Sequence[Record]) -> list[str]:
    """All cases in the order in which they were measured."""
    return list(dict.fromkeys(r.case for r in measured if r.op == OP and r.shape))


def gain(measured: Sequence[Record], case: str) -> float | None:
    """How many times faster the step is with the faster INT4 cache than with BF16."""
    times = {f: found.seconds for f in NAMES if (found := best(measured, case, f)) and found.seconds}
    plain = times.pop(PLAIN, None)
    return plain / min(times.values()) if plain and times else None


def table(measured: Sequence[Record]) -> Table:
    """One row for each batch and context."""
    return HEADERS, [_row(measured, case) for case in cases(measured)]


def _row(measured: Sequence[Record], case: str) -> tuple[str, ...]:
    found = {f: best(measured, case, f) for f in NAMES}
    plain, faster = found[PLAIN], gain(measured, case)
    logits = {r.formats: f"{r.error:.2g}" for r in measured if r.op == LOGITS and r.case == case and r.error is not None}
    return (
        case,
        plain.implementation if plain and plain.seconds else "",
        *(f"{r.nbytes / 1e9:.1f}" if (r := found[f]) else "" for f in (PLAIN, FORMATS[1])),
        *(_ms(r) for r in found.values()),
        f"{faster:.2f}x" if faster else "",
        *(logits.get(f, "") for f in FORMATS),
    )


def _ms(r: Record | None) -> str:
    """Milliseconds, or why there are none."""
    if r is None:
        return ""
    return f"{1e3 * r.seconds:.2f}" if r.seconds else NOT_HELD if NOT_HELD in r.refused else "refused"


def drawn(measured: Sequence[Record]) -> list[str]:
    """Milliseconds a step by context, a panel for each batch; a line ends where its cache does not fit."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for case in cases(measured):
        for formats, name in NAMES.items():
            if (r := best(measured, case, formats)) and r.seconds:
                points = panels.setdefault(f"batch {r.shape['B']}", {}).setdefault(name, [])
                points.append((r.shape["T"] / 1024, 1e3 * r.seconds))
    if not panels:
        return []
    title = "One rank of Llama 2 70B; a line ends where its cache does not fit"
    return [charts.panels(panels, x_label="context, K tokens", y_label="ms a step", title=title)]


def says(measured: Sequence[Record]) -> list[str]:
    """The largest case that both formats hold, and what BF16 cannot hold; the published result is a figure without numbers."""
    gains = {case: times for case in cases(measured) if (times := gain(measured, case))}
    told = []
    if gains:
        case, least, most = list(gains)[-1], min(gains.values()), max(gains.values())
        plain, head, g32 = (_ms(best(measured, case, f)) for f in NAMES)
        told.append(
            f"One rank with random weights and without an all-reduce: at {case} tokens a step takes {plain} ms with a BF16 cache, "
            f"{head} ms with INT4 per head, {g32} ms with INT4 in groups of 32; over {len(gains)} cases the faster one takes "
            f"{1 / most:.2f} to {1 / least:.2f} of the time of BF16."
        )
    missing = [c for c in cases(measured) if (r := best(measured, c, PLAIN)) and not r.seconds and NOT_HELD in r.refused]
    held = [c for c in missing if (r := best(measured, c, FORMATS[1])) and r.seconds]
    if missing:
        whole = f"{len(missing)} of {len(cases(measured))} cases do not fit in this memory with a BF16 cache"
        told.append(f"{whole} ({'; '.join(missing)}), and {len(held)} of these do with INT4 in groups of 32.")
    return told


STUDY = Study("decode-70b", jobs, table, drawn, says, text_columns=2, effort=MANY_GRAPHS)
