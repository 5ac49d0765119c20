"""A hook of mkdocs: cells of figures and names stay on one line, so that tables scroll and no number wraps."""

from __future__ import annotations

import re
from typing import Any

#: Characters of the longest cell that never wraps.
LONGEST = 30


def on_page_content(html: str, **_: Any) -> str:
    """The page's content with a class on short cells."""
    return re.sub(r"<td>((?:(?!</td>).)*)</td>", _marked, html)


def _marked(match: re.Match[str]) -> str:
    length = len(re.sub(r"<[^>]*>", "", match[1]))
    return f'<td class="short">{match[1]}</td>' if length <= LONGEST else match[0]
