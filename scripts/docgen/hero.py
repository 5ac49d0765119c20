"""The chart at the head of the README: speed-up over 16 bits, one picture for light pages and one for dark ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from docgen.sources import Record, attention, linear

#: x of the first pixel of a bar, pixels for 1x, and pixels of a row.
LEFT, UNIT, ROW, WIDTH = 178, 138, 26, 740


@dataclass(frozen=True)
class Theme:
    """Colours of one picture: text, quiet text, the line at 1x, and the three series."""

    ink: str
    quiet: str
    line: str
    series: tuple[str, str, str]


THEMES = {
    "light": Theme("#1f2328", "#59636e", "#c4ccd4", ("#7aa7e8", "#1d5fbf", "#12805c")),
    "dark": Theme("#f0f6fc", "#9198a1", "#4a525b", ("#5b8fd9", "#9cc4ff", "#4cc38a")),
}


@dataclass(frozen=True)
class Bar:
    label: str
    speedup: float
    series: int


def _speedup(measured: Sequence[Record], case: str, formats: str) -> float:
    """Time of the fastest 16-bit kernel of the same run over ours."""
    (found,) = [r for r in measured if r.case == case and r.formats == formats]
    if not found.peer_seconds or not found.seconds:
        raise SystemExit(f"the record of {case!r}, {formats} has no 16-bit time to compare with")
    return float(found.peer_seconds / found.seconds)


def sections() -> list[tuple[str, list[Bar]]]:
    """The bars, under the heading of what they are compared with."""
    cached = [
        Bar(f"{name}, batch {batch}", _speedup(attention(), f"batch {batch} x 8,192", formats), series)
        for formats, name, series in (("int8", "INT8 cache", 0), ("int4", "INT4 cache", 1))
        for batch in (32, 128, 512)
    ]
    case = "8192 x 8192, {} row{}"
    weights = [
        Bar(f"INT4 weights, M = {m}", _speedup(linear(), case.format(m, "s" * (m > 1)), "int4_sym_g128"), 2) for m in (1, 16, 64)
    ]
    return [
        ("Decode attention over the fastest bf16 kernel", cached),
        ("Linear layer over cuBLAS bf16", weights),
    ]


def conditions() -> tuple[str, str]:
    """Where the figures were measured, in two lines of small print."""
    where = attention()[0].environment
    return (
        f"{where.device}, torch {where.versions['torch'].split('+')[0]}, Triton {where.versions['triton']}.",
        "Attention: 8 query heads on 1 KV head of 128, 8,192 tokens. Linear: 8192 x 8192.",
    )


def description() -> str:
    """The chart in words, for those who do not see it."""
    said = [f"{bar.label}: {bar.speedup:.2f}x" for _, bars in sections() for bar in bars]
    return "Speed-up over 16 bits. " + "; ".join(said) + ". " + " ".join(conditions())


def draw(theme: Theme) -> str:
    """One SVG with a transparent background."""
    font = 'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
    parts: list[str] = []
    y = 10
    for heading, bars in sections():
        y += 24
        parts.append(f'<text x="12" y="{y}" fill="{theme.ink}" font-size="15" font-weight="600">{escape(heading)}</text>')
        y += 12
        top = y
        for bar in bars:
            long, middle = bar.speedup * UNIT, y + ROW / 2 + 5
            parts.append(
                f'<text x="{LEFT - 12}" y="{middle}" fill="{theme.ink}" font-size="14" text-anchor="end">{bar.label}</text>'
            )
            parts.append(
                f'<rect x="{LEFT}" y="{y + 4}" width="{long:.1f}" height="{ROW - 8}" rx="3" fill="{theme.series[bar.series]}"/>'
            )
            parts.append(
                f'<text x="{LEFT + long + 8:.1f}" y="{middle}" fill="{theme.ink}" font-size="14">{bar.speedup:.2f}x</text>'
            )
            y += ROW
        parts.append(
            f'<line x1="{LEFT + UNIT}" x2="{LEFT + UNIT}" y1="{top}" y2="{y}" stroke="{theme.line}" stroke-dasharray="4 3"/>'
        )
        parts.append(
            f'<text x="{LEFT + UNIT}" y="{y + 13}" fill="{theme.quiet}" font-size="12" text-anchor="middle">16 bits</text>'
        )
        y += 16
    for line in conditions():
        y += 18
        parts.append(f'<text x="12" y="{y}" fill="{theme.quiet}" font-size="12">{escape(line)}</text>')
    size = f'width="{WIDTH}" height="{y + 12}" viewBox="0 0 {WIDTH} {y + 12}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img">\n' + "\n".join(parts) + "\n</svg>\n"


def pictures() -> dict[str, str]:
    """The SVGs by path."""
    return {f"docs/assets/speedup-{name}.svg": draw(theme) for name, theme in THEMES.items()}


def picture_tag(folder: str) -> str:
    """Markup that shows the picture that fits the page, on GitHub and on the site."""
    alt = escape(description())
    return (
        "<picture>\n"
        f'  <source media="(prefers-color-scheme: dark)" srcset="{folder}/speedup-dark.svg">\n'
        f'  <img alt="{alt}" src="{folder}/speedup-light.svg" width="{WIDTH}">\n'
        "</picture>"
    )
