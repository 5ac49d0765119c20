"""From which size on packed data is faster than 16 bits: the rule, and the table of records."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halfbyte_lab.measure.environment import Environment
from halfbyte_lab.measure.records import Record

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from docgen import crossovers
from docgen.crossovers import ATTENTION, LINEAR, Size, crossing


@pytest.mark.parametrize(
    ("times", "first"), [([], 0), ([1.0], 0), ([0.99], 1), ([0.5, 1.0, 2.0], 1), ([2.0, 0.9, 1.1, 1.2], 2), ([2.0, 0.9], 2)]
)
def test_faster_from_the_smallest_size_beyond_which_nothing_is_slower(times: list[float], first: int) -> None:
    sizes = [Size(i, "", t) for i, t in enumerate(times)]
    assert crossing(sizes) == (sizes[first - 1] if first else None, sizes[first] if first < len(sizes) else None)


def record(formats: str, seconds: float | None, date: str, **other: Any) -> Record:
    """One of a linear layer on a GPU of some name."""
    where = Environment("a GPU", "580.1", 1, {}, "", "", date)
    made = Record(
        LINEAR, {"M": 4, "N": 64, "K": 128}, formats, other.pop("implementation", "halfbyte auto"), 1, where, case="a case"
    )
    return replace(made, seconds=seconds, **other)


def test_the_newest_run_with_a_16_bit_time_counts_and_runs_are_not_mixed() -> None:
    cublas, humming = {"implementation": "cuBLAS"}, {"implementation": "humming"}
    runs = [
        record("bf16", 4.0, "2", **cublas),
        record("bf16", 3.0, "2", **cublas | {"implementation": "another"}),
        record("nf4", 2.0, "2"),
        record("nf4", 0.1, "2", **humming),
        record("bf16", 9.0, "1", **cublas),
        record("nf4", 1.0, "1"),
        record("nf4", 0.5, "3"),  # nothing in 16 bits ran with it
        record("bf16", None, "4", refused="why", **cublas),
        record("nf4", 0.5, "4"),
    ]
    assert crossovers.of_machine(runs) == {LINEAR: {"nf4": {"64 x 128": {"4": 1.5}}}}
    newer = [record("bf16", 0.996, "5", **cublas), record("nf4", 1.0, "5")]
    assert crossovers.of_machine([*newer, *runs]) == {LINEAR: {"nf4": {"64 x 128": {"4": 0.99}}}}  # not rounded to as fast
    assert crossovers.of_machine([record("nf4", 1.0, "5")]) == {}


def test_attention_of_studies_counts_without_alibi_or_outliers() -> None:
    shape = {"B": 128, "Hq": 32, "H": 8, "D": 128, "T": 2048}
    for op in crossovers.ATTENTION_OPS:
        run = [record(f, s, "1", op=op, shape=shape) for f, s in (("fp16", 3.0), ("int8", 2.0))]
        assert crossovers.of_machine(run) == {ATTENTION: {"int8": {"32/8 x 128": {"128 x 2048": 1.5}}}}
    assert crossovers.of_machine([replace(r, shape={**shape, "ALiBi": 1}) for r in run]) == {}
    assert crossovers.of_machine([replace(r, op="append") for r in run]) == {}
