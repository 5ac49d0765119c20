"""Compiling in parallel before the suite begins: what its tests need is run once in many processes, which fill Triton's cache.

A test marked `compile_first` is run as a whole; a module's `WARM` lists further calls. What comes of them is not looked at here: a
failure comes again where it is reported.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import pytest
from gpu_place import PLACE

T, R = TypeVar("T"), TypeVar("R")

#: (module, function, arguments by name): it travels to another process.
Job = tuple[str, str, dict[str, Any]]


def jobs_of(items: list[pytest.Item]) -> list[Job]:
    """What the chosen tests ask for, one job after the other."""
    modules = {item.module.__name__: item.module for item in items if isinstance(item, pytest.Function)}
    jobs = [job for module in modules.values() for job in getattr(module, "WARM", [])]
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("compile_first"):
            params = item.callspec.params if hasattr(item, "callspec") else {}
            jobs.append((item.module.__name__, item.originalname, dict(params)))
    return jobs


def run_job(module: str, function: str, arguments: dict[str, Any]) -> None:
    """In a worker. Skips and failures are the real run's to report."""
    with contextlib.suppress(Exception, pytest.skip.Exception, pytest.fail.Exception):
        getattr(importlib.import_module(module), function)(**arguments)


def compile_in_parallel(jobs: list[Job], processes: int = 0, say: Callable[[str], object] = lambda text: None) -> None:
    """Run all jobs, those last whose kernels others compile under their own name. A worker that dies ends it early.

    say: called with how far it is, as all of them take minutes.
    """
    workers = processes or min(16, len(os.sched_getaffinity(0)))
    jobs = sorted(jobs, key=lambda job: job[2].get("impl") == "auto")
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool, contextlib.suppress(BrokenProcessPool):
        for number, done in enumerate(as_completed([pool.submit(run_job, *job) for job in jobs]), 1):
            done.result()
            if number % 100 == 0:
                say(f"compiled {number} of {len(jobs)}\n")


def in_parallel(work: Callable[[T], R], items: list[T]) -> Iterator[R]:
    """`work` on each item, in as many processes as there are cores; on a CPU (dry) one after the other."""
    if PLACE.dry:
        yield from map(work, items)
        return
    wanted = min(16, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(wanted, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(work, items)
