"""Commands in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from halfbyte import cli


def run(*arguments: str, command: Callable[[list[str]], Any] = cli.main) -> int:
    """The exit code of `halfbyte ...`, or of another command."""
    with pytest.raises(SystemExit) as left:
        command(list(arguments))
    return int(left.value.code or 0)
