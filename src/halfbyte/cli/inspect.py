"""Commands that look at this machine and at a model's configuration: doctor, memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.cli.shared import Json, human_bytes, integers, print_table

if TYPE_CHECKING:
    from halfbyte.doctor import Diagnosis
    from halfbyte.memory import Estimate


def doctor(as_json: Json = False) -> None:
    """Versions, hardware, what runs here and why. Never crashes."""
    from halfbyte.doctor import diagnose

    found = diagnose()
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        _print_diagnosis(found)


def _print_diagnosis(found: Diagnosis) -> None:
    sections = {"versions": found.versions, "machine": found.machine, "ops": found.ops, "settings": found.settings}
    for title, facts in sections.items():
        print(title)
        for name, fact in facts.items():
            print(f"  {name:<18} {fact}")
    print("problems" if found.problems else "no problems found")
    for problem in found.problems:
        print(f"  {problem}")


def memory(
    model: Annotated[str, typer.Argument(help="A model folder, a Hub id, or 'demo'.")],
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens of each sequence.")] = 8192,
    keys: Annotated[str, typer.Option(help="Format of cached keys.")] = "int8",
    values: Annotated[str, typer.Option(help="Format of cached values.")] = "int4_g32",
    weights: Annotated[str, typer.Option(help="Format of the linear layers; bf16 for none.")] = "bf16",
    skip_layers: Annotated[str, typer.Option(help="Layers that stay 16-bit, such as 0,1,31.")] = "",
    fit: Annotated[str, typer.Option("--memory", help="Also say how many tokens fit in so much, such as 24GB.")] = "",
    as_json: Json = False,
) -> None:
    """What a model takes in memory, from its configuration alone."""
    from halfbyte.memory import estimate, parse_bytes

    found = estimate(
        model,
        batch=batch,
        context=context,
        keys=keys,
        values=values,
        weights=weights,
        skip_layers=integers(skip_layers, "skip-layers"),
        memory=parse_bytes(fit) if fit else None,
    )
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        _print_estimate(found)


def _print_estimate(e: Estimate) -> None:
    from rich.table import Table

    table = Table(title=f"{e.model}: {e.batch:,} x {e.context:,} tokens", title_justify="left", header_style="bold")
    for header in ("", "16 bits", f"{e.weights} weights, {e.keys} keys, {e.values} values", "ratio"):
        table.add_column(header, justify="left" if not header else "right")
    per_token = e.plain_kv_bytes / (e.batch * e.context)
    rows: list[tuple[str, float, float]] = [
        ("weights", e.plain_weight_bytes, e.weight_bytes),
        ("KV cache per token", per_token, e.kv_bytes_per_token),
        ("KV cache", e.plain_kv_bytes, e.kv_bytes),
        ("together", e.plain_total_bytes, e.total_bytes),
    ]
    for name, plain, packed in rows:
        table.add_row(name, human_bytes(plain), human_bytes(packed), f"{plain / packed:.2f}x" if packed else "")
    if e.memory is not None and e.tokens_that_fit is not None and e.plain_tokens_that_fit is not None:
        ratio = f"{e.tokens_that_fit / e.plain_tokens_that_fit:.2f}x" if e.plain_tokens_that_fit else ""
        table.add_row(f"tokens in {human_bytes(e.memory)}", f"{e.plain_tokens_that_fit:,}", f"{e.tokens_that_fit:,}", ratio)
    print_table(table)
    print(
        f"{e.parameters:,} parameters, {e.quantized_parameters:,} of them quantised; {e.kv_layers} layers with a cache of "
        f"{e.kv_heads} heads x {e.head_dim}. Activations come on top."
    )
    for note in e.notes:
        print(f"note: {note}")
