"""Records as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from halfbyte.bench import bars, charts
from halfbyte.bench.records import Record
from halfbyte.bench.session import describe_shape, fastest_16_bit
from halfbyte.report import Report

_HEADERS = ("case", "formats", "implementation", "time (ms)", "p10 (ms)", "p90 (ms)", "GB/s", "of roof (%)", "vs 16-bit", "error")


#: Headers and rows.
Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def write_page(records: Sequence[Record], title: str, path: Path, table: Table | None = None, figures: Sequence[str] = ()) -> Path:
    """Write the records of one run: environment, one chart of times for each case, one table, and the command.

    A run that tells its records in its own way gives the table, and what it draws.
    """
    where = records[0].environment
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    report = Report(f"halfbyte bench: {title}", f"{where.device}, {where.threads} threads · {versions} · {where.date}")
    if table is not None:
        for figure in figures:
            report.figure(figure)
        report.table(table[0], [[cell.replace("\n", "; ") for cell in row] for row in table[1]], bars.count_text(records))
        _tell_refusals(report, records)
        return report.code(where.command, "The command that made this page").write(path)
    if any(r.case for r in records):
        return _bars_page(report, records).code(where.command, "The command that made this page").write(path)
    for shape in dict.fromkeys(describe_shape(r.shape) for r in records):
        times = {
            f"{r.implementation}, {r.formats}": 1e3 * r.seconds for r in records if r.seconds and describe_shape(r.shape) == shape
        }
        if times:
            report.figure(charts.bars(times, x_label="milliseconds, median; shorter is better", title=shape))
    report.table(
        _HEADERS, [_row(r, records) for r in records], "Time over that of the fastest 16-bit implementation: below 1 is faster."
    )
    _tell_refusals(report, records)
    return report.code(where.command, "The command that made this page").write(path)


def _bars_page(report: Report, records: Sequence[Record]) -> Report:
    """The cases that have bars: share of the roof as a chart, and the table of verdicts."""
    reached, asked = bars.shares(records)
    if reached:
        report.figure(charts.marked_bars(reached, asked, x_label="% of the read roof at the same number of bytes"))
    rows = [[cell.replace("\n", "; ") for cell in row] for row in bars.table_rows(records)]
    report.table(bars.HEADERS, rows, bars.count_text(records))
    _tell_refusals(report, records)
    return report


def _tell_refusals(report: Report, records: Sequence[Record]) -> None:
    for refusal in [r.refused for r in records if r.refused]:
        report.text(f"Refused: {refusal}")


def _row(r: Record, records: Sequence[Record]) -> tuple[str | float | None, ...]:
    baseline = fastest_16_bit(records, r)
    return (
        describe_shape(r.shape),
        r.formats,
        r.implementation,
        *(None if t is None else 1e3 * t for t in (r.seconds, r.p10, r.p90)),
        r.gb_per_s,
        None if r.roof_share is None else 100 * r.roof_share,
        r.seconds / baseline if r.seconds and baseline else None,
        r.error,
    )
