"""Every code block of the README and of the documentation runs: offline, with the shipped model, and again over what it wrote.

Python blocks of a page share a namespace; a second run has a new one and finds the files of the first. `bash` blocks hold
commands of halfbyte, which run in this process, and commands that install or build, which are looked up. A `text` block behind a
Python block is what that block prints, up to the digits of its numbers.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import socket
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import halfbyte_lab.bench
from halfbyte import cli
from halfbyte.paths import shipped_model

ROOT = Path(__file__).parents[1]
EVERY_PAGE = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in EVERY_PAGE if re.search(r"^```\w", page.read_text(encoding="utf-8"), re.MULTILINE)]
#: What stands in the pages, and what is run here: no network, and no accelerate.
INSTEAD = {"Qwen/Qwen3-0.6B": "shipped", "some/model-GPTQ": "gptq", ', device_map="auto"': ""}


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield Block(found[1], found[2], text.count("\n", 0, found.start(2)) + 1)


@pytest.fixture
def models(gptq_folder: Path) -> dict[str, str]:
    """What stands in the place of models that would be downloaded."""
    return {"shipped": str(shipped_model()), "gptq": str(gptq_folder)}


@pytest.mark.slow(sample=4)
@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_block_runs_and_again_over_its_files(
    page: Path, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", offline)
    run(page, models)
    if any(tmp_path.iterdir()):  # else a second run would be the same as the first
        run(page, models)


def offline(self: socket.socket, address: object) -> None:
    """What a page meets that asks the network for anything."""
    raise AssertionError(f"a block connects to {address}; pages run offline")


def run(page: Path, models: dict[str, str]) -> None:
    names: dict[str, object] = {"__name__": "page"}
    printed = ""
    for block in blocks(page):
        text = block.text
        for written, run_instead in INSTEAD.items():
            text = text.replace(written, models.get(run_instead, run_instead))
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.language == "python":
            printed = run_python(text, where, names)
        elif block.language == "bash":
            for command in text.splitlines():
                run_command(command, where)
        elif block.language == "text" and printed:
            assert alike(printed, text), f"{where} shows {text!r}, but the block before it prints {printed!r}"
            printed = ""


def run_python(text: str, where: str, names: dict[str, object]) -> str:
    """Execute a block, and return what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile("\n" * (int(where.rpartition(":")[2]) - 1) + text, where, "exec", dont_inherit=True), names)
    return out.getvalue()


def alike(printed: str, shown: str) -> bool:
    """Equal but for the digits of numbers, which differ between machines; of a longer text its beginning may be shown."""
    lines = [re.sub(r"[-+]?\d[\d.,e+-]*", "#", text.strip()).splitlines() for text in (printed, shown)]
    return lines[0][: len(lines[1])] == lines[1]


def run_command(command: str, where: str) -> None:
    """One line of a `bash` block."""
    words = shlex.split(command, comments=True)
    if not words:
        return
    programs = {("halfbyte",): cli.main, ("python", "-m", "halfbyte_lab"): halfbyte_lab.bench.main}
    if (program := next((start for start in programs if words[: len(start)] == list(start)), None)) is not None:
        with contextlib.redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as ended:
            programs[program](words[len(program) :])
        assert ended.value.code in (0, None), f"{where}: {command} ended with {ended.value.code}"
    elif words[:2] == ["rm", "-rf"]:
        shutil.rmtree(words[2], ignore_errors=True)
    elif words[0] == "make":
        assert re.search(rf"^{re.escape(words[1])}:", (ROOT / "Makefile").read_text(), re.MULTILINE), (
            f"{where}: no target {words[1]}"
        )
    else:
        assert words[:2] == ["pip", "install"], f"{where}: {command} is not a command that a test can look up"
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\.\[(\w+)\]", command)) <= set(extras), f"{where}: {command} names an unknown extra"


def test_pages_have_no_unknown_kind_of_block() -> None:
    """A block without a language, or of another one, would not be run."""
    unknown = [
        f"{page.relative_to(ROOT)}:{b.line}" for page in PAGES for b in blocks(page) if b.language not in ("python", "bash", "text")
    ]
    assert unknown == []
