"""The README says what the code says: generated tables, names, files and tests that exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import halfbyte
from benchmarks.studies import QUESTIONS

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def test_the_tables_are_what_the_script_writes() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_tables.py"), "--check"]
    where = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # benchmarks/ lies beside src/
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": where})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_files_exist(page: Path) -> None:
    """Paths in backquotes and relative links lead somewhere."""
    text = page.read_text()
    folders = "src|benchmarks|tests|docs|scripts|examples|results"
    named = re.findall(rf"`((?:{folders})/[\w./-]*)", text) + re.findall(r"\]\(([\w./-]+)\)", text)
    named += [f"src/halfbyte/{path}" for path in re.findall(r"`((?:reference|cpu|ops|hf|evals|measure)/\w+\.py)`", text)]
    missing = [name for name in named if not (ROOT / name).exists() and not (page.parent / name).exists()]
    assert not missing


def test_every_public_name_is_in_the_readme_or_the_design() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "DESIGN.md").read_text() + (ROOT / "CHANGELOG.md").read_text()
    assert [name for name in halfbyte.__all__ if name not in text] == []


def test_commands_in_the_readme_exist() -> None:
    """Every `halfbyte word` of the README is a command."""
    from halfbyte.cli import app

    known = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    used = set(re.findall(r"^halfbyte (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert used >= {"eval", "generate", "quantize", "memory", "bench", "doctor"}
    assert used <= known


def test_the_operations_of_the_readme_run() -> None:
    """As they stand there, without a line of one's own."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (block,) = (text for text in blocks if "KVCache" in text)
    done: dict[str, torch.Tensor] = {}
    exec(block, done)
    assert (done["out"].shape, done["y"].shape) == ((8, 32, 1, 128), (8, 1024))


def test_every_study_has_its_section() -> None:
    """Its question and its command, in the order in which the command line lists them."""
    sections = (ROOT / "docs" / "studies.md").read_text().split("\n## ")[1:]
    heads = [section.split("\n\n")[:3] for section in sections]
    assert heads == [
        [name, f"{asks[:1].upper()}{asks[1:]}.", f"    python -m benchmarks study {name}"] for name, asks in QUESTIONS.items()
    ]
