"""What the first hour's tasks took, from the records of tests/test_first_hour.py."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from docgen.sources import tables


def latest() -> dict[str, dict[str, Any]]:
    """The last record of each task."""
    return {r["task"]: r for r in tables.json_lines("first-hour.jsonl")}


def table() -> str:
    """A line for each task: the pages that it takes, in order, and what its commands took."""
    records = latest().values()
    rows = [
        (
            f"`{r['task']}`" if r["task"].startswith("halfbyte") else r["task"],
            ", ".join(PurePath(page).stem for page in r["pages"]),
            f"{r['seconds']:.0f} s",
            f"{r['others']:.1f} of {r['cores']}",
        )
        for r in records
    ]
    made = {f"{r['environment']['device']}, {r['environment']['date'][:10]}" for r in records}
    heads = ("task", "pages", "commands take", "cores busy with other processes")
    told = "Wall-clock time of the commands on each page; the demo ran next to two busy processes."
    return f"{told} {'; '.join(sorted(made))}.\n\n{tables.markdown(heads, rows)}"
