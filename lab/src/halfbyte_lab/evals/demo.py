"""`halfbyte demo`: evaluate the shipped model end to end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from halfbyte.paths import SHIPPED
from halfbyte.settings import CLIP, KEYS, VALUES, WEIGHTS
from halfbyte.text import Tokenizer, heldout_text, windows
from halfbyte_lab.evals.card import shipped_cards
from halfbyte_lab.evals.choices import limit
from halfbyte_lab.evals.model import load, write
from halfbyte_lab.evals.outliers import PROFILES, with_outliers
from halfbyte_lab.evals.own_attention import agreement
from halfbyte_lab.evals.pages import BY_MODEL, SAFE_WORDS, add_results, by_model, model_table
from halfbyte_lab.evals.present import verdict
from halfbyte_lab.evals.quality import Quality, Setting, every_kv_setting, every_weight_setting, run_evaluation
from halfbyte_lab.evals.suite import QUALITY, quality_rows
from halfbyte_lab.progress import progress
from halfbyte_lab.report import Report

#: Length and number of windows. Many short ones: a step costs its calls of operators, which a batch of windows shares. Not much
#: shorter: keys per channel keep the last block of tokens in 16 bits.
TEXT, QUICK_TEXT, OUTLIER_TEXT, CHUNK = (256, 12), (128, 6), (128, 4), 16
ALIKE = "A head has 64 dims here, so int8_g64 and int4_g64 store what int8 and int4 do and have no rows."
TOY = "The shipped model is a toy: the order of formats is that of real models, whose divergence is larger (halfbyte eval MODEL)."
PROMPT = '''def merge_sorted(left, right):
    """Merge two sorted lists into one sorted list."""
    result = []
'''
TOKENS = 96
TEXTS = {
    "16-bit cache": Setting(),
    "INT8 cache": Setting("int8", "int8"),
    "INT4 cache": Setting("int4_g32", "int4_g32", rotate_keys=True),
}


@dataclass(frozen=True)
class Shown:
    """Results of a demo, their wall and CPU seconds, the report, and the model."""

    results: list[Quality]
    took: dict[str, float]
    report: Report
    model: Any
    tokenizer: Tokenizer


def demo(report_path: Path, console: Console, errors: Console, quick: bool = False, device: str | None = None) -> Shown:
    """Evaluate every KV and weight format, continue a prompt with three caches, print it all and write the report.

    errors: the console on which progress is shown. quick: a quarter of the text, and no variants with outliers. device: None: the
    GPU if there is one.
    """
    start, busy = time.perf_counter(), time.process_time()
    torch.set_num_threads(1)  # more gain nothing on so small a model, and wait for each other where cores are busy
    model, tokenizer = load("demo", device)
    ids = tokenizer.encode(heldout_text())
    cut = windows(ids, *(QUICK_TEXT if quick else TEXT))
    settings = [
        Setting(),
        Setting.of_transformers("bf16"),
        *every_kv_setting(model.config.head_dim),
        *every_weight_setting(),
        Setting(KEYS, VALUES, weights=WEIGHTS, clip=CLIP),
    ]
    console.print(
        f"The shipped model on {cut.shape[0]} windows of {cut.shape[1]:,} held-out bytes, fed {CHUNK} at a time, in one thread. "
        "Each row reads all older keys and values from a cache of its own format."
    )
    results = run_evaluation(model, settings, cut, CHUNK, errors, batch=cut.shape[0])
    short = windows(ids, *OUTLIER_TEXT)
    variants = [] if quick else _with_outliers(model, settings, short, errors)
    texts = _written(model, tokenizer, errors)
    equal, total = agreement(model, cut[:2, :48])
    console.print(f"\n{BY_MODEL if variants else BY_MODEL.partition(',')[0]}:")
    console.print(model_table([*results, *variants]))
    console.print(f"{SAFE_WORDS}, here {1e3 * limit(results[0].floor):.2g}\n{ALIKE}", highlight=False)
    for name, text in texts.items():
        console.print(Panel(Text(PROMPT + text), title=name, title_align="left"))
    same = f"With 16-bit keys and values, {equal} of {total} greedy tokens equal those of transformers' own attention."
    console.print(f"{verdict(results)}\n{TOY}\n{same}", highlight=False)
    report = _report(results, variants, texts, same, quick)
    report.write(report_path)
    took = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - busy}
    console.print(f"Took {took['seconds']:.0f} s, {took['cpu_seconds']:.0f} s of CPU time.", highlight=False)
    console.print(f"Report: {report_path}", soft_wrap=True)
    return Shown([*results, *variants], took, report, model, tokenizer)


def _with_outliers(model: Any, settings: list[Setting], short: torch.Tensor, errors: Console) -> list[Quality]:
    """Every cache in every variant, and weights in the first one: those of the others have the same outliers."""
    caches = [s for s in settings if s.weights is None]
    runs = [(outliers, settings if outliers is PROFILES[0] else caches) for outliers in PROFILES]
    return [
        result
        for outliers, subset in runs
        for result in run_evaluation(with_outliers(model, outliers), subset, short, CHUNK, errors, name=outliers.name)
    ]


def _written(model: Any, tokenizer: Tokenizer, errors: Console) -> dict[str, str]:
    """What each cache of `TEXTS` writes behind the prompt, under a title that says how long it is the 16-bit text."""
    texts: dict[str, str] = {}
    with progress(errors) as bar:
        for name, setting in bar.track(TEXTS.items(), description="writing"):
            text = "".join(write(model, tokenizer, PROMPT, setting, TOKENS))
            first = next(iter(texts.values()), text)
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, first, strict=False)))
            texts[name if not texts else f"{name}: the first {common} of {len(first)} characters as with 16 bits"] = text
    return texts


def _report(results: list[Quality], variants: list[Quality], texts: dict[str, str], same: str, quick: bool) -> Report:
    import halfbyte

    base = results[0]
    report = Report(
        "What the bits cost",
        f"halfbyte {halfbyte.__version__} demo: a toy of 5.6 million parameters on {base.tokens:,} bytes of Python it never saw",
    )
    add_results(
        report,
        results,
        TOY,
        "Every run, the 16-bit one included, feeds the text in chunks of 16 tokens and reads all older keys and values from a "
        "cache of its own format. Arithmetic is fp32 or finer over values rounded to 16 bits. Top-1 is the share of tokens where "
        "both expect the same next byte; noise is two standard errors over tokens; seconds are of this run on this machine.",
        ALIKE,
        same,
    )
    for card in (card for card in shipped_cards() if card.model not in SHIPPED):
        count, length = card.windows
        text = f"{card.model} on {count} windows of {length:,} tokens; safe up to {limit(card.floor):.1e} nats"
        report.heading("A real model").table(QUALITY, quality_rows(card), text)
    if variants:
        _add_outliers(report, [*results, *variants])
    report.heading("One prompt, three caches")
    for name, text in texts.items():
        report.code(PROMPT + text, name)
    report.code("halfbyte demo" + " --quick" * quick, "The command that made this page")
    return report


def _add_outliers(report: Report, results: list[Quality]) -> None:
    """The section of the variants with outliers."""
    header, rows = by_model(results)
    report.heading("Outliers").text(
        "Large models have outliers in keys, values and weights; the shipped one has none. These variants of it have: channels "
        "grow by powers of two and what reads them shrinks, which changes no 16-bit logit. "
        f"They read {OUTLIER_TEXT[1]} windows of {OUTLIER_TEXT[0]} tokens. Weights have the same outliers in each and run once.",
        *(f"{outliers.name}: {outliers.source}." for outliers in PROFILES),
    )
    report.table(header, rows, f"{BY_MODEL}; {SAFE_WORDS}")
