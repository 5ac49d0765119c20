"""`halfbyte bench linear --bars`: measure every case of `linear_bars.py` on a GPU, beside its peers, and hold it against its bars.

Every call of ours is timed in two ways, each over a rotation of weights larger than the L2 cache: alone, launches kept apart, and
chained, back to back with launches that may overlap. All candidates of a case are sampled in turn. Each buffer of a rotation must
give a right result before anything is timed, and the graphs that were timed must have given one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

import halfbyte
from benchmarks import linear_baselines, literature
from benchmarks.linear_baselines import EXPANDED, Judge, LinearBaseline
from benchmarks.linear_targets import INT4, LAYERS, PUBLISHED, QUICK_LAYERS, QUICK_ROWS, LinearCase, targets_of
from benchmarks.targets import Figures, judge
from halfbyte.measure import precompile
from halfbyte.measure.checks import Accuracy
from halfbyte.measure.linear import copies_of, promise
from halfbyte.measure.precompile import Pair
from halfbyte.measure.records import Record, with_timing
from halfbyte.measure.session import Job, Session, reason
from halfbyte.measure.timing import NOT_CAPTURED, Sampler, Timing, Work, fixed_threads, make_sampler, sample_in_turn, summary
from halfbyte.plans import plan
from halfbyte.tensors import QuantTensor

#: Copies of a weight at least, however large it is.
_FEWEST = 4


def jobs(impls: Sequence[str], kind: str, quick: bool = False) -> list[Job]:
    """Everything that has a bar; `quick`: two layers, with fewer numbers of rows, each of which has kernels of its own."""
    for impl in impls:
        plan("linear", impl, kind)
    few = [replace(layer, rows=QUICK_ROWS) for layer in LAYERS if layer.name in QUICK_LAYERS]
    return [LayerJob(layer, tuple(impls)) for layer in (few if quick else LAYERS)]


@dataclass(frozen=True)
class Entry:
    """One candidate with its rotation: each call takes x [rows, K] in bf16, cast `before` outside of what is timed."""

    implementation: str
    formats: str
    nbytes: int
    calls: Sequence[linear_baselines.Call]
    judge: Judge
    before: linear_baselines.Call
    ours: bool

    @staticmethod
    def of(peer: LinearBaseline, x: torch.Tensor) -> Entry:
        """A peer, judged loosely on the rows of x."""
        judge = linear_baselines.judged_loosely(peer.values, x)
        return Entry(peer.name, peer.formats, peer.nbytes, peer.calls, judge, peer.before, False)


@dataclass(frozen=True)
class LayerJob:
    """One weight in several formats, with all its numbers of rows."""

    layer: LinearCase
    impls: tuple[str, ...]
    op: str = "linear"

    @property
    def name(self) -> str:
        return self.layer.name

    def wanted(self, session: Session) -> dict[int, list[tuple[str, str]]]:
        """(format, implementation) that the filter lets through, by rows."""
        every = {
            rows: [(f, impl) for f in self.layer.formats_at(rows) for impl in self.impls if self._wants(session, rows, f, impl)]
            for rows in self.layer.rows
        }
        return {rows: found for rows, found in every.items() if found}

    def _wants(self, session: Session, rows: int, formats: str, impl: str) -> bool:
        return session.wants(self.layer.case(rows), formats, f"halfbyte {impl}")

    def to_compile(self, session: Session) -> Iterator[Pair]:
        """Every format with every number of rows."""
        for rows, pairs in self.wanted(session).items():
            for formats in dict.fromkeys(f for f, impl in pairs if impl != "triton"):
                yield from precompile.products(session.device, formats, [self.layer.n], rows, self.layer.k)

    def measure(self, session: Session) -> Iterator[Record]:
        """By rows: the peers' records, then ours; what fails is a record too."""
        wanted = self.wanted(session)
        if not wanted:
            return
        session.free()
        with torch.no_grad(), fixed_threads(session.threads):
            generator, device = torch.Generator(session.device.torch).manual_seed(0), session.device.torch
            x = torch.randn(max(wanted), self.layer.k, generator=generator, device=device).bfloat16()
            try:
                entries = list(self._entries(session, wanted, x, generator))
            except Exception as error:
                yield from self._refused(session, wanted, error)
                return
            for rows, pairs in wanted.items():
                yield from self._case(session, rows, [e for e in entries if _takes_part(e, pairs)], x[:rows])
        session.free()

    def _entries(
        self, session: Session, wanted: dict[int, list[tuple[str, str]]], x: torch.Tensor, generator: torch.Generator
    ) -> Iterator[Entry]:
        """Peers, then ours, each with its rotation in memory."""
        layer, copies = self.layer, partial(_copies, session)
        w = torch.randn(layer.n, layer.k, generator=generator, device=x.device).mul_(layer.k**-0.5)
        yield Entry.of(linear_baselines.cublas(w.bfloat16(), copies), x)
        for name in dict.fromkeys(f for pairs in wanted.values() for f, _ in pairs):
            weight = halfbyte.quantize(w, name)
            rotation = copies_of(weight, copies(weight.nbytes))
            if layer.prefill:
                yield Entry.of(linear_baselines.expanded(rotation), x)
            elif name == INT4:
                yield from (Entry.of(peer, x) for peer in linear_baselines.low_bit(weight, copies))
            judge = promise(x, weight.dequantize)
            for impl in dict.fromkeys(impl for pairs in wanted.values() for f, impl in pairs if f == name):
                calls = [partial(_linear, weight=one, impl=impl) for one in rotation]
                yield Entry(f"halfbyte {impl}", name, weight.nbytes, calls, judge, torch.Tensor.contiguous, True)

    def _case(self, session: Session, rows: int, entries: Sequence[Entry], x: torch.Tensor) -> Iterator[Record]:
        """The records of one number of rows."""
        timed = [_Timed(e, self._blank(session, e.formats, e.implementation, e.nbytes, rows), e.before(x)) for e in entries]
        measure(session, timed)
        records = [t.record for t in timed]
        for t in timed:
            if t.entry.ours:
                bars = targets_of(self.layer, rows, t.entry.formats)
                t.record = replace(t.record, bars=judge(bars, figures(t.record, records)), **_beside(records))  # type: ignore[arg-type]
            yield t.record

    def _refused(self, session: Session, wanted: Mapping[int, list[tuple[str, str]]], error: Exception) -> Iterator[Record]:
        """All of ours without a time, their bars unmet: their weights could not be made."""
        for rows, pairs in wanted.items():
            for formats, impl in pairs:
                record = self._blank(session, formats, f"halfbyte {impl}", 0, rows)
                why = f"{record.case} {formats} {impl}: {reason(error)}"
                yield replace(record, refused=why, bars=judge(targets_of(self.layer, rows, formats), {}))

    def _blank(self, session: Session, formats: str, implementation: str, nbytes: int, rows: int) -> Record:
        shape = {"M": rows, "N": self.layer.n, "K": self.layer.k}
        return Record(self.op, shape, formats, implementation, nbytes, session.environment, case=self.layer.case(rows))


def _takes_part(entry: Entry, wanted: Sequence[tuple[str, str]]) -> bool:
    """Whether a candidate is measured where these are wanted: ours if it is one of them, a peer if it stands beside one."""
    if entry.ours:
        return (entry.formats, entry.implementation.removeprefix("halfbyte ")) in wanted
    if entry.implementation == EXPANDED:
        return entry.formats in [f for f, _ in wanted]
    return entry.formats == "bf16" or INT4 in [f for f, _ in wanted]


def _linear(x: torch.Tensor, weight: QuantTensor, impl: str) -> torch.Tensor:
    return halfbyte.linear(x, weight, impl=impl)


def _copies(session: Session, nbytes: int) -> int:
    """How many copies of a weight rotate: twice the last cache, and at least a few."""
    return max(_FEWEST, session.copies(nbytes)) if session.device.kind == "cuda" else 2


# ------------------------------------------------------------------------------------------------------------- one case


@dataclass
class _Timed:
    """A candidate on its way to a record; `entry.calls` on one x."""

    entry: Entry
    record: Record
    x: torch.Tensor
    accuracy: Accuracy | None = None

    @property
    def fns(self) -> list[Callable[[], torch.Tensor]]:
        return [partial(call, self.x) for call in self.entry.calls]

    def refuse(self, error: Exception) -> None:
        """No time for what failed."""
        self.record = replace(self.record, refused=f"{self.record.case} {self.entry.implementation}: {reason(error)}")

    def check(self, outs: Sequence[object]) -> None:
        """Every result must be right."""
        for y in outs:
            assert isinstance(y, torch.Tensor)
            self.accuracy = self.entry.judge(y)
            self.accuracy.require(f"{self.entry.implementation} {self.entry.formats}")


def measure(session: Session, timed: Sequence[_Timed]) -> None:
    """Check, time in turn and check again; each of `timed` then has its record."""
    samplers: dict[tuple[int, str], Sampler] = {}
    for i, t in enumerate(timed):
        try:
            t.check([fn() for fn in t.fns])
            for how in ("alone", "chained") if t.entry.ours else ("alone",):
                samplers[i, how] = make_sampler(how, Work(t.fns, paired=how == "chained"), session.device, session.effort)
        except Exception as error:
            t.refuse(error)
            samplers = {key: s for key, s in samplers.items() if key[0] != i}
    samples = sample_in_turn({f"{i} {how}": s for (i, how), s in samplers.items()}, session.effort) if samplers else {}
    for i, t in enumerate(timed):
        mine = {how: s for (j, how), s in samplers.items() if j == i}
        try:
            for sampler in mine.values():
                t.check(sampler.run())
        except Exception as error:
            t.refuse(error)
            continue
        if mine:
            _fill(session, t, {how: summary(samples[f"{i} {how}"], s.method) for how, s in mine.items()})
    right = {str(i): Work(t.fns, paired=False) for i, t in enumerate(timed) if t.record.seconds}
    for name, seconds in session.kernel_seconds(right).items():
        timed[int(name)].record = replace(timed[int(name)].record, kernel_seconds=seconds)


def _fill(session: Session, t: _Timed, times: dict[str, Timing]) -> None:
    """The record with its times; the chained one is judged where there is one."""
    judged = times.get("chained") or times["alone"]
    assert t.accuracy is not None
    t.record = replace(
        with_timing(t.record, judged, t.accuracy),
        alone=times["alone"].median,
        chained=times["chained"].median if "chained" in times else None,
        gb_per_s=t.record.nbytes / judged.median / 1e9,
    )
    if t.entry.ours:  # a roof takes half a second for each number of bytes, and no peer is held against one
        roof = session.roofline.read(t.record.nbytes).gb_per_s
        t.record = replace(t.record, roof_gb_per_s=roof, roof_share=(t.record.gb_per_s or 0.0) / roof)


# ------------------------------------------------------------------------------------------------------------- verdicts


def figures(record: Record, beside: Sequence[Record]) -> Figures:
    """What the bars ask for, of a record and of those of the same case. Times that are not those of a graph are not judged."""
    seconds = None if NOT_CAPTURED in record.method else record.seconds
    if seconds is None:
        return {}

    def times(other: float | None) -> float | None:
        return other / seconds if other is not None else None

    def fastest(names: Sequence[str], formats: Sequence[str]) -> float | None:
        found = [r.seconds for r in beside if r.seconds and r.implementation in names and r.formats in formats]
        return min(found, default=None)

    other = literature.fastest(record.shape["N"], record.shape["K"], record.shape["M"], record.formats)
    int4 = [r.roof_share for r in beside if r.formats == INT4 and r.implementation == record.implementation and r.roof_share]
    expanded = fastest([EXPANDED], [record.formats])
    return {
        "roof_share": record.roof_share,
        "seconds": seconds,
        "times_16_bit": times(fastest([linear_baselines.CUBLAS], ["bf16"])),
        "times_4_bit": times(fastest([linear_baselines.TINYGEMM, PUBLISHED], ["int4"])),
        "times_quoted": times(other.seconds if other else None),
        "share_of_int4": (record.roof_share or 0.0) / int4[0] if int4 else None,
        "over_expanded": seconds / expanded if expanded else None,
    }


def _beside(records: Sequence[Record]) -> dict[str, object]:
    """cuBLAS's time, kept with each of our records."""
    found = [r for r in records if r.implementation == linear_baselines.CUBLAS and r.seconds]
    return {"peer": linear_baselines.CUBLAS, "peer_seconds": found[0].seconds} if found else {}
