"""The project speaks the field's language: a list of words that it does not use, with the word to use."""

from __future__ import annotations

import io
import re
import sys
import tokenize
from functools import cache
from pathlib import Path

import pytest
from vocabulary import INSTEAD, NEIGHBORS, SPELLING

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from docgen.markup import by_hand  # noqa: E402
from participles import is_participle, participles  # noqa: E402

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
#: How often src/ still uses a word: the names that records, and commands and modules of before, have on disk and in scripts; and
#: spelling in files that kernels are compiled from, to be corrected when they change anyway.
LEFT_IN_SRC: dict[str, int] = {r"peers?": 2, r"planes?": 3, SPELLING: 5, NEIGHBORS: 19}
#: Where names of locals are held to be nouns, and the largest share, in %, of participles among their bindings: it may only fall.
#: Kernels' text is hashed; their names change when they do.
SHARES = {
    "src": (tuple(path for path in sorted((ROOT / "src" / "halfbyte").iterdir()) if path.name != "kernels"), 0.5),
    "lab": ((ROOT / "lab",), 0.5),
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
def test_source_uses_them(pattern: str) -> None:
    found = re.findall(rf"\b(?:{pattern})\b", words_of_source(), re.IGNORECASE)
    assert len(found) <= LEFT_IN_SRC.get(pattern, 0), f"src/ has {len(found)} of {pattern!r}; write {INSTEAD[pattern]}"


def test_a_word_is_found() -> None:
    assert uses("Eight rows of x, held against float64") == [("rows of x", "batch size M"), ("held against", "compared with")]
    assert uses("`rows of x` in code, and `told`") == []


@pytest.mark.parametrize("where", SHARES)
def test_locals_are_nouns(where: str) -> None:
    paths, most = SHARES[where]
    places, count = participles(paths)
    assert count > 1000
    assert 100 * len(places) / count <= most, "say what the value is, not what was done to it:\n" + "\n".join(places)


def test_a_participle_is_recognized(tmp_path: Path) -> None:
    assert [
        name for name in ("found", "made", "wanted", "_kept", "rows", "speed", "packed", "is_known") if is_participle(name)
    ] == ["found", "made", "wanted", "_kept"]
    source = tmp_path / "source.py"
    source.write_text("found = 1\ndef f(given):\n    made = [kept for kept in given]\n    return made\n")
    assert participles((source,)) == ([f"{source}:3: made", f"{source}:3: kept"], 2)
