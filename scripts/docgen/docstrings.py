"""An extension of griffe, by which mkdocstrings renders docstrings with aligned columns as lists."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parents[1]))

from docgen.docstrings_text import as_markdown


class AlignedLists(griffe.Extension):  # type: ignore[misc]
    """Rewrites the docstring of everything that is documented, before it is rendered."""

    def on_instance(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
