"""Charts as inline SVG that follow the page's colors, so that they turn dark with it.

matplotlib (extra `bench`) lays them out in stand-in colors; `_finish` replaces those by the variables of the report's style sheet
(--ink, --quiet, --line, --s1 ... --s6), text stays text, and ids are made unique so that several charts can share a page.
"""

from __future__ import annotations

import hashlib
import html
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from halfbyte.errors import check, require
from halfbyte_lab.measure.labels import Box, place_labels

# Stand-ins: colors that nothing else in the SVG has.
_INK, _QUIET, _LINE = "#010101", "#020202", "#030303"
_SERIES = tuple(f"#0{n}0a0b" for n in range(1, 7))
_VARIABLES = {_INK: "--ink", _QUIET: "--quiet", _LINE: "--line"} | {c: f"--s{n}" for n, c in enumerate(_SERIES, 1)}
_MARKERS = "osD^vP"
#: "--" comes last: it means something of its own in some charts.
_DASHES: tuple[Any, ...] = ("-", "-.", (0, (1, 1.2)), (0, (5, 1, 1, 1, 1, 1)), (0, (3, 3)), "--")


def _look(number: int) -> dict[str, Any]:
    """Colour, marker and dashes of a series by its place: each of 36 has a look of its own."""
    turn = number // 6
    return {"color": _SERIES[number % 6], "marker": _MARKERS[(number + turn) % 6], "ls": _DASHES[turn % 6]}


@dataclass(frozen=True)
class Point:
    """One labeled point of a scatter chart; points of the same `series` share a color and a marker."""

    label: str
    x: float
    y: float
    series: str = ""


def check_installed() -> None:
    """Raise `MissingPackage` if charts cannot be drawn; call it before hours of measuring."""
    require("matplotlib", "a chart")


def scatter(
    points: Sequence[Point], *, x_label: str, y_label: str, title: str = "", log_x: bool = False, log_y: bool = False
) -> str:
    """Quality against bytes: labeled points whose labels do not lie on each other. Returns an <svg> element."""
    check(len(points) > 0, "points is empty; a chart needs at least one")
    for point in points:
        check(not log_x or point.x > 0, f"point {point.label!r} has x={point.x}; a logarithmic axis needs x > 0")
        check(not log_y or point.y > 0, f"point {point.label!r} has y={point.y}; a logarithmic axis needs y > 0")
    with _figure(title or f"{y_label} against {x_label}", 4.8) as (fig, ax, done):
        names = list(dict.fromkeys(p.series for p in points))
        for number, name in enumerate(names):
            mine = [p for p in points if p.series == name]
            ax.plot([p.x for p in mine], [p.y for p in mine], **_look(number) | {"ls": ""}, ms=7, label=name or None)
        _scales(ax, log_x, log_y)
        _frame(ax, x_label, y_label, title, legend=len(names) > 1)
        ax.margins(0.12)
        _label_points(fig, ax, points)
    return done.svg


def bars(values: Mapping[str, float], *, x_label: str, title: str = "", shown: Mapping[str, str] | None = None) -> str:
    """Horizontal bars from the top down, each with its value (`shown` replaces the text). Returns an <svg> element."""
    check(len(values) > 0, "values is empty; a chart needs at least one")
    with _figure(title or x_label, 0.9 + 0.34 * len(values)) as (_, ax, done):
        names = list(values)
        container = ax.barh(range(len(names)), list(values.values()), color=_SERIES[0], height=0.62)
        labels = ax.bar_label(
            container, [(shown or {}).get(n, f"{values[n]:.4g}") for n in names], padding=4, color=_INK, fontsize=10
        )
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        _frame(ax, x_label, "", title, legend=False)
        ax.grid(axis="y", visible=False)
        # Browsers set the values in the system's font, which may be wider than matplotlib's.
        ax.margins(x=max(0.16, 0.024 * max(len(text.get_text()) for text in labels)))
        ax.xaxis.set_major_formatter("{x:,g}")
        ax.tick_params(axis="y", labelcolor=_INK, labelsize=10.5)
    return done.svg


def marked_bars(
    values: Mapping[str, float], marks: Mapping[str, float], *, x_label: str, title: str = "", mark_label: str = "target"
) -> str:
    """Horizontal bars from the top down, each with a tick where it should reach (`marks`, by the same names). An <svg> element."""
    check(len(values) > 0, "values is empty; a chart needs at least one")
    with _figure(title or x_label, 1.3 + 0.27 * len(values)) as (_, ax, done):
        names = list(values)
        ax.barh(range(len(names)), list(values.values()), color=_SERIES[0], height=0.62)
        for i, n in enumerate(names):  # right of the bar and of its tick
            ends = (max(values[n], marks.get(n, 0.0)), i)
            ax.annotate(f"{values[n]:.0f}", ends, (6, 0), textcoords="offset points", va="center", color=_INK, fontsize=9)
        points = [(marks[n], i) for i, n in enumerate(names) if n in marks]
        if points:
            xs, ys = zip(*points, strict=True)
            ax.plot(xs, ys, "|", color=_SERIES[1], ms=13, mew=2.4, label=mark_label)
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        _frame(ax, x_label, "", title, legend=bool(points))
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.1, y=0.01)
        ax.tick_params(axis="y", labelcolor=_INK, labelsize=9.5)
    return done.svg


def lines(
    series: Mapping[str, Sequence[float]],
    *,
    x: Sequence[float] | None = None,
    x_label: str,
    y_label: str,
    title: str = "",
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """One line for each series, error by layer for example; `x` defaults to 0, 1, 2 ... Returns an <svg> element."""
    check(len(series) > 0, "series is empty; a chart needs at least one")
    for name, values in series.items():
        expected = len(next(iter(series.values()))) if x is None else len(x)
        check(len(values) == expected, f"series {name!r} has {len(values)} values, expected {expected}")
    with _figure(title or f"{y_label} by {x_label}", 3.9) as (_, ax, done):
        for number, (name, values) in enumerate(series.items()):
            ax.plot(range(len(values)) if x is None else x, values, lw=1.8, ms=4.5, label=name, **_look(number))
        _scales(ax, log_x, log_y)
        if x is None:
            from matplotlib.ticker import MaxNLocator

            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        _frame(ax, x_label, y_label, title, legend=len(series) > 1)
    return done.svg


#: The points (x, y) of each line of one panel, by its name.
Lines = Mapping[str, Sequence[tuple[float, float]]]


def panels(
    by_title: Mapping[str, Lines],
    *,
    x_label: str,
    y_label: str,
    title: str,
    columns: int = 3,
    dashed: Sequence[str] = (),
    log_y: bool = False,
) -> str:
    """Small charts side by side under one legend, their x axis in powers of two, y from 0 unless it is logarithmic; a line has one
    style in all of them.

    Lines named in `dashed` are dashed. Returns an <svg> element.
    """
    check(len(by_title) > 0, "by_title is empty; a chart needs at least one panel")
    names = list(dict.fromkeys(name for lines in by_title.values() for name in lines))
    rows = -(-len(by_title) // columns)
    top = max(y for lines in by_title.values() for points in lines.values() for _, y in points)
    with _figure_of(title, 1.2 + 2.1 * rows, (rows, columns)) as (fig, axes, done):
        fig.suptitle(title, x=0.01, ha="left", color=_INK, fontsize=11.5, fontweight="bold")
        for i, (ax, (heading, lines)) in enumerate(zip(axes, by_title.items(), strict=False)):
            for name, points in lines.items():
                look = _look(names.index(name)) | ({"ls": "--"} if name in dashed else {})
                ax.plot([x for x, _ in points], [y for _, y in points], lw=1.6, ms=4, label=name, **look)
            ticks = sorted({x for points in lines.values() for x, _ in points})
            ax.set_xscale("log", base=2)
            ax.set_xticks(ticks, [f"{x:g}" for x in ticks], minor=False)
            if log_y:
                ax.set_yscale("log")
            else:
                ax.set_ylim(0, 1.06 * top)
            lowest = i + columns >= len(by_title)
            _frame(ax, x_label if lowest else "", y_label if i % columns == 0 else "", "", legend=False)
            ax.set_title(heading, loc="left", color=_INK, fontsize=10.5)
        for ax in axes[len(by_title) :]:
            ax.set_visible(False)
        handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        _legend(fig, [handles[name] for name in names], names, 3)
    return done.svg


def _label_points(fig: Any, ax: Any, points: Sequence[Point]) -> None:
    """Write each point's label where `place_labels` says, with a thin line to it when it had to go far."""
    if not _drawing.get():
        return
    fig.draw_without_rendering()  # moves the axes to their final place
    anchors = [tuple(ax.transData.transform((p.x, p.y))) for p in points]
    probes = [ax.text(0, 0, p.label, fontsize=10) for p in points]
    # Browsers set the text in the system's font, up to a tenth wider than matplotlib's.
    extents = [probe.get_window_extent() for probe in probes]
    sizes = [(e.width * 1.1, e.height + 3) for e in extents]
    for probe in probes:
        probe.remove()
    window = ax.get_window_extent()
    pixel = 72 / fig.dpi
    for point, anchor, box in zip(points, anchors, place_labels(anchors, sizes, Box(*window.extents)), strict=True):
        left, middle = box.x0 >= anchor[0], (box.y0 + box.y1) / 2
        at = (box.x0 if left else box.x1, middle)
        far = max(box.x0 - anchor[0], anchor[0] - box.x1, box.y0 - anchor[1], anchor[1] - box.y1) > 18
        ax.annotate(
            point.label,
            (point.x, point.y),
            xytext=((at[0] - anchor[0]) * pixel, (at[1] - anchor[1]) * pixel),
            textcoords="offset points",
            ha="left" if left else "right",
            va="center_baseline",
            fontsize=10,
            color=_INK,
            arrowprops={"arrowstyle": "-", "color": _QUIET, "lw": 0.6, "shrinkB": 4} if far else None,
        ).set_in_layout(False)


def _scales(ax: Any, log_x: bool, log_y: bool) -> None:
    if log_x:
        ax.set_xscale("log")
    if log_y:
        ax.set_yscale("log")


def _plain_logs(ax: Any) -> None:
    """Logarithmic axes with ticks at 1, 2 and 5, even ones where the axis is short, that read as numbers; chosen ticks stay."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    for axis in (ax.xaxis, ax.yaxis):
        if axis.get_scale() != "log":
            continue
        axis.set_minor_formatter(NullFormatter())
        if not isinstance(axis.get_major_locator(), FixedLocator):
            low, high = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if high > 5 * low else MaxNLocator(5))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _frame(ax: Any, x_label: str, y_label: str, title: str, legend: bool) -> None:
    _plain_logs(ax)
    ax.set_xlabel(x_label, color=_QUIET, fontsize=10.5)
    ax.set_ylabel(y_label, color=_QUIET, fontsize=10.5)
    if title:
        ax.set_title(title, loc="left", color=_INK, fontsize=12, fontweight="bold", pad=10)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(_LINE)
    ax.tick_params(which="both", color=_LINE, labelcolor=_QUIET, labelsize=10)
    ax.grid(color=_LINE, lw=0.6, alpha=0.7)
    ax.set_axisbelow(True)
    if legend:
        _legend(ax.figure, *ax.get_legend_handles_labels())


def _legend(fig: Any, handles: Sequence[Any], labels: Sequence[str], columns: int = 5) -> None:
    """Below the plot, where it can hide no data."""
    rows = -(-len(labels) // columns)
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": -(-len(labels) // rows)}
    fig.legend(handles, labels, **place, frameon=False, fontsize=10, labelcolor=_INK, handlelength=2.6)


#: Whether charts are drawn. See `described`.
_drawing = ContextVar("drawing", default=True)


@contextmanager
def described() -> Iterator[None]:
    """Within, a chart is an <svg> element with its description alone: what is written about charts needs no picture of them."""
    token = _drawing.set(False)
    yield
    _drawing.reset(token)


class _Done:
    """Where a finished chart ends up once its `with` block is over."""

    svg: str = ""


@contextmanager
def _figure(description: str, height: float) -> Iterator[tuple[Any, Any, _Done]]:
    """As `_figure_of`, with one pair of axes."""
    with _figure_of(description, height, (1, 1)) as (fig, (ax,), done):
        yield fig, ax, done


@contextmanager
def _figure_of(description: str, height: float, grid: tuple[int, int]) -> Iterator[tuple[Any, list[Any], _Done]]:
    """A figure 7.6 inches wide and its axes, row by row; on leaving, `done.svg` holds the element, described for screen readers."""
    check_installed()
    import matplotlib
    from matplotlib.figure import Figure

    options = {
        "svg.fonttype": "none",
        "svg.hashsalt": description,
        "font.family": "DejaVu Sans",
        "axes.unicode_minus": True,
    }
    with matplotlib.rc_context(options):
        # Figure without pyplot: no global state, no display, nothing to close.
        fig = Figure(figsize=(7.6, height), layout="constrained")
        done = _Done()
        yield fig, list(fig.subplots(*grid, squeeze=False, sharey=True).flat), done
        if not _drawing.get():
            done.svg = _finish('<svg viewBox="0 0 0 0">', description)
            return
        buffer = io.StringIO()
        fig.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        done.svg = _finish(buffer.getvalue(), description)


def _finish(svg: str, description: str) -> str:
    """matplotlib's file as an element for the page: colors to variables, the page's font, unique ids, no prologue or metadata."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    svg = re.sub(r"(font: (?:[\w.]+ )*[\d.]+px) [^;\"]+", r"\1 var(--font)", svg)
    svg = re.sub(r"font-family: [^;\"]+", "font-family: var(--font)", svg)
    unique = "fig" + hashlib.sha256(svg.encode()).hexdigest()[:8]
    svg = re.sub(r'\bid="', f'id="{unique}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{unique}-", svg)
    label = html.escape(description, quote=True)
    return re.sub(
        r'<svg[^>]*?viewBox="([^"]*)"[^>]*>',
        rf'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="\1" role="img" '
        rf'aria-label="{label}"><title>{label}</title>',
        svg,
        count=1,
    )


def stacked_bars(stacks: Mapping[str, Mapping[str, float]], *, x_label: str, title: str) -> str:
    """Horizontal bars from the top down, each made of its parts in their order, with their sum. Returns an <svg> element."""
    check(len(stacks) > 0, "stacks is empty; a chart needs at least one")
    parts = list(dict.fromkeys(part for stack in stacks.values() for part in stack))
    with _figure(title, 1.3 + 0.3 * len(stacks) + 0.2 * -(-len(parts) // 4)) as (fig, ax, done):
        for row, stack in enumerate(stacks.values()):
            end, label = sum(stack.values()), {"textcoords": "offset points", "va": "center", "color": _INK, "fontsize": 9}
            ax.annotate(f"{end:.1f}", (end, row), (6, 0), **label)
        for number, part in enumerate(parts):
            rows = [row for row, stack in enumerate(stacks.values()) if part in stack]
            mine = [list(stack.items()) for stack in stacks.values() if part in stack]
            left = [sum(v for _, v in stack[: [name for name, _ in stack].index(part)]) for stack in mine]
            look = {"color": _SERIES[number % 6], "alpha": (1.0, 0.6, 0.3)[number // 6 % 3]}
            ax.barh(rows, [dict(stack)[part] for stack in mine], left=left, height=0.66, label=part, **look)
        ax.set_yticks(range(len(stacks)), list(stacks))
        ax.invert_yaxis()
        _frame(ax, x_label, "", title, legend=False)
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.1, y=0.02)
        ax.tick_params(axis="y", labelcolor=_INK, labelsize=9.5)
        handles, labels = ax.get_legend_handles_labels()
        _legend(fig, handles, labels, 4)
    return done.svg


def roofline(
    points: Lines, measured: Sequence[tuple[float, float]], *, x_label: str, y_label: str, title: str, log_y: bool = False
) -> str:
    """Points below the `measured` roofline, points of the same kind; x is logarithmic. Returns an <svg> element."""
    check(len(measured) > 0, "measured is empty; a roofline needs at least one point")
    with _figure(title, 4.4) as (fig, ax, done):
        xs, ys = zip(*measured, strict=True)
        ax.plot(xs, ys, "-", color=_INK, lw=1.6, label="read roofline of the same runs")
        for number, (name, line) in enumerate(points.items()):
            ax.plot([x for x, _ in line], [y for _, y in line], ms=5, alpha=0.85, label=name, **_look(number) | {"ls": ""})
        _scales(ax, True, log_y)
        if not log_y:
            ax.set_ylim(0)
        _frame(ax, x_label, y_label, title, legend=False)
        handles, labels = ax.get_legend_handles_labels()
        _legend(fig, handles, labels, 4)
    return done.svg


def curves(lines: Lines, *, x_label: str, y_label: str, title: str, dashed: Sequence[str] = ()) -> str:
    """Lines with points of their own, both axes logarithmic; those named in `dashed` are dashed. Returns an <svg> element."""
    check(len(lines) > 0, "lines is empty; a chart needs at least one")
    for name, points in lines.items():
        check(all(x > 0 and y > 0 for x, y in points), f"line {name!r} has points that a logarithmic axis cannot show")
    with _figure(title, 4.4) as (fig, ax, done):
        for number, (name, points) in enumerate(lines.items()):
            look = _look(number) | ({"ls": "--"} if name in dashed else {})
            ax.plot([x for x, _ in points], [y for _, y in points], lw=1.8, ms=4.5, label=name, **look)
        _scales(ax, True, True)
        ticks = sorted({x for points in lines.values() for x, _ in points})
        ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
        _frame(ax, x_label, y_label, title, legend=False)
        handles, labels = ax.get_legend_handles_labels()
        _legend(fig, handles, labels, 2)
    return done.svg
