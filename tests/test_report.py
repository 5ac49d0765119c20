"""The report writer and its charts: escaping, one self-contained file, atomic writing, labels apart, the page's colours."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest

from halfbyte.errors import InvalidArgument, MissingPackage
from halfbyte_lab.measure import chart_style, charts
from halfbyte_lab.measure.charts import Box, Point, bars, lines, place_labels, scatter
from halfbyte_lab.report import Report
from watched import watched

SCRIPT = "<script>alert('x')</script>"
POINTS = [
    Point("bf16", 512, 1e-4, "16"),
    Point("int8", 260, 2e-4, "8"),
    Point("int8_g32", 272, 1.8e-4, "8"),
    Point("int4 & <b>", 136, 0.03, "4"),
]


def sample() -> Report:
    return (
        Report("a < b", "sub & title")
        .heading("h")
        .text("one", "two")
        .facts({"KV": "3.2x"})
        .table(["name", "bytes", "change"], [("int8", 1234567, "+0.1 %"), ("int4", None, "\u22122 %")], "caption")
        .figure(scatter(POINTS, x_label="bytes", y_label="KL", log_y=True), "lower left is better")
        .figure(bars({"a": 1.0, "b": 2.0}, x_label="ms"))
        .code("x = 1 < 2")
    )


def test_everything_given_is_escaped() -> None:
    page = (
        Report(SCRIPT, SCRIPT)
        .heading(SCRIPT)
        .text(SCRIPT)
        .facts({SCRIPT: SCRIPT})
        .table([SCRIPT], [[SCRIPT]], SCRIPT)
        .figure(scatter([Point(SCRIPT, 1, 1)], x_label=SCRIPT, y_label=SCRIPT, title=SCRIPT), SCRIPT)
        .code(SCRIPT, SCRIPT)
        .to_html()
    )
    assert "<script>alert" not in page
    assert page.count("<script>") == 1  # the page's own
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;" in page


def test_page_is_self_contained() -> None:
    page = sample().to_html()
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert not re.search(r"https?:|//\w|@import|url\((?!#)|<link|<img|<iframe|src=", without_namespaces)
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_ids_are_unique_and_references_resolve() -> None:
    chart = lines({"a": [1, 2]}, x_label="layer", y_label="error")
    page = Report("t").figure(chart).figure(lines({"b": [3, 1]}, x_label="layer", y_label="error")).to_html()
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) > 10
    used = re.findall(r'href="#([^"]+)"', page) + re.findall(r"url\(#([^)]+)\)", page)
    assert used
    assert set(used) <= set(ids)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: scatter(POINTS, x_label="bytes", y_label="KL", log_y=True),
        lambda: bars({"int8": 3.0, "bf16": 1.0}, x_label="ms", title="times"),
        lambda: lines({f"s{i}": [1.0, 2.0, i + 1.0] for i in range(8)}, x_label="layer", y_label="error", log_y=True),
    ],
    ids=["scatter", "bars", "lines"],
)
def test_charts_are_text_in_the_colours_of_the_page(draw: Callable[[], str]) -> None:
    chart = draw()
    root = ElementTree.fromstring(chart)
    texts = [t for e in root.iter("{http://www.w3.org/2000/svg}text") if (t := "".join(e.itertext()).strip())]
    assert len(texts) > 4  # text, not outlines
    assert "var(--ink, #23262b)" in chart
    assert re.search(r"var\(--s\d, #", chart)
    assert "var(--quiet, #5d636c)" in chart
    outside = re.sub(r"var\(--\w+, #[0-9a-f]{6}\)", "", chart)
    assert not re.search(r"#[0-9a-fA-F]{6}", outside)  # nothing keeps a colour of its own
    assert "DejaVu" not in chart
    assert root.get("width") is None  # it scales
    assert root.get("viewBox")


def test_labels_stay_apart() -> None:
    anchors = [(100.0 + 3 * i, 100.0 + (i % 3)) for i in range(8)]
    boxes = place_labels(anchors, [(60.0, 12.0)] * 8, Box(0, 0, 400, 300))
    assert sum(a.overlap(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :]) == 0
    assert all(b.x0 >= 0 and b.y0 >= 0 and b.x1 <= 400 and b.y1 <= 300 for b in boxes)
    naive = [Box(x + 10, y - 6, x + 70, y + 6) for x, y in anchors]
    assert sum(a.overlap(b) for i, a in enumerate(naive) for b in naive[i + 1 :]) > 0  # the case is a hard one


def test_labels_are_placed_where_the_points_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout moves the axes once more when all is drawn: labels must be placed behind that."""
    known = watched(monkeypatch, charts, "place_labels", lambda anchors, *_: list(anchors))
    points = [charts.Point(f"{s} {i}", 0.1 * i, 10.0**-i, s) for i in range(1, 4) for s in ("int8", "int4")]
    chart = charts.scatter(points, x_label="x", y_label="y", log_y=True)
    marks = re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)" style="[^"]*--s\d', chart)
    drawn = {round(float(x)) for x, _ in marks}
    assert drawn
    assert {round(0.72 * x) for anchors in known for x, _ in anchors} <= drawn


def test_lines_of_one_chart_do_not_look_alike() -> None:
    names = [f"line {i}" for i in range(14)]
    lines = {name: [(1.0, float(i + 1)), (2.0, float(i + 2))] for i, name in enumerate(names)}
    labels = {"x_label": "x", "y_label": "y", "title": "t", "dashed": names[:1]}
    for svg in (charts.panels({"one": lines}, **labels), charts.curves(lines, **labels)):  # type: ignore[arg-type]
        drawn = re.findall(r'clip-path="[^"]*" style="(fill: none; stroke[^"]*?); stroke-width: (?:1.6|1.8)', svg)
        assert len(drawn) == 14
        assert len({re.sub(r"stroke-linecap: \w+", "", style) for style in drawn}) == 14
    looks = chart_style.looks_of([f"line {i}" for i in range(36)]).values()
    assert len({tuple(map(str, look.values())) for look in looks}) == 36


def test_a_thing_has_one_color_and_a_chart_names_the_machine_and_the_unit() -> None:
    """Wherever it stands among others, and whatever else the chart shows."""
    some = chart_style.looks_of(["cuBLAS", "halfbyte int4", "linear"])
    others = chart_style.looks_of(["linear", "int4", "torch sdpa"])
    assert some["linear"]["color"] == others["linear"]["color"]
    assert some["cuBLAS"]["color"] == others["torch sdpa"]["color"] == chart_style.GRAY
    with charts.measured_on("NVIDIA H200"):
        chart = charts.bars({"int8": 2.0}, x_label="times 16 bits", title="Speed", line=1.0)
    assert ">NVIDIA H200; times 16 bits</text>" in chart
    assert "stroke-dasharray" in chart  # the line at 1
    assert "@media (prefers-color-scheme: dark)" in charts.as_image(chart)


def test_no_number_of_a_text_wraps() -> None:
    page = Report("t").text("KL 5.4e-05 \u00b1 9e-06 nats").to_html()
    assert page.count('<span class="number">') == 2
    assert '<span class="number">9e-06</span> nats' in page


def test_a_legend_is_no_wider_than_its_chart() -> None:
    assert chart_style._fits(["int8", "int4"], 1)
    five = ["all layers alike", "per-channel keys", "rotated keys", "formats by layer", "safe: up to 0.002"]
    assert not chart_style._fits(five, 1)
    assert chart_style._fits(five, 2)


def test_charts_without_matplotlib_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackage, match=r"pip install 'matplotlib>=3\.8'"):
        bars({"a": 1.0}, x_label="x")


def test_numbers_carry_their_sort_key_and_go_right() -> None:
    page = Report("t").table(["n", "v"], [("a", 1234567), ("b", 0.5), ("c", None)]).to_html()
    assert '<td class="r" data-sort="1234567">1,234,567</td>' in page
    assert 'data-sort="0.5"' in page
    assert '<td class="r">\u2013</td>' in page
    assert '<td class="l">a</td>' in page
    page = Report("t").table(["us", "by"], [("1.5", "none"), ("refused", "none")]).to_html()
    assert '<td class="r">refused</td>' in page
    assert '<td class="l">none</td>' in page


def test_floats_of_a_column_share_their_decimals() -> None:
    page = Report("t").table(["v"], [(26.0,), (3.04,)]).to_html()
    assert ">26.00<" in page
    assert ">3.04<" in page


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: Report("t").table(["a", "b"], [("x",)]), r"rows\[0\] has 1 cells for 2 headers"),
        (lambda: Report("t").table(["a"], [("x",)], align="c"), "align='c'"),
        (lambda: Report("t").figure("<img>"), "svg begins with"),
        (lambda: scatter([], x_label="x", y_label="y"), "points is empty"),
        (lambda: scatter([Point("zero", 1, 0)], x_label="x", y_label="y", log_y=True), "'zero' has y=0"),
        (lambda: lines({"a": [1], "b": [1, 2]}, x_label="x", y_label="y"), "'b' has 2 values, expected 1"),
        (lambda: bars({}, x_label="x"), "values is empty"),
    ],
)
def test_bad_input_is_named(call: object, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        call()  # type: ignore[operator]


def test_writing_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "report.html"
    assert Report("first").write(path) == path
    before = path.read_text()
    monkeypatch.setattr("os.replace", Mock(side_effect=OSError("disk gone")))
    with pytest.raises(OSError, match="disk gone"):
        Report("second").write(path)
    assert path.read_text() == before
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]  # no leftovers


def test_cards_hints_and_tables_that_scroll() -> None:
    page = (
        Report("t").cards({"INT8 <b>": {"size": "1.9x", "n": 1234}}).table(["n"], [("a",)], hints={(0, "a"): 'said "so"'}).to_html()
    )
    assert "<section><h3>INT8 &lt;b&gt;</h3><dl><dt>size</dt><dd>1.9x</dd><dt>n</dt><dd>1,234</dd></dl></section>" in page
    assert 'title="said &quot;so&quot;">a</td>' in page
    assert 'class="table long"' not in page
    assert 'class="table long"' in Report("t").table(["n"], [("a",)] * 61).to_html()
