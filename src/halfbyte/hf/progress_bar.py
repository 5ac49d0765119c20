"""Progress of what quantizes a model, and an estimate of how long the rest takes."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers.utils import logging

T = TypeVar("T")

#: Seconds before a progress bar shows, and between its updates where they do not overwrite each other, such as in a log.
_PATIENCE, _PAUSE = 3.0, 10.0
#: Whether progress bars show although transformers' own are off.
_SHOWN: ContextVar[bool] = ContextVar("_SHOWN", default=False)


@contextmanager
def show_progress() -> Iterator[None]:
    """In this block quantizing shows its progress, also in a process that loads models without transformers' progress bars."""
    before = _SHOWN.set(True)
    try:
        yield
    finally:
        _SHOWN.reset(before)


def progress_bar(parts: Collection[T], action: str, unit: str) -> Iterable[T]:
    """`parts` behind a bar that tells how long the rest takes, unless transformers' progress bars are off."""
    hidden = not (_SHOWN.get() or logging.is_progress_bar_enabled())
    pause = 0.1 if sys.stderr.isatty() else _PAUSE
    bar: Iterable[T] = tqdm(parts, desc=action, unit=f" {unit}", delay=_PATIENCE, mininterval=pause, disable=hidden)
    return bar
