"""Charts from records of any run: the roofline, time by batch and context, speed over 16 bits, and what each launch takes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from halfbyte_lab.cases import linear_targets, targets
from halfbyte_lab.measure import charts
from halfbyte_lab.measure.figures import by_size, rooflines, speedups, times_16_bit
from halfbyte_lab.measure.records import Record

#: What the note of a record begins its list of launches with: "naive, us a launch: attention 7.1, ...".
_LAUNCHES = "us a launch: "


def of_attention(measured: Sequence[Record]) -> list[str]:
    """Shares of the roof with their bars, speed over 16 bits, the roofline, and time by batch and context."""
    values, bounds = targets.shares(measured)
    label = "% of the read roofline at the same number of bytes"
    shares = [charts.marked_bars(values, bounds, x_label=label, title="Share of the read roofline")] if values else []
    attention = [r for r in measured if r.op == "decode_attention"]
    even = [r for r in attention if r.case != targets.SKEWED.name]  # of whose lengths the shape knows the longest
    return [*shares, *speedups(attention), *rooflines(even), *by_size(attention)]


def of_linear(measured: Sequence[Record]) -> list[str]:
    """Shares of the roof and speed over 16 bits by layer and rows, and the roofline."""
    by_size: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for r in linear_targets.latest(measured):
        if (
            (faster := times_16_bit(measured, r)) is not None
            and r.implementation.startswith("halfbyte")
            and r.shape["M"] in linear_targets.ROWS
        ):
            lines = by_size.setdefault(f"{r.shape['N']} x {r.shape['K']}", {})
            lines.setdefault(r.formats, []).append((r.shape["M"], faster))
    title = "Linear layers: times the fastest 16-bit product"
    gain = [charts.panels(by_size, x_label="rows of x", y_label="times 16 bits", title=title, line=1.0)] if by_size else []
    return [*linear_targets.figures(measured), *gain, *rooflines(measured)]


def of_variants(measured: Sequence[Record]) -> list[str]:
    """What each launch of a variant takes, stacked: a chart for each layer."""
    by_case: dict[str, dict[str, dict[str, float]]] = {}
    for r in measured:
        if times := launches(r):
            by_case.setdefault(r.case, {})[f"{r.formats}, {r.implementation}"] = times
    label = "us, each launch alone"
    return [charts.stacked_bars(stacks, x_label=label, title=f"{case}: launch by launch") for case, stacks in by_case.items()]


def end_to_end(measured: Sequence[Record]) -> list[str]:
    """Microseconds of whole variants, calls back to back: a chart for each layer."""
    by_case: dict[str, dict[str, float]] = {}
    for r in measured:
        if r.chained and launches(r):
            by_case.setdefault(r.case, {})[f"{r.formats}, {r.implementation}"] = 1e6 * r.chained
    return [charts.bars(times, x_label="us, end to end", title=f"{case}: end to end") for case, times in by_case.items()]


# ------------------------------------------------------------------------------------------------------------ figures of one record


def launches(r: Record) -> dict[str, float]:
    """Microseconds of each launch, from the note of a record that lists them; else nothing."""
    text = r.note.partition(_LAUNCHES)[2] if r.seconds else ""
    return {name: float(us) for name, us in re.findall(r"([^\d].*?) ([\d.]+)(?:, |$)", text)}
