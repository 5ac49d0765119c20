"""How long a call takes.

What is timed is a *rotation*: a list of closures that do the same work on different buffers, more bytes in all than the last cache
holds, because in decoding every weight and every cached token comes from memory.

* CUDA: the rotation is captured in a CUDA graph, so that launches cost what they cost in a captured decode step, and replayed
  between two events, behind a pause on the device that hides the host's part of the launch.
* CPU: own repeats of a block of calls under a fixed number of threads (torch.utils.benchmark cannot interleave candidates).

Candidates are sampled in turn, so that a drift of clocks or a noisy neighbor hits all of them alike.
Reported are the median and the 10th and 90th percentile over samples, in seconds per call.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from halfbyte.device import Device, describe
from halfbyte.errors import check

Call = Callable[[], object]

#: Cycles that the device pauses ahead of a timed replay: 0.3 ms at 2 GHz, longer than the host takes to launch the graph.
_HEAD_START = 600_000
#: How the method of a GPU time begins to say that it is not that of a graph.
NOT_CAPTURED = "not captured"
_MOST_THREADS = 1024


@dataclass(frozen=True)
class Timing:
    """Seconds per call over `repeats` samples; `method` says how they were taken."""

    median: float
    p10: float
    p90: float
    repeats: int
    method: str


@dataclass(frozen=True)
class Work:
    """What one candidate is timed on.

    fns     the rotation
    before  puts back what a pass over the rotation changes; runs ahead of every pass, outside of what is timed, and a timed block
            is then exactly one pass
    paired  whether launches may overlap (programmatic dependent launch) while this runs; None: as the environment says
    """

    fns: Sequence[Call]
    before: Call | None = None
    paired: bool | None = None


@dataclass(frozen=True)
class Effort:
    """How much to measure, for each candidate: at least `repeats` samples, more until `seconds` are spent.

    block_seconds   a sample runs calls for so long, well above the resolution of the clock
    settle_seconds  longest warm-up; it ends earlier once three samples in a row agree within `settle_spread`
    """

    seconds: float = 1.0
    repeats: int = 11
    block_seconds: float = 2e-3
    settle_seconds: float = 1.0
    settle_spread: float = 0.03

    def __post_init__(self) -> None:
        check(self.repeats >= 1, f"repeats={self.repeats}; at least 1 sample is needed")
        check(self.seconds >= 0, f"seconds={self.seconds}; it must not be negative")
        check(self.block_seconds > 0, f"block_seconds={self.block_seconds}; it must be above 0")


QUICK = Effort(seconds=0.15, repeats=5, block_seconds=1e-3, settle_seconds=0.15, settle_spread=0.1)
#: On a GPU: replays of a graph vary by a percent or less, so that few are needed.
GRAPHS = Effort(seconds=0.0, repeats=21, block_seconds=1e-3, settle_seconds=0.1, settle_spread=0.02)

#: The same for many short cases.
MANY_GRAPHS = Effort(seconds=0.0, repeats=11, block_seconds=5e-4, settle_seconds=0.03, settle_spread=0.02)


def copies_beyond_l2(nbytes: int, l2_bytes: int, limit_bytes: int = 2**30, most: int = 512) -> int:
    """How many copies of a working set of `nbytes` to rotate over so that each is cold when its turn comes again.

    Between two uses of a copy the others pass through the cache: (copies - 1) * nbytes >= 2 * l2_bytes, where the factor 2 allows
    for replacement that is not least-recently-used. `limit_bytes` bounds the memory of all copies together and `most` their number
    (a working set of a few kilobytes would need thousands); at least 1. `is_cold` tells whether a bound was met.
    """
    check(nbytes > 0, f"nbytes={nbytes}; a working set has at least one byte")
    check(l2_bytes >= 0, f"l2_bytes={l2_bytes}; it must not be negative")
    count = 1 + math.ceil(2 * l2_bytes / nbytes)
    return max(1, min(count, limit_bytes // nbytes, most))


def rotation_copies(nbytes: int, device: Device) -> int:
    """`copies_beyond_l2` on a device, in at most a sixteenth of its memory (a gigabyte where that is less)."""
    return copies_beyond_l2(nbytes, device.cache_bytes, max(2**30, device.memory_bytes // 16))


def is_cold(copies: int, nbytes: int, l2_bytes: int) -> bool:
    """Whether a rotation of so many copies leaves the cache before it comes round again."""
    return (copies - 1) * nbytes >= 2 * l2_bytes


def measure(
    fns: Sequence[Call], *, device: Device | None = None, threads: int | None = None, effort: Effort | None = None
) -> Timing:
    """Seconds per call of a rotation `fns`; see `measure_interleaved`."""
    return measure_interleaved({"it": fns}, device=device, threads=threads, effort=effort)["it"]


def measure_interleaved(
    candidates: Mapping[str, Sequence[Call]],
    *,
    device: Device | None = None,
    threads: int | None = None,
    effort: Effort | None = None,
) -> dict[str, Timing]:
    """Seconds per call of each candidate, a rotation of closures; their samples are taken in turn.

    `device` is where the closures run (default: the GPU if there is one); `threads` is fixed for the time of the measurement
    (default: what torch uses now).
    """
    effort, device = effort or Effort(), device or describe()
    with fixed_threads(threads or torch.get_num_threads()), torch.no_grad():
        samplers = {name: make_sampler(name, Work(fns), device, effort) for name, fns in candidates.items()}
        samples = sample_in_turn(samplers, effort)
    return {name: summary(samples[name], samplers[name].method) for name in samplers}


class Sampler(Protocol):
    """One candidate, ready to be timed; `method` says how that is done."""

    method: str

    def sample(self) -> float:
        """Run a block of calls; seconds per call."""

    def run(self) -> list[object]:
        """One pass, not timed: what each call of the rotation returned, finished."""


def make_sampler(name: str, work: Work, device: Device, effort: Effort) -> Sampler:
    """A sampler for `work`; on CUDA this compiles, warms up and captures."""
    check(len(work.fns) > 0, f"candidate {name!r} has no function to time")
    return _CudaSampler(work, device, effort) if device.kind == "cuda" else _CpuSampler(work, effort)


def sample_in_turn(samplers: Mapping[str, Sampler], effort: Effort) -> dict[str, list[float]]:
    """Samples of each, as many of one as of another; number i of all of them were taken one after the other."""
    for sampler in samplers.values():
        _settle(sampler, effort)
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    spent = 0.0
    for done in itertools.count(1):
        start = time.perf_counter()
        for name, sampler in samplers.items():
            samples[name].append(sampler.sample())
        spent += time.perf_counter() - start
        if done >= effort.repeats and spent >= effort.seconds * len(samplers):
            break
    return samples


def _settle(sampler: Sampler, effort: Effort) -> None:
    """Warm up until clocks, caches and allocator are steady: three samples in a row within `settle_spread` of each other."""
    end = time.perf_counter() + effort.settle_seconds
    recent = [sampler.sample()]
    while time.perf_counter() < end:
        recent = [*recent[-2:], sampler.sample()]
        if len(recent) == 3 and max(recent) <= min(recent) * (1 + effort.settle_spread):
            return


def summary(samples: Sequence[float], method: str) -> Timing:
    """Median and percentiles of samples."""

    def at(share: float) -> float:
        ascending = sorted(samples)
        return ascending[min(len(ascending) - 1, round(share * (len(ascending) - 1)))]

    return Timing(statistics.median(samples), at(0.1), at(0.9), len(samples), method)


def check_threads(threads: int) -> None:
    """Refuse numbers of threads that no machine has: torch starts as many as it is given, until the process dies."""
    check(1 <= threads <= _MOST_THREADS, f"threads={threads}; expected 1 to {_MOST_THREADS}")


@contextlib.contextmanager
def fixed_threads(threads: int) -> Iterator[None]:
    """torch uses so many CPU threads inside the block."""
    check_threads(threads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def paired_launches(paired: bool | None) -> Iterator[None]:
    """HALFBYTE_PDL is set to "1" or "0" inside the block; None leaves it alone."""
    before = os.environ.get("HALFBYTE_PDL")
    if paired is not None:
        os.environ["HALFBYTE_PDL"] = str(int(paired))
    try:
        yield
    finally:
        os.environ.pop("HALFBYTE_PDL", None)
        if before is not None:
            os.environ["HALFBYTE_PDL"] = before


def _nothing() -> None:
    """What is put back when a pass changes nothing."""


class _CpuSampler:
    """Wall-clock time of a block of calls; blocks go round the rotation, or are one pass where something must be put back first."""

    def __init__(self, work: Work, effort: Effort) -> None:
        self._fns, self._before, self._paired = list(work.fns), work.before or _nothing, work.paired
        self.run()
        self._next = itertools.cycle(self._fns)
        self._calls = len(self._fns) if work.before else 1
        if not work.before:
            self._calls = max(1, math.ceil(effort.block_seconds / max(self.sample(), 1e-9)))
        self.method = f"cpu wall clock, {torch.get_num_threads()} threads, {len(self._fns)} buffers, {self._calls} calls a sample"

    def sample(self) -> float:
        self._before()
        with paired_launches(self._paired):
            start = time.perf_counter()
            for _ in range(self._calls):
                next(self._next)()
            return (time.perf_counter() - start) / self._calls

    def run(self) -> list[object]:
        self._before()
        with paired_launches(self._paired):
            return [fn() for fn in self._fns]


class _CudaSampler:
    """Replays of a CUDA graph of whole rotations, timed by events on the device.

    Code that waits for the GPU cannot be captured; it is called eagerly between the events, and `method` says so and why.
    """

    def __init__(self, work: Work, device: Device, effort: Effort) -> None:
        self._device, self._before, self._paired = device.torch, work.before or _nothing, work.paired
        self._fns = work.fns  # a graph does not keep alive what its kernels read
        with torch.cuda.device(self._device), paired_launches(self._paired):
            once = self._warm_up(work.fns)
            rounds = 1 if work.before else max(1, math.ceil(effort.block_seconds / max(once, 1e-7)))
            self._calls = rounds * len(work.fns)
            how = f"{self._calls} calls over {len(work.fns)} buffers, events"
            # Only the last round's results are kept, so that the memory of the others is used again.
            self._results: list[object] = []

            def block() -> None:
                for _ in range(rounds):
                    self._results = [fn() for fn in work.fns]

            self._block: Call = block
            try:
                self._block = _captured(block)
                self.method = f"cuda graph of {how}"
            except Exception as error:
                torch.cuda.synchronize()
                self.method = f"cuda, {NOT_CAPTURED} ({str(error).splitlines()[0]}), {how}"

    def _warm_up(self, fns: Sequence[Call]) -> float:
        """Compile and allocate outside the capture, on a side stream as capture asks; seconds of one warm rotation."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._before()
                for fn in fns:
                    fn()
            seconds = _between_events(lambda: [fn() for fn in fns], self._before)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        return seconds

    def sample(self) -> float:
        with torch.cuda.device(self._device), paired_launches(self._paired):
            return _between_events(self._block, self._before) / self._calls

    def run(self) -> list[object]:
        with torch.cuda.device(self._device), paired_launches(self._paired):
            self._before()
            self._block()
            torch.cuda.synchronize()
        return self._results


def _captured(work: Call) -> Call:
    """`work` as the replay of a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may ask the GPU something meanwhile, as NCCL's does.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph.replay


def _between_events(work: Call, before: Call) -> float:
    """Seconds that `work` takes on the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before()
    torch.cuda._sleep(_HEAD_START)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
