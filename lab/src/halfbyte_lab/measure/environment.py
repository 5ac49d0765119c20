"""Where and how a figure was made: machine, versions, commit, command and date."""

from __future__ import annotations

import contextlib
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

import halfbyte
from halfbyte.device import Device


@dataclass(frozen=True)
class Environment:
    """Where and how a figure was made; the same for every record of a run. `date` is UTC, `commit` "" outside a checkout."""

    device: str
    driver: str
    threads: int
    versions: dict[str, str]
    commit: str
    command: str
    date: str


def environment(device: Device, threads: int) -> Environment:
    """The environment block of a run that starts now."""
    return Environment(
        device=device.name,
        driver=device.driver,
        threads=threads,
        versions=_versions(),
        commit=_commit(),
        command=_typed(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _typed() -> str:
    """What was typed; bytes of a name that are no text are written as escapes, since records are UTF-8."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        spec = sys.modules["__main__"].__spec__
        package = spec.parent if spec else program.parent.name
        name = "halfbyte" if package == "halfbyte" else f"python -m {package}"
    else:
        name = program.name
    text = " ".join(filter(None, (name, shlex.join(sys.argv[1:]))))
    return text.encode(errors="backslashreplace").decode()


def _versions() -> dict[str, str]:
    versions = {"halfbyte": halfbyte.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["triton"] = metadata.version("triton")
    return versions


def _commit() -> str:
    """The commit this code was checked out from, marked when files differ from it; "" when installed without git."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        # A package installed below someone else's checkout must not claim that project's commit.
        if not git("ls-files", Path(__file__).name):
            return ""
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return ""
