"""`python -m benchmarks.step [CASE]...`: whole models in known sizes, with random weights: a decode step, and its parts.

Each case in 16 bits with transformers' static cache, by plain generate(), with a graph a step, and with fused blocks; a record of
each is appended to --output. Those of the last case have the kernels of a step: tracing slows what is timed behind it. On a CPU
cases are only listed. Llama-3-70B's 16 bits do not fit one GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from halfbyte.cli import run_app
from halfbyte.cli.bench_model import show
from halfbyte.device import describe
from halfbyte.errors import InvalidArgument
from halfbyte.hf.model_step import SIZES, Formats, Steps, measure, of_sizes
from halfbyte.measure import records

#: The same in every case.
FORMATS = Formats("int4_g128", "int8", "int4_g32", "int8_col")
NEW = 33


class Case(NamedTuple):
    """Sizes, a batch, and what is wanted of the fastest way on an H200."""

    model: str
    batch: int
    context: int
    target: str


CASES = {
    "8b-1": Case("llama-3-8b", 1, 1024, "at least 600 tokens a second"),
    "8b-8": Case("llama-3-8b", 8, 8192, "at most 2.9 ms a step"),
    "8b-64": Case("llama-3-8b", 64, 2048, "55 % of the roofline"),
    "0.6b-1": Case("qwen3-0.6b", 1, 1024, "3 times as fast as in 16 bits"),
    "1.7b-1": Case("qwen3-1.7b", 1, 1024, "3 times as fast as in 16 bits"),
}


def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="[CASE]...", help="Default: all.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Append records to this file.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cuda or cuda:N; on a CPU cases are listed only.")] = None,
) -> None:
    """Decode steps of whole models in known sizes."""
    machine = describe(device)
    if unknown := sorted({*(names or ())} - {*CASES}):
        raise InvalidArgument(f"there is no case {', '.join(unknown)}; choose from: {', '.join(CASES)}")
    chosen = names or list(CASES)
    for name in chosen:
        case = CASES[name]
        print(f"{name}: {case.model}, batch {case.batch}, {case.context:,} tokens; target on an H200: {case.target}")
        if machine.kind != "cuda":
            continue
        model, steps = of_sizes(SIZES[case.model], machine, FORMATS), Steps(case.batch, case.context, NEW)
        found = []
        for record in measure(model, FORMATS, steps, machine, traced=name == chosen[-1]):
            found.append(record)
            if output is not None:
                records.append(output, [record])
        show(found, name)
        del model


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    run_app(app)
