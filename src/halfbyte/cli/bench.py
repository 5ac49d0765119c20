"""`halfbyte bench`: time what runs on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.cli.shared import Json, check_writable, integers, pairs, words
from halfbyte.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfbyte.bench.page import Table
    from halfbyte.bench.session import Job, Session
    from halfbyte.bench.studies import Study

app = typer.Typer(
    help="Time what runs on this machine; results that fail their accuracy promise get no time.", no_args_is_help=True
)

Formats = Annotated[str, typer.Option(help="Formats, separated by commas; int8+int4_g32 is keys+values.")]
Impls = Annotated[str, typer.Option(help="Implementations, separated by commas, such as auto,triton,cpu,reference.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Append records to this file, one JSON object a line.")]
Quick = Annotated[bool, typer.Option("--quick", help="One case, few repeats.")]
Filter = Annotated[str, typer.Option("--filter", help="Regular expression over 'case formats implementation'.")]
Where = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:N; default: the GPU if there is one.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default: what torch uses.")]
Page = Annotated[Path | None, typer.Option("--html", help="Also write the results as one HTML page.")]


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
    html: Page = None,
    as_json: Json = False,
    bars: Annotated[
        bool, typer.Option("--bars", help="The cases that have bars; default on a GPU without sizes or formats.")
    ] = False,
) -> None:
    """Attention of one new token over a cache, beside torch's own in 16 bits."""
    from halfbyte.bench import decode
    from halfbyte.bench.session import Options, Session

    check_writable(html, "html")
    session = Session.start(Options(output, quick, pattern, as_json, device, threads))
    chosen = bool(batch or heads or dim or context or formats)
    if bars and (chosen or session.device.kind != "cuda"):
        raise InvalidArgument("--bars measures fixed cases on a GPU; leave out sizes and formats, and see --filter and --device")
    if session.device.kind == "cuda" and not chosen:
        from halfbyte.bench.run_bars import jobs

        _run_bars(session, jobs(words(impl) or ["auto"], session.device.kind, quick), html)
        return
    shapes = list(decode.DEFAULT_SHAPES[:1] if quick else decode.DEFAULT_SHAPES)
    if batch or heads or dim or context:
        shapes = [
            decode.DecodeShape(b, hq, hkv, d, t)
            for b in integers(batch or "1", "batch")
            for hq, hkv in _heads(heads or "32/8")
            for d in integers(dim or "128", "dim")
            for t in integers(context or "8192", "context")
        ]
    wanted = words(formats) or list(decode.DEFAULT_FORMATS)
    _run_bench(session, decode.cases(session, shapes, wanted, words(impl)), "decode attention", html)


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
    html: Page = None,
    as_json: Json = False,
    bars: Annotated[
        bool, typer.Option("--bars", help="The cases that have bars; default on a GPU without sizes or formats.")
    ] = False,
) -> None:
    """Products with low-bit weights, beside torch's own linear layer in 16 bits."""
    from halfbyte.bench import linear
    from halfbyte.bench.session import Options, Session
    from halfbyte.bench.timing import MANY_GRAPHS

    chosen = bool(rows or size or formats)
    shapes = list(linear.QUICK_SHAPES if quick else linear.DEFAULT_SHAPES)
    if rows or size:
        shapes = [
            linear.LinearShape(m, n, k) for m in integers(rows or "1", "rows") for n, k in pairs(size or "4096x4096", "x", "size")
        ]
    check_writable(html, "html")
    session = Session.start(Options(output, quick, pattern, as_json, device, threads), MANY_GRAPHS)
    if bars and (chosen or session.device.kind != "cuda"):
        raise InvalidArgument("--bars measures fixed cases on a GPU; leave out sizes and formats, and see --filter and --device")
    if session.device.kind == "cuda" and not chosen:
        _run_linear_bars(session, words(impl) or ["auto"], quick, html)
        return
    wanted = words(formats) or list(linear.DEFAULT_FORMATS)
    _run_bench(session, linear.cases(session, shapes, wanted, words(impl)), "linear", html)


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
    html: Page = None,
    as_json: Json = False,
) -> None:
    """The four published variants of quantised attention, launch by launch, and one launch for q, k and v against three."""
    from halfbyte.bench import qkv, run_qkv
    from halfbyte.bench.session import Options, Session
    from halfbyte.bench.timing import MANY_GRAPHS

    check_writable(html, "html")
    first = qkv.extracted_weights(weights) if weights is not None else qkv.shipped_weights(qkv.GPT2)
    session = Session.start(Options(output, quick, pattern, as_json, device, threads), MANY_GRAPHS)
    layers = [first] if quick else [first, qkv.random_weights(qkv.LLAMA)]
    session.run(run_qkv.jobs(layers, impl, session.device.kind))
    rows = run_qkv.table_rows(session.records)
    _show(session, f"q, k, v on {session.device.name}", run_qkv.HEADERS, rows, 3)
    _finish(session, "q, k, v", html, (run_qkv.HEADERS, rows))


@app.command("study")
def bench_study(
    name: Annotated[str, typer.Argument(help="Which one; without a name they are listed.")] = "",
    output: Output = None,
    quick: Quick = False,
    pattern: Filter = "",
    device: Where = None,
    threads: Threads = None,
    html: Page = None,
    as_json: Json = False,
) -> None:
    """One published table or one question, measured again: a table, a chart and what they show. Small without a GPU."""
    from halfbyte.bench.session import Options, Session
    from halfbyte.bench.studies import QUESTIONS, study

    if not name:
        for known, asks in QUESTIONS.items():
            print(f"{known:18} {asks}")
        return
    found = study(name)
    check_writable(html, "html")
    _run_study(Session.start(Options(output, quick, pattern, as_json, device, threads), found.effort), found, html)


@app.command("overhead")
def bench_overhead(output: Output = None, device: Where = None, as_json: Json = False) -> None:
    """What one eager call costs the host, beside Triton's own launch of a kernel. Needs a GPU."""
    from halfbyte.bench.overhead import CallJob
    from halfbyte.bench.session import Options, Session

    session = Session.start(Options(output, json=as_json, device=device))
    _run_bars(session, [CallJob()], None)


def _run_bench(session: Session, jobs: Sequence[Job], title: str, html: Path | None) -> None:
    session.show_roofs()
    session.run(jobs)
    session.show(title)
    _finish(session, title, html)


def _run_bars(session: Session, jobs: Sequence[Job], html: Path | None) -> None:
    """As `_run_bench`, with the table of bars; roofs are measured case by case."""
    from halfbyte.bench import bars

    session.run(jobs)
    _show(session, f"bars on {session.device.name}", bars.HEADERS, bars.table_rows(session.records), 2)
    _finish(session, "bars of decode attention", html)


def _run_linear_bars(session: Session, impls: Sequence[str], quick: bool, html: Path | None) -> None:
    from halfbyte.bench import linear_bars, quoted
    from halfbyte.bench.run_linear import jobs

    session.run(jobs(impls, session.device.kind, quick))
    rows = linear_bars.table_rows(session.records)
    _show(session, f"linear layers on {session.device.name}", linear_bars.HEADERS, rows, 3)
    session.say(f"quoted: {quoted.SOURCE}")
    _finish(session, "linear layers", html, (linear_bars.HEADERS, rows), linear_bars.figures(session.records) if html else ())


def _run_study(session: Session, found: Study, html: Path | None) -> None:
    """All jobs of a study, its table and its two sentences."""
    if session.device.kind != "cuda":
        session.say("no GPU here: this study runs small, on the CPU")
    session.study = found.name
    session.run(found.jobs(session))
    headers, rows = found.table(session.records)
    _show(session, f"{found.name} on {session.device.name}", headers, rows, found.text_columns)
    for sentence in found.says(session.records):
        session.say(sentence)
    _finish(session, found.name, html, (headers, rows), found.charts(session.records) if html else ())


def _show(session: Session, title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int) -> None:
    """The table of a run, its notes, and how many bars were met."""
    from halfbyte.bench import bars

    if session.records and not session.options.json:
        session.show_table(title, headers, rows, text_columns)
    for record in session.records:
        if record.note:
            session.say(f"{record.case} {record.formats}: {record.note}")
    session.say(bars.count_text(session.records))


def _finish(session: Session, title: str, html: Path | None, table: Table | None = None, figures: Sequence[str] = ()) -> None:
    from halfbyte.bench.page import write_page

    if html is not None and session.records:
        print(f"page written to {write_page(session.records, title, html, table, figures)}", file=sys.stderr)
    if session.interrupted:
        raise typer.Exit(130)
    if not session.records:
        raise InvalidArgument(f"filter={session.options.pattern!r} leaves nothing to measure")


def _heads(text: str) -> list[tuple[int, int]]:
    return pairs(text, "/", "heads")
