"""The table of what `make trust` has tried, from its records."""

from __future__ import annotations

from typing import Any

from docgen.sources import programme, tables
from halfbyte import __version__


def programme_table() -> str:
    """A line for each row of the programme: its promise, and what its records of this version say."""
    records: list[dict[str, Any]] = [r for r in tables.json_lines("trust.jsonl") if r["version"] == __version__]
    lines = []
    for row in programme().values():
        mine = [r for r in records if r["row"] == row.name]
        tried, failures = sum(r["count"] for r in mine), sum(len(r["failures"]) for r in mine)
        figure = (f"{tried:,}", str(failures), _where(mine[-1]["environment"])) if mine else ("not run", "", "")
        lines.append((row.promise, row.name, f"{row.goal:,} {row.unit}", *figure))
    return str(tables.markdown(("promise", "row", "goal", "tried", "failures", "last run"), lines))


def _where(made: dict[str, Any]) -> str:
    return f"{made['date'][:10]}, {made['device']}, {made['commit']}"
