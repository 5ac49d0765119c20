"""One HTML page for the demo and the bench: self-contained, opens offline, follows dark mode, readable on a phone.

`Report` collects text, tables and figures and writes them atomically; everything it is given is escaped. Figures come from
`halfbyte_lab.measure.charts` (matplotlib, extra `bench`), or are any SVG the caller trusts.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from halfbyte.errors import check
from halfbyte.paths import write_whole
from halfbyte_lab.measure.chart_style import DARK, LIGHT, css

#: What a table shows in one place.
Cell = str | int | float | None

#: A table of more rows scrolls in a window of its own.
_MANY_ROWS = 60
#: What an empty cell shows.
_DASH = "\u2013"
#: Words in the place of a figure.
_NO_FIGURE = ("refused", "skipped", "none", "does not fit")
#: Stands for the contents until all sections are known; no part that holds text can be like it.
_CONTENTS = "<contents>"


class Report:
    """A page under construction. Each method adds one part and returns the report, so that calls can be chained."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title = title
        self._subtitle = subtitle
        self._parts: list[str] = []
        self._sections: list[str] = []

    def heading(self, text: str) -> Report:
        """A section heading, which is listed in the contents."""
        self._sections.append(text)
        return self._add(f'<h2 id="section-{len(self._sections)}">{_escape(text)}</h2>')

    def contents(self) -> Report:
        """Links to all sections of the page, wherever this is called."""
        return self._add(_CONTENTS)

    def text(self, *paragraphs: str) -> Report:
        """Paragraphs of plain text, in which no number wraps at the sign of its exponent."""
        texts = (_EXPONENT.sub(r'<span class="number">\g<0></span>', _escape(p)) for p in paragraphs)
        return self._add("\n".join(f"<p>{p}</p>" for p in texts))

    def facts(self, facts: Mapping[str, Cell]) -> Report:
        """A row of figures that matter, each under its name: {"KV memory": "3.6x smaller"}."""
        items = (f"<div><dt>{_escape(k)}</dt><dd>{_escape(_show(v))}</dd></div>" for k, v in facts.items())
        return self._add(f'<dl class="facts">{"".join(items)}</dl>')

    def cards(self, cards: Mapping[str, Mapping[str, Cell]]) -> Report:
        """A row of cards, each a title with facts: {"INT8 cache": {"size": "1.9x smaller"}}."""
        items = (
            f"<section><h3>{_escape(title)}</h3><dl>"
            + "".join(f"<dt>{_escape(k)}</dt><dd>{_escape(_show(v))}</dd>" for k, v in facts.items())
            + "</dl></section>"
            for title, facts in cards.items()
        )
        return self._add(f'<div class="cards">{"".join(items)}</div>')

    def table(
        self,
        headers: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        caption: str = "",
        align: str = "",
        hints: Mapping[tuple[int, str], str] | None = None,
    ) -> Report:
        """A table that sorts by a click on a header; one of many rows scrolls. `hints`: what a pointer shows over a (column, text).

        `align` has one letter a column, "l" or "r"; by default columns whose cells are all numbers, or begin like one, go right.
        None is shown as a dash and sorts last.
        """
        for number, row in enumerate(rows):
            check(len(row) == len(headers), f"rows[{number}] has {len(row)} cells for {len(headers)} headers")
        align = align or "".join("r" if _numeric(rows, c) else "l" for c in range(len(headers)))
        check(
            len(align) == len(headers) and set(align) <= {"l", "r"},
            f"align={align!r}; give 'l' or 'r' for {len(headers)} columns",
        )
        head = "".join(
            f'<th scope="col" class="{a}"><button type="button">{_escape(h)}</button></th>'
            for a, h in zip(align, headers, strict=True)
        )
        decimals = [_decimals(rows, c) for c in range(len(headers))]
        tooltips = ([(hints or {}).get((c, str(x)), "") for c, x in enumerate(row)] for row in rows)
        lines = (map(_cell, row, align, decimals, tips) for row, tips in zip(rows, tooltips, strict=True))
        body = "\n".join(f"<tr>{''.join(line)}</tr>" for line in lines)
        kind = "table long" if len(rows) > _MANY_ROWS else "table"
        title = f"<figcaption>{_escape(caption)}</figcaption>" if caption else ""
        return self._add(
            f'<figure class="{kind}">{title}<div class="scroll"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>\n{body}\n</tbody></table></div></figure>"
        )

    def figure(self, svg: str, caption: str = "") -> Report:
        """An SVG picture as it is (trusted: it is not escaped) with a caption below its heading."""
        check(svg.lstrip().startswith("<svg"), f"svg begins with {svg.lstrip()[:20]!r}; pass an <svg> element")
        title = f"<figcaption>{_escape(caption)}</figcaption>" if caption else ""
        return self._add(f'<figure class="chart">{title}<div class="scroll">{svg}</div></figure>')

    def form(self, trusted: str) -> Report:
        """A form with its script, as it is (trusted: it is not escaped), above all other parts."""
        self._parts.insert(0, trusted)
        return self

    def folded(self, summary: str, lines: Sequence[str]) -> Report:
        """A list of lines behind a summary, closed until it is clicked."""
        items = "".join(f"<li>{_escape(line)}</li>" for line in lines)
        return self._add(f"<details><summary>{_escape(summary)}</summary><ul>{items}</ul></details>")

    def code(self, block: str, caption: str = "") -> Report:
        """A block of preformatted text: a command, or what a model wrote."""
        title = f"<figcaption>{_escape(caption)}</figcaption>" if caption else ""
        return self._add(f'<figure class="code">{title}<pre><code>{_escape(block)}</code></pre></figure>')

    def to_html(self) -> str:
        """The whole page."""
        links = (f'<a href="#section-{i}">{_escape(name)}</a>' for i, name in enumerate(self._sections, 1))
        contents = f'<nav aria-label="Contents">{" ".join(links)}</nav>'
        subtitle = f'<p class="subtitle">{_escape(self._subtitle)}</p>' if self._subtitle else ""
        return (
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<meta name="color-scheme" content="light dark">\n<title>{_escape(self._title)}</title>\n'
            f"<style>{_COLORS}{_CSS}</style>\n</head>\n<body>\n<main>\n<header><h1>{_escape(self._title)}</h1>{subtitle}</header>\n"
            + "\n".join(contents if part == _CONTENTS else part for part in self._parts)
            + f"\n</main>\n<script>{_JS}</script>\n</body>\n</html>\n"
        )

    def write(self, path: Path | str) -> Path:
        """Write the page to `path`; a reader sees the old file or the whole new one, never a part."""
        return write_whole(Path(path), self.to_html())

    def _add(self, part: str) -> Report:
        self._parts.append(part)
        return self


#: A number such as 1.4e-05.
_EXPONENT = re.compile(r"\b\d[\d.]*e-\d+")


def _escape(text: str) -> str:
    return html.escape(text, quote=True)


def _show(value: Cell, decimals: int | None = None) -> str:
    """A cell as text: a float with so many decimals, or four significant digits; an int with its thousands separated."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return _DASH
    if isinstance(value, float) and decimals is not None:
        return f"{value:,.{decimals}f}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _decimals(rows: Sequence[Sequence[Cell]], column: int) -> int | None:
    """Decimals that give a column of floats one look, its largest four digits; None when their sizes differ too much."""
    sizes = [abs(v) for row in rows if isinstance(v := row[column], float) and v and math.isfinite(v)]
    if not sizes or max(sizes) / min(sizes) >= 1e3:
        return None
    return max(0, 3 - math.floor(math.log10(max(sizes))))


def _cell(value: Cell, align: str, decimals: int | None, hint: str) -> str:
    title = f' title="{_escape(hint)}"' if hint else ""
    key = f' data-sort="{value!r}"' if isinstance(value, int | float) and not isinstance(value, bool) else ""
    return f'<td class="{align}"{key}{title}>{_escape(_show(value, decimals))}</td>'


def _numeric(rows: Sequence[Sequence[Cell]], column: int) -> bool:
    """Whether every cell of a column that holds something is a number, a text that begins like one, or stands for one."""
    cells = [row[column] for row in rows if row[column] not in (None, "", _DASH, *_NO_FIGURE)]
    return bool(cells) and all(not isinstance(c, str) or c.lstrip("+-\u2212<>~ ")[:1].isdigit() for c in cells)


_COLORS = f":root {{ {css(LIGHT)} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {css(DARK)} }} }}"
_CSS = """
:root { color-scheme: light dark; --paper: #fdfdfc; --panel: #f4f4f1;
  --shade: rgb(0 0 0 / .16);
  --accent: #0a68a5;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181c; --panel: #1f2227; --shade: rgb(255 255 255 / .16);
    --accent: #8db6e8; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 var(--font); -webkit-text-size-adjust: 100%; }
main { max-width: 84rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
header { border-bottom: 1px solid var(--line); margin-bottom: 1.5rem; padding-bottom: .75rem; }
h1 { font-size: 1.75rem; line-height: 1.2; letter-spacing: -.01em; margin: 0 0 .35rem; }
h2 { font-size: 1.2rem; line-height: 1.3; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1rem; line-height: 1.3; margin: 1.75rem 0 .4rem; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; font-size: .9375rem; margin: 1rem 0; }
a { color: var(--accent); }
details { margin: 1rem 0; font-size: .875rem; }
summary { cursor: pointer; color: var(--quiet); }
details ul { padding-left: 1.1rem; margin: .5rem 0; }
li { margin: .2rem 0; overflow-wrap: anywhere; }
p { max-width: 44rem; margin: .6rem 0; overflow-wrap: anywhere; }
.subtitle { color: var(--quiet); margin: 0; max-width: none; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; margin: 1.25rem 0; }
.facts div { background: var(--panel); border-radius: 8px; padding: .7rem .9rem; }
.facts dt { color: var(--quiet); font-size: .8125rem; }
.facts dd { margin: 0; font-size: 1.2rem; font-weight: 600; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
figure { margin: 1.5rem 0; }
figcaption { font-size: .875rem; color: var(--quiet); margin-bottom: .5rem; max-width: 44rem; }
/* A shade at an edge behind which there is more; the first two layers move with the content and cover it at the end. */
.scroll { overflow-x: auto; background:
  linear-gradient(90deg, var(--paper) 40%, transparent) 0 0 / 2.5rem 100% no-repeat local,
  linear-gradient(270deg, var(--paper) 40%, transparent) 100% 0 / 2.5rem 100% no-repeat local,
  linear-gradient(90deg, var(--shade), transparent) 0 0 / .8rem 100% no-repeat scroll,
  linear-gradient(270deg, var(--shade), transparent) 100% 0 / .8rem 100% no-repeat scroll; }
.long .scroll { max-height: 36rem; overflow: auto; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); gap: .75rem; margin: 1.25rem 0; }
.cards section { background: var(--panel); border-radius: 8px; padding: .8rem 1rem; }
.cards h3 { margin: 0 0 .4rem; }
.cards dl { margin: 0; } .cards dt { color: var(--quiet); font-size: .8125rem; }
.cards dd { margin: 0 0 .4rem; font-weight: 600; font-variant-numeric: tabular-nums; }
td[title] { cursor: help; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums; }
.number { white-space: nowrap; }
th, td { padding: .4rem .4rem; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { position: sticky; top: 0; z-index: 1; background: var(--paper); box-shadow: inset 0 -2px var(--line);
  border-bottom: 0; vertical-align: bottom; padding: 0; }
td:not(.r) { white-space: normal; min-width: 6.5rem; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper); min-width: 9.5rem; }
th:first-child { z-index: 2; }
th button { all: unset; display: block; box-sizing: border-box; width: 100%; padding: .4rem .4rem; cursor: pointer;
  font-weight: 600; color: var(--quiet); }
th button:hover { color: var(--ink); }
th button:focus-visible { outline: 2px solid var(--accent); outline-offset: -2px; }
th[aria-sort] button { color: var(--ink); }
th[aria-sort="ascending"] button::after { content: " \\2191"; }
th[aria-sort="descending"] button::after { content: " \\2193"; }
.r, .r button { text-align: right; }
tbody tr:hover td { background: var(--panel); }
.chart svg { display: block; width: 100%; min-width: 30rem; max-width: 48rem; height: auto; }
pre { margin: 0; padding: .8rem 1rem; background: var(--panel); border-radius: 8px; overflow-x: auto;
  font: .8125rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
@media (max-width: 40rem) { .chart svg { min-width: 0; }
  main { padding: 1.5rem 1rem 3rem; } h1 { font-size: 1.45rem; } .facts dd { font-size: 1.05rem; }
  th button, td { padding: .4rem .5rem; } td { font-size: .8125rem; } th:first-child { min-width: 7rem; }
  td:first-child { max-width: 45vw; white-space: normal; min-width: 7rem; } }
@media print { .chart svg { max-width: 100%; }
  .scroll, .long .scroll { overflow: visible; max-height: none; } nav { display: none; } }
"""

# Sorting: numbers by their value (data-sort, or the number a text begins with), text by its letters, empty cells always last.
_JS = """
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.querySelectorAll("th")];
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    const key = row => {
      const cell = row.cells[column], text = cell.dataset.sort ?? cell.textContent.trim().replace("\\u2212", "-").replace(/,/g, "");
      const number = parseFloat(text.replace(/^[<>~ ]+/, ""));
      return text === "" || text === "\\u2013" ? null : Number.isNaN(number) ? text : number;
    };
    const order = (a, b) => a === null || b === null ? (a === null) - (b === null)
      : (up ? 1 : -1) * (typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1);
    const rows = [...table.tBodies[0].rows].map(row => [key(row), row]).sort((a, b) => order(a[0], b[0]));
    table.tBodies[0].append(...rows.map(pair => pair[1]));
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
  }));
}
"""
