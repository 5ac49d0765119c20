"""Two sets of records, compared: what became faster or slower by more than its samples vary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from halfbyte_lab.measure.records import Record
from halfbyte_lab.measure.tables import describe_shape

Verdict = Literal["faster", "slower", "same", "within noise", "refused now", "refused before", "changed", "new", "gone"]
Key = tuple[str, ...]

#: The smallest change that is reported, whatever the samples say: clocks and memory vary by as much from day to day.
LEAST = 0.02
#: A perplexity that moves by less is that of another order of sums.
_ROUNDING = 1e-3
#: Sizes in a record's shape that are results or choices of a plan, not part of the case.
_FOUND = {"programs", "resident", "registers", "warps", "SMs", "launches", "splits", "stages", "tile", "rung"}


def device_of(r: Record) -> str:
    """The machine of a record; on a CPU its threads too."""
    where = r.environment
    return where.device if where.driver else f"{where.device}, {where.threads} thread{'s' * (where.threads != 1)}"


def key(r: Record) -> Key:
    """What two records of the same thing share."""
    return (device_of(r), r.study, r.op, r.case, describe_shape(_asked(r)), r.formats, r.implementation)


def _asked(r: Record) -> dict[str, int]:
    """The sizes of a case, without results such as the contexts that fit."""
    return {name: size for name, size in sorted(r.shape.items()) if name not in _FOUND and r.op != "memory"}


def job_key(r: Record) -> Key:
    """What the records of one job share. Records of before jobs were written down know their case."""
    return (device_of(r), r.study, r.job or f"{r.op}: {r.case}")


def latest(measured: Sequence[Record]) -> list[Record]:
    """The last record of each thing by date, and by place where dates are the same, in the order in which things first occur.

    A job that failed as a whole stands for all that it would have measured: it replaces what earlier runs of the job measured, and
    is replaced by what later ones do.
    """
    last: dict[Key, Record] = {}
    for r in measured:
        previous = last.get(key(r))
        if previous is None or r.environment.date >= previous.environment.date:
            last[key(r)] = r
    ends: dict[tuple[Key, bool], str] = {}
    for r in last.values():
        how = (job_key(r), r.of_whole_job)
        ends[how] = max(ends.get(how, ""), r.environment.date)
    return [r for r in last.values() if ends.get((job_key(r), not r.of_whole_job), "") <= r.environment.date]


@dataclass(frozen=True)
class Change:
    """One thing before and after; `ratio` is its time after over its time before."""

    before: Record | None
    after: Record | None

    @property
    def record(self) -> Record:
        """The record that says best what this is of: the later one, unless its job failed as a whole."""
        sides = [r for r in (self.after, self.before) if r is not None]
        return next((r for r in sides if not r.of_whole_job), sides[0])

    @property
    def ratio(self) -> float | None:
        """Time after over time before; None where one of them has none."""
        if self.before and self.after and self.before.seconds and self.after.seconds:
            return self.after.seconds / self.before.seconds
        return None

    @property
    def verdict(self) -> Verdict:
        """What changed. A time is faster or slower when p10 - p90 of before and after do not overlap and the medians differ by
        more than 2 %; samples that overlap are within noise, and medians that differ less are the same. What was not timed is
        changed when a count is another, or its error, perplexity or bits differ by more than rounding.
        """
        if self.before is None:
            return "new"
        if self.after is None:
            return "gone"
        if self.ratio is None:
            if bool(self.before.refused) == bool(self.after.refused):
                is_comparable = bool(self.before.seconds) == bool(self.after.seconds)
                return "same" if self.before.refused or (is_comparable and _counts_alike(self.before, self.after)) else "changed"
            return "refused now" if self.after.refused else "refused before"
        if abs(self.ratio - 1) <= LEAST:
            return "same"
        if _overlap(self.before, self.after):
            return "within noise"
        return "faster" if self.ratio < 1 else "slower"

    @property
    def marked(self) -> bool:
        """Whether a reader should look at it."""
        return self.verdict not in ("same", "within noise")


def _counts_alike(a: Record, b: Record) -> bool:
    """Whether bytes, sizes that came out and bars that were met are the same, and figures of quality as good as the same."""
    if (a.shape, a.nbytes, [v.met for v in a.bars]) != (b.shape, b.nbytes, [v.met for v in b.bars]):
        return False
    errors = zip((a.error, *a.by_layer), (b.error, *b.by_layer), strict=False)
    alike = all(_close(x, y, LEAST) for x, y in errors) and len(a.by_layer) == len(b.by_layer)
    return alike and _close(a.perplexity, b.perplexity, _ROUNDING) and _close(a.bits, b.bits, _ROUNDING)


def _close(a: float | None, b: float | None, share: float) -> bool:
    """Whether two figures are within a share of the larger one, or both are not known."""
    return a == b if a is None or b is None else math.isclose(a, b, rel_tol=share)


def _overlap(a: Record, b: Record) -> bool:
    """Whether the samples of two times lie in each other's range; a time without a range is a point."""
    (a0, a1), (b0, b1) = (((r.p10 or r.seconds or 0.0), (r.p90 or r.seconds or 0.0)) for r in (a, b))
    return a0 <= b1 and b0 <= a1


def changes(before: Sequence[Record], after: Sequence[Record]) -> list[Change]:
    """Everything that either set has measured: what changed most first, then what did not."""
    old, new = ({key(r): r for r in latest(records)} for records in (before, after))
    failed_before, failed_now = ({job_key(r): r for r in group.values() if r.of_whole_job} for group in (old, new))
    of = {k: job_key(r) for k, r in {**new, **old}.items()}
    pairs = [Change(old.get(k) or failed_before.get(job), new.get(k) or failed_now.get(job)) for k, job in of.items()]
    jobs = {job_key(c.record) for c in pairs if not c.record.of_whole_job}
    # What a failed job would have measured tells of its failure already.
    pairs = [c for c in pairs if not (c.record.of_whole_job and job_key(c.record) in jobs)]
    return sorted(pairs, key=lambda c: (not c.marked, -abs((c.ratio or 1.0) - 1)))
