"""Diagrams of the concepts: what shares a scale, a packed byte, splits of sequences, a cache that grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from docgen.pictures import WIDTH, box, picture, text

#: A cell of a grid in pixels, and the colors that neighbors take in turn.
CELL, COLORS = 13, ("s1", "s2", "s3", "s5", "s4", "s6")

#: By name: the title, and what the diagram says in words.
WORDS = {
    "granularities": ("What shares one scale", "Two heads of four dims, six tokens; neighbors of one color share a scale."),
    "packing": ("A packed byte", "Elements from the lowest bits on: four of 2 bits, two of 4, one of 8."),
    "split-k": (
        "Equal shares of unequal sequences",
        "18 tiles of three sequences on six programs; each color is a program.",
    ),
    "append": ("An append quantizes in place", "Per-channel keys wait in a 16-bit tail until a block of 32 tokens is whole."),
    "windows": ("Tokens that stay in 16 bits", "The first and the last tokens; one that leaves the window is quantized then."),
}


def cells(x: float, y: float, colors: Sequence[str], size: float = CELL) -> list[str]:
    """A row of cells."""
    return [box(x + i * size, y, size - 1.5, size - 1.5, color, 0.8) for i, color in enumerate(colors)]


def granularities() -> list[str]:
    """A small cache five times, colored by what shares a scale."""
    shares: dict[str, Callable[[int, int], int]] = {
        "per-tensor": lambda token, dim: 0,
        "per-token": lambda token, dim: token,
        "per-head": lambda token, dim: 2 * token + dim // 4,
        "group-wise": lambda token, dim: 4 * token + dim // 2,
        "per-channel": lambda token, dim: dim + 3 * (token // 3),
    }
    parts = []
    for i, (name, share) in enumerate(shares.items()):
        x = 16 + 144 * i
        parts.append(text(x, 84, name, weight="600"))
        for token in range(6):
            row = [COLORS[share(token, dim) % len(COLORS)] for dim in range(8)]
            parts += cells(x, 94 + CELL * token, row)
    return [*parts, text(16, 194, "rows: tokens; columns: dims of head 0, then of head 1", "quiet", 12)]


def packing() -> list[str]:
    """Bits of a byte by the element that they belong to."""
    parts = []
    for row, (name, bits) in enumerate({"INT8, FP8": 8, "INT4, NF4, FP4": 4, "INT2": 2}.items()):
        y = 70 + 42 * row
        elements = [(7 - bit) // bits for bit in range(8)]
        parts += [text(16, y + 18, name), *cells(150, y, [COLORS[e] for e in elements], 26)]
        parts += [text(372, y + 18, f"{8 // bits} element{'s' * (bits < 8)} a byte, element 0 in the lowest bits", "quiet", 12)]
    return [*parts, text(150, 204, "bit 7", "quiet", 12), text(332, 204, "bit 0", "quiet", 12)]


def splits() -> list[str]:
    """Tiles of three sequences, colored by the program that reads them."""
    parts, first = [], 0
    for row, tiles in enumerate((10, 3, 5)):
        y, mine = 74 + 32 * row, [COLORS[(first + i) // 3] for i in range(tiles)]
        parts += [text(16, y + 17, f"sequence {row}"), *cells(110, y, mine, 26)]
        first += tiles
    told = ("A program writes the parts of", "sequences that it shares; the last", "to arrive adds them up in order.")
    return [*parts, *(text(420, 92 + 20 * i, words, "quiet", 12) for i, words in enumerate(told))]


def append() -> list[str]:
    """Tokens of a cache when one is appended, per head and per channel."""
    parts = []
    rows = {
        "per head": ["s1"] * 19 + ["s5"],
        "per-channel keys, before": ["s1"] * 16 + ["s6"] * 3 + ["s5"],
        "... when a block is whole": ["s1"] * 20,
    }
    for row, (name, colors) in enumerate(rows.items()):
        y = 72 + 32 * row
        parts += [text(16, y + 16, name), *cells(200, y, colors, 22)]
    x = 16.0
    for label, color, opacity in (("codes", "s1", 0.8), ("16-bit tail", "s6", 0.8), ("the new token", "s5", 0.8)):
        parts += [box(x, 176, 12, 12, color, opacity), text(x + 18, 187, label, "quiet", 12)]
        x += 130
    return parts


def windows() -> list[str]:
    """A sequence with sink and recent tokens, before and after an append."""
    parts = []
    for row, (name, quantized) in enumerate({"before": 12, "one token later": 13}.items()):
        y = 72 + 34 * row
        colors = ["s6"] * 4 + ["s1"] * (quantized - 1) + ["s5" if row else "s1"] + ["s6"] * 6
        parts += [text(16, y + 16, name), *cells(150, y, colors, 22)]
    labels = (("sink_tokens=4, recent_tokens=6 in 16 bits", "s6"), ("codes", "s1"), ("quantized by this append", "s5"))
    x = 16.0
    for label, color in labels:
        parts += [box(x, 148, 12, 12, color, 0.8), text(x + 18, 159, label, "quiet", 12)]
        x += 90 if color == "s1" else 290
    return parts


DRAWN: dict[str, tuple[Callable[[], list[str]], int]] = {
    "granularities": (granularities, 208),
    "packing": (packing, 216),
    "split-k": (splits, 180),
    "append": (append, 200),
    "windows": (windows, 172),
}


def diagrams() -> dict[str, str]:
    """The SVGs by path."""
    return {f"docs/assets/{name}.svg": picture(*WORDS[name], height, draw()) for name, (draw, height) in DRAWN.items()}


def tag(name: str) -> str:
    """Markup of a diagram in a page one folder below docs, with its words."""
    title, said = WORDS[name]
    return f'<img alt="{escape(title)}. {escape(said)}" src="../assets/{name}.svg" width="{WIDTH}">'
