"""The project speaks the field's language: a list of words that it does not use, with the word to use."""

from __future__ import annotations

import io
import re
import sys
import tokenize
from functools import cache
from pathlib import Path

import pytest
from vocabulary import INSTEAD

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from docgen.markup import by_hand  # noqa: E402

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
#: How often docstrings, messages and comments of src/ still use a word. Numbers may only become smaller.
LEFT_IN_SRC: dict[str, int] = {
    r"warp-group products?": 9,
    r"rows? of x": 34,
    r"scales? of groups?": 7,
    r"scales? of tokens?": 2,
    r"(read )?roofs?": 15,
    r"peers?": 2,
    r"contenders?": 1,
    r"told|untold": 7,
    r"asked for|asks for": 15,
    r"beside": 11,
    r"apart": 23,
    r"h[eo]ld against": 7,
    r"looked at again": 2,
    r"as ever": 1,
    r"nobody": 10,
    r"planes?": 29,
    r"taken off": 3,
    r"bars? (met|missed)|meets? (its|their) bars?": 3,
}


def uses(text: str) -> list[tuple[str, str]]:
    """(found, instead) for every use in a text."""
    prose = re.sub(r"`[^`\n]*`", "", text)
    return [(m[0], better) for pattern, better in INSTEAD.items() for m in re.finditer(rf"\b(?:{pattern})\b", prose, re.IGNORECASE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_pages_use_the_fields_words(page: Path) -> None:
    found = [f"{word!r}: write {better}" for word, better in uses(by_hand(page.read_text(encoding="utf-8")))]
    assert not found


@cache
def words_of_source() -> str:
    """All comments, docstrings and messages of src/."""
    said = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING, tokenize.FSTRING_MIDDLE if sys.version_info >= (3, 12) else -1):
                said.append(token.string)
    return "\n".join(said)


@pytest.mark.parametrize("pattern", INSTEAD)
def test_source_uses_them_ever_more(pattern: str) -> None:
    """What is left may only become less: lower the number when you have taken some out."""
    found = re.findall(rf"\b(?:{pattern})\b", words_of_source(), re.IGNORECASE)
    assert len(found) <= LEFT_IN_SRC.get(pattern, 0), f"src/ has {len(found)} of {pattern!r}; write {INSTEAD[pattern]}"


def test_a_word_is_found() -> None:
    assert uses("Eight rows of x, held against float64") == [("rows of x", "batch size M"), ("held against", "compared with")]
    assert uses("`rows of x` in code, and `told`") == []
