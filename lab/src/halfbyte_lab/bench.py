"""`halfbyte bench`: time what runs on this machine, and make pages of what was measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from halfbyte.cli.shared import App, Where, integers, pairs, print_table, token_counts, words
from halfbyte_lab.bench_model import bench_model
from halfbyte_lab.options import Formats, Impls, RunOptions, measures, run_suites, write_report

app = App(help="Benchmark the kernels on this machine. A result that fails its accuracy check gets no time.")

Files = Annotated[list[Path], typer.Argument(help="Files of records, written by --output.")]
Against = Annotated[
    list[Path] | None, typer.Option("--against", help="Earlier records: changes beyond the noise are marked. Repeatable.")
]
PageFile = Annotated[Path, typer.Option("--html", "--output", "-o", help="The HTML page to write.")]
Title = Annotated[str, typer.Option(help="Title of the page.")]


@app.command("decode")
@measures
def bench_decode(
    options: RunOptions,
    batch: Annotated[str, typer.Option(help="Batch sizes; without any size option the default cases run.")] = "",
    heads: Annotated[str, typer.Option(help="Query heads / KV heads, such as 32/8,8/1.")] = "",
    dim: Annotated[str, typer.Option(help="Head dims.")] = "",
    context: Annotated[str, typer.Option(help="Tokens in the cache, such as 8192,128K.")] = "",
    formats: Formats = "",
    impl: Impls = "",
) -> None:
    """Decode attention, one new token, compared with torch's 16-bit attention."""
    from halfbyte_lab.measure import suite
    from halfbyte_lab.measure.decode import DecodeShape

    shapes = [
        DecodeShape(b, hq, hkv, d, t)
        for b in integers(batch or "1", "batch")
        for hq, hkv in pairs(heads or "32/8", "/", "heads")
        for d in integers(dim or "128", "dim")
        for t in token_counts(context or "8192")
        if batch or heads or dim or context
    ]
    run_suites(options, "decode attention", lambda _: [suite.decode_attention(shapes, words(formats), words(impl))])


@app.command("linear")
@measures
def bench_linear(
    options: RunOptions,
    rows: Annotated[str, typer.Option(help="Batch sizes M; without any size option the default cases run.")] = "",
    size: Annotated[str, typer.Option(help="Out x in features, such as 4096x4096,14336x4096.")] = "",
    formats: Formats = "",
    impl: Impls = "",
) -> None:
    """Linear layers with packed weights, compared with torch's 16-bit GEMM."""
    from halfbyte_lab.measure import suite
    from halfbyte_lab.measure.linear import LinearShape

    shapes = [
        LinearShape(m, n, k)
        for m in integers(rows or "1", "rows")
        for n, k in pairs(size or "4096x4096", "x", "size")
        if rows or size
    ]
    run_suites(options, "linear layers", lambda _: [suite.linear_layers(shapes, words(formats), words(impl))])


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
    found = changes(old, new)
    shown = [c for c in found if full or c.marked]
    if shown:
        print_table("", CHANGES, [[str(cell) for cell in change_row(c)] for c in shown], text_columns=3)
    print(f"{sum(c.marked for c in found)} of {len(found)} changed")
