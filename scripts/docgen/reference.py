"""Reference pages: the command line from typer, public names and environment variables from code, decisions from DESIGN.md."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import typer.main

import halfbyte
from docgen.sources import ROOT, tables
from halfbyte import settings
from halfbyte.cli import command_line as all_commands

markdown = tables.markdown


def public_names() -> str:
    """Each public name with the first sentence of its docstring."""
    pages = {page.name: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "reference").glob("api-*.md"))}
    rows = []
    for name in halfbyte.__all__:
        (page,) = [page for page, text in pages.items() if f"::: halfbyte.{name}\n" in text]
        rows.append((f"[`{name}`]({page}#halfbyte.{name})", _first_sentence(name)))
    return markdown(("name", ""), rows)


def _first_sentence(name: str) -> str:
    what = getattr(halfbyte, name)
    if isinstance(what, dict):
        return f"The {'KV cache' if name.startswith('KV') else 'weight'} formats by name."
    return " ".join((inspect.getdoc(what) or "").split("\n\n")[0].split()).replace("|", "\\|")


def command_line() -> str:
    """Every command: what it does, its arguments and options."""
    root = typer.main.get_command(all_commands())
    return "\n\n".join(_section(path, command) for path, command in _commands("halfbyte", root))


def _commands(path: str, command: object) -> Iterator[tuple[str, object]]:
    yield path, command
    for name, child in _shown(command).items():
        yield from _commands(f"{path} {name}", child)


def _shown(command: object) -> dict[str, object]:
    """The subcommands that the help lists; old names are hidden."""
    return {name: child for name, child in getattr(command, "commands", {}).items() if not child.hidden}


def _section(path: str, command: object) -> str:
    about = inspect.cleandoc(getattr(command, "help", None) or "")
    parts = [f"## {path}", about]
    children = _shown(command)
    if children:
        parts.append(markdown(("command", ""), [(f"`{name}`", _summary(child)) for name, child in children.items()]))
    rows = [row for parameter in getattr(command, "params", []) if (row := _option(parameter))]
    if rows:
        parts.append(markdown(("option", "default", ""), rows))
    return "\n\n".join(part for part in parts if part)


def _summary(command: object) -> str:
    return _escaped(inspect.cleandoc(getattr(command, "help", None) or "").split("\n\n")[0])


def _option(parameter: object) -> tuple[str, str, str] | None:
    names = [*getattr(parameter, "opts", []), *getattr(parameter, "secondary_opts", [])]
    if "--help" in names or getattr(parameter, "hidden", False):
        return None
    is_option = getattr(parameter, "param_type_name", "") == "option"
    shown = ", ".join(f"`{name}`" for name in names) if is_option else f"`{str(getattr(parameter, 'name', '')).upper()}`"
    default = getattr(parameter, "default", None)
    plain = isinstance(default, str | int | float) and not isinstance(default, bool) and default != ""
    return shown, f"`{default}`" if plain else "", _escaped(getattr(parameter, "help", None) or "")


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def environment() -> str:
    """Every environment variable that `halfbyte.settings` reads."""
    rows = []
    for _, function in inspect.getmembers(settings, inspect.isfunction):
        about = " ".join((inspect.getdoc(function) or "").split())
        if found := re.match(r"((?:HALFBYTE|TRITON)_\w+)(?:, \w+'s own flag)?: (.*)", about):
            rows.append((f"`{found[1]}`", _escaped(found[2]).replace("`IMPLS`", ", ".join(f"`{name}`" for name in settings.IMPLS))))
    return markdown(("variable", "meaning"), sorted(rows))


def decisions() -> str:
    """The last section of DESIGN.md, a paragraph a line."""
    _, _, section = (ROOT / "DESIGN.md").read_text(encoding="utf-8").partition("\n## Decisions\n\n")
    return re.sub(r"(?<!\n)\n(?!\n)", " ", section.strip())


__all__ = ["command_line", "decisions", "environment", "public_names"]
