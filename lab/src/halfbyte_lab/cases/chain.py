"""Times of a call alone and behind the append of a token, and the records that hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch

from halfbyte.cache import KVCache
from halfbyte_lab.cases.targets import judge, targets_of
from halfbyte_lab.measure.caches import DecodeCase, Promise, Rotation
from halfbyte_lab.measure.checks import Accuracy
from halfbyte_lab.measure.records import Record, with_timing
from halfbyte_lab.measure.session import Session, reason
from halfbyte_lab.measure.timing import NOT_CAPTURED, Sampler, Timing, Work, make_sampler, sample_in_turn, summary


def blank(session: Session, problem: DecodeCase, formats: str, implementation: str, nbytes: int) -> Record:
    """A record that knows its case and nothing else."""
    shape, where = problem.shape.sizes, session.environment
    return Record("decode_attention", shape, formats, implementation, nbytes, where, case=problem.name)


def refused_record(session: Session, problem: DecodeCase, formats: str, impl: str, error: Exception) -> Record:
    """Ours on one problem, without a time and with all its bars unmet."""
    record = blank(session, problem, formats, f"halfbyte {impl}", 0)
    why = f"{problem.name} {formats} {impl}: {reason(error)}"
    return replace(record, refused=why, bars=judge(targets_of(problem.name, formats), {}))


def with_times(session: Session, record: Record, accuracy: Accuracy, times: ChainTimes) -> Record:
    """The record with its times, and with the roof at as many bytes; without a time it is refused."""
    timing = times.paired or times.alone
    if timing is None:
        return replace(record, refused=f"{record.case} {record.formats}: {times.note}")
    return replace(
        session.against_roofline(with_timing(record, timing, accuracy)),
        alone=times.alone.median if times.alone else None,
        chained=times.chained.median if times.chained else None,
        paired=times.paired.median if times.paired else None,
        appends=times.appends.median if times.appends else None,
        kernel_seconds=times.kernels,
        note=times.note.removesuffix("; "),
    )


@dataclass
class ChainTimes:
    """Times of one call: see `Record`; `kernels`: those of a call alone. What could not be measured is None, `note` says why."""

    alone: Timing | None = None
    chained: Timing | None = None
    paired: Timing | None = None
    appends: Timing | None = None
    kernels: float | None = None
    note: str = ""


def time_chain(
    session: Session,
    rotation: Rotation,
    call: Callable[[KVCache], torch.Tensor],
    token: tuple[torch.Tensor, torch.Tensor],
    promise: Promise,
) -> ChainTimes:
    """Time `call` on the caches of a rotation, alone and behind appends of `token`, whose results must be right throughout."""

    def append(cache: KVCache) -> None:
        cache.append(*token)

    def both(cache: KVCache) -> torch.Tensor:
        cache.append(*token)
        return call(cache)

    def each(do: Callable[[KVCache], object]) -> list[Callable[[], object]]:
        return [partial(do, cache) for cache in rotation.caches]

    works = {
        "alone": Work(each(call), rotation.restore_full, paired=False),
        "chained": Work(each(call), rotation.restore_full, paired=True),
        "appends": Work(each(append), rotation.restore_short, paired=True),
        "chain": Work(each(both), rotation.restore_short, paired=True),
    }
    times = ChainTimes()
    samplers = _prepared(session, works, times)
    _drop_wrong(samplers, rotation, promise, times)
    samples = sample_in_turn(samplers, session.effort) if samplers else {}
    _drop_wrong(samplers, rotation, promise, times)
    timings = {name: summary(samples[name], sampler.method) for name, sampler in samplers.items()}
    times.alone, times.chained, times.appends = timings.get("alone"), timings.get("chained"), timings.get("appends")
    if "chain" in timings and "appends" in timings:
        times.paired = subtract(samples["chain"], samples["appends"], timings["chain"].method)
    times.kernels = session.kernel_seconds({"alone": works["alone"]} if times.alone else {}).get("alone")
    return times


def subtract(chain: Sequence[float], appends: Sequence[float], method: str) -> Timing:
    """The calls' share of a chain: sample by sample, since number i of both were taken one after the other."""
    rest = [whole - part for whole, part in zip(chain, appends, strict=True)]
    return summary(rest, f"{method}, of append and attention, less appends alone")


def _prepared(session: Session, works: dict[str, Work], times: ChainTimes) -> dict[str, Sampler]:
    """Samplers of the works that run; only `alone` may be timed without a graph."""
    ready: dict[str, Sampler] = {}
    for name, work in works.items():
        try:
            sampler = make_sampler(name, work, session.device, session.effort)
        except Exception as error:
            times.note += f"{name}: {reason(error)}; "
            continue
        if name == "alone" or NOT_CAPTURED not in sampler.method:
            ready[name] = sampler
        else:
            times.note += f"{name}: {sampler.method}; "
    return ready


def _drop_wrong(samplers: dict[str, Sampler], rotation: Rotation, promise: Promise, times: ChainTimes) -> None:
    """Run each once, the chain over decoys; what gives a wrong result gets no time."""
    for name in [name for name in samplers if name != "appends"]:
        if name == "chain":
            rotation.plant_decoys()
        accuracy = promise.judge(cast(list[torch.Tensor], samplers[name].run()))
        if not accuracy.ok:
            del samplers[name]
            times.note += f"{name}: {accuracy.kind} error {accuracy.error:.3g} exceeds the allowed {accuracy.allowed:.3g}; "
