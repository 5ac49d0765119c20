"""What eager calls cost the host, beside Triton's own cached launch of a kernel with 30 arguments."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from halfbyte.cache import KVCache
from halfbyte.errors import Unsupported
from halfbyte.nn import QuantLinear
from halfbyte_lab.cases.targets import CALL, judge, targets_of
from halfbyte_lab.measure.caches import DecodeCase, Inputs, fill
from halfbyte_lab.measure.decode import DecodeShape, attend
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Session, reason
from halfbyte_lab.measure.timing import Call, Timing, fixed_threads, summary

#: Calls in a row without waiting for the device, fewer than its queue of launches holds, and samples of so many.
_CALLS, _SAMPLES = 200, 21
#: Tensors so small that the device is always done before the host.
_PROBLEM, _FEATURES = DecodeCase(CALL, DecodeShape(1, 8, 1, 128, 64)), 256


@dataclass(frozen=True)
class _Called:
    """An eager call: its case, format and shape, and what makes it ready on a device."""

    case: str
    formats: str
    shape: dict[str, int]
    ready: Callable[[torch.device], Call]


@dataclass(frozen=True)
class CallJob:
    """Host time of attention, of an append and of a linear layer, as a model without CUDA graphs pays it at each layer."""

    op: str = "call"
    name: str = CALL

    def measure(self, session: Session) -> Iterator[Record]:
        """One record for each call."""
        selection = [c for c in _CALLED if session.wants(c.case, c.formats, "halfbyte auto")]
        try:
            yield from self._measure(session, selection) if selection else ()
        except Exception as error:
            for call in selection:
                yield replace(_blank(session, call), refused=f"{call.case}: {reason(error)}")

    def _measure(self, session: Session, wanted: Sequence[_Called]) -> Iterator[Record]:
        device = session.device.torch
        if device.type != "cuda":
            raise Unsupported("the host time of a call is held against Triton's launch, which needs a GPU; this is a CPU")
        with torch.no_grad(), fixed_threads(session.threads):
            candidates = {"launch": bare_launch(device), **{call.case: call.ready(device) for call in wanted}}
            times = host_seconds(candidates, partial(torch.cuda.synchronize, device))
        for call in wanted:
            yield _record(session, call, times[call.case], times["launch"].median)


def _attention(device: torch.device) -> Call:
    inputs = Inputs.random(_PROBLEM, device)
    return partial(attend, inputs.q, fill(inputs, "int8"), "auto")


def _append(device: torch.device) -> Call:
    """One token more each time, with room for all that is measured."""
    cache = KVCache(1, 1, 128, (_SAMPLES + 1) * _CALLS, keys="int8", values="int8", device=device)
    token = torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16, device=device)
    return partial(cache.append, token, token)


def _layer(device: torch.device) -> Call:
    """As a module, which is what models call."""
    dense = torch.nn.Linear(_FEATURES, _FEATURES, bias=False, dtype=torch.bfloat16, device=device)
    x = torch.zeros(1, 1, _FEATURES, dtype=torch.bfloat16, device=device)
    return partial(QuantLinear.from_linear(dense, "int4_sym_g128"), x)


_CALLED = (
    _Called(CALL, "int8", _PROBLEM.shape.sizes, _attention),
    _Called("host time of an append", "int8", {"B": 1, "H": 1, "D": 128, "L": 1}, _append),
    _Called("host time of a linear layer", "int4_sym_g128", {"M": 1, "N": _FEATURES, "K": _FEATURES}, _layer),
)


def _blank(session: Session, called: _Called) -> Record:
    where, bars = session.environment, judge(targets_of(called.case, called.formats), {})
    return Record("call", called.shape, called.formats, "halfbyte auto", 0, where, case=called.case, bars=bars)


def _record(session: Session, called: _Called, call: Timing, launch: float) -> Record:
    return replace(
        _blank(session, called),
        seconds=call.median,
        p10=call.p10,
        p90=call.p90,
        repeats=call.repeats,
        method=call.method,
        alone=call.median,
        peer="triton launch",
        peer_seconds=launch,
        bars=judge(targets_of(called.case, called.formats), {"over_launch": call.median - launch}),
        note=f"Triton's own launch of a kernel with 30 arguments takes {1e6 * launch:.1f} us",
    )


def bare_launch(device: torch.device) -> Call:
    """Triton's cached launch of a kernel that does nothing, with as many arguments as attention has."""
    from halfbyte_lab.measure import roofline_kernels

    tensors = [torch.zeros(64, dtype=torch.int32, device=device) for _ in range(10)]
    return partial(roofline_kernels.launch, tensors, list(range(2, 22)))


def host_seconds(candidates: Mapping[str, Call], wait: Call) -> dict[str, Timing]:
    """Seconds of the host for one call of each, sampled in turn; `wait` empties the device's queue before each sample."""
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(_SAMPLES + 1):
        for name, call in candidates.items():
            wait()
            start = time.perf_counter()
            for _ in range(_CALLS):
                call()
            samples[name].append((time.perf_counter() - start) / _CALLS)
    # The first sample of each compiles and fills caches.
    return {name: summary(seconds[1:], f"host wall clock, {_CALLS} calls in a row") for name, seconds in samples.items()}
