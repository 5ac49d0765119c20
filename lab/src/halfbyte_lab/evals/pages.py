"""Results of an evaluation as a report: verdict, cards, charts and tables."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from halfbyte.cli.formats import format_rows
from halfbyte.device import describe
from halfbyte.formats import weight_format
from halfbyte.paths import append_line
from halfbyte.settings import KEYS, VALUES
from halfbyte_lab.evals.calibrate import Calibrated
from halfbyte_lab.evals.choices import is_safe, limit
from halfbyte_lab.evals.long_context import LONG_HEADERS, LongContext, long_rows
from halfbyte_lab.evals.present import HEADERS, chosen, kind, ratio, records, row, safety, verdict
from halfbyte_lab.evals.quality import Quality, Setting
from halfbyte_lab.measure.charts import Point, divergence, lines
from halfbyte_lab.measure.environment import environment
from halfbyte_lab.report import Cell, Report

#: How to read KL divergence.
KL_WORDS = (
    "KL divergence measures how far the probabilities of the next token are from those of the 16-bit run; 0: equal. Up to twice "
    "the floor, {limit:.1e} nats here, noise included, formats are called safe: the floor is the row `transformers`, its own "
    "attention in 16-bit arithmetic. From about 0.1 nats on, generated texts differ."
)
#: What a logarithmic axis shows for no divergence at all.
LEAST_KL = 1e-9
BY_MODEL = "KL divergence from the 16-bit run in thousandths of a nat, for the shipped model and with outliers of larger models"
SAFE_WORDS = "safe: at most twice what 16-bit arithmetic costs this toy, noise included; plain: only without outliers"


def by_model(results: Sequence[Quality]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(header, rows): each setting's size and perplexity on the model itself, its KL in thousandths of a nat on every model, and
    where that is small enough to be called safe."""
    models = list(dict.fromkeys(r.model for r in results))
    kl = {(r.model, r.setting): 1e3 * r.kl_mean for r in results}
    safe = {(r.model, r.setting): is_safe(r.kl_mean, r.kl_noise, r.floor) for r in results}
    plain = [r for r in results if r.model == models[0] and not r.setting.own]
    rows = [
        (
            r.setting.name,
            f"{ratio(r, plain[0]):.2f}x",
            f"{r.change:+.2f}",
            *(_thousandths(kl.get((model, r.setting))) for model in models),
            safe_where([safe[model, r.setting] for model in models if (model, r.setting) in safe]),
        )
        for r in plain[1:]
    ]
    return ("formats", "smaller", "ppl %", *(model or "plain" for model in models), "safe"), rows


def _thousandths(kl: float | None) -> str:
    """A divergence in thousandths of a nat; nothing where none was measured."""
    return "" if kl is None else f"{kl:.2f}" if kl < 10 else f"{kl:,.0f}"


def model_table(results: Sequence[Quality]) -> Table:
    """`by_model` for a terminal of 80 columns. What diverges by 0.1 nats and more, enough to change what is written, is red."""
    header, rows = by_model(results)
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=0, show_edge=False)
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=i > 0)
    for line in rows:
        cells = [Text(x, style="red" if x and float(x.replace(",", "")) >= 100 else "") for x in line[3:-1]]
        table.add_row(*line[:3], *cells, line[-1])
    return table


def add_results(report: Report, results: Sequence[Quality], *notes: str) -> None:
    """The verdict, its cards and the first chart; then notes, the table of all runs, what the formats are, the other charts."""
    charts = [*_cache_charts(results), *_weight_charts(results)]
    if results[1:]:
        report.text(verdict(results)).cards(cards(results))
    for svg, caption in charts[:1]:
        report.figure(svg, caption)
    report.text(KL_WORDS.format(limit=limit(results[0].floor)), *notes).heading("Every run")
    rows, hints = merged(results)
    report.table(HEADERS, rows, "Compared with the 16-bit run; point at a name to see what it is", hints=hints)
    if len(rows) < len(results):
        report.text(
            "Names joined by = store the same numbers here: their groups are as wide as a head, or as a row of the weights."
        )
    report.folded("The formats", legend([r.setting for r in results]))
    for svg, caption in charts[1:]:
        report.figure(svg, caption)


def merged(results: Sequence[Quality]) -> tuple[list[tuple[str, ...]], dict[tuple[int, str], str]]:
    """(rows, what the name in a column means): runs whose every figure but the time is the same share a row."""
    alike: dict[tuple[object, ...], list[Quality]] = {}
    for r in results:
        key = (kind(r), r.perplexity, r.kl_mean, r.kl_p99, r.top1, r.kv_bytes_per_token, r.weight_bytes)
        alike.setdefault(key, []).append(r)
    rows, hints = list[tuple[str, ...]](), dict[tuple[int, str], str]()
    for group in alike.values():
        names = [" = ".join(dict.fromkeys(cells)) for cells in zip(*(row(r)[:2] for r in group), strict=True)]
        if (column := {"KV cache": 0, "weights": 1}.get(kind(group[0]))) is not None:
            hints[column, names[column]] = in_words(group[0].setting)
        rows.append((*names, *row(group[0])[2:]))
    return rows, hints


def _cache_charts(results: Sequence[Quality]) -> list[tuple[str, str]]:
    """(svg, caption): divergence against bytes, and the error of each layer."""
    caches, base = [r for r in results[1:] if kind(r) == "KV cache"], results[0]
    if not caches:
        return []
    shares = [r.kv_bytes_per_token / base.kv_bytes_per_token for r in caches]
    names = [r.setting.kv + ", the default" * ((r.setting.keys, r.setting.values) == (KEYS, VALUES)) for r in caches]
    points = _points(caches, shares, names, [_series(r.setting) for r in caches])
    chart = divergence(points, x_label="bytes, share of a 16-bit cache", limit=limit(base.floor))
    figures = [(chart, "Quality against size of the cache: KL divergence from the 16-bit run by bytes per token")]
    errors = _fewest({r.setting.kv: r.layer_error for r in caches if any(r.layer_error)})
    if errors:
        chart = lines(errors, x_label="layer", y_label="relative error of hidden states", log_y=True)
        figures.append((chart, "Error by layer: hidden states against those of the 16-bit run"))
    return figures


def _weight_charts(results: Sequence[Quality]) -> list[tuple[str, str]]:
    """(svg, caption): divergence of 4-bit weights against bytes."""
    weights = [
        r for r in results[1:] if kind(r) == "weights" and r.setting.weights and weight_format(r.setting.weights).code.bits == 4
    ]
    if not weights:
        return []
    names = [r.setting.weights or "" for r in weights]
    shares = [r.weight_bytes / results[0].weight_bytes for r in weights]
    points = _points(weights, shares, names, [_family(n) for n in names])
    chart = divergence(points, x_label="bytes, share of 16-bit weights", limit=limit(results[0].floor))
    return [(chart, "Quality against size of 4-bit weights: KL divergence from the 16-bit run by bytes of the whole model")]


def _points(results: Sequence[Quality], shares: Sequence[float], names: Sequence[str], series: Sequence[str]) -> list[Point]:
    """Points of a chart; results that coincide (groups as wide as a head, say) share one."""
    by_place: dict[tuple[float, float], Point] = {}
    for result, share, name, family in zip(results, shares, names, series, strict=True):
        at = (share, max(result.kl_mean, LEAST_KL))
        label = f"{by_place[at].label} = {name}" if at in by_place else name
        by_place[at] = Point(label, *at, family)
    return list(by_place.values())


def write_report(results: Sequence[Quality], title: str, path: Path, longer: Sequence[LongContext] = ()) -> None:
    """A report of an evaluation alone."""
    command = "halfbyte " + shlex.join(sys.argv[1:])
    report = Report(title, f"{results[0].tokens:,} predicted tokens; every run reads older keys and values from its own cache")
    add_results(report, results)
    if longer:
        add_long_context(report, longer)
    report.code(command, "The command that made this page").write(path)


def add_long_context(report: Report, results: Sequence[LongContext]) -> None:
    """The section of long contexts: what was asked, the table, and how many texts are still the 16-bit ones, token by token."""
    report.heading(f"Contexts of {results[0].context:,} tokens").text(
        "Retrieval: a random key is hidden in a text, each time at another depth, and the end requests it; the score is the share "
        "of key tokens that are the likeliest, given those before them. Continuations: greedy texts, how many of their tokens "
        "equal those of the 16-bit run before the first that differs, and how likely the 16-bit model finds them: a text that "
        "breaks down is unlikely, and one that repeats itself very likely. Prompts are read in one piece, later tokens one at a "
        "time."
    )
    report.table(LONG_HEADERS, long_rows(results))
    at = [results[0].written * i // 64 for i in range(65)]
    equal = {r.formats: [100 * sum(p >= t for p in r.parted) / len(r.parted) for t in at] for r in results[1:]}
    if equal:
        chart = lines(dict(list(equal.items())[:6]), x=at, x_label="tokens written", y_label="% of texts equal so far")
        report.figure(chart, "Where greedy texts diverge from those of the 16-bit run")


def _series(setting: Setting) -> str:
    """Which caches share a color: those of one type of keys."""
    return setting.keys.split("_")[0] if isinstance(setting.keys, str) else "by layer"


def _family(name: str) -> str:
    return "floating point" if "fp4" in name else name.split("_")[0]


def _fewest(series: dict[str, list[float]]) -> dict[str, list[float]]:
    """At most six lines, spread over the range of final errors, so that the chart can be read."""
    names = sorted(series, key=lambda name: series[name][-1])
    if len(names) > 6:
        names = [names[i * (len(names) - 1) // 5] for i in range(6)]
    return {name: series[name] for name in names}


def cards(results: Sequence[Quality]) -> dict[str, dict[str, Cell]]:
    """The facts of each card."""
    base = results[0]
    return {title: _facts(title, r, base) for title, r in chosen(results).items()}


def _facts(title: str, result: Quality, base: Quality) -> dict[str, Cell]:
    formats: dict[str, Cell] = {} if title == result.setting.name else {"formats": result.setting.name}
    facts = formats | {
        "perplexity": f"{result.change:+.2f} % \u00b1 {result.noise:.2f} %",
        "size": f"{ratio(result, base):.2f}x smaller",
        "KL divergence": f"{result.kl_mean:.1e} nats, {safety(result)}",
    }
    if result.setting.kv != base.setting.kv:
        tokens, plain = (int(10**9 / r.kv_bytes_per_token) for r in (result, base))
        facts["tokens in 1 GB"] = f"{tokens:,} instead of {plain:,}"
    return facts


def write_calibration(model: str, made: Sequence[Calibrated], path: Path) -> None:
    """The Pareto front: divergence against bits of the plans and of the uniform choices that ran next to them."""
    alike = {(plan.bits, Setting.of_uniform(plan).kv, plan.measured["kl"]) for one in made for plan in one.uniform}
    points = [Point(name, bits, max(kl, 1e-9), "all layers alike") for bits, name, kl in sorted(alike)]
    points += [Point("", one.plan.bits, max(one.plan.measured["kl"], 1e-9), "by layer") for one in made]
    chart = divergence(points, x_label="bits an element")
    report = Report("Formats by layer", f"{model}: {made[0].plan.measured['tokens']:,} tokens")
    report.figure(chart, "Divergence from the 16-bit run against the size of the cache")
    for one in made:
        rows = [(i, f.keys + " rotated" * f.rotate_keys, f.values) for i, f in enumerate(one.plan.layers)]
        report.table(("layer", "keys", "values"), rows, f"{one.plan.bits:.2f} bits, KL {one.plan.measured['kl']:.2e}", align="rll")
    report.code("halfbyte " + shlex.join(sys.argv[1:]), "The command that made this page").write(path)


def safe_where(safe: Sequence[bool]) -> str:
    """ "yes", "plain" (without outliers only) or "no": whether it is safe on a model, and on its variants with outliers."""
    return "yes" if all(safe) else "plain" if safe[0] else "no"


def in_words(setting: Setting) -> str:
    """The quantized formats of a setting, each with its codes and scales."""
    formats = {"keys": setting.keys, "values": setting.values, "weights": setting.weights, "lm_head": setting.lm_head}
    texts = {(name, use == "weights"): text for name, use, text in _texts()}
    phrases = [
        f"{part}: {texts[name, part in ('weights', 'lm_head')]}"
        for part, name in formats.items()
        if isinstance(name, str) and name != setting.dtype and (name, part in ("weights", "lm_head")) in texts
    ]
    return "; ".join(phrases) + "; keys Hadamard-rotated" * (setting.rotate_keys is True)


def legend(settings: Sequence[Setting]) -> list[str]:
    """A line for each format that settings use."""
    caches = {name for s in settings for name in (s.keys, s.values) if isinstance(name, str)}
    weights = {name for s in settings for name in (s.weights, s.lm_head)}
    return [f"{name} ({use}): {text}" for name, use, text in _texts() if name in (weights if use == "weights" else caches)]


def _texts() -> list[tuple[str, str, str]]:
    """(format, use, what it is)."""
    return [
        (name, use, f"{codes}, {'no scale' if scale == '-' else f'one scale for each {scale}'}, {bits} bits")
        for name, use, codes, scale, bits in format_rows()
    ]


def append_records(
    results: Sequence[Quality],
    path: Path,
    longer: Sequence[LongContext] = (),
    took: dict[str, float] | None = None,
    device: torch.device | str | None = None,
) -> None:
    """Append one JSON object a result to a file, with where and how it was made, and with its long context if there is one.

    took: seconds of the whole command, for its records to tell; device: where the model ran, None: the GPU if there is one.
    """
    made_on = describe(device)
    where = dataclasses.asdict(environment(made_on, made_on.threads))
    for one in records(results, longer):
        append_line(path, json.dumps(one | ({} if took is None else {"command": took}) | {"environment": where}))
