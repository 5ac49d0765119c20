"""Charts from records of any run: times side by side, the roofline, time by batch and context, speed over 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from halfbyte.device import datasheet_name
from halfbyte_lab.measure import charts
from halfbyte_lab.measure.caches import EVENLY
from halfbyte_lab.measure.charts import Lines
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.tables import describe_shape

SIXTEEN = ("bf16", "fp16")
_FASTEST = "fastest 16 bits"
#: Cases that have a chart each.
_CASES = 12


def of_any(measured: Sequence[Record]) -> list[str]:
    """Times side by side for each case, unless there are many, speed over 16 bits, the roofline, and time by batch and context."""
    cases: dict[str, dict[str, float]] = {}
    for r in measured:
        if r.seconds:
            cases.setdefault(name_of(r), {})[f"{r.implementation}, {r.formats}"] = 1e3 * r.seconds
    few = cases.items() if len(cases) <= _CASES else ()
    bars = [charts.bars(times, x_label="milliseconds, median; shorter is better", title=case) for case, times in few]
    return [*bars, *speedups(measured), *rooflines(measured), *by_size(measured)]


def rooflines(measured: Sequence[Record]) -> list[str]:
    """Bytes a second against bytes, and FLOP a second against FLOP a byte, each below what a read-only kernel reached in the same
    runs; by format, 16 bits as one.
    """
    with_roof = [r for r in measured if r.seconds and r.gb_per_s and r.nbytes and r.roof_gb_per_s]
    if not with_roof:
        return []
    roof = sorted({r.nbytes / 1e6: r.roof_gb_per_s or 0.0 for r in with_roof}.items())
    sizes = _fastest_of(with_roof, lambda r: (r.nbytes / 1e6, r.gb_per_s or 0.0))
    title = "Roofline: bytes a second by bytes read"
    rates = charts.roofline(sizes, roof, x_label="MB that a call must read", y_label="GB/s", title=title)
    return [rates, *_intensities([r for r in with_roof if flop(r)])]


#: TFLOP/s of tensor cores over 16 bits without sparsity, by the data sheets of those with enough memory bandwidth for a study.
TENSOR_CORES = {"a100-40gb": 312, "a100-80gb": 312, "h100": 989, "h200": 989}


def _intensities(timed: Sequence[Record]) -> list[str]:
    """Arithmetic intensity, below the read roofline and the limit of the tensor cores, where it is known."""
    if not timed:
        return []
    points = _fastest_of(timed, lambda r: (flop(r) / r.nbytes, flop(r) / (r.seconds or 1.0) / 1e12))
    ends, fastest = [flop(r) / r.nbytes for r in timed], max(r.roof_gb_per_s or 0.0 for r in timed)
    peaks = {TENSOR_CORES.get(datasheet_name(r.environment.device) or "") for r in timed}
    peak = peaks.pop() if len(peaks) == 1 else None
    ridge = 1e3 * peak / fastest if peak else max(ends)
    roof = [(x, x * fastest / 1e3) for x in (min(ends), ridge)]
    roof += [(2 * ridge, peak)] if peak else []
    x_label, title = "FLOP per byte of weights or cache", "Roofline: arithmetic intensity"
    limit = ", tensor cores by data sheet" if peak else ""
    return [charts.roofline(points, roof, x_label=x_label, y_label="TFLOP/s", title=title, log_y=True, limit=limit)]


def _fastest_of(timed: Sequence[Record], place: Callable[[Record], tuple[float, float]]) -> Lines:
    """Where the fastest record of each case and format is drawn, by format."""
    points: dict[str, dict[str, tuple[float, float]]] = {}
    for r in sorted(timed, key=lambda r: r.gb_per_s or 0.0):
        series = _FASTEST if r.formats in SIXTEEN else r.formats
        points.setdefault(series, {})[name_of(r)] = place(r)
    return {series: list(line.values()) for series, line in sorted(points.items())}


def flop(r: Record) -> int:
    """Multiplications and additions of the two products of attention over full caches, or of a linear layer; 0 of anything else."""
    s = r.shape
    if {"B", "Hq", "T", "D"} <= s.keys():
        return 4 * s["B"] * s["Hq"] * s["T"] * s["D"]
    return 2 * s["M"] * s["N"] * s["K"] if {"M", "N", "K"} <= s.keys() else 0


def speedups(measured: Sequence[Record]) -> list[str]:
    """How many times faster ours are than the fastest 16-bit implementation of the same case and run."""
    times = {}
    for r in measured:
        faster = times_16_bit(measured, r)
        if faster is not None and _ours(r) and not r.case.endswith(EVENLY):
            by = "" if r.implementation == "halfbyte auto" else f", {r.implementation.removeprefix('halfbyte ')}"
            times[f"{name_of(r)}, {r.formats}{by}"] = faster
    labels = {name: f"{value:.2f}x" for name, value in times.items()}
    label = "times the fastest 16-bit implementation; above 1 is faster"
    return [charts.bars(times, x_label=label, title="Speed over 16 bits", shown=labels, line=1.0)] if times else []


def by_size(measured: Sequence[Record]) -> list[str]:
    """Time against batch and against context, wherever one of them was varied and the rest kept."""
    return [
        *_against(measured, "B", "batch", lambda s: f"{_heads(s)}, T={s['T']:,}"),
        *_against(measured, "T", "tokens in the cache", lambda s: f"{_heads(s)}, batch {s['B']}"),
    ]


def _against(measured: Sequence[Record], axis: str, label: str, title: Callable[[dict[str, int]], str]) -> list[str]:
    """A panel for each shape that was measured at several sizes along `axis`, 16 bits as their fastest."""
    by_title: dict[str, dict[str, dict[int, float]]] = {}
    for r in measured:
        if r.seconds and {"B", "Hq", "H", "D", "T"} <= set(r.shape) and not r.case.endswith(EVENLY):
            name = _FASTEST if r.formats in SIXTEEN else r.formats
            times = by_title.setdefault(title(r.shape), {}).setdefault(name, {})
            times[r.shape[axis]] = min(r.seconds, times.get(r.shape[axis], r.seconds))
    panels: dict[str, Lines] = {}
    for heading, series in by_title.items():
        lines = {name: [(x, 1e6 * s) for x, s in sorted(times.items())] for name, times in series.items() if len(times) > 1}
        if set(lines) - {_FASTEST}:
            panels[heading] = lines
    columns = min(3, len(panels))
    heading = f"Time of a step by {label}"
    return [charts.panels(panels, x_label=label, y_label="us a step", title=heading, columns=columns, log_y=True)] if panels else []


def _heads(shape: dict[str, int]) -> str:
    return f"{shape['Hq']}/{shape['H']} heads of {shape['D']}"


def times_16_bit(measured: Sequence[Record], r: Record) -> float | None:
    """How many times faster a record is than the fastest 16-bit one of its case in the same run; None without either."""
    if not r.seconds or r.formats in SIXTEEN:
        return None
    if r.peer_seconds and r.op in ("decode_attention", "linear"):  # alone, as its peers are timed
        return r.peer_seconds / (r.alone or r.seconds)
    beside = [
        other.seconds
        for other in measured
        if other.seconds
        and other.formats in SIXTEEN
        and (other.op, other.case, other.shape, other.environment.date) == (r.op, r.case, r.shape, r.environment.date)
    ]
    return min(beside) / r.seconds if beside else None


def name_of(r: Record) -> str:
    """The case of a record, or its shape."""
    return r.case or describe_shape(r.shape)


def _ours(r: Record) -> bool:
    return r.implementation.startswith("halfbyte")
