"""The pictures of the first page: how a packed row is read, what a step takes, what fits. Each suits light pages and dark ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from html import escape

from docgen import users
from docgen.sources import DARK, KEYS, LIGHT, VALUES, WEIGHTS, Record, by_machine, css, memory, step, tables

#: Pixels: the width of a picture, the first of a bar, and a row.
WIDTH, LEFT, ROW = 740, 236, 24
TITLES = {"row": "How a packed row is read", "step": "A decode step of whole models", "fits": "Sequences of 32K tokens that fit"}
TITLES["served"] = "A step in vLLM's engine, and the tokens that fit"
#: Cards in GB, tokens of a sequence, and what is kept of the model and its cache, from 16 bits to 4.
CARDS, CONTEXT, MODEL = (24, 48, 80), 32_768, "Llama 3 8B"
KEPT = (
    ("16 bits", None, "bf16", "bf16"),
    ("4-bit weights", WEIGHTS, "bf16", "bf16"),
    ("... and the default cache", WEIGHTS, KEYS, VALUES),
    ("... and a 4-bit cache", WEIGHTS, "int4_channel", "int4"),
)


def text(x: float, y: float, words: str, color: str = "ink", size: int = 13, weight: str = "normal") -> str:
    """A line of text."""
    look = f'fill="var(--{color})" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:g}" y="{y:g}" {look}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, color: str, opacity: float = 1.0) -> str:
    """A rectangle."""
    faint = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{max(width, 0):.1f}" height="{height:g}" rx="3" fill="var(--{color})"{faint}/>'


def picture(title: str, subtitle: str, height: float, parts: Sequence[str]) -> str:
    """An SVG with a title, on paper of its own, in the colors of the page's charts."""
    light, dark = f"--paper: #ffffff; {css(LIGHT)}", f"--paper: #16181c; {css(DARK)}"
    style = f"<style>svg {{ {light} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
    font = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
    size = f'width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}"'
    head = [text(16, 30, title, size=16, weight="600"), text(16, 49, subtitle, "quiet", 12)]
    body = "\n".join([style, box(0, 0, WIDTH, height, "paper"), *head, *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img">\n{body}\n</svg>\n'


# ------------------------------------------------------------------------------------------------------------- a packed row


def row() -> str:
    """128 values of a key in 16 bits and in INT4, and the way of a code from memory to the sum."""
    full, codes = 512.0, 128.0
    parts = [
        text(16, 84, "one key of a head, 128 values"),
        text(16, 108, "16 bits", "quiet"),
        box(110, 94, full, 20, "s6"),
        text(110 + full + 10, 108, "256 bytes", "quiet"),
        text(16, 138, "INT4", "quiet"),
        box(110, 124, codes, 20, "s1"),
        box(110 + codes + 3, 124, 8, 20, "s5"),
        text(110 + codes + 20, 138, "64 bytes of codes + 4 of a scale and an offset", "quiet"),
    ]
    stages = (
        ("GPU memory", "codes and scales,", "read once"),
        ("shared memory", "copied ahead,", "tile by tile"),
        ("registers", "two codes a byte,", "by shift and mask"),
        ("tensor cores", "multiply the codes", "as 16-bit numbers"),
        ("fp32 sum", "scaled and shifted:", "no 16-bit copy"),
    )
    for i, (where, *what) in enumerate(stages):
        x = 16 + 143 * i
        parts += [box(x, 168, 128, 74, "s1", 0.14), text(x + 10, 189, where, weight="600")]
        parts += [text(x + 10, 209 + 17 * line, words, "quiet", 12) for line, words in enumerate(what)]
        parts += [text(x + 131, 211, "\u2192", "s1", 14)] * (i < len(stages) - 1)
    return picture(
        TITLES["row"], "Decoding reads every weight and the whole KV cache for each token: fewer bytes, less time.", 260, parts
    )


# ------------------------------------------------------------------------------------------------------------ whole models

#: The case that vLLM ran in 16 bits too, and what its records call the batch and context.
IN_16_BITS, STOCK = "vLLM 0.33, 16 bits", ("8b-8", "8x8192")
#: Ways, what they are called, color and its strength.
SIDES = (
    (step.TRANSFORMERS, "16 bits, transformers", "s6", 1.0),
    (IN_16_BITS, "16 bits, vLLM 0.33", "s2", 0.45),
    (step.ENGINE, "INT4, fp8 cache, vLLM 0.33", "s2", 1.0),
    (step.FASTEST, "halfbyte", "s1", 1.0),
)


@cache
def compared() -> list[tuple[str, str, dict[str, float]]]:
    """(model, batch and context, GPU), milliseconds by side: each case in which something stands beside halfbyte."""
    cases = []
    for measured in by_machine(tables.study_records("step")).values():
        for case in dict.fromkeys(r.case for r in measured):
            times = {r.implementation: 1e3 * r.seconds for r in measured if r.case == case and r.seconds}
            if case == STOCK[0] and users.stock_step(STOCK[1])[0] == measured[0].environment.device:
                times[IN_16_BITS] = users.stock_step(STOCK[1])[1]
            sides = {name: times[name] for name, *_ in SIDES if name in times}
            if len(sides) > 1 and step.FASTEST in sides:
                first: Record = next(r for r in measured if r.case == case)
                cells = step.summary([r for r in measured if r.case == case])[1][0]
                cases.append((f"{cells[0]}, {cells[1]}", tables.short_name(first.environment.device), sides))
    return cases


def steps() -> str:
    """Bars of milliseconds for each case, 16 bits and vLLM first."""
    cases, y, parts = compared(), 70.0, []
    longest = max(max(sides.values()) for *_, sides in cases)
    for name, gpu, sides in cases:
        parts += [text(16, y + 15, name), text(16, y + 31, gpu, "quiet", 12)]
        for side, _, color, strength in (side for side in SIDES if side[0] in sides):
            long = 430 * sides[side] / longest
            faster = (
                f", {sides[step.TRANSFORMERS] / sides[side]:.1f}x" if side == step.FASTEST and step.TRANSFORMERS in sides else ""
            )
            parts += [
                box(LEFT, y + 3, long, 13, color, strength),
                text(LEFT + long + 7, y + 14, f"{sides[side]:.2f} ms{faster}", size=12),
            ]
            y += 18
        y += 16
    x = 16.0
    for _, label, color, strength in SIDES:
        parts += [box(x, y, 12, 12, color, strength), text(x + 18, y + 11, label, "quiet", 12)]
        x += 48 + 6.4 * len(label)
    return picture(
        TITLES["step"],
        "Milliseconds a step, batch x context; halfbyte: 4-bit weights, INT8/INT4 cache. Shorter is better.",
        y + 30,
        parts,
    )


# -------------------------------------------------------------------------------------------------------------- what fits


@cache
def fitting() -> dict[int, list[tuple[str, float, float, int]]]:
    """By card: what is kept, GB of weights, GB of a sequence's cache, and how many fit in the memory less a tenth."""
    rows: dict[int, list[tuple[str, float, float, int]]] = {card: [] for card in CARDS}
    for name, weights, keys, values in KEPT:
        model, one = memory.sizes_of(MODEL, weights, keys, values, CONTEXT)
        for card in CARDS:
            rows[card].append((name, model / 1e9, one / 1e9, max(0, int((0.9 * card * 10**9 - model) // one))))
    return rows


def fits() -> str:
    """For each card the weights, and the caches of as many sequences as fit beside them."""
    y, parts = 66.0, []
    scale = (WIDTH - LEFT - 130) / max(CARDS)
    for card, rows in fitting().items():
        y += 16
        parts += [text(16, y, f"{card} GB", weight="600"), box(LEFT + scale * card, y + 2, 2, ROW * len(rows), "quiet")]
        for name, weights, one, count in rows:
            y += ROW
            parts += [text(30, y - 6, name, size=12), box(LEFT, y - 17, scale * weights, 14, "s5")]
            parts += [box(LEFT + scale * (weights + one * i), y - 17, scale * one - 1, 14, "s1") for i in range(count)]
            told = f"{count}" if weights < card else "weights do not fit"
            parts.append(text(LEFT + scale * card + 9, y - 6, told, size=12, weight="600"))
        y += 6
    y += 10
    for x, label, color in ((16, "weights", "s5"), (106, f"the cache of a sequence of {CONTEXT:,} tokens", "s1")):
        parts += [box(x, y, 12, 12, color), text(x + 18, y + 11, label, "quiet", 12)]
    return picture(
        TITLES["fits"], f"{MODEL}'s sizes; GB, of which a tenth is left to activations. Computed, not measured.", y + 28, parts
    )


# ---------------------------------------------------------------------------------------------------------------- in vLLM

#: Modes of vLLM's engine in the order of `users.served`: what they are called, color and its strength.
ENGINES = (
    ("vLLM, 16 bits", "s6", 1.0),
    ("INT8/INT4 cache", "s1", 0.45),
    ("... and INT4 weights", "s1", 1.0),
    ("... and prompts' x in INT8", "s3", 1.0),
)
#: vLLM's own cache of one byte an element, beside the first mode.
FP8 = ("vLLM, fp8 cache (computed)", "s6", 0.45)


def _room() -> list[tuple[tuple[str, str, float], int]]:
    """Looks and tokens that fit: vLLM's in 16 bits and in fp8, then ours."""
    (first, plain), *ours = users.served()[1]
    return [(ENGINES[first], plain), (FP8, 2 * plain), *((ENGINES[i], tokens) for i, tokens in ours)]


def served() -> str:
    """Bars of milliseconds for each batch, then of the tokens that fit."""
    (by_batch, _, gpu), room, y, parts = users.served(), _room(), 70.0, []
    longest, most = max(ms for sides in by_batch.values() for _, ms in sides), max(tokens for _, tokens in room)
    rows = [(f"{batch}", [(ENGINES[i], ms / longest, f"{ms:.2f} ms") for i, ms in sides]) for batch, sides in by_batch.items()]
    rows.append(("tokens that fit", [(look, tokens / most, f"{tokens:,}") for look, tokens in room]))
    for name, bars in rows:
        parts.append(text(16, y + 15, name, weight="600" if name == rows[-1][0] else "normal"))
        for (_, color, strength), share, told in bars:
            parts += [box(LEFT, y + 3, 400 * share, 13, color, strength), text(LEFT + 400 * share + 7, y + 14, told, size=12)]
            y += 18
        y += 16
    x = 16.0
    for label, color, strength in (ENGINES[0], FP8, *ENGINES[1:]):
        parts += [box(x, y, 12, 12, color, strength), text(x + 17, y + 11, label, "quiet", 11)]
        x += 34 + 5.6 * len(label)
    return picture(
        TITLES["served"],
        f"Llama 3 8B's sizes on an {gpu}, requests x context. Steps: shorter is better; tokens: longer is.",
        y + 30,
        parts,
    )


def pictures() -> dict[str, str]:
    """The SVGs by path."""
    return {f"docs/assets/{name}.svg": draw() for name, draw in (("row", row), ("step", steps), ("fits", fits), ("served", served))}


# ------------------------------------------------------------------------------------------------------------ in words


def _said(name: str) -> Iterator[str]:
    yield TITLES[name]
    if name == "step":
        for what, gpu, sides in compared():
            yield f"{what}, {gpu}: " + ", ".join(f"{label} {sides[side]:.2f} ms" for side, label, *_ in SIDES if side in sides)
    if name == "served":
        for what, times in users.served()[0].items():
            yield f"{what}: " + ", ".join(f"{ENGINES[i][0].removeprefix('... ')} {ms:.2f} ms" for i, ms in times)
        yield "Tokens that fit: " + ", ".join(f"{look[0].removeprefix('... ')} {tokens:,}" for look, tokens in _room())
    if name == "fits":
        for card, rows in fitting().items():
            yield f"{card} GB: " + ", ".join(f"{kept.removeprefix('... ')} {count}" for kept, _, _, count in rows)


def tag(name: str, folder: str) -> str:
    """Markup of a picture, with its contents in words for those who do not see it."""
    return f'<img alt="{escape(". ".join(_said(name)))}." src="{folder}/{name}.svg" width="{WIDTH}">'
