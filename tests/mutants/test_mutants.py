"""Negative controls: for every seeded fault, the tests named with it fail; without a fault they pass. See `make mutants`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from edits import StaleEdit
from mutant import Mutant

from mutants import MUTANTS

TESTS = Path(__file__).parents[1]
#: Both packages, by name.
SOURCES = {"halfbyte": TESTS.parent / "src" / "halfbyte", "halfbyte_lab": TESTS.parent / "lab" / "src" / "halfbyte_lab"}
#: No fault: where kernels are compiled, and in Triton's interpreter, which replaces the compiler in a whole process.
CONTROLS = {"compiled": False, "interpreted": True}
pytestmark = pytest.mark.timeout(2400)  # all of them run for the first test; nine CPU-minutes, on a busy host much longer
STALE = -1  # in place of an exit status: the edit does not apply


def copy_with(mutant: Mutant | None, to: Path) -> str:
    """Library and laboratory, by symbolic links, but for the file with the fault, if there is one."""
    for name, source in SOURCES.items():
        shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"), copy_function=os.symlink)
    loops = to.parent / "loops"  # compiled once for all copies: numba's names for them hold a digest of their sources
    loops.mkdir(exist_ok=True)
    (to / "halfbyte" / "cpu" / "compiled" / "__pycache__").symlink_to(loops)
    if mutant is not None:
        file = to / mutant.path
        text = mutant.applied(file.read_text())
        file.unlink()
        file.write_text(text)
    return str(to)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    return outcomes_of(MUTANTS, tmp_path_factory.mktemp("mutants"))


def outcomes_of(mutants: Sequence[Mutant], folder: Path) -> dict[str, tuple[int, str]]:
    """Exit status of pytest and its output, for each mutant and for the controls that have tests."""
    every = sorted({test for m in mutants for test in m.tests})
    found: dict[str, tuple[int, str]] = {}
    for control, interpreted in CONTROLS.items():
        mine = [m for m in mutants if in_interpreter(m.tests[0]) is interpreted]
        if not mine:
            continue
        wanted: list[tuple[str, Mutant | None, list[str]]] = [
            (control, None, [t for t in every if in_interpreter(t) is interpreted])
        ]
        wanted += [(m.name, m, list(m.tests)) for m in mine]
        jobs: dict[str, tuple[str, list[str]]] = {}
        for number, (name, mutant, tests) in enumerate(wanted):
            try:
                jobs[name] = copy_with(mutant, folder / f"{control}{number}"), [str(TESTS / test) for test in tests]
            except StaleEdit as error:
                found[name] = STALE, str(error)
        found |= dict(zip(jobs, run(list(jobs.values()), folder / f"{control}-logs", interpreted), strict=True))
    return found


def in_interpreter(test: str) -> bool:
    return test.startswith("interpreted/")


def run(
    jobs: list[tuple[str, list[str]]], logs: Path, interpreted: bool, seconds: float = 2300, watched: str = ""
) -> list[tuple[int, str]]:
    """Exit status and log of each job: a copy of the source and the tests to run against it. watched: as of run_mutants.py."""
    logs.mkdir()
    (logs / "jobs.json").write_text(json.dumps([(*job, watched) for job in jobs]))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run_mutants.py")), str(logs), str(logs / "jobs.json")],
        env=os.environ | {"TRITON_INTERPRET": str(int(interpreted))},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr
    return [(status, (logs / str(n)).read_text()[-3000:]) for n, status in enumerate(json.loads(done.stdout))]


@pytest.mark.parametrize("control", CONTROLS)
def test_without_a_fault_everything_passes(control: str, outcomes: dict[str, tuple[int, str]]) -> None:
    status, log = outcomes[control]
    assert status == 0, log


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_fault_is_noticed(mutant: Mutant, outcomes: dict[str, tuple[int, str]]) -> None:
    status, log = outcomes[mutant.name]
    assert status != STALE, log
    assert status != 0, f"survived: {mutant.name}\n{log}"
    assert status == 1, f"the tests could not run (status {status}), which proves nothing: {mutant.name}\n{log}"
