"""Write the generated parts of README.md and docs/: tables and figures of records, charts, the command line, public names.

python scripts/make_docs.py            rewrite them, and print how many words were written by hand; exit 1 if any was out of date
python scripts/make_docs.py --check    write nothing
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import make_tables as tables
from docgen import cpu, crossovers, diagrams, first_hour, formats, performance, pictures, reference, summary, trust, users
from docgen.figures import FIGURES
from docgen.markup import fill, words
from docgen.sources import QUESTIONS

from halfbyte_lab.measure import charts

ROOT = Path(__file__).parent.parent

#: Most words written by hand: of the README, of everything but the lab notes, and of the lab notes.
MOST_WORDS = {"README.md": 1200, "all but docs/internals/log": 20000, "docs/internals/log": 6000}
LOG = "docs/internals/log"

BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "row": partial(pictures.tag, "row", "docs/assets"),
        "step": partial(pictures.tag, "step", "docs/assets"),
        "fits": partial(pictures.tag, "fits", "docs/assets"),
        "choice": summary.choice,
        "whole models": summary.whole_models,
        "in vllm": partial(users.in_vllm, prompts=False),
        "gpus": summary.gpus,
    },
    "docs/guides/vllm.md": {
        "served": partial(pictures.tag, "served", "../assets"),
        "in vllm": users.in_vllm,
        "hits in vllm": users.hits_in_vllm,
        "others in vllm": users.others_in_vllm,
    },
    "docs/index.md": {"row": partial(pictures.tag, "row", "assets"), "choice": summary.choice},
    "docs/guides/choosing-formats.md": {"choice": summary.choice},
    "docs/guides/checkpoints.md": {"checkpoints": tables.checkpoints},
    "docs/concepts/trust.md": {
        "programme": trust.programme_table,
        "versions": trust.version_table,
        "operators": trust.operator_table,
    },
    "docs/concepts/granularities.md": {
        "diagram": partial(diagrams.tag, "granularities"),
        "granularities": formats.granularities,
    },
    "docs/concepts/packing.md": {"diagram": partial(diagrams.tag, "packing")},
    "docs/concepts/split-k.md": {"diagram": partial(diagrams.tag, "split-k")},
    "docs/concepts/kv-cache-quantization.md": {"diagram": partial(diagrams.tag, "windows")},
    "docs/internals/append.md": {"diagram": partial(diagrams.tag, "append")},
    "docs/internals/decode.md": {"bytes": formats.token_bytes},
    "docs/internals/decisions.md": {"decisions": reference.decisions},
    "docs/reference/formats.md": {"formats": tables.formats},
    "docs/reference/models.md": {"models": tables.models, "steps": tables.steps},
    "docs/reference/api.md": {"names": reference.public_names},
    "docs/reference/cli.md": {"commands": reference.command_line},
    "docs/reference/environment.md": {"variables": reference.environment},
    "docs/performance/index.md": {
        "whole models": summary.whole_models,
        "results": summary.results,
        "studies": performance.study_list,
    },
    "docs/performance/attention.md": {"crossovers": crossovers.attention, "bars": tables.all_bars},
    "docs/performance/linear.md": {
        "by batch": performance.by_batch,
        "crossovers": crossovers.linear,
        "linear": tables.linear,
        "humming": tables.beside_humming,
        "linear bars": tables.linear_verdicts,
        "quoted": tables.quoted_figures,
    },
    "docs/performance/experts.md": {"experts": performance.experts},
    "docs/start/install.md": {"first hour": first_hour.table},
    "docs/performance/cpu.md": {"speed": cpu.speed, "models": cpu.models},
    "docs/performance/comparisons.md": {"losses": performance.losses, "libraries": performance.libraries},
    **{f"docs/performance/{name}.md": {name: partial(tables.study, name)} for name in QUESTIONS},
}
BLOCKS["docs/performance/prompts.md"] |= {"first tokens": users.first_tokens, "layers of prompts": users.layers_of_prompts}


def pages() -> list[Path]:
    """Every page of prose."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def counts() -> dict[str, int]:
    """Words written by hand, page by page."""
    return {str(page.relative_to(ROOT)): words(page.read_text(encoding="utf-8")) for page in pages()}


def totals() -> dict[str, int]:
    """The sums that have a limit."""
    found = counts()
    log = sum(n for page, n in found.items() if page.startswith(LOG))
    return {"README.md": found["README.md"], "all but docs/internals/log": sum(found.values()) - log, LOG: log}


def stale_pages() -> dict[Path, str]:
    """Pages that are out of date, and what they should be."""
    stale = {}
    for path in pages():
        page = str(path.relative_to(ROOT))
        before = path.read_text(encoding="utf-8")
        after = fill(before, BLOCKS.get(page, {}), FIGURES, page)
        if after != before:
            stale[path] = after
    return stale


def stale_files() -> dict[Path, str]:
    """Everything generated that is out of date, pages and the pictures of the README, and what it should be."""
    files = {ROOT / name: svg for name, svg in (pictures.pictures() | diagrams.diagrams()).items()}
    changed = {path: text for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text}
    return stale_pages() | changed


def main() -> int:
    check = "--check" in sys.argv[1:]
    if missing := [page for page in BLOCKS if not (ROOT / page).exists()]:
        print(f"there is no {', '.join(missing)}", file=sys.stderr)
        return 1
    with charts.described() if check else nullcontext():
        stale = stale_files()
    for path, text in stale.items():
        if not check:
            path.write_text(text, encoding="utf-8")
        print(
            f"{path.relative_to(ROOT)} {'is out of date; run `make docs`' if check else 'was out of date, and is written'}",
            file=sys.stderr,
        )
    if not check:
        tables.write_charts()
    too_many = False
    for part, count in totals().items():
        print(f"{part}: {count:,} words written by hand, of {MOST_WORDS[part]:,}")
        too_many |= count > MOST_WORDS[part]
    return int(bool(stale) or too_many)


if __name__ == "__main__":
    sys.exit(main())
