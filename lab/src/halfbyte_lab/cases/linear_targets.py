"""The targets of linear layers on a GPU as data: which cases are measured, and what each must reach. `linear_cases.py` measures.

A share of the roof is time at the speed of a read-only kernel over the bytes of the stored weight, in the same run, over the time
taken. Times are those of calls back to back whose launches may overlap; times with launches kept apart are reported beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halfbyte.formats import ROUNDED_ROWS
from halfbyte_lab.cases import literature
from halfbyte_lab.cases.targets import Target, bound_text, verdict_text
from halfbyte_lab.measure import charts
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.tables import Table, us

#: Rows of x in decoding and in prompts.
ROWS = (1, 2, 4, 8, 16, 32, 64)
PROMPTS = (128, 256, 512, 1024, 2048, 4096, 8192)

#: Formats with few rows, those with many, and the one that rounds x to INT8 from `ROUNDED_ROWS` on.
INT4, ZEROS, INT8_X = "int4_sym_g128", "int4_g128", "int4_g128_a8"
FORMATS = (INT4, ZEROS, "nf4", "mxfp4", "nvfp4", "int8_col")
PROMPT_FORMATS = FORMATS[:-1]


@dataclass(frozen=True)
class LinearCase:
    """A weight [n, k], the rows of x that it is multiplied with, and the formats at `few` of the rows of decoding: the first at
    all, and those of prompts at theirs.
    """

    n: int
    k: int
    what: str
    rows: tuple[int, ...] = ROWS
    formats: tuple[str, ...] = FORMATS
    few: tuple[int, ...] = ROWS

    @property
    def name(self) -> str:
        """ "8192 x 8192"."""
        return f"{self.n} x {self.k}"

    def case(self, rows: int) -> str:
        """The name of one case: "8192 x 8192, 4 rows"."""
        return f"{self.name}, {rows} row{'s' * (rows > 1)}"

    def formats_at(self, rows: int) -> tuple[str, ...]:
        """The formats that are measured with so many rows."""
        if rows > ROWS[-1]:
            return (*PROMPT_FORMATS, *([INT8_X] if rows >= ROUNDED_ROWS else ()))
        return self.formats if rows in self.few else self.formats[:1]


#: The QKV, output, gate-and-up and down projections of Llama-3-8B and 70B, and three squares.
LAYERS = (
    LinearCase(4096, 4096, "output of Llama-3-8B", ROWS + PROMPTS),
    LinearCase(6144, 4096, "QKV of Llama-3-8B", ROWS + PROMPTS),
    LinearCase(28672, 4096, "gate and up of Llama-3-8B", ROWS + PROMPTS, few=(1, 16, 64)),
    LinearCase(4096, 14336, "down of Llama-3-8B", ROWS + PROMPTS, few=(1, 16, 64)),
    LinearCase(8192, 8192, "output of Llama-3-70B", ROWS + PROMPTS),
    LinearCase(10240, 8192, "QKV of Llama-3-70B"),
    LinearCase(57344, 8192, "gate and up of Llama-3-70B", few=(1, 16)),
    LinearCase(8192, 28672, "down of Llama-3-70B", few=(1, 16)),
    LinearCase(16384, 16384, "a square"),
)
#: What `--quick` measures.
QUICK_LAYERS, QUICK_ROWS = ("4096 x 4096", "8192 x 8192"), (1, 4, 16, 64)

_SHARES: Mapping[tuple[int, int], Mapping[int, float]] = {
    (16384, 16384): {1: 0.94, 4: 0.91, 8: 0.88, 16: 0.78},
    (8192, 8192): {1: 0.90, 4: 0.89, 8: 0.86, 16: 0.72},
    (10240, 8192): dict.fromkeys((1, 2, 4, 8), 0.85),
}
_SECONDS: Mapping[tuple[int, int], float] = {(4096, 4096): 5.2e-6, (6144, 4096): 6.4e-6}
#: Speed-ups over cuBLAS in bf16: from 8192 x 8192 on, of smaller layers at M = 64, of prompts, and with x in INT8.
_TIMES_CUBLAS = {1: 3.0, 2: 3.0, 4: 3.0, 8: 3.0, 16: 2.4, 32: 1.9, 64: 1.7}
_TIMES_CUBLAS_SMALL, _TIMES_CUBLAS_PROMPT, _TIMES_CUBLAS_INT8_X = 1.15, 0.95, 1.3


def targets_of(layer: LinearCase, rows: int, formats: str) -> list[Target]:
    """The bars of one format on a layer with so many rows."""
    case, size = layer.case(rows), (layer.n, layer.k)
    if rows > ROWS[-1]:
        prompt = 1.0 if rows <= 256 and formats in (INT4, ZEROS) else _TIMES_CUBLAS_PROMPT
        return [Target(case, formats, "times_16_bit", _TIMES_CUBLAS_INT8_X if formats == INT8_X else prompt)]
    targets = []
    if formats == INT4:
        if share := _SHARES.get(size, {}).get(rows):
            targets.append(Target(case, formats, "roof_share", share))
        if size in _SECONDS and rows <= 8:
            targets.append(Target(case, formats, "seconds", _SECONDS[size]))
        targets.append(Target(case, formats, "times_4_bit", 1.0))
    if formats in (INT4, ZEROS) and layer.n * layer.k >= 8192 * 8192:
        targets.append(Target(case, formats, "times_16_bit", _TIMES_CUBLAS[rows]))
    elif formats in (INT4, ZEROS) and size in _SECONDS and rows == ROWS[-1]:
        targets.append(Target(case, formats, "times_16_bit", _TIMES_CUBLAS_SMALL))
    if size == (8192, 8192) and rows <= 16:
        targets += [Target(case, f, "share_of_int4", 0.9) for f in ("mxfp4", "nvfp4") if f == formats]
        targets += [Target(case, f, "roof_share", 0.6) for f in ("nf4",) if f == formats]
    if literature.fastest(*size, rows, formats) is not None:
        targets.append(Target(case, formats, "times_quoted", 1.0))
    return targets


def every_target() -> list[Target]:
    """All bars of linear layers."""
    return [bar for layer in LAYERS for rows in layer.rows for f in layer.formats_at(rows) for bar in targets_of(layer, rows, f)]


# ------------------------------------------------------------------------------------------------------------- how it is told

HEADERS = ("case", "format", "by", "us alone", "us chained", "of roofline", "x bf16", "fastest quoted, us", "target", "verdict")
PUBLISHED = "published split-k"
#: A line of the chart.
QUOTED = "fastest quoted, other run"


def table(measured: Sequence[Record]) -> Table:
    """One row for each record, peers included; several bars of one record lie on several lines."""
    return HEADERS, [_row(r) for r in measured if r.case and r.op == "linear"]


def _row(r: Record) -> tuple[str, ...]:
    ours = r.implementation.startswith("halfbyte")
    other = literature.fastest(r.shape["N"], r.shape["K"], r.shape["M"], r.formats) if ours and r.shape else None
    return (
        r.case,
        r.formats,
        r.implementation,
        us(r.alone),
        us(r.chained),
        "" if r.roof_share is None else f"{100 * r.roof_share:.0f} %",
        f"{r.peer_seconds / r.seconds:.2f}" if r.peer_seconds and r.seconds and ours else "",
        "" if other is None else f"{1e6 * other.seconds:.1f} {other.peer}",
        "\n".join(bound_text(v) for v in r.bars),
        "\n".join(verdict_text(v) for v in r.bars) or ("refused" if r.refused else ""),
    )


def shares(measured: Sequence[Record]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """For a chart: by layer and implementation the points (rows, % of the roof of the int4 weight), peers and quoted figures too.

    The roof is the time of reading the int4 weight, for everything that is drawn but NF4, which has a roof of its own.
    """
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for ours in (r for r in latest(measured) if r.formats == INT4 and _is_ours(r) and r.seconds and r.roof_gb_per_s):
        rows, size = ours.shape["M"], (ours.shape["N"], ours.shape["K"])
        if rows > ROWS[-1]:
            continue
        read = ours.nbytes / (1e9 * (ours.roof_gb_per_s or 1.0))
        beside = [r for r in latest(measured) if r.case == ours.case and r.seconds]
        same = [r for r in beside if r.formats in ("bf16", literature.code_of(INT4)) and not _is_ours(r)]
        times = {r.implementation: r.seconds for r in same}
        if other := literature.fastest(*size, rows, INT4):
            times[QUOTED] = other.seconds
        lines = panels.setdefault(f"{size[0]} x {size[1]}", {})
        lines.setdefault("halfbyte int4", []).append((rows, 100 * read / (ours.seconds or 1.0)))
        for nf4 in (r for r in beside if r.formats == "nf4" and _is_ours(r)):
            lines.setdefault("halfbyte nf4", []).append((rows, 100 * (nf4.roof_share or 0.0)))
        for name, seconds in times.items():
            lines.setdefault(name, []).append((rows, 100 * read / (seconds or 1.0)))
    return panels


def prompts(measured: Sequence[Record]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """For a chart: by layer and format the points (rows, speed-up over 16 bits) from 64 rows on, of layers with more than these."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for r in (r for r in latest(measured) if _is_ours(r) and r.seconds and r.peer_seconds and r.shape["M"] >= ROWS[-1]):
        lines = panels.setdefault(f"{r.shape['N']} x {r.shape['K']}", {})
        if r.formats in (INT4, "nf4", "nvfp4", INT8_X):
            lines.setdefault(r.formats, []).append((r.shape["M"], (r.peer_seconds or 0.0) / (r.seconds or 1.0)))
    return {layer: lines for layer, lines in panels.items() if any(len(points) > 1 for points in lines.values())}


def figures(measured: Sequence[Record]) -> list[str]:
    """What `shares` and `prompts` give, a chart each; none of what was not measured."""
    x_label = "batch size M"
    charts_of = []
    if panels := shares(measured):
        title = "Linear layers: share of the read roofline by batch size"
        charts_of.append(charts.panels(panels, x_label=x_label, y_label="% of the INT4 roofline", title=title, dashed=[QUOTED]))
    if panels := prompts(measured):
        title = "Linear layers of prompts: speed-up over cuBLAS in bf16"
        charts_of.append(charts.panels(panels, x_label=x_label, y_label="times cuBLAS", title=title, line=1.0))
    return charts_of


def _is_ours(r: Record) -> bool:
    """What halfbyte itself chooses, and not an implementation that was asked for."""
    return r.implementation == "halfbyte auto"


def latest(measured: Sequence[Record]) -> list[Record]:
    """Of several runs the last record of each case, format and implementation, in the order of the cases."""
    last = {(r.case, r.formats, r.implementation): r for r in measured if r.case and r.op == "linear" and r.implementation}
    order = {layer.case(rows): i for i, (layer, rows) in enumerate((x, rows) for x in LAYERS for rows in x.rows)}
    return sorted(last.values(), key=lambda r: order.get(r.case, len(order)))
