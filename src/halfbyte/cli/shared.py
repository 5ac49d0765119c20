"""What the commands share: printing, and reading lists from options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Json = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of tables.")]


def human_bytes(value: float) -> str:
    """1.5e9 as "1.50 GB"; powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def console(stderr: bool = False) -> Console:
    """A rich console; without colour and at a fixed width in a file or a pipe."""
    from rich.console import Console

    made = Console(stderr=stderr)
    return made if made.is_terminal else Console(width=160, stderr=stderr)


def print_table(table: Table) -> None:
    """A rich table on stdout."""
    console().print(table)


def check_writable(path: Path | None, option: str) -> None:
    """Refuse a file that could not be written before the work is done, not after it."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise InvalidArgument(f"--{option} {str(path)!r} must be a file in a folder that exists")


def check_page(path: Path | None, option: str) -> None:
    """The same for an HTML page, whose charts must be possible too."""
    check_writable(path, option)
    if path is not None:
        from halfbyte.bench.charts import check_installed

        check_installed()


def words(text: str) -> list[str]:
    """The parts of a list between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def integers(text: str, option: str) -> list[int]:
    """Whole numbers between commas."""
    try:
        return [int(word) for word in words(text)]
    except ValueError:
        raise InvalidArgument(f"--{option} {text!r}; give whole numbers separated by commas") from None


def pairs(text: str, separator: str, option: str) -> list[tuple[int, int]]:
    """Pairs of whole numbers, such as 32/8,8/1, between commas."""
    try:
        return [(int(a), int(b)) for a, b in (word.split(separator) for word in words(text))]
    except ValueError:
        raise InvalidArgument(f"--{option} {text!r}; give pairs of whole numbers, such as 32{separator}8") from None
