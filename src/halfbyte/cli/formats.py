"""`halfbyte formats`: every format with its codes, its scales (fp16 unless said) and its bits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from halfbyte.cli.shared import Json, print_table

if TYPE_CHECKING:
    from halfbyte.formats import Format

HEADERS = ("format", "for", "codes", "one scale for each", "bits an element")
#: What bits are counted for: a cache [B, H, T, D], a weight [N, K].
_KV_SHAPE, _WEIGHT_SHAPE = (1, 8, 4096, 128), (4096, 4096)
_SHARED = {"tensor": "tensor", "token": "token, all heads", "head": "head of a token", "out_channel": "output channel"}


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


def format_rows() -> list[tuple[str, ...]]:
    """One row for each format, under `HEADERS`."""
    from halfbyte.formats import EVERY_WEIGHT_FORMAT, KV_FORMATS

    caches = [_row(f, "keys" if f.token_block else "keys, values", _KV_SHAPE) for f in KV_FORMATS.values()]
    return caches + [_row(f, "weights", _WEIGHT_SHAPE) for f in EVERY_WEIGHT_FORMAT.values()]


def _row(f: Format, use: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    from halfbyte.formats import ROUNDED_ROWS

    offset = {"none": "", "int": ", zero point", "float": ", offset"}[f.offset]
    offset += f", {f.clip:.1%} of the span" if f.clip < 1 else ""
    offset += f", x in INT8 from M = {ROUNDED_ROWS}" if f.rounds_x else ""
    return f.name, use, f.code.name + offset, _scale_text(f), f"{f.bits_per_element(shape):.4g}"


def _scale_text(f: Format) -> str:
    if f.scale is None:
        return "-"
    group, kind = f.scale.group, f.scale.granularity
    where = {"group": f"group of {group}", "channel": f"dim over {group} tokens"}.get(kind) or _SHARED[kind]
    extras = [f"in 8 bits, blocks of {f.scale.nested}"] * bool(f.scale.nested) + ["and one for the tensor"] * f.tensor_scale
    dtype = {"f16": [], "f32": ["fp32"]}.get(f.scale.dtype, [f.scale.dtype.upper()])
    return ", ".join([where, *dtype, *extras])
