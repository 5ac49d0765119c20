"""What a variant is compiled from, as one digest: while it stays, compiling again would give the same machine code.

Triton's own cache has a key of this kind: device code with all that it calls, types and constants of arguments, options, and the
compiler itself. It knows constants by their text alone; ours have properties that run while a kernel is compiled, so the source of
their classes and of everything those import counts too, but for words that no compiler reads.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from triton.language import constexpr

from halfbyte.kernels.aot.compiling import Configuration, Target, source

_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef


def digest(configuration: Configuration, target: Target) -> str:
    """A digest of everything that decides what a variant compiles to on an architecture, with this Triton and this Python."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.cache import get_cache_key

    backend = make_backend(GPUTarget("cuda", target.capability, 32))
    options = backend.parse_options(dict(configuration.options))
    key = get_cache_key(source(configuration), backend, options, get_cache_invalidating_env_vars())
    modules = {type(value).__module__ for value in _values([*configuration.constexprs.values(), *configuration.signature.values()])}
    return hashlib.sha256("\n".join([key, *map(text, sorted(closure(modules)))]).encode()).hexdigest()[:16]


def _values(given: Iterable[Any]) -> Iterator[Any]:
    """The values themselves, and those inside of constexprs, tuples and dataclasses."""
    for value in given:
        yield value
        if isinstance(value, constexpr):
            yield from _values([value.value])
        elif isinstance(value, tuple):
            yield from _values(value)
        elif is_dataclass(value) and not isinstance(value, type):
            yield from _values(getattr(value, field.name) for field in fields(value))


def closure(modules: Iterable[str]) -> set[str]:
    """These modules and those that they import, directly or not, as far as they are halfbyte's."""
    found, left = set[str](), list(modules)
    while left:
        if (module := left.pop()).split(".")[0] == "halfbyte" and module not in found:
            found.add(module)
            left += imported(module)
    return found


@functools.cache
def imported(module: str) -> tuple[str, ...]:
    """The modules of halfbyte whose names a module imports, anywhere in it."""
    lines = [node for node in ast.walk(ast.parse(text(module))) if isinstance(node, ast.ImportFrom) and node.module]
    names = [name for node in lines for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))]
    return tuple(name for name in names if name and name.startswith("halfbyte.") and _file(name))


@functools.cache
def text(module: str) -> str:
    """The code of a module, without its comments and docstrings."""
    file = _file(module)
    if file is None:
        raise ModuleNotFoundError(f"no source of {module}")
    code = ast.parse(file.read_text())
    for node in ast.walk(code):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(code)


@functools.cache
def _file(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # a name inside of a module
        return None
    return Path(spec.origin) if spec and spec.origin else None
