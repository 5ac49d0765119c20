"""Commands that write files, made small, and how what they leave is read: what the row of killed commands interrupts."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

from halfbyte import hf
from halfbyte.cache_plan import read_plan
from halfbyte.cli import main
from halfbyte.paths import shipped_model

SMALL = ("--windows", "1", "--length", "32")
BENCH = ("--batch", "1", "--context", "64", "--dim", "64", "--heads", "2/1", "--formats", "int8,int4", "--impl", "cpu", "--quick")
COMMANDS: dict[str, tuple[str, ...]] = {
    "model": ("quantize", str(shipped_model()), "--weights", "int4_g128", "--output"),
    "plan.json": ("calibrate", str(shipped_model()), "--bits", "6", "--formats", "int8,int4", *SMALL, "--output"),
    "eval.jsonl": ("eval", str(shipped_model()), "--keys", "int8", "--values", "int4", *SMALL, "--output"),
    "bench.jsonl": ("bench", "decode", *BENCH, "--output"),
    "page.html": ("eval", str(shipped_model()), "--keys", "int8", "--values", "int8", *SMALL, "--html"),
}


def command(name: str, folder: Path) -> Callable[[], None]:
    """A command that writes this file or folder, without its words."""

    def write() -> None:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        status = exit_status([*COMMANDS[name], str(folder / name)])
        assert not status, f"{name}: exit status {status}"

    return write


def exit_status(arguments: list[str]) -> int | str | None:
    try:
        main(arguments)
    except SystemExit as end:
        return end.code
    return 0


def seconds_of(write: Callable[[], None]) -> float:
    """How long it takes in a process of its own, where it must not fail."""
    start, process = time.perf_counter(), multiprocessing.get_context("fork").Process(target=write)
    process.start()
    process.join()
    assert process.exitcode == 0, f"exit status {process.exitcode}"
    return time.perf_counter() - start


def check_left(name: str, folder: Path, whole: bool) -> None:
    """What lies there can be read as a whole, or is not there; `whole`: it is."""
    made = folder / name
    if not made.exists():
        assert not whole, f"{name} was not written"
        return
    match made.suffix:
        case "":
            hf.load(made)
        case ".json":
            read_plan(made)
        case ".jsonl":  # by lines; the last may be cut short
            lines = made.read_text(encoding="utf-8").split("\n")
            assert [json.loads(line) for line in lines[:-1]] or not whole
            assert lines[-1] == "" or not whole
        case ".html":
            assert made.read_text(encoding="utf-8").rstrip().endswith("</html>")


def check_clean(name: str, folder: Path) -> None:
    """After a run that was not disturbed nothing is left of those that were."""
    kept = {name, f"{Path(name).stem}.measured.jsonl"} if name == "plan.json" else {name}
    found = {path.name for path in folder.iterdir() if path.suffix != ".lock"}
    assert found <= kept, f"left over: {found - kept}"
