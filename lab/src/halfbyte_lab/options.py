"""The options that every measuring command has, written once."""

from __future__ import annotations

import contextlib
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.cli.options import Output, with_options
from halfbyte.cli.shared import Json, Where, Wide, short, token_count, whole_number, words
from halfbyte.errors import InvalidArgument, check, require

if TYPE_CHECKING:
    from halfbyte_lab.measure.session import Session

Html = Annotated[Path | None, typer.Option("--html", "--report", help="Also write the results as one HTML page.")]
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

    def card_of(self, model: str) -> Path | None:
        """Where --suite writes the card of a model; None without it. What can be known before a model is loaded is checked."""
        if not self.suite:
            check(not (self.card or self.tasks), "--card and --tasks say something about --suite; add it")
            return None
        path = self.card or Path(f"{re.sub(r'[^A-Za-z0-9.-]+', '-', Path(model).name).strip('-') or 'model'}-card.json")
        check(path.suffix == ".json", f"--card {str(path)!r}; give a name that ends with .json")
        check(self.html is None and self.output is None, "--suite writes a card; leave out --html and --output")
        for file in (path, path.with_suffix(".md")):
            check_writable(file, "card")
        if self.tasks:
            require("lm_eval", "--tasks")
            missing = [task for task in words(self.tasks) if task.endswith(".yaml") and not Path(task).is_file()]
            check(not missing, f"--tasks {missing[:1]}: no such file; pass the YAML file of a task, or the name of one of lm-eval")
        return path


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


def check_writable(path: Path | None, option: str) -> None:
    """Refuse a file that could not be written before the work is done, not after it."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise InvalidArgument(f"--{option} {str(path)!r} must be a file in a folder that exists")
    check_appendable(path, option)


def check_appendable(path: Path | None, option: str) -> None:
    """The same for a file whose folder is made if it is missing: it is opened, and what that made is removed."""
    if path is None:
        return
    if path.is_dir():
        raise InvalidArgument(f"--{option} {str(path)!r} is a folder; give a file to append to")
    missing = [p for p in (path, *path.parents) if not p.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise InvalidArgument(f"--{option} {str(path)!r} cannot be written: {error.strerror}") from error
    finally:
        for entry in missing:  # the file first, then the folders, the innermost first
            with contextlib.suppress(OSError):
                entry.unlink() if entry.is_file() else entry.rmdir()


def check_page(path: Path | None, option: str) -> None:
    """The same for an HTML page, which is written next to its place and then moved there, and whose charts must be possible too."""
    from halfbyte_lab.measure import charts

    check_writable(path, option)
    if path is None:
        return
    if path.exists() and not path.is_file():  # a page that took the place of /dev/null would break the machine
        raise InvalidArgument(f"--{option} {str(path)!r} is no ordinary file; give a file for the page")
    try:
        tempfile.TemporaryFile(dir=path.absolute().parent).close()
    except OSError as error:
        raise InvalidArgument(f"--{option} {str(path)!r} cannot be written: {error.strerror}") from error
    charts.check_installed()


def token_counts(text: str) -> list[int]:
    """The same between commas."""
    return [token_count(word) for word in words(text)]


def pairs(text: str, separator: str, option: str) -> list[tuple[int, int]]:
    """Pairs of whole numbers, such as 32/8,8/1, between commas."""
    try:
        return [(whole_number(a), whole_number(b)) for a, b in (word.split(separator) for word in words(text))]
    except ValueError:
        raise InvalidArgument(f"--{option} {short(text)}; give pairs of whole numbers below 2^31, such as 32{separator}8") from None
