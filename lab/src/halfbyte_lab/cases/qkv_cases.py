"""`python -m halfbyte_lab qkv`: the four published variants launch by launch, and one launch for q, k and v against three alike;
both beside the same with 16-bit weights.

A variant is timed whole and each of its launches alone, over a rotation of layers larger than the L2 cache. On a GPU CUPTI then
gives the kernels of a variant: their own times where they stand, between the launches whose results they find in the cache, which a
launch that is timed alone does not show. A variant that launches another number of kernels than it says gets no time. Where cuBLAS
splits a product along K, its second kernel belongs to that product, is not counted, and is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import cast

import torch
import torch.nn.functional as F

import halfbyte
from halfbyte.plans import plan
from halfbyte_lab import precompile
from halfbyte_lab.cases import qkv_layers
from halfbyte_lab.cases.linear_targets import INT4
from halfbyte_lab.cases.qkv_layers import (
    GPT2,
    LLAMA,
    MEASURED,
    NAIVE,
    SIXTEEN,
    TWO_KERNEL,
    AttentionShape,
    QkvLayer,
    Variant,
    Weights,
)
from halfbyte_lab.cases.targets import Target, judge, verdict_text
from halfbyte_lab.measure.checks import Accuracy, BenchmarkRefused
from halfbyte_lab.measure.cupti import Calls, Kernel, seconds_of
from halfbyte_lab.measure.linear import promise as promise_of_linear
from halfbyte_lab.measure.records import Record, with_timing
from halfbyte_lab.measure.session import Job, Session, reason
from halfbyte_lab.measure.tables import Table, us
from halfbyte_lab.measure.timing import (
    NOT_CAPTURED,
    Sampler,
    Timing,
    Work,
    fixed_threads,
    is_cold,
    make_sampler,
    sample_in_turn,
    summary,
)
from halfbyte_lab.measure.trials import Outcome, Trial

OP, FUSED_OP = "qkv variants", "qkv projection"
FORMATS, FUSED_FORMATS, FUSED_ROWS = ("mxfp4", "nf4", "nvfp4"), (INT4, "nf4", "mxfp4", "nvfp4"), (1, 4, 16)
QUICK_FORMATS, QUICK_ROWS = (INT4, "nf4"), (1, 16)
TIMES_NAIVE, TIMES_THREE = 1.25, 1.5
ONE, THREE = "one launch", "three launches"
#: What cuBLAS calls the kernel that adds up the parts of a product it has split.
_SECOND_HALF = "splitKreduce"
#: Our own kernel that puts x in the order in which wgmma read it.
_AHEAD = "order"
_ORDERS = "a launch ahead of the fused projection, in its time, puts x in order"


def jobs(layers: Sequence[Weights], impl: str, kind: str, quick: bool = False) -> list[Job]:
    """The variants on each layer, then the fused projection at Llama-3-8B's size; `quick`: fewer formats, on a CPU GPT-2's size."""
    plan("qkv_projection", impl, kind)
    if quick and kind != "cuda":
        return [*(VariantsJob(layer, impl, ("nf4",)) for layer in layers), FusedJob(GPT2, impl, (1,), ("nf4",))]
    projection = FusedJob(LLAMA, impl, QUICK_ROWS, QUICK_FORMATS) if quick else FusedJob(LLAMA, impl)
    return [*(VariantsJob(layer, impl) for layer in layers), projection]


# ------------------------------------------------------------------------------------------------------------- the variants


@dataclass(frozen=True)
class VariantsJob:
    """One attention layer in each format, in all four variants."""

    given: Weights
    impl: str
    formats: tuple[str, ...] = FORMATS
    op: str = OP

    @property
    def name(self) -> str:
        return self.given.shape.name

    def to_compile(self, session: Session) -> Iterator[precompile.Pair]:
        """The fused projection of the two-kernel variant."""
        s, half = self.given.shape, "fp16" if self.given.shape.dtype == torch.float16 else "bf16"
        for fmt in self.formats if self.impl != "triton" else ():
            if any(session.wants(self.name, fmt, v.name) for v in MEASURED):
                yield from precompile.products(session.device, fmt, s.rows, s.tokens, s.hidden, half, biased=True)

    def measure(self, session: Session) -> Iterator[Record]:
        """A record for each variant, whose note has the time of each launch."""
        for fmt in self.formats:
            if any(session.wants(self.name, fmt, v.name) for v in MEASURED):
                with torch.no_grad(), fixed_threads(session.threads):
                    yield from self._format(session, fmt)
                session.free()

    def _format(self, session: Session, fmt: str) -> Iterator[Record]:
        first = qkv_layers.build(self.given, fmt, session.device.torch, self.impl)
        rotation = _rotation(session, first)
        right = qkv_layers.promise(first)
        records = {v.name: self._checked(session, v, rotation, right, fmt) for v in MEASURED}
        samplers: dict[tuple[str, str], Sampler] = {}
        for v in MEASURED:
            if not records[v.name].refused:
                try:
                    samplers |= _samplers(session, v, rotation)
                except Exception as error:
                    records[v.name] = _refused(records[v.name], error)
        names = {f"{a} {b}": (a, b) for a, b in samplers}
        samples = sample_in_turn({name: samplers[key] for name, key in names.items()}, session.effort) if names else {}
        warm = _warm(session, rotation)
        times = {key: summary(samples[name], samplers[key].method + warm) for name, key in names.items()}
        traces = session.traced({v.name: _whole(v, rotation, paired=False) for v in MEASURED if (v.name, "alone") in times})
        for v in MEASURED:
            try:
                for how in ("alone", "chained") if (v.name, "alone") in times else ():
                    for out in samplers[v.name, how].run():
                        right(cast(torch.Tensor, out)).require(f"{v.name} {fmt}, as it was timed")
                records[v.name] = _with_kernels(session, _timed(records[v.name], v, times), v, traces.get(v.name, ()))
            except BenchmarkRefused as error:
                records[v.name] = _refused(records[v.name], error)
        naive = records[NAIVE]
        yield from (_held_against(r, naive) for r in records.values())

    def _checked(
        self, session: Session, v: Variant, rotation: Sequence[QkvLayer], right: Callable[[torch.Tensor], Accuracy], fmt: str
    ) -> Record:
        """A record without a time: right on every layer of the rotation, else refused."""
        shape = self.given.shape.sizes | {"launches": len(v.launches)}
        nbytes = rotation[0].sixteen.nbytes if v.name == SIXTEEN else rotation[0].nbytes
        blank = Record(OP, shape, fmt, v.name, nbytes, session.environment, case=self.name)
        try:
            for layer in rotation:
                accuracy = right(v.run(layer))
                accuracy.require(f"{v.name} {fmt}")
        except Exception as error:
            return _refused(blank, error)
        errors = {"error": accuracy.error, "error_allowed": accuracy.allowed, "error_kind": accuracy.kind}
        return replace(blank, note=self.given.source, **errors)  # type: ignore[arg-type]


def _rotation(session: Session, first: QkvLayer) -> list[QkvLayer]:
    """Layers larger than the last cache together; two on a CPU, where a pass over so many would take minutes."""
    count = session.copies(first.nbytes) if session.device.kind == "cuda" else 2
    return [first, *(first.copy() for _ in range(count - 1))]


def _warm(session: Session, rotation: Sequence[QkvLayer]) -> str:
    """What the method says of a rotation that the last cache holds a part of."""
    return "" if is_cold(len(rotation), rotation[0].nbytes, session.device.cache_bytes) else ", partly from cache"


def _samplers(session: Session, v: Variant, rotation: Sequence[QkvLayer]) -> dict[tuple[str, str], Sampler]:
    """The whole variant, launches kept apart and overlapping, and each launch alone."""
    works = {"alone": _whole(v, rotation, paired=False), "chained": _whole(v, rotation, paired=True)}
    works |= {launch.name: Work([partial(launch.run, layer) for layer in rotation], paired=False) for launch in v.launches}
    return {(v.name, how): make_sampler(f"{v.name} {how}", work, session.device, session.effort) for how, work in works.items()}


def _whole(v: Variant, rotation: Sequence[QkvLayer], paired: bool) -> Work:
    return Work([partial(v.run, layer) for layer in rotation], paired=paired)


def _timed(r: Record, v: Variant, times: Mapping[tuple[str, str], Timing]) -> Record:
    """The record with its times, those of the launches in its note."""
    if (v.name, "chained") not in times:
        return r
    accuracy = Accuracy(r.error or 0.0, r.error_allowed or 0.0, r.error_kind)
    parts = ", ".join(f"{launch.name} {us(times[v.name, launch.name].median)}" for launch in v.launches)
    alone, in_chain = times[v.name, "alone"], times[v.name, "chained"]
    record = replace(with_timing(r, in_chain, accuracy), alone=alone.median, chained=in_chain.median)
    return replace(record, note=f"{r.note}; {v.name}, us a launch: {parts}")


def _held_against(r: Record, naive: Record) -> Record:
    """Beside naive; the two-kernel variant has a bar."""
    if naive.seconds:
        r = replace(r, peer=NAIVE, peer_seconds=naive.seconds)
    if r.implementation != TWO_KERNEL:
        return r
    is_comparable = r.seconds and naive.seconds and NOT_CAPTURED not in r.method + naive.method
    times = naive.seconds / r.seconds if is_comparable and naive.seconds and r.seconds else None
    return replace(r, bars=judge([Target(r.case, r.formats, "times_naive", TIMES_NAIVE)], {"times_naive": times}))


def _refused(r: Record, error: Exception) -> Record:
    return replace(r, refused=f"{r.case} {r.formats} {r.implementation}: {reason(error)}")


def _with_kernels(session: Session, r: Record, v: Variant, calls: Calls) -> Record:
    """The record with the kernels of each launch. Raises `BenchmarkRefused` unless each call has as many as the variant says."""
    if not r.seconds or session.device.kind != "cuda":
        return r
    if not calls:
        return replace(r, note=f"launches were not counted: {session.no_kernel_times or 'CUPTI lost some'}; {r.note}")
    by_call = [by_launch(v, kernels) for kernels in calls]
    by_kernel = {
        launch.name: median(sum(kernel.seconds for kernel in launches[i]) for launches in by_call)
        for i, launch in enumerate(v.launches)
    }
    note = "; ".join(filter(None, [_on_top(calls[0]), r.note]))
    return replace(r, kernel_seconds=seconds_of(calls), kernels=by_kernel, note=note)


def by_launch(v: Variant, kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The kernels of one call by launch. Raises `BenchmarkRefused` unless a variant launches as many as it says."""
    launches: list[list[Kernel]] = []
    ahead: list[Kernel] = []
    for kernel in kernels:
        if kernel.name == _AHEAD:
            ahead.append(kernel)
        elif _SECOND_HALF in kernel.name and launches:
            launches[-1].append(kernel)
        else:
            launches.append([*ahead, kernel])
            ahead = []
    if len(launches) != len(v.launches):
        raise BenchmarkRefused(
            f"{v.name} launches {len(launches)} kernels and is published with {len(v.launches)} launches; torch.profiler saw: "
            + (", ".join(kernel.name for kernel in kernels) or "none")
        )
    return launches


def _on_top(kernels: Sequence[Kernel]) -> str:
    """What a call launches beside what is counted, in words."""
    halves, ahead = sum(_SECOND_HALF in kernel.name for kernel in kernels), any(kernel.name == _AHEAD for kernel in kernels)
    parts = [f"cuBLAS splits {halves} of the products along K, with a second kernel each"] if halves else []
    return "; ".join(parts + [_ORDERS] * ahead)


# ------------------------------------------------------------------------------------------------------------- one launch for three


@dataclass(frozen=True)
class FusedJob:
    """`qkv_projection` against three calls of `linear`, with few rows."""

    shape: AttentionShape
    impl: str
    rows: tuple[int, ...] = FUSED_ROWS
    formats: tuple[str, ...] = FUSED_FORMATS
    op: str = FUSED_OP

    @property
    def name(self) -> str:
        return f"q, k, v of a {self.shape.name}"

    def case(self, rows: int) -> str:
        """ "q, k, v of a Llama-3-8B layer, 1 row"."""
        return f"{self.name}, {rows} row{'s' * (rows > 1)}"

    def to_compile(self, session: Session) -> Iterator[precompile.Pair]:
        """All weights in one launch, and each in its own."""
        selection = [(m, fmt) for fmt in self.formats for m in self.rows if session.wants(self.case(m), fmt, ONE)]
        for rows, fmt in selection if self.impl != "triton" else ():
            for features in (self.shape.rows, *((n,) for n in dict.fromkeys(self.shape.rows))):
                yield from precompile.products(session.device, fmt, features, rows, self.shape.hidden)

    def measure(self, session: Session) -> Iterator[Record]:
        """Three records for each number of rows and format."""
        for fmt in self.formats:
            rows = [m for m in self.rows if session.wants(self.case(m), fmt, ONE)]
            if not rows:
                continue
            session.free()
            with torch.no_grad(), fixed_threads(session.threads):
                first = qkv_layers.build(qkv_layers.random_weights(self.shape), fmt, session.device.torch, self.impl)
                rotation = _rotation(session, first)
                for m in rows:
                    yield from self._case(session, rotation, m)

    def _case(self, session: Session, rotation: Sequence[QkvLayer], rows: int) -> Iterator[Record]:
        first = rotation[0]
        x, case = first.x[:rows].contiguous(), self.case(rows)
        shape = {"M": rows, "K": self.shape.hidden, "N": sum(self.shape.rows)}
        ways, fmt = {THREE: _three, SIXTEEN: _sixteen, ONE: _one}, first.weights[0].format.name
        nbytes = {name: first.sixteen.nbytes if name == SIXTEEN else first.nbytes for name in ways}
        blanks = {name: Record(FUSED_OP, shape, fmt, name, nbytes[name], session.environment, case=case) for name in ways}
        calls = {name: [partial(way, x, layer) for layer in rotation] for name, way in ways.items()}
        rights = [promise_of_linear(x, w) for w in first.weights]
        trials = {
            f"{name} {how}": Trial(f"{name} {how}", Work(fns, paired=how == "chained"), partial(_judged, rights))
            for name, fns in calls.items()
            for how in ("alone", "chained")
        }
        outcomes = session.time(trials)
        records: dict[str, Record] = {}
        for name, blank in blanks.items():
            alone, in_chain = outcomes[f"{name} alone"], outcomes[f"{name} chained"]
            records[name] = _fused_record(blank, alone, in_chain, _warm(session, rotation))
        kernels = session.kernel_seconds({name: trials[f"{name} alone"].work for name, r in records.items() if r.seconds})
        records = {name: replace(r, kernel_seconds=kernels.get(name)) for name, r in records.items()}
        three, one = records[THREE], records[ONE]
        ratio = three.seconds / one.seconds if three.seconds and one.seconds and NOT_CAPTURED not in one.method else None
        bars = [Target(case, one.formats, "times_three", TIMES_THREE)] if rows == 1 else []
        yield from (three, records[SIXTEEN])
        yield replace(one, peer=THREE, peer_seconds=three.seconds, bars=judge(bars, {"times_three": ratio}))


def _one(x: torch.Tensor, layer: QkvLayer) -> tuple[torch.Tensor, ...]:
    return halfbyte.qkv_projection(x, layer.weights, impl=layer.impl)


def _three(x: torch.Tensor, layer: QkvLayer) -> tuple[torch.Tensor, ...]:
    return tuple(halfbyte.linear(x, weight, impl=layer.impl) for weight in layer.weights)


def _sixteen(x: torch.Tensor, layer: QkvLayer) -> tuple[torch.Tensor, ...]:
    return tuple(F.linear(x, layer.sixteen).split(layer.shape.rows, 1))


def _judged(rights: Sequence[Callable[[torch.Tensor], Accuracy]], outs: Iterable[Sequence[torch.Tensor]]) -> Accuracy:
    """The worst of the results of several calls, each a q, a k and a v."""
    return _worst([right(y) for out in outs for right, y in zip(rights, out, strict=True)])


def _worst(found: Sequence[Accuracy]) -> Accuracy:
    """The one that is farthest above, or least below, what is allowed; NaN is worst of all."""
    return max(found, key=lambda a: float("inf") if a.error != a.error else a.error / a.allowed)


def _fused_record(r: Record, alone: Outcome, chained: Outcome, warm: str) -> Record:
    if alone.timing is None or chained.timing is None or chained.accuracy is None:
        return replace(r, refused=f"{r.case} {r.formats} {r.implementation}: {alone.refused or chained.refused}")
    timing = replace(chained.timing, method=chained.timing.method + warm)
    return replace(with_timing(r, timing, chained.accuracy), alone=alone.timing.median, chained=timing.median)


# ------------------------------------------------------------------------------------------------------------- how it is told

HEADERS = (
    *("case", "format", "variant", "launches", "us alone", "us chained", "us of kernels", "x naive, or three"),
    *("us of each launch", "us of each launch's kernels, in place", "verdict"),
)


def table(measured: Sequence[Record]) -> Table:
    """One row for each variant on each layer and format, and for each way to compute q, k and v."""
    return HEADERS, [_row(r) for r in measured if r.op in (OP, FUSED_OP) and r.implementation]


def _row(r: Record) -> tuple[str, ...]:
    launches = r.shape.get("launches") or {ONE: 1, THREE: 3, SIXTEEN: 1}.get(r.implementation, 0)
    return (
        r.case,
        r.formats,
        r.implementation,
        f"{launches}" + " + 1" * (_ORDERS in r.note),
        us(r.alone),
        us(r.chained),
        us(r.kernel_seconds),
        f"{r.peer_seconds / r.seconds:.2f}x" if r.peer_seconds and r.seconds else "",
        r.note.partition("us a launch: ")[2],
        ", ".join(f"{name} {us(seconds)}" for name, seconds in r.kernels.items()),
        "; ".join(map(verdict_text, r.bars)) or ("refused" if r.refused else ""),
    )
