"""Edits find what they name, however it is written, and say so when they do not find it exactly once."""

from __future__ import annotations

import ast

import pytest
from edits import Edit, InText, Rewrite, StaleEdit, drop, mutated

SOURCE = """\
LIMIT = "at most 3"

class Cache:
    def fits(self, n):  # a comment
        if n < self.limit: return check(n, 1,
            "é", strict=True)
        self.grow(n, self.limit, by=2)
        return f"{n} is at most {self.limit}", n, None
"""

RETURN = SOURCE.splitlines()[-1].strip()


@pytest.mark.parametrize(
    ("edit", "old", "new"),
    [
        (Rewrite("_a < _b", "_a <= _b"), "n < self.limit", "n <= self.limit"),
        (Rewrite("check(_n, *_a, **_k)", "check(*_a, _n, **_k)"), 'n, 1,\n            "é"', '1, "é", n'),
        (Rewrite("check(*_a, strict=True)", "check(*_a)"), ',\n            "é", strict=True', ', "é"'),
        (Rewrite("_c.grow(_n, *_a, by=_b)", "_c.grow(*_a, _n, by=_b)"), "n, self.limit, by", "self.limit, n, by"),
        (Rewrite("(*_a, _n, None)", "(*_a, None)"), ", n, None", ", None"),
        (
            Rewrite("return _a, _n, None", "if _n:\n    return _a"),
            RETURN,
            'if n:\n            return f"{n} is at most {self.limit}"',
        ),
        (drop("_c.grow(*_a, **_k)"), "self.grow(n, self.limit, by=2)", "None"),
        (InText("at most", "at least"), "is at most", "is at least"),
    ],
    ids=str,
)
def test_what_an_edit_makes(edit: Edit, old: str, new: str) -> None:
    assert SOURCE.count(old) == 1
    assert ast.dump(ast.parse(mutated(SOURCE, "Cache.fits", edit))) == ast.dump(ast.parse(SOURCE.replace(old, new)))


def test_constants_are_edited_too() -> None:
    assert mutated(SOURCE, "LIMIT", InText("3", "4")) == SOURCE.replace("3", "4")


@pytest.mark.parametrize(
    ("function", "edit", "why"),
    [
        ("Cache.holds", drop("check(*_a)"), "defined 0 times"),
        ("Cache.fits", drop("refuse(*_a)"), "applies 0 times"),
        ("Cache.fits", drop("check(*_a)"), "applies 0 times"),  # it has a keyword
        ("Cache.fits", Rewrite("_a < _a", "True"), "applies 0 times"),
        ("Cache.fits", Rewrite("_c.limit", "0"), "applies 3 times"),
    ],
)
def test_stale_edits_are_refused(function: str, edit: Edit, why: str) -> None:
    with pytest.raises(StaleEdit, match=why):
        mutated(SOURCE, function, edit)
