"""The faults of `make mutants` are well formed. `make test` says so within seconds of a change that moves what they edit."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "mutants"))
MUTANTS: list[Any] = importlib.import_module("mutants").MUTANTS
SOURCES = {"halfbyte": ROOT / "src", "halfbyte_lab": ROOT / "lab" / "src"}


@pytest.mark.parametrize("file", sorted({m.path for m in MUTANTS}))
def test_every_fault_of_a_file_applies(file: str) -> None:
    source = (SOURCES[file.split("/")[0]] / file).read_text()
    assert [m.name for m in MUTANTS if m.path == file and m.applied(source) == source] == []


def test_names_are_unique() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)


def test_tests_of_a_mutant_run_in_one_process() -> None:
    assert [m.name for m in MUTANTS if len({test.startswith("interpreted/") for test in m.tests}) != 1] == []
