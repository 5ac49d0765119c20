"""How charts look: colors, the frame, and the title above it. `charts.py` draws with it.

matplotlib lays charts out in stand-in colors; `finish` replaces those by the variables of the report's style sheet (--ink, --quiet,
--line, --s1 ... --s7; where a page has none, by the colors for light pages), text stays text, and ids are made unique so that
several charts can share a page. A thing has one color on all charts (`THINGS`); the seven are told apart by color-blind eyes too.
"""

from __future__ import annotations

import hashlib
import html
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from halfbyte.errors import require

# Stand-ins: colors that nothing else in the SVG has.
INK, QUIET, LINE = "#010101", "#020202", "#030303"
SERIES = tuple(f"#0{n}0a0b" for n in range(1, 8))
BLUE, VERMILION, GREEN, PURPLE, ORANGE, GRAY, SKY = SERIES
_VARIABLES = {INK: "--ink", QUIET: "--quiet", LINE: "--line"} | {c: f"--s{n}" for n, c in enumerate(SERIES, 1)}
#: The palette of Okabe and Ito on light pages, and lighter shades of it on dark ones.
LIGHT = {"--ink": "#23262b", "--quiet": "#5d636c", "--line": "#dcdcd6", "--s1": "#0072b2", "--s2": "#d55e00", "--s3": "#009e73"}
LIGHT |= {"--s4": "#b8578f", "--s5": "#e69f00", "--s6": "#7b8490", "--s7": "#56b4e9"}
DARK = {"--ink": "#dfe2e7", "--quiet": "#99a1ac", "--line": "#343940", "--s1": "#4ba3dc", "--s2": "#f0803c", "--s3": "#2fc79b"}
DARK |= {"--s4": "#dd8fbd", "--s5": "#f2bb4a", "--s6": "#a3adb9", "--s7": "#9bd6f7"}
_MARKERS = "osD^vP"
#: "--" comes last: it means something of its own in some charts.
_DASHES: tuple[Any, ...] = ("-", "-.", (0, (1, 1.2)), (0, (5, 1, 1, 1, 1, 1)), (0, (3, 3)), "--")

#: The color of a thing: that of the first pattern which its name holds.
THINGS = {
    "roofline": INK,
    "published|quoted|fbgemm|flashinfer|humming|tinygemm|vllm|dequantize": VERMILION,
    "16 bits|16-bit|bf16|fp16|cublas|torch|other|gaps": GRAY,
    "attention": BLUE,
    "append": GREEN,
    "norm": PURPLE,
    "activation": SKY,
    "recurrence": VERMILION,
    "linear|product|projection|weights|nf4|fp4": ORANGE,
    "int4_channel|per-channel": PURPLE,
    "int4_g|int4.*groups|rotated": SKY,
    "int4|all layers alike|gluon": BLUE,
    "int8.*(group|_g)|triton": PURPLE,
    "int8.*per tensor": SKY,
    "int8.*per token(?! and)": VERMILION,
    "int8|kv cache": GREEN,
    "fp8": PURPLE,
}


def color_of(name: str) -> str | None:
    """The color of a thing by its name; None where it has no color of its own."""
    return next((color for pattern, color in THINGS.items() if re.search(pattern, name, re.IGNORECASE)), None)


def looks_of(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Color, marker and dashes of each series. Things that share a color differ in the other two."""
    named = {name: color_of(name) for name in names}
    free = [color for color in SERIES if color not in named.values()] or list(SERIES)
    others = [name for name in names if named[name] is None]
    colors = {name: color or free[others.index(name) % len(free)] for name, color in named.items()}
    looks: dict[str, dict[str, Any]] = {}
    for number, (name, color) in enumerate(colors.items()):
        turn = sum(look["color"] == color for look in looks.values())
        looks[name] = {"color": color, "marker": _MARKERS[(number + number // 6) % 6], "ls": _DASHES[turn % 6]}
    return looks


#: What charts of a `with` block say of the machine.
_machine = ContextVar("machine", default="")


@contextmanager
def measured_on(machine: str) -> Iterator[None]:
    """Within, the subtitle of every chart begins with this: the GPU of the records, or where else its figures come from."""
    token = _machine.set(machine)
    yield
    _machine.reset(token)


def check_installed() -> None:
    """Raise `MissingPackage` if charts cannot be drawn; call it before hours of measuring."""
    require("matplotlib", "a chart")


def scales(ax: Any, log_x: bool, log_y: bool) -> None:
    """Logarithmic axes where they are wanted."""
    if log_x:
        ax.set_xscale("log")
    if log_y:
        ax.set_yscale("log")


def plain_logs(ax: Any) -> None:
    """Logarithmic axes with ticks at 1, 2 and 5, even ones where the axis is short, that read as numbers; chosen ticks stay."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    for axis in (ax.xaxis, ax.yaxis):
        if axis.get_scale() != "log":
            continue
        axis.set_minor_formatter(NullFormatter())
        if not isinstance(axis.get_major_locator(), FixedLocator):
            low, high = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if high > 5 * low else MaxNLocator(5))
            text = "{:.0e}" if 0 < low < 1e-3 else "{:,g}"  # all ticks of an axis in one way
            axis.set_major_formatter(FuncFormatter(lambda value, _, text=text: text.format(value)))


def frame(ax: Any, x_label: str, y_label: str, columns: int = 0) -> None:
    """Labels, spines, ticks and grid of a chart, and the legend below it in at most so many columns; 0: none."""
    plain_logs(ax)
    ax.set_xlabel(x_label, color=QUIET, fontsize=10.5)
    ax.set_ylabel(y_label, color=QUIET, fontsize=10.5)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(LINE)
    ax.tick_params(which="both", color=LINE, labelcolor=QUIET, labelsize=10)
    ax.grid(color=LINE, lw=0.6, alpha=0.7)
    ax.set_axisbelow(True)
    if columns:
        handles, labels = ax.get_legend_handles_labels()
        legend_below(ax.figure, handles, labels, columns)


#: Points of a legend's entry beside its label, of a character, and of a chart's width: browsers' fonts may be wider than ours.
_ENTRY, _CHARACTER, _LEGEND = 54.0, 6.4, 530.0


def _fits(labels: Sequence[str], rows: int) -> bool:
    """Whether a legend of so many rows, filled column by column, is no wider than a chart."""
    columns = [labels[i : i + rows] for i in range(0, len(labels), rows)]
    return sum(_ENTRY + _CHARACTER * max(map(len, column)) for column in columns) <= _LEGEND


def legend_below(fig: Any, handles: Sequence[Any], labels: Sequence[str], columns: int) -> None:
    """Below the plot, where it can hide no data, in at most so many columns."""
    rows = next((n for n in range(-(-len(labels) // columns), len(labels)) if _fits(labels, n)), len(labels))
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": -(-len(labels) // rows)}
    fig.legend(handles, labels, **place, frameon=False, fontsize=10, labelcolor=INK, handlelength=2.6)


#: Whether charts are drawn. See `described`.
drawing = ContextVar("drawing", default=True)


@contextmanager
def described() -> Iterator[None]:
    """Within, a chart is an <svg> element with its description alone: what is written about charts needs no picture of them."""
    token = drawing.set(False)
    yield
    drawing.reset(token)


class Done:
    """Where a finished chart ends up once its `with` block is over."""

    svg: str = ""


@contextmanager
def figure_with(title: str, height: float, unit: str) -> Iterator[tuple[Any, Any, Done]]:
    """As `figure_of`, with one pair of axes."""
    with figure_of(title, height, (1, 1), unit) as (fig, (ax,), done):
        yield fig, ax, done


@contextmanager
def figure_of(title: str, height: float, grid: tuple[int, int], unit: str) -> Iterator[tuple[Any, list[Any], Done]]:
    """A figure 7.6 inches wide and its axes, row by row; on leaving, `done.svg` holds the element: its title, which screen readers
    read, the machine and the unit of its values below.
    """
    check_installed()
    import matplotlib
    from matplotlib.figure import Figure

    options = {
        "svg.fonttype": "none",
        "svg.hashsalt": title,
        "font.family": "DejaVu Sans",
        "axes.unicode_minus": True,
    }
    with matplotlib.rc_context(options):
        # Figure without pyplot: no global state, no display, nothing to close.
        fig = Figure(figsize=(7.6, height), layout="constrained")
        done = Done()
        yield fig, list(fig.subplots(*grid, squeeze=False, sharey=True).flat), done
        if not drawing.get():
            done.svg = finish('<svg viewBox="0 0 0 0">', title, "")
            return
        buffer = io.StringIO()
        fig.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        done.svg = finish(buffer.getvalue(), title, "; ".join(text for text in (_machine.get(), unit) if text and text != title))


#: Points that the title and its subtitle take above a chart.
_HEAD = 40


_FONT = "var(--font, system-ui, sans-serif)"


def _css(variable: str) -> str:
    """A color of the page, or that for light pages where it has none."""
    return f"var({variable}, {LIGHT[variable]})"


def finish(svg: str, title: str, subtitle: str) -> str:
    """matplotlib's file as an element for the page: colors to variables, the page's font, unique ids, a title and a subtitle above,
    no prologue or metadata.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, _css(variable))
    svg = re.sub(r"(font: (?:[\w.]+ )*[\d.]+px) [^;\"]+", rf"\1 {_FONT}", svg)
    svg = re.sub(r"font-family: [^;\"]+", f"font-family: {_FONT}", svg)
    unique = "fig" + hashlib.sha256(svg.encode()).hexdigest()[:8]
    svg = re.sub(r'\bid="', f'id="{unique}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{unique}-", svg)
    label = html.escape(title, quote=True)

    def head(match: re.Match[str]) -> str:
        left, top, width, height = map(float, match[1].split())
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="{left:g} {top - _HEAD:g} {width:g} {height + _HEAD:g}" role="img" aria-label="{label}">'
            f"<title>{label}</title>"
            f'<text x="7" y="-22" style="font: bold 12.5px {_FONT}; fill: {_css("--ink")}">{label}</text>'
            f'<text x="7" y="-6" style="font: 10.5px {_FONT}; fill: {_css("--quiet")}">{html.escape(subtitle)}</text>'
        )

    return re.sub(r'<svg[^>]*?viewBox="([^"]*)"[^>]*>', head, svg, count=1)


def css(colors: dict[str, str]) -> str:
    """The colors as declarations of a style sheet."""
    return " ".join(f"{variable}: {color};" for variable, color in colors.items())


def as_image(svg: str) -> str:
    """A chart as a file of its own, with the colors that it else takes from the page."""
    dark = f"@media (prefers-color-scheme: dark) {{ svg {{ {css(DARK)} }} }}"
    style = f"<style>\nsvg {{ --font: system-ui, sans-serif; {css(LIGHT)} }}\n{dark}\n</style>"
    return svg.replace("</title>", f"</title>\n{style}", 1).rstrip() + "\n"
