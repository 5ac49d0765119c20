"""The progress of jobs, which several suites can share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, TypeVar

from rich.console import Console

from halfbyte.terminal import progress


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
