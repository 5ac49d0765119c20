"""`python -m halfbyte_lab decode`: measure every case of `targets.py` on a GPU and hold it against its targets.

Every case is timed in two ways. Alone: calls back to back in a CUDA graph, launches kept apart. Paired: in a graph in which each
call follows the append of one token to the same cache, launches overlapping, less the time of such a graph of appends alone; the
two are sampled in turn, and what is reported is the median of their differences. Caches rotate, and what a pass appends is taken
back before the next one, outside of what is timed. Results are judged before and after: of every call of the graphs that are timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from halfbyte.plans import plan
from halfbyte_lab import precompile
from halfbyte_lab.cases import targets
from halfbyte_lab.cases.chain import ChainTimes, blank, refused_record, time_chain, with_times
from halfbyte_lab.cases.decode_variants import fastest
from halfbyte_lab.cases.targets import Figures, Target, formats_of, judge, targets_of
from halfbyte_lab.measure.caches import DecodeCase, Inputs, Promise, Rotation, fill, given, held_by
from halfbyte_lab.measure.decode import attend, sdpa_variants
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Job, Session
from halfbyte_lab.measure.timing import NOT_CAPTURED, Work, fixed_threads, is_cold
from halfbyte_lab.measure.trials import Trial

#: On a GPU one pass over a rotation reads at least so much, about a millisecond, with no more than `_MOST` copies.
_PASS_BYTES, _MOST = 4 * 10**9, 128


def jobs(impls: Sequence[str], kind: str, quick: bool = False) -> list[Job]:
    """Everything that has a bar; `quick`: a few cases."""
    from halfbyte_lab.cases.append_case import AppendJob
    from halfbyte_lab.cases.overhead import CallJob

    for impl in impls:
        plan("decode_attention", impl, kind)
    attention = [AttentionJob(p, tuple(formats_of(p.name)), tuple(impls)) for p in targets.PROBLEMS]
    # The host's time comes first: CUPTI, which the others ask once they have their samples, may slow launches from then on.
    every: list[Job] = [CallJob(), *attention, AppendJob(targets.APPEND, tuple(formats_of(targets.APPEND.name)))]
    return [job for job in every if not quick or job.name in targets.QUICK_CASES]


# --------------------------------------------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class AttentionJob:
    """One problem: torch's attention in 16 bits, then each format with each implementation."""

    problem: DecodeCase
    formats: tuple[str, ...]
    impls: tuple[str, ...]
    op: str = "decode_attention"

    @property
    def name(self) -> str:
        return self.problem.name

    def to_compile(self, session: Session) -> Iterator[precompile.Pair]:
        """Every format, where memory is laid out as caches allocate it."""
        if self.problem.layout == "heads first" and not self.problem.latent:
            for formats in self.formats:
                if any(session.wants(self.name, formats, f"halfbyte {impl}") for impl in self.impls if impl != "triton"):
                    yield from precompile.attention(session.device, self.problem.shape, formats)

    def measure(self, session: Session) -> Iterator[Record]:
        """The peers' records, then ours; a format that fails is a record too."""
        selection = [(f, impl) for f in self.formats for impl in self.impls if session.wants(self.name, f, f"halfbyte {impl}")]
        if not selection:
            return
        session.free()
        try:
            inputs = Inputs.random(self.problem, session.device.torch)
            peers = measure_baselines(session, inputs) if self.problem.baselines else []
        except Exception as error:
            yield from [refused_record(session, self.problem, f, impl, error) for f, impl in selection]
            return
        yield from peers
        peer = fastest(peers)
        for formats, impl in selection:
            wanted_bars = targets_of(self.name, formats)
            even = None
            if any(bar.quantity == "times_even" for bar in wanted_bars):
                even = _attempt(session, self.problem.evened(), None, formats, impl)
                yield even
            record = _attempt(session, self.problem, inputs, formats, impl)
            yield _judged(record, self.problem, wanted_bars, peer, even)
            session.free()


def _attempt(session: Session, problem: DecodeCase, inputs: Inputs | None, formats: str, impl: str) -> Record:
    """The record of one format, without bars yet; what fails is refused."""
    try:
        return measure_ours(session, inputs or Inputs.random(problem, session.device.torch), formats, impl)
    except Exception as error:
        return refused_record(session, problem, formats, impl, error)


def _judged(record: Record, problem: DecodeCase, wanted: Sequence[Target], peer: Record | None, even: Record | None) -> Record:
    """The record with its bars. Times that are not those of a graph on a GPU are not judged."""
    seconds = None if NOT_CAPTURED in record.method else record.seconds
    figures: Figures = {
        "roof_share": record.roof_share if seconds else None,
        "seconds": seconds,
        "times_16_bit": peer.seconds / seconds if peer and peer.seconds and seconds else None,
        "flops": problem.flop / seconds if seconds else None,
        "times_even": seconds / even.seconds if even and even.seconds and seconds else None,
    }
    beside = {"peer": peer.implementation, "peer_seconds": peer.seconds} if peer else {}
    return replace(record, bars=judge(wanted, figures), **beside)  # type: ignore[arg-type]


def measure_ours(session: Session, inputs: Inputs, formats: str, impl: str) -> Record:
    """The record of halfbyte on one problem in one format, without bars. Raises `BenchmarkRefused` for a wrong result."""
    problem, cache = inputs.problem, fill(inputs, formats)
    nbytes = round(problem.tokens * cache.bytes_per_token)
    rotation = Rotation(cache, inputs, _copies(session, nbytes, cache.nbytes))
    promise = Promise(inputs.q, held_by(cache, problem.latent > 0))
    record = blank(session, problem, formats, f"halfbyte {impl}", nbytes)
    with torch.no_grad(), fixed_threads(session.threads):
        accuracy = promise.judge([attend(inputs.q, c, impl) for c in rotation.caches])
        accuracy.require(f"{problem.name} {formats} {impl}")
        times = time_chain(session, rotation, partial(attend, inputs.q, impl=impl), inputs.last(), promise)
    times.note += "" if is_cold(len(rotation.caches), nbytes, session.device.cache_bytes) else "partly from cache; "
    return with_times(session, record, accuracy, times)


# ------------------------------------------------------------------------------------------------------------------- peers


def measure_baselines(session: Session, inputs: Inputs) -> list[Record]:
    """torch's attention in the dtype of the inputs, in every way there is; those that cannot run or are wrong say so."""
    problem, ((k, v),) = inputs.problem, inputs.spans
    rotation = [(k, v), *((k.clone(), v.clone()) for _ in range(_copies(session, k.nbytes + v.nbytes, k.nbytes + v.nbytes) - 1))]
    promise = Promise(inputs.q, given(inputs))
    trials = {
        name: Trial(f"{problem.name} {name}", Work([partial(attend, inputs.q, *pair) for pair in rotation]), promise.judge)
        for name, attend in sdpa_variants(session.device.kind, inputs.q.shape[1] > k.shape[1]).items()
    }
    outcomes = session.time(trials)
    kernels = session.kernel_seconds({name: trials[name].work for name, outcome in outcomes.items() if outcome.timing})
    records = []
    for name, outcome in outcomes.items():
        record = blank(session, problem, "fp16" if k.dtype == torch.float16 else "bf16", name, k.nbytes + v.nbytes)
        if outcome.timing and outcome.accuracy:
            times = ChainTimes(alone=outcome.timing, kernels=kernels.get(name))
            records.append(with_times(session, record, outcome.accuracy, times))
        else:
            records.append(replace(record, refused=f"{problem.name} {name}: {outcome.refused}"))
    return records


def _copies(session: Session, nbytes: int, allocated: int) -> int:
    """How many copies rotate: beyond the cache, and on a GPU long enough for one pass to be timed, in a quarter of the memory."""
    cold = session.copies(nbytes)
    if session.device.kind != "cuda":
        return cold
    return max(2, min(max(cold, _PASS_BYTES // nbytes), _MOST, session.device.memory_bytes // 4 // allocated))
