"""From which size on packed data is faster than 16 bits: the table that ships with the library, and what the pages say of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence

from docgen.sources import ATTENTION_OPS, DATA, OURS, Record, by_machine, tables
from halfbyte.plans.crossovers import ATTENTION, LINEAR, Crossovers, crossing, numbers, sizes_of
from halfbyte.settings import HALVES

FILE = DATA / "crossovers.json"
#: What every figure is, in words.
_AGAINST = "Compared with the fastest 16-bit kernel of the same run, in the newest run of each case."


def measured() -> Crossovers:
    """The table, from all records: GPUs with most records first."""
    machines = sorted(by_machine(tables.every_gpu_record()).items(), key=lambda machine: -len(machine[1]))
    found = {gpu: of_machine(records) for gpu, records in machines}
    return {gpu: ops for gpu, ops in found.items() if ops}


def of_machine(records: Sequence[Record]) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """That of one GPU: of each size the newest run that timed 16 bits too."""
    newest: dict[tuple[str, ...], tuple[str, float]] = {}
    for (_, shape, size, *_, date), run in _runs(records).items():
        plain = min((r.seconds or math.inf for r in run if r.formats in HALVES), default=math.inf)
        for r in run if plain < math.inf else ():
            if r.implementation == OURS and r.formats not in HALVES:
                key = (LINEAR if r.op == LINEAR else ATTENTION, r.formats, shape, size)
                if date >= newest.get(key, ("",))[0]:
                    newest[key] = (date, plain / (r.seconds or math.inf))
    found: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for op, formats, shape, size in sorted(newest, key=lambda key: (*key[:2], numbers(key[2]), numbers(key[3]))):
        times = newest[op, formats, shape, size][1]
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


def text() -> str:
    """The file: a line for each format and shape."""
    return re.sub(r"\{[^{}]*\}", lambda sizes: json.dumps(json.loads(sizes[0])), json.dumps(measured(), indent=1)) + "\n"


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
