"""An evaluation in words and in three cards: perplexity, size, and the number of tokens that fit."""

from __future__ import annotations

from collections.abc import Sequence

from halfbyte.evals.choices import SAFE, is_safe
from halfbyte.evals.quality import Quality
from halfbyte.report import Cell

#: The cards: a cache's keys and values. Of several such settings, rotated or not, the one with the least divergence is shown.
CARDS = {
    "INT8 cache": ("int8", "int8"),
    "INT8 keys, INT4 values": ("int8", "int4_g32"),
    "INT4 cache": ("int4_g32", "int4_g32"),
}
#: How to read KL divergence.
KL_WORDS = (
    "KL divergence measures how far the probabilities of the next token are from those of the 16-bit run; 0: equal. Up to "
    f"{SAFE:g} nats, noise included, formats are called safe. From about 0.1 nats on, generated texts differ."
)


def chosen(results: Sequence[Quality]) -> dict[str, Quality]:
    """The results that get a card, by its title: those of `CARDS`; without any, the first three."""
    others = results[1:]
    caches = [r for r in others if not any(r.setting.in_weights)]
    found = {
        title: min(alike, key=lambda r: r.kl_mean)
        for title, formats in CARDS.items()
        if (alike := [r for r in caches if (r.setting.keys, r.setting.values) == formats])
    }
    return found or {r.setting.name: r for r in others[:3]}


def verdict(results: Sequence[Quality]) -> str:
    """One sentence for each card: size, perplexity, and whether that is safe, which few tokens may leave open."""
    found = chosen(results).items()
    return " ".join(f"{name}: {ratio(r, results[0]):.2f}x smaller, perplexity {_change(r)}, {_safety(r)}." for name, r in found)


def cards(results: Sequence[Quality]) -> dict[str, dict[str, Cell]]:
    """The facts of each card."""
    base = results[0]
    return {title: _facts(title, r, base) for title, r in chosen(results).items()}


def ratio(result: Quality, base: Quality) -> float:
    """How many times smaller than in 16 bits what is quantized is: the cache, or else the weights."""
    if result.setting.kv == base.setting.kv:
        return base.weight_bytes / result.weight_bytes
    return base.kv_bytes_per_token / result.kv_bytes_per_token


def _facts(title: str, result: Quality, base: Quality) -> dict[str, Cell]:
    named: dict[str, Cell] = {} if title == result.setting.name else {"formats": result.setting.name}
    facts = named | {
        "perplexity": f"{result.change:+.2f} % \u00b1 {result.noise:.2f} %",
        "size": f"{ratio(result, base):.2f}x smaller",
        "KL divergence": f"{result.kl_mean:.1e} nats, {_safe(result)}",
    }
    if result.setting.kv != base.setting.kv:
        tokens, plain = (int(10**9 / r.kv_bytes_per_token) for r in (result, base))
        facts["tokens in 1 GB"] = f"{tokens:,} instead of {plain:,}"
    return facts


def _change(result: Quality) -> str:
    if abs(result.change) <= result.noise:
        return f"unchanged within the noise of {result.noise:.2f} %"
    return f"{result.change:+.2f} % (noise {result.noise:.2f} %)"


def _safety(result: Quality) -> str:
    return f"{_safe(result)} (KL {result.kl_mean:.1e} \u00b1 {result.kl_noise:.0e} nats)"


def _safe(result: Quality) -> str:
    kl, noise = result.kl_mean, result.kl_noise
    return "safe" if is_safe(kl, noise) else "undecided, evaluate more text" if is_safe(kl, -noise) else "not safe"
