"""Study `w4a16-splitk`: data-parallel tiles against split-K and stream-K, as arXiv 2402.00025 compares them.

1 to 16 rows, N = K = 512 ... 16384, int4 in groups of 128. Each kernel of `decompositions.KERNELS` is cut in every way that it has;
beside them runs `halfbyte.linear` as it plans by itself. Times are alone: launches kept apart. The published gain over
data-parallel tiles is 124 % on average on an H100, 295 % at most. On a CPU only `halfbyte.linear` runs, on two sizes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any

import torch

import halfbyte
from benchmarks.decompositions import DATA_PARALLEL, EVERY, KERNELS, Decomposition, Form
from benchmarks.linear_baselines import Judge, judged_loosely
from benchmarks.linear_targets import INT4
from benchmarks.studies import Study
from benchmarks.targets import Target, judge, verdict_text
from halfbyte.errors import Unsupported
from halfbyte.measure import charts
from halfbyte.measure.linear import copies_of
from halfbyte.measure.records import Record, with_timing
from halfbyte.measure.session import Job, Session
from halfbyte.measure.tables import Table, us
from halfbyte.measure.timing import (
    MANY_GRAPHS,
    NOT_CAPTURED,
    Work,
    fixed_threads,
    is_cold,
)
from halfbyte.measure.trials import Trial, one_by_one
from halfbyte.tensors import QuantTensor

ROWS, SIZES = (1, 2, 4, 8, 16), (512, 1024, 2048, 4096, 8192, 16384)
QUICK_ROWS, QUICK_SIZES = (1, 16), (512, 2048)
OP, SUMMARY = "split-k study", "split-k study, all sizes"
#: The published kernel as its authors ship it.
SHIPPED = "published, split-k 4"
#: What the published study reports for an H100, and how many times faster than its kernel ours must be.
MEAN_GAIN, PEAK_GAIN, TIMES_PUBLISHED = 2.24, 3.95, 3.0


def jobs(session: Session) -> list[Job]:
    """One job for each size, then the gains over all of them."""
    small = session.options.quick or session.device.kind != "cuda"
    return [*(SizeJob(size, QUICK_ROWS if small else ROWS) for size in (QUICK_SIZES if small else SIZES)), SummaryJob()]


def case_of(size: int, rows: int) -> str:
    """ "split-k study, 4096, 4 rows"."""
    return f"split-k study, {size}, {rows} row{'s' * (rows > 1)}"


@dataclass(frozen=True)
class SizeJob:
    """A weight [size, size] with all numbers of rows."""

    size: int
    rows: tuple[int, ...] = ROWS
    op: str = OP

    @property
    def name(self) -> str:
        return f"split-k study, {self.size}"

    def measure(self, session: Session) -> Iterator[Record]:
        """A record for each number of rows, kernel and decomposition."""
        rows = [m for m in self.rows if session.wants(case_of(self.size, m), INT4, "halfbyte")]
        if not rows:
            return
        session.free()
        device = session.device.torch
        with torch.no_grad(), fixed_threads(session.threads):
            generator = torch.Generator(device).manual_seed(0)
            x = torch.randn(max(rows), self.size, generator=generator, device=device).bfloat16()
            w = torch.randn(self.size, self.size, generator=generator, device=device).mul_(self.size**-0.5)
            weight = halfbyte.quantize(w, INT4)
            weights = copies_of(weight, max(4, session.copies(weight.nbytes)) if session.device.kind == "cuda" else 2)
            stored = {name: kernel.store(weights) for name, kernel in KERNELS.items()}
            right = judged_loosely(weight.dequantize(), x)
            for m in rows:
                yield from self._case(session, weights, stored, x[:m], right)

    def _case(
        self, session: Session, weights: Sequence[QuantTensor], stored: Mapping[str, Sequence[Any]], x: torch.Tensor, right: Judge
    ) -> Iterator[Record]:
        forms = _forms(session, weights, stored, x)
        nbytes = weights[0].nbytes
        trials = {name: Trial(name, Work(form.calls, paired=False), one_by_one(right)) for name, form in forms.items()}
        outcomes = session.time(trials)
        kernels = session.kernel_seconds({name: trials[name].work for name, outcome in outcomes.items() if outcome.timing})
        warm = "" if is_cold(len(weights), nbytes, session.device.cache_bytes) else ", partly from cache"
        records: dict[str, Record] = {}
        for name, outcome in outcomes.items():
            r, timing = self._blank(session, x.shape[0], name, nbytes, forms[name]), outcome.timing
            if timing and outcome.accuracy:
                r = with_timing(r, replace(timing, method=timing.method + warm), outcome.accuracy)
                records[name] = replace(r, alone=timing.median, kernel_seconds=kernels.get(name))
            else:
                records[name] = replace(r, refused=f"{r.case} {name}: {outcome.refused}")
        yield from (_held_against(r, records.get(SHIPPED)) for r in records.values())

    def _blank(self, session: Session, rows: int, name: str, nbytes: int, form: Form) -> Record:
        shape = {"M": rows, "N": self.size, "K": self.size}
        if form.programs:
            shape |= {"programs": form.programs, "resident": form.resident, "SMs": session.device.sm_count or 1}
        return Record(OP, shape, INT4, name, nbytes, session.environment, case=case_of(self.size, rows))


def _forms(
    session: Session, weights: Sequence[QuantTensor], stored: Mapping[str, Sequence[Any]], x: torch.Tensor
) -> dict[str, Form]:
    """Every kernel cut in every way that it has, and `halfbyte.linear` as it is."""
    found: dict[str, Form] = {}
    for (name, kernel), cut in itertools.product(KERNELS.items(), EVERY):
        with contextlib.suppress(Unsupported):
            found[f"{name}, {cut}"] = kernel.form(x, stored[name], cut, session.device)
    found["halfbyte auto"] = Form([partial(halfbyte.linear, x, weight) for weight in weights], 0, 1)
    return found


def _held_against(r: Record, shipped: Record | None) -> Record:
    """Ours with its bar: so many times faster than the published kernel."""
    if r.implementation != "halfbyte auto":
        return r
    seconds = None if NOT_CAPTURED in r.method else r.seconds
    times = shipped.seconds / seconds if shipped and shipped.seconds and seconds else None
    return replace(r, bars=judge([Target(r.case, INT4, "times_published", TIMES_PUBLISHED)], {"times_published": times}))


@dataclass(frozen=True)
class SummaryJob:
    """The gains of the best decomposition over data-parallel tiles, of all that this run has measured."""

    op: str = OP
    name: str = SUMMARY

    def measure(self, session: Session) -> Iterator[Record]:
        """One record for each kernel."""
        for kernel in KERNELS:
            if found := gains(session.records, kernel):
                average, peak = mean(found.values()), max(found.values())
                note = (
                    f"{kernel}: the best cut is {average:.2f}x data-parallel in the mean of {len(found)} cases, {peak:.2f}x at most"
                )
                record = Record(OP, {}, INT4, kernel, 0, session.environment, case=SUMMARY, note=note)
                ours = [Target(SUMMARY, INT4, "gain", MEAN_GAIN), Target(SUMMARY, INT4, "peak_gain", PEAK_GAIN)]
                yield replace(record, bars=judge(ours if kernel == "halfbyte" else [], {"gain": average, "peak_gain": peak}))


def gains(measured: Sequence[Record], kernel: str) -> dict[str, float]:
    """How many times faster the best decomposition of a kernel is than its data-parallel form, by case."""
    found: dict[str, float] = {}
    for case in dict.fromkeys(r.case for r in measured if r.op == OP):
        times = _times(measured, case, kernel)
        base = times.pop(DATA_PARALLEL, None)
        if base and times:
            found[case] = base / min(times.values())
    return found


def _times(measured: Sequence[Record], case: str, kernel: str) -> dict[Decomposition, float]:
    """Seconds of a kernel on a case, by decomposition."""
    by_name = {r.implementation: r.seconds for r in measured if r.case == case and r.op == OP}
    return {cut: seconds for cut in EVERY if (seconds := by_name.get(f"{kernel}, {cut}"))}


# ------------------------------------------------------------------------------------------------------------- how it is told

HEADERS = (
    "case",
    "kernel",
    "data-parallel, us",
    "waves",
    "best cut",
    "us",
    "waves",
    "gain",
    "stream-k, us",
    "halfbyte auto, us",
    "verdict",
)


def table(measured: Sequence[Record]) -> Table:
    """One row for each case and kernel, then the gains over all cases."""
    return HEADERS, table_rows(measured)


def drawn(measured: Sequence[Record]) -> list[str]:
    """The gain of the best cut over data-parallel tiles by size, a panel for each kernel and a line for each batch size M."""
    found = {kernel: gains(measured, kernel) for kernel in KERNELS}
    shapes = {r.case: (r.shape["N"], r.shape["M"]) for r in measured if r.shape}
    by_kernel: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for kernel, cases in found.items():
        for rows, size, gain in sorted((shapes[case][1], shapes[case][0], gain) for case, gain in cases.items()):
            by_kernel.setdefault(kernel, {}).setdefault(f"M = {rows}", []).append((size, gain))
    if not by_kernel:
        return []
    title = "Gain of the best split-K or stream-K over data-parallel tiles"
    return [charts.panels(by_kernel, x_label="N = K", y_label="times data-parallel", title=title, columns=2)]


def says(measured: Sequence[Record]) -> list[str]:
    """The gains of ours and of the published kernel."""
    told = [f"{r.note[0].upper()}{r.note[1:]}." for r in measured if r.case == SUMMARY]
    return told or [
        "No kernel whose work can be cut ran here: they need an NVIDIA GPU, and only halfbyte.linear as it is was timed."
    ]


def table_rows(measured: Sequence[Record]) -> list[tuple[str, ...]]:
    """One row for each case and kernel: its data-parallel form, its best other form, waves per multiprocessor of both."""
    rows = []
    for case in dict.fromkeys(r.case for r in measured if r.op == OP and r.shape):
        mine = {r.implementation: r for r in measured if r.case == case and r.op == OP}
        cut = dict.fromkeys(name.partition(",")[0] for name in mine if "," in name)
        rows += [_row(case, kernel, mine) for kernel in cut or ["halfbyte.linear"]]
    return rows + [
        (SUMMARY, r.implementation, *[""] * 8, "; ".join(map(verdict_text, r.bars))) for r in measured if r.case == SUMMARY
    ]


def _row(case: str, kernel: str, mine: dict[str, Record]) -> tuple[str, ...]:
    times = _times(list(mine.values()), case, kernel)
    base = times.get(DATA_PARALLEL)
    others = {cut: s for cut, s in times.items() if cut != DATA_PARALLEL}
    best = min(others, key=lambda cut: others[cut], default=None)
    stream, auto = times.get(EVERY[-1]), mine.get("halfbyte auto")
    return (
        case,
        kernel,
        us(base),
        _waves(mine.get(f"{kernel}, {DATA_PARALLEL}")),
        "" if best is None else str(best),
        us(others[best]) if best else "",
        _waves(mine.get(f"{kernel}, {best}")),
        f"{base / others[best]:.2f}x" if base and best else "",
        us(stream),
        us(auto.seconds if auto else None),
        "; ".join(map(verdict_text, auto.bars)) if auto else "",
    )


def _waves(r: Record | None) -> str:
    shape = {} if r is None else r.shape
    return f"{shape['programs'] / (shape['SMs'] * shape['resident']):.2f}" if "programs" in shape else ""


STUDY = Study("w4a16-splitk", jobs, table, drawn, says, text_columns=2, effort=MANY_GRAPHS)
