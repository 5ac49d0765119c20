"""Study `w4a16-splitk`: data-parallel tiles against split-K and stream-K, as arXiv 2402.00025 compares them.

1 to 16 rows, N = K = 512 ... 16384 and the layers of Llama-3, int4 in groups of 128. Each kernel of `decompositions.KERNELS` is cut
in every way that it has; beside them runs `halfbyte.linear` as it plans by itself, over bf16 and symmetric codes, and over what the
published kernel reads: fp16 and zero points. Times are alone: launches kept apart. The published gain over data-parallel tiles is
124 % on average on an H100, 295 % at most, of squares. On a CPU only `halfbyte.linear` runs, on two sizes.
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
from halfbyte.errors import Unsupported
from halfbyte.tensors import QuantTensor
from halfbyte_lab.cases.decompositions import DATA_PARALLEL, EVERY, KERNELS, Decomposition, Form
from halfbyte_lab.cases.linear_baselines import judged_loosely
from halfbyte_lab.cases.linear_targets import INT4, LAYERS
from halfbyte_lab.cases.targets import Target, judge, verdict_text
from halfbyte_lab.measure import charts
from halfbyte_lab.measure.linear import copies_of, promise
from halfbyte_lab.measure.records import Record, with_timing
from halfbyte_lab.measure.session import Job, Session
from halfbyte_lab.measure.tables import Table, us
from halfbyte_lab.measure.timing import (
    MANY_GRAPHS,
    NOT_CAPTURED,
    Work,
    fixed_threads,
    is_cold,
)
from halfbyte_lab.measure.trials import Trial, one_by_one
from halfbyte_lab.studies import Study

ROWS, SIZES = (1, 2, 4, 8, 16), (512, 1024, 2048, 4096, 8192, 16384)
QUICK_ROWS, QUICK_SIZES = (1, 16), (512, 2048)
#: N and K of the layers of Llama-3-8B and 70B that are no squares.
LLAMA = tuple((layer.n, layer.k) for layer in LAYERS if layer.n != layer.k)
OURS, SAME = "halfbyte auto", "halfbyte auto, fp16 and zero points"
OP, SUMMARY = "split-k study", "split-k study, all sizes"
#: The published kernel as its authors ship it.
SHIPPED, MORE = "published, split-k 4", "published, split-k 16"
CUTS, FOUR, SIXTEEN = tuple(map(str, EVERY)), Decomposition("split-k", 4), Decomposition("split-k", 16)
#: The same codes with zero points.
ZEROS = "int4_g128"
#: What the published study reports for an H100, and how many times faster than its kernel ours must be.
MEAN_GAIN, PEAK_GAIN, TIMES_PUBLISHED = 2.24, 3.95, 3.0


def jobs(session: Session) -> list[Job]:
    """One job for each size, then the gains over all squares."""
    small = session.options.quick or session.device.kind != "cuda"
    squares = [SizeJob(size, size, QUICK_ROWS if small else ROWS) for size in (QUICK_SIZES if small else SIZES)]
    return [*squares, *(SizeJob(n, k, QUICK_ROWS) for n, k in LLAMA if not small), SummaryJob()]


@dataclass(frozen=True)
class SizeJob:
    """A weight [n, k] with all numbers of rows."""

    n: int
    k: int
    rows: tuple[int, ...] = ROWS
    op: str = OP

    @property
    def name(self) -> str:
        """ "split-k study, 4096" of a square."""
        return f"split-k study, {self.n}" + f" x {self.k}" * (self.n != self.k)

    def case(self, rows: int) -> str:
        """ "split-k study, 4096, 4 rows"."""
        return f"{self.name}, {rows} row{'s' * (rows > 1)}"

    def measure(self, session: Session) -> Iterator[Record]:
        """A record for each number of rows, kernel and decomposition."""
        rows = [m for m in self.rows if session.wants(self.case(m), INT4, "halfbyte")]
        if not rows:
            return
        session.free()
        device = session.device.torch
        with torch.no_grad(), fixed_threads(session.threads):
            generator = torch.Generator(device).manual_seed(0)
            x = torch.randn(max(rows), self.k, generator=generator, device=device).bfloat16()
            w = torch.randn(self.n, self.k, generator=generator, device=device).mul_(self.k**-0.5)
            weights, zeros = (_rotation(session, halfbyte.quantize(w, name)) for name in (INT4, ZEROS))
            layouts = {name: kernel.store(weights) for name, kernel in KERNELS.items()}
            right, same = (promise(x, rotation[0]) for rotation in (weights, zeros))
            theirs = judged_loosely(weights[0].dequantize(), x)  # its sums are of fp16
            for m in rows:
                forms = _forms(session, weights, layouts, x[:m])
                judges = {name: theirs if name.startswith("published") else right for name in forms}
                trials = {
                    name: Trial(name, Work(form.calls, paired=False), one_by_one(judges[name])) for name, form in forms.items()
                }
                calls = [partial(halfbyte.linear, x[:m].half(), weight) for weight in zeros]
                forms[SAME], trials[SAME] = Form(calls, 0, 1), Trial(SAME, Work(calls, paired=False), one_by_one(same))
                yield from self._case(session, weights, forms, trials, m)

    def _case(
        self,
        session: Session,
        weights: Sequence[QuantTensor],
        forms: Mapping[str, Form],
        trials: Mapping[str, Trial],
        rows: int,
    ) -> Iterator[Record]:
        nbytes = weights[0].nbytes
        outcomes = session.time(trials)
        kernels = session.kernel_seconds({name: trials[name].work for name, outcome in outcomes.items() if outcome.timing})
        warm = "" if is_cold(len(weights), nbytes, session.device.cache_bytes) else ", partly from cache"
        records: dict[str, Record] = {}
        for name, outcome in outcomes.items():
            r, timing = self._blank(session, rows, name, nbytes, forms[name]), outcome.timing
            if timing and outcome.accuracy:
                r = with_timing(r, replace(timing, method=timing.method + warm), outcome.accuracy)
                records[name] = replace(r, alone=timing.median, kernel_seconds=kernels.get(name))
            else:
                records[name] = replace(r, refused=f"{r.case} {name}: {outcome.refused}")
        yield from (_held_against(r, records.get(SHIPPED)) for r in records.values())

    def _blank(self, session: Session, rows: int, name: str, nbytes: int, form: Form) -> Record:
        shape = {"M": rows, "N": self.n, "K": self.k}
        if form.programs:
            shape |= {"programs": form.programs, "resident": form.resident, "SMs": session.device.sm_count or 1}
        formats = ZEROS if name == SAME else INT4
        return Record(OP, shape, formats, name, nbytes, session.environment, case=self.case(rows))


def _rotation(session: Session, weight: QuantTensor) -> list[QuantTensor]:
    """Copies beyond the last cache; two on a CPU."""
    return copies_of(weight, max(4, session.copies(weight.nbytes)) if session.device.kind == "cuda" else 2)


def _forms(
    session: Session, weights: Sequence[QuantTensor], stored: Mapping[str, Sequence[Any]], x: torch.Tensor
) -> dict[str, Form]:
    """Every kernel cut in every way that it has, and `halfbyte.linear` as it is."""
    forms: dict[str, Form] = {}
    for (name, kernel), cut in itertools.product(KERNELS.items(), EVERY):
        with contextlib.suppress(Unsupported):
            forms[f"{name}, {cut}"] = kernel.form(x, stored[name], cut, session.device)
    forms[OURS] = Form([partial(halfbyte.linear, x, weight) for weight in weights], 0, 1)
    return forms


def _held_against(r: Record, shipped: Record | None) -> Record:
    """Ours with its bar: so many times faster than the published kernel."""
    if r.implementation != OURS:
        return r
    seconds = None if NOT_CAPTURED in r.method else r.seconds
    times = shipped.seconds / seconds if shipped and shipped.seconds and seconds else None
    return replace(r, bars=judge([Target(r.case, INT4, "times_published", TIMES_PUBLISHED)], {"times_published": times}))


@dataclass(frozen=True)
class SummaryJob:
    """The gains of the best decomposition over data-parallel tiles, of all squares that this run has measured."""

    op: str = OP
    name: str = SUMMARY

    def measure(self, session: Session) -> Iterator[Record]:
        """One record for each kernel."""
        for kernel in KERNELS:
            if ratios := gains([r for r in session.records if is_square(r)], kernel):
                average, peak = mean(ratios.values()), max(ratios.values())
                mean_gain = f"{average:.2f}x data-parallel in the mean of {len(ratios)} cases"
                note = f"{kernel}: the best cut is {mean_gain}, {peak:.2f}x at most"
                record = Record(OP, {}, INT4, kernel, 0, session.environment, case=SUMMARY, note=note)
                ours = [Target(SUMMARY, INT4, "gain", MEAN_GAIN), Target(SUMMARY, INT4, "peak_gain", PEAK_GAIN)]
                yield replace(record, bars=judge(ours if kernel == "halfbyte" else [], {"gain": average, "peak_gain": peak}))


def is_square(r: Record) -> bool:
    """Whether N = K, as in the published study."""
    return bool(r.shape) and r.shape["N"] == r.shape["K"]


def gains(measured: Sequence[Record], kernel: str) -> dict[str, float]:
    """How many times faster the best decomposition of a kernel is than its data-parallel form, by case."""
    speedups: dict[str, float] = {}
    for case in dict.fromkeys(r.case for r in measured if r.op == OP):
        times = _times(measured, case, kernel)
        base = times.pop(DATA_PARALLEL, None)
        if base and times:
            speedups[case] = base / min(times.values())
    return speedups


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
    "split-k 4, us",
    "split-k 16, us",
    "4 over 16",
    "halfbyte auto, us",
    "fp16 and zero points, us",
    "verdict",
)


def drawn(measured: Sequence[Record]) -> list[str]:
    """The gain of the best cut over data-parallel tiles by size, a panel for each kernel and a line for each batch size M; what
    splits of the published kernel cost, by size.
    """
    speedups = {kernel: gains([r for r in measured if is_square(r)], kernel) for kernel in KERNELS}
    shapes = {r.case: (r.shape["N"], r.shape["M"]) for r in measured if r.shape}
    by_kernel: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for kernel, cases in speedups.items():
        for rows, size, gain in sorted((shapes[case][1], shapes[case][0], gain) for case, gain in cases.items()):
            by_kernel.setdefault(kernel, {}).setdefault(f"M = {rows}", []).append((size, gain))
    if not by_kernel:
        return []
    title = "Gain of the best split-K or stream-K over data-parallel tiles"
    figures = [charts.panels(by_kernel, x_label="N = K", y_label="times data-parallel", title=title, columns=2, line=1.0)]
    if lines := _by_splits(measured):
        title = "The published kernel, M = 1: time by splits over that of 4 splits"
        figures.append(charts.curves(lines, x_label="splits", y_label="times 4 splits", title=title))
    return figures


def _by_splits(measured: Sequence[Record]) -> dict[str, list[tuple[float, float]]]:
    """Time of the published kernel over its time with 4 splits, by splits; a line for each square, M = 1."""
    panels: dict[str, list[tuple[float, float]]] = {}
    for case in dict.fromkeys(r.case for r in measured if is_square(r) and r.shape["M"] == 1):
        times = _times(measured, case, "published")
        if (four := times.get(FOUR)) and len(times) > 1:
            cuts = [(cut.splits, seconds / four) for cut, seconds in times.items() if cut.kind != "stream-k"]
            panels[case.split(", ")[1]] = sorted(cuts)
    return panels


def says(measured: Sequence[Record]) -> list[str]:
    """The gains of ours and of the published kernel, and what more splits cost that."""
    sentences = [f"{r.note[0].upper()}{r.note[1:]}." for r in measured if r.case == SUMMARY]
    sentences += _by_waves_said(measured) + _more_splits_said(measured)
    return sentences or [
        "No kernel whose work can be cut ran here: they need an NVIDIA GPU, and only halfbyte.linear as it is was timed."
    ]


def _by_waves_said(measured: Sequence[Record]) -> list[str]:
    """The mean gain of the published kernel by how much of the GPU its data-parallel tiles fill."""
    speedups = gains([r for r in measured if is_square(r)], "published")
    waves_of = {r.case: _waves(r) for r in measured if r.implementation == f"published, {DATA_PARALLEL}"}
    by_waves: dict[str, list[float]] = {}
    for case, gain in speedups.items():
        by_waves.setdefault(waves_of[case], []).append(gain)
    if not by_waves:
        return []
    text = ", ".join(f"{mean(by_waves[waves]):.2f}x at {waves}" for waves in sorted(by_waves))
    return [f"The published kernel gains, by waves of data-parallel tiles: {text}."]


def _more_splits_said(measured: Sequence[Record]) -> list[str]:
    """From 4 to 16 splits, as published of an A100: by how much the published kernel slows down, and where."""
    times = {r.case: r.seconds for r in measured if r.implementation == SHIPPED and r.seconds}
    more = {r.case: r.seconds / times[r.case] for r in measured if r.implementation == MORE and r.seconds and r.case in times}
    if not more:
        return []
    slower, worst = [case for case, ratio in more.items() if ratio > 1], max(more, key=lambda case: more[case])
    return [
        f"From 4 to 16 splits the published kernel is slower in {len(slower)} of {len(more)} cases, at most {more[worst]:.2f}x "
        f"({worst.removeprefix('split-k study, ')}); published for an A100: slower with growing sizes."
    ]


def table(measured: Sequence[Record]) -> Table:
    """One row for each case and kernel, data-parallel and in its best other form, with waves per multiprocessor; then gains."""
    rows = []
    for case in dict.fromkeys(r.case for r in measured if r.op == OP and r.shape):
        mine = {r.implementation: r for r in measured if r.case == case and r.op == OP}
        cut = dict.fromkeys(name.partition(",")[0] for name in mine if name.partition(", ")[2] in CUTS)
        rows += [_row(case, kernel, mine) for kernel in cut or ["halfbyte.linear"]]
    of_all = [(SUMMARY, r.implementation, *[""] * 12, "; ".join(map(verdict_text, r.bars))) for r in measured if r.case == SUMMARY]
    return HEADERS, rows + of_all


def _row(case: str, kernel: str, mine: dict[str, Record]) -> tuple[str, ...]:
    times = _times(list(mine.values()), case, kernel)
    base = times.get(DATA_PARALLEL)
    others = {cut: s for cut, s in times.items() if cut != DATA_PARALLEL}
    best = min(others, key=lambda cut: others[cut], default=None)
    stream, auto, same = times.get(EVERY[-1]), mine.get(OURS), mine.get(SAME)
    four, sixteen = times.get(FOUR), times.get(SIXTEEN)
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
        us(four),
        us(sixteen),
        f"{four / sixteen:.2f}x" if four and sixteen else "",
        us(auto.seconds if auto else None),
        us(same.seconds if same else None),
        "; ".join(map(verdict_text, auto.bars)) if auto else "",
    )


def _waves(r: Record | None) -> str:
    shape = {} if r is None else r.shape
    return f"{shape['programs'] / (shape['SMs'] * shape['resident']):.2f}" if "programs" in shape else ""


STUDY = Study("w4a16-splitk", table, drawn, says, text_columns=2, effort=MANY_GRAPHS, jobs=jobs)
