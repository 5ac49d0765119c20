"""What one command measures and how it is shown; several suites run under one progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from halfbyte_lab.measure import decode, linear
from halfbyte_lab.measure.decode import DecodeShape
from halfbyte_lab.measure.linear import LinearShape
from halfbyte_lab.measure.precompile import Precompiled
from halfbyte_lab.measure.report_sections import Section, plain, show
from halfbyte_lab.measure.session import Job, Session
from halfbyte_lab.measure.timing import GRAPHS, MANY_GRAPHS, Effort
from halfbyte_lab.precompile import compile_ahead

#: One process compiles so many variants in the time that many processes take to start.
_WORTH = 8


@dataclass(frozen=True)
class Suite:
    """What one command measures.

    jobs      what a session measures; few of them with `session.options.quick`
    section   how its records are shown
    effort    how much a GPU measures for each candidate
    study     the name that its records are marked with
    roofline  whether the roofline of this machine is printed first
    """

    jobs: Callable[[Session], Sequence[Job]]
    section: Section
    effort: Effort = GRAPHS
    study: str = ""
    roofline: bool = False


def decode_attention(shapes: Sequence[DecodeShape] = (), formats: Sequence[str] = (), impls: Sequence[str] = ()) -> Suite:
    """Attention of one new token; the default cases unless others are chosen."""
    return Suite(lambda s: decode.cases(s, shapes, formats, impls), plain("decode_attention"), roofline=True)


def linear_layers(shapes: Sequence[LinearShape] = (), formats: Sequence[str] = (), impls: Sequence[str] = ()) -> Suite:
    """Linear layers; the default cases unless others are chosen."""
    return Suite(lambda s: linear.cases(s, shapes, formats, impls), plain("linear"), MANY_GRAPHS, roofline=True)


def run(session: Session, suites: Sequence[Suite]) -> None:
    """Measure the suites one after the other under one progress bar, then show each; the session gets all records.

    Ctrl-C ends the measuring: what was measured is shown all the same.
    """
    parts = [(suite, session.part(suite.effort, suite.study)) for suite in suites]
    schedule = [(part, suite.jobs(part)) for suite, part in parts]
    if session.device.kind == "cuda":
        try:
            _compile(session, schedule)
        except KeyboardInterrupt:
            session.interrupted = True
            return
    if any(suite.roofline for suite in suites):
        session.show_roofline()
    if session.device.kind != "cuda" and any(suite.study for suite in suites):
        session.say("no GPU here: studies run small, on the CPU")
    with session.steps(sum(len(jobs) for _, jobs in schedule)) as steps:
        for part, jobs in schedule:
            session.records += part.run(jobs, steps)
            session.interrupted, session.broken = part.interrupted, part.broken
            if part.interrupted or part.broken:
                break
    for suite, part in parts:
        show(part, suite.section)
    is_over = session.interrupted or session.broken
    if session.options.kernels and not is_over and (why := session.no_kernel_times):
        session.say(f"no times of kernels by CUPTI: {why}; times by events stand alone")
    if session.records and session.options.output is not None:
        session.say(f"records appended to {session.options.output}")


def _compile(session: Session, planned: Sequence[tuple[Session, Sequence[Job]]]) -> None:
    """Compile what is known to be launched, where that is so much that starting processes pays."""
    pairs = [pair for part, jobs in planned for job in jobs if isinstance(job, Precompiled) for pair in job.to_compile(part)]
    compile_ahead(pairs, session.device.capability or (0, 0), fewest=_WORTH)
