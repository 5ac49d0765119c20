"""`python -m halfbyte_lab`: every case with a target, the baselines, and the studies; `make study NAME=...` runs one of these."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.cli import run_app
from halfbyte.cli.options import Output
from halfbyte.cli.shared import App, Json, Where, print_table, words
from halfbyte.errors import InvalidArgument
from halfbyte_lab.bench import Against, Files, PageFile, Title
from halfbyte_lab.options import Impls, RunOptions, measures, run_suites, write_report
from halfbyte_lab.tune.command import tune

if TYPE_CHECKING:
    from halfbyte_lab.measure.session import Session
    from halfbyte_lab.measure.suite import Suite

app = App(
    name="python -m halfbyte_lab",
    help="Measure halfbyte against its targets, other implementations and published figures. Small without a GPU.",
)


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    run_app(app, arguments)


def _run(options: RunOptions, title: str, chosen: Callable[[Session], Sequence[Suite]]) -> None:
    """Measure and show, each study and each target in a section of its own."""
    from halfbyte_lab.cases.report_sections import section_of

    run_suites(options, title, chosen, section_of)


@app.command("all")
@measures
def run_all(options: RunOptions) -> None:
    """Everything: attention, linear layers, mixtures of experts, baselines and every study. Ctrl-C keeps what was measured."""
    from halfbyte_lab.cases import suites

    _run(options, "everything", suites.every)


@app.command("decode")
@measures
def run_decode(options: RunOptions, impl: Impls = "") -> None:
    """Decode attention, appends and the host's time of a call: every case with a target."""
    from halfbyte_lab.cases import suites

    _run(options, "decode attention", lambda s: [suites.decode(s, words(impl))])


@app.command("linear")
@measures
def run_linear(options: RunOptions, impl: Impls = "") -> None:
    """Linear layers: every case with a target."""
    from halfbyte_lab.cases import suites

    _run(options, "linear layers", lambda s: [suites.linear(s, words(impl))])


@app.command("experts")
@measures
def run_experts(options: RunOptions, impl: Impls = "") -> None:
    """Mixtures of experts: 1 to 64 tokens against reading the experts that are hit, prompts against a 16-bit grouped GEMM."""
    from halfbyte_lab.cases import suites

    _run(options, "mixtures of experts", lambda s: [suites.experts(s, words(impl))])


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
    from halfbyte_lab.cases import suites

    _run(options, "q, k, v", lambda _: [suites.qkv(weights, impl)])


@app.command("evaluate")
@measures
def run_evaluate(
    options: RunOptions,
    model: Annotated[str, typer.Argument(help="A model folder, a Hub id such as gpt2, or demo.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    layer: Annotated[int, typer.Option(help="The attention layer; negative numbers count from the end.")] = 0,
) -> None:
    """One attention layer of a model through all variants and formats: weights, records, table and plots as files."""
    from halfbyte_lab.cases.qkv_evaluation import evaluate

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
    from halfbyte_lab.cases import suites
    from halfbyte_lab.studies import QUESTIONS

    if not names:
        for known, asks in QUESTIONS.items():
            print(f"{known:18} {asks}")
        return
    chosen = [suites.study(name) for name in dict.fromkeys(names)]
    _run(options, ", ".join(dict.fromkeys(names)), lambda _: chosen)


@app.command("overhead")
def run_overhead(output: Output = None, device: Where = None, as_json: Json = False) -> None:
    """What one eager call costs the host, compared with Triton's own launch of a kernel. Needs a GPU."""
    from halfbyte_lab.cases import suites

    options = RunOptions(output, device=device, as_json=as_json)
    _run(options, "overhead", lambda _: [suites.overhead()])


@app.command("baselines")
@measures
def run_baselines(
    options: RunOptions,
    measure: Annotated[bool, typer.Option("--measure", help="Time those that run here, and halfbyte, on three cases.")] = False,
) -> None:
    """The other implementations that halfbyte is measured against: which run here, and why the others do not."""
    from halfbyte.device import describe
    from halfbyte_lab.baselines import run
    from halfbyte_lab.cases import suites

    if measure:
        _run(options, "baselines", lambda _: [suites.baselines()])
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


@app.command("report")
def run_report(files: Files, against: Against = None, output: PageFile = Path("report.html"), title: Title = "report") -> None:
    """As `halfbyte bench report`, with each study and each target in a section of its own."""
    from halfbyte_lab.cases.report_sections import section_of

    write_report(files, against or [], output, title, section_of)
