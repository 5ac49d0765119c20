"""Results of an evaluation as a terminal table and as a report."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from halfbyte.evals.choices import SAFE, safe_where
from halfbyte.evals.legend import in_words, legend
from halfbyte.evals.quality import Quality, Setting
from halfbyte.evals.verdict import KL_WORDS, cards, ratio, verdict
from halfbyte.formats import weight_format
from halfbyte.paths import append_line
from halfbyte.report import Report

if TYPE_CHECKING:
    import torch

    from halfbyte.evals.long_context import LongContext
    from halfbyte.measure.charts import Point

KL_LABEL = "mean KL divergence (nats)"
#: What a logarithmic axis shows for no divergence at all.
LEAST_KL = 1e-9
BY_MODEL = "KL divergence from the 16-bit run in thousandths of a nat, for the shipped model and with outliers of larger models"
SAFE_WORDS = f"safe: at most {1e3 * SAFE:g} thousandths, noise included; plain: only without outliers"
HEADERS = (
    *("KV cache", "weights", "perplexity", "change %", "KL mean", "KV B/token", "weights MB"),
    *("top-1 %", "KL p99", "KL by third", "seconds"),
)


def row(result: Quality) -> tuple[str, ...]:
    """One result in the order of `HEADERS`."""
    return (
        result.setting.kv,
        _weights(result),
        f"{result.perplexity:.4f}",
        f"{result.change:+.3f}",
        f"{result.kl_mean:.2e}",
        f"{result.kv_bytes_per_token:,.0f}",
        f"{result.weight_bytes / 1e6:.2f}",
        f"{100 * result.top1:.2f}",
        f"{result.kl_p99:.2e}",
        " ".join(f"{kl:.1e}" for kl in result.kl_by_third),
        f"{result.seconds:.1f}",
    )


def _weights(result: Quality) -> str:
    """The formats of the weights."""
    setting = result.setting
    head = f", lm_head {setting.lm_head}" if setting.lm_head else ""
    return (setting.weights or result.plain_weights) + head + (", clip searched" if setting.clip else "")


def rows(results: Sequence[Quality]) -> list[tuple[str, ...]]:
    """The rows of a terminal's table; an empty one, which draws a line, between the 16-bit run, the caches and the weights."""
    made: list[tuple[str, ...]] = []
    for before, result in zip([None, *results], results, strict=False):
        made += [()] * (before is not None and _kind(before) != _kind(result)) + [row(result)]
    return made


def by_model(results: Sequence[Quality]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(header, rows): each setting's size and perplexity on the model itself, its KL in thousandths of a nat on every model, and
    where that is small enough to be called safe."""
    models = list(dict.fromkeys(r.model for r in results))
    kl = {(r.model, r.setting): 1e3 * r.kl_mean for r in results}
    most = {(r.model, r.setting): r.kl_mean + r.kl_noise for r in results}
    plain = [r for r in results if r.model == models[0]]
    rows = [
        (
            r.setting.name,
            f"{ratio(r, plain[0]):.2f}x",
            f"{r.change:+.2f}",
            *(_thousandths(kl.get((model, r.setting))) for model in models),
            safe_where([most[model, r.setting] for model in models if (model, r.setting) in most]),
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
    made = Table(header_style="bold", box=SIMPLE_HEAD, padding=0, show_edge=False)
    for i, name in enumerate(header):
        made.add_column(name, justify="left" if i == 0 else "right", no_wrap=i > 0)
    for row in rows:
        cells = [Text(x, style="red" if x and float(x.replace(",", "")) >= 100 else "") for x in row[3:-1]]
        made.add_row(*row[:3], *cells, row[-1])
    return made


def _kind(result: Quality) -> str:
    """Which part of the table a result belongs to."""
    setting = result.setting
    if setting.weights is setting.lm_head is None:
        return "16-bit" if setting.is_plain else "KV cache"
    return "weights" if setting.is_plain else "both"


def add_results(report: Report, results: Sequence[Quality], *notes: str) -> None:
    """The verdict, its cards and the first chart; then notes, the table of all runs, what the formats are, the other charts."""
    charts = [*_cache_charts(results), *_weight_charts(results)]
    if results[1:]:
        report.text(verdict(results)).cards(cards(results))
    for svg, caption in charts[:1]:
        report.figure(svg, caption)
    report.text(KL_WORDS, *notes).heading("Every run")
    found, hints = merged(results)
    report.table(HEADERS, found, "Compared with the 16-bit run; point at a name to see what it is", hints=hints)
    if len(found) < len(results):
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
        key = (_kind(r), r.perplexity, r.kl_mean, r.kl_p99, r.top1, r.kv_bytes_per_token, r.weight_bytes)
        alike.setdefault(key, []).append(r)
    found, hints = list[tuple[str, ...]](), dict[tuple[int, str], str]()
    for group in alike.values():
        names = [" = ".join(dict.fromkeys(cells)) for cells in zip(*(row(r)[:2] for r in group), strict=True)]
        if (column := {"KV cache": 0, "weights": 1}.get(_kind(group[0]))) is not None:
            hints[column, names[column]] = in_words(group[0].setting)
        found.append((*names, *row(group[0])[2:]))
    return found, hints


def _cache_charts(results: Sequence[Quality]) -> list[tuple[str, str]]:
    """(svg, caption): divergence against bytes, and the error of each layer."""
    from halfbyte.measure.charts import lines, scatter

    caches, base = [r for r in results[1:] if _kind(r) == "KV cache"], results[0]
    if not caches:
        return []
    shares = [r.kv_bytes_per_token / base.kv_bytes_per_token for r in caches]
    points = _points(caches, shares, [r.setting.kv for r in caches], [_series(r.setting) for r in caches])
    chart = scatter(points, x_label="bytes, share of a 16-bit cache", y_label=KL_LABEL, log_y=True)
    made = [(chart, "Quality against size of the cache: KL divergence from the 16-bit run by bytes per token")]
    errors = _fewest({r.setting.kv: r.layer_error for r in caches if any(r.layer_error)})
    if errors:
        chart = lines(errors, x_label="layer", y_label="relative error of hidden states", log_y=True)
        made.append((chart, "Error by layer: hidden states against those of the 16-bit run"))
    return made


def _weight_charts(results: Sequence[Quality]) -> list[tuple[str, str]]:
    """(svg, caption): divergence of 4-bit weights against bytes."""
    from halfbyte.measure.charts import scatter

    weights = [
        r for r in results[1:] if _kind(r) == "weights" and r.setting.weights and weight_format(r.setting.weights).code.bits == 4
    ]
    if not weights:
        return []
    names = [r.setting.weights or "" for r in weights]
    shares = [r.weight_bytes / results[0].weight_bytes for r in weights]
    chart = scatter(
        _points(weights, shares, names, [_family(n) for n in names]),
        x_label="bytes, share of 16-bit weights",
        y_label=KL_LABEL,
        log_y=True,
    )
    return [(chart, "Quality against size of 4-bit weights: KL divergence from the 16-bit run by bytes of the whole model")]


def _points(results: Sequence[Quality], shares: Sequence[float], names: Sequence[str], series: Sequence[str]) -> list[Point]:
    """Points of a chart; results that coincide (groups as wide as a head, say) share one."""
    from halfbyte.measure.charts import Point

    merged: dict[tuple[float, float], Point] = {}
    for result, share, name, kind in zip(results, shares, names, series, strict=True):
        at = (share, max(result.kl_mean, LEAST_KL))
        label = f"{merged[at].label} = {name}" if at in merged else name
        merged[at] = Point(label, *at, kind)
    return list(merged.values())


def write_report(results: Sequence[Quality], title: str, path: Path, longer: Sequence[LongContext] = ()) -> None:
    """A report of an evaluation alone."""
    command = "halfbyte " + shlex.join(sys.argv[1:])
    report = Report(title, f"{results[0].tokens:,} predicted tokens; every run reads older keys and values from its own cache")
    add_results(report, results)
    if longer:
        add_long_context(report, longer)
    report.code(command, "The command that made this page").write(path)


def record(result: Quality) -> dict[str, Any]:
    """One result as plain data."""
    return {"kv": result.setting.kv} | dataclasses.asdict(result.setting) | dataclasses.asdict(result)


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
    from halfbyte.device import describe
    from halfbyte.measure.records import environment

    made_on = describe(device)
    made = dataclasses.asdict(environment(made_on, made_on.threads))
    for one in records(results, longer):
        append_line(path, json.dumps(one | ({} if took is None else {"command": took}) | {"environment": made}))


def records(results: Sequence[Quality], longer: Sequence[LongContext] = ()) -> list[dict[str, Any]]:
    """`record` of each result, with its long context if there is one."""
    added: list[dict[str, Any]] = [{"long_context": dataclasses.asdict(one)} for one in longer] or [{}] * len(results)
    return [record(result) | more for result, more in zip(results, added, strict=True)]


LONG_HEADERS = ("formats", "key found, %", "differs after", "of tokens", "first", "nats a token", "seconds")


def long_rows(results: Sequence[LongContext]) -> list[tuple[str, ...]]:
    """One result a row in the order of `LONG_HEADERS`: the median token that parts from the 16-bit text, and the first."""
    return [
        (
            r.formats,
            f"{100 * r.found:.0f}",
            f"{r.median_parted:,.0f}",
            f"{r.written:,}",
            f"{min(r.parted):,}",
            f"{r.nll:.3f}",
            f"{r.seconds:.1f}",
        )
        for r in results
    ]


def add_long_context(report: Report, results: Sequence[LongContext]) -> None:
    """The section of long contexts: what was asked, the table, and how many texts are still the 16-bit ones, token by token."""
    from halfbyte.measure.charts import lines

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
    ranked = sorted(series, key=lambda name: series[name][-1])
    if len(ranked) > 6:
        ranked = [ranked[i * (len(ranked) - 1) // 5] for i in range(6)]
    return {name: series[name] for name in ranked}
