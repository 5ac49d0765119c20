"""The kernels' own times: from CUPTI, NVIDIA's tracing library, which torch.profiler (Kineto) reads.

They complement the times of graphs and do not replace them: they exclude the gaps between kernels, which decoding pays for. Trace
after the samples of a case: tracing slows launches, and CUPTI may stay attached.

Single calls are traced, not the graph: whether graphs from before CUPTI was attached are traced depends on the driver, and some
versions crash on them; calls that cannot be captured are traced too; and kernels of one call can be separated from those of the
next. A marker kernel between calls keeps them from overlapping. Where the launches of one call overlap (programmatic dependent
launch), a kernel that starts early counts while it waits for the one before, so that the sum exceeds the time of the call.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from halfbyte_lab.measure.timing import Call, Work, paired_launches

#: Calls of each work that are traced, or as many as its rotation has.
CALLS = 16
#: What `torch.cuda._sleep` launches.
_MARK = "spin_kernel"
#: The profiler may miss what comes while it starts.
_ATTEMPTS = 2


@dataclass(frozen=True)
class Kernel:
    """One kernel that ran on the GPU."""

    name: str
    seconds: float


#: The kernels of each call, in their order.
Calls = Sequence[Sequence[Kernel]]


@functools.cache
def unavailable(device: torch.device) -> str:
    """Why kernels' own times cannot be had on a GPU here, in words; "" where they can. The first answer takes seconds."""
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    if ProfilerActivity.CUDA not in supported_activities():
        return "this torch is built without CUPTI"
    try:
        with torch.cuda.device(device):
            calls = traced({"only marks": Work([lambda: None])})
    except Exception as error:
        return f"torch.profiler fails: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return "" if calls else "CUPTI gives no record of a kernel; another profiler, such as nsys or ncu, may hold it"


def traced(works: Mapping[str, Work]) -> dict[str, Calls]:
    """The kernels of some calls of each work; nothing where CUPTI has lost some.

    Works are traced in one go, since starting and stopping takes longer than they do. Each goes on in its rotation where the one
    before has stopped: over the same buffers it would find them in the cache.
    """
    functions = {name: _chosen(work.fns, turn) for turn, (name, work) in enumerate(works.items())}
    expected = sum(len(fns) + 1 for fns in functions.values())

    def marked() -> None:
        for name, fns in functions.items():
            work = works[name]
            if work.before is not None:
                work.before()
            with paired_launches(work.paired):
                for fn in fns:
                    torch.cuda._sleep(1)
                    fn()
            torch.cuda._sleep(1)

    for _ in range(_ATTEMPTS):
        spans = _between_marks(kernels_of(marked))
        if len(spans) == expected:
            break
    else:
        return {}
    calls: dict[str, Calls] = {}
    for name, fns in functions.items():
        calls[name], spans = spans[: len(fns)], spans[len(fns) + 1 :]  # the one after a work's last call is what it puts back
    return calls


def seconds_of(calls: Calls) -> float | None:
    """The median over calls of the sum of a call's kernels; None where there is no kernel."""
    sums = [sum(kernel.seconds for kernel in kernels) for kernels in calls]
    return statistics.median(sums) if any(sums) else None


def _chosen(fns: Sequence[Call], turn: int) -> list[Call]:
    """So many calls of a rotation, from where the works before have stopped in it."""
    count = min(CALLS, len(fns))
    return [fns[(turn * count + i) % len(fns)] for i in range(count)]


def _between_marks(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The kernels behind each mark up to the next."""
    spans: list[list[Kernel]] = []
    for kernel in kernels:
        if _MARK in kernel.name:
            spans.append([])
        elif spans:
            spans[-1].append(kernel)
    return spans


def names_of(work: Call) -> list[str]:
    """Names of the kernels that `work` launches; the first call in a process may miss some."""
    return [kernel.name for kernel in kernels_of(work)]


def kernels_of(work: Call) -> list[Kernel]:
    """The kernels that `work` launches, by the time at which they started, without copies and fills of memory."""
    return [Kernel(e.name, float(e.time_range.elapsed_us()) / 1e6) for e in _events(work)]


def busy_parts_of(work: Call) -> list[Kernel]:
    """As `kernels_of`, each without the time in which one that started before it still ran: their sum is the time that is busy."""
    parts, busy_until = [], 0.0
    for event in _events(work):
        began, end = float(event.time_range.start), float(event.time_range.end)
        parts.append(Kernel(event.name, max(0.0, end - max(began, busy_until)) / 1e6))
        busy_until = max(busy_until, end)
    return parts


def _events(work: Call) -> list[Any]:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    ran = [e for e in profiler.events() or [] if str(e.device_type).endswith("CUDA") and not e.is_user_annotation]
    ran.sort(key=lambda e: float(e.time_range.start))
    return [e for e in ran if not e.name.startswith(("Memcpy", "Memset"))]
