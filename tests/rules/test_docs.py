"""The documentation says what the code says: generated parts, names, files, links and commands that exist, and few words."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import halfbyte
from halfbyte import settings
from halfbyte_lab.evals.card import WEIGHTS
from halfbyte_lab.evals.choices import caches
from halfbyte_lab.studies import QUESTIONS

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
REFERENCE = [*sorted((ROOT / "docs" / "reference").glob("api*.md")), ROOT / "docs" / "reference" / "hf.md"]
sys.path.insert(0, str(ROOT / "scripts"))

import make_docs  # noqa: E402
from docgen.docstrings_text import ENTRY, as_markdown  # noqa: E402
from docgen.markup import fill, words  # noqa: E402


def test_what_is_generated_is_up_to_date_and_the_words_are_few() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_docs.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_records_are_those_that_tables_are_made_of() -> None:
    """`scripts/keep_records.py` drops the others."""
    assert max(file.stat().st_size for file in (ROOT / "results").iterdir()) < 2_500_000


def test_a_page_that_is_out_of_date_is_found() -> None:
    page = "hand\n<!-- table -->\nold\n<!-- /table -->\nabout <!-- =size -->7<!-- / --> bytes\n"
    made = fill(page, {"table": lambda: "new"}, {"size": lambda: "8"}, "page")
    assert made == "hand\n<!-- table -->\nnew\n<!-- /table -->\nabout <!-- =size -->8<!-- / --> bytes\n"
    with pytest.raises(SystemExit, match="no block"):
        fill(page, {"chart": lambda: ""}, {}, "page")
    with pytest.raises(SystemExit, match="no figure"):
        fill(page, {}, {}, "page")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_tables_are_whole(page: Path) -> None:
    """Each row has the cells of its heads, and no line of a table lacks its bar."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for table in re.findall(r"(?:^\|.*\n)+(?:^[^|\n<].*\n)*", text, re.MULTILINE):
        rows = table.splitlines()
        cells = {len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", row))) for row in rows}
        assert len(cells) == 1, f"a table of {cells} bars a line: {rows[0]}"


def test_words_are_those_of_a_person() -> None:
    assert words("Two words\n<!-- a -->\nnot these\n<!-- /a -->\n```python\nnor = this\n```\n<!-- =x -->1<!-- / -->\nthird") == 4


def test_aligned_docstrings_become_lists() -> None:
    text = "Does it.\n\nkeys, values  formats\n              of both\ndtype         a type\n\nThen more."
    assert as_markdown(text) == "Does it.\n\n\n- `keys`, `values`: formats of both\n- `dtype`: a type\n\nThen more."


def documented() -> Iterator[tuple[str, str]]:
    """(name, docstring) of everything in the reference, methods and properties of its classes included."""
    for page in REFERENCE:
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE):
            found = pydoc.locate(name)
            yield name, inspect.getdoc(found) or ""
            for member, made in vars(found).items() if inspect.isclass(found) else ():
                if not member.startswith("_") and (callable(made) or isinstance(made, property | classmethod)):
                    yield f"{name}.{member}", inspect.getdoc(made) or ""


def test_aligned_docstrings_have_an_entry_in_each_line() -> None:
    """A name with a single space behind it would end the list, and the lines below it would become a block of code."""
    for name, text in documented():
        for block in text.split("\n\n"):
            lines = [line for line in block.splitlines() if not line.startswith(" ")]
            entries = [line for line in lines if ENTRY.match(line)]
            assert entries in ([], lines), name


def test_every_generated_page_is_a_page() -> None:
    assert [page for page in make_docs.BLOCKS if not (ROOT / page).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    """Paths in backquotes and relative links lead somewhere."""
    text = page.read_text()
    named = re.findall(r"`((?:src|lab|tests|docs|scripts|examples|results)/[\w./-]*)", text) + re.findall(
        r"\]\(([\w./-]+)[)#]", text
    )
    named += [f"src/halfbyte/{path}" for path in re.findall(r"`((?:reference|cpu|ops|hf|plans)/\w+\.py)`", text)]
    named += re.findall(r'(?:src|srcset)="([\w./-]+)"', text)
    missing = [name for name in named if not (ROOT / name).exists() and not (page.parent / name).exists()]
    assert not missing


def test_every_page_of_the_site_is_in_its_navigation() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    pages = {str(p.relative_to(ROOT / "docs")) for p in PAGES if p.is_relative_to(ROOT / "docs")}
    assert {page for page in pages if not re.search(rf"[ :]{re.escape(page)}$", config, re.MULTILINE)} == set()


def test_every_public_name_is_documented() -> None:
    text = "".join(page.read_text() for page in REFERENCE)
    assert [name for name in halfbyte.__all__ if f"::: halfbyte.{name}\n" not in text] == []


def names_in(code: str) -> Iterator[str]:
    """The dotted names of halfbyte that a code block uses."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("halfbyte"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"halfbyte\.[\w.]+", name := ast.unparse(node)):
            yield name


def test_what_the_examples_use_is_in_the_reference() -> None:
    """Every function and class of a code block has an entry, itself or the class that it belongs to."""
    reference = "".join(page.read_text() for page in REFERENCE)
    documented = [pydoc.locate(name) for name in re.findall(r"^::: ([\w.]+)$", reference, re.MULTILINE)]
    blocks = [b for page in PAGES for b in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)]
    used = {name for block in blocks for name in names_in(block) if not inspect.ismodule(pydoc.locate(name))}
    missing = {n for n in used if not any(pydoc.locate(m) is d for m in (n, n.rpartition(".")[0]) for d in documented)}
    assert len(used) > 15
    assert missing == set()


def test_commands_in_the_pages_exist() -> None:
    """Every `halfbyte word` of a code block is a command."""
    from halfbyte.cli import command_line

    app = command_line()
    known = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    text = "\n".join(page.read_text() for page in PAGES)
    code = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    code += re.findall(r"^ {4}(halfbyte .*)$", text, re.MULTILINE)
    used = set(re.findall(r"^halfbyte (\w+)", "\n".join(code), re.MULTILINE))
    assert used >= {"eval", "generate", "quantize", "memory", "bench", "doctor", "explain"}
    assert used <= known


def test_every_study_has_its_page_with_its_command() -> None:
    for name in QUESTIONS:
        text = (ROOT / "docs" / "performance" / f"{name}.md").read_text()
        assert f"    make study NAME={name}\n" in text
        assert f"<!-- {name} -->" in text


def test_steps_of_the_first_page_stand_on_their_own_page() -> None:
    """Every row of the README's table of whole models is a row of step.md, under the same GPU."""
    rows = make_docs.summary.whole_models().splitlines()[2:]
    by_gpu = (ROOT / "docs" / "performance" / "step.md").read_text()
    assert len(rows) > 5
    for row in rows:
        gpu, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        (part,) = re.findall(rf"^NVIDIA {gpu}\b.*?(?=^NVIDIA |\Z)", by_gpu, re.DOTALL | re.MULTILINE)
        headers, *told = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("| ")
        )
        kept = [cell for name, cell in zip(make_docs.summary.step.SUMMARY, cells, strict=True) if name in headers]
        assert kept in told


#: Pages and examples that name the formats of a model to somebody who has not chosen.
RECOMMENDING = (
    *("README.md", "docs/index.md", "docs/start/first-model.md", "docs/start/chat.md", "docs/tutorials/judge-a-model.md"),
    *(f"docs/guides/{name}.md" for name in ("measuring", "tensor-parallel", "transformers")),
    *(f"examples/{name}.py" for name in ("03_transformers", "06_tokens_per_second", "07_chat")),
)
#: Keys and values as keywords, options and names of vLLM's backends; weights.
PAIRS = r'keys="(\w+)",\s+values="(\w+)"|--keys (\w+) --values (\w+)|HALFBYTE_([A-Z0-9_]+?)__([A-Z0-9_]+)'
ONE = r'weights="(\w+)"|--weights (\w+)'


@pytest.mark.parametrize("name", RECOMMENDING)
def test_pages_recommend_what_the_tables_do(name: str) -> None:
    """The defaults, or formats of the tables that `advise` and the README's table are made of."""
    text = (ROOT / name).read_text(encoding="utf-8")
    pairs = {tuple(part.lower() for part in found if part) for found in re.findall(PAIRS, text)}
    weights = {next(filter(None, found)) for found in re.findall(ONE, text)}
    assert pairs <= set(caches().values())
    assert weights <= {settings.CPU_WEIGHTS, *(fmt for formats in WEIGHTS for fmt in formats[:1])}
