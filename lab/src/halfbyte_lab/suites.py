"""What each command measures, and how records are shown: targets, baselines, q k v and studies apart, all others by operation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from halfbyte.cli.shared import check_new_folder
from halfbyte.errors import InvalidArgument, check
from halfbyte_lab import studies
from halfbyte_lab.baselines import run as run_baselines
from halfbyte_lab.cases import (
    decode_cases,
    experts_cases,
    figures,
    linear_cases,
    linear_targets,
    literature,
    qkv_cases,
    qkv_layers,
    targets,
)
from halfbyte_lab.cases.overhead import CallJob
from halfbyte_lab.extract import load_layer
from halfbyte_lab.measure import charts
from halfbyte_lab.measure import decode as decode_attention
from halfbyte_lab.measure import linear as linear_layers
from halfbyte_lab.measure.decode import DecodeShape
from halfbyte_lab.measure.figures import of_any
from halfbyte_lab.measure.linear import LinearShape
from halfbyte_lab.measure.page import write_page
from halfbyte_lab.measure.records import Record, read, read_all
from halfbyte_lab.measure.report_sections import Section, plain, show
from halfbyte_lab.measure.session import Job, Session
from halfbyte_lab.measure.tables import plain_table
from halfbyte_lab.measure.timing import GRAPHS, MANY_GRAPHS, Effort
from halfbyte_lab.options import RunOptions, check_appendable, check_page
from halfbyte_lab.precompile import Precompiled, compile_ahead
from halfbyte_lab.studies import fused_qkv

#: What records of baselines are marked with, as those of a study are.
BASELINES_MARK = "peers"

DECODE = Section("Decode attention and appends, with bars", targets.table, figures.of_attention)
LINEAR = Section(
    "Linear layers, with bars",
    linear_targets.table,
    figures.of_linear,
    lambda measured: (f"Quoted: {literature.SOURCE}.",),
    text_columns=3,
)
QKV = Section("Products for q, k and v", qkv_cases.table, figures.of_variants, text_columns=3)
BASELINES = Section("Peers", plain_table, of_any, text_columns=3)


def section_of(r: Record) -> Section:
    """The section of one record. A study that is not known here is shown plainly."""
    if r.study in studies.QUESTIONS:
        return studies.study(r.study)
    if r.case and r.op in targets.OPS and not r.study:
        return DECODE
    if r.case and r.op == "linear" and not r.study:
        return LINEAR
    if r.study == BASELINES_MARK:
        return BASELINES
    if r.op in (qkv_cases.OP, qkv_cases.FUSED_OP):
        return QKV
    return plain(r.op)


# ------------------------------------------------------------------------------------------------------------------ suites


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


def decode(session: Session, shapes: Sequence[DecodeShape] = (), formats: Sequence[str] = (), impls: Sequence[str] = ()) -> Suite:
    """Attention of one new token: these shapes and formats; else on a GPU the cases with targets, on a CPU the default ones."""
    if session.device.kind != "cuda" or shapes or formats:
        return Suite(lambda s: decode_attention.cases(s, shapes, formats, impls), plain("decode_attention"), roofline=True)
    return Suite(lambda s: decode_cases.jobs(impls or ["auto"], s.device.kind, s.options.quick), DECODE)


def linear(session: Session, shapes: Sequence[LinearShape] = (), formats: Sequence[str] = (), impls: Sequence[str] = ()) -> Suite:
    """Linear layers, likewise."""
    if session.device.kind != "cuda" or shapes or formats:
        return Suite(lambda s: linear_layers.cases(s, shapes, formats, impls), plain("linear"), MANY_GRAPHS, roofline=True)
    return Suite(lambda s: linear_cases.jobs(impls or ["auto"], s.device.kind, s.options.quick), LINEAR, MANY_GRAPHS)


def experts(session: Session, impls: Sequence[str] = ()) -> Suite:
    """Mixtures of experts when they decode; on a CPU a small one."""
    default = ("auto", "triton") if session.device.kind == "cuda" else ("auto",)
    return Suite(
        lambda s: experts_cases.jobs(impls or default, s.device.kind, s.options.quick), plain("experts_linear"), MANY_GRAPHS
    )


def qkv(weights: Path | None = None, impl: str = "auto") -> Suite:
    """The study of fused projections, on an extract or on the shipped model's weights."""
    first = qkv_layers.shipped_weights(qkv_layers.GPT2) if weights is None else qkv_layers.extracted_weights(weights)
    return replace(study(fused_qkv.STUDY.title), jobs=lambda s: fused_qkv.jobs_on(s, first, impl))


def overhead() -> Suite:
    """What one eager call costs the host."""
    return Suite(lambda _: [CallJob()], DECODE)


def baselines() -> Suite:
    """Every baseline that runs here, on one case of attention and two of a linear layer."""
    return Suite(run_baselines.jobs, BASELINES, MANY_GRAPHS, BASELINES_MARK)


def study(name: str) -> Suite:
    """One study."""
    definition = studies.study(name)
    return Suite(definition.jobs, definition, definition.effort, definition.title)


def every(session: Session) -> list[Suite]:
    """All of them: the host's overhead and appends are among the cases with targets."""
    return [decode(session), linear(session), baselines(), experts(session), *(study(name) for name in studies.QUESTIONS)]


# ------------------------------------------------------------------------------------------------------------------ running


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


def run_suites(options: RunOptions, title: str, chosen: Callable[[Session], Sequence[Suite]]) -> None:
    """Measure and show; exit code 130 after Ctrl-C, 1 when nothing was measured, all was refused or the GPU no longer answers."""
    check_page(options.html, "html")
    check_appendable(options.output, "output")
    session = options.session()
    run(session, chosen(session))
    if options.html is not None and session.records:
        page = write_page(session.records, title, options.html, section_of=section_of)
        print(f"page written to {page}", file=sys.stderr)
    if session.interrupted:
        raise typer.Exit(130)
    if not session.records:
        raise InvalidArgument(f"filter={options.pattern!r} leaves nothing to measure")
    if session.broken or all(record.refused for record in session.records):
        raise typer.Exit(1)


def write_report(files: Sequence[Path], against: Sequence[Path], output: Path, title: str) -> None:
    """Any set of records as one HTML page, a section for each study, compared with others if there are any."""
    check_page(output, "output")
    after, notices = read_all(files)
    before, more = read_all(against)
    for notice in (*notices, *more):
        print(f"note: {notice}", file=sys.stderr)
    print(f"page written to {write_page(after, title, output, before, section_of=section_of)}", file=sys.stderr)


# ----------------------------------------------------------------------------------------------------- one layer of a model

WEIGHTS, RECORDS, RESULTS = "weights", "records.jsonl", "results.md"


def evaluate(options: RunOptions, model: str, folder: Path, layer: int) -> None:
    """A layer through every variant and format, as files. What was measured before an interrupt stays in the records."""
    check(options.output is None, f"--output: the records go to {folder / RECORDS}")
    check_new_folder(folder)
    charts.check_installed()
    load_layer(model, layer).save(folder / WEIGHTS)
    weights = qkv_layers.extracted_weights(folder / WEIGHTS)
    formats = qkv_cases.QUICK_FORMATS[-1:] if options.quick else qkv_cases.FORMATS
    one = replace(study(fused_qkv.STUDY.title), jobs=lambda _: [qkv_cases.VariantsJob(weights, "auto", formats)])
    run_suites(replace(options, output=folder / RECORDS), weights.shape.name, lambda _: [one])
    write(read(folder / RECORDS).records, folder)


def write(measured: list[Record], folder: Path) -> None:
    """The table with what it shows, and the charts of the one layer in the records."""
    ((headers, rows),) = fused_qkv.STUDY.tables(measured)
    lines = [f"| {' | '.join(cells)} |" for cells in (headers, ["---"] * len(headers), *rows)]
    where = f"{measured[0].environment.device}; {measured[0].environment.date}"
    text = "\n\n".join([where, *fused_qkv.says(measured), "\n".join(lines)])
    (folder / RESULTS).write_text(text + "\n", encoding="utf-8")
    for name, draw in (("end-to-end", figures.end_to_end), ("breakdown", figures.of_variants)):
        with charts.measured_on(measured[0].environment.device):
            drawn = draw(measured)
        for chart in drawn:
            (folder / f"{name}.svg").write_text(charts.as_image(chart), encoding="utf-8")
