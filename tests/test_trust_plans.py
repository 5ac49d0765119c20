"""Files of measured plans that were made to hurt are left out, with a warning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfbyte.plans import tuning_cache

GOOD = {"halfbyte plans": tuning_cache.VERSION, "gpu": "G", "multiprocessors": 4, "made with": {}}


@pytest.mark.parametrize("us", ["1" + "0" * 400, "1e999", "-1e999", "NaN", "1" * 5000])
def test_times_that_are_no_times(tmp_path: Path, us: str) -> None:
    entry = {"problem": {"op": "linear"}, "choice": None, "us": 0, "analytic us": 1, "date": "2026-01-01"}
    file = tmp_path / "plans.json"
    file.write_text(json.dumps({**GOOD, "entries": [entry]}).replace('"us": 0', f'"us": {us}'))
    with pytest.raises(tuning_cache.DamagedPlans):
        tuning_cache.read(file)
    with pytest.warns(UserWarning, match="measured plans are left out"):
        assert not tuning_cache._table_of("G", 4, str(file), "").entries


def test_two_hundred_thousand_brackets(tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    file.write_text("[" * 200_000)
    with pytest.warns(UserWarning, match="measured plans are left out"):
        assert not tuning_cache._table_of("G", 4, str(file), "").entries
