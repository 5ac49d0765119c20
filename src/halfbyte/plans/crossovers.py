"""From which size on packed data is faster than 16 bits, for `halfbyte explain`: what was measured nearest to a problem.

`data/crossovers.json` holds, for each GPU, op, format and shape, how many times as fast as the fastest 16-bit kernel of the same
run halfbyte was, size by size. `scripts/make_docs.py` writes it from records.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from halfbyte.formats import Format, key_format, value_format, weight_format

#: {GPU: {"attention" or "linear": {formats: {shape: {size: times as fast}}}}}. Formats: "int8", or "int8+int4" of keys and values.
#: Shapes: "32/8 x 128" (query heads / KV heads x head dim), "4096 x 8192" (N x K). Sizes: "128 x 2048" (batch x tokens), "64" (M).
Crossovers = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]]
ATTENTION, LINEAR = "attention", "linear"
#: Sizes that favor packed data, and the others.
_FAVORED = {ATTENTION: ("larger", "smaller"), LINEAR: ("smaller", "larger")}
#: How far a measured case may be from a problem: times the query rows of a KV head, or N and K; and parts of the bytes, of other
#: formats with the same codes.
FACTOR, BYTES = 2, 0.1


class Size(NamedTuple):
    """A measured size. `at` grows with what favors packed data: batch x tokens x KV heads, or -M."""

    at: int
    label: str
    times: float


class _Case(NamedTuple):
    """What was measured of one GPU, format and shape, and how far that is from a problem: GPU, formats, shape, bytes."""

    distance: tuple[float, ...]
    gpu: str
    formats: str
    shape: str
    sizes: list[Size]


@functools.cache
def shipped() -> Crossovers:
    """The table that ships with the library."""
    found: Crossovers = json.loads((Path(__file__).parents[1] / "data" / "crossovers.json").read_bytes())
    return found


def numbers(text: str) -> tuple[int, ...]:
    """The whole numbers of a shape or a size."""
    return tuple(map(int, re.findall(r"\d+", text)))


def sizes_of(op: str, shape: str, measured: Mapping[str, float]) -> list[Size]:
    """The sizes of a case, the least favorable first: attention over few tokens, a GEMM with large M."""
    if op == LINEAR:
        return sorted(Size(-int(m), _label(int(m)), times) for m, times in measured.items())
    kv_heads, found = numbers(shape)[1], {numbers(size): times for size, times in measured.items()}
    return sorted(Size(b * t * kv_heads, _label(b, t), times) for (b, t), times in found.items())


def crossing(sizes: Sequence[Size]) -> tuple[Size | None, Size | None]:
    """The last size at which packed data is slower, and the one from which on it is faster; None where none was measured."""
    first = next((i + 1 for i in reversed(range(len(sizes))) if sizes[i].times < 1), 0)
    around = (None, *sizes, None)
    return around[first], around[first + 1]


def _label(*size: int) -> str:
    return "{} x {:,} tokens".format(*size) if len(size) == 2 else f"M = {size[0]}"


def attention_fact(
    shape: tuple[int, int, int, int, int], queries: int, formats: tuple[Format, Format], without: str, gpu: str, table: Crossovers
) -> str:
    """Whether attention over a full packed cache is faster than over 16 bits.

    shape    batch, query heads, KV heads, head dim, tokens
    formats  of keys and values
    without  what of the problem no measured case has, in words
    """
    batch, q_heads, kv_heads, dim, tokens = shape
    rows, each = q_heads // kv_heads * queries, batch * kv_heads
    case = _nearest(ATTENTION, formats, lambda q, kv, d: (q / kv / rows,) if d == dim else (), gpu, table)
    if case is None:
        named = "+".join(dict.fromkeys(map(str, formats)))
        return f"not measured with {named} or the same codes, a head dim of {dim} and about {rows} query rows a KV head"
    what = "{}, {}/{} heads of {}".format(case.formats, *numbers(case.shape)) + (without and f", without {without}")
    return _said(ATTENTION, case, what, each * tokens, gpu, lambda at: _label(batch, -(-at // each)))


def linear_fact(features: Sequence[int], width: int, formats: Sequence[Format], rows: int, gpu: str, table: Crossovers) -> str:
    """Whether a GEMM with packed weights of these out features and this width is faster than in 16 bits with M `rows`."""
    n, named = sum(features), list(dict.fromkeys(formats))
    case = _nearest(LINEAR, named, lambda out, k: (out / n, k / width), gpu, table)
    if case is None:
        return f"not measured with {', '.join(map(str, named))} or the same codes, N of about {n} and K of about {width}"
    what = "{} [{}, {}]".format(case.formats, *numbers(case.shape))
    return _said(LINEAR, case, what, -rows, gpu, lambda at: _label(-at))


def _nearest(
    op: str, wanted: Sequence[Format], factors: Callable[..., tuple[float, ...]], gpu: str, table: Crossovers
) -> _Case | None:
    """The nearest case, on this GPU if there is one. `factors`: a shape's sizes over those of the problem; () for another dim."""

    def distance(where: str, theirs: Sequence[Format], shape: tuple[int, ...]) -> tuple[float, ...] | None:
        apart = factors(*shape)
        if [f.code for f in theirs] != [f.code for f in wanted] or not all(1 / FACTOR <= f <= FACTOR for f in apart or (0,)):
            return None
        bits = [sum(f.bits_per_element((1, 1, 4096, shape[-1])) for f in formats) for formats in (theirs, wanted)]
        other, by_bytes = list(theirs) != list(wanted), abs(bits[0] / bits[1] - 1)
        # Of two as far, the less favorable one: more query rows, smaller weights.
        favorable = math.prod(apart) if op == LINEAR else 1 / math.prod(apart)
        by_shape = round(sum(abs(math.log(f)) for f in apart), 6)
        return (where != gpu, other, by_shape, favorable, by_bytes) if by_bytes <= BYTES or not other else None

    found = [
        _Case(far, where, name, shape, sizes_of(op, shape, measured))
        for where, ops in table.items()
        for name, shapes in ops.get(op, {}).items()
        for shape, measured in shapes.items()
        if (far := distance(where, _formats(op, name), numbers(shape))) is not None
    ]
    return min(found, key=lambda case: case.distance, default=None)


def _formats(op: str, name: str) -> list[Format]:
    keys, _, values = name.partition("+")
    return [weight_format(name)] if op == LINEAR else [key_format(keys), value_format(values or keys)]


def _said(op: str, case: _Case, what: str, at: int, gpu: str, here: Callable[[int], str]) -> str:
    """The verdict at a size, from which size on packed data is faster, the nearest size. `here`: the problem of as much work."""
    sizes, (onward, back), (before, start) = case.sizes, _FAVORED[op], crossing(case.sizes)
    parts, than = [], " than the fastest 16-bit kernel"
    if start:
        alike = "" if here(start.at) == start.label else f", as much work as {here(start.at)} here"
        parts.append(f"faster{than} at {start.label} and {onward} ({start.times:.2f}x{alike})")
    if before:
        parts.append(f"slower{'' if start else than} at {before.label} ({before.times:.2f}x)")
    if not (start and before):
        parts.append(f"nothing {back if start else onward} measured")
    itself = at, here(at)
    # Of all others within a factor of two the least: sizes of another batch with as much work may gain more.
    near = min(sizes, key=lambda s: (s[:2] != itself, max(1, abs(math.log2(s.at / at))), s.times))
    if near not in (start, before):
        parts.append(f"{near.times:.2f}x at {near.label}" + ", nearby" * (near[:2] != itself))
    verdict = _verdict(sizes, at) if case.gpu == gpu else "not measured on this GPU"
    return f"{verdict}; measured on {case.gpu} with {what}: {', '.join(parts)}"


def _verdict(sizes: Sequence[Size], at: int) -> str:
    """Which is faster at a size, where the measured sizes around it agree; beyond all of them where packed data gains."""
    below, above = [s.times for s in sizes if s.at <= at], [s.times for s in sizes if s.at >= at]
    around = below[-1:] + above[:1]
    if below and min(around) >= 1:
        return "packed is faster"
    return "packed is slower" if below and above and max(around) < 1 else "not measured at this size"
