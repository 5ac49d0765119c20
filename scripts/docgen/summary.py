"""Short tables for the README, the home page and the guides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from docgen.sources import Record, attention, demo, linear, tables

markdown = tables.markdown

#: Attention cases of the short table: record, formats, and how the README calls the case. Losses stay in.
ATTENTION = (
    ("batch 128 x 8,192", "int8", "128 x 8K, GQA 8:1"),
    ("batch 128 x 8,192", "int8+int4_g32", "128 x 8K, GQA 8:1"),
    ("batch 128 x 8,192", "int4", "128 x 8K, GQA 8:1"),
    ("batch 32 x 8,192", "int4", "32 x 8K, GQA 8:1"),
    ("layer 8 x 16,384", "int8", "8 x 16K, Llama-3-8B layer"),
    ("layer 8 x 16,384", "int4", "8 x 16K, Llama-3-8B layer"),
    ("batch 1 x 1,048,576", "int4", "1 x 1M, GQA 8:1"),
    ("128 rows, 128/1", "int4", "128 x 8K, MQA 128:1"),
)
LINEAR = (
    ("8192 x 8192, 1 row", "int4_sym_g128"),
    ("8192 x 8192, 16 rows", "int4_sym_g128"),
    ("8192 x 8192, 64 rows", "int4_sym_g128"),
    ("4096 x 4096, 64 rows", "int4_sym_g128"),
)


def find(measured: Sequence[Record], case: str, formats: str) -> Record:
    """The one record of a case and format."""
    (found,) = [r for r in measured if r.case == case and r.formats == formats]
    return found


def speedup(r: Record) -> float:
    """Time of the fastest 16-bit kernel of the same run over ours."""
    return float((r.peer_seconds or 0.0) / (r.seconds or 1.0))


def _cells(r: Record) -> tuple[str, ...]:
    bf16 = f"{1e6 * (r.peer_seconds or 0.0):.1f} us"
    return f"{1e6 * (r.seconds or 0.0):.1f} us", bf16, f"**{speedup(r):.2f}x**", f"{100 * (r.roof_share or 0.0):.0f} %"


def results() -> str:
    """Eight rows of attention and four of linear layers."""
    heads = ("time", "fastest 16-bit", "speed-up", "of roofline")
    cached = [
        (name, f"`{formats.replace('+', '` / `')}`", *_cells(find(attention(), case, formats))) for case, formats, name in ATTENTION
    ]
    layers = [(tables.case_name(case), f"`{formats}`", *_cells(find(linear(), case, formats))) for case, formats in LINEAR]
    return "\n\n".join(
        (
            markdown(("decode attention", "KV cache", *heads), cached),
            markdown(("linear layer", "weights", *heads), layers),
            f"{tables.where_text([*attention(), *linear()])}",
        )
    )


def choice() -> str:
    """Four answers to 'which format': size and quality of the shipped model, speed of the kernels."""
    rows = [
        ("Safe", "`int8` keys, `int8` values", *_quality("int8"), _cached("int8")),
        ("Default", "`int8` keys, `int4_g32` values", *_quality("int8 / int4_g32"), _cached("int8+int4_g32")),
        ("Smallest", "`int4` keys, `int4` values", *_quality("int4"), _cached("int4")),
        ("Weights", "`int4_g128`", *_quality("bf16", "int4_g128"), _layer("int4_g128")),
    ]
    return markdown(("", "format", "smaller", "perplexity", "faster"), rows)


def _quality(kv: str, weights: str | None = None) -> tuple[str, str]:
    measured: list[dict[str, Any]] = demo()
    (found,) = [r for r in measured if r["kv"] == kv and r["weights"] == weights]
    return tables.size_ratio(found, measured[0]), f"{found['change']:+.2f} %"


def _cached(formats: str) -> str:
    return f"{speedup(find(attention(), 'batch 128 x 8,192', formats)):.2f}x"


def _layer(formats: str) -> str:
    return f"{speedup(find(linear(), '8192 x 8192, 1 row', formats)):.2f}x"
