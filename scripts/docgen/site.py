"""A hook of mkdocs: cells of figures and names and numbers in text stay on one line, so that tables scroll and no number wraps."""

from __future__ import annotations

import re
from typing import Any

#: Characters of the longest cell that never wraps.
LONGEST = 30
#: A number such as 1.4e-05 outside of tags.
EXPONENT = re.compile(r"\b\d[\d.]*e-\d+(?=[^<>]*<)")


def on_page_content(html: str, **_: Any) -> str:
    """The page's content with a class on short cells and on numbers with an exponent in paragraphs."""
    html = re.sub(r"<td>((?:(?!</td>).)*)</td>", _marked, html)
    return re.sub(r"<p>.*?</p>", lambda found: EXPONENT.sub(r'<span class="short">\g<0></span>', found[0]), html, flags=re.DOTALL)


def _marked(match: re.Match[str]) -> str:
    length = len(re.sub(r"<[^>]*>", "", match[1]))
    return f'<td class="short">{match[1]}</td>' if length <= LONGEST else match[0]
