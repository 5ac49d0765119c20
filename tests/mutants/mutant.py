"""What a seeded fault is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from edits import Edit, InText, Rewrite, StaleEdit, mutated


class Mutant(NamedTuple):
    """One fault: an edit of a function (by its qualified name) of a file of halfbyte, and the tests that must notice it.

    file: below src/halfbyte, or from `halfbyte_lab/` on.
    """

    name: str
    file: str
    function: str
    edit: Edit
    tests: tuple[str, ...]

    @property
    def path(self) -> str:
        """The file below the folder that holds both packages."""
        return self.file if self.file.startswith("halfbyte_lab/") else f"halfbyte/{self.file}"

    def applied(self, source: str) -> str:
        """The file's text with the fault in it."""
        try:
            return mutated(source, self.function, self.edit)
        except StaleEdit as error:
            raise StaleEdit(f"{self.name!r} in {self.file}: {error}") from None


def faults(text: str) -> Iterator[Mutant]:
    """What a file of faults lists: under "## FILE OF HALFBYTE | FILE OF TESTS" the faults of one that the other notices, each as

        name | test | ...
            function | pattern => replacement

    A `Rewrite`; `InText` with both in JSON's double quotes. Without a test the whole file of tests notices it; a test of
    another file is named with that, "file::test". A line that begins with "=>" or "|" continues the one before it.
    """
    file = tests = ""
    lines = iter(re.sub(r"\n +(?=(=>|\|) )", " ", text).splitlines())
    for line in lines:
        if line.startswith("## "):
            file, tests = line.removeprefix("## ").split(" | ")
        elif line and not line.startswith("#"):
            (name, *ids), (function, edit) = line.split(" | "), next(lines).strip().split(" | ", 1)
            pattern, replacement = edit.replace("\\n", "\n").split(" => ")
            fault = InText(json.loads(pattern), json.loads(replacement)) if pattern[0] == '"' else Rewrite(pattern, replacement)
            yield Mutant(name, file, function, fault, tuple(i if "::" in i else f"{tests}::{i}" for i in ids) or (tests,))
