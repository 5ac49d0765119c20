"""`CompiledFor`: a dataclass that a kernel is compiled for, so that Triton's cache on disk notices when its code changes.

That cache knows constants by their text. Ours have properties that run while a kernel is compiled, so their text holds a digest of
the code of their classes and of all it imports from halfbyte: a process that starts after an update finds no older kernel.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterable
from typing import Any

_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef


class CompiledFor:
    """A base of dataclasses. `str`, which Triton's key is made of, says the values and a digest of the code; `repr` the values."""

    def __str__(self) -> str:
        return f"{self!r} {_digest(tuple(kind.__module__ for kind in type(self).__mro__[:-1]))}"


@functools.cache
def _digest(modules: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(map(text, sorted(closure(modules)))).encode()).hexdigest()[:16]


def closure(modules: Iterable[str]) -> set[str]:
    """These modules and those that they import, directly or not, as far as they are halfbyte's; not this one."""
    whole, left = {__name__}, list(modules)
    while left:
        if (module := left.pop()).split(".")[0] == "halfbyte" and module not in whole:
            whole.add(module)
            left += imported(module)
    return whole - {__name__}


@functools.cache
def imported(module: str) -> tuple[str, ...]:
    """The modules of halfbyte whose names a module imports, anywhere in it."""
    lines = [node for node in ast.walk(ast.parse(text(module))) if isinstance(node, ast.ImportFrom) and node.module]
    names = [name for node in lines for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))]
    return tuple(name for name in names if name and name.startswith("halfbyte.") and _loader(name))


@functools.cache
def text(module: str) -> str:
    """The code of a module, without its comments and docstrings."""
    loader = _loader(module)
    source = None if loader is None else loader.get_source(module)  # from a folder or a zip
    if source is None:
        raise ModuleNotFoundError(f"no source of {module}")
    code = ast.parse(source)
    for node in ast.walk(code):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(code)


@functools.cache
def _loader(module: str) -> Any:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # a name inside of a module
        return None
    return spec.loader if spec and spec.origin else None
