"""`python -m halfbyte_lab linear`: measure every case of `linear_targets.py` on a GPU, and hold it against its targets.

Every call of ours is timed in two ways, each over a rotation of weights larger than the L2 cache: alone, launches kept apart, and
chained, back to back with launches that may overlap. All candidates of a case are sampled in turn. Each buffer of a rotation must
give a right result before anything is timed, and the graphs that were timed must have given one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

import halfbyte
from halfbyte.plans import plan
from halfbyte.tensors import QuantTensor
from halfbyte_lab import precompile
from halfbyte_lab.cases import linear_baselines, literature
from halfbyte_lab.cases.linear_baselines import Judge, LinearBaseline
from halfbyte_lab.cases.linear_targets import INT4, LAYERS, PUBLISHED, QUICK_LAYERS, QUICK_ROWS, ROWS, LinearCase, targets_of
from halfbyte_lab.cases.targets import Figures, judge
from halfbyte_lab.measure.linear import copies_of, promise
from halfbyte_lab.measure.records import Record, with_timing
from halfbyte_lab.measure.session import Job, Session, reason
from halfbyte_lab.measure.timing import NOT_CAPTURED, Work, fixed_threads
from halfbyte_lab.measure.trials import Outcome, Trial, one_by_one

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
        return {rows: pairs for rows, pairs in every.items() if pairs}

    def _wants(self, session: Session, rows: int, formats: str, impl: str) -> bool:
        return session.wants(self.layer.case(rows), formats, f"halfbyte {impl}")

    def to_compile(self, session: Session) -> Iterator[precompile.Pair]:
        """Every format with every number of rows."""
        for rows, pairs in self.wanted(session).items():
            for formats in dict.fromkeys(f for f, impl in pairs if impl != "triton"):
                yield from precompile.products(session.device, formats, [self.layer.n], rows, self.layer.k)

    def measure(self, session: Session) -> Iterator[Record]:
        """By rows: the peers' records, then ours; what fails is a record too."""
        selection = self.wanted(session)
        if not selection:
            return
        session.free()
        with torch.no_grad(), fixed_threads(session.threads):
            generator, device = torch.Generator(session.device.torch).manual_seed(0), session.device.torch
            x = torch.randn(max(selection), self.layer.k, generator=generator, device=device).bfloat16()
            try:
                entries = list(self._entries(session, selection, x, generator))
            except Exception as error:
                yield from self._refused(session, selection, error)
                return
            for rows, pairs in selection.items():
                yield from self._case(session, rows, [e for e in entries if _takes_part(e, rows, pairs)], x[:rows])
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
            yield from (Entry.of(peer, x) for peer in linear_baselines.low_bit(weight, copies))
            judge = promise(x, weight)
            for impl in dict.fromkeys(impl for pairs in wanted.values() for f, impl in pairs if f == name):
                calls = [partial(_linear, weight=one, impl=impl) for one in rotation]
                yield Entry(f"halfbyte {impl}", name, weight.nbytes, calls, judge, torch.Tensor.contiguous, True)

    def _case(self, session: Session, rows: int, entries: Sequence[Entry], x: torch.Tensor) -> Iterator[Record]:
        """The records of one number of rows."""
        blanks = [self._blank(session, e.formats, e.implementation, e.nbytes, rows) for e in entries]
        records = measure(session, entries, blanks, x)
        for e, r in zip(entries, records, strict=True):
            if e.ours:
                bars = judge(targets_of(self.layer, rows, e.formats), figures(r, records))
                yield replace(r, bars=bars, **_beside(records))  # type: ignore[arg-type]
            else:
                yield r

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


def _takes_part(entry: Entry, rows: int, wanted: Sequence[tuple[str, str]]) -> bool:
    """Whether a candidate is measured where these are wanted: ours if it is one of them, a peer if it stands beside one and is made
    for so many rows.
    """
    if entry.ours:
        return (entry.formats, entry.implementation.removeprefix("halfbyte ")) in wanted
    formats = [f for f, _ in wanted]
    if rows > ROWS[-1] and entry.implementation in (linear_baselines.TINYGEMM, PUBLISHED):
        return False
    return entry.formats in ("bf16", *map(literature.code_of, formats))


def _linear(x: torch.Tensor, weight: QuantTensor, impl: str) -> torch.Tensor:
    return halfbyte.linear(x, weight, impl=impl)


def _copies(session: Session, nbytes: int) -> int:
    """How many copies of a weight rotate: twice the last cache, and at least a few."""
    return max(_FEWEST, session.copies(nbytes)) if session.device.kind == "cuda" else 2


# ------------------------------------------------------------------------------------------------------------- one case


def measure(session: Session, entries: Sequence[Entry], blanks: Sequence[Record], x: torch.Tensor) -> list[Record]:
    """Time all entries in turn, ours alone and chained; the records by `blanks`, in their order. One that is wrong has no time."""
    trials: dict[str, Trial] = {}
    for i, e in enumerate(entries):
        fns, what = [partial(call, e.before(x)) for call in e.calls], f"{e.implementation} {e.formats}"
        for how in ("alone", "chained") if e.ours else ("alone",):
            trials[f"{i} {how}"] = Trial(what, Work(fns, paired=how == "chained"), one_by_one(e.judge))
    outcomes = session.time(trials)
    records = []
    for i, (e, blank) in enumerate(zip(entries, blanks, strict=True)):
        mine = {how: outcomes[f"{i} {how}"] for how in ("alone", "chained") if f"{i} {how}" in outcomes}
        refusal = next((outcome.refused for outcome in mine.values() if outcome.refused), "")
        if refusal:
            records.append(replace(blank, refused=f"{blank.case} {e.implementation}: {refusal}"))
        else:
            records.append(_timed(session, blank, e.ours, mine))
    right = {str(i): trials[f"{i} alone"].work for i, r in enumerate(records) if r.seconds}
    kernels = session.kernel_seconds(right)
    return [replace(r, kernel_seconds=kernels.get(str(i))) for i, r in enumerate(records)]


def _timed(session: Session, blank: Record, ours: bool, outcomes: Mapping[str, Outcome]) -> Record:
    """The record with its times; the chained one is judged where there is one."""
    outcome, alone = outcomes.get("chained") or outcomes["alone"], outcomes["alone"].timing
    assert outcome.timing is not None
    assert outcome.accuracy is not None
    assert alone is not None
    in_chain = outcome.timing.median if "chained" in outcomes else None
    r = replace(with_timing(blank, outcome.timing, outcome.accuracy), alone=alone.median, chained=in_chain)
    if ours:  # a roofline takes half a second for each number of bytes, and no baseline is held against one
        return session.against_roofline(r)
    return replace(r, gb_per_s=r.nbytes / outcome.timing.median / 1e9)


# ------------------------------------------------------------------------------------------------------------- verdicts


def figures(record: Record, beside: Sequence[Record]) -> Figures:
    """What the bars ask for, of a record and of those of the same case. Times that are not those of a graph are not judged."""
    seconds = None if NOT_CAPTURED in record.method else record.seconds
    if seconds is None:
        return {}

    def times(other: float | None) -> float | None:
        return other / seconds if other is not None else None

    def fastest(names: Sequence[str], formats: Sequence[str]) -> float | None:
        candidates = [r.seconds for r in beside if r.seconds and r.implementation in names and r.formats in formats]
        return min(candidates, default=None)

    other = literature.fastest(record.shape["N"], record.shape["K"], record.shape["M"], record.formats)
    int4 = [r.roof_share for r in beside if r.formats == INT4 and r.implementation == record.implementation and r.roof_share]
    return {
        "roof_share": record.roof_share,
        "seconds": seconds,
        "times_16_bit": times(fastest([linear_baselines.CUBLAS], ["bf16"])),
        "times_4_bit": times(fastest([linear_baselines.TINYGEMM, PUBLISHED], ["int4"])),
        "times_quoted": times(other.seconds if other else None),
        "share_of_int4": (record.roof_share or 0.0) / int4[0] if int4 else None,
    }


def _beside(records: Sequence[Record]) -> dict[str, object]:
    """cuBLAS's time, kept with each of our records."""
    cublas = [r for r in records if r.implementation == linear_baselines.CUBLAS and r.seconds]
    return {"peer": linear_baselines.CUBLAS, "peer_seconds": cublas[0].seconds} if cublas else {}
