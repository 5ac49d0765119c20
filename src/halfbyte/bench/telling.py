"""How records are told: which records belong together, and their table, charts and sentences; on the terminal and on a page alike.

Cases with bars, the variants of attention and each study have a way of their own; all other records are told plainly, by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from halfbyte.bench import bars, figures, linear_bars, quoted, run_qkv, studies
from halfbyte.bench.page import Table
from halfbyte.bench.records import Record
from halfbyte.bench.session import HEADERS, Session, table_rows


def _nothing(measured: Sequence[Record]) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Telling:
    """How records of one kind are told: see `studies.Study`; `title` says what they are of, `asks` what is asked, if so."""

    title: str
    table: Callable[[Sequence[Record]], Table]
    charts: Callable[[Sequence[Record]], Sequence[str]] = _nothing
    says: Callable[[Sequence[Record]], Sequence[str]] = _nothing
    text_columns: int = 2
    asks: str = ""


def _rows_under(headers: Sequence[str], rows: Callable[[Sequence[Record]], Sequence[Sequence[str]]]) -> Callable[..., Table]:
    return lambda measured: (headers, rows(measured))


#: What records of peers are marked with, as those of a study are.
PEERS_MARK = "peers"

DECODE = Telling("Decode attention and appends, with bars", _rows_under(bars.HEADERS, bars.table_rows), figures.of_attention)
LINEAR = Telling(
    "Linear layers, with bars",
    _rows_under(linear_bars.HEADERS, linear_bars.table_rows),
    figures.of_linear,
    lambda measured: (f"Quoted: {quoted.SOURCE}.",),
    text_columns=3,
)
QKV = Telling("Products for q, k and v", run_qkv.table, figures.of_variants, text_columns=3)


PEERS = Telling("Peers", _rows_under(HEADERS, table_rows), figures.of_any, text_columns=3)


def plain(op: str) -> Telling:
    """Any other records of one operation."""
    title = op.replace("_", " ").capitalize()
    return Telling(title, _rows_under(HEADERS, table_rows), figures.of_any, _ratio_said, text_columns=3)


def _ratio_said(measured: Sequence[Record]) -> Sequence[str]:
    compared = any(r.formats in ("bf16", "fp16") for r in measured)
    return ("vs 16-bit: time over that of the fastest 16-bit implementation; below 1 is faster.",) if compared else ()


def of_study(study: studies.Study) -> Telling:
    """A study tells itself."""
    return Telling(study.name, study.table, study.charts, study.says, study.text_columns, study.asks)


def telling_of(r: Record) -> Telling:
    """How one record is told. A study that is not known here is told plainly."""
    if r.study in studies.QUESTIONS:
        return of_study(studies.study(r.study))
    if r.case and r.op in bars.OPS and not r.study:
        return DECODE
    if r.case and r.op == "linear" and not r.study:
        return LINEAR
    if r.study == PEERS_MARK:
        return PEERS
    if r.op in (run_qkv.OP, run_qkv.FUSED_OP):
        return QKV
    return plain(r.op)


def by_telling(measured: Sequence[Record]) -> list[tuple[Telling, list[Record]]]:
    """The records in the groups in which they are told, in the order in which these first occur."""
    found: dict[str, tuple[Telling, list[Record]]] = {}
    for r in measured:
        telling = telling_of(r)
        found.setdefault(telling.title, (telling, []))[1].append(r)
    return list(found.values())


def tell(session: Session, telling: Telling) -> None:
    """Print the table of a session's records, its notes and sentences, and how many bars were met."""
    measured = session.records
    if not measured or session.options.json:
        return
    headers, rows = telling.table(measured)
    session.show_table(f"{telling.title} on {session.device.name}", headers, rows, telling.text_columns)
    for r in measured:
        if r.note:
            session.say(f"{r.case} {r.formats}: {r.note}")
    for sentence in telling.says(measured):
        session.say(sentence)
    if any(r.bars for r in measured):
        session.say(bars.count_text(measured))
