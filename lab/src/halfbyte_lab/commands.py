"""What the laboratory adds to the command line of halfbyte: advise, bench, calibrate, demo, eval and extract."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.cli.options import Output
from halfbyte.cli.shared import App, Model, Where, Wide, check_new_folder, console, print_table
from halfbyte_lab import bench
from halfbyte_lab.advise import advise
from halfbyte_lab.calibrate import calibrate
from halfbyte_lab.evaluate import evaluate
from halfbyte_lab.options import check_page, check_writable

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

    from halfbyte_lab.evals.demo import Shown


def add_to(app: App) -> None:
    """Register the commands."""
    app.command("advise")(advise)
    app.command("calibrate")(calibrate)
    app.command("demo")(demo)
    app.command("eval")(evaluate)
    app.command("extract")(extract)
    app.add_typer(bench.app, name="bench")


def demo(
    html: Annotated[Path, typer.Option("--html", "--report", help="The HTML page to write.")] = Path("halfbyte-report.html"),
    output: Output = None,
    quick: Annotated[bool, typer.Option("--quick", help="A quarter of the text, and no variants with outliers.")] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Then serve the report with a playground for formats.")] = False,
    port: Annotated[int, typer.Option(help="With --serve: the port on 127.0.0.1; 0: any free one.")] = 0,
    device: Where = None,
    wide: Wide = False,
) -> None:
    """Evaluate the shipped model with every KV and weight format: a table, three generated texts, an HTML report."""
    check_page(html, "html")
    check_writable(output, "output")
    from halfbyte_lab.evals.demo import demo as run
    from halfbyte_lab.evals.pages import append_records
    from halfbyte_lab.evals.present import HEADERS, rows

    server = _bound(port) if serve else None
    result = run(html, console(), console(stderr=True), quick, device)
    if wide:
        print_table(
            "Every figure, without outliers", HEADERS, rows([r for r in result.results if not r.model]), text_columns=2, wide=True
        )
    if output is not None:
        append_records(result.results, output, took=result.took, device=device)
    if server is not None:
        _serve(server, result)


def _bound(port: int) -> ThreadingHTTPServer:
    from halfbyte_lab.evals.playground import bind

    return bind(port)


def _serve(server: ThreadingHTTPServer, shown: Shown) -> None:
    """The report with the playground, in a browser where there is a screen."""
    import webbrowser

    from halfbyte_lab.evals.demo import PROMPT
    from halfbyte_lab.evals.playground import HOST, Playground, form, serve

    url = f"http://{HOST}:{server.server_address[1]}/"
    print(f"Playground: {url}   (Ctrl-C ends it)", flush=True)
    if sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(url)
    serve(server, shown.report.form(form(PROMPT)).to_html(), Playground(shown.model, shown.tokenizer))


def extract(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write; it must not exist.")],
    layer: Annotated[int, typer.Option(help="The attention layer; negative numbers count from the end.")] = 0,
    head: Annotated[int | None, typer.Option(help="Only this query head and its KV head.")] = None,
) -> None:
    """Write one attention layer's q, k and v projections as wq.npy, wk.npy, wv.npy, bq.npy, bk.npy, bv.npy and metadata.json."""
    check_new_folder(output)  # before the seconds that imports take
    from halfbyte.paths import new_folder
    from halfbyte_lab.extract import load_layer

    projections = load_layer(model, layer, head)
    with new_folder(output) as folder:
        projections.save(folder)
    shapes = ", ".join(f"{name} {list(w.shape)}" for name, w in zip("qkv", projections.weights, strict=True))
    print(
        f"{output}: layer {projections.metadata.layer} of {model}: {shapes}"
        + ("" if projections.metadata.bias else "; biases are zero")
    )
