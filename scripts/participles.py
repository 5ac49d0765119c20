"""Locals of src/ and lab/ that are named by a participle (`found`, `made`, `given`): which, where, and their share of all bindings.

A name says what a value is, not what was done to it: `matches` in place of `found`, `cache` in place of `made`.

    python scripts/participles.py [FOLDER ...]
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = tuple(folder for folder in (ROOT / "src", ROOT / "lab") if folder.exists())
#: Those that do not end in -ed.
_IRREGULAR = re.compile(
    "found|made|given|held|kept|taken|known|shown|told|built|sent|got|gone|seen|written|drawn|chosen|said|meant|lent|brought|bought|"
    "caught|thought|sought|taught|lost|laid|paid|begun|broken|driven|fallen|frozen|proven|risen|spoken|sworn|torn|understood"
)
#: What ends like a participle and is none, and states that the field names so (a packed tensor, hidden states, ragged batches).
_OTHERS = re.compile(
    "need|seed|speed|feed|embed|bed|red|exceed|proceed|succeed|indeed|shed|sled|"
    "hidden|packed|unpacked|ragged|paged|padded|nested|signed|scaled|rotated|quantized|dequantized|expected|interleaved|masked|clipped"
)


def is_participle(name: str) -> bool:
    """Whether a whole name is one participle."""
    word = name.strip("_")
    return bool(_IRREGULAR.fullmatch(word) or (re.fullmatch("[a-z]{2,}ed", word) and not _OTHERS.fullmatch(word)))


def local_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, line) of every binding of a local variable: assignments, loops, comprehensions, `with`, `:=`."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    bindings = {
        (node.lineno, node.col_offset, node.id)
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    for line, _, name in sorted(bindings):
        yield name, line


def participles(folders: tuple[Path, ...] = FOLDERS) -> tuple[list[str], int]:
    """("path:line: name" of every such binding, number of all bindings)."""
    places, count = [], 0
    for path in sorted(path for folder in folders for path in ([folder] if folder.is_file() else folder.rglob("*.py"))):
        for name, line in local_names(ast.parse(path.read_text(encoding="utf-8"))):
            count += 1
            if is_participle(name):
                places.append(f"{path}:{line}: {name}")
    return places, count


if __name__ == "__main__":
    places, count = participles(tuple(Path(arg) for arg in sys.argv[1:]) or FOLDERS)
    print("\n".join(places))
    print(f"{len(places)} of {count} bindings ({100 * len(places) / max(count, 1):.2f} %)")
