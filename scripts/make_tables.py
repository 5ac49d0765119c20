"""Tables and charts of records, of formats and of model families, as Markdown. `make_docs.py` puts them into the pages."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from halfbyte.checkpoints.adapters import ADAPTERS, EXPANDED
from halfbyte.cli.formats import HEADERS, format_rows
from halfbyte_lab import studies
from halfbyte_lab.cases import linear_baselines, linear_targets, literature, qkv_cases, targets
from halfbyte_lab.measure import charts, compare, records, tables
from halfbyte_lab.measure.page import by_machine
from halfbyte_lab.measure.records import Record
from halfbyte_lab.studies import QUESTIONS, step

ROOT = Path(__file__).parent.parent
FAMILIES = ROOT / "results" / "families.jsonl"
SERVED = "the tokens of transformers"
#: What an error says besides the reason.
ADVICE = re.compile(r"^a packed KV cache cannot be used with \S+: |[.,;] (Quantize its|so nothing|load it) .*")


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headers)} |", "|" + "---|" * len(headers), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def case_name(case: str) -> str:
    """A case as readers know it: `8192 x 8192, 1 row` is `8192 x 8192, M = 1`, `64 rows, 64/1` is `64 query rows, 64/1`."""
    return re.sub(r"^(\d+) rows, ", r"\1 query rows, ", re.sub(r", (\d+) rows?$", r", M = \1", case))


def formats() -> str:
    """Every format: where it applies, what its codes are, what shares a scale, bits an element."""
    return markdown(HEADERS, [(f"`{name}`", *rest) for name, *rest in format_rows()])


def models() -> str:
    """Families by what came out for their cache, with the share of weights that is quantized, from the record of the tests."""
    first, *lines = map(json.loads, FAMILIES.read_text(encoding="utf-8").splitlines())
    by_outcome: dict[str, list[str]] = {}
    for line in lines:
        share = "-" if line.get("weights") or line["share"] is None else f"{line['share']:.0%}".replace("%", " %")
        by_outcome.setdefault(_cache_outcome(line), []).append(f"{line['family']} {share}")
    rows = [
        (outcome, ", ".join(families)) for outcome, families in sorted(by_outcome.items(), key=lambda x: (x[0] != SERVED, x[0]))
    ]
    return markdown((f"packed cache, transformers {first['transformers']}", "families, share of weights that is quantized"), rows)


def steps() -> str:
    """Families by how `generate()` runs their decode steps, from the record of the tests."""
    by_outcome: dict[str, list[str]] = {}
    for line in map(json.loads, FAMILIES.read_text(encoding="utf-8").splitlines()[1:]):
        if line.get("steps"):
            by_outcome.setdefault(line["steps"], []).append(line["family"])
    rows = [(outcome, ", ".join(families)) for outcome, families in sorted(by_outcome.items(), key=lambda x: -len(x[1]))]
    return markdown(("steps of `generate()`", "families"), rows)


def served_families() -> int:
    """Families whose packed cache gives the tokens of transformers."""
    return sum(_cache_outcome(line) == SERVED for line in json_lines(FAMILIES.name) if "family" in line)


def _cache_outcome(line: dict[str, Any]) -> str:
    """A cell: the reason without the name of the family and without what to do."""
    if "built" in line:
        return "not tested: transformers cannot build it without other packages or configurations"
    said = line["cache"]
    return SERVED if said is None else f"refused: {ADVICE.sub('', said)}"


def checkpoints() -> str:
    """What each adapter reads, in its own words."""
    return markdown(
        ("`quant_method`", "what loads", "becomes"), [row for adapter in (ADAPTERS | EXPANDED).values() for row in adapter.docs]
    )


def json_lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "results" / name).read_text(encoding="utf-8").splitlines()]


# ------------------------------------------------------------------------------------------------------------------- the GPU

NOTHING = "Nothing was measured yet."
CHART = "docs/performance/attention.svg"
BARS = "Attention: share of the read roofline, and targets"


def all_bars() -> str:
    """Every target with what was measured, and the 16-bit baselines, machine by machine."""
    told = []
    for of_machine in by_machine(every_gpu_record()).values():
        if measured := targets.latest(of_machine):
            rows = [[case_name(cell).replace("\n", "<br>") for cell in row] for row in targets.table(measured)[1]]
            told.append(f"{where_text(measured)} {tables.count_text(measured)}.\n\n{markdown(targets.HEADERS, rows)}")
    return "\n\n".join(told) or NOTHING


def gpu_records() -> list[Record]:
    """The last record of each case that has bars, on the machine with most records."""
    return targets.latest(max(by_machine(every_gpu_record()).values(), key=len, default=[]))


def every_gpu_record() -> list[Record]:
    """All that was measured on a GPU."""
    return _read("gpu.jsonl")


def _read(name: str) -> list[Record]:
    path = ROOT / "results" / name
    return list(_records(path, path.stat().st_mtime_ns)) if path.exists() else []


@cache
def _records(path: Path, changed: int) -> tuple[Record, ...]:
    """Those of a file, read once until it is changed; pages ask for them 200 times."""
    return tuple(records.read(path).records)


# ------------------------------------------------------------------------------------------------------------- linear layers

LINEAR_CHARTS = ("docs/performance/linear.svg", "docs/performance/linear-prompts.svg")
OURS = "halfbyte auto"
COLUMNS = (*linear_targets.FORMATS, linear_targets.INT8_X)
#: Codes of weights that Humming reads.
HUMMING = tuple(map(literature.code_of, linear_baselines.HUMMING))


def linear_records() -> list[Record]:
    """The last record of each case of linear layers, on the machine with most of them."""
    measured = [r for r in every_gpu_record() if r.case and r.op == "linear"]
    return linear_targets.latest(max(by_machine(measured).values(), key=len, default=[]))


def linear() -> str:
    """Each layer and batch size M: our times by format, and those of the baselines."""
    measured = [r for r in linear_records() if r.seconds]
    cases = [
        case
        for case in dict.fromkeys(r.case for r in measured)
        if any(r.case == case and r.implementation == OURS for r in measured)
    ]
    if not cases:
        return NOTHING
    rows = [_linear_cells(case, [r for r in measured if r.case == case]) for case in cases]
    headers = (
        "case",
        *COLUMNS,
        "cuBLAS bf16",
        "tinygemm",
        "published split-K",
        "fastest INT4 in the literature",
    )
    text = f"{where_text(measured)} Microseconds, overlapping launches, and share of the roofline; literature: {literature.SOURCE}."
    texts = ("Share of the read roofline by batch size M, with baselines", "Speed-up over cuBLAS of prompts")
    picture = "\n\n".join(f"![{text}]({Path(chart).name})" for text, chart in zip(texts, LINEAR_CHARTS, strict=True))
    return f"{text}\n\n{markdown(headers, rows)}\n\n{picture}"


def _linear_cells(case: str, found: Sequence[Record]) -> list[str]:
    ours = {r.formats: r for r in found if r.implementation == OURS}
    peers = {r.implementation: tables.us(r.seconds) for r in found if not r.implementation.startswith("halfbyte")}
    cells = [f"{tables.us(r.seconds)}, {100 * (r.roof_share or 0):.0f} %" if (r := ours.get(f)) else "" for f in COLUMNS]
    shape = found[0].shape
    other = literature.fastest(shape["N"], shape["K"], shape["M"], linear_targets.INT4)
    names = ("cuBLAS", "tinygemm", linear_targets.PUBLISHED)
    best = "" if other is None else f"{1e6 * other.seconds:.1f} {other.peer}"
    return [case_name(case), *cells, *(peers.get(name, "") for name in names), best]


def beside_humming() -> str:
    """Our times and Humming's by the code of the weights, where both come from one run; cuBLAS's too."""
    timed = [r for r in every_gpu_record() if r.case and r.op == "linear" and r.seconds]
    told = []
    for measured in by_machine(timed).values():
        runs = {r.case: r.environment for r in measured if r.implementation.startswith("humming")}
        found = linear_targets.latest([r for r in measured if r.environment == runs.get(r.case)])
        if found:
            rows = [_beside_humming(case, [r for r in found if r.case == case]) for case in dict.fromkeys(r.case for r in found)]
            told.append(f"{where_text(found)}\n\n{markdown(('case', *HUMMING, 'cuBLAS bf16'), rows)}")
    return "\n\n".join(told) or NOTHING


def _beside_humming(case: str, found: Sequence[Record]) -> list[str]:
    """ "10.5 us, 11.2 us: 1.07x" for each code: ours, Humming's, how many times faster ours is."""
    theirs = {r.formats: r for r in found if r.implementation.startswith("humming")}
    ours = {literature.code_of(r.formats): r for r in found if r.implementation == OURS}
    pairs = [(ours[code].seconds, theirs[code].seconds) if code in ours and code in theirs else None for code in HUMMING]
    cells = ["" if pair is None else f"{', '.join(map(tables.us, pair))}: {tables.times_text(*pair[::-1])}x" for pair in pairs]
    plain = next((tables.us(r.seconds) for r in found if r.implementation == "cuBLAS"), "")
    return [case_name(case), *cells, plain]


def quoted_figures() -> str:
    """The literature values that ours are compared with."""
    rows = [
        (f"{n} x {k}", peer, code, *(f"{time:.1f}" for time in times))
        for (n, k), found in literature.MICROSECONDS.items()
        for (peer, code), times in found.items()
    ]
    headers = ("weight", "library", "code", *(f"M = {rows}" for rows in literature.ROWS))
    return f"Microseconds, {literature.SOURCE}.\n\n{markdown(headers, rows)}"


def linear_verdicts() -> str:
    """How many bars of linear layers were met, and each that was missed."""
    measured = linear_records()
    if not measured:
        return NOTHING
    missed = [(r, v) for r in measured for v in r.bars if not v.met]
    rows = [(case_name(r.case), r.formats, targets.bound_text(v), targets.verdict_text(v)) for r, v in missed]
    left = len(linear_targets.every_target()) - sum(len(r.bars) for r in measured if r.implementation == OURS)
    missing = f"; {left} more are not in these records" if left > 0 else ""
    table = f"\n\n{markdown(('case', 'format', 'target', 'measured'), rows)}" if rows else ""
    return f"{tables.count_text(measured)}{missing}.{table}"


# ------------------------------------------------------------------------------------------------------------------- studies

STUDIES = "docs/performance/studies"
#: Longer tables are folded.
SHOWN_ROWS = 32


def study(name: str) -> str:
    """A study as it tells itself, machine by machine: where, sentences, table, charts."""
    told: list[str] = []
    before = 0
    for mine, drawn in _drawn(name):
        told += [*_study_text(name, mine), *_pictures(name, drawn, before + 1)]
        before += len(drawn)
    return "\n\n".join(told) or NOTHING


def study_charts() -> dict[str, str]:
    """Every chart of the studies, by the name of its file."""
    by_study = {name: [svg for _, drawn in _drawn(name) for svg in drawn] for name in QUESTIONS}
    return {f"{name}-{i}.svg": svg for name, drawn in by_study.items() for i, svg in enumerate(drawn, 1)}


@cache
def _drawn(name: str) -> list[tuple[list[Record], Sequence[str]]]:
    """A study's records and charts, machine by machine; drawing takes a second, and is done for the text and for the files."""
    machines = by_machine(study_records(name))
    return [(mine, _charts_of(name, machine, mine)) for machine, mine in machines.items()]


def _charts_of(name: str, machine: str, measured: list[Record]) -> Sequence[str]:
    definition = studies.study(name)
    also = study_records(definition.beside) if definition.beside else []
    with charts.measured_on(machine):
        return definition.charts([*measured, *also])


def study_records(name: str) -> list[Record]:
    """The last record of each thing that a study measured: on a GPU or, where it ran on none, on a CPU; else what it derives."""
    files = ([*_read("gpu.jsonl"), *_read("models.jsonl")], _read("cpu.jsonl"))
    of_gpu, of_cpu = ([r for r in map(marked, measured) if r.study == name] for measured in files)
    return compare.latest(of_gpu or of_cpu) or list(studies.study(name).derive(_read("gpu.jsonl")))


def marked(r: Record) -> Record:
    """Those of `python -m halfbyte_lab qkv` and of `examples/06_tokens_per_second.py` belong to studies, and do not say so."""
    if r.op == step.OP and not r.study:
        case = next(case for case in step.CASES if (case.batch, case.context) == (r.shape["B"], r.shape["T"]))
        return replace(r, study="step", case=case.name)
    return replace(r, study="fused-qkv") if r.op in (qkv_cases.OP, qkv_cases.FUSED_OP) else r


def _study_text(name: str, measured: Sequence[Record]) -> list[str]:
    found = studies.study(name)
    said = found.says(measured)
    made = found.tables(measured)
    columns = tuple(header.partition(",")[0] for headers, _ in made for header in headers if header)
    told = [" ".join([where_text(measured), *_notes(measured, " ".join(said), columns)]), *said]
    for headers, rows in made:
        cells = [[case_name(cell.removeprefix(f"{name}, ")).replace("\n", "<br>") for cell in row] for row in rows]
        table = markdown(headers, cells)
        told.append(folded(f"Table, {len(rows)} rows", table) if len(rows) > SHOWN_ROWS else table)
    if refused := dict.fromkeys(r.refused for r in measured if r.refused):
        told.append(folded("What has no figure, and why", "\n".join(f"- {why}" for why in refused)))
    return told


def _notes(measured: Sequence[Record], said: str, columns: tuple[str, ...]) -> list[str]:
    """What records note of their cases, unless that is said already or in a column, and how many bars were met."""
    noted = [r for r in measured if r.note and r.note[1:] not in said and not r.note.startswith(columns)]
    cases: dict[str, list[str]] = {}
    for r in noted:
        note = r.note.partition(";")[0]
        carriers = {other.implementation for other in noted if other.case == r.case and other.note.partition(";")[0] == note}
        of = f"{r.case}, {r.implementation}" if len(carriers) == 1 else r.case
        of_note = cases.setdefault(note, [])
        of_note += [of] * (of not in of_note)
    notes = [f"{'; '.join(names)}: {note}." for note, names in cases.items()]
    return [*notes, *([f"{tables.count_text(measured)}."] if any(r.bars for r in measured) else [])]


def folded(summary: str, text: str) -> str:
    """Markdown that a reader opens."""
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{text}\n\n</details>'


def _pictures(name: str, drawn: Sequence[str], first: int) -> list[str]:
    """Links to the charts, described as the charts describe themselves."""
    described = [html.unescape(svg.partition('aria-label="')[2].partition('"')[0]) for svg in drawn]
    return [f"![{text}]({Path(STUDIES).name}/{name}-{i}.svg)" for i, text in enumerate(described, first)]


def short_name(device: str) -> str:
    """ "H100" of "NVIDIA H100 80GB HBM3"."""
    return device.removeprefix("NVIDIA ").split()[0]


def where_text(measured: Sequence[Record]) -> str:
    """The machines, versions and days of the records."""
    where = [r.environment for r in measured]
    devices = ", ".join(sorted({e.device for e in where}))
    versions = sorted({f"{name} {e.versions[name]}" for e in where for name in ("torch", "triton") if name in e.versions})
    dates = sorted({e.date[:10] for e in where})
    return f"{devices}; {', '.join(versions)}; {', '.join(dates)}."


def _of_linear(measured: list[Record]) -> list[str]:
    with charts.measured_on(", ".join(dict.fromkeys(r.environment.device for r in measured))):
        return linear_targets.figures(measured)


def write_charts() -> None:
    """The charts of shares of the roof and of the studies; none of what was not measured."""
    reached, asked = targets.shares(gpu_records())
    if reached:
        reached, asked = ({case_name(case): share for case, share in shares.items()} for shares in (reached, asked))
        with charts.measured_on(gpu_records()[0].environment.device):
            svg = charts.marked_bars(reached, asked, x_label="% of the read roofline at the same number of bytes", title=BARS)
        (ROOT / CHART).write_text(charts.as_image(svg), encoding="utf-8")
    for chart, svg in zip(LINEAR_CHARTS, _of_linear(linear_records()), strict=False):
        (ROOT / chart).write_text(charts.as_image(svg), encoding="utf-8")
    drawn, folder = study_charts(), ROOT / STUDIES
    for name, svg in drawn.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(charts.as_image(svg), encoding="utf-8")
    for path in folder.glob("*.svg"):
        if path.name not in drawn:  # of records that tell it no more
            path.unlink()
