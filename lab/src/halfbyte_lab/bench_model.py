"""`halfbyte bench model`: tokens a second of a model before and after, and where the time of a step goes."""

from __future__ import annotations

import json
import os
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte import settings
from halfbyte.cli.options import Dtype, Keys, Output, Values
from halfbyte.cli.shared import Json, LmHead, Model, Where, Wide, console, print_table, token_count
from halfbyte_lab.options import check_appendable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halfbyte_lab.measure.records import Record

#: Parts of a step that are listed.
_LISTED = 12
HEADERS = ("", "formats", "ms a step", "tokens/s", "faster", "GB", "of roofline")
PARTS = ("", "us", "of the step")


def bench_model(
    model: Model = "demo",
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    context: Annotated[
        int, typer.Option(parser=token_count, metavar="TOKENS", help="Tokens of each prompt, which are random.")
    ] = 256,
    new: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 32,
    weights: Annotated[str, typer.Option(help="Format of the linear layers' weights.")] = settings.WEIGHTS,
    lm_head: LmHead = "bf16",
    keys: Keys = settings.KEYS,
    values: Values = settings.VALUES,
    random: Annotated[bool, typer.Option("--random", help="Random weights; the model's config.json is enough.")] = False,
    dtype: Dtype = settings.HALVES[0],
    gguf: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model as a GGUF file, for llama.cpp on a CPU (needs xllamacpp).")
    ] = None,
    device: Where = None,
    output: Output = None,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """Tokens a second of a whole model: transformers in 16 bits, halfbyte in several ways, and where a step's time goes."""
    check_appendable(output, "output")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler prints lines of its own to stderr
    from halfbyte.device import describe
    from halfbyte.hf.model_support import read_config
    from halfbyte.paths import resolve_model
    from halfbyte_lab.baselines import llama_cpp
    from halfbyte_lab.measure import records
    from halfbyte_lab.model_sizes import of_sizes
    from halfbyte_lab.model_step import Formats, Steps, load, measure

    steps, machine = Steps(batch, context, new), describe(device)
    if gguf is not None:
        llama_cpp.check_can_run(gguf, batch, machine)
    formats = Formats(weights, keys, values, None if lm_head == "bf16" else lm_head, dtype)
    lm = of_sizes(read_config(resolve_model(model)), machine, formats) if random else load(model, machine, formats)
    results: list[Record] = []
    with console(stderr=True).status("") as status:
        every = measure(lm, formats, steps, machine, said=status.update)
        for record in every if gguf is None else chain(every, llama_cpp.records(gguf, lm, steps, machine)):
            results.append(record)
            if output is not None:
                records.append(output, [record])
    if as_json:
        print(json.dumps([json.loads(record.to_json()) for record in last_of_each(results)]))
        return
    show(results, f"{model}: batch {batch}, prompts of {context:,} tokens, on {machine.name}", wide)


def show(records: Sequence[Record], title: str, wide: bool = False) -> None:
    """A table of every way against the first, and the parts of a step of the first and the last that were traced."""
    records = last_of_each(records)
    print_table(title, HEADERS, [_row(record, records[0]) for record in records], text_columns=2, wide=wide)
    with_kernels = [record for record in records if record.kernels]
    for record in with_kernels[:1] + with_kernels[1:][-1:]:
        print_table(f"A step of {record.implementation}", PARTS, _parts(record), text_columns=1, wide=wide)


def last_of_each(found: Sequence[Record]) -> list[Record]:
    """The last record of each way, which holds the parts of a step where it was traced."""
    return list({record.implementation: record for record in found}.values())


def _row(record: Record, plain: Record) -> list[str]:
    """A way to generate. Its share of the roofline: the time of only reading its bytes over that of a step."""
    step, before, share = record.seconds or 0.0, plain.seconds or 0.0, record.roof_share or 0.0
    figures = [f"{1e3 * step:.2f}", f"{record.shape['B'] / step:,.1f}", f"{before / step:.2f}x"]
    return [record.implementation, record.formats, *figures, f"{record.nbytes / 1e9:.3g}", f"{share:.0%}"]


def _parts(record: Record) -> list[list[str]]:
    """What a step runs, the longest first, and what is left of it."""
    step, parts = record.seconds or 0.0, list(record.kernels.items())[:_LISTED]
    parts.append(("others, and waiting", max(0.0, step - sum(seconds for _, seconds in parts))))
    return [[name, f"{1e6 * seconds:,.0f}", f"{seconds / step:.0%}"] for name, seconds in parts]
