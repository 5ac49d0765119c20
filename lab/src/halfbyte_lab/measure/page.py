"""Any set of records as one HTML page: tables as on the terminal, charts, by machine, compared with earlier records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from halfbyte.errors import InvalidArgument, check
from halfbyte_lab.measure import charts, compare, tables
from halfbyte_lab.measure.compare import Change
from halfbyte_lab.measure.environment import Environment
from halfbyte_lab.measure.figures import name_of
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.report_sections import SectionOf, by_section
from halfbyte_lab.measure.tables import us
from halfbyte_lab.report import Cell, Report

#: Changes that are drawn.
_DRAWN = 30
CHANGES = ("case", "format", "by", "before (us)", "after (us)", "after / before", "change")


def write_page(
    measured: Sequence[Record], title: str, path: Path, against: Sequence[Record] = (), *, section_of: SectionOf
) -> Path:
    """Write the page: for each machine what changed since `against`, then every kind of record with its charts, table and commands.

    Of records of the same thing the latest is shown. Machines are kept separate.
    """
    check(len(measured) > 0, "records is empty; a page needs at least one")
    latest = compare.latest(measured)
    report = Report(f"halfbyte bench: {title}", _subtitle(latest))
    report.facts(_facts(latest)).contents()
    machines = by_machine(latest)
    before = by_machine(against)
    for machine, mine in machines.items():
        if machine in before:
            _changes(report, f"What changed on {machine}", compare.changes(before[machine], mine))
        elif against:
            report.text(f"The records of before have none of {machine}.")
        _sections(report, mine, f", {machine}" if len(machines) > 1 else "", section_of)
    if absent := sorted(set(before) - set(machines)):
        report.text(f"Only among the records of before: {', '.join(absent)}.")
    _environments(report, latest)
    return report.write(path)


def _subtitle(measured: Sequence[Record]) -> str:
    machines, dates = list(by_machine(measured)), sorted(r.environment.date for r in measured)
    first, last = dates[0][:10], dates[-1][:10]
    return f"{', '.join(machines)} · {first if first == last else f'{first} to {last}'}"


def _facts(measured: Sequence[Record]) -> dict[str, Cell]:
    verdicts = [v for r in measured for v in r.bars]
    facts: dict[str, Cell] = {
        "figures": sum(r.seconds is not None for r in measured),
        "refused": sum(bool(r.refused) for r in measured),
    }
    if verdicts:
        facts["targets met"] = f"{sum(v.met for v in verdicts)} of {len(verdicts)}"
    return facts | {"runs": len({r.environment.date for r in measured})}


def by_machine(measured: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each machine, by what it is called."""
    machines: dict[str, list[Record]] = {}
    for r in measured:
        machines.setdefault(compare.device_of(r), []).append(r)
    return machines


# ------------------------------------------------------------------------------------------------------------------------- sections


def _sections(report: Report, measured: Sequence[Record], where: str, section_of: SectionOf) -> None:
    """A section for each kind of record of one machine."""
    for section, mine in by_section(measured, section_of):
        report.heading(f"{section.title}{where}")
        question = [f"{section.asks[:1].upper()}{section.asks[1:]}."] if section.asks else []
        try:
            with charts.measured_on(compare.device_of(mine[0])):
                sentences, figures, contents = section.says(mine), section.charts(mine), section.tables(mine)
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:  # well-formed, but not as these are written here
            raise InvalidArgument(
                f"the records of {section.title!r} cannot be shown ({type(error).__name__}: {error}); "
                "were they written by another version, or by hand?"
            ) from error
        report.text(*question, *sentences)
        for chart in figures:
            report.figure(chart)
        caption = tables.count_text(mine) if any(r.bars for r in mine) else ""
        for headers, rows in contents:
            cells = [[cell.replace("\n", "; ").replace(" %", "\u00a0%") for cell in row] for row in rows]
            report.table(headers, cells, caption)
        _lines(report, "refused", [r.refused for r in mine if r.refused])
        _lines(report, "notes", [f"{name_of(r)}, {r.formats}: {r.note}" for r in mine if r.note])
        _lines(report, "kernel times", [_kernels(r) for r in mine if r.kernel_seconds])
        report.code("\n".join(_commands(mine)), "Made by")


def _kernels(r: Record) -> str:
    """ "batch 32, int4, halfbyte auto: kernels 14.2 us of 15.5 us a call"; without a time alone, of the time that is reported."""
    call = us(r.alone or r.seconds)
    return f"{name_of(r)}, {r.formats}, {r.implementation}: kernels {us(r.kernel_seconds)} us of {call} us a call (CUPTI)"


def _lines(report: Report, what: str, lines: Sequence[str]) -> None:
    """What a reader may look up: as it is when it is short, folded when it is not."""
    if len(lines) > 3:
        report.folded(f"{len(lines)} {what}", lines)
    else:
        report.text(*(f"{what.removesuffix('s').capitalize()}: {line}" for line in lines))


def _commands(measured: Sequence[Record]) -> list[str]:
    return list(
        dict.fromkeys(f"{_command(r.environment)}  # {r.environment.date[:16]}, {_commit(r.environment)}" for r in measured)
    )


def _command(where: Environment) -> str:
    """What to type: old records name the file that `python -m halfbyte` runs."""
    name = "__main__.py "
    return f"halfbyte {where.command.removeprefix(name)}" if where.command.startswith(name) else where.command


def _commit(where: Environment) -> str:
    return where.commit or f"halfbyte {where.versions.get('halfbyte', '')}"


def _environments(report: Report, measured: Sequence[Record]) -> None:
    """A row for each run."""
    runs: Mapping[tuple[str, str], Environment] = {(r.environment.date, r.environment.command): r.environment for r in measured}
    rows = [
        (
            where.date,
            where.device,
            where.driver,
            where.threads,
            where.commit,
            ", ".join(f"{name} {version}" for name, version in where.versions.items()),
            where.command,
        )
        for where in runs.values()
    ]
    headers = ("date (UTC)", "machine", "driver", "threads", "commit", "versions", "command")
    report.heading("Where and how").table(headers, rows, align="lllrlll")


# ----------------------------------------------------------------------------------------------------------------- before and after


def _changes(report: Report, title: str, found: Sequence[Change]) -> None:
    """What became faster or slower, drawn and listed; what did not is listed below."""
    counts: dict[str, Cell] = {
        verdict: sum(c.verdict == verdict for c in found) for verdict in dict.fromkeys(c.verdict for c in found)
    }
    report.heading(title).facts(counts)
    report.text(
        f"Faster or slower: medians differ by more than {100 * compare.LEAST:.0f} %, and 10th to 90th percentiles do not overlap."
    )
    ratios = {_name(c): c.ratio for c in found if c.verdict in ("faster", "slower") and c.ratio is not None}
    if ratios:
        largest = dict(list(ratios.items())[:_DRAWN])
        labels = {name: f"{ratio:.2f}" for name, ratio in largest.items()}
        caption = f"The {len(largest)} largest of {len(ratios)} changes" if len(largest) < len(ratios) else ""
        report.figure(charts.bars(largest, x_label="time after / time before; below 1 is faster", shown=labels, line=1.0), caption)
    report.table(CHANGES, [change_row(c) for c in found])


def _name(c: Change) -> str:
    r = c.record
    return ", ".join(filter(None, (name_of(r), r.formats, r.implementation.removeprefix("halfbyte "))))


def change_row(c: Change) -> tuple[Cell, ...]:
    """One change under `CHANGES`."""
    r = c.record
    figures = ("" if record is None else _figure(record) for record in (c.before, c.after))
    ratio = "" if c.ratio is None else f"{c.ratio:.2f}"
    return (name_of(r), r.formats, r.implementation, *figures, ratio, c.verdict)


def _figure(r: Record) -> str:
    """The time of a record in microseconds; of one that has none its perplexity or error, with its name."""
    if r.seconds is not None or r.refused:
        return us(r.seconds)
    if r.perplexity is not None:
        return f"{r.perplexity:.4f} perplexity"
    return "" if r.error is None else f"{r.error:.2g} error"
