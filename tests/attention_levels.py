"""Calls of decode attention that every level is held to that runs without a GPU: what is compared, and with what."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from accuracy import attention_errors
from gpu.gpu_cases import KEYS, VALUES, Call, Case, Variant, build, draw, exact_variants, latent_variants, paged, variants
from halfbyte.formats import KV_FORMATS
from halfbyte.kv_buffer import AttentionOptions, DecodeCall, KVBuffer
from sizes import head_dim

QUANTIZED = [name for name in VALUES if KV_FORMATS[name].is_quantized]
#: (sink tokens, recent tokens) in 16 bits.
WINDOWS = ((0, 20), (3, 0), (5, 7), (40, 9))

_SLOPES, _STARTS = torch.tensor([0.5, 0.25, 0.125, 0.0]), torch.tensor([30, 50], dtype=torch.int32)
#: Of four query heads and two sequences.
OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 5.0},
    "softcap, small": {"softcap": 1e-30},
    "softcap, large": {"softcap": 1e30},
    "alibi": {"alibi_slopes": _SLOPES},
    "window": {"window": 9},
    "window 1": {"window": 1},
    "window, largest": {"window": 2**31 - 1},
    "starts": {"starts": torch.tensor([5, 40], dtype=torch.int32)},
    "starts beyond the length": {"starts": torch.tensor([5, 2**31 - 1], dtype=torch.int32)},
    "ends": {"ends": torch.tensor([-3, 33], dtype=torch.int32)},
    "sinks": {"sinks": torch.tensor([0.0, 3.0, -torch.inf, 200.0])},
    "all": {
        "softcap": 3.0,
        "alibi_slopes": _SLOPES,
        "window": 20,
        "starts": _STARTS,
        "sinks": torch.tensor([0.3, -0.7, 1.0, -2.0]),
    },
}
#: Numbers at which errors show: scores far apart, a large common part of keys, small and large values.
HARD = ({"q_scale": 40.0}, {"key_bias": 300.0}, {"v_scale": 1e-5}, {"v_scale": 1e3}, {"q_scale": 1e-3, "key_bias": -200.0})


def small(also: dict[str, Any] | None = None, **sizes: Any) -> Call:
    """A call of two sequences and 2 x 2 heads of 64, or of other `sizes`: fields of a `Case` and of its `Variant`.

    also: more options of the call.
    """
    of_case = {"heads": 2, "lengths": (37, 64)} | {f.name: sizes.pop(f.name) for f in fields(Case) if f.name in sizes}
    variant = Variant(**{"keys": "int8", "values": "int4_g32", "dim": 64, "group": 2, "dtype": "float16", **sizes})
    call = build(Case(variant, **of_case), "cpu")
    call.options |= also or {}
    return call


def _calls() -> dict[str, dict[str, Any]]:
    """Arguments of `small` by a name: every format, option and layout, and the edges of lengths, sizes and numbers."""
    calls: dict[str, dict[str, Any]] = {}
    for i, keys in enumerate(KEYS):
        both = {"keys": keys, "values": VALUES[i % len(VALUES)], "dtype": ("float16", "bfloat16")[i % 2], "queries": 1 + i % 3}
        calls[f"{keys}, {both['values']}"] = both | {"dim": head_dim(keys, both["values"]), "lengths": (37, 64, 31, 0)}
        calls[f"{keys}, {both['values']}, latents"] = both | {"dim": 128, "value_dim": 256, "group": 4, "heads": 1, "latent": True}
    for i, keys in enumerate(QUANTIZED):
        both = {"keys": keys, "values": QUANTIZED[i - 3], "dim": head_dim(keys, QUANTIZED[i - 3])}
        for queries, exact in enumerate((WINDOWS[i % 4], WINDOWS[(i + 1) % 4]), 1):
            calls[f"{keys}, {exact} exact"] = both | {"exact": exact, "queries": queries, "lengths": (37, 64, 31, 0, 12)}
    for name, options in OPTIONS.items():
        for queries, keys, exact in ((1, "int8", (6, 11)), (5, "int4_channel", (0, 0)), (33, "int8", (0, 0))):
            calls[f"{name}, {queries} queries"] = {"also": options, "queries": queries, "keys": keys, "exact": exact}
    for i, hard in enumerate(HARD):
        for keys in ("int8", "int4", "int4_g32", "int4_channel", "fp8"):
            calls[f"{keys}, {hard}"] = {"keys": keys, "queries": 2, "lengths": (257 - 160 * (i % 2),), **hard}
    for dim, value_dim, keys, values in (
        *((40, 96, "int8", "int4_g32"), (59, 40, "fp16", "int4"), (59, 59, "int8", "fp8"), (80, 64, "int4", "int8_tensor")),
        *((20, 12, "int4", "int8"), (96, 80, "int4_g32", "int8"), (192, 128, "int8_g64", "int8_token"), (256, 256, "int4", "int4")),
    ):
        rotated = frozenset({"rotate"} if dim % 16 == 0 else ())
        sizes = {"keys": keys, "values": values, "dim": dim, "value_dim": value_dim, "options": rotated}
        calls[f"heads of {dim} and {value_dim}"] = sizes | {"lengths": (33, 5)}
    for heads, group in ((1, 1), (1, 8), (2, 3), (1, 7), (3, 1), (1, 20)):
        calls[f"{heads} x {group} heads"] = {"heads": heads, "group": group, "keys": "int4", "values": "int8", "queries": 3}
    for keys in ("int8", "int8_channel"):
        lengths = (0, 1, 31, 32, 33, 63, 64, 65, 101, 127)
        calls[f"{keys}, lengths around blocks"] = {"keys": keys, "lengths": lengths, "heads": 1, "group": 1, "queries": 3}
        calls[f"{keys}, nothing"] = {"keys": keys, "lengths": (0, 0), "also": OPTIONS["sinks"]}
    calls["no sequences"] = {"lengths": ()}
    for layout in ("BTHD", "slice"):
        for keys in ("bf16", "int8_token", "int4", "int4_channel"):
            calls[f"{keys}, {layout}"] = {"keys": keys, "layout": layout, "queries": 2, "page": 32 if layout == "slice" else None}
    calls["queries before the end"] = {"keys": "int4_channel", "queries": 5, "early": True, "lengths": (90, 90, 9)}
    return calls


CALLS = _calls()
#: More, drawn from everything that kernels are compiled for.
DRAWN = draw(60, [*variants(40), *exact_variants(12), *latent_variants(8)], longest=128, elements=200_000)


def decode_call(call: Call) -> DecodeCall:
    """What a level is given."""
    cache, options = call.cache, {"sm_scale": call.cache.head_dim**-0.5, "rotate_keys": call.cache.rotate_keys} | call.options
    start, latent = options.pop("query_start", cache.lengths - call.q.shape[2]), options.pop("latent", False)
    memory = cache.keys, cache.values, cache.lengths, start, cache.page_table
    return DecodeCall(call.q, *memory, AttentionOptions(**options), latent=latent)


def errors(call: Call, result: tuple[torch.Tensor, torch.Tensor]) -> str:
    """What of (out, lse) breaks the promise, in words."""
    assert result[0].dtype is call.q.dtype
    return attention_errors(*result, *call.expected)


def in_pages(call: DecodeCall, page: int) -> DecodeCall:
    """The same numbers in pages, which no order has; the table names pages that do not exist wherever no code is."""
    keys, values, table = paged(call.keys, call.values, call.lengths, page, seed=1)
    return call._replace(keys=keys, values=values, page_table=table)


def strided(call: DecodeCall, shift: int, step: int) -> DecodeCall:
    """The same numbers `step` elements apart, from element `shift` of their memory on."""

    def moved(t: torch.Tensor | None) -> torch.Tensor | None:
        return (
            None if t is None else torch.zeros(*t.shape[:-1], step * t.shape[-1] + shift, dtype=t.dtype)[..., shift::step].copy_(t)
        )

    def side(buffer: KVBuffer) -> KVBuffer:
        return replace(buffer, **{n: moved(getattr(buffer, n)) for n in ("codes", "scales", "offsets", "tail")})

    return call._replace(q=moved(call.q), keys=side(call.keys), values=side(call.values))


def same(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
