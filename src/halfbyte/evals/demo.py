"""The main job, end to end, on the model that ships with the library: `halfbyte demo`."""

from __future__ import annotations

import time
from itertools import takewhile
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from halfbyte.evals.model import agreement, load, write
from halfbyte.evals.outliers import PROFILES
from halfbyte.evals.present import BY_MODEL, add_results, by_model, model_table
from halfbyte.evals.quality import Quality, Setting, every_kv_setting, every_weight_setting, run_evaluation
from halfbyte.evals.text import heldout_text, windows
from halfbyte.measure.progress import progress
from halfbyte.report import Report

WINDOWS, LENGTH, CHUNK = 8, 1024, 16
OUTLIER_WINDOWS, OUTLIER_LENGTH = 2, 512
PROMPT = '''def merge_sorted(left, right):
    """Merge two sorted lists into one sorted list."""
    result = []
'''
TOKENS = 160
TEXTS = {
    "16-bit cache": Setting(),
    "INT8 cache": Setting("int8", "int8"),
    "INT4 cache": Setting("int4_g32", "int4_g32", rotate_keys=True),
}


def demo(report_path: Path, console: Console, errors: Console) -> list[Quality]:
    """Evaluate every KV and weight format, continue a prompt with three caches, print it all and write the report.

    errors: the console on which progress is shown.
    """
    started = time.perf_counter()
    model, tokenizer = load("demo")
    cut = windows(tokenizer.encode(heldout_text()), LENGTH, WINDOWS)
    settings = [Setting(), *every_kv_setting(), *every_weight_setting(), Setting("int8", "int4_g32", "int4_g64")]
    console.print(
        f"The shipped model on {WINDOWS} windows of {LENGTH:,} held-out bytes, fed {CHUNK} at a time, "
        f"{torch.get_num_threads()} threads. "
        "Each row reads all older keys and values from a cache of its own format."
    )
    results = run_evaluation(model, settings, cut, CHUNK, errors, batch=WINDOWS)
    short = windows(tokenizer.encode(heldout_text()), OUTLIER_LENGTH, OUTLIER_WINDOWS)
    variants = [r for outliers in PROFILES for r in run_evaluation(model, settings, short, CHUNK, errors, outliers=outliers)]
    texts: dict[str, str] = {}
    with progress(errors) as bar:
        for name, setting in bar.track(TEXTS.items(), description="writing"):
            text = "".join(write(model, tokenizer, PROMPT, setting, TOKENS))
            first = next(iter(texts.values()), text)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, first, strict=False)))
            texts[name if not texts else f"{name}: the first {shared} of {len(first)} characters as with 16 bits"] = text
    equal, compared = agreement(model, cut[:2, :48])
    console.print(f"\n{BY_MODEL}:")
    console.print(model_table([*results, *variants]))
    for name, text in texts.items():
        console.print(Panel(Text(PROMPT + text), title=name, title_align="left"))
    same = f"With 16-bit keys and values, {equal} of {compared} greedy tokens equal those of transformers' own attention."
    console.print(same)
    _report(results, variants, texts, same).write(report_path)
    console.print(f"Report: {report_path}   ({time.perf_counter() - started:.0f} s in all)")
    return [*results, *variants]


def _report(results: list[Quality], variants: list[Quality], texts: dict[str, str], same: str) -> Report:
    import halfbyte

    base = results[0]
    best = next(r for r in results if r.setting == Setting("int8", "int4_g32"))
    report = Report(
        "What the bits cost",
        f"halfbyte {halfbyte.__version__} demo: a model of 5.6 million parameters on {base.tokens:,} bytes of Python it never saw",
    )
    report.facts(
        {
            "16-bit perplexity per byte": f"{base.perplexity:.4f}",
            "int8 keys, int4 values": f"{best.change:+.2f} %",
            "their cache": f"{base.kv_bytes_per_token / best.kv_bytes_per_token:.2f}x smaller",
            "torch": torch.__version__,
        }
    )
    report.text(
        "Every row, the 16-bit one included, feeds the text in chunks of 16 tokens and reads all older keys and values from a "
        "cache of its own format. Arithmetic is fp32 or finer over values rounded to 16 bits. KL divergence is that of the "
        "next-token distribution from the 16-bit run, in nats; top-1 is the share of tokens where both expect the same next byte; "
        "seconds are of this run on this machine.",
        same,
    )
    add_results(report, results)
    header, rows = by_model([*results, *variants])
    report.heading("Outliers").text(
        "Large models have outliers in keys, values and weights; the shipped one has none. These variants of it have: channels "
        "grow by powers of two and what reads them shrinks, which changes no 16-bit logit. "
        f"They read {OUTLIER_WINDOWS} windows of {OUTLIER_LENGTH} tokens.",
        *(f"{outliers.name}: {outliers.source}." for outliers in PROFILES),
    )
    report.table(header, rows, BY_MODEL)
    report.heading("One prompt, three caches")
    for name, text in texts.items():
        report.code(PROMPT + text, name)
    report.code("halfbyte demo", "The command that made this page")
    return report
