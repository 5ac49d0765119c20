"""Generated parts of a page: blocks between `<!-- name -->` and `<!-- /name -->`, and single figures in a sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

Makers = Mapping[str, Callable[[], str]]

_FIGURE = re.compile(r"<!-- =(?P<name>\w+) -->.*?<!-- / -->")
_BLOCK = r"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
_ANY_BLOCK = re.compile(r"<!-- (?P<name>[\w -]+) -->\n.*?<!-- /(?P=name) -->", re.DOTALL)


def fill(text: str, blocks: Makers, figures: Makers, page: str) -> str:
    """The page with every generated part made again. A block or figure that is missing or unknown is an error."""
    for name, make in blocks.items():
        block = re.compile(_BLOCK.format(name=re.escape(name)), re.DOTALL)
        if not block.search(text):
            raise SystemExit(f"{page} has no block <!-- {name} -->")
        made = make()
        text = block.sub(lambda m, made=made: f"{m[1]}{made}\n{m[2]}", text)  # type: ignore[misc]

    def figure(match: re.Match[str]) -> str:
        if match["name"] not in figures:
            raise SystemExit(f"{page}: no figure is called {match['name']!r}; known are {', '.join(figures)}")
        return f"<!-- ={match['name']} -->{figures[match['name']]()}<!-- / -->"

    return _FIGURE.sub(figure, text)


def by_hand(text: str) -> str:
    """What a person wrote of a page: without generated blocks, code blocks and comments."""
    text = _ANY_BLOCK.sub("", text)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def words(text: str) -> int:
    """How many words of a page were written by hand."""
    return len(re.findall(r"[^\W_][\w'.,-]*", by_hand(text)))
