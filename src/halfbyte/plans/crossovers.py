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

from halfbyte.cache_options import token_bytes
from halfbyte.formats import Format, key_format, value_format, weight_format

#: {GPU: {"attention" or "linear": {formats: {shape: {size: times as fast}}}}}. Formats: "int8", or "int8+int4" of keys and values.
#: Shapes: "32/8 x 128" (query heads / KV heads x head dim), "4096 x 8192" (N x K). Sizes: "128 x 2048" (batch x tokens), "64" (M).
Crossovers = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]]
ATTENTION, LINEAR = "attention", "linear"
#: How a range of sizes is reported: where packed data is faster, the least and the most favorable size, and what lies before.
_WORDS = {
    ATTENTION: ("from {} on", "smallest", "largest", "so small a size"),
    LINEAR: ("up to {}", "largest", "smallest", "so large an M"),
}
#: How far a measured case may be from a problem: times the query rows of a KV head, or N and K; and parts of the bytes, of other
#: formats with the same codes.
FACTOR, BYTES = 2, 0.1


class Size(NamedTuple):
    """A measured size. `at` grows with what favors packed data: log(batch x tokens x KV heads), or -log(M)."""

    at: float
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


def faster_from(times: Sequence[float]) -> int:
    """The first index from which on nothing is below 1; the length if the last one is."""
    return next((i + 1 for i in reversed(range(len(times))) if times[i] < 1), 0)


def numbers(text: str) -> tuple[int, ...]:
    """The whole numbers of a shape or a size."""
    return tuple(map(int, re.findall(r"\d+", text)))


def sizes_of(op: str, shape: str, measured: Mapping[str, float]) -> list[Size]:
    """The sizes of a case, the least favorable first: attention over few tokens, a GEMM with large M."""
    if op == LINEAR:
        return sorted(Size(-math.log(int(m)), f"M = {m}", times) for m, times in measured.items())
    kv_heads, found = numbers(shape)[1], {numbers(size): times for size, times in measured.items()}
    return sorted(Size(math.log(b * t * kv_heads), f"{b} x {t:,} tokens", times) for (b, t), times in found.items())


def attention_fact(
    heads: tuple[int, int],
    dim: int,
    batch: int,
    tokens: int,
    queries: int,
    formats: tuple[Format, Format],
    gpu: str,
    table: Crossovers,
) -> str:
    """Whether attention over a full packed cache is faster than over 16 bits. `heads`: query, KV; `formats`: keys, values."""
    (q_heads, kv_heads), (keys, values) = heads, formats
    rows, nbytes = q_heads // kv_heads * queries, _token(formats, dim)
    wanted = str(keys) if str(keys) == str(values) else f"{keys}+{values}"

    def distance(name: str, shape: str) -> tuple[float, ...] | None:
        q, kv, d = numbers(shape)
        first, _, second = name.partition("+")
        theirs = (key_format(first), value_format(second or first))
        factor = q / kv / rows
        if d != dim or not _within(factor) or [f.code for f in theirs] != [f.code for f in formats]:
            return None
        # Of two as far, the one with more query rows: it favors packed data less.
        return _near(name == wanted, abs(math.log(factor)), factor < 1, abs(_token(theirs, dim) / nbytes - 1))

    case = _nearest(table, ATTENTION, gpu, distance)
    if case is None:
        return f"not measured with {wanted} or the same codes, a head dim of {dim} and about {rows} query rows a KV head"

    def here(size: Size) -> str:
        as_much = math.ceil(round(math.exp(size.at) / (batch * kv_heads), 3))
        return "" if size.label == f"{batch} x {as_much:,} tokens" else f", as much work as {as_much:,} tokens here"

    what = "{}, {}/{} heads of {}".format(case.formats, *numbers(case.shape))
    return _said(ATTENTION, case, what, math.log(batch * tokens * kv_heads), gpu, here)


def linear_fact(features: Sequence[int], width: int, formats: Sequence[Format], rows: int, gpu: str, table: Crossovers) -> str:
    """Whether a GEMM with packed weights of these out features and this width is faster than in 16 bits with M `rows`."""
    wanted, n = formats[0], sum(features)
    bits = wanted.bits_per_element((n, width))

    def distance(name: str, shape: str) -> tuple[float, ...] | None:
        (out, k), theirs = numbers(shape), weight_format(name)
        if not (_within(out / n) and _within(k / width) and theirs.code == wanted.code):
            return None
        # Of two as far, the larger one does not count: it favors packed data more.
        apart = abs(math.log(out / n)) + abs(math.log(k / width))
        return _near(theirs == wanted, apart, out * k > n * width, abs(theirs.bits_per_element((out, k)) / bits - 1))

    case = _nearest(table, LINEAR, gpu, distance) if len(set(formats)) == 1 else None
    if case is None:
        names = ", ".join(dict.fromkeys(map(str, formats)))
        return f"not measured with {names} or the same codes, N of about {n} and K of about {width}"
    return _said(LINEAR, case, "{} [{}, {}]".format(case.formats, *numbers(case.shape)), -math.log(rows), gpu, lambda size: "")


def _said(op: str, case: _Case, what: str, at: float, gpu: str, here: Callable[[Size], str]) -> str:
    """The verdict at a size, from which size on packed data is faster, and what was measured nearest."""
    sizes, (onward, least, most, outside) = case.sizes, _WORDS[op]
    first = faster_from([s.times for s in sizes])
    before, start = sizes[first - 1] if first else None, sizes[first] if first < len(sizes) else None
    near = min(sizes, key=lambda s: (round(abs(s.at - at), 6), s.times))
    parts, than = [], " than the fastest 16-bit kernel"
    if start:
        smallest = "" if before else f", the {least} measured"
        parts.append(f"faster{than} {onward.format(start.label)}{smallest} ({start.times:.2f}x{here(start)})")
    if before:
        slower = "slower at" if start else f"slower{than} at the {most} measured,"
        parts.append(f"{slower} {before.label} ({before.times:.2f}x)")
    if near not in (start, before):
        parts.append(f"{near.times:.2f}x at {near.label}, the nearest")
    verdict = _verdict(sizes, first, at, f"not measured at {outside}") if case.gpu == gpu else "not measured on this GPU"
    return f"{verdict}; measured on {case.gpu} with {what}: {', '.join(parts)}"


def _verdict(sizes: Sequence[Size], first: int, at: float, outside: str) -> str:
    """Which is faster at a size, where both measured sizes around it agree."""
    before, beyond = [s for s in sizes if s.at <= at + 1e-9], [s for s in sizes if s.at >= at - 1e-9]
    if not before:
        return outside
    if first < len(sizes) and at >= sizes[first].at - 1e-9:
        return "packed is faster"
    slower = all(s.times < 1 for s in (before[-1], *beyond[:1]))
    return "packed is slower" if slower else "not measured between slower and faster"


def _nearest(table: Crossovers, op: str, gpu: str, distance: Callable[[str, str], tuple[float, ...] | None]) -> _Case | None:
    """The nearest case, on this GPU if there is one."""
    found = [
        _Case((where != gpu, *far), where, formats, shape, sizes_of(op, shape, measured))
        for where, ops in table.items()
        for formats, shapes in ops.get(op, {}).items()
        for shape, measured in shapes.items()
        if (far := distance(formats, shape)) is not None
    ]
    return min(found, key=lambda case: case.distance, default=None)


def _near(same: bool, shape: float, favorable: bool, bytes_apart: float) -> tuple[float, ...] | None:
    """A distance: formats, shape, bytes; None where other formats differ too much in bytes."""
    return (not same, round(shape, 6), favorable, bytes_apart) if same or bytes_apart <= BYTES else None


def _within(factor: float) -> bool:
    return 1 / FACTOR <= factor <= FACTOR


def _token(formats: tuple[Format, Format], dim: int) -> float:
    """Bytes of a token and KV head."""
    return sum(token_bytes(fmt, 1, dim) for fmt in formats)
