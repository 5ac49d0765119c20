"""halfbyte's errors and warnings. Each message says what was wrong, what was expected and what to do."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import warnings
from contextlib import suppress
from importlib.util import find_spec
from typing import Any


class HalfbyteError(Exception):
    """Base of every error that halfbyte raises on purpose."""


class InvalidArgument(HalfbyteError, ValueError):
    """An argument has the wrong rank, dtype, device or value; the message names it."""


class Unsupported(HalfbyteError, NotImplementedError):
    """The request is well formed, but nothing here implements it; the message says what would work."""


class MissingPackage(Unsupported, ImportError):
    """An optional package is missing, or its version is not supported; the message has the command that installs it."""


class CapacityError(HalfbyteError):
    """A cache or a page pool is full. Nothing was changed."""


class CheckpointError(HalfbyteError):
    """A model folder or file is missing, damaged, or not what its configuration says."""


def check(condition: bool, message: str) -> None:
    """Raise `InvalidArgument(message)` unless `condition` holds."""
    if not condition:
        raise InvalidArgument(message)


def require(package: str, who: str) -> None:
    """Import an optional package for `who`; raise `MissingPackage` unless a version that halfbyte declares is installed."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise MissingPackage(f"{who} needs {package}, which is not installed: {pip_install(package)}") from error
    if why := other_version(package):
        raise MissingPackage(f"{who} needs another {why}")


#: Commands of the laboratory, which `halfbyte_lab.commands` registers; without it they say what to install.
LABORATORY = ("advise", "bench", "calibrate", "demo", "eval", "extract")
#: How to install it.
GET_LABORATORY = "in a checkout of halfbyte: pip install ./lab"


def laboratory(module: str, who: str) -> Any:
    """The module `halfbyte_lab.<module>`, the one way to it; `MissingPackage` tells `who` needs it where it is not installed."""
    if find_spec("halfbyte_lab") is None:
        raise MissingPackage(f"{who} needs halfbyte's laboratory; {GET_LABORATORY}")
    return importlib.import_module(f"halfbyte_lab.{module}")


def other_version(package: str) -> str:
    """The installed version of an optional package and the command that replaces it; "" if halfbyte declares this version."""
    with suppress(ImportError):  # no metadata, or `packaging` is not installed
        from packaging.requirements import Requirement

        requirement, current = Requirement(_declared(package)), importlib.metadata.version(package)
        if not requirement.specifier.contains(current, prereleases=True):
            return f"{package} than {current}: {pip_install(package)}"
    return ""


def pip_install(package: str) -> str:
    """The command that installs an optional package in a version that halfbyte declares, with or without a checkout."""
    return f"pip install '{_declared(package)}'"


def _declared(package: str) -> str:
    """A package with the versions that halfbyte declares, such as `name<6,>=5.4`; its name alone if there are none."""
    requirements: list[str] = []
    for distribution in ("halfbyte", "halfbyte-lab"):
        with suppress(importlib.metadata.PackageNotFoundError):  # run from its source, without being installed
            requirements += importlib.metadata.requires(distribution) or []
    names = (line.partition(";")[0].strip() for line in requirements)
    return next((w for w in names if re.split("[^a-z]", w)[0] == package), package)


_WARNED: set[str] = set()


def warn_once(message: str, key: str = "") -> None:
    """Issue a `UserWarning` once per process and message, or `key`. Never while torch.compile traces: it would break the graph."""
    import torch  # not at the top: `halfbyte --help` imports this module

    if torch.compiler.is_compiling() or (key or message) in _WARNED:
        return
    _WARNED.add(key or message)
    warnings.warn(f"halfbyte: {message}", stacklevel=4)
