"""Two sets of records held against each other: what became faster or slower by more than its samples vary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from halfbyte.bench.records import Record
from halfbyte.bench.session import describe_shape

Verdict = Literal["faster", "slower", "same", "within noise", "refused now", "refused before", "changed", "new", "gone"]
Key = tuple[str, ...]

#: A change is told from this part of the time on, whatever the samples say: clocks and memory differ by as much from day to day.
LEAST = 0.02
#: Sizes in a record's shape that say how it ran or what came out, and not what was asked: a new plan changes them.
_FOUND = {"programs", "resident", "SMs", "launches", "splits", "rung"}


def device_of(r: Record) -> str:
    """The machine of a record; on a CPU its threads too."""
    where = r.environment
    return where.device if where.driver else f"{where.device}, {where.threads} threads"


def key(r: Record) -> Key:
    """What two records of the same thing share."""
    return (device_of(r), r.study, r.op, r.case, describe_shape(_asked(r)), r.formats, r.implementation)


def _asked(r: Record) -> dict[str, int]:
    """The sizes of what was asked; contexts that fit, of the study of memory, are an answer."""
    return {name: size for name, size in sorted(r.shape.items()) if name not in _FOUND and r.op != "memory"}


def latest(measured: Sequence[Record]) -> list[Record]:
    """The last record of each thing by date, and by place where dates are the same, in the order in which things first occur."""
    last: dict[Key, Record] = {}
    for r in measured:
        known = last.get(key(r))
        if known is None or r.environment.date >= known.environment.date:
            last[key(r)] = r
    return list(last.values())


@dataclass(frozen=True)
class Change:
    """One thing before and after; `ratio` is its time after over its time before."""

    before: Record | None
    after: Record | None

    @property
    def record(self) -> Record:
        """Either record, to say what this is of."""
        found = self.after or self.before
        assert found is not None
        return found

    @property
    def ratio(self) -> float | None:
        """Time after over time before; None where one of them has none."""
        if self.before and self.after and self.before.seconds and self.after.seconds:
            return self.after.seconds / self.before.seconds
        return None

    @property
    def verdict(self) -> Verdict:
        """What changed. A time is faster or slower when p10 - p90 of before and after do not overlap and the medians are more than
        2 % apart; samples that overlap are within noise, medians that are not apart the same. What was counted and not timed is
        changed when a count is another.
        """
        if self.before is None:
            return "new"
        if self.after is None:
            return "gone"
        if self.ratio is None:
            if bool(self.before.refused) == bool(self.after.refused):
                return "same" if self.before.seconds or self.after.seconds or self._counts_alike else "changed"
            return "refused now" if self.after.refused else "refused before"
        if abs(self.ratio - 1) <= LEAST:
            return "same"
        if _overlap(self.before, self.after):
            return "within noise"
        return "faster" if self.ratio < 1 else "slower"

    @property
    def _counts_alike(self) -> bool:
        """Whether bytes, and with them the sizes that came out, are the same before and after."""
        return bool(self.before and self.after and (self.before.shape, self.before.nbytes) == (self.after.shape, self.after.nbytes))

    @property
    def marked(self) -> bool:
        """Whether a reader should look at it."""
        return self.verdict not in ("same", "within noise")


def _overlap(a: Record, b: Record) -> bool:
    """Whether the samples of two times lie in each other's range; a time without a range is a point."""
    (a0, a1), (b0, b1) = (((r.p10 or r.seconds or 0.0), (r.p90 or r.seconds or 0.0)) for r in (a, b))
    return a0 <= b1 and b0 <= a1


def changes(before: Sequence[Record], after: Sequence[Record]) -> list[Change]:
    """Everything that either set has measured: what changed most first, then what did not."""
    old, new = ({key(r): r for r in latest(records)} for records in (before, after))
    found = [Change(old.get(k), new.get(k)) for k in {**new, **old}]
    return sorted(found, key=lambda c: (not c.marked, -abs((c.ratio or 1.0) - 1)))
