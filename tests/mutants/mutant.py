"""What a seeded fault is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from edits import Edit, StaleEdit, mutated


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


def tests_of(file: str) -> Callable[..., tuple[str, ...]]:
    """Names of tests in a file become what pytest takes; none: the whole file."""
    return lambda *names: tuple(f"{file}::{name}" for name in names) or (file,)
