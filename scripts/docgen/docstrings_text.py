"""Docstrings as Markdown: lines such as `name  what it is`, aligned in columns, become a list."""

from __future__ import annotations

import re

#: A line of aligned columns: names, two spaces or more, text.
ENTRY = re.compile(r"^(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*) {2,}(?P<text>\S.*)$")


def as_markdown(text: str) -> str:
    """The docstring with aligned columns as a Markdown list; indented lines behind an entry go on with it."""
    lines: list[str] = []
    in_list = False
    for line in text.splitlines():
        if entry := ENTRY.match(line):
            names = ", ".join(f"`{name}`" for name in entry["names"].split(", "))
            lines += [*([] if in_list else [""]), f"- {names}: {entry['text']}"]
            in_list = True
        elif in_list and line.startswith("  ") and line.strip():
            lines[-1] += " " + line.strip()
        else:
            if in_list and line.strip():
                lines.append("")
            in_list = False
            lines.append(line)
    return "\n".join(lines)
