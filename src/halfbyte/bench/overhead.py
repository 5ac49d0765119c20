"""`halfbyte bench overhead`: what one eager call costs the host, beside Triton's own cached launch with as many arguments."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from halfbyte.bench.bars import CALL, Problem, bars_of, formats_of, judge
from halfbyte.bench.caches import Inputs, fill
from halfbyte.bench.decode import DecodeShape, attend
from halfbyte.bench.records import Record
from halfbyte.bench.run_bars import blank
from halfbyte.bench.session import Session, reason
from halfbyte.bench.timing import Call, Timing, fixed_threads, summary
from halfbyte.errors import Unsupported

#: Calls in a row without waiting for the device, fewer than its queue of launches holds, and samples of so many.
_CALLS, _SAMPLES = 200, 21
#: A cache so small that the device is always done before the host.
_PROBLEM = Problem(CALL, DecodeShape(1, 8, 1, 128, 64))


@dataclass(frozen=True)
class CallJob:
    """Host time of `decode_attention`, as a model without CUDA graphs pays it at each layer."""

    op: str = "call"
    name: str = CALL

    def measure(self, session: Session) -> Iterator[Record]:
        """One record for each format that has a bar."""
        for formats in formats_of(self.name):
            if session.wants(self.name, formats, "halfbyte auto"):
                try:
                    yield self._measure(session, formats)
                except Exception as error:
                    record = blank(session, _PROBLEM, formats, "halfbyte auto", 0)
                    yield replace(record, op=self.op, refused=f"{CALL}: {reason(error)}", bars=judge(bars_of(CALL, formats), {}))

    def _measure(self, session: Session, formats: str) -> Record:
        device = session.device.torch
        if device.type != "cuda":
            raise Unsupported("the host time of a call is held against Triton's launch, which needs a GPU; this is a CPU")
        inputs = Inputs.random(_PROBLEM, device)
        cache = fill(inputs, formats)
        contenders: dict[str, Call] = {"call": partial(attend, inputs.q, cache, "auto"), "launch": bare_launch(device)}
        with torch.no_grad(), fixed_threads(session.threads):
            times = host_seconds(contenders, partial(torch.cuda.synchronize, device))
        return _record(session, formats, times)


def _record(session: Session, formats: str, times: Mapping[str, Timing]) -> Record:
    call, launch = times["call"], times["launch"].median
    return replace(
        blank(session, _PROBLEM, formats, "halfbyte auto", 0),
        op="call",
        seconds=call.median,
        p10=call.p10,
        p90=call.p90,
        repeats=call.repeats,
        method=call.method,
        alone=call.median,
        peer="triton launch",
        peer_seconds=launch,
        bars=judge(bars_of(CALL, formats), {"over_launch": call.median - launch}),
        note=f"Triton's own launch of a kernel with 30 arguments takes {1e6 * launch:.1f} us",
    )


def bare_launch(device: torch.device) -> Call:
    """Triton's cached launch of a kernel that does nothing, with as many arguments as attention has."""
    from halfbyte.bench import triton_kernels

    tensors = [torch.zeros(64, dtype=torch.int32, device=device) for _ in range(10)]
    return partial(triton_kernels.launch, tensors, list(range(2, 22)))


def host_seconds(contenders: Mapping[str, Call], wait: Call) -> dict[str, Timing]:
    """Seconds of the host for one call of each, sampled in turn; `wait` empties the device's queue before each sample."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(_SAMPLES + 1):
        for name, call in contenders.items():
            wait()
            start = time.perf_counter()
            for _ in range(_CALLS):
                call()
            samples[name].append((time.perf_counter() - start) / _CALLS)
    # The first sample of each compiles and fills caches.
    return {name: summary(taken[1:], f"host wall clock, {_CALLS} calls in a row") for name, taken in samples.items()}
