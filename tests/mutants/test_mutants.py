"""Negative controls: for every seeded fault, the tests named with it fail; without a fault they pass. See `make mutants`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from edits import StaleEdit
from mutant import Mutant

from mutants import MUTANTS

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src" / "halfbyte"
CONTROL = "no fault"
pytestmark = pytest.mark.timeout(900)  # all of them run for the first test
STALE = -1  # in place of an exit status: the edit does not apply


def copy_with(mutant: Mutant | None, to: Path) -> str:
    """The library, by symbolic links, but for the file with the fault, if there is one."""
    shutil.copytree(SOURCE, to / "halfbyte", ignore=shutil.ignore_patterns("__pycache__"), copy_function=os.symlink)
    if mutant is not None:
        text = mutant.applied((SOURCE / mutant.file).read_text())
        (to / "halfbyte" / mutant.file).unlink()
        (to / "halfbyte" / mutant.file).write_text(text)
    return str(to)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit status of pytest and its output, for every mutant and for the control."""
    folder = tmp_path_factory.mktemp("mutants")
    found: dict[str, tuple[int, str]] = {}
    jobs: dict[str, tuple[str, list[str]]] = {}
    every = sorted({test for m in MUTANTS for test in m.tests})
    for number, mutant in enumerate([None, *MUTANTS]):
        name, tests = (CONTROL, every) if mutant is None else (mutant.name, list(mutant.tests))
        try:
            jobs[name] = copy_with(mutant, folder / f"src{number}"), [str(TESTS / test) for test in tests]
        except StaleEdit as error:
            found[name] = STALE, str(error)
    (folder / "logs").mkdir()
    (folder / "jobs.json").write_text(json.dumps([*jobs.values()]))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run_mutants.py")), str(folder / "logs"), str(folder / "jobs.json")],
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stderr
    logs = [(folder / "logs" / str(n)).read_text()[-3000:] for n in range(len(jobs))]
    return found | dict(zip(jobs, zip(json.loads(done.stdout), logs, strict=True), strict=True))


def test_without_a_fault_everything_passes(outcomes: dict[str, tuple[int, str]]) -> None:
    status, log = outcomes[CONTROL]
    assert status == 0, log


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_fault_is_noticed(mutant: Mutant, outcomes: dict[str, tuple[int, str]]) -> None:
    status, log = outcomes[mutant.name]
    assert status != STALE, log
    assert status != 0, f"survived: {mutant.name}\n{log}"
    assert status == 1, f"the tests could not run (status {status}), which proves nothing: {mutant.name}\n{log}"


def test_names_are_unique() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
