"""The options that every measuring command has, written once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.cli.options import Output, with_options
from halfbyte.cli.shared import Html, Json, Where, Wide

if TYPE_CHECKING:
    from halfbyte_lab.measure.session import Session

Formats = Annotated[str, typer.Option(help="Formats, separated by commas; int8+int4_g32 is keys+values.")]
Impls = Annotated[str, typer.Option(help="Implementations, separated by commas, such as auto,triton,cpu,reference.")]


@dataclass(frozen=True)
class EvalOptions:
    """How the results of an evaluation are shown, where they go, and whether an evidence card is made."""

    html: Html = None
    output: Output = None
    as_json: Json = False
    wide: Wide = False
    suite: Annotated[bool, typer.Option("--suite", help="Measure an evidence card: formats, long contexts, --tasks.")] = False
    card: Annotated[
        Path | None, typer.Option(help="With --suite: the card, a .json file; .md is written next to it. Default: MODEL-card.json.")
    ] = None
    tasks: Annotated[
        str,
        typer.Option(help="With --suite: tasks of lm-eval, or files NAME.yaml of local ones, separated by commas; needs lm-eval."),
    ] = ""


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

        options = Options(self.output, self.quick, self.pattern, self.as_json, self.device, self.threads, self.kernels, self.wide)
        return Session.start(options)


#: A command that measures: `command(options: RunOptions, ...)`.
measures = with_options(RunOptions)
