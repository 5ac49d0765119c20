"""From which size on packed data is faster than 16 bits, by what was measured size by size."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from docgen.sources import ATTENTION_OPS, OURS, Record, by_machine, tables
from halfbyte.settings import HALVES

#: {GPU: {"attention" or "linear": {formats: {shape: {size: times as fast}}}}}. Formats: "int8", or "int8+int4" of keys and values.
#: Shapes: "32/8 x 128" (query heads / KV heads x head dim), "4096 x 8192" (N x K). Sizes: "128 x 2048" (batch x tokens), "64" (M).
Crossovers = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]]
ATTENTION, LINEAR = "attention", "linear"
#: What every figure is, in words.
_AGAINST = "Compared with the fastest 16-bit kernel of the same run, in the newest run of each case."


class Size(NamedTuple):
    """A measured size. `at` grows with what favors packed data: batch x tokens x KV heads, or -M."""

    at: int
    label: str
    times: float


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


def measured() -> Crossovers:
    """The table, from all records: GPUs with most records first."""
    machines = sorted(by_machine(tables.every_gpu_record()).items(), key=lambda machine: -len(machine[1]))
    found = {gpu: of_machine(records) for gpu, records in machines}
    return {gpu: ops for gpu, ops in found.items() if ops}


def _pairs(records: Sequence[Record]) -> dict[tuple[str, ...], tuple[Record, Record]]:
    """Of one GPU and each op, format, shape and size: ours, of the newest run that timed 16 bits too, and the fastest 16 bits."""
    pairs: dict[tuple[str, ...], tuple[Record, Record]] = {}
    for (_, shape, size, *_, date), run in _runs(records).items():
        plain = min((r for r in run if r.formats in HALVES), key=lambda r: r.seconds or math.inf, default=None)
        for r in run if plain else ():
            if r.implementation == OURS and r.formats not in HALVES:
                key = (LINEAR if r.op == LINEAR else ATTENTION, r.formats, shape, size)
                if plain and (key not in pairs or date >= pairs[key][0].environment.date):
                    pairs[key] = (r, plain)
    return pairs


def newest(records: Sequence[Record]) -> list[Record]:
    """The records of one GPU that `of_machine` reads."""
    return [r for pair in _pairs(records).values() for r in pair]


def of_machine(records: Sequence[Record]) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """The table of one GPU."""
    pairs = _pairs(records)
    found: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for op, formats, shape, size in sorted(pairs, key=lambda key: (*key[:2], numbers(key[2]), numbers(key[3]))):
        ours, plain = pairs[op, formats, shape, size]
        times = (plain.seconds or math.inf) / (ours.seconds or math.inf)
        cell = round(times, 2) if times >= 1 else min(round(times, 2), 0.99)  # what is slower stays so
        found.setdefault(op, {}).setdefault(formats, {}).setdefault(shape, {})[size] = cell
    return found


def _runs(records: Sequence[Record]) -> dict[tuple[str, ...], list[Record]]:
    """What was timed in one run, by op, shape, size, study, case and date."""
    found: dict[tuple[str, ...], list[Record]] = {}
    for r in records:
        s = r.shape
        if not r.seconds or s.get("ALiBi") or s.get("outliers"):
            continue
        if r.op == LINEAR:
            of = (f"{s['N']} x {s['K']}", f"{s['M']}")
        elif r.op in ATTENTION_OPS:
            of = (f"{s['Hq']}/{s['H']} x {s['D']}", f"{s['B']} x {s['T']}")
        else:
            continue
        found.setdefault((r.op, *of, r.study, r.case, r.environment.date), []).append(r)
    return found


def attention() -> str:
    """From which size on attention is faster, by GPU and heads; formats with the same answer share a row."""
    rows: list[tuple[str, ...]] = []
    for gpu, ops in measured().items():
        alike: dict[tuple[tuple[int, ...], str, str, str], list[tuple[str, float]]] = {}
        for formats, shapes in ops.get(ATTENTION, {}).items():
            for shape, sizes in shapes.items():
                found = sizes_of(ATTENTION, shape, sizes)
                _, start = crossing(found)
                slower = ", ".join(s.label for s in found if s.times < 1)
                key = (numbers(shape), shape, start.label if start else "none measured", slower or "none measured")
                alike.setdefault(key, []).append((f"`{formats}`", start.times if start else 0.0))
        for (_, shape, start_label, slower), named in sorted(alike.items()):
            times = sorted(times for _, times in named)
            there = "" if not times[0] else f"{times[0]:.2f}x" if times[0] == times[-1] else f"{times[0]:.2f}-{times[-1]:.2f}x"
            rows.append((gpu, shape, ", ".join(name for name, _ in named), slower, start_label, there))
    heads = ("GPU", "heads", "KV cache", "slower at", "faster from", "speed-up there")
    table = tables.markdown(heads, rows).replace(" tokens", "")
    return f"{_AGAINST} Sizes are batch x tokens, heads are query / KV x head dim.\n\n{table}"


def linear() -> str:
    """Up to which M a GEMM with packed weights is faster, layer by layer, and how it compares at the next M measured."""
    told = [f"{_AGAINST} The largest M up to which packed weights are faster, and the next M measured, if there is one."]
    for gpu, ops in measured().items():
        if formats := ops.get(LINEAR, {}):
            layers = sorted({shape for shapes in formats.values() for shape in shapes}, key=numbers)
            rows = [(layer, *(_largest(shapes.get(layer, {})) for shapes in formats.values())) for layer in layers]
            told.append(tables.markdown((f"{gpu}, N x K", *formats), rows))
    return "\n\n".join(told)


def _largest(sizes: Mapping[str, float]) -> str:
    before, start = crossing(sizes_of(LINEAR, "", sizes))
    up_to = start.label if start else "none measured" if before else ""
    return (f"{up_to} ({before.times:.2f}x at {before.label})" if before else up_to).replace("M = ", "")
