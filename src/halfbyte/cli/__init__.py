"""The command line: one small function for each command, in a file for each kind.

Imports of everything heavy are inside the commands, so that `halfbyte --help` is quick and needs no torch.
"""

from __future__ import annotations

import functools
import io
import os
import sys
from typing import Annotated

import typer

from halfbyte.cli import inspect, models
from halfbyte.cli.formats import formats
from halfbyte.cli.shared import App
from halfbyte.cli.warmup import warmup
from halfbyte.errors import LABORATORY, HalfbyteError, MissingPackage, laboratory

app = App(name="halfbyte", help="Low-bit KV caches and 4-bit linear layers for LLM decoding.")
app.command("generate")(models.generate)
app.command("quantize")(models.quantize)
app.command("warmup")(warmup)
app.command("formats")(formats)
app.command("memory")(inspect.memory)
app.command("doctor")(inspect.doctor)
app.command("explain")(inspect.explain)


@functools.cache
def command_line() -> App:
    """All commands, those of the laboratory included."""
    try:
        laboratory("commands", "this command").add_to(app)
    except MissingPackage as error:
        for name in LABORATORY:
            _missing(name, error)
    return app


def _missing(name: str, error: MissingPackage) -> None:
    @app.command(name, hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def command() -> None:
        raise error


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    run_app(command_line(), arguments)


def run_app(app: typer.Typer, arguments: list[str] | None = None) -> None:
    """Run a command. The library's own errors become one line and exit code 1; any other error keeps its traceback."""
    # OpenMP threads spin long while they wait, unless set otherwise before torch is loaded. On two cores with anything else
    # running that made the demo up to fifty times slower; a short spin costs nothing (docs/internals/log/cpu.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    if not os.environ.get("COLUMNS", "").strip("0"):  # 0 says nothing, as to shutil.get_terminal_size; rich would print nothing
        os.environ.pop("COLUMNS", None)
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a letter gets its number, and the command goes on
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    try:
        app(arguments)
    except (HalfbyteError, OSError) as error:
        print(f"halfbyte: {error}", file=sys.stderr)
        sys.exit(1)


def _version(show: bool) -> None:
    if show:
        import halfbyte

        print(f"halfbyte {halfbyte.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass
