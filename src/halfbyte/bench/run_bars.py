"""`halfbyte bench decode --bars`: measure every case of `bars.py` on a GPU and hold it against its bars.

Every case is timed in two ways. Alone: calls back to back in a CUDA graph, launches kept apart. Paired: in a graph in which each
call follows the append of one token to the same cache, launches overlapping, less the time of such a graph of appends alone; the
two are sampled in turn, and what is reported is the median of their differences. Caches rotate, and what a pass appends is taken
back before the next one, outside of what is timed. Results are judged before and after: of every call of the graphs that are timed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch

from halfbyte.bench import bars, foreseen
from halfbyte.bench.bars import Bar, Figures, Problem, bars_of, formats_of, judge
from halfbyte.bench.caches import Inputs, Promise, Rotation, fill, given, held_by
from halfbyte.bench.checks import Accuracy
from halfbyte.bench.compile_ahead import Pair
from halfbyte.bench.decode import attend, sdpa_variants
from halfbyte.bench.records import Record
from halfbyte.bench.session import Job, Session, reason
from halfbyte.bench.timing import (
    NOT_CAPTURED,
    Sampler,
    Timing,
    Work,
    fixed_threads,
    is_cold,
    make_sampler,
    sample_in_turn,
    summary,
)
from halfbyte.cache import KVCache
from halfbyte.plans import plan

#: On a GPU one pass over a rotation reads at least so much, about a millisecond, with no more than `_MOST` copies.
_PASS_BYTES, _MOST = 4 * 10**9, 128


def jobs(impls: Sequence[str], kind: str, quick: bool = False) -> list[Job]:
    """Everything that has a bar; `quick`: a few cases."""
    from halfbyte.bench.overhead import CallJob
    from halfbyte.bench.run_append import AppendJob

    for impl in impls:
        plan("decode_attention", impl, kind)
    attention = [AttentionJob(p, tuple(formats_of(p.name)), tuple(impls)) for p in bars.PROBLEMS]
    # The host's time comes first: CUPTI, which the others ask once they have their samples, may slow launches from then on.
    every: list[Job] = [CallJob(), *attention, AppendJob(bars.APPEND, tuple(formats_of(bars.APPEND.name)))]
    return [job for job in every if not quick or job.name in bars.QUICK_CASES]


# --------------------------------------------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class AttentionJob:
    """One problem: torch's attention in 16 bits, then each format with each implementation."""

    problem: Problem
    formats: tuple[str, ...]
    impls: tuple[str, ...]
    op: str = "decode_attention"

    @property
    def name(self) -> str:
        return self.problem.name

    def foreseen(self, session: Session) -> Iterator[Pair]:
        """Every format, where memory is laid out as caches allocate it."""
        if self.problem.layout == "heads first":
            for formats in self.formats:
                if any(session.wants(self.name, formats, f"halfbyte {impl}") for impl in self.impls if impl != "triton"):
                    yield from foreseen.attention(session.device, self.problem.shape, formats)

    def measure(self, session: Session) -> Iterator[Record]:
        """The peers' records, then ours; a format that fails is a record too."""
        wanted = [(f, impl) for f in self.formats for impl in self.impls if session.wants(self.name, f, f"halfbyte {impl}")]
        if not wanted:
            return
        free(session)
        try:
            inputs = Inputs.random(self.problem, session.device.torch)
            peers = measure_peers(session, inputs) if self.problem.peers else []
        except Exception as error:
            yield from [refused_record(session, self.problem, f, impl, error) for f, impl in wanted]
            return
        yield from peers
        timed = [r for r in peers if r.seconds and NOT_CAPTURED not in r.method]
        peer = min(timed, key=lambda r: r.seconds or 0.0) if timed else None
        for formats, impl in wanted:
            wanted_bars = bars_of(self.name, formats)
            even = None
            if any(bar.quantity == "times_even" for bar in wanted_bars):
                even = _attempt(session, self.problem.evened(), None, formats, impl)
                yield even
            record = _attempt(session, self.problem, inputs, formats, impl)
            yield _judged(record, wanted_bars, peer, even)
            free(session)


def _attempt(session: Session, problem: Problem, inputs: Inputs | None, formats: str, impl: str) -> Record:
    """The record of one format, without bars yet; what fails is refused."""
    try:
        return measure_ours(session, inputs or Inputs.random(problem, session.device.torch), formats, impl)
    except Exception as error:
        return refused_record(session, problem, formats, impl, error)


def _judged(record: Record, wanted: Sequence[Bar], peer: Record | None, even: Record | None) -> Record:
    """The record with its bars. Times that are not those of a graph on a GPU are not judged."""
    seconds = None if NOT_CAPTURED in record.method else record.seconds
    figures: Figures = {
        "roof_share": record.roof_share if seconds else None,
        "seconds": seconds,
        "times_16_bit": peer.seconds / seconds if peer and peer.seconds and seconds else None,
        "times_even": seconds / even.seconds if even and even.seconds and seconds else None,
    }
    beside = {"peer": peer.implementation, "peer_seconds": peer.seconds} if peer else {}
    return replace(record, bars=judge(wanted, figures), **beside)  # type: ignore[arg-type]


def refused_record(session: Session, problem: Problem, formats: str, impl: str, error: Exception) -> Record:
    """Ours on one problem, without a time and with all its bars unmet."""
    record = blank(session, problem, formats, f"halfbyte {impl}", 0)
    why = f"{problem.name} {formats} {impl}: {reason(error)}"
    return replace(record, refused=why, bars=judge(bars_of(problem.name, formats), {}))


def blank(session: Session, problem: Problem, formats: str, implementation: str, nbytes: int) -> Record:
    """A record that knows its case and nothing else."""
    shape, where = problem.shape.sizes, session.environment
    return Record("decode_attention", shape, formats, implementation, nbytes, where, case=problem.name)


def measure_ours(session: Session, inputs: Inputs, formats: str, impl: str) -> Record:
    """The record of halfbyte on one problem in one format, without bars. Raises `BenchmarkRefused` for a wrong result."""
    problem, cache = inputs.problem, fill(inputs, formats)
    nbytes = round(problem.tokens * cache.bytes_per_token)
    rotation = Rotation(cache, inputs, _copies(session, nbytes, cache.nbytes))
    promise = Promise(inputs.q, held_by(cache))
    record = blank(session, problem, formats, f"halfbyte {impl}", nbytes)
    with torch.no_grad(), fixed_threads(session.threads):
        accuracy = promise.judge([attend(inputs.q, c, impl) for c in rotation.caches])
        accuracy.require(f"{problem.name} {formats} {impl}")
        times = time_chain(session, rotation, partial(attend, inputs.q, impl=impl), inputs.last(), promise)
    times.note += "" if is_cold(len(rotation.caches), nbytes, session.device.cache_bytes) else "partly from cache; "
    return with_times(session, record, accuracy, times)


def with_times(session: Session, record: Record, accuracy: Accuracy, times: ChainTimes) -> Record:
    """The record with its times, and with the roof at as many bytes; without a time it is refused."""
    judged = times.paired or times.alone
    if judged is None:
        return replace(record, refused=f"{record.case} {record.formats}: {times.note}")
    rate, roof = record.nbytes / judged.median / 1e9, session.roof.read(record.nbytes).gb_per_s
    return replace(
        with_timing(record, judged, accuracy),
        alone=times.alone.median if times.alone else None,
        chained=times.chained.median if times.chained else None,
        paired=times.paired.median if times.paired else None,
        appends=times.appends.median if times.appends else None,
        kernel_seconds=times.kernels,
        gb_per_s=rate,
        roof_gb_per_s=roof,
        roof_share=rate / roof,
        note=times.note.removesuffix("; "),
    )


def with_timing(record: Record, timing: Timing, accuracy: Accuracy) -> Record:
    """The record with the time that is judged and the error."""
    return replace(
        record,
        seconds=timing.median,
        p10=timing.p10,
        p90=timing.p90,
        repeats=timing.repeats,
        method=timing.method,
        error=accuracy.error,
        error_allowed=accuracy.allowed,
        error_kind=accuracy.kind,
    )


# --------------------------------------------------------------------------------------------------------------- the chain


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
    found = {name: summary(samples[name], sampler.method) for name, sampler in samplers.items()}
    times.alone, times.chained, times.appends = found.get("alone"), found.get("chained"), found.get("appends")
    if "chain" in found and "appends" in found:
        times.paired = subtract(samples["chain"], samples["appends"], found["chain"].method)
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


# ------------------------------------------------------------------------------------------------------------------- peers


def measure_peers(session: Session, inputs: Inputs) -> list[Record]:
    """torch's attention in bf16, in every way there is; those that cannot run or are wrong say so."""
    problem, ((k, v),) = inputs.problem, inputs.spans
    rotation = [(k, v), *((k.clone(), v.clone()) for _ in range(_copies(session, k.nbytes + v.nbytes, k.nbytes + v.nbytes) - 1))]
    promise = Promise(inputs.q, given(inputs))
    works: dict[str, Work] = {}
    samplers: dict[str, Sampler] = {}
    records: dict[str, Record] = {}
    with torch.no_grad(), fixed_threads(session.threads):
        for name, way in sdpa_variants(session.device.kind, inputs.q.shape[1] > k.shape[1]).items():
            record = blank(session, problem, "bf16", name, k.nbytes + v.nbytes)
            try:
                accuracy = promise.judge([way(inputs.q, *pair) for pair in rotation])
                accuracy.require(f"{problem.name} {name}")
                work = Work([partial(way, inputs.q, *pair) for pair in rotation])
                samplers[name], works[name] = make_sampler(name, work, session.device, session.effort), work
                records[name] = replace(record, error=accuracy.error, error_allowed=accuracy.allowed, error_kind=accuracy.kind)
            except Exception as error:
                records[name] = replace(record, refused=f"{problem.name} {name}: {reason(error)}")
        samples = sample_in_turn(samplers, session.effort) if samplers else {}
        kernels = session.kernel_seconds(works)
    for name, taken in samples.items():
        known = records[name]
        accuracy = Accuracy(known.error or 0.0, known.error_allowed or 0.0, known.error_kind)
        times = ChainTimes(alone=summary(taken, samplers[name].method), kernels=kernels.get(name))
        records[name] = with_times(session, known, accuracy, times)
    return list(records.values())


def _copies(session: Session, nbytes: int, allocated: int) -> int:
    """How many copies rotate: beyond the cache, and on a GPU long enough for one pass to be timed, in a quarter of the memory."""
    cold = session.copies(nbytes)
    if session.device.kind != "cuda":
        return cold
    return max(2, min(max(cold, _PASS_BYTES // nbytes), _MOST, session.device.memory_bytes // 4 // allocated))


def free(session: Session) -> None:
    """Give back the memory of graphs and caches that are done with. Raises where a kernel has broken the GPU's context."""
    gc.collect()
    if session.device.kind == "cuda":
        torch.cuda.synchronize(session.device.torch)
        torch.cuda.empty_cache()
