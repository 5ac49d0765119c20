"""Several ways to attend over the same cache, judged, then timed in turn: what studies of decode attention are made of.

Times are alone, launches kept apart, unless a way says that its launches overlap. Nothing is appended between calls. Results are
judged before and after: those of every call of the graphs that are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch

from benchmarks.chain import ChainTimes, with_times
from halfbyte.cache import KVCache
from halfbyte.measure.caches import Inputs, Promise, Rotation, fill, held_by
from halfbyte.measure.checks import Accuracy
from halfbyte.measure.records import Record, with_timing
from halfbyte.measure.session import Session, reason
from halfbyte.measure.timing import (
    NOT_CAPTURED,
    Sampler,
    Timing,
    Work,
    fixed_threads,
    is_cold,
    make_sampler,
    paired_launches,
    sample_in_turn,
    summary,
)
from halfbyte.ops.by_plan import prepare

#: Judges several results [B, Hq, 1, D] of one case.
Judge = Callable[[Sequence[torch.Tensor]], Accuracy]
#: So many times the last cache leave next to nothing of themselves in it, so that one copy is a rotation.
_LARGE = 32


@dataclass(frozen=True)
class DecodeVariant:
    """One way to attend.

    call    gives [B, Hq, 1, D] for a full cache
    paired  whether launches may overlap while this runs
    sizes   what the record's shape says besides the problem's: programs, say
    """

    call: Callable[[KVCache], torch.Tensor]
    paired: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)


def measure_variants(
    session: Session, op: str, inputs: Inputs, formats: str, ways: Callable[[KVCache], Mapping[str, DecodeVariant]]
) -> list[Record]:
    """A record for each of the `ways` of a cache in `formats` that holds the inputs; one that fails or is wrong says why."""
    problem = inputs.problem
    session.free()
    cache = fill(inputs, formats)
    nbytes = round(problem.tokens * cache.bytes_per_token)
    copies = max(2, session.copies(nbytes) if session.device.kind == "cuda" else 0)  # on a CPU studies run small, and say so
    caches = Rotation(cache, inputs, copies).caches
    blank = Record(op, problem.shape.sizes, formats, "", nbytes, session.environment, case=problem.name)
    return time_variants(session, blank, caches, Promise(inputs.q, held_by(cache)).judge, ways(cache))


def time_variants(
    session: Session, blank: Record, caches: Sequence[KVCache], judge: Judge, ways: Mapping[str, DecodeVariant], roof: bool = True
) -> list[Record]:
    """The same over a rotation of caches. `blank` is what the records share; without `roof` they do not know the read roof."""
    cold = is_cold(len(caches), blank.nbytes, session.device.cache_bytes) or blank.nbytes >= _LARGE * session.device.cache_bytes
    records: dict[str, Record] = {}
    works: dict[str, Work] = {}
    samplers: dict[str, Sampler] = {}
    if session.device.kind == "cuda":
        prepare(session.device.torch)  # counters for all graphs: one that must clear its own takes longer
    with torch.no_grad(), fixed_threads(session.threads):
        for name, way in ways.items():
            records[name] = replace(blank, shape={**blank.shape, **way.sizes}, implementation=name)
            try:
                with paired_launches(way.paired):
                    judge([way.call(c) for c in caches]).require(name)
                work = Work([partial(way.call, c) for c in caches], paired=way.paired)
                samplers[name], works[name] = make_sampler(name, work, session.device, session.effort), work
            except Exception as error:
                records[name] = _refused(records[name], error)
        samples = sample_in_turn(samplers, session.effort) if samplers else {}
        for name, sampler in samplers.items():
            timing = summary(samples[name], sampler.method + ("" if cold else ", partly from cache"))
            try:
                accuracy = judge(cast(Sequence[torch.Tensor], sampler.run()))
                accuracy.require(f"{name}, as timed")
                records[name] = _told(session, records[name], ways[name], accuracy, timing, roof)
            except Exception as error:
                records[name] = _refused(records[name], error)
        for name, seconds in session.kernel_seconds({n: work for n, work in works.items() if records[n].seconds}).items():
            records[name] = replace(records[name], kernel_seconds=seconds)
    return list(records.values())


def _told(session: Session, record: Record, way: DecodeVariant, accuracy: Accuracy, timing: Timing, roof: bool) -> Record:
    """The record with its time."""
    if roof:
        told = with_times(session, record, accuracy, ChainTimes(alone=timing))
    else:
        told = replace(with_timing(record, timing, accuracy), alone=timing.median, gb_per_s=record.nbytes / timing.median / 1e9)
    return replace(told, alone=None, chained=timing.median) if way.paired else told


def _refused(record: Record, error: Exception) -> Record:
    return replace(record, refused=f"{record.case} {record.formats} {record.implementation}: {reason(error)}")


def fastest(measured: Sequence[Record]) -> Record | None:
    """The record with the shortest time; on a GPU only times of graphs count."""
    return min((r for r in measured if r.seconds and NOT_CAPTURED not in r.method), key=lambda r: r.seconds or 0.0, default=None)
