"""Imports form no circle, and nothing that a package keeps to itself is used by another one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "halfbyte"
LABORATORY = ROOT / "lab" / "src" / "halfbyte_lab"
FILES = [*sorted(SOURCE.rglob("*.py")), *sorted(LABORATORY.rglob("*.py"))]


def dotted(path: Path) -> str:
    """The module's name as it is imported."""
    parts = path.relative_to((SOURCE if SOURCE in path.parents else LABORATORY).parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in FILES}


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree, without what only type checkers read."""
    found: list[ast.AST] = []
    stack: list[ast.AST] = [ast.parse(path.read_text())]
    while stack:
        node = stack.pop()
        found.append(node)
        typing = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        stack += node.orelse if typing else ast.iter_child_nodes(node)  # type: ignore[attr-defined]
    return tuple(found)


def imported(path: Path) -> Iterator[str]:
    """The modules of halfbyte that a file imports, at the top or inside functions."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in MODULES else str(node.module) for name in names)


def test_imports_form_no_circle() -> None:
    graph = {name: {other for other in imported(path) if other in MODULES and other != name} for name, path in MODULES.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_kernels_import_nothing_of_ahead_of_time_compiling() -> None:
    kernels = SOURCE / "kernels"
    files = [path for path in kernels.rglob("*.py") if path.parent.name != "compiling"]
    assert not [path for path in files if any(n.startswith(("halfbyte.kernels.compiling", "unittest")) for n in imported(path))]


def package(path: Path) -> str:
    """The folder that a file is in, below halfbyte; "" for the files at the top."""
    if SOURCE not in path.parents:
        return path.parent.relative_to(LABORATORY.parent).as_posix().replace("/", ".")
    return path.parent.relative_to(SOURCE).as_posix().replace("/", ".").removeprefix(".")


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def made(path: Path) -> Iterator[str]:
    """The private names that a file gives to functions, classes, variables and attributes of its own objects."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and own(node):
            yield node.attr


def own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def owner(module: str) -> str:
    """The package that a module, or a package's own name, belongs to."""
    return package(MODULES[module]) if module in MODULES else module.removeprefix("halfbyte.")


def crossed(path: Path, makers: dict[str, set[str]]) -> Iterator[str]:
    """The private names of other packages that a file imports, or reads from objects."""
    here = package(path)
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("halfbyte"):
            for alias in node.names:
                parts = f"{node.module}.{alias.name}".split(".")
                for i, part in enumerate(parts):
                    if private(part) and owner(".".join(parts[:i])) != here:
                        yield part
        elif isinstance(node, ast.Attribute) and private(node.attr) and not own(node) and here not in makers.get(node.attr, {here}):
            yield node.attr


def test_no_private_name_crosses_packages() -> None:
    """A name with an underscore that no package of ours makes is another library's, and not looked at here."""
    makers: dict[str, set[str]] = {}
    for path in FILES:
        for name in filter(private, made(path)):
            makers.setdefault(name, set()).add(package(path))
    found = {(package(path), name) for path in FILES for name in crossed(path, makers)}
    assert not found
