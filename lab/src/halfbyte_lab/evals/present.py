"""Results of an evaluation in words, as a terminal's table and as lines of JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from halfbyte.settings import KEYS, VALUES
from halfbyte_lab.evals.choices import caches, is_safe
from halfbyte_lab.evals.quality import Quality

if TYPE_CHECKING:
    pass


HEADERS = (
    *("KV cache", "weights", "perplexity", "change %", "KL mean", "KV B/token", "weights MB"),
    *("top-1 %", "KL p99", "KL by quarter", "seconds"),
)


def row(result: Quality) -> tuple[str, ...]:
    """One result in the order of `HEADERS`."""
    return (
        result.setting.kv,
        _weights(result),
        f"{result.perplexity:.4f}",
        f"{result.change:+.3f}",
        f"{result.kl_mean:.2e}",
        f"{result.kv_bytes_per_token:,.0f}",
        f"{result.weight_bytes / 1e6:.2f}",
        f"{100 * result.top1:.2f}",
        f"{result.kl_p99:.2e}",
        " ".join(f"{kl:.0e}" for kl in result.kl_by_quarter),
        f"{result.seconds:.1f}",
    )


def _weights(result: Quality) -> str:
    setting = result.setting
    head = f", lm_head {setting.lm_head}" if setting.lm_head else ""
    return (setting.weights or result.plain_weights) + head + (", clip searched" if setting.clip else "")


def rows(results: Sequence[Quality]) -> list[tuple[str, ...]]:
    """The rows of a terminal's table; an empty one, which draws a line, between the 16-bit run, the caches and the weights."""
    lines: list[tuple[str, ...]] = []
    for before, result in zip([None, *results], results, strict=False):
        lines += [()] * (before is not None and kind(before) != kind(result)) + [row(result)]
    return lines


def kind(result: Quality) -> str:
    """Which part of the table a result belongs to."""
    setting = result.setting
    if setting.weights is setting.lm_head is None:
        return "16-bit" if setting.is_plain or setting.own else "KV cache"
    return "weights" if setting.is_plain else "both"


def record(result: Quality) -> dict[str, Any]:
    """One result as plain data."""
    return {"kv": result.setting.kv} | dataclasses.asdict(result.setting) | dataclasses.asdict(result)


def records(results: Sequence[Quality], longer: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """`record` of each result, with its long context (`halfbyte_lab.evals.long_context`) if there is one."""
    extras = {one.formats: {"long_context": dataclasses.asdict(one)} for one in longer}
    return [record(result) | extras.get(result.setting.name, {}) for result in results]


# ----------------------------------------------------------------------------------------------------------------- verdict

#: The cards: a cache's keys and values. Of several such settings, rotated or not, the one with the least divergence is shown.
CARDS = {"Default cache": (KEYS, VALUES), "INT8 cache": ("int8", "int8"), "Smallest cache": caches()["Smallest"]}


def chosen(results: Sequence[Quality]) -> dict[str, Quality]:
    """The results that get a card, by its title: those of `CARDS`; without any, the first three."""
    others = [r for r in results[1:] if not r.setting.own]
    caches = [r for r in others if not any(r.setting.in_weights)]
    by_title = {
        title: min(alike, key=lambda r: r.kl_mean)
        for title, formats in CARDS.items()
        if (alike := [r for r in caches if (r.setting.keys, r.setting.values) == formats])
    }
    return by_title or {r.setting.name: r for r in others[:3]}


def verdict(results: Sequence[Quality]) -> str:
    """One sentence for each card: size, perplexity, and whether that is safe, which few tokens may leave open."""
    return " ".join(
        f"{name}: {ratio(r, results[0]):.2f}x smaller, perplexity {_change(r)}, {safety(r)} "
        f"(KL {r.kl_mean:.1e} \u00b1 {r.kl_noise:.0e} nats)."
        for name, r in chosen(results).items()
    )


def ratio(result: Quality, base: Quality) -> float:
    """How many times smaller than in 16 bits what is quantized is: the cache, or else the weights."""
    if result.setting.kv == base.setting.kv:
        return base.weight_bytes / result.weight_bytes
    return base.kv_bytes_per_token / result.kv_bytes_per_token


def _change(result: Quality) -> str:
    if abs(result.change) <= result.noise:
        return f"unchanged within the noise of {result.noise:.2f} %"
    return f"{result.change:+.2f} % (noise {result.noise:.2f} %)"


def safety(result: Quality) -> str:
    """Whether the divergence is safe, noise included, in words."""
    kl, noise, floor = result.kl_mean, result.kl_noise, result.floor
    if is_safe(kl, noise, floor):
        return "safe"
    return "undecided, evaluate more text" if is_safe(kl, -noise, floor) else "not safe"
