"""Keep of results/gpu.jsonl what tables and charts are made of: the last record of each case, and what crossovers come from.

    python scripts/keep_records.py && make docs     # which changes no page

Lines become short: fields that hold their default are left out, numbers have ten digits, and a record without `environment` has
that of the line before it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import make_tables as tables
from docgen import crossovers

from halfbyte_lab.cases import experts_cases, linear_targets, targets
from halfbyte_lab.measure import compare
from halfbyte_lab.measure.page import by_machine
from halfbyte_lab.measure.records import Record
from halfbyte_lab.studies import QUESTIONS
from halfbyte_lab.suites import BASELINES_MARK

FILE = tables.ROOT / "results" / "gpu.jsonl"
DEFAULTS = {f.name: f.default for f in dataclasses.fields(Record) if f.default is not dataclasses.MISSING} | {"kernels": {}}


def kept(measured: Sequence[Record]) -> Iterator[Record]:
    """What the pages read."""
    for records in by_machine(measured).values():
        yield from targets.latest(records)
        yield from linear_targets.latest(records)
        yield from crossovers.newest(records)
    for name in QUESTIONS:
        yield from compare.latest([r for r in measured if r.study == name])
    yield from (r for r in measured if r.study == BASELINES_MARK)
    yield from compare.latest([r for r in measured if r.op in experts_cases.OPS])


def line(record: Record, before: Record | None) -> str:
    """A record in short."""
    data = {name: value for name, value in dataclasses.asdict(record).items() if name not in DEFAULTS or value != DEFAULTS[name]}
    if before is not None and before.environment == record.environment:
        del data["environment"]
    return json.dumps(_rounded(data), ensure_ascii=False, sort_keys=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.10g}")
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


def main() -> None:
    """Rewrite the file."""
    measured = [tables.marked(r) for r in tables.every_gpu_record()]
    used, first = {id(r) for r in kept(measured)}, dict[compare.Key, int]()
    for number, r in enumerate(measured):
        first.setdefault(compare.key(r), number)
    records = sorted((r for r in measured if id(r) in used), key=lambda r: first[compare.key(r)])
    lines = [line(record, before) for before, record in zip([None, *records], records, strict=False)]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(records):,} of {len(measured):,} records kept")


if __name__ == "__main__":
    main()
