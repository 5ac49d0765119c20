"""What was timed on CPUs, and which targets it misses."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from docgen.sources import cpu, tables
from halfbyte.settings import HALVES

_SIXTEEN = "16 bits, torch"
_TARGETS = (
    "Bold: beyond its target, which is, of the time of 16 bits: int4 and int8_col, M = 1 to 16, 0.5x; nf4, nvfp4 and mxfp4, M = 1, "
    "1.2x; M = 512, 1x; attention from 2,048 tokens on, int8 0.8x, others 1x."
)


def speed() -> str:
    """By CPU and op the newest time of each case and format, and its ratio to torch's fastest 16-bit operator in the same run."""
    tables_of: dict[tuple[str, str], dict[str, dict[str, _Cell]]] = {}
    for run in _runs():
        sixteen = {where: cell.record["seconds"] for where, cells in run.items() if (cell := cells.get(_SIXTEEN))}
        for where, cells in run.items():
            for column, (record, _) in cells.items():
                own = record["environment"]
                table = tables_of.setdefault((f"{own['device']}, {own['threads']} threads", record["op"].replace("_", " ")), {})
                table.setdefault(where, {})[column] = _Cell(record, record["seconds"] / sixteen[where])
    return "\n\n".join((_TARGETS, *(_table(*key, cases) for key, cases in sorted(tables_of.items()))))


def _table(machine: str, op: str, cases: dict[str, dict[str, _Cell]]) -> str:
    columns = [_SIXTEEN, *sorted({column for cells in cases.values() for column in cells} - {_SIXTEEN})]
    dates = sorted({cell.record["environment"]["date"][:10] for cells in cases.values() for cell in cells.values()})
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    rows = [(case, *(_speed_cell(cells.get(name)) for name in columns)) for case, cells in sorted(cases.items(), key=_size)]
    title = f"**{machine}, {days}: {op}**, ms (x the time of 16 bits in the same run)"
    return f"{title}\n\n{tables.markdown(('case', *columns), rows)}"


def models() -> str:
    """Steps of whole models by run, in 16 bits, packed, and by llama.cpp."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for record in (r for r in cpu() if r["op"] == "generate"):
        runs.setdefault(record["environment"]["command"], []).append(record)
    return "\n\n".join(_steps(records) for records in runs.values())


def _steps(records: list[dict[str, Any]]) -> str:
    own, shape = records[0]["environment"], records[0]["shape"]
    title = f"{own['device']}, {own['threads']} threads, {own['date'][:10]}: {shape['B']} x {shape['T']} tokens"
    rows = []
    for record in records:
        seconds, first = record["seconds"], record["note"].removeprefix("first token ")
        rows.append(
            (record["implementation"], record["formats"], f"{1e3 * seconds:.1f}", f"{record['shape']['B'] / seconds:.1f}", first)
        )
    table = tables.markdown(("", "formats", "ms a step", "tokens/s", "first token"), rows)
    return f"**{title}, computed in {records[0]['formats']}**\n\n{table}"


class _Cell(NamedTuple):
    """A record, and its time over that of 16 bits."""

    record: dict[str, Any]
    ratio: float = 1.0


def _runs() -> list[dict[str, dict[str, _Cell]]]:
    """The fastest record of each case and column, by run."""
    runs: dict[tuple[str, str], dict[str, dict[str, _Cell]]] = {}
    for record in (r for r in cpu() if r["op"] != "generate"):
        own, where = record["environment"], " ".join(f"{name}={size}" for name, size in record["shape"].items())
        cells = runs.setdefault((own["device"], own["command"]), {}).setdefault(where, {})
        best = cells.setdefault(_column(record), _Cell(record))
        if record["seconds"] < best.record["seconds"]:
            cells[_column(record)] = _Cell(record)
    return [*runs.values()]


def _size(case: tuple[str, dict[str, _Cell]]) -> list[int]:
    return [*next(iter(case[1].values())).record["shape"].values()][::-1]


def _target(record: dict[str, Any]) -> float:
    """The share of the time of 16 bits that halfbyte may take at most on a CPU; infinite where nothing is promised."""
    shape, formats = record["shape"], record["formats"]
    if record["implementation"] != "halfbyte cpu":
        return math.inf
    if record["op"] == "decode_attention":
        return math.inf if shape["T"] < 2048 else 0.8 if formats == "int8" else 1.0
    if shape["M"] == 512:
        return 1.0
    if formats in ("nf4", "nvfp4", "mxfp4"):
        return 1.2 if shape["M"] == 1 else math.inf
    return 0.5


def _column(record: dict[str, Any]) -> str:
    """The format, and the library where it is another's."""
    formats, library = record["formats"], record["implementation"]
    if formats in HALVES and library.startswith("torch"):
        return _SIXTEEN
    if library == "halfbyte cpu":
        return str(formats)
    return library if formats in library else f"{formats}, {library}"


def _speed_cell(cell: _Cell | None) -> str:
    if cell is None:
        return ""
    milliseconds = f"{1e3 * cell.record['seconds']:.2f}"
    if _column(cell.record) == _SIXTEEN:
        return milliseconds
    ratio = f"{cell.ratio:.2f}x"
    return f"{milliseconds} (**{ratio}**)" if cell.ratio > _target(cell.record) else f"{milliseconds} ({ratio})"
