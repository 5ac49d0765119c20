"""How records are shown: which belong together, and their table, charts and sentences; on the terminal and on a page alike.

Here records are grouped by operation. The benchmarks of the checkout bring sections of their own for studies and targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from halfbyte_lab.measure import figures
from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.session import Session
from halfbyte_lab.measure.tables import Table, count_text, filled, plain_table


def _nothing(measured: Sequence[Record]) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Section:
    """How records of one kind are shown.

    title   what they are of; `asks`: the question that they answer, if there is one
    table   headers, and rows of text; the first `text_columns` columns hold text, the others numbers
    charts  <svg> elements
    says    sentences that hold the figures
    also    a second table, of other records
    """

    title: str
    table: Callable[[Sequence[Record]], Table]
    charts: Callable[[Sequence[Record]], Sequence[str]] = _nothing
    says: Callable[[Sequence[Record]], Sequence[str]] = _nothing
    text_columns: int = 2
    asks: str = ""
    also: Callable[[Sequence[Record]], Table] = lambda measured: ((), ())

    def tables(self, measured: Sequence[Record]) -> list[Table]:
        """Those that have rows; the first without any where none has."""
        candidates = [filled(table(measured), self.text_columns) for table in (self.table, self.also)]
        return [table for table in candidates if table[1]] or candidates[:1]


#: The section of a record.
SectionOf = Callable[[Record], Section]


def plain(op: str) -> Section:
    """The records of one operation."""
    return Section(op.replace("_", " ").capitalize(), plain_table, figures.of_any, _ratio_said, text_columns=3)


def _ratio_said(measured: Sequence[Record]) -> Sequence[str]:
    has_16_bit = any(r.formats in ("bf16", "fp16") for r in measured)
    return ("vs 16-bit: time over that of the fastest 16-bit implementation; below 1 is faster.",) if has_16_bit else ()


def by_section(measured: Sequence[Record], section_of: SectionOf) -> list[tuple[Section, list[Record]]]:
    """The records by section, in the order in which sections first occur."""
    sections: dict[str, tuple[Section, list[Record]]] = {}
    for r in measured:
        section = section_of(r)
        sections.setdefault(section.title, (section, []))[1].append(r)
    return list(sections.values())


def show(session: Session, section: Section) -> None:
    """Print the table of a session's records, its notes and sentences, and how many targets were met."""
    records = session.records
    if not records or session.options.json:
        return
    session.show_tables(f"{section.title} on {session.device.name}", section.tables(records), section.text_columns)
    for r in records:
        if r.note:
            session.say(f"{r.case} {r.formats}: {r.note}")
    for sentence in section.says(records):
        session.say(sentence)
    if any(r.bars for r in records):
        session.say(count_text(records))
