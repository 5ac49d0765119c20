"""The documentation says what the code says: generated parts, names, files, links and commands that exist, and few words."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import halfbyte
from benchmarks.studies import QUESTIONS

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
sys.path.insert(0, str(ROOT / "scripts"))

import make_docs  # noqa: E402
from docgen.docstrings_text import as_markdown  # noqa: E402
from docgen.markup import fill, words  # noqa: E402


def test_what_is_generated_is_up_to_date_and_the_words_are_few() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_docs.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_page_that_is_out_of_date_is_found() -> None:
    page = "hand\n<!-- table -->\nold\n<!-- /table -->\nabout <!-- =size -->7<!-- / --> bytes\n"
    made = fill(page, {"table": lambda: "new"}, {"size": lambda: "8"}, "page")
    assert made == "hand\n<!-- table -->\nnew\n<!-- /table -->\nabout <!-- =size -->8<!-- / --> bytes\n"
    with pytest.raises(SystemExit, match="no block"):
        fill(page, {"chart": lambda: ""}, {}, "page")
    with pytest.raises(SystemExit, match="no figure"):
        fill(page, {}, {}, "page")


def test_words_are_those_of_a_person() -> None:
    assert words("Two words\n<!-- a -->\nnot these\n<!-- /a -->\n```python\nnor = this\n```\n<!-- =x -->1<!-- / -->\nthird") == 4


def test_aligned_docstrings_become_lists() -> None:
    text = "Does it.\n\nkeys, values  formats\n              of both\ndtype         a type\n\nThen more."
    assert as_markdown(text) == "Does it.\n\n\n- `keys`, `values`: formats of both\n- `dtype`: a type\n\nThen more."


def test_every_generated_page_is_a_page() -> None:
    assert [page for page in make_docs.BLOCKS if not (ROOT / page).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    """Paths in backquotes and relative links lead somewhere."""
    text = page.read_text()
    named = re.findall(r"`((?:src|benchmarks|tests|docs|scripts|examples|results)/[\w./-]*)", text) + re.findall(
        r"\]\(([\w./-]+)[)#]", text
    )
    named += [f"src/halfbyte/{path}" for path in re.findall(r"`((?:reference|cpu|ops|hf|evals|plans|measure)/\w+\.py)`", text)]
    named += re.findall(r'(?:src|srcset)="([\w./-]+)"', text)
    missing = [name for name in named if not (ROOT / name).exists() and not (page.parent / name).exists()]
    assert not missing


def test_every_page_of_the_site_is_in_its_navigation() -> None:
    """Those that are not say where they went."""
    config = (ROOT / "mkdocs.yml").read_text()
    pages = {str(p.relative_to(ROOT / "docs")) for p in PAGES if p.is_relative_to(ROOT / "docs")}
    left_out = {page for page in pages if not re.search(rf"[ :]{re.escape(page)}$", config, re.MULTILINE)}
    moved = {page for page in pages if "has moved." in (ROOT / "docs" / page).read_text()}
    assert left_out == moved


def test_every_public_name_is_documented() -> None:
    text = (ROOT / "docs" / "reference" / "api.md").read_text()
    assert [name for name in halfbyte.__all__ if f"::: halfbyte.{name}\n" not in text] == []


def test_commands_in_the_pages_exist() -> None:
    """Every `halfbyte word` of a code block is a command."""
    from halfbyte.cli import app

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


def test_the_whole_models_figure_says_what_it_is_compared_with() -> None:
    """Wherever the 16-bit step of the whole model stands, what its bytes would take stands in the same sentence."""
    for page in PAGES:
        for sentence in re.split(r"(?<=[.;])\s", page.read_text()):
            assert "27.88 ms" not in sentence or "5.3 ms" in sentence or page.name == "runs.md", f"{page.name}: {sentence}"
