"""`halfbyte formats`: every format with its codes, its scales and its bits."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from halfbyte.cli.shared import Json, print_table
from halfbyte.evals.legend import HEADERS, format_rows


def formats(
    kind: Annotated[
        Literal["all", "kv", "weights"], typer.Option("--for", help="Only formats of the KV cache, or of weights.")
    ] = "all",
    as_json: Json = False,
) -> None:
    """Every format: what it is for, its codes, what shares a scale, and its bits an element, scales included."""
    rows = [row for row in format_rows() if kind == "all" or (row[1] == "weights") == (kind == "weights")]
    if as_json:
        print(json.dumps([dict(zip(HEADERS, row, strict=True)) for row in rows], indent=2))
        return
    print_table("", HEADERS, rows, text_columns=4)
    print("Scales are fp16 where nothing is said.")
    print("What they cost: halfbyte eval MODEL --every. What fits: halfbyte advise MODEL")
