"""Records as text: rows of tables, and figures in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from halfbyte_lab.measure.records import Record

#: Headers and rows.
Table = tuple[Sequence[str], Sequence[Sequence[str]]]

HEADERS = ("case", "formats", "implementation", "time (ms)", "vs 16-bit", "of roofline", "error", "GB/s", "p10 - p90")


def filled(table: Table, text_columns: int) -> Table:
    """A table without columns of numbers that no row has, such as those that only a GPU gives."""
    headers, rows = table
    columns = [i for i in range(len(headers)) if i < text_columns or any(row[i] for row in rows)]
    return [headers[i] for i in columns], [[row[i] for i in columns] for row in rows]


def plain_table(records: Iterable[Record]) -> Table:
    """One row for each record, whatever it is of.

    "vs 16-bit" is the time over that of the fastest 16-bit one of the run: below 1 is faster.
    """
    records = list(records)
    rows: list[tuple[str, ...]] = []
    for r in records:
        head = (describe_shape(r.shape) or r.case, r.formats, r.implementation)
        error = "" if r.error is None else f"{r.error:.2g}"
        if r.seconds is None or r.p10 is None or r.p90 is None:
            rows.append((*head, "refused" if r.refused else "", "", "", error, "", ""))
            continue
        baseline = fastest_16_bit(records, r)
        ratio = "" if baseline is None else f"{r.seconds / baseline:.2f}x"
        rate, share = f"{r.gb_per_s or 0:.1f}", f"{100 * (r.roof_share or 0):.0f} %"
        spread = f"{1e3 * r.p10:.3g} - {1e3 * r.p90:.3g}"
        rows.append((*head, f"{1e3 * r.seconds:.3f}", ratio, share, error, rate, spread))
    return HEADERS, rows


def fastest_16_bit(measured: Iterable[Record], of: Record) -> float | None:
    """Seconds of the fastest 16-bit implementation on the case of `of` in the same run; None when none was measured."""

    def known(r: Record) -> tuple[object, ...]:
        return r.op, r.shape, r.environment.date

    return min((r.seconds for r in measured if r.seconds and r.formats in ("bf16", "fp16") and known(r) == known(of)), default=None)


def is_noisy(record: Record) -> bool:
    """Whether the samples of a time vary so much that its median says little."""
    return record.p10 is not None and record.p90 is not None and record.p90 > 1.5 * record.p10


def describe_shape(shape: dict[str, int]) -> str:
    """{"B": 1, "T": 8192} as "B1 T8192"."""
    return " ".join(f"{name}{size}" for name, size in shape.items())


def count_text(measured: Sequence[Record]) -> str:
    """ "41 targets met, 3 missed, 2 not measured"."""
    verdicts = [v for r in measured for v in r.bars]
    unknown = sum(v.value is None for v in verdicts)
    met = sum(v.met for v in verdicts)
    return f"{met} targets met, {len(verdicts) - met - unknown} missed, {unknown} not measured"


def us(seconds: float | None) -> str:
    """Microseconds with one decimal; "" for None."""
    return "" if seconds is None else f"{1e6 * seconds:.1f}"


def rate_text(gb_per_s: float | None) -> str:
    """ "3,518" or "0.65"; "" for None."""
    if gb_per_s is None:
        return ""
    return f"{gb_per_s:,.0f}" if gb_per_s >= 100 else f"{gb_per_s:.2g}"


def range_text(figures: Mapping[str, float], digits: int = 2) -> str:
    """ "1.90 to 2.10"; "1.90" where both are the same."""
    return " to ".join(dict.fromkeys(f"{end:.{digits}f}" for end in (min(figures.values()), max(figures.values()))))


def seconds_of(measured: Iterable[Record], like: Record, implementation: str) -> float | None:
    """The time of another implementation on the case of a record, in its format."""
    target = (like.op, like.case, like.formats, implementation)
    return next((r.seconds for r in measured if (r.op, r.case, r.formats, r.implementation) == target), None)


def times_text(base: float | None, seconds: float | None) -> str:
    """How many times faster than `base`: "3.55"; "" where one of them is not known."""
    return f"{base / seconds:.2f}" if base and seconds else ""
