"""Charts as inline SVG that follow the page's colors, so that they turn dark with it: one function for each kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from halfbyte.errors import check
from halfbyte_lab.measure.chart_style import (
    BLUE,
    INK,
    QUIET,
    VERMILION,
    color_of,
    drawing,
    figure_of,
    figure_with,
    frame,
    legend_below,
    looks_of,
    scales,
)
from halfbyte_lab.measure.chart_style import as_image as as_image
from halfbyte_lab.measure.chart_style import check_installed as check_installed
from halfbyte_lab.measure.chart_style import described as described
from halfbyte_lab.measure.chart_style import measured_on as measured_on


@dataclass(frozen=True)
class Point:
    """One labeled point of a scatter chart; points of the same `series` share a color and a marker."""

    label: str
    x: float
    y: float
    series: str = ""


def scatter(
    points: Sequence[Point],
    *,
    x_label: str,
    y_label: str,
    title: str = "",
    log_y: bool = False,
    rules: Sequence[tuple[float, str]] = (),
) -> str:
    """Quality against bytes: labeled points whose labels do not lie on each other, and dashed or dotted `rules`, each at a y with
    its name. Returns an <svg> element.
    """
    check(len(points) > 0, "points is empty; a chart needs at least one")
    for point in points:
        check(not log_y or point.y > 0, f"point {point.label!r} has y={point.y}; a logarithmic axis needs y > 0")
    with figure_with(title or f"{y_label} against {x_label}", 4.8, y_label) as (fig, ax, done):
        looks = looks_of(list(dict.fromkeys(p.series for p in points)))
        for name, look in looks.items():
            mine = [p for p in points if p.series == name]
            ax.plot([p.x for p in mine], [p.y for p in mine], **look | {"ls": ""}, ms=7, label=name or None)
        scales(ax, False, log_y)
        for (y, name), style in zip(rules, ("--", ":", "-.", (0, (1, 4))), strict=False):
            ax.axhline(y, color=QUIET, lw=1.2, ls=style, label=name)
        frame(ax, x_label, y_label, (2 if len(rules) > 1 else 5) if len(looks) > 1 or rules else 0)
        ax.margins(0.12)
        _label_points(fig, ax, points)
    return done.svg


def divergence(points: Sequence[Point], *, x_label: str, title: str = "", limit: float = 0.0) -> str:
    """Mean KL divergence against size, with a line at the largest that is safe, `limit`, if that is known. An <svg> element."""
    rules = [(limit, f"safe: up to {limit:.1e}")] * (limit > 0)
    return scatter(points, x_label=x_label, y_label="mean KL divergence (nats)", title=title, log_y=True, rules=rules)


def bars(
    values: Mapping[str, float], *, x_label: str, title: str = "", shown: Mapping[str, str] | None = None, line: float | None = None
) -> str:
    """Horizontal bars from the top down, each with its value (`shown` replaces the text), and a dashed `line` at a value.
    Returns an <svg> element.
    """
    check(len(values) > 0, "values is empty; a chart needs at least one")
    with figure_with(title or x_label, 0.9 + 0.34 * len(values), x_label) as (_, ax, done):
        names = list(values)
        container = ax.barh(range(len(names)), list(values.values()), color=[color_of(n) or BLUE for n in names], height=0.62)
        if line is not None:
            ax.axvline(line, color=INK, lw=1.2, ls="--")
        labels = ax.bar_label(
            container, [(shown or {}).get(n, f"{values[n]:.4g}") for n in names], padding=4, color=INK, fontsize=10
        )
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        frame(ax, x_label, "")
        ax.grid(axis="y", visible=False)
        # Browsers set the values in the system's font, which may be wider than matplotlib's.
        ax.margins(x=max(0.16, 0.024 * max(len(text.get_text()) for text in labels)))
        ax.xaxis.set_major_formatter("{x:,g}")
        ax.tick_params(axis="y", labelcolor=INK, labelsize=10.5)
    return done.svg


def marked_bars(values: Mapping[str, float], marks: Mapping[str, float], *, x_label: str, title: str = "") -> str:
    """Horizontal bars from the top down, each with a tick where it should reach (`marks`, by the same names). An <svg> element."""
    check(len(values) > 0, "values is empty; a chart needs at least one")
    with figure_with(title or x_label, 1.3 + 0.27 * len(values), x_label) as (_, ax, done):
        names = list(values)
        ax.barh(range(len(names)), list(values.values()), color=BLUE, height=0.62)
        for i, n in enumerate(names):  # right of the bar and of its tick
            ends = (max(values[n], marks.get(n, 0.0)), i)
            ax.annotate(f"{values[n]:.0f}", ends, (6, 0), textcoords="offset points", va="center", color=INK, fontsize=9)
        points = [(marks[n], i) for i, n in enumerate(names) if n in marks]
        if points:
            xs, ys = zip(*points, strict=True)
            ax.plot(xs, ys, "|", color=VERMILION, ms=13, mew=2.4, label="target")
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        frame(ax, x_label, "", 5 if points else 0)
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.1, y=0.01)
        ax.tick_params(axis="y", labelcolor=INK, labelsize=9.5)
    return done.svg


def lines(
    series: Mapping[str, Sequence[float]],
    *,
    x: Sequence[float] | None = None,
    x_label: str,
    y_label: str,
    title: str = "",
    log_y: bool = False,
) -> str:
    """One line for each series, error by layer for example; `x` defaults to 0, 1, 2 ... Returns an <svg> element."""
    check(len(series) > 0, "series is empty; a chart needs at least one")
    for name, values in series.items():
        expected = len(next(iter(series.values()))) if x is None else len(x)
        check(len(values) == expected, f"series {name!r} has {len(values)} values, expected {expected}")
    with figure_with(title or f"{y_label} by {x_label}", 3.9, y_label) as (_, ax, done):
        looks = looks_of(list(series))
        for name, values in series.items():
            ax.plot(range(len(values)) if x is None else x, values, lw=1.8, ms=4.5, label=name, **looks[name])
        scales(ax, False, log_y)
        if x is None:
            from matplotlib.ticker import MaxNLocator

            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        frame(ax, x_label, y_label, 5 if len(series) > 1 else 0)
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
    line: float | None = None,
) -> str:
    """Small charts side by side under one legend, their x axis in powers of two, y from 0 unless it is logarithmic; a line has one
    style in all of them.

    Lines named in `dashed` are dashed, as is a horizontal `line` at a value. Returns an <svg> element.
    """
    check(len(by_title) > 0, "by_title is empty; a chart needs at least one panel")
    looks = looks_of(list(dict.fromkeys(name for lines in by_title.values() for name in lines)))
    rows = -(-len(by_title) // columns)
    top = max(y for lines in by_title.values() for points in lines.values() for _, y in points)
    with figure_of(title, 1.2 + 2.1 * rows, (rows, columns), y_label) as (fig, axes, done):
        for i, (ax, (heading, lines)) in enumerate(zip(axes, by_title.items(), strict=False)):
            for name, points in lines.items():
                look = looks[name] | ({"ls": "--"} if name in dashed else {})
                ax.plot([x for x, _ in points], [y for _, y in points], lw=1.6, ms=4, label=name, **look)
            if line is not None:
                ax.axhline(line, color=QUIET, lw=1.2, ls="--")
            ticks = sorted({x for points in lines.values() for x, _ in points})
            ax.set_xscale("log", base=2)
            ax.set_xticks(ticks, [f"{x / 1024:g}K" if x >= 1024 and x % 1024 == 0 else f"{x:g}" for x in ticks], minor=False)
            if log_y:
                ax.set_yscale("log")
            else:
                ax.set_ylim(0, 1.06 * top)
            lowest = i + columns >= len(by_title)
            frame(ax, x_label if lowest else "", y_label if i % columns == 0 else "")
            ax.set_title(heading, loc="left", color=INK, fontsize=10.5)
        for ax in axes[len(by_title) :]:
            ax.set_visible(False)
        handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        legend_below(fig, [handles[name] for name in looks], list(looks), 3)
    return done.svg


def _label_points(fig: Any, ax: Any, points: Sequence[Point]) -> None:
    """Write each point's label where `place_labels` says, with a thin line to it when it had to go far."""
    if not drawing.get():
        return
    fig.draw_without_rendering()  # moves the axes to their final place
    anchors = [tuple(ax.transData.transform((p.x, p.y))) for p in points]
    probes = [ax.text(0, 0, p.label, fontsize=10) for p in points]
    # Browsers set the text in the system's font, up to a tenth wider than matplotlib's; a space keeps neighbors apart.
    extents = [probe.get_window_extent() for probe in probes]
    sizes = [(e.width * 1.1 + 4, e.height + 3) for e in extents]
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
            color=INK,
            arrowprops={"arrowstyle": "-", "color": QUIET, "lw": 0.6, "shrinkB": 4} if far else None,
        ).set_in_layout(False)


def stacked_bars(stacks: Mapping[str, Mapping[str, float]], *, x_label: str, title: str) -> str:
    """Horizontal bars from the top down, each made of its parts in their order, with their sum. Returns an <svg> element."""
    check(len(stacks) > 0, "stacks is empty; a chart needs at least one")
    parts = list(dict.fromkeys(part for stack in stacks.values() for part in stack))
    looks = looks_of(parts)
    with figure_with(title, 1.3 + 0.3 * len(stacks) + 0.2 * -(-len(parts) // 4), x_label) as (_, ax, done):
        for row, stack in enumerate(stacks.values()):
            end, label = sum(stack.values()), {"textcoords": "offset points", "va": "center", "color": INK, "fontsize": 9}
            ax.annotate(f"{end:,.0f}" if end >= 1000 else f"{end:.1f}", (end, row), (6, 0), **label)
        for number, part in enumerate(parts):
            rows = [row for row, stack in enumerate(stacks.values()) if part in stack]
            mine = [list(stack.items()) for stack in stacks.values() if part in stack]
            left = [sum(v for _, v in stack[: [name for name, _ in stack].index(part)]) for stack in mine]
            color = looks[part]["color"]
            same = sum(looks[earlier]["color"] == color for earlier in parts[:number])
            look = {"color": color, "alpha": (1.0, 0.7, 0.45, 0.25)[same % 4]}
            ax.barh(rows, [dict(stack)[part] for stack in mine], left=left, height=0.66, label=part, **look)
        ax.set_yticks(range(len(stacks)), list(stacks))
        ax.invert_yaxis()
        frame(ax, x_label, "", 4)
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.1, y=0.02)
        ax.xaxis.set_major_formatter("{x:,g}")
        ax.tick_params(axis="y", labelcolor=INK, labelsize=9.5)
    return done.svg


def roofline(
    points: Lines,
    measured: Sequence[tuple[float, float]],
    *,
    x_label: str,
    y_label: str,
    title: str,
    log_y: bool = False,
    limit: str = "",
) -> str:
    """Points below the `measured` roofline, points of the same kind, and its `limit` in words; x is logarithmic. Returns an svg."""
    check(len(measured) > 0, "measured is empty; a roofline needs at least one point")
    looks = looks_of(list(points))
    with figure_with(title, 4.4, y_label) as (_, ax, done):
        xs, ys = zip(*measured, strict=True)
        ax.plot(xs, ys, "-", color=INK, lw=1.6, label=f"read roofline of the same runs{limit}")
        for name, line in points.items():
            ax.plot([x for x, _ in line], [y for _, y in line], ms=5, alpha=0.85, label=name, **looks[name] | {"ls": ""})
        scales(ax, True, log_y)
        if not log_y:
            ax.set_ylim(0)
        frame(ax, x_label, y_label, 4)
    return done.svg


def curves(lines: Lines, *, x_label: str, y_label: str, title: str, dashed: Sequence[str] = ()) -> str:
    """Lines with points of their own, both axes logarithmic; those named in `dashed` are dashed. Returns an <svg> element."""
    check(len(lines) > 0, "lines is empty; a chart needs at least one")
    for name, points in lines.items():
        check(all(x > 0 and y > 0 for x, y in points), f"line {name!r} has points that a logarithmic axis cannot show")
    looks = looks_of(list(lines))
    with figure_with(title, 4.4, y_label) as (_, ax, done):
        for name, points in lines.items():
            look = looks[name] | ({"ls": "--"} if name in dashed else {})
            ax.plot([x for x, _ in points], [y for _, y in points], lw=1.8, ms=4.5, label=name, **look)
        scales(ax, True, True)
        ticks = sorted({x for points in lines.values() for x, _ in points})
        ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
        frame(ax, x_label, y_label, 2)
    return done.svg


# ------------------------------------------------------------------------- where labels go, so that they do not lie on each other


class Box(NamedTuple):
    """A rectangle in pixels, y upwards."""

    x0: float
    y0: float
    x1: float
    y1: float

    def overlap(self, other: Box) -> float:
        """Area that two rectangles share."""
        width = min(self.x1, other.x1) - max(self.x0, other.x0)
        height = min(self.y1, other.y1) - max(self.y0, other.y0)
        return max(0.0, width) * max(0.0, height)


def place_labels(anchors: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], bounds: Box) -> list[Box]:
    """A rectangle for each label, near its anchor, inside `bounds`, off the other labels and the points.

    Greedy: for each label in turn the candidate (eight directions, growing distance) that covers least of what is there already.
    """
    points = [Box(x - 5, y - 5, x + 5, y + 5) for x, y in anchors]
    boxes: list[Box] = []
    for (x, y), (width, height) in zip(anchors, sizes, strict=True):

        def cost(box: Box) -> float:
            outside = (box.x1 - box.x0) * (box.y1 - box.y0) - box.overlap(bounds)
            return 4 * outside + sum(box.overlap(other) for other in [*boxes, *points])

        boxes.append(min(_candidates(x, y, width, height), key=cost))
    return boxes


def _candidates(x: float, y: float, width: float, height: float) -> Iterator[Box]:
    for gap in (10, 15, 22, 32, 44, 60, 80):
        corners = [
            (x + gap, y - height / 2),
            (x - gap - width, y - height / 2),
            (x - width / 2, y + gap),
            (x - width / 2, y - gap - height),
            (x + gap, y + gap / 2),
            (x + gap, y - gap / 2 - height),
            (x - gap - width, y + gap / 2),
            (x - gap - width, y - gap / 2 - height),
        ]
        yield from (Box(a, b, a + width, b + height) for a, b in corners)
