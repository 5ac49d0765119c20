"""Negative controls: for every seeded fault, the tests named with it fail; without a fault they pass."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mutants import MUTANTS, Mutant

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src" / "halfbyte"
CONTROL = "no fault"


def copy_with(mutant: Mutant | None, to: Path) -> Path:
    """A copy of the library (its data and what needs transformers left out) with one fault, or none."""
    shutil.copytree(SOURCE, to / "halfbyte", ignore=shutil.ignore_patterns("__pycache__", "data", "hf", "measure", "evals"))
    if mutant is not None:
        file = to / "halfbyte" / mutant.file
        text = file.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.name}: {mutant.file} holds its text {text.count(mutant.old)} times, not once"
        file.write_text(text.replace(mutant.old, mutant.new))
    return to


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit status of pytest and its output, for every mutant and for the control."""
    folder = tmp_path_factory.mktemp("mutants")
    every = sorted({test for m in MUTANTS for test in m.tests})
    jobs: list[tuple[str, list[str]]] = []
    for number, mutant in enumerate([None, *MUTANTS]):
        tests = every if mutant is None else list(mutant.tests)
        jobs.append((str(copy_with(mutant, folder / f"src{number}")), [str(TESTS / test) for test in tests]))
    (folder / "logs").mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run_mutants.py")), str(folder / "logs"), str(folder / "jobs.json")],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    logs = [(folder / "logs" / str(n)).read_text()[-3000:] for n in range(len(jobs))]
    names = [CONTROL, *(m.name for m in MUTANTS)]
    return dict(zip(names, zip(json.loads(done.stdout), logs, strict=True), strict=True))


def test_without_a_fault_everything_passes(outcomes: dict[str, tuple[int, str]]) -> None:
    status, log = outcomes[CONTROL]
    assert status == 0, log


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_fault_is_noticed(mutant: Mutant, outcomes: dict[str, tuple[int, str]]) -> None:
    status, log = outcomes[mutant.name]
    assert status != 0, f"survived: {mutant.name}\n{log}"
    assert status == 1, f"the tests could not run (status {status}), which proves nothing: {mutant.name}\n{log}"


def test_names_are_unique() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
