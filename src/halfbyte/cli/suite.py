"""`halfbyte eval MODEL --suite`: an evidence card, for `halfbyte advise` and for others to read."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.cli.options import EvalOptions
from halfbyte.cli.shared import check_writable, console, print_table, words
from halfbyte.errors import check, require

if TYPE_CHECKING:
    from halfbyte.evals.card import Card

#: Windows and tokens of the long contexts where no option says otherwise.
WINDOWS, LONG = 8, 1024


def card_path(options: EvalOptions, model: str) -> Path | None:
    """Where the card goes, None without --suite. Everything that can be known before a model is loaded is checked."""
    check(options.suite or not (options.card or options.tasks), "--card and --tasks say something about --suite; add it")
    if not options.suite:
        return None
    path = options.card or Path(f"{re.sub(r'[^A-Za-z0-9.-]+', '-', Path(model).name).strip('-') or 'model'}-card.json")
    check(path.suffix == ".json", f"--card {str(path)!r}; give a name that ends with .json")
    check(options.html is None and options.output is None, "--suite writes a card; leave out --html and --output")
    for file in (path, path.with_suffix(".md")):
        check_writable(file, "card")
    if options.tasks:
        require("lm_eval", "--tasks")
        missing = [task for task in words(options.tasks) if task.endswith(".yaml") and not Path(task).is_file()]
        check(not missing, f"--tasks {missing[:1]}: no such file; pass the YAML file of a task, or the name of one of lm-eval")
    return path


def text_name(path: Path | None, text: str) -> str:
    """What a card calls the text it was measured on: a file by its name and the beginning of its SHA-256."""
    if path is None:
        return "the shipped held-out text"
    return f"{path.name} (SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"


def run_suite(
    model: str,
    path: Path,
    options: EvalOptions,
    text: Path | None,
    sizes: tuple[int | None, int, int, int | None],
    where: tuple[str | None, str],
) -> None:
    """Measure, write the card and show it. sizes: windows, tokens of each, tokens fed at a time, tokens of long contexts.
    where: device and 16-bit type.
    """
    from halfbyte.evals.card import Suite, measure
    from halfbyte.evals.model import load
    from halfbyte.evals.text import read_text
    from halfbyte.evals.text import windows as cut

    content = read_text(text)
    lm, tokenizer = load(model, *where)
    (count, length, chunk, long), ids = sizes, tokenizer.encode(content)
    parts = cut(ids, length, count or WINDOWS, tokenizer.bos)
    suite = Suite(model, text_name(text, content), ids, parts, chunk, LONG if long is None else long, tuple(words(options.tasks)))
    card = measure(lm, tokenizer, suite, console(stderr=True))
    _show(card, options)
    message = f"card: {' and '.join(map(str, card.write(path)))}. Use it: halfbyte advise {model} --card {path}"
    console(stderr=options.as_json).print(message, markup=False, highlight=False)


def _show(card: Card, options: EvalOptions) -> None:
    from halfbyte.evals.card import LONG as LONG_HEADERS
    from halfbyte.evals.card import QUALITY, long_rows, quality_rows

    count, length = card.windows
    if options.as_json:
        print(card.to_json())
        return
    print_table(
        f"{card.model}: {count} window{'s' * (count > 1)} of {length:,} tokens", QUALITY, quality_rows(card), 1, options.wide
    )
    if card.long:
        print_table(f"Contexts of {card.long:,} tokens", LONG_HEADERS, long_rows(card), 1, options.wide)
