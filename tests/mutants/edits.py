"""Edits of a function by its syntax tree, so that names of variables, comments and formatting do not matter.

A pattern is Python in which `_a` to `_z` stand for any expression, the same one wherever they occur; `*_a` for any number of
arguments or elements, and `**_a` for any number of keyword arguments. An edit changes the text of what matches and nothing else.
"""

from __future__ import annotations

import ast
import copy
import re
import textwrap
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

#: What each placeholder of a pattern stands for: a node, or several.
Found = dict[str, Any]


class StaleEdit(Exception):
    """The function is gone, or the edit does not apply to it exactly once."""


class Change(NamedTuple):
    """New text for a node."""

    node: ast.expr | ast.stmt
    text: str


class Edit(Protocol):
    def changes(self, target: ast.AST, source: str) -> list[Change]: ...


@dataclass(frozen=True)
class Rewrite:
    """Replace an expression or a statement. `Rewrite("_a < _b", "_a <= _b")` lets a comparison hold for equals, too."""

    pattern: str
    replacement: str

    def changes(self, target: ast.AST, source: str) -> list[Change]:
        pattern, made = _parsed(self.pattern), ast.parse(self.replacement).body
        found = []
        for node in ast.walk(target):
            if isinstance(node, ast.expr | ast.stmt) and (values := _match(pattern, node, {})) is not None:
                text = "\n".join(ast.unparse(_filled(statement, values)) for statement in made)
                indented = textwrap.indent(text, " " * node.col_offset).lstrip()
                found.append(Change(node, f"({text})" if isinstance(node, ast.expr) else indented))
        return found


def drop(call: str) -> Rewrite:
    """The call is not made."""
    return Rewrite(call, "None")


@dataclass(frozen=True)
class InText:
    """Replace a part of a string (PTX, a schema), which must hold it once."""

    old: str
    new: str

    def changes(self, target: ast.AST, source: str) -> list[Change]:
        found = []
        for node in _outermost_strings(target):
            text = cast(str, ast.get_source_segment(source, node))
            found += [Change(node, text.replace(self.old, self.new))] * text.count(self.old)
        return found


def mutated(source: str, name: str, edit: Edit) -> str:
    """The text of a module with one edit in the function (method, class, constant) of this qualified name."""
    changes = edit.changes(_definition(ast.parse(source), name), source)
    if len(changes) != 1:
        raise StaleEdit(f"{edit} applies {len(changes)} times to {name}, not once")
    ((node, text),) = changes
    lines, data = source.encode().splitlines(keepends=True), source.encode()
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: cast(int, node.end_lineno) - 1])) + cast(int, node.end_col_offset)
    changed = (data[:start] + text.encode() + data[end:]).decode()
    ast.parse(changed)
    return changed


def _definition(module: ast.Module, name: str) -> ast.AST:
    """By qualified name."""
    found: list[ast.AST] = [module]
    for part in name.split("."):
        found = [child for parent in found for child in _bodies(parent) if part in _names(child)]
    if len(found) != 1:
        raise StaleEdit(f"{name} is defined {len(found)} times, not once")
    return found[0]


def _bodies(node: ast.AST) -> list[ast.AST]:
    return list(getattr(node, "body", []))


def _names(statement: ast.AST) -> list[str]:
    """What a statement defines."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _outermost_strings(node: ast.AST) -> list[ast.expr]:
    """String literals, f-strings as one."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        return [node]
    return [one for child in ast.iter_child_nodes(node) for one in _outermost_strings(child)]


def _parsed(pattern: str) -> ast.AST:
    (statement,) = ast.parse(pattern).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def _placeholder(node: object) -> str:
    """`_a` of a name, "*_a" of a starred one, "**_a" of keywords; else "" """
    if isinstance(node, ast.Starred) and (name := _placeholder(node.value)):
        return f"*{name}"
    if isinstance(node, ast.keyword) and node.arg is None and (name := _placeholder(node.value)):
        return f"**{name}"
    return node.id if isinstance(node, ast.Name) and re.fullmatch("_[a-z]", node.id) else ""


def _same(a: ast.AST, b: ast.AST) -> bool:
    one, other = (re.sub(r"ctx=\w+\(\)", "", ast.dump(node)) for node in (a, b))
    return one == other


def _match(pattern: Any, node: Any, found: Found) -> Found | None:
    """`found` and what the pattern's placeholders stand for; None where it does not match."""
    if name := _placeholder(pattern):
        if name in found:
            return found if _same(found[name], node) else None
        return found | {name: node}
    if isinstance(pattern, list):
        return _match_all(pattern, node, found)
    if not isinstance(pattern, ast.AST):
        return found if type(pattern) is type(node) and pattern == node else None
    if type(pattern) is not type(node):
        return None
    for field in pattern._fields:
        one, other = getattr(pattern, field, None), getattr(node, field, None)
        if field == "keywords":
            one, other = _sorted(one), _sorted(other)
        matched = found if field in ("ctx", "kind", "type_comment") else _match(one, other, found)
        if matched is None:
            return None
        found = matched
    return found


def _sorted(keywords: list[ast.keyword]) -> list[ast.keyword]:
    """Their order does not matter; ** comes last."""
    return sorted(keywords, key=lambda one: one.arg or "~")


def _match_all(patterns: list[Any], nodes: list[Any], found: Found) -> Found | None:
    if not patterns:
        return found if not nodes else None
    first, *rest = patterns
    if (name := _placeholder(first)).startswith("**"):  # keywords that are named come before it, and may lie between others
        return found | {name: nodes}
    if isinstance(first, ast.keyword):
        named = [node for node in nodes if node.arg == first.arg]
        matched = _match(first.value, named[0].value, found) if named else None
        return None if matched is None else _match_all(rest, [node for node in nodes if node.arg != first.arg], matched)
    if name.startswith("*"):
        for count in range(len(nodes) + 1):
            if (matched := _match_all(rest, nodes[count:], found | {name: nodes[:count]})) is not None:
                return matched
        return None
    matched = _match(first, nodes[0], found) if nodes else None
    return None if matched is None else _match_all(rest, nodes[1:], matched)


def _filled(replacement: ast.AST, found: Found) -> ast.AST:
    """The replacement with what its placeholders stand for."""

    class Fill(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            name = _placeholder(node)
            return copy.deepcopy(found[name]) if name else self.generic_visit(node)

    return cast(ast.AST, Fill().visit(copy.deepcopy(replacement)))
