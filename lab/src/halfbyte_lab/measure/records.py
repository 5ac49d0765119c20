"""Measurements on disk: one JSON object a line, appended and flushed to the disk one by one, never overwritten."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from halfbyte.errors import HalfbyteError, InvalidArgument
from halfbyte.paths import append_line
from halfbyte_lab.measure.checks import Accuracy
from halfbyte_lab.measure.environment import Environment
from halfbyte_lab.measure.timing import Timing


class DamagedRecords(HalfbyteError, ValueError):
    """A file of records holds a line that is no record, not at its end."""


#: What reading a line that is no record runs into; the last is of brackets in brackets in brackets.
_DAMAGE = (ValueError, TypeError, KeyError, RecursionError)


@dataclass(frozen=True)
class Verdict:
    """One target and what was measured: `quantity` and `bound` as in `Target`; `value` None: no figure."""

    quantity: str
    bound: float
    value: float | None
    met: bool


@dataclass(frozen=True)
class Record:
    """One figure. A refused or skipped measurement has `refused` set and no time.

    seconds, p10, p90  seconds per call: median, 10th and 90th percentile of `repeats` samples
    nbytes             bytes a call must move at least: what is read and written once
    gb_per_s           nbytes / seconds, in 10^9 bytes per second; roof_gb_per_s: reading as many bytes, in the same run
    kernel_seconds     the kernels of a call, traced call by call, without what lies between them: the median over calls of their
                       sum, as CUPTI records them; None where they were not traced. kernels: the same for each launch of several
    error              against float64; `error_allowed` by the accuracy promise; `error_kind` says which measure

    Cases with bars have a name, `case`, and several times. `seconds`, which the bars judge, is `paired` where there is one:
    alone, chained     seconds of one call after the other: launches in sequence, launches overlapping
    paired, appends    each call follows the append of one token, launches overlapping, less a chain of such appends alone
    peer, peer_seconds the fastest 16-bit implementation of the same case in the same run
    note               what the figure does not say by itself
    study              the study it belongs to, by its name in `halfbyte_lab.studies`
    job                what measured it, "operation: name"; a job that failed as a whole leaves one record that knows nothing else
    perplexity, change of a model, and in % of its 16-bit self's; bits: an element of what is quantized takes, scales included
    by_layer           relative error layer by layer, of hidden states or of attention's output
    noise              two standard errors of `error`; top1: share of tokens where both expect the same next one
    by_position        `error` in each quarter of a text
    """

    op: str
    shape: dict[str, int]
    formats: str
    implementation: str
    nbytes: int
    environment: Environment
    seconds: float | None = None
    p10: float | None = None
    p90: float | None = None
    repeats: int = 0
    method: str = ""
    gb_per_s: float | None = None
    roof_gb_per_s: float | None = None
    roof_share: float | None = None
    kernel_seconds: float | None = None
    kernels: dict[str, float] = field(default_factory=dict)
    error: float | None = None
    error_allowed: float | None = None
    error_kind: str = ""
    refused: str = ""
    case: str = ""
    alone: float | None = None
    chained: float | None = None
    paired: float | None = None
    appends: float | None = None
    peer: str = ""
    peer_seconds: float | None = None
    bars: tuple[Verdict, ...] = ()
    note: str = ""
    study: str = ""
    job: str = ""
    perplexity: float | None = None
    change: float | None = None
    bits: float | None = None
    by_layer: tuple[float, ...] = ()
    noise: float | None = None
    top1: float | None = None
    by_position: tuple[float, ...] = ()

    @property
    def of_whole_job(self) -> bool:
        """Whether this says that a job failed before it knew what it measures."""
        return bool(self.refused) and not (self.shape or self.formats or self.implementation)

    def to_json(self) -> str:
        """One line of JSON, without a line break."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, sort_keys=True)

    @staticmethod
    def from_json(line: str, before: Record | None = None) -> Record:
        """The inverse of `to_json`. Raises one of `_DAMAGE` on anything else. A line without environment has that of `before`."""
        data: dict[str, Any] = json.loads(line)
        where = before.environment if before and "environment" not in data else Environment(**data["environment"])
        whole = {"bars": (), "by_layer": (), "by_position": (), **data, "environment": where}
        bars = tuple(Verdict(**verdict) for verdict in whole["bars"])
        tuples = {"bars": bars, **{name: tuple(whole[name]) for name in ("by_layer", "by_position")}}
        record = Record(**{**whole, "shape": whole["shape"], **tuples})  # without a shape: a KeyError, which names it
        parts: tuple[Record | Environment | Verdict, ...] = (record, record.environment, *bars)
        for part in parts:
            _check_types(part)
        return record


def with_accuracy(record: Record, accuracy: Accuracy) -> Record:
    """The record with the error."""
    return replace(record, error=accuracy.error, error_allowed=accuracy.allowed, error_kind=accuracy.kind)


def with_timing(record: Record, timing: Timing, accuracy: Accuracy) -> Record:
    """The record with the time that is judged and the error."""
    times = {"seconds": timing.median, "p10": timing.p10, "p90": timing.p90, "repeats": timing.repeats, "method": timing.method}
    return replace(with_accuracy(record, accuracy), **times)  # type: ignore[arg-type]


#: What a field may hold, by its annotation; one that is not here is what `from_json` has made.
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "float | None": (int, float, type(None)),
}
_MAPPING, _TUPLE = re.compile(r"dict\[str, (\w+)\]"), re.compile(r"tuple\[(\w+), \.\.\.\]")


def _check_types(part: Record | Environment | Verdict) -> None:
    """Raise TypeError for a field of another type: its figures would be shown wrongly, or not at all."""
    for f in dataclasses.fields(part):
        if not _holds(getattr(part, f.name), str(f.type)):
            raise TypeError(f"{f.name} is {_short(getattr(part, f.name))}; expected {f.type}")


def _holds(value: Any, kind: str) -> bool:
    """Whether a value is of the type that an annotation names; what does not fit 64 bits is no number of a measurement."""
    if match := _MAPPING.fullmatch(kind):
        return isinstance(value, dict) and all(_holds(one, match[1]) for one in value.values())
    if match := _TUPLE.fullmatch(kind):
        return all(_holds(one, match[1]) for one in value)
    types = _TYPES.get(kind)
    if types is None or isinstance(value, bool):
        return types is None or bool in types
    return isinstance(value, types) and (not isinstance(value, int) or -(2**63) <= value < 2**63)


def _short(value: Any) -> str:
    """A value, or as much of it as fits a line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True)
class Records:
    """What a file held. `notice` is "" or says that a last line, cut by a kill, was skipped."""

    records: list[Record] = field(default_factory=list)
    notice: str = ""


def append(path: Path | str, records: list[Record]) -> str:
    """Append records, each on the disk before the next, so that a kill loses one line at most. Returns a notice or "".

    A last line that an earlier kill cut is removed first: it cannot be read, and gluing a record to it would damage that one too.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    notice = _close_last_line(path)
    for record in records:
        append_line(path, record.to_json())
    return notice


def read(path: Path | str) -> Records:
    """All records of a file. A cut last line is skipped and named in `notice`; damage anywhere else raises `DamagedRecords`."""
    lines = Path(path).read_bytes().split(b"\n")
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records.append(Record.from_json(line.decode(), records[-1] if records else None))
        except _DAMAGE as error:
            if number == len(lines):  # no line break after it: the write did not finish
                return Records(records, f"{path}: the last line ({len(line)} bytes) was cut while being written; skipped")
            raise DamagedRecords(f"{path}, line {number}: {_told(line, error)}") from error
    return Records(records)


def _told(line: bytes, error: Exception) -> str:
    """What a line is that is no record."""
    with contextlib.suppress(*_DAMAGE):
        data = json.loads(line)
        if isinstance(data, dict) and {"kv", "perplexity"} <= data.keys():
            return "a result of `halfbyte demo` or `halfbyte eval` and no record of the bench; their option --html writes a page"
    missing = f"it has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
    return f"not a record, as `halfbyte bench ... --output` writes them ({missing})"


def read_all(paths: Sequence[Path]) -> tuple[list[Record], list[str]]:
    """The records of several files, and notices of cut last lines. Raises `InvalidArgument` for a missing or an empty file."""
    records: list[Record] = []
    notices: list[str] = []
    for path in paths:
        if not path.is_file():
            raise InvalidArgument(
                f"{str(path)!r} is not a file; give files of records, as `halfbyte bench ... --output` writes them"
            )
        content = read(path)
        notices += [content.notice] if content.notice else []
        if not content.records:
            raise InvalidArgument(f"{str(path)!r} holds no record" + (f" ({content.notice})" if content.notice else ""))
        records += content.records
    return records, notices


def _close_last_line(path: Path) -> str:
    """Make the file end with a line break: complete a whole record, cut off a partial one."""
    if not path.exists() or not (data := path.read_bytes()) or data.endswith(b"\n"):
        return ""
    keep = data.rfind(b"\n") + 1
    try:
        Record.from_json(data[keep:].decode())
    except _DAMAGE:
        os.truncate(path, keep)
        return f"{path}: removed a last line of {len(data) - keep} bytes that was cut while being written"
    with path.open("ab") as file:
        file.write(b"\n")
    return ""
