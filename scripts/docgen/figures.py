"""Single figures for sentences: each is made from records, from what ships with the library or, for one, from the log."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

from docgen.sources import DATA, LOG, MEAN_GAIN, PEAK_GAIN, Record, attention, cpu, demo, linear, tables
from docgen.summary import find, speedup
from halfbyte.formats import KV_FORMATS, WEIGHT_FORMATS


def _span(values: Iterable[float], digits: int, unit: str) -> str:
    found = sorted(values)
    first, last = (f"{value:.{digits}f}" for value in (found[0], found[-1]))
    return f"{first}{unit}" if first == last else f"{first}-{last}{unit}"


# ------------------------------------------------------------------------------------------------------------------ the GPU


def _roofline(formats: str) -> str:
    """Share of the read roofline in the cases of the README's chart."""
    shares = (100 * (find(attention(), f"batch {batch} x 8,192", formats).roof_share or 0.0) for batch in (32, 128, 512))
    return _span(shares, 0, " %")


def _many_rows(rows: int) -> str:
    """Speed-up over 16 bits with so many query rows per KV head, over all formats."""
    return _span((speedup(r) for r in attention() if r.case.startswith(f"{rows} rows") and r.peer_seconds), 1, "x")


def _largest_m(least_size: int = 0) -> str:
    """The largest batch size M up to which every measured INT4 layer of that size or larger beats cuBLAS."""
    ours = [r for r in linear() if r.formats == "int4_sym_g128" and r.peer_seconds and _size(r) >= least_size]
    slower = min((r.shape["M"] for r in ours if speedup(r) < 1), default=1 << 30)
    return str(max(r.shape["M"] for r in ours if r.shape["M"] < slower))


def _size(r: Record) -> int:
    return r.shape["N"] * r.shape["K"]


def _host_time() -> str:
    """Host time of an eager call, from the fastest op to the slowest."""
    return _span((1e6 * r.seconds for r in tables.gpu_records() if r.case.startswith("host time") and r.seconds), 0, " us")


def _plans() -> list[dict[str, Any]]:
    """The measured plans that ship."""
    found: list[dict[str, Any]] = json.loads((DATA / "plans" / "nvidia-h200.json").read_text(encoding="utf-8"))["entries"]
    return found


def _tuned_gain() -> str:
    """How much faster the plans are that replace an analytic one."""
    return _span((100 * (entry["analytic us"] / entry["us"] - 1) for entry in _plans() if entry["choice"]), 1, " %")


# ------------------------------------------------------------------------------------------------------------------ a CPU


def _cpu_times(op: str) -> list[list[dict[str, Any]]]:
    """Records of an op, shape by shape."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for r in cpu():
        if r["op"] == op:
            groups.setdefault(str(r["shape"]), []).append(r)
    return list(groups.values())


def _cpu_slowdown(op: str) -> str:
    """How many times as long as torch's fastest 16-bit operator halfbyte takes on a CPU."""
    ratios = []
    for same in _cpu_times(op):
        best = min(r["seconds"] for r in same if r["implementation"].startswith("torch"))
        ratios += [r["seconds"] / best for r in same if not r["implementation"].startswith("torch")]
    return _span(ratios, 1, "x")


def _gqa_slowdown() -> str:
    """How many times as long torch's grouped attention takes as the same with the group folded into query rows."""
    timed = [{r["implementation"]: r["seconds"] for r in same} for same in _cpu_times("decode_attention")]
    return _span((found["torch sdpa"] / found["torch sdpa, folded heads"] for found in timed), 1, "x")


def _demo_minutes() -> str:
    """Time of the evaluations of `halfbyte demo`, as its own records have it."""
    measured: list[dict[str, Any]] = demo()
    return f"{sum(r['seconds'] for r in measured) / 60:.0f} minutes"


# ---------------------------------------------------------------------------------------------------------- what ships


def _parameters() -> str:
    """Parameters of the shipped model, in millions."""
    with (DATA / "tiny" / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return f"{sum(prod(t['shape']) for name, t in header.items() if name != '__metadata__') / 1e6:.1f}"


# ---------------------------------------------------------------------------------------------- the whole model, from the log


def _whole_model(what: str) -> str:
    """A figure of the whole model. No record exists, so every page takes it from the log."""
    text = LOG.read_text(encoding="utf-8")
    found = re.search(
        r"(?P<plain>[\d.]+) ms a step in bf16, (?P<packed>[\d.]+) with halfbyte.* The (?P<gb>[\d.]+) GB that a bf16 step reads "
        r"could be read in (?P<least>[\d.]+) ms",
        text,
    )
    if not found:
        raise SystemExit(f"{LOG} no longer has the step of the whole model")
    if what == "ratio":
        return f"{float(found['plain']) / float(found['packed']):.2f}x"
    return found[what] + (" GB" if what == "gb" else " ms")


FIGURES: dict[str, Callable[[], str]] = {
    "cpu_attention": lambda: _cpu_slowdown("decode_attention"),
    "cpu_gqa": _gqa_slowdown,
    "cpu_linear": lambda: _cpu_slowdown("linear"),
    "demo_minutes": _demo_minutes,
    "host_us": _host_time,
    "kv_formats": lambda: str(len(KV_FORMATS)),
    "largest_m": _largest_m,
    "largest_m_8192": lambda: _largest_m(8192**2),
    "parameters": _parameters,
    "plans": lambda: str(len(_plans())),
    "plans_gain": _tuned_gain,
    "plans_tuned": lambda: str(sum(bool(entry["choice"]) for entry in _plans())),
    "roofline_int4": lambda: _roofline("int4"),
    "roofline_int8": lambda: _roofline("int8"),
    "rows_64": lambda: _many_rows(64),
    "rows_128": lambda: _many_rows(128),
    "split_k_mean": lambda: f"{100 * (MEAN_GAIN - 1):.0f} %",
    "split_k_peak": lambda: f"{100 * (PEAK_GAIN - 1):.0f} %",
    "step_bytes": lambda: _whole_model("gb"),
    "step_least": lambda: _whole_model("least"),
    "step_packed": lambda: _whole_model("packed"),
    "step_plain": lambda: _whole_model("plain"),
    "step_ratio": lambda: _whole_model("ratio"),
    "weight_formats": lambda: str(len(WEIGHT_FORMATS)),
}
