"""A terminal's tables. Names are never cut; columns that do not fit are left out and named below the table."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

#: Between two columns, and the width of text below which columns of numbers are left out.
_GAP, _TEXT_WIDTH = 2, 16


def show_table(
    console: Console,
    title: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    text_columns: int,
    wide: bool | None = None,
) -> None:
    """Print a table whose first `text_columns` columns hold text, which folds at spaces, and the others numbers, which never fold.

    wide: the option --wide of the command, None if it has none. False leaves out the last columns of numbers that do not fit, True
    prints lines as long as they need. An empty row draws a line.
    """
    columns = [[row[i] for row in rows if row] for i in range(len(headers))]
    text = [_longest([h, *cells], str.splitlines) for h, cells in zip(headers[:text_columns], columns, strict=False)]
    parts = [str.split] * text_columns + [str.splitlines] * (len(headers) - text_columns)
    least = [max(_longest([h], str.split), _longest(c, cut)) for h, c, cut in zip(headers, columns, parts, strict=True)]
    room = sum(text) + sum(least[text_columns:]) + _GAP * len(headers) if wide else console.width
    widths = _fitting(text, least, room, room if wide is False else 2**31)
    table = Table(title=title and escape(title), title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    table.show_edge, table.padding = False, (0, _GAP - 1, 0, 0)  # and a column of the box
    for i, width in enumerate(widths):
        header = headers[i] if i < text_columns else textwrap.fill(headers[i], width)
        table.add_column(escape(header), justify="left" if i < text_columns else "right", width=width, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row[: len(widths)])) if row else table.add_section()
    before, console.width = console.width, max(console.width, room)
    console.print(table)
    console.width = before
    if left := headers[len(widths) :]:
        console.print(f"--wide also shows: {', '.join(left)}", markup=False, highlight=False)


def _longest(texts: Sequence[str], cut: Callable[[str], list[str]]) -> int:
    """The length of the longest part of texts."""
    return max((len(part) for text in texts for part in cut(text)), default=0)


def _fitting(text: Sequence[int], least: Sequence[int], room: int, most: int) -> list[int]:
    """Widths of the columns that are shown: text, where words longer than half the room fold, then numbers up to `most` in all."""
    names = len(text)
    least = [min(width, room // 2) if i < names else width for i, width in enumerate(least)]
    numbers = list(least[names:])
    base = sum(max(low, min(width, _TEXT_WIDTH)) for width, low in zip(text, least, strict=False)) + _GAP * names
    while len(numbers) > 1 and base + sum(numbers) + _GAP * len(numbers) > most:
        numbers.pop()
    widths, spare = list(text), room - sum(numbers) - _GAP * (names + len(numbers))
    while sum(widths) > spare and (loose := [i for i in range(names) if widths[i] > least[i]]):
        widths[max(loose, key=widths.__getitem__)] -= 1
    return widths + numbers
