"""`halfbyte advise`: which formats fit a model on a GPU, what they save and what they cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte import settings
from halfbyte.cli.options import Dtype
from halfbyte.cli.shared import Json, Model, Where, Wide, console, human_bytes, print_table, readable, token_count
from halfbyte.errors import check
from halfbyte.paths import SHIPPED

if TYPE_CHECKING:
    from halfbyte_lab.evals.advice import Advice, Choice

STEP = "step ms"
LOSS = "perplexity %"
HEADERS = ("weights", "keys / values", "KV GB", "batch", "context", LOSS, STEP)

#: What is fast on a GPU, above the command that runs it.
FAST = "The fast path is on by default: generate() records each decode step as one CUDA graph, with fused blocks. Run it:"
_STEP_WORDS = "; step: the least time of a decode step, that of reading its bytes"


def advise(
    model: Model,
    gpu: Annotated[str | None, typer.Option(help="A GPU such as h200, or memory, as 24GB; default: this machine.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences in the batch.")] = 1,
    context: Annotated[
        int | None,
        typer.Option(parser=token_count, metavar="TOKENS", help="Tokens of each sequence; default: 8192, at most the positions."),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="The only weight format to consider; default: several, or the folder's own.")
    ] = None,
    card: Annotated[
        Path | None, typer.Option(help="An evidence card, as halfbyte eval MODEL --suite writes it.", callback=readable)
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure the evidence first, on 8 windows of 512 tokens.")] = False,
    dtype: Dtype = settings.HALVES[0],
    device: Where = None,
    every: Annotated[bool, typer.Option("--every", help="Show every choice, also those without evidence.")] = False,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Which KV and weight formats fit a GPU, what they save, the least time of a step, and their loss by an evidence card.

    Everything but the evidence follows from the configuration; no weights are read.
    """
    from halfbyte_lab.evals.advice import advise as run
    from halfbyte_lab.evals.card import read_card

    check(device is None or measure, f"--device {device} is where --measure runs the model; add it")
    evidence = None if card is None else read_card(card)
    ask = partial(run, model, gpu=gpu, batch=batch, context=context, weights=weights, dtype=dtype)
    advice = ask(card=evidence)  # before anything is measured: it may refuse
    if measure:
        from halfbyte_lab.evals.suite import short_card

        advice = ask(card=short_card(model, device, dtype))
    if as_json:
        print(json.dumps(asdict(advice), indent=2))
    else:
        _print(advice, every, wide)


def _print(a: Advice, every: bool, wide: bool) -> None:
    from halfbyte_lab.evals.advice import CPU, command, python_lines, shown

    rate = a.sheet.bytes_per_second
    speed = "bandwidth unknown" if rate is None else f"{rate / 1e9:,.0f} GB/s"
    title = f"{a.model} on {a.gpu} ({human_bytes(a.sheet.memory_bytes)}, {speed}): {a.batch:,} x {a.context:,} tokens"
    choices = a.choices if every else shown(a)
    unknown = {STEP: rate is None, LOSS: a.card is None}
    columns = [i for i, name in enumerate(HEADERS) if not unknown.get(name)]
    rows = [tuple(row[i] for i in columns if row) for row in _rows(a, choices)]
    print_table(title, [HEADERS[i] for i in columns], rows, text_columns=2, wide=wide)
    left_out = len(a.choices) - len(choices)
    for line in ([f"{left_out} more choices: --every."] if left_out else []) + _legend(a):
        console().print(line, markup=False, highlight=False)
    if a.recommended is not None:
        if a.gpu != CPU:
            console().print(FAST, markup=False, highlight=False)
        print(f"\n{command(a, a.recommended)}\n\n{python_lines(a, a.recommended)}")


def _legend(a: Advice) -> list[str]:
    """What the columns mean, where the evidence is from, and the recommendation."""
    from halfbyte.memory import RESERVED

    lines = [
        f"batch: sequences of {a.context:,} tokens that fit in {1 - RESERVED:.0%} of the memory; context: tokens of each of "
        f"{a.batch:,} that fit{'' if a.sheet.bytes_per_second is None else _STEP_WORDS}."
    ]
    if a.card is not None:
        of = f"{a.card}, a toy" if a.card in SHIPPED else a.card if a.is_own else f"another model, {a.card}"
        lines.append(f"perplexity: change against 16 bits and its noise, by the evidence card of {of}; *: a safe KL divergence.")
    if a.card is None or not a.is_own:
        lines.append(f"What this costs on {a.model} is not known. Measure it: halfbyte eval {a.model} --suite")
    lines += [f"note: {note}" for note in a.notes]
    took = a.recommended
    return [*lines, "", f"No recommendation: {a.reason}." if took is None else f"{_saved(a, took)} ({a.reason})."]


def _rows(a: Advice, choices: Sequence[Choice]) -> list[tuple[str, ...]]:
    """One row a choice, a line between weight formats; the first two rows of a format name it and its bytes, or its only one."""
    rows = list[tuple[str, ...]]()
    for weights, group in groupby(choices, key=lambda c: c.weights):
        alike = [*group]
        size = human_bytes(alike[0].weight_bytes)
        labels = (weights, size, *[""] * len(alike)) if len(alike) > 1 else (f"{weights}, {size}",)
        rows += [()] * bool(rows) + [(label, *_row(a, c)) for label, c in zip(labels, alike, strict=False)]
    return rows


def _row(a: Advice, c: Choice) -> tuple[str, ...]:
    step = "" if c.step_seconds is None else _short(1e3 * c.step_seconds)
    sequences = f"{c.largest_batch:,}" if c.fits else f"{c.largest_batch:,} of {a.batch:,}"
    evidence = c.evidence
    cost = "" if evidence is None else f"{evidence.change:+.2f}\u00b1{evidence.noise:.2f}{'*' if evidence.safe else ' '}"
    return f"{c.keys}/{c.values}", _short(c.kv_bytes / 1e9), sequences, f"{c.largest_context:,}", cost, step


def _short(value: float) -> str:
    """Three digits, or all of a larger number: 0.0126, 3.54, 12,885."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _saved(a: Advice, c: Choice) -> str:
    """The recommendation and what it saves against the first choice: 16-bit caches, and 16-bit weights unless they are given."""
    plain = a.choices[0]
    took, cache = f"{c.keys} keys and {c.values} values", f"{human_bytes(plain.kv_bytes - c.kv_bytes)} of cache"
    if c.weights == plain.weights:
        return f"Take {took}: {cache} less than in 16 bits"
    weights = human_bytes(plain.weight_bytes - c.weight_bytes)
    return f"Take {c.weights} weights, {took}: {weights} of weights and {cache} less than in {plain.weights}"
