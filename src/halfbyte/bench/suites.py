"""What `halfbyte bench` measures: each command is one suite, and `halfbyte bench all` is all of them under one progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from halfbyte.bench import decode as any_decode
from halfbyte.bench import linear as any_linear
from halfbyte.bench import qkv as layers_of_qkv
from halfbyte.bench import run_bars, run_linear, studies, telling
from halfbyte.bench.compile_ahead import compile_ahead
from halfbyte.bench.decode import DecodeShape
from halfbyte.bench.foreseen import Foreseen
from halfbyte.bench.linear import LinearShape
from halfbyte.bench.overhead import CallJob
from halfbyte.bench.peers import run as run_peers
from halfbyte.bench.session import Job, Session
from halfbyte.bench.studies import fused_qkv
from halfbyte.bench.telling import Telling
from halfbyte.bench.timing import GRAPHS, MANY_GRAPHS, Effort
from halfbyte.errors import InvalidArgument

#: One process compiles so many variants in the time that many processes take to start.
_WORTH = 8


@dataclass(frozen=True)
class Suite:
    """What one command measures, and how it is told.

    jobs    what a session measures; few of them with `session.options.quick`
    effort  how much a GPU measures for each contender
    study   the name that its records are marked with
    roofs   whether the roofs of this machine are printed first
    """

    jobs: Callable[[Session], Sequence[Job]]
    telling: Telling
    effort: Effort = GRAPHS
    study: str = ""
    roofs: bool = False


def decode(session: Session, shapes: Sequence[DecodeShape], formats: Sequence[str], impls: Sequence[str], bars: bool) -> Suite:
    """Attention of one new token: the cases with bars on a GPU unless others are asked for."""
    if _with_bars(session, shapes, formats, bars):
        return Suite(lambda s: run_bars.jobs(impls or ["auto"], s.device.kind, s.options.quick), telling.DECODE)

    def jobs(s: Session) -> Sequence[Job]:
        default = any_decode.QUICK_SHAPES if s.options.quick else any_decode.DEFAULT_SHAPES
        return any_decode.cases(s, shapes or default, formats or any_decode.DEFAULT_FORMATS, impls)

    return Suite(jobs, telling.plain("decode_attention"), roofs=True)


def linear(session: Session, shapes: Sequence[LinearShape], formats: Sequence[str], impls: Sequence[str], bars: bool) -> Suite:
    """Linear layers: those with bars on a GPU unless others are asked for."""
    if _with_bars(session, shapes, formats, bars):
        return Suite(lambda s: run_linear.jobs(impls or ["auto"], s.device.kind, s.options.quick), telling.LINEAR, MANY_GRAPHS)

    def jobs(s: Session) -> Sequence[Job]:
        default = any_linear.QUICK_SHAPES if s.options.quick else any_linear.DEFAULT_SHAPES
        return any_linear.cases(s, shapes or default, formats or any_linear.DEFAULT_FORMATS, impls)

    return Suite(jobs, telling.plain("linear"), MANY_GRAPHS, roofs=True)


def _with_bars(session: Session, shapes: Sequence[object], formats: Sequence[str], asked: bool) -> bool:
    """Whether the cases with bars are measured: on a GPU, unless sizes or formats are chosen."""
    gpu, chosen = session.device.kind == "cuda", bool(shapes or formats)
    if asked and (chosen or not gpu):
        raise InvalidArgument("--bars measures fixed cases on a GPU; leave out sizes and formats, and see --filter and --device")
    return gpu and not chosen


def qkv(weights: Path | None = None, impl: str = "auto") -> Suite:
    """The study of fused projections, on an extract or on the shipped model's weights."""
    first = layers_of_qkv.shipped_weights(layers_of_qkv.GPT2) if weights is None else layers_of_qkv.extracted_weights(weights)
    return replace(study(fused_qkv.STUDY.name), jobs=lambda s: fused_qkv.jobs_on(s, first, impl))


def overhead() -> Suite:
    """What one eager call costs the host."""
    return Suite(lambda _: [CallJob()], telling.DECODE)


def peers() -> Suite:
    """Every peer that runs here, on one case each."""
    return Suite(run_peers.jobs, telling.PEERS, MANY_GRAPHS, telling.PEERS_MARK)


def study(name: str) -> Suite:
    """One study."""
    found = studies.study(name)
    return Suite(found.jobs, telling.of_study(found), found.effort, found.name)


def every(session: Session) -> list[Suite]:
    """All of them: the host's overhead and appends are among the bars of a GPU."""
    first = [decode(session, (), (), (), bars=False), linear(session, (), (), (), bars=False), peers()]
    return [*first, *(study(name) for name in studies.QUESTIONS)]


def run(session: Session, suites: Sequence[Suite]) -> None:
    """Measure the suites one after the other under one progress bar, then tell each; the session gets all records.

    Ctrl-C ends the measuring: what was measured is told all the same.
    """
    parts = [(suite, session.part(suite.effort, suite.study)) for suite in suites]
    planned = [(part, suite.jobs(part)) for suite, part in parts]
    if session.device.kind == "cuda":
        try:
            _compile(session, planned)
        except KeyboardInterrupt:
            session.interrupted = True
            return
    if any(suite.roofs for suite in suites):
        session.show_roofs()
    if session.device.kind != "cuda" and any(suite.study for suite in suites):
        session.say("no GPU here: studies run small, on the CPU")
    with session.steps(sum(len(jobs) for _, jobs in planned)) as steps:
        for part, jobs in planned:
            session.records += part.run(jobs, steps)
            session.interrupted, session.broken = part.interrupted, part.broken
            if part.interrupted or part.broken:
                break
    for suite, part in parts:
        telling.tell(part, suite.telling)
    ended = session.interrupted or session.broken
    if session.options.kernels and not ended and (why := session.no_kernel_times):
        session.say(f"no times of kernels by CUPTI: {why}; times by events stand alone")
    if session.records and session.options.output is not None:
        session.say(f"records appended to {session.options.output}")


def _compile(session: Session, planned: Sequence[tuple[Session, Sequence[Job]]]) -> None:
    """Compile what is known to be launched, where that is so much that starting processes pays."""
    pairs = [pair for part, jobs in planned for job in jobs if isinstance(job, Foreseen) for pair in job.foreseen(part)]
    compile_ahead(pairs, session.device.capability or (0, 0), fewest=_WORTH)
