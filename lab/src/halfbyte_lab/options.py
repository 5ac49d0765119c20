"""The options that every measuring command has, written once: `halfbyte bench` and `python -m halfbyte_lab` share them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.cli.options import Output, with_options
from halfbyte.cli.shared import Html, Json, Where, Wide, check_appendable, check_page
from halfbyte.errors import InvalidArgument

if TYPE_CHECKING:
    from halfbyte_lab.measure.report_sections import SectionOf
    from halfbyte_lab.measure.session import Session
    from halfbyte_lab.measure.suite import Suite

Formats = Annotated[str, typer.Option(help="Formats, separated by commas; int8+int4_g32 is keys+values.")]
Impls = Annotated[str, typer.Option(help="Implementations, separated by commas, such as auto,triton,cpu,reference.")]


@dataclass(frozen=True)
class RunOptions:
    """What a command measures on, how much, and where its records go."""

    output: Output = None
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases and repeats.")] = False
    pattern: Annotated[str, typer.Option("--filter", help="Regular expression over 'case formats implementation'.")] = ""
    device: Where = None
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: what torch uses.")] = None
    kernels: Annotated[bool, typer.Option("--kernels", help="On a GPU, also kernel times by CUPTI; slows later timings.")] = False
    html: Html = None
    as_json: Json = False
    wide: Wide = False

    def session(self) -> Session:
        """A session by these options."""
        from halfbyte_lab.measure.session import Options, Session

        measured = Options(self.output, self.quick, self.pattern, self.as_json, self.device, self.threads, self.kernels, self.wide)
        return Session.start(measured)


#: A command that measures: `command(options: RunOptions, ...)`.
measures = with_options(RunOptions)


def run_suites(
    options: RunOptions, title: str, chosen: Callable[[Session], Sequence[Suite]], section_of: SectionOf | None = None
) -> None:
    """Measure and show; exit code 130 after Ctrl-C, 1 when nothing was measured, all was refused or the GPU no longer answers."""
    from halfbyte_lab.measure import suite
    from halfbyte_lab.measure.page import write_page
    from halfbyte_lab.measure.report_sections import by_operation

    check_page(options.html, "html")
    check_appendable(options.output, "output")
    session = options.session()
    suite.run(session, chosen(session))
    if options.html is not None and session.records:
        page = write_page(session.records, title, options.html, section_of=section_of or by_operation)
        print(f"page written to {page}", file=sys.stderr)
    if session.interrupted:
        raise typer.Exit(130)
    if not session.records:
        raise InvalidArgument(f"filter={options.pattern!r} leaves nothing to measure")
    if session.broken or all(record.refused for record in session.records):
        raise typer.Exit(1)


def write_report(
    files: Sequence[Path], against: Sequence[Path], output: Path, title: str, section_of: SectionOf | None = None
) -> None:
    """Any set of records as one HTML page, compared with others if there are any."""
    from halfbyte_lab.measure.page import write_page
    from halfbyte_lab.measure.records import read_all
    from halfbyte_lab.measure.report_sections import by_operation

    check_page(output, "output")
    after, notices = read_all(files)
    before, more = read_all(against)
    for notice in (*notices, *more):
        print(f"note: {notice}", file=sys.stderr)
    print(f"page written to {write_page(after, title, output, before, section_of or by_operation)}", file=sys.stderr)
