"""`python -m halfbyte_lab`: its commands, its one-line errors, and what they write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

import command_line
from halfbyte_lab import bench
from halfbyte_lab.measure import records

ROOT = Path(__file__).parents[2]


run = partial(command_line.run, command=bench.main)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["baselines", "--threads", "1"], "--kernels and --html need --measure"),
        (["study", "memory", "-o", "."], "--output '.' is a folder"),
        (["study", "memory", "-o", "/proc/no/file"], "--output '/proc/no/file' cannot be written"),
        (["study", "memory", "--html", "/dev/null"], "--html '/dev/null' is no ordinary file"),
        (["study", "memory", "--html", "/proc/it.html"], "--html '/proc/it.html' cannot be written"),
        (["study", "memory", "--threads", "9" * 400], "expected 1 to 1024"),
        (["study", "memory", "other"], "study 'other'; choose one of: "),
        (["qkv", "--weights", "/no/such/folder"], "holds no extract"),
        (["qkv", "--impl", "fast", "--device", "cpu"], "impl='fast' does not exist"),
    ],
)
def test_our_errors_are_one_line(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert named in command_line.refusal(capsys, *arguments, command=bench.main)


def test_a_narrow_terminal_cuts_no_word(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("halfbyte.cli.shared.console", lambda: Console(width=40))
    assert run("baselines", "--device", "cpu") == 0
    assert "\u2026" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii"])
def test_what_is_no_text_is_shown_and_recorded(encoding: str, tmp_path: Path) -> None:
    file = tmp_path / "r\udcff\u00e9.jsonl"
    command = [sys.executable, "-m", "halfbyte_lab", "study", "memory", "--filter", "8B, nf4", "-o", str(file)]
    done = subprocess.run(command, capture_output=True, check=True, cwd=ROOT, env={**os.environ, "PYTHONIOENCODING": encoding})
    assert b"records appended to" in done.stdout
    typed = records.read(file).records[0].environment.command
    assert typed.startswith("python -m halfbyte_lab study memory --filter")
    assert "\\udcff" in typed


@pytest.mark.usefixtures("brief")
def test_several_studies_are_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("study", "memory", "int4-ladder", "memory", "--quick", "--device", "cpu", "--filter", "ladder|8B", "--json") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {record["study"] for record in found} == {"memory", "int4-ladder"}


@pytest.mark.usefixtures("brief")
def test_extract_and_the_variants_on_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, page = tmp_path / "layer", tmp_path / "p.html"
    assert command_line.run("extract", "demo", "--layer", "-1", "--head", "5", "-o", str(folder)) == 0
    assert "layer 5 of demo: q [64, 256], k [64, 256], v [64, 256]; biases are zero" in capsys.readouterr().out
    command = ["qkv", "--weights", str(folder), "--quick", "--device", "cpu", "--threads", "1"]
    assert run(*command, "--filter", "demo layer 5 head 5 nf4", "--html", str(page)) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("naive", "projection-fused", "semi-fused", "two-kernel"))
    assert "weights of demo, layer 5" in shown
    assert "two-kernel" in page.read_text()


@pytest.mark.usefixtures("brief")
def test_a_layer_is_evaluated_into_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "of the demo"
    assert run("evaluate", "demo", str(folder), "--layer", "-1", "--quick", "--device", "cpu", "--threads", "1") == 0
    files = {path.name for path in folder.iterdir()}
    assert files == {"weights", "records.jsonl", "results.md", "end-to-end.svg", "breakdown.svg"}
    results = (folder / "results.md").read_text()
    assert "Time of the two-kernel variant over that of naive: demo layer 5, nf4: " in results
    assert "| demo layer 5 | nf4 | 16-bit weights | 2 |" in results
    assert "16-bit weights" in (folder / "end-to-end.svg").read_text()
    assert "fused projection" in (folder / "breakdown.svg").read_text()
    capsys.readouterr()
    for arguments, named in (([], "exists; pass a new name"), (["-o", "x"], "--output: the records go to ")):
        assert run("evaluate", "demo", str(folder), *arguments) == 1
        assert named in capsys.readouterr().err


def test_measurements_that_are_all_refused_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("overhead", "--device", "cpu", "--json") == 1
    assert "which needs a GPU" in capsys.readouterr().out


def test_studies_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("study") == 0
    assert capsys.readouterr().out.startswith("int4-gqa ")
