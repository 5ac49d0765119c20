"""A hook of mkdocs: cells of figures and names and numbers in text stay on one line, so that tables scroll and no number wraps;
a click opens a chart."""

from __future__ import annotations

import re
from typing import Any

#: Characters of the longest cell that never wraps.
LONGEST = 30
#: A chart or diagram that is no link yet.
CHART = re.compile(r'(<a [^>]*>)?(<img [^>]*src="([^"]+\.svg)"[^>]*>)')
#: A number such as 1.4e-05, and a date, outside of tags.
EXPONENT = re.compile(r"\b(?:\d[\d.]*e-\d+|\d{4}-\d\d-\d\d\b)(?=[^<>]*<)")


def on_page_content(html: str, **_: Any) -> str:
    """The page's content with a class on short cells, numbers with an exponent and dates, and charts that open alone."""
    html = CHART.sub(lambda found: found[0] if found[1] else f'<a href="{found[3]}">{found[2]}</a>', html)
    html = re.sub(r"<td>((?:(?!</td>).)*)</td>", _marked, html)
    return re.sub(r"<p>.*?</p>", lambda found: EXPONENT.sub(r'<span class="short">\g<0></span>', found[0]), html, flags=re.DOTALL)


def _marked(match: re.Match[str]) -> str:
    length = len(re.sub(r"<[^>]*>", "", match[1]))
    return f'<td class="short">{match[1]}</td>' if length <= LONGEST else match[0]
