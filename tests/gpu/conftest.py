"""The GPU's suite: `make gpu-test` on a machine with a GPU. HALFBYTE_GPU_TESTS=dry runs it in small on a CPU, to keep it alive."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_place import DRY, MODE, PLACE, TALLY, kernels_compiled
from gpu_warm import compile_in_parallel, jobs_of

sys.path.insert(0, str(Path(__file__).parents[1] / "hf"))  # families

if DRY:
    torch.set_num_threads(1)  # everything is tiny, and threads that wait for each other cost more than they bring


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `impl` runs with each of them."""
    if "impl" in metafunc.fixturenames:
        metafunc.parametrize("impl", PLACE.impls)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DRY or (MODE == "1" and torch.cuda.is_available()):
        return
    why = "torch sees no GPU" if MODE == "1" else "HALFBYTE_GPU_TESTS is not set: use make gpu-test"
    for item in items:
        item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """Kernels of the chosen tests, compiled by many processes; one would take ten minutes."""
    jobs = jobs_of(request.session.items)
    if DRY or not jobs or not torch.cuda.is_available() or "PYTEST_XDIST_WORKER" in os.environ:
        return
    began = time.perf_counter()
    compile_in_parallel(jobs, say=request.config.get_terminal_writer().write)
    TALLY.lines.append(f"compiled first: {len(jobs)} calls and tests in {time.perf_counter() - began:.0f} s")


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """An error on the GPU shows up at the next synchronisation, and after it nothing works: say which test it was, and stop."""
    yield
    try:
        PLACE.sync()
    except RuntimeError as error:
        pytest.exit(f"{request.node.nodeid} left the GPU in error, nothing after it would run: {error}", returncode=1)
    if not DRY and torch.cuda.is_available():
        torch.cuda.empty_cache()  # fifteen processes share one GPU: what each keeps for itself amounts to all of it


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = [*TALLY.lines, *(f"{impl}: {count} calls judged" for impl, count in TALLY.ran.items())]
    lines += [f"{impl}: {count} calls refused: {why}" for (impl, why), count in TALLY.refused.most_common()]
    if not DRY and MODE:
        lines.append(f"{kernels_compiled()} compiled kernels in use")
    for line in lines:
        terminalreporter.write_line(line)
