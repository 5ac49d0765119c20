"""Commands in this process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from halfbyte import cli
from halfbyte.doctor import diagnose

#: What the doctor finds here: small calls of every op take seconds.
diagnosis = functools.cache(diagnose)


def run(*arguments: str, command: Callable[[list[str]], Any] = cli.main) -> int:
    """The exit code of `halfbyte ...`, or of another command."""
    with pytest.raises(SystemExit) as left:
        command(list(arguments))
    return int(left.value.code or 0)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str, command: Callable[[list[str]], Any] = cli.main) -> str:
    """What a command that fails says: one line of ours, and nothing else."""
    assert run(*arguments, command=command) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("halfbyte: ")
    assert said.err.count("\n") == 1
    return said.err
