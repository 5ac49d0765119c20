"""Progress in a terminal: a bar with an estimate of what is left; elsewhere, such as in a log, a line every ten seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

#: Seconds of the past that the estimate looks at: a whole run, since single jobs take from a second to a minute.
_PAST = 3600.0
#: Seconds between two lines.
_PAUSE = 10.0


def progress(console: Console) -> Progress:
    """A bar with an estimate of what is left, which goes when it is done; lines where the console is no terminal."""
    if not console.is_terminal:
        return _Lines(console=console, transient=True, auto_refresh=False, speed_estimate_period=_PAST)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    left = (TextColumn("left:"), TimeRemainingColumn())
    return Progress(*columns, *left, console=console, transient=True, speed_estimate_period=_PAST)


@contextmanager
def progress_later(console: Console, description: str, total: int) -> Iterator[Callable[[], None]]:
    """What advances such a bar, which shows from the first step on: what comes before has a bar of its own."""
    bar = progress(console)
    task = bar.add_task(description, total=total)

    def advance() -> None:
        bar.start()
        bar.advance(task)

    try:
        yield advance
    finally:
        bar.stop()


class _Lines(Progress):
    """Progress where nothing can be redrawn, such as a log."""

    _said = -1.0

    def advance(self, task_id: Any, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._say(task_id)

    def update(self, task_id: Any, **changed: Any) -> None:
        super().update(task_id, **changed)
        self._say(task_id)

    def stop(self) -> None:
        self.live.stop()  # without the empty line that rich prints where nothing is redrawn

    def _say(self, task_id: Any) -> None:
        now = monotonic()
        if self._said < 0:
            self._said = now
        if now - self._said < _PAUSE:
            return
        self._said, task = now, self.tasks[self.task_ids.index(task_id)]
        left = "" if task.time_remaining is None else f", {timedelta(seconds=int(task.time_remaining))} left"
        text = f"{task.description.strip()}: {task.completed:,.0f} of {task.total or 0:,.0f}{left}"
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
