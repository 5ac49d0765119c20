"""`python -m benchmarks.step [CASE]...`: whole models in known sizes, with random weights: a decode step, and its parts.

Each case in 16 bits with transformers' static cache, by plain generate(), with a graph a step, and with fused blocks; --way chooses
among them. All but the last compile, which takes a minute each for 32 layers. A record of each is appended to --output when it is
timed, and one of its graph alone. The last case is traced in the end, as tracing slows what is timed behind it. On a CPU cases are
only listed. Llama-3-70B's 16 bits do not fit one GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from halfbyte.cli import run_app
from halfbyte.cli.bench_model import show
from halfbyte.device import describe
from halfbyte.errors import InvalidArgument
from halfbyte.hf.model_step import SIZES, WAYS, Formats, Steps, measure, of_sizes
from halfbyte.measure import records

#: The same in every case.
FORMATS = Formats("int4_g128", "int8", "int4_g32", "int8_col")
NEW = 129


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
    way: Annotated[
        list[str] | None, typer.Option("--way", help=f"Repeatable; default: {', '.join(w.short for w in WAYS)}.")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="cuda or cuda:N; on a CPU cases are listed only.")] = None,
) -> None:
    """Decode steps of whole models in known sizes."""
    machine = describe(device)
    if unknown := sorted({*(names or ())} - {*CASES}):
        raise InvalidArgument(f"there is no case {', '.join(unknown)}; choose from: {', '.join(CASES)}")
    if unknown := sorted({*(way or ())} - {w.short for w in WAYS}):
        raise InvalidArgument(f"--way {', '.join(unknown)} is not known; choose from: {', '.join(w.short for w in WAYS)}")
    chosen, ways = names or list(CASES), [w for w in WAYS if w.short in (way or [w.short])]
    for name in chosen:
        case = CASES[name]
        print(f"{name}: {case.model}, batch {case.batch}, {case.context:,} tokens; target on an H200: {case.target}")
        if machine.kind != "cuda":
            continue
        model, steps = of_sizes(SIZES[case.model], machine, FORMATS), Steps(case.batch, case.context, NEW)
        found = []
        for record in measure(model, FORMATS, steps, machine, traced=name == chosen[-1], ways=ways):
            found.append(record)
            if output is not None:
                records.append(output, [record])
        show(found, name)
        del model


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    run_app(app)
