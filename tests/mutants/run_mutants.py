"""Run tests against mutated copies of the source: `python run_mutants.py SRC TESTS OUT JOB.json`.

torch and pytest are imported once; each job then runs in a forked child, which imports the library for the first time, from its own
copy. JOB.json is a list of [copy of src, [test ids]]; OUT/N holds what job N printed. Prints one exit status of pytest a line.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path

import hypothesis  # noqa: F401
import numpy  # noqa: F401
import pytest
import torch
import torch._inductor.config  # what use_deterministic_algorithms would import in every child
import torch.testing._internal.optests


def child(source: str, tests: list[str], log: Path) -> int:
    """The exit status of pytest over `tests` with the library taken from `source`."""
    resource.setrlimit(resource.RLIMIT_CPU, (120, 120))  # of its own time: a busy machine proves nothing
    signal.alarm(600)
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
            return int(pytest.main([*options, *tests]))
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
    for number, (source, tests) in enumerate(jobs):
        pid = os.fork()
        if not pid:
            os._exit(child(source, tests, out / str(number)))
        running[pid] = number
        while len(running) >= 2 or (number == len(jobs) - 1 and running):
            done, status = os.wait()
            statuses[running.pop(done)] = os.waitstatus_to_exitcode(status)
    print(json.dumps([statuses[n] for n in range(len(jobs))]))


if __name__ == "__main__":
    main()
