"""What was timed on CPUs, and which targets it misses."""

from __future__ import annotations

import math
from typing import Any

from docgen.sources import cpu, tables
from halfbyte.settings import HALVES

_SIXTEEN = "16 bits, torch"
_TARGETS = (
    "Bold: beyond its target, which is, of the time of 16 bits: int4 and int8_col, M = 1 to 16, 0.5x; nf4, nvfp4 and mxfp4, M = 1, "
    "1.2x; M = 512, 1x; attention from 2,048 tokens on, int8 0.8x, others 1x."
)


def speed() -> str:
    """The CPU benchmark's records by run and op: times, and their ratio to torch's fastest 16-bit operator in the same run."""
    runs: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for record in cpu():
        own, where = record["environment"], " ".join(f"{name}={size}" for name, size in record["shape"].items())
        run = f"{own['device']}, {own['threads']} threads, {own['date'][:10]}: {record['op'].replace('_', ' ')}"
        cases = runs.setdefault((run, own["command"]), {})
        cell = cases.setdefault(where, {}).setdefault(_column(record), record)
        if record["seconds"] < cell["seconds"]:
            cases[where][_column(record)] = record
    told = []
    for (run, _), cases in runs.items():
        columns = [_SIXTEEN, *sorted({column for case in cases.values() for column in case} - {_SIXTEEN})]
        rows = [(where, *(_speed_cell(case, column) for column in columns)) for where, case in cases.items()]
        told += [f"**{run}**, ms (x the time of 16 bits)", tables.markdown(("shape", *columns), rows)]
    return "\n\n".join([_TARGETS, *told])


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


def _speed_cell(case: dict[str, Any], column: str) -> str:
    if column not in case:
        return ""
    milliseconds, ratio = f"{1e3 * case[column]['seconds']:.2f}", case[column]["seconds"] / case[_SIXTEEN]["seconds"]
    if column == _SIXTEEN:
        return milliseconds
    return f"{milliseconds} (**{ratio:.2f}x**)" if ratio > _target(case[column]) else f"{milliseconds} ({ratio:.2f}x)"
