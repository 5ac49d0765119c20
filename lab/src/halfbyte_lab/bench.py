"""`halfbyte bench` and, the same, `python -m halfbyte_lab`: cases with targets, sizes, baselines, studies, plans and pages."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from halfbyte.cli import run_app
from halfbyte.cli.options import Output
from halfbyte.cli.shared import App, Json, Where, integers, print_table, words
from halfbyte.errors import InvalidArgument
from halfbyte_lab.bench_model import bench_model
from halfbyte_lab.options import Formats, Impls, RunOptions, measures, pairs, token_counts
from halfbyte_lab.tune.command import tune

app = App(
    name="python -m halfbyte_lab",
    help="Measure halfbyte on this machine: a result that fails its accuracy check gets no time. Small without a GPU.",
)

Files = Annotated[list[Path], typer.Argument(help="Files of records, written by --output.")]
Against = Annotated[
    list[Path] | None, typer.Option("--against", help="Earlier records: changes beyond the noise are marked. Repeatable.")
]
PageFile = Annotated[Path, typer.Option("--html", "--output", "-o", help="The HTML page to write.")]
Title = Annotated[str, typer.Option(help="Title of the page.")]


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    run_app(app, arguments)


@app.command("all")
@measures
def run_all(options: RunOptions) -> None:
    """Everything: attention, linear layers, mixtures of experts, baselines and every study. Ctrl-C keeps what was measured."""
    from halfbyte_lab import suites

    suites.run_suites(options, "everything", suites.every)


@app.command("decode")
@measures
def bench_decode(
    options: RunOptions,
    batch: Annotated[str, typer.Option(help="Batch sizes; without sizes and formats every case with a target runs.")] = "",
    heads: Annotated[str, typer.Option(help="Query heads / KV heads, such as 32/8,8/1.")] = "",
    dim: Annotated[str, typer.Option(help="Head dims.")] = "",
    context: Annotated[str, typer.Option(help="Tokens in the cache, such as 8192,128K.")] = "",
    formats: Formats = "",
    impl: Impls = "",
) -> None:
    """Decode attention of one new token, compared with torch's 16-bit attention; on a GPU also appends and the host's time."""
    from halfbyte_lab import suites
    from halfbyte_lab.measure.decode import DecodeShape

    shapes = [
        DecodeShape(b, hq, hkv, d, t)
        for b in integers(batch or "1", "batch")
        for hq, hkv in pairs(heads or "32/8", "/", "heads")
        for d in integers(dim or "128", "dim")
        for t in token_counts(context or "8192")
        if batch or heads or dim or context
    ]
    suites.run_suites(options, "decode attention", lambda s: [suites.decode(s, shapes, words(formats), words(impl))])


@app.command("linear")
@measures
def bench_linear(
    options: RunOptions,
    rows: Annotated[str, typer.Option(help="Batch sizes M; without sizes and formats every case with a target runs.")] = "",
    size: Annotated[str, typer.Option(help="Out x in features, such as 4096x4096,14336x4096.")] = "",
    formats: Formats = "",
    impl: Impls = "",
) -> None:
    """Linear layers with packed weights, compared with torch's 16-bit GEMM."""
    from halfbyte_lab import suites
    from halfbyte_lab.measure.linear import LinearShape

    shapes = [
        LinearShape(m, n, k)
        for m in integers(rows or "1", "rows")
        for n, k in pairs(size or "4096x4096", "x", "size")
        if rows or size
    ]
    suites.run_suites(options, "linear layers", lambda s: [suites.linear(s, shapes, words(formats), words(impl))])


@app.command("experts")
@measures
def run_experts(options: RunOptions, impl: Impls = "") -> None:
    """Mixtures of experts: 1 to 64 tokens against reading the experts that are hit, prompts against a 16-bit grouped GEMM."""
    from halfbyte_lab import suites

    suites.run_suites(options, "mixtures of experts", lambda s: [suites.experts(s, words(impl))])


@app.command("qkv")
@measures
def run_qkv(
    options: RunOptions,
    weights: Annotated[
        Path | None, typer.Option(help="A folder of `halfbyte extract`; default: the shipped model's, in GPT-2's shape.")
    ] = None,
    impl: Annotated[str, typer.Option(help="Implementation of the fused projection, such as auto, triton, cpu.")] = "auto",
) -> None:
    """The four published variants of quantized attention, launch by launch, and one launch for q, k and v against three."""
    from halfbyte_lab import suites

    suites.run_suites(options, "q, k, v", lambda _: [suites.qkv(weights, impl)])


@app.command("evaluate")
@measures
def run_evaluate(
    options: RunOptions,
    model: Annotated[str, typer.Argument(help="A model folder, a Hub id such as gpt2, or demo.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    layer: Annotated[int, typer.Option(help="The attention layer; negative numbers count from the end.")] = 0,
) -> None:
    """One attention layer of a model through all variants and formats: weights, records, table and plots as files."""
    from halfbyte_lab.suites import evaluate

    evaluate(options, model, folder, layer)


@app.command("study")
@measures
def run_study(
    options: RunOptions,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Which ones; without a name they are listed.")
    ] = None,
) -> None:
    """Published tables and questions, measured again: each a table, a chart and what they show."""
    from halfbyte_lab import suites
    from halfbyte_lab.studies import QUESTIONS

    if not names:
        for study, asks in QUESTIONS.items():
            print(f"{study:18} {asks}")
        return
    selection = [suites.study(name) for name in dict.fromkeys(names)]
    suites.run_suites(options, ", ".join(dict.fromkeys(names)), lambda _: selection)


@app.command("overhead")
def run_overhead(output: Output = None, device: Where = None, as_json: Json = False) -> None:
    """What one eager call costs the host, compared with Triton's own launch of a kernel. Needs a GPU."""
    from halfbyte_lab import suites

    options = RunOptions(output, device=device, as_json=as_json)
    suites.run_suites(options, "overhead", lambda _: [suites.overhead()])


@app.command("baselines")
@measures
def run_baselines(
    options: RunOptions,
    measure: Annotated[bool, typer.Option("--measure", help="Time those that run here, and halfbyte, on three cases.")] = False,
) -> None:
    """The other implementations that halfbyte is measured against: which run here, and why the others do not."""
    from halfbyte.device import describe
    from halfbyte_lab import suites
    from halfbyte_lab.baselines import run

    if measure:
        suites.run_suites(options, "baselines", lambda _: [suites.baselines()])
        return
    if replace(options, device=None, as_json=False) != RunOptions():
        options_of = "--output, --quick, --filter, --threads, --kernels and --html"
        raise InvalidArgument(f"{options_of} need --measure; without it the baselines are listed")
    rows = run.table_rows(describe(options.device))
    if options.as_json:
        print(json.dumps([dict(zip(run.HEADERS, row, strict=True)) for row in rows], indent=2))
        return
    print_table("", run.HEADERS, rows, text_columns=len(run.HEADERS))


app.command("tune")(tune)
app.command("model")(bench_model)


@app.command("roofline")
def bench_roofline(
    mib: Annotated[str, typer.Option("--mib", help="Sizes of the buffer in MiB, separated by commas.")] = "64",
    device: Where = None,
) -> None:
    """The roofline of this machine: bandwidth of reading and copying, and 16-bit GEMM throughput."""
    session = RunOptions(device=device).session()
    for size in integers(mib, "mib"):
        session.show_roofline(size * 2**20)


@app.command("report")
def bench_report(files: Files, against: Against = None, output: PageFile = Path("report.html"), title: Title = "report") -> None:
    """Write records as one HTML page: tables, charts, environments, commands; with --against also changes."""
    from halfbyte_lab.suites import write_report

    write_report(files, against or [], output, title)


@app.command("compare")
def bench_compare(
    before: Annotated[Path, typer.Argument(help="Earlier records.")],
    after: Annotated[Path, typer.Argument(help="Records to compare with them.")],
    full: Annotated[bool, typer.Option("--full", help="List unchanged cases too.")] = False,
) -> None:
    """List what became faster or slower, beyond the noise, between two files of records."""
    from halfbyte_lab.measure.compare import changes
    from halfbyte_lab.measure.page import CHANGES, change_row
    from halfbyte_lab.measure.records import read_all

    (old, notices), (new, more) = read_all([before]), read_all([after])
    for notice in (*notices, *more):
        print(f"note: {notice}", file=sys.stderr)
    differences = changes(old, new)
    visible = [c for c in differences if full or c.marked]
    if visible:
        print_table("", CHANGES, [[str(cell) for cell in change_row(c)] for c in visible], text_columns=3)
    print(f"{sum(c.marked for c in differences)} of {len(differences)} changed")
