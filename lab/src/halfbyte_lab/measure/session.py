"""One run of a benchmark: check, time and record candidates case by case, show progress, keep what is measured when interrupted."""

from __future__ import annotations

import copy
import gc
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

import torch
from rich.console import Console

from halfbyte.device import Device, describe
from halfbyte.errors import InvalidArgument
from halfbyte.terminal import show_table
from halfbyte_lab.measure import cupti, records
from halfbyte_lab.measure.checks import Accuracy
from halfbyte_lab.measure.environment import environment
from halfbyte_lab.measure.records import Record, with_accuracy, with_timing
from halfbyte_lab.measure.roofline import Roofline
from halfbyte_lab.measure.tables import Table, is_noisy
from halfbyte_lab.measure.timing import GRAPHS, QUICK, Effort, Work, check_threads, fixed_threads, is_cold, rotation_copies
from halfbyte_lab.measure.trials import Outcome, Trial, one_by_one, reason, run_trials
from halfbyte_lab.progress import progress


class Named(Protocol):
    """A job, as far as a progress bar knows it."""

    @property
    def op(self) -> str: ...
    @property
    def name(self) -> str: ...


J = TypeVar("J", bound=Named)


def job_name(job: Named) -> str:
    """ "linear: 4096 x 4096": what tells a job from the others of its study."""
    return f"{job.op}: {job.name}"


class Steps:
    """The progress of jobs; several lists of them can share it."""

    def __init__(self, total: int, console: Console) -> None:
        self._bar = progress(console)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Steps:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._bar.stop()

    def over(self, jobs: Sequence[J]) -> Iterator[J]:
        """The jobs one by one, each counted when it is done."""
        for job in jobs:
            self._bar.update(self._task, description=job_name(job))
            yield job
            self._bar.advance(self._task)


__all__ = ["Candidate", "Case", "Job", "Options", "Session", "reason"]


@dataclass(frozen=True)
class Candidate:
    """One implementation on one case.

    formats    what is read: "int8", "int8+int4_g32", "bf16"
    fns        the rotation, the same work on different buffers; each returns its result
    accuracy   judges a result before anything is timed
    nbytes     bytes a call must move at least
    """

    implementation: str
    formats: str
    nbytes: int
    fns: Sequence[Callable[[], torch.Tensor]]
    accuracy: Callable[[torch.Tensor], Accuracy]


class Job(Named, Protocol):
    """Something that a session measures: its records, one by one, so that an interrupt keeps those that are finished."""

    def measure(self, session: Session) -> Iterable[Record]:
        """Measure, and give each record when it is complete."""


@dataclass(frozen=True)
class Case:
    """One problem and a way to make its candidates; made late, so that one case at a time is in memory."""

    op: str
    name: str
    shape: dict[str, int]
    candidates: Callable[[], list[Candidate]]

    def measure(self, session: Session) -> Iterable[Record]:
        """All candidates, timed in turn."""
        return session.measure(self)


@dataclass(frozen=True)
class Options:
    """What the command line says.

    pattern  a regular expression over "case formats implementation"
    kernels  times of the kernels by themselves, too, by CUPTI
    wide     tables show all columns, however narrow the terminal is
    """

    output: Path | None = None
    quick: bool = False
    pattern: str = ""
    json: bool = False
    device: str | None = None
    threads: int | None = None
    kernels: bool = False
    wide: bool = False

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise InvalidArgument(f"filter={self.pattern!r} is not a regular expression: {error}") from error
        if self.threads is not None:
            check_threads(self.threads)


@dataclass
class Session:
    """Measures cases and holds their records; `graphs` is how much a GPU measures for each candidate, `study` marks the records.

    interrupted  by Ctrl-C: what was measured is kept
    broken       the GPU does not answer after a failure, so that nothing more can be measured
    """

    options: Options
    device: Device
    graphs: Effort = GRAPHS
    records: list[Record] = field(default_factory=list)
    interrupted: bool = False
    broken: bool = False
    study: str = ""

    @staticmethod
    def start(options: Options, graphs: Effort = GRAPHS) -> Session:
        """A session on the device that the options name."""
        return Session(options, describe(options.device), graphs)

    def __post_init__(self) -> None:
        self.effort = self._effort(self.graphs)
        self.threads = self.options.threads or torch.get_num_threads()
        self.roofline = Roofline(self.device, self.threads, self.effort)
        self.environment = environment(self.device, self.threads)
        self._errors = Console(stderr=True)
        self._out = Console()

    def _effort(self, graphs: Effort) -> Effort:
        return graphs if self.device.kind == "cuda" else QUICK if self.options.quick else Effort()

    def part(self, graphs: Effort, study: str = "") -> Session:
        """A session with records of its own, in the same environment and with the rooflines that are known here."""
        session = copy.copy(self)
        session.graphs, session.effort, session.study, session.records = graphs, self._effort(graphs), study, []
        session.roofline = Roofline(self.device, self.threads, session.effort, self.roofline.known)
        return session

    def copies(self, nbytes: int) -> int:
        """How many copies of a working set make a rotation on this device."""
        return rotation_copies(nbytes, self.device)

    @property
    def no_kernel_times(self) -> str:
        """Why the kernels' own times are not available; "" if they are. Call it after sampling."""
        return cupti.unavailable(self.device.torch) if self.device.kind == "cuda" else "there is no GPU here"

    def traced(self, works: Mapping[str, Work]) -> dict[str, cupti.Calls]:
        """The kernels of some calls of each work, where they can be had. Asked after samples are taken: it may disturb them."""
        if not works or self.no_kernel_times:
            return {}
        try:
            with torch.no_grad(), torch.cuda.device(self.device.torch):
                return cupti.traced(works)
        except Exception as error:
            self._errors.print(f"no kernel times of {', '.join(works)}: {reason(error)}", markup=False)
            return {}

    def kernel_seconds(self, works: Mapping[str, Work]) -> dict[str, float | None]:
        """Seconds that the kernels of a call take by themselves, for each work that they are known of; none unless requested."""
        if not self.options.kernels:
            return {}
        return {name: cupti.seconds_of(calls) for name, calls in self.traced(works).items()}

    def wants(self, case: str, formats: str, implementation: str) -> bool:
        """Whether the filter lets this through."""
        return re.search(self.options.pattern, f"{case} {formats} {implementation}") is not None

    def earlier(self) -> list[Record]:
        """What the output holds of this study: a job that is asked to resume leaves it out."""
        path = self.options.output
        kept = records.read(path).records if path is not None and path.exists() else []
        return [r for r in kept if r.study == self.study and not r.refused]

    def steps(self, total: int) -> Steps:
        """A progress bar over so many jobs."""
        return Steps(total, self._errors)

    def run(self, jobs: Sequence[Job], steps: Steps | None = None) -> list[Record]:
        """Measure all jobs, under a progress bar of their own unless they share one; one that fails is recorded as refused and the
        others go on.

        After Ctrl-C what was measured stays, is shown, and `interrupted` is set.
        """
        if steps is None:
            with self.steps(len(jobs)) as steps:
                return self.run(jobs, steps)
        try:
            for job in steps.over(jobs):
                try:
                    for record in job.measure(self):
                        self.keep(replace(record, job=job_name(job)))
                except Exception as error:
                    self.keep(self.failed(job, error))
                    if not self._recovered():
                        self.broken = True
                        self._errors.print("the GPU does not answer after this failure: the rest is not measured")
                        break
        except KeyboardInterrupt:
            self.interrupted = True
            self._errors.print("interrupted: what was measured so far is kept" if self.records else "interrupted")
        return self.records

    def free(self) -> None:
        """Give back the memory of graphs and caches that are done with. Raises where a kernel has broken the GPU's context."""
        gc.collect()
        if self.device.kind == "cuda":
            torch.cuda.synchronize(self.device.torch)
            torch.cuda.empty_cache()

    def failed(self, job: Job, error: Exception) -> Record:
        """The record of a job that raised."""
        why = f"{job.name}: {reason(error)}"
        return Record(job.op, {}, "", "", 0, self.environment, refused=why, case=job.name, job=job_name(job))

    def _recovered(self) -> bool:
        """Whether this can go on after a failure; a kernel that broke the GPU's context has ended the run."""
        if self.device.kind == "cuda":
            try:
                torch.cuda.synchronize(self.device.torch)
                torch.cuda.empty_cache()
            except RuntimeError:
                return False
        return True

    def measure(self, case: Case) -> list[Record]:
        """The records of one case: those that keep their accuracy promise, before and after, are timed in turn; the others say why
        not."""
        candidates = [c for c in case.candidates() if self.wants(case.name, c.formats, c.implementation)]
        trials = {
            str(i): Trial(f"{c.implementation} {c.formats}", Work(c.fns), one_by_one(c.accuracy)) for i, c in enumerate(candidates)
        }
        outcomes = self.time(trials)
        kernels = self.kernel_seconds({i: trials[i].work for i, outcome in outcomes.items() if outcome.timing})
        records = [self._record(case, c, outcomes[str(i)]) for i, c in enumerate(candidates)]
        return [replace(r, kernel_seconds=kernels.get(str(i))) for i, r in enumerate(records)]

    def time(self, trials: Mapping[str, Trial]) -> dict[str, Outcome]:
        """What comes of trials that are sampled in turn."""
        with fixed_threads(self.threads):
            return run_trials(trials, self.device, self.effort)

    def _record(self, case: Case, who: Candidate, outcome: Outcome) -> Record:
        refusal, timing = outcome.refused, outcome.timing
        blank = Record(case.op, case.shape, who.formats, who.implementation, who.nbytes, self.environment, refused=refusal)
        record = with_accuracy(blank, outcome.accuracy) if outcome.accuracy else blank
        if not timing or not outcome.accuracy:
            return record
        cold = is_cold(len(who.fns), who.nbytes, self.device.cache_bytes)
        timing = replace(timing, method=timing.method + ("" if cold else ", partly from cache"))
        return self.against_roofline(with_timing(record, timing, outcome.accuracy))

    def against_roofline(self, record: Record) -> Record:
        """A timed record with its rate, and with that of reading as many bytes."""
        rate, roof = record.nbytes / (record.seconds or math.inf) / 1e9, self.roofline.read(record.nbytes).gb_per_s
        return replace(record, gb_per_s=rate, roof_gb_per_s=roof, roof_share=rate / roof)

    def keep(self, record: Record) -> None:
        """Remember a record, and write it where the options say. Targets are those of GPUs and judge no times of a CPU."""
        if self.device.kind != "cuda":
            record = replace(record, bars=())
        if self.study:
            record = replace(record, study=self.study)
        self.records.append(record)
        if self.options.output is not None and (notice := records.append(self.options.output, [record])):
            self._errors.print(notice, markup=False)
        if self.options.json:
            print(record.to_json(), flush=True)
        if not sys.stderr.isatty() and self.device.kind == "cuda":  # no progress bar there: say what is done
            time = "refused" if record.refused else "" if record.seconds is None else f"{1e6 * record.seconds:.1f} us"
            print(f"{record.case or record.shape} {record.formats} {record.implementation}: {time}", file=sys.stderr, flush=True)

    # ------------------------------------------------------------------------------------------------------- what is shown

    def show_roofline(self, nbytes: int = 2**26) -> None:
        """Print the rooflines of this machine: read and copy at `nbytes`, and a 16-bit product."""
        if self.options.json:
            return
        # A CPU without 16-bit instructions takes seconds for a product of 1,024.
        read, size = self.roofline.read(nbytes), 4096 if self.device.kind == "cuda" else 512
        self._out.print(
            f"{self.device.name}, {self.threads} threads. Rooflines at {nbytes / 2**20:.0f} MiB: "
            f"read {read.gb_per_s:,.1f} GB/s ({read.reader}), copy {self.roofline.copy(nbytes):,.1f} GB/s, "
            f"bf16 product of {size} x {size}: {self.roofline.matmul(size):.3g} TFLOP/s",
            highlight=False,
        )

    def show_tables(self, title: str, tables: Sequence[Table], text_columns: int) -> None:
        """Print tables and what a reader must know besides; all but the first `text_columns` columns hold numbers."""
        for headers, rows in tables:
            show_table(self._out, title, headers, rows, text_columns, self.options.wide)
        for record in self.records:
            if record.refused:
                self._out.print(f"refused: {record.refused}", markup=False, highlight=False, soft_wrap=True)
        if noisy := sum(is_noisy(r) for r in self.records):
            self._out.print(
                f"note: {noisy} of {len(self.records)} times vary by more than half from sample to sample (p10 - p90): "
                f"something else runs on this machine",
                highlight=False,
            )

    def say(self, text: str) -> None:
        """Print a line, unless only JSON is wanted."""
        if not self.options.json:
            self._out.print(text, markup=False, highlight=False)
