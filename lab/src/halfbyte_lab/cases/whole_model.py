"""A decode step of all of Llama 2 70B on tensor-parallel ranks: its 80 layers, all-reduces and output head in one CUDA graph.

Each rank is a process with a GPU of its own, weights and caches of all layers, and a part of the output head, whose logits stay
there. Behind o and down the ranks' partial results are summed inside of the graph: by the launch of `add_norm` where that has room
for the batch, else by NCCL; a record says by which. The INT4 cache in groups of 32 is measured with NCCL, too. A sample is the time
of the slowest rank, by events on each GPU: ahead of it a pause and a sum over the ranks let all start together. Ways are measured
one after the other, as their caches seldom fit together. On a CPU two ranks share a small model, and gloo sums.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from halfbyte.device import Device
from halfbyte.ops.all_reduce import AllReduce, of_all
from halfbyte_lab import precompile
from halfbyte_lab.cases.rank import LLAMA_2_70B, NOT_HELD, PLAIN, Entry, Made, Model, Rank, Step, StepCase, entries, first_of_ranks
from halfbyte_lab.measure.caches import Promise, Rotation, held_by, sequences
from halfbyte_lab.measure.checks import Accuracy, BenchmarkRefused
from halfbyte_lab.measure.environment import Environment
from halfbyte_lab.measure.records import Record, with_timing
from halfbyte_lab.measure.session import Job, Options, Session, reason
from halfbyte_lab.measure.timing import MANY_GRAPHS, NOT_CAPTURED, Sampler, Work, make_sampler, summary

T = TypeVar("T")
OP = "decode-70b, all ranks"
#: Batches and contexts by kind of device and whether it is to be quick.
SIZES: dict[tuple[str, bool], tuple[tuple[int, ...], tuple[int, ...]]] = {
    ("cuda", False): ((1, 32, 64, 256), (2048, 16384)),
    ("cuda", True): ((1, 64), (2048,)),
    ("cpu", False): ((2,), (256, 512)),
    ("cpu", True): ((2,), (256,)),
}
RANKS = (2, 4, 8)
SMALL = Rank(hidden=256, q_heads=8, kv_heads=2, dim=64, ffn=512, layers=4, vocabulary=512)
#: The share of memory that weights and caches may take: ranks wait for one that runs out of it.
SHARE = 0.95
#: Samples ahead of those that count; cycles in which the host launches a graph of a thousand kernels.
SETTLE, PAUSE = 3, 4_000_000
BY_NCCL, BACKENDS = "halfbyte auto, NCCL", {"nccl": "NCCL", "gloo": "gloo"}


def jobs(session: Session) -> list[Job]:
    """One for each number of ranks that there are GPUs for, with all its batches and contexts."""
    kind = session.device.kind
    batches, contexts = SIZES[kind, session.options.quick]
    sizes = tuple((batch, context) for batch in batches for context in contexts)
    if kind != "cuda":
        return [RanksJob(RANKS[0], SMALL, sizes)]
    return [RanksJob(ranks, LLAMA_2_70B, sizes) for ranks in RANKS if ranks <= torch.cuda.device_count()]


def ways(kind: str) -> list[Entry]:
    """Those of one rank, and the last of them by NCCL."""
    base = entries(kind)
    return [*base, replace(base[-1], implementation=BY_NCCL)]


@dataclass(frozen=True)
class RanksJob:
    """All cases of one number of ranks, whose processes are started once."""

    ranks: int
    model: Rank
    sizes: tuple[tuple[int, int], ...]
    op: str = OP

    @property
    def name(self) -> str:
        return f"on {self.ranks}"

    def _wanted(self, session: Session) -> Iterator[tuple[int, int, list[Entry]]]:
        for batch, context in self.sizes:
            if selection := _wanted(session, case_name(batch, context, self.ranks)):
                yield batch, context, selection

    def to_compile(self, session: Session) -> Iterator[precompile.Pair]:
        """Our attention, launches overlapping."""
        for batch, context, selection in self._wanted(session):
            shape = self.model.shared(self.ranks).shape(batch, context)
            for formats in {entry.formats for entry in selection} - {PLAIN}:
                yield from precompile.attention(session.device, shape, formats, (True,))

    def measure(self, session: Session) -> Iterator[Record]:
        """A record for each way, as the first rank has it."""
        sizes = [(batch, context) for batch, context, _ in self._wanted(session)]
        if sizes:
            session.free()
            share = self.model.shared(self.ranks)
            work = partial(measured_by_rank, share, sizes, session.options, session.environment)
            yield from first_of_ranks(work, self.ranks, session.device.kind)


def case_name(batch: int, context: int, ranks: int) -> str:
    """What a case is called: "batch 64 x 2,048 on 4"."""
    return f"batch {batch} x {context:,} on {ranks}"


def _wanted(session: Session, case: str) -> list[Entry]:
    return [way for way in ways(session.device.kind) if session.wants(case, way.formats, way.implementation)]


def measured_by_rank(
    rank: Rank, sizes: Sequence[tuple[int, int]], options: Options, where: Environment, machine: Device
) -> Iterator[Record]:
    """What one rank of the process group measures, on its device."""
    # All ranks must find that the same cases fit.
    machine = replace(machine, memory_bytes=min(of_all(machine.memory_bytes, machine.torch)))
    session = Session(options, machine, MANY_GRAPHS)
    session.environment = where
    model = Model(rank, machine, rank.layers, seed=dist.get_rank())
    reduce = AllReduce(rank.hidden, torch.bfloat16, machine.torch)
    for batch, context in sizes:
        case = StepCase(model, batch, context, OP, case_name(batch, context, dist.get_world_size()))
        yield from WholeStep(case, reduce).measure(session)


@dataclass(frozen=True)
class WholeStep:
    """One batch and context on this rank; all ranks measure it together."""

    case: StepCase
    reduce: AllReduce

    def measure(self, session: Session) -> Iterator[Record]:
        """A record for each way: those of one format share their caches."""
        one_shot = self._exchanges(self.reduce)
        selection = [way for way in _wanted(session, self.case.name) if one_shot or way.implementation != BY_NCCL]
        with torch.no_grad():
            for formats, group in groupby(selection, key=lambda way: way.formats):
                session.free()
                blanks = [(way, self._blank(session, way)) for way in group]
                if blanks[0][1].refused:
                    yield from (blank for _, blank in blanks)
                else:
                    yield from self._over(session, formats, blanks)

    def _exchanges(self, reduce: AllReduce) -> bool:
        return reduce.exchange_of(self.case.model.inputs(self.case.batch)) is not None

    def _blank(self, session: Session, way: Entry) -> Record:
        record = self.case.blank(session, way, SHARE)
        return replace(record, shape={**record.shape, "ranks": dist.get_world_size()})

    def _over(self, session: Session, formats: str, blanks: Sequence[tuple[Entry, Record]]) -> list[Record]:
        """The records of the ways that read caches of one format."""
        device = session.device.torch
        try:
            on_all(self.case.model.make, device)
            rotation = on_all(partial(self.case.filled, formats, device), device)
        except BenchmarkRefused as error:
            return [self.case.refused(blank, error) for _, blank in blanks]
        return [self._record(session, way, rotation, blank) for way, blank in blanks]

    def _record(self, session: Session, way: Entry, rotation: Rotation, blank: Record) -> Record:
        """Judged, timed and judged again. What this refuses all ranks refuse; any other error ends them."""
        device, reduce = session.device.torch, self.reduce
        if way.implementation == BY_NCCL:
            reduce = copy.copy(reduce)
            reduce.exchange = None
        try:
            on_all(lambda: self._attends(way, rotation), device)
            step = Step(self.case.model, rotation.caches, self.case.context, way.attend, reduce)
            sampler = self._sampler(session, step, rotation)
            self._judged(sampler, rotation, device)
            own = [sampler.sample() for _ in range(SETTLE + session.effort.repeats)][SETTLE:]
            slowest = [max(samples) for samples in zip(*of_all(own, device), strict=True)]
            accuracy = self._judged(sampler, rotation, device)  # what was timed must still be right
        except BenchmarkRefused as error:
            return self.case.refused(blank, error)
        timing = summary(slowest, f"{sampler.method}; the slowest of {dist.get_world_size()} ranks; {self._how(reduce)}")
        record = with_timing(blank, timing, accuracy)
        return replace(record, gb_per_s=blank.nbytes / timing.median / 1e9)

    def _how(self, reduce: AllReduce) -> str:
        model, backend = self.case.model, "one-shot" if self._exchanges(reduce) else BACKENDS[dist.get_backend()]
        return f"{model.count} layers and the output head; all-reduce: {backend}; feed-forward in {model.feed_forward}"

    def _attends(self, way: Entry, rotation: Rotation) -> None:
        """Run attention alone: what cannot run must fail while no rank waits for another."""
        shape, cache = self.case.model.rank.shape(self.case.batch, self.case.context), rotation.caches[0]
        q = torch.zeros(shape.batch, shape.q_heads, 1, shape.dim, dtype=torch.bfloat16, device=cache.device)
        way.attend(q, cache)

    def _sampler(self, session: Session, step: Step, rotation: Rotation) -> Sampler:
        device = session.device.torch
        start = torch.zeros(1, device=device)

        def before() -> None:
            rotation.restore_short()
            if device.type == "cuda":
                torch.cuda._sleep(PAUSE)
            dist.all_reduce(start)  # ranks that are ahead wait here, and not in what is timed

        sampler = make_sampler(self.case.name, Work([step.whole], before), session.device, session.effort)
        if refusals := [how for how in of_all(sampler.method, device) if NOT_CAPTURED in how]:
            raise BenchmarkRefused(refusals[0])
        return sampler

    def _judged(self, sampler: Sampler, rotation: Rotation, device: torch.device) -> Accuracy:
        """The worst error of a layer's attention in a step whose hidden states are the same on all ranks."""
        (result,) = cast(list[Made], sampler.run())
        others = [torch.empty_like(result.hidden) for _ in range(dist.get_world_size())]
        dist.all_gather(others, result.hidden)
        if not all(torch.equal(result.hidden, other) for other in others):
            raise BenchmarkRefused("ranks have different hidden states")
        return on_all(lambda: judged(result, rotation), device)


def judged(made: Made, rotation: Rotation) -> Accuracy:
    """The worst error of a layer's attention, on one of its sequences, another in each layer; raises where it is not allowed."""
    if not bool(torch.isfinite(made.logits).all()):
        raise BenchmarkRefused("the logits are not finite")
    accuracies = []
    for i, ((q, out), cache) in enumerate(zip(made.attention, rotation.caches, strict=True)):
        one = slice(i % len(q), i % len(q) + 1)
        accuracies.append(Promise(q[one], held_by(sequences(cache, one.start, one.stop))).judge([out[one]]))
        accuracies[-1].require(f"attention of layer {i}")
    return max(accuracies, key=lambda accuracy: accuracy.error)


def on_all(make: Callable[[], T], device: torch.device) -> T:
    """What `make`, which waits for no other rank, gives on this one. Raises `BenchmarkRefused` where it fails on any: all do."""
    result, why = None, ""
    try:
        result = make()
    except torch.OutOfMemoryError:
        why = f"{NOT_HELD}: out of memory"
    except Exception as error:
        why = reason(error)
    if refusals := [text for text in of_all(why, device) if text]:
        raise BenchmarkRefused(refusals[0])
    return cast(T, result)
