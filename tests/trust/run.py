"""Run the programme: `make trust`, or `python tests/trust/run.py [ROW ...] [--minutes M]`.

Rows take turns until their goals are reached or the time is up. Each turn is a process with a record in results/trust.jsonl, so an
interrupted run goes on where it was; records of another version of halfbyte do not count. A failure keeps its seed:
`--seed N ROW` repeats it. With `--jobs N`, N processes share the seeds of a turn: on a GPU most of the time goes into compiling.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from programme import PLACES, ROOT, ROWS, Row

from halfbyte import __version__
from halfbyte.device import describe
from halfbyte.paths import append_line
from halfbyte_lab.measure.environment import environment as where_and_how

RECORDS = ROOT / "results" / "trust.jsonl"
FOLDERS = ("src", "lab/src", ".", "tests", "tests/gpu", "tests/hf", "tests/trust")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"which rows; default: all ({'; '.join(ROWS)})")
    parser.add_argument("--minutes", type=float, default=600, help="how long in all")
    parser.add_argument("--turn", type=float, default=60, help="seconds of one turn of a row")
    parser.add_argument("--jobs", type=int, default=1, help="processes of a turn")
    parser.add_argument("--output", type=Path, default=RECORDS)
    parser.add_argument("--seed", type=int, help="only this seed, here, without a record")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.rows) - set(ROWS):
        parser.error(f"no row is called {', '.join(sorted(unknown))}; there are: {'; '.join(ROWS)}")
    rows = [ROWS[name] for name in given.rows or ROWS]
    if given.worker:
        return max([work(row, given.seed, given.turn, given.jobs) for row in rows])
    if given.seed is not None:
        return max(subprocess.call(command(row, given.seed, 0, 1), env=environment(row)) for row in rows)
    return programme(rows, given.output, given.turn, time.monotonic() + 60 * given.minutes, given.jobs)


def programme(rows: list[Row], output: Path, turn: float, until: float, jobs: int = 1) -> int:
    """Turns until nothing is left to do. 1 if a record of this version holds a failure, of this run or of an earlier one."""
    devices = ("cpu", "cuda")[: 1 + torch.cuda.is_available()]
    made = {device: asdict(where_and_how(describe(device), 1)) for device in devices}  # before a file of results changes
    for environment_of in made.values():  # the records are public: where the file lies on this machine is not
        environment_of["command"] = environment_of["command"].replace(str(output), output.name)
    waiting = [row for row in rows if row.place != "gpu" or "cuda" in made]
    for row in rows:
        if row not in waiting:
            print(f"{row.name}: not run, needs a GPU")
    while waiting and time.monotonic() < until:
        row = waiting.pop(0)
        before = totals(row.name, output)
        if before["count"] < row.goal:
            record = one_turn(row, before["next"], min(turn, until - time.monotonic()), jobs)
            append_line(output, json.dumps(record | {"environment": made["cuda" if row.place == "gpu" else "cpu"]}))
            waiting.append(row)
        after = totals(row.name, output)
        print(f"{row.name}: {after['count']:,} of {row.goal:,} {row.unit}, {after['failures']} failures", flush=True)
    return int(any(totals(row.name, output)["failures"] for row in rows))


def totals(name: str, output: Path) -> dict[str, int]:
    """Counts and failures of a row in the records of this version, and the first seed behind all of theirs."""
    lines = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
    mine = [r for r in map(json.loads, lines) if r["row"] == name and r["version"] == __version__]
    return {
        "next": max((r["first"] + r["seeds"] for r in mine), default=0),
        "count": sum(r["count"] for r in mine),
        "failures": sum(len(r["failures"]) for r in mine),
    }


def one_turn(row: Row, first: int, seconds: float, jobs: int) -> dict[str, Any]:
    """A record of what the processes of a turn did from seed `first` on; `seeds` counts up to the last that one of them tried."""
    start = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        lines = pool.map(lambda job: list(reported(row, first + job, seconds, jobs)), range(jobs))
        progress = sorted((line for of_one in lines for line in of_one), key=lambda line: line["seed"])
    failures = [{"seed": p["seed"], "error": p["error"]} for p in progress if p["error"]]
    return {
        "row": row.name,
        "first": first,
        "seeds": progress[-1]["seed"] + 1 - first if progress else 0,
        "count": sum(p["count"] for p in progress),
        "failures": failures,
        "seconds": round(time.monotonic() - start, 1),
        "megabytes": max((p["megabytes"] for p in progress), default=0),
        "version": __version__,
    }


def reported(row: Row, first: int, seconds: float, step: int) -> Iterator[dict[str, Any]]:
    """What a process says of each seed; the one at which it died has failed."""
    seed = first
    with subprocess.Popen(command(row, first, seconds, step), env=environment(row), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"seed"'):
                yield json.loads(line)
                seed += step
    if process.returncode < 0:
        yield {"seed": seed, "count": 0, "megabytes": 0, "error": f"the process died: {process.returncode}"}


def command(row: Row, seed: int, seconds: float, step: int, *others: Row) -> list[str]:
    """others: rows of the same environment, one after the other."""
    options, names = {"--seed": seed, "--turn": seconds, "--jobs": step}, [one.name for one in (row, *others)]
    return [sys.executable, "-W", "ignore", __file__, *names, "--worker", *(str(x) for pair in options.items() for x in pair)]


def environment(row: Row) -> dict[str, str]:
    path = os.pathsep.join(str(ROOT / folder) for folder in FOLDERS)
    quiet = {"TRANSFORMERS_VERBOSITY": "critical", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **PLACES[row.place], **quiet, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


# ------------------------------------------------------------------------------------------------------------ in the process


def work(row: Row, seed: int, seconds: float, step: int = 1) -> int:
    """Every `step`th seed from this one on until the time is up, at least one; a line of JSON for each. 1 if one of them failed."""
    until, failed, first = time.monotonic() + seconds, False, 0
    while True:
        count, error = attempt(row, seed)
        first = first or peak()
        if not error and peak() > first + row.megabytes:
            error, first = f"the memory of the process grew by {peak() - first} MB since its first seed", peak()
        print(json.dumps({"seed": seed, "count": count, "megabytes": peak(), "error": error}), flush=True)
        seed, failed = seed + step, failed or bool(error)
        if time.monotonic() >= until:
            return int(failed)


def attempt(row: Row, seed: int) -> tuple[int, str]:
    """How many were tried with one seed, and what went wrong."""

    def late(*_: object) -> None:
        raise TimeoutError(f"more than {row.seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(row.seconds)
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            return row.check(seed, Path(folder)), ""
    except BaseException as error:  # pytest.fail raises no Exception
        traceback.print_exc()
        return 0, f"{type(error).__name__}: {error}"[:2000]
    finally:
        signal.alarm(0)


def peak() -> int:
    """The largest memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    sys.exit(main())
