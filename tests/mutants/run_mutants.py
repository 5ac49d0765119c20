"""Run tests against mutated copies of the source: `python run_mutants.py SRC TESTS OUT JOB.json`.

torch and pytest are imported once; each job then runs in a forked child, which imports the library for the first time, from its own
copy. JOB.json is a list of [copy of src, [test ids], file to watch or ""]; OUT/N holds what job N printed, and OUT/N.json, if it
watched a file, what each test took and reached of it (`Watch`). Prints one exit status of pytest a line.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import hypothesis  # noqa: F401
import numpy  # noqa: F401
import pytest
import torch
import torch._inductor.config  # what use_deterministic_algorithms would import in every child
import torch.testing._internal.optests


class Watch:
    """A plugin of pytest: which functions of a file each test calls."""

    def __init__(self, file: str, output: Path) -> None:
        self.file, self.output = file, output
        self.tests: dict[str, tuple[float, set[str]]] = {}  # by test: seconds, qualified names of functions

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        names: set[str] = set()

        def called(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename.endswith(self.file):
                names.add(frame.f_code.co_qualname.partition(".<locals>")[0])

        start = time.process_time()
        sys.setprofile(called)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            self.tests[item.nodeid] = time.process_time() - start, names

    def pytest_sessionfinish(self) -> None:
        self.output.write_text(json.dumps({name: [seconds, sorted(names)] for name, (seconds, names) in self.tests.items()}))


def child(source: str, tests: list[str], watched: str, log: Path) -> int:
    """The exit status of pytest over `tests` with the library taken from `source`."""
    seconds = 900 if watched else 100 + 20 * len(tests)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))  # of its own time: a busy machine proves nothing
    signal.alarm(5 * seconds)
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        torch.set_num_threads(1)
        sys.path.insert(0, source)
        sys.dont_write_bytecode = True
        try:
            import halfbyte
            import halfbyte_lab  # ahead of pytest, whose configuration names the checkout's own

            assert all(str(package.__file__).startswith(source) for package in (halfbyte, halfbyte_lab))
            options = ["-x", "-p", "no:cacheprovider", "--hypothesis-profile=mutants", "--tb=line", "-W", "ignore"]
            return int(pytest.main([*options, *tests], [Watch(watched, log.with_suffix(".json"))] if watched else []))
        except BaseException:
            traceback.print_exc()
            return 99
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


def main() -> None:
    """Two children at a time."""
    assert "halfbyte" not in sys.modules
    out, jobs = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    statuses: dict[int, int] = {}
    running: dict[int, int] = {}
    for number, (source, tests, watched) in enumerate(jobs):
        pid = os.fork()
        if not pid:
            os._exit(child(source, tests, watched, out / str(number)))
        running[pid] = number
        while len(running) >= 2 or (number == len(jobs) - 1 and running):
            done, status = os.wait()
            statuses[running.pop(done)] = os.waitstatus_to_exitcode(status)
    print(json.dumps([statuses[n] for n in range(len(jobs))]))


if __name__ == "__main__":
    main()
