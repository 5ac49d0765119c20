"""What a terminal of 80 columns shows: whole names, whole numbers, what was left out; and progress where nothing is redrawn."""

from __future__ import annotations

import io
import itertools
import re
from pathlib import Path

import pytest
from rich.console import Console

from halfbyte.cli.formats import HEADERS as FORMAT_HEADERS
from halfbyte.cli.formats import format_rows
from halfbyte.terminal import show_table
from halfbyte.text import heldout_text, windows
from halfbyte_lab import progress
from halfbyte_lab.evals import model as models
from halfbyte_lab.evals import present
from halfbyte_lab.evals.quality import Quality, Setting, every_kv_setting, every_weight_setting, run_evaluation
from halfbyte_lab.measure.records import read_all
from halfbyte_lab.measure.report_sections import by_section
from halfbyte_lab.measure.tables import filled
from halfbyte_lab.suites import section_of

ROOT = Path(__file__).parents[2]


def lines(
    headers: tuple[str, ...], rows: list[tuple[str, ...]], text_columns: int, wide: bool | None, width: int = 80
) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    show_table(console, "", headers, rows, text_columns, wide)
    assert console.width == width
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def results() -> list[Quality]:
    figures = {
        "perplexity": 12.3456,
        "change": -123.456,
        "kl_mean": 1e-3,
        "kl_p99": 2e-2,
        "top1": 0.98,
        "kl_by_quarter": [1e-3] * 3,
    }
    both = Setting("int8", "int4_g32", weights="int4_g64", clip="search")
    settings = [Setting(), *every_kv_setting(), *every_weight_setting(), both]
    return [Quality(s, **figures, kv_bytes_per_token=1664, weight_bytes=11_147_776, seconds=22.2) for s in settings]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_names_and_numbers_of_an_evaluation_are_whole(width: int) -> None:
    found = results()
    shown = lines(present.HEADERS, present.rows(found), 2, False, width)
    assert max(map(len, shown[:-1])) <= width
    words = " ".join(shown).split()
    for result in found:
        assert set((result.setting.kv + " " + present.row(result)[1]).split()) <= set(words)
    assert words.count("12.3456") == len(found)
    assert not [line for line in shown if re.search(r"\d\.$", line)]


def test_what_does_not_fit_is_named_and_shown_by_wide() -> None:
    found = present.rows(results())
    shown = lines(present.HEADERS, found, 2, False)
    assert shown[-1] == "--wide also shows: weights MB, top-1 %, KL p99, KL by quarter, seconds"
    wide = lines(present.HEADERS, found, 2, True)
    assert "1e-03 1e-03 1e-03" in wide[-1]
    assert len(wide) == len([row for row in found if row]) + wide.index(next(line for line in wide if "──" in line)) + 1 + 3
    assert not any("--wide" in line for line in wide)


def test_a_command_without_the_option_leaves_nothing_out() -> None:
    shown = lines(("plan", "bits"), [("/a/very/long/path" * 8, "4.25")], 1, None, 40)
    assert max(map(len, shown)) <= 40
    assert "".join(line.split()[0] for line in shown[2:]) == "/a/very/long/path" * 8
    assert "4.25" in shown[2]
    many = tuple("abcdefgh")
    assert "--wide" not in "".join(lines(many, [tuple(c * 20 for c in many)], 1, None))


def test_every_table_of_the_benchmarks_fits() -> None:
    measured, _ = read_all([ROOT / "results" / "gpu.jsonl", ROOT / "results" / "cpu.jsonl"])
    sections = by_section(measured, section_of)
    assert len(sections) > 8
    for section, records in sections:
        headers, rows = section.table(records)
        shown = lines(tuple(headers), [tuple(row) for row in rows], section.text_columns, False)
        assert max(len(line) for line in shown if not line.startswith("--wide")) <= 80, section.title
        words = set(" ".join(shown).split())
        assert {word for row in rows for cell in row[: section.text_columns] for word in cell.split()} <= words, section.title


def test_the_table_of_formats_fits() -> None:
    shown = lines(FORMAT_HEADERS, format_rows(), 4, None)
    assert max(map(len, shown)) <= 80
    assert [line.split()[0] for line in shown if line[0] not in " f─" or line.startswith("fp")] == [row[0] for row in format_rows()]


def test_numbers_that_no_row_has_get_no_column() -> None:
    rows = [("a", "", "", "1", ""), ("b", "", "", "", "2")]
    assert filled((("case", "kernel", "registers", "us", "GB/s"), rows), 2) == (
        ["case", "kernel", "us", "GB/s"],
        [["a", "", "1", ""], ["b", "", "", "2"]],
    )


def test_lines_of_a_cell_stay_lines() -> None:
    shown = lines(("case", "us", "target", "met"), [("a case", "1.0", "at most 2 us\nat least 1.5x", "yes\nno")], 1, False, 40)
    assert [line.split() for line in shown[-2:]] == [
        ["a", "case", "1.0", "at", "most", "2", "us", "yes"],
        ["at", "least", "1.5x", "no"],
    ]


def test_markup_in_names_is_text() -> None:
    assert "[bold]x" in lines(("name", "n"), [("[bold]x", "1")], 1, False)[-1]


def test_progress_in_a_pipe_is_a_line_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 4))
    monkeypatch.setattr(progress, "monotonic", lambda: next(now))
    console = Console(file=io.StringIO(), width=80)
    with progress.progress(console) as bar:
        task = bar.add_task("evaluating ", total=12)
        for _ in range(12):
            bar.advance(task)
    said = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split(",")[0] for line in said] == ["evaluating: 4 of 12", "evaluating: 7 of 12", "evaluating: 10 of 12"]


def test_an_evaluation_in_a_pipe_says_what_it_has_done(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = models.load("demo")
    texts = windows(tokenizer.encode(heldout_text()), 64, 2)
    clock = itertools.count(0, 10)
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    console = Console(file=io.StringIO(), width=80)
    run_evaluation(model, [Setting(), Setting("int8", "int8")], texts, 32, console, batch=2, name="demo")
    said = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split(",")[0] for line in said] == [f"evaluating demo: {n} of 4" for n in (2, 3, 4)]


def test_progress_in_a_terminal_is_a_bar() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    assert type(progress.progress(console)) is not type(progress.progress(Console(file=io.StringIO())))
