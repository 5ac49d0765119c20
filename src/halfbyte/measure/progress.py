"""How far a run is and how long it will take, on stderr: a bar in a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from time import monotonic
from types import TracebackType
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

#: Seconds of the past that the estimate looks at: a whole run, since single jobs take from a second to a minute.
_PAST = 3600.0
#: Seconds between two lines.
_PAUSE = 10.0


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


def progress(console: Console) -> Progress:
    """A bar with an estimate of what is left, which goes when it is done; lines where the console is no terminal."""
    if not console.is_terminal:
        return _Lines(console=console, transient=True, auto_refresh=False, speed_estimate_period=_PAST)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    left = (TextColumn("left:"), TimeRemainingColumn())
    return Progress(*columns, *left, console=console, transient=True, speed_estimate_period=_PAST)


class _Lines(Progress):
    """Progress where nothing can be redrawn, such as a log."""

    _said = -1.0

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._say(task_id)

    def update(self, task_id: TaskID, **changed: Any) -> None:
        super().update(task_id, **changed)
        self._say(task_id)

    def stop(self) -> None:
        self.live.stop()  # without the empty line that rich prints where nothing is redrawn

    def _say(self, task_id: TaskID) -> None:
        now = monotonic()
        if self._said < 0:
            self._said = now
        if now - self._said < _PAUSE:
            return
        self._said, task = now, self.tasks[self.task_ids.index(task_id)]
        left = "" if task.time_remaining is None else f", {timedelta(seconds=int(task.time_remaining))} left"
        text = f"{task.description.strip()}: {task.completed:,.0f} of {task.total or 0:,.0f}{left}"
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


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
