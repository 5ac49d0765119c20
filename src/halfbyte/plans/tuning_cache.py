"""Measured GEMM plans (`python -m halfbyte_lab tune`): a table for each type of GPU, keyed by the fields of a problem.

A table holds choices (`tuning_space.py`), never plans. A choice must pass the same checks as plans; if it fails, or a table has no
entry for a problem, the analytic plan is used. So a table can make a call slow, but never wrong.
"""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.device import GPU
from halfbyte.errors import HalfbyteError
from halfbyte.paths import own_plans
from halfbyte.plans.gemm import tuned_gemm
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.plans.kv_codec import padded
from halfbyte.plans.tuning_space import LinearChoice, with_linear_choice
from halfbyte.settings import stored_plans

#: Up to this M, kernels round M up to a power of two; beyond, to a multiple of this.
_BLOCK_ROWS = 64
#: Version of stored choices. Raise it when a change of kernels or plans invalidates older measurements.
VERSION = 2


class DamagedPlans(HalfbyteError, ValueError):
    """A file is not a table of measured plans for this GPU and version."""


def key_of(p: GemmProblem) -> str:
    """The fields of a problem, with M rounded up as the kernels do, as one line of JSON."""
    rows = padded(p.rows) if p.rows <= _BLOCK_ROWS else -(-p.rows // _BLOCK_ROWS) * _BLOCK_ROWS
    weights = [((fmt if p.rounds_x else fmt.exact).name, n) for fmt, n in p.weights]
    return json.dumps({"op": "linear", "weights": weights, "rows": rows, "width": p.width, "half": p.half}, sort_keys=True)


@dataclass(frozen=True)
class TunedEntry:
    """One problem that was measured. `choice` None: nothing was faster than the analytic plan.

    seconds, analytic_seconds  time of a call, with the choice and with the analytic plan
    date                       of the measurement, such as 2026-11-22
    file                       what it was read from; "" before it is stored
    """

    choice: LinearChoice | None
    seconds: float
    analytic_seconds: float
    date: str
    file: str = ""


@dataclass(frozen=True)
class Table:
    """Measured plans for GPUs of one type, by `key_of` their problem. `made_with`: versions; `note`: why there are none."""

    gpu: str
    num_sms: int
    entries: Mapping[str, TunedEntry] = field(default_factory=dict)
    made_with: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


#: For a GPU that is described by numbers only.
NO_TABLE = Table("", 0, note="no plans are stored for a GPU that is described by numbers")


# ------------------------------------------------------------------------------------------------------- plans by a table


def plan_by_table(p: GemmProblem, gpu: GPU, use_pdl: bool, table: Table) -> tuple[GemmPlan | str, str]:
    """`tuned_gemm` with the table's choice, if there is one, and where the plan comes from, in words. No table has experts."""
    plan = tuned_gemm(p, gpu, use_pdl)
    entry = None if p.routing else table.entries.get(key_of(p))
    if isinstance(plan, str) or entry is None or entry.choice is None:
        return plan, _analytic(entry, table)
    choice = with_linear_choice(plan, entry.choice, p, gpu)
    return (plan, _unfit(entry, choice)) if isinstance(choice, str) else (choice, _tuned(entry, table))


def _tuned(entry: TunedEntry, table: Table) -> str:
    times = f"{1e6 * entry.seconds:.2f} us where the analytic plan took {1e6 * entry.analytic_seconds:.2f}"
    return f"tuned for {table.gpu} ({_source(entry)}): {times}"


def _analytic(entry: TunedEntry | None, table: Table) -> str:
    if entry is not None and entry.choice is None:
        return f"analytic (nothing else was faster: {_source(entry)})"
    return f"analytic ({table.note or f'no entry for this problem, of {len(table.entries)} for {table.gpu}'})"


def _unfit(entry: TunedEntry, why: str) -> str:
    return f"analytic (the entry of {_source(entry)} does not fit: {why})"


def _source(entry: TunedEntry) -> str:
    return f"{entry.file}, {entry.date}"


# ------------------------------------------------------------------------------------------------------------------ files


def table_of(gpu: str, num_sms: int) -> Table:
    """What `python -m halfbyte_lab tune` stored for GPUs of this name and size.

    An unusable file is skipped, with a warning the first time.
    """
    return _table_of(gpu, num_sms, stored_plans(), str(own_plans(gpu)))


@functools.cache
def _table_of(gpu: str, num_sms: int, setting: str, own: str) -> Table:
    if setting == "0":
        return Table(gpu, num_sms, note="HALFBYTE_PLANS=0")
    file = Path(setting or own)
    if not file.exists():
        return Table(gpu, num_sms, note=f"nothing is stored for {gpu}")
    try:
        table = read(file)
        check_gpu(table, gpu, num_sms, str(file))
    except (DamagedPlans, OSError) as error:
        warnings.warn(f"halfbyte: measured plans are left out: {error}; measure them again", stacklevel=2)
        return Table(gpu, num_sms, note=str(error))
    return Table(gpu, num_sms, table.entries)


def check_gpu(found: Table, gpu: str, num_sms: int, file: str) -> None:
    """Raise `DamagedPlans` unless a table is for this GPU."""
    if (found.gpu, found.num_sms) != (gpu, num_sms):
        was = f"{found.gpu} with {found.num_sms} multiprocessors"
        raise DamagedPlans(f"{file} is of {was} and this is {gpu} with {num_sms}")


def read(file: Path) -> Table:
    """The table in a file. Raises `DamagedPlans` for anything else, and for a table of other versions of the plans."""
    try:
        data = json.loads(file.read_bytes())
        if data["halfbyte plans"] != VERSION:
            raise DamagedPlans(f"{file} is of version {data['halfbyte plans']!r} of the plans and this is {VERSION}")
        rows = [one for one in data["entries"] if one["problem"]["op"] != "decode_attention"]  # which older versions stored
        entries = {_key(one["problem"]): _entry(one, str(file)) for one in rows}
        return Table(str(data["gpu"]), _whole(data["multiprocessors"]), entries, dict(data["made with"]))
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        if isinstance(error, DamagedPlans):
            raise
        raise DamagedPlans(f"{file} is no table of measured plans ({type(error).__name__}: {error})") from error


def _key(problem: Mapping[str, Any]) -> str:
    if problem["op"] != "linear":
        raise ValueError(f"op {problem['op']!r}")
    return json.dumps(dict(problem), sort_keys=True)


def _entry(data: Mapping[str, Any], file: str) -> TunedEntry:
    choice = None
    if data["choice"] is not None:
        choice = LinearChoice(**{name: _whole(value) for name, value in data["choice"].items()})
    seconds, analytic = (float(data[name]) / 1e6 for name in ("us", "analytic us"))
    if not (math.isfinite(seconds) and math.isfinite(analytic)):
        raise ValueError("a time is not finite")
    return TunedEntry(choice, seconds, analytic, str(data["date"]), file)


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no whole number")
    return value
