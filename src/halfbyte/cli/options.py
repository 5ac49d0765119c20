"""The options that every measuring command has, written once: `halfbyte bench` and `python -m benchmarks` share them."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from halfbyte import settings
from halfbyte.cli.shared import Html, Json, RecentTokens, SinkTokens, Where, Wide, check_appendable, check_page
from halfbyte.errors import InvalidArgument

if TYPE_CHECKING:
    from halfbyte.measure.report_sections import SectionOf
    from halfbyte.measure.session import Session
    from halfbyte.measure.suite import Suite


def _known_half(dtype: str | None) -> str | None:
    return None if dtype is None else settings.check_half(dtype)


Formats = Annotated[str, typer.Option(help="Formats, separated by commas; int8+int4_g32 is keys+values.")]
Impls = Annotated[str, typer.Option(help="Implementations, separated by commas, such as auto,triton,cpu,reference.")]
Keys = Annotated[str, typer.Option(help="Format of the cached keys.")]
Values = Annotated[str, typer.Option(help="Format of the cached values.")]
Rotate = Annotated[
    bool | None,
    typer.Option("--rotate-keys/--no-rotate-keys", help="Hadamard-rotate cached keys. Default: 4-bit and 2-bit, not per-channel."),
]
Skip = Annotated[str, typer.Option(help="Layers whose cache stays in 16 bits, such as 0,1,-1.")]
OfHalves = typer.Option("--dtype", help="16-bit type of what is not quantized: bf16 or fp16.", callback=_known_half)
Dtype = Annotated[str, OfHalves]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Append records to this file, one JSON object a line.")]


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
        from halfbyte.measure.session import Options, Session

        measured = Options(self.output, self.quick, self.pattern, self.as_json, self.device, self.threads, self.kernels, self.wide)
        return Session.start(measured)


@dataclass(frozen=True)
class ResultOptions:
    """How the results of an evaluation are shown, and where they go."""

    html: Html = None
    output: Output = None
    as_json: Json = False
    wide: Wide = False


@dataclass(frozen=True)
class EvalOptions(ResultOptions):
    """And whether an evidence card is made."""

    suite: Annotated[bool, typer.Option("--suite", help="Measure an evidence card: formats, long contexts, --tasks.")] = False
    card: Annotated[
        Path | None, typer.Option(help="With --suite: the card, a .json file; .md is written next to it. Default: MODEL-card.json.")
    ] = None
    tasks: Annotated[
        str,
        typer.Option(help="With --suite: tasks of lm-eval, or files NAME.yaml of local ones, separated by commas; needs lm-eval."),
    ] = ""


@dataclass(frozen=True)
class CacheFormats:
    """What a command's packed cache is made of."""

    keys: Keys = settings.KEYS
    values: Values = settings.VALUES
    rotate_keys: Rotate = None
    skip_layers: Skip = ""
    sink_tokens: SinkTokens = 0
    recent_tokens: RecentTokens = 0


def with_options(*kinds: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes `command(options, ...)` a command whose options are its own and the fields of the dataclasses `kinds`, one object each.

    Those of the last kind stand behind the command's own, those of others before them.
    """

    def made(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command).parameters.values())[len(kinds) :]
        shared = [
            [inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default) for f in fields(kind)] for kind in kinds
        ]
        hints = get_type_hints(command, include_extras=True)
        for kind in kinds:
            hints |= get_type_hints(kind, include_extras=True)
        order = [*(p for first in shared[:-1] for p in first), *own, *shared[-1]]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[p.name]) for p in order]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            options = [kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for kind in kinds]
            command(*options, **given)

        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return made


#: A command that measures: `command(options: RunOptions, ...)`.
measures = with_options(RunOptions)


def run_suites(
    options: RunOptions, title: str, chosen: Callable[[Session], Sequence[Suite]], section_of: SectionOf | None = None
) -> None:
    """Measure and show; exit code 130 after Ctrl-C, 1 when nothing was measured, all was refused or the GPU no longer answers."""
    from halfbyte.measure import suite
    from halfbyte.measure.page import write_page
    from halfbyte.measure.report_sections import by_operation

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
    from halfbyte.measure.page import write_page
    from halfbyte.measure.records import read_all
    from halfbyte.measure.report_sections import by_operation

    check_page(output, "output")
    after, notices = read_all(files)
    before, more = read_all(against)
    for notice in (*notices, *more):
        print(f"note: {notice}", file=sys.stderr)
    print(f"page written to {write_page(after, title, output, before, section_of or by_operation)}", file=sys.stderr)
