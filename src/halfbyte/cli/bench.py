"""`halfbyte bench`: time what runs on this machine, and make pages of what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.cli.shared import Json, check_appendable, check_page, integers, pairs, print_table, words
from halfbyte.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from halfbyte.bench.session import Options, Session
    from halfbyte.bench.suites import Suite

app = typer.Typer(
    help="Time what runs on this machine; results that fail their accuracy promise get no time.", no_args_is_help=True
)

Formats = Annotated[str, typer.Option(help="Formats, separated by commas; int8+int4_g32 is keys+values.")]
Impls = Annotated[str, typer.Option(help="Implementations, separated by commas, such as auto,triton,cpu,reference.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Append records to this file, one JSON object a line.")]
Quick = Annotated[bool, typer.Option("--quick", help="Few cases, few repeats.")]
Filter = Annotated[str, typer.Option("--filter", help="Regular expression over 'case formats implementation'.")]
Where = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:N; default: the GPU if there is one.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: what torch uses.")]
Kernels = Annotated[
    bool, typer.Option("--kernels", help="On a GPU also the kernels' own times, by CUPTI; it slows what is timed later.")
]
Page = Annotated[Path | None, typer.Option("--html", help="Also write the results as one HTML page.")]
Bars = Annotated[bool, typer.Option("--bars", help="The cases that have bars; default on a GPU without sizes or formats.")]


@app.command("all")
def bench_all(
    output: Output = None,
    quick: Quick = False,
    pattern: Filter = "",
    device: Where = None,
    threads: Threads = None,
    kernels: Kernels = False,
    html: Page = None,
    as_json: Json = False,
) -> None:
    """Everything: attention, linear layers, q k v, peers and every study. Ctrl-C keeps what was measured. Small without a GPU."""
    from halfbyte.bench import suites
    from halfbyte.bench.session import Options

    options = Options(output, quick, pattern, as_json, device, threads, kernels)
    _run(options, html, "everything", suites.every)


@app.command("decode")
def bench_decode(
    batch: Annotated[str, typer.Option(help="Batch sizes; without any size option the default cases run.")] = "",
    heads: Annotated[str, typer.Option(help="Query heads / KV heads, such as 32/8,8/1.")] = "",
    dim: Annotated[str, typer.Option(help="Head sizes.")] = "",
    context: Annotated[str, typer.Option(help="Tokens in the cache.")] = "",
    formats: Formats = "",
    impl: Impls = "",
    output: Output = None,
    quick: Quick = False,
    pattern: Filter = "",
    device: Where = None,
    threads: Threads = None,
    kernels: Kernels = False,
    html: Page = None,
    as_json: Json = False,
    bars: Bars = False,
) -> None:
    """Attention of one new token over a cache, beside torch's own in 16 bits."""
    from halfbyte.bench import suites
    from halfbyte.bench.decode import DecodeShape
    from halfbyte.bench.session import Options

    shapes = [
        DecodeShape(b, hq, hkv, d, t)
        for b in integers(batch or "1", "batch")
        for hq, hkv in pairs(heads or "32/8", "/", "heads")
        for d in integers(dim or "128", "dim")
        for t in integers(context or "8192", "context")
        if batch or heads or dim or context
    ]
    options = Options(output, quick, pattern, as_json, device, threads, kernels)
    _run(options, html, "decode attention", lambda s: [suites.decode(s, shapes, words(formats), words(impl), bars)])


@app.command("linear")
def bench_linear(
    rows: Annotated[str, typer.Option(help="Rows of x; without any size option the default cases run.")] = "",
    size: Annotated[str, typer.Option(help="Out x in features, such as 4096x4096,14336x4096.")] = "",
    formats: Formats = "",
    impl: Impls = "",
    output: Output = None,
    quick: Quick = False,
    pattern: Filter = "",
    device: Where = None,
    threads: Threads = None,
    kernels: Kernels = False,
    html: Page = None,
    as_json: Json = False,
    bars: Bars = False,
) -> None:
    """Products with low-bit weights, beside torch's own linear layer in 16 bits."""
    from halfbyte.bench import suites
    from halfbyte.bench.linear import LinearShape
    from halfbyte.bench.session import Options

    shapes = [
        LinearShape(m, n, k)
        for m in integers(rows or "1", "rows")
        for n, k in pairs(size or "4096x4096", "x", "size")
        if rows or size
    ]
    options = Options(output, quick, pattern, as_json, device, threads, kernels)
    _run(options, html, "linear layers", lambda s: [suites.linear(s, shapes, words(formats), words(impl), bars)])


@app.command("qkv")
def bench_qkv(
    weights: Annotated[
        Path | None, typer.Option(help="A folder of `halfbyte extract`; default: the shipped model's, in GPT-2's shape.")
    ] = None,
    impl: Annotated[str, typer.Option(help="Implementation of the fused projection, such as auto, triton, cpu.")] = "auto",
    output: Output = None,
    quick: Quick = False,
    pattern: Filter = "",
    device: Where = None,
    threads: Threads = None,
    kernels: Kernels = False,
    html: Page = None,
    as_json: Json = False,
) -> None:
    """The four published variants of quantised attention, launch by launch, and one launch for q, k and v against three."""
    from halfbyte.bench import suites
    from halfbyte.bench.session import Options

    options = Options(output, quick, pattern, as_json, device, threads, kernels)
    _run(options, html, "q, k, v", lambda _: [suites.qkv(weights, impl)])


@app.command("study")
def bench_study(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Which ones; without a name they are listed.")
    ] = None,
    output: Output = None,
    quick: Quick = False,
    pattern: Filter = "",
    device: Where = None,
    threads: Threads = None,
    kernels: Kernels = False,
    html: Page = None,
    as_json: Json = False,
) -> None:
    """Published tables and questions, measured again: each a table, a chart and what they show. Small without a GPU."""
    from halfbyte.bench import suites
    from halfbyte.bench.session import Options
    from halfbyte.bench.studies import QUESTIONS

    if not names:
        for known, asks in QUESTIONS.items():
            print(f"{known:18} {asks}")
        return
    found = [suites.study(name) for name in dict.fromkeys(names)]
    options = Options(output, quick, pattern, as_json, device, threads, kernels)
    _run(options, html, ", ".join(dict.fromkeys(names)), lambda _: found)


@app.command("overhead")
def bench_overhead(output: Output = None, device: Where = None, as_json: Json = False) -> None:
    """What one eager call costs the host, beside Triton's own launch of a kernel. Needs a GPU."""
    from halfbyte.bench import suites
    from halfbyte.bench.session import Options

    _run(Options(output, json=as_json, device=device), None, "overhead", lambda _: [suites.overhead()])


@app.command("peers")
def bench_peers(
    measure: Annotated[bool, typer.Option("--measure", help="Time those that run here beside halfbyte, on three cases.")] = False,
    output: Output = None,
    quick: Quick = False,
    pattern: Filter = "",
    device: Where = None,
    threads: Threads = None,
    kernels: Kernels = False,
    html: Page = None,
    as_json: Json = False,
) -> None:
    """The other implementations that are measured beside halfbyte: which run here, and why the others do not."""
    from halfbyte.bench import peers, suites
    from halfbyte.bench.session import Options
    from halfbyte.device import describe

    if measure:
        options = Options(output, quick, pattern, as_json, device, threads, kernels)
        _run(options, html, "peers", lambda _: [suites.peers()])
        return
    if output or quick or pattern or html or threads is not None or kernels:
        options_of = "--output, --quick, --filter, --threads, --kernels and --html"
        raise InvalidArgument(f"{options_of} need --measure; without it the peers are listed")
    rows = peers.table_rows(describe(device))
    if as_json:
        print(json.dumps([dict(zip(peers.HEADERS, row, strict=True)) for row in rows], indent=2))
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table(*peers.HEADERS, header_style="bold")
    for row in rows:
        table.add_row(*map(escape, row))
    print_table(table)


@app.command("report")
def bench_report(
    files: Annotated[list[Path], typer.Argument(help="Records, as --output writes them.")],
    against: Annotated[
        list[Path] | None, typer.Option("--against", help="Records of before: what changed beyond the noise is marked. Repeatable.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="What the page is of.")] = "report",
) -> None:
    """Any set of records as one HTML page: tables, charts, environments and commands; with --against also what changed."""
    from halfbyte.bench.page import write_page
    from halfbyte.bench.records import read_all

    check_page(output, "output")
    after, notices = read_all(files)
    before, more = read_all(against or [])
    for notice in (*notices, *more):
        print(f"note: {notice}", file=sys.stderr)
    print(f"page written to {write_page(after, title, output, before)}", file=sys.stderr)


def _run(options: Options, html: Path | None, title: str, chosen: Callable[[Session], Sequence[Suite]]) -> None:
    """Measure and tell; exit code 130 after Ctrl-C, 1 when nothing was measured, all was refused or the GPU no longer answers."""
    from halfbyte.bench import suites
    from halfbyte.bench.page import write_page
    from halfbyte.bench.session import Session

    check_page(html, "html")
    check_appendable(options.output, "output")
    session = Session.start(options)
    suites.run(session, chosen(session))
    if html is not None and session.records:
        print(f"page written to {write_page(session.records, title, html)}", file=sys.stderr)
    if session.interrupted:
        raise typer.Exit(130)
    if not session.records:
        raise InvalidArgument(f"filter={options.pattern!r} leaves nothing to measure")
    if session.broken or all(record.refused for record in session.records):
        raise typer.Exit(1)
