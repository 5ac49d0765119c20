"""One progress bar over everything that a run measures, with an estimate of what is left."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

#: Seconds of the past that the estimate looks at: a whole run, since single jobs take from a second to a minute.
_PAST = 3600.0


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
    """A bar on stderr, where that is a terminal; several lists of jobs can share it."""

    def __init__(self, total: int, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        left = (TextColumn("left:"), TimeRemainingColumn())
        self._bar = Progress(
            *columns, *left, console=console, transient=True, disable=not sys.stderr.isatty(), speed_estimate_period=_PAST
        )
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
