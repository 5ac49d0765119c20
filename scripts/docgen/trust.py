"""The tables of what `make trust`, `make versions` and `make operators` have tried, from their records."""

from __future__ import annotations

from typing import Any

from docgen.sources import of_tests, tables
from halfbyte import __version__


def programme_table() -> str:
    """A line for each row of the programme: its promise, and what its records of this version say."""
    lines = []
    for row in of_tests("trust", "programme", "ROWS").values():
        mine = _records(row.name)
        tried, failures = sum(r["count"] for r in mine), sum(len(r["failures"]) for r in mine)
        figure = (f"{tried:,}", str(failures), _where(mine[-1]["environment"])) if mine else ("not run", "", "")
        lines.append((row.promise, row.name, f"{row.goal:,} {row.unit}", *figure))
    return str(tables.markdown(("promise", "row", "goal", "tried", "failures", "last run"), lines))


def version_table() -> str:
    """A line for each corner of `make versions`, and what the last run with its versions says."""
    lines = []
    for name, corner in of_tests("trust", "versions", "CORNERS").items():
        figure = ("not run", "", "")
        wanted = {package: getattr(corner, package) for package in ("torch", "transformers", "triton")}
        runs = [(r, r["environment"]["versions"]) for r in _records(f"versions: {name}")]
        if mine := [r for r, found in runs if all(found[p].split("+")[0] == version for p, version in wanted.items())]:
            last, files = mine[-1], len(mine[-1]["tests"])
            part = "" if last["tests"] == ["tests"] else f" in {files} of the suite's files"
            figure = f"{last['count']:,}{part}", str(len(last["failures"])), _where(last["environment"])
        lines.append((name, corner.python, corner.torch, corner.transformers, corner.triton, corner.when, *figure))
    head = ("corner", "Python", "torch", "transformers", "Triton", "by", "passed", "failed", "last run")
    return str(tables.markdown(head, lines))


def operator_table() -> str:
    """A line for each file that `make operators` swaps operators in."""
    lines = []
    for file in of_tests("mutants", "operators", "TESTS"):
        if records := _records(f"operators: {file}"):
            last = records[-1]  # earlier ones are of another file, or of other tests
            noticed = last["count"] - len(last["survived"])
            lines.append((f"`{file}`", f"{last['count']} of {last['of']}", str(noticed), _where(last["environment"])))
    return str(tables.markdown(("file", "tried", "noticed", "last run"), lines))


def _records(row: str) -> list[dict[str, Any]]:
    """The records of a row by this version."""
    return [r for r in tables.json_lines("trust.jsonl") if r["row"] == row and r["version"] == __version__]


def _where(made: dict[str, Any]) -> str:
    return f"{made['date'][:10]}, {made['device']}, {made['commit']}"
