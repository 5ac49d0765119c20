"""Tables of what the formats share scales over and what a cached token takes, from the registry."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from docgen.sources import tables
from halfbyte.formats import KV_FORMATS, WEIGHT_FORMATS, Format

#: Granularity -> what it is called, and what one scale is for.
GRANULARITIES = {
    "tensor": ("per-tensor", "everything"),
    "token": ("per-token", "a token, all heads"),
    "head": ("per-head", "a head of a token"),
    "group": ("group-wise", "consecutive elements of a head, or along K; `g32`: 32 of them"),
    "channel": ("per-channel, keys", "one dim over 32 tokens"),
    "out_channel": ("per-channel, weights", "one output channel"),
}
#: Heads, tokens and head dim of the cache whose tokens are counted.
SHAPE = (1, 8, 4096, 128)


def granularities() -> str:
    """Which formats have which granularity."""
    rows = []
    for kind, about in GRANULARITIES.items():
        weights = _named(f for f in WEIGHT_FORMATS.values() if f.granularity == kind or (f.tensor_scale and kind == "tensor"))
        rows.append((*about, _named(f for f in KV_FORMATS.values() if f.granularity == kind), weights))
    return tables.markdown(("granularity", "one scale for", "KV formats", "weights"), rows)


def _named(formats: Iterable[Format]) -> str:
    return ", ".join(f"`{f.name}`" for f in formats)


def token_bytes() -> str:
    """Bytes of a token of one KV head, keys or values; formats of the same size share a row."""
    names: dict[tuple[str, str, str], list[str]] = {}
    for f in KV_FORMATS.values():
        names.setdefault(_bytes(f), []).append(f"`{f.name}`")
    rows = [(", ".join(found), *sizes) for sizes, found in names.items()]
    return tables.markdown(("format", "codes", "scales and offsets", "together"), rows)


def _bytes(f: Format) -> tuple[str, str, str]:
    tokens = prod(SHAPE[:3])
    codes, together = prod(f.codes_shape(SHAPE)) * f.storage.itemsize / tokens, f.nbytes(SHAPE) / tokens
    return f"{codes:g}", f"{round(together - codes, 3):g}", f"{round(together, 3):g}"
