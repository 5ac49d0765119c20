"""Single figures for sentences: each is made from records, or from what ships with the library."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

from docgen import pictures, users
from docgen.first_hour import latest
from docgen.sources import DATA, MEAN_GAIN, PEAK_GAIN, Record, attention, calibrated_table, cpu, linear, step, tables
from docgen.summary import alone, find, speedup
from halfbyte.device import DATASHEETS
from halfbyte.formats import KV_FORMATS, WEIGHT_FORMATS
from halfbyte.settings import HALVES


def _span(values: Iterable[float], digits: int, unit: str) -> str:
    found = sorted(values)
    first, last = (f"{value:.{digits}f}" for value in (found[0], found[-1]))
    return f"{first}{unit}" if first == last else f"{first}-{last}{unit}"


# ------------------------------------------------------------------------------------------------------------------ the GPU


def _roofline(formats: str) -> str:
    """Share of the read roofline in the cases of the README's chart."""
    measured = (find(attention(), f"batch {batch} x 8,192", formats) for batch in (32, 128, 512))
    return _span((100 * (r.roof_share or 0.0) * (r.seconds or 0.0) / alone(r) for r in measured), 0, " %")


def _many_rows(rows: int) -> str:
    """Speed-up over 16 bits with so many query rows per KV head, over all formats."""
    return _span((speedup(r) for r in attention() if r.case.startswith(f"{rows} rows") and r.peer_seconds), 1, "x")


def _largest_m(least_size: int = 0) -> str:
    """The largest batch size M up to which every measured INT4 layer of that size or larger beats cuBLAS."""
    ours = [r for r in linear() if r.formats == "int4_sym_g128" and r.peer_seconds and _size(r) >= least_size]
    slower = min((r.shape["M"] for r in ours if speedup(r) < 1), default=1 << 30)
    return str(max(r.shape["M"] for r in ours if r.shape["M"] < slower))


def _at_prompts(*formats: str) -> str:
    """Speed-up over cuBLAS of layers with M of 1,024 and more."""
    ours = (r for r in linear() if r.formats in formats and r.shape["M"] >= 1024 and r.peer_seconds)
    return _span(map(speedup, ours), 2, "x")


def _size(r: Record) -> int:
    return r.shape["N"] * r.shape["K"]


def _host_time() -> str:
    """Host time of an eager call, from the fastest op to the slowest."""
    return _span((1e6 * r.seconds for r in tables.gpu_records() if r.case.startswith("host time") and r.seconds), 0, " us")


# ------------------------------------------------------------------------------------------------------------------ a CPU


def _cpu_times(op: str) -> list[list[dict[str, Any]]]:
    """Records of an op, shape by shape of a run."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for r in cpu():
        if r["op"] == op:
            own = r["environment"]
            groups.setdefault((str(r["shape"]), own["device"], own["command"]), []).append(r)
    return list(groups.values())


def _cpu_slowdown(op: str) -> str:
    """How many times as long as torch's fastest 16-bit operator halfbyte takes on a CPU."""
    ratios = []
    for same in _cpu_times(op):
        best = min(r["seconds"] for r in same if r["formats"] in HALVES)
        ratios += [r["seconds"] / best for r in same if r["implementation"].startswith("halfbyte")]
    return _span(ratios, 1, "x")


def _gqa_slowdown() -> str:
    """How many times as long torch's grouped attention takes as the same with the group folded into query rows."""
    timed = [{r["implementation"]: r["seconds"] for r in same} for same in _cpu_times("decode_attention")]
    return _span((found["torch sdpa"] / found["torch sdpa, folded heads"] for found in timed), 1, "x")


# ---------------------------------------------------------------------------------------------------------- what ships


def _parameters() -> str:
    """Parameters of the shipped model, in millions."""
    with (DATA / "tiny" / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return f"{sum(prod(t['shape']) for name, t in header.items() if name != '__metadata__') / 1e6:.1f}"


# -------------------------------------------------------------------------------------------------------- whole models


def _floor(gpu: str) -> str:
    """The least time in which a GPU reads what a step of Llama 3 8B with one sequence moves."""
    nbytes = next(r.nbytes for r in tables.study_records("step") if (r.case, r.implementation) == ("8b-1", step.FASTEST))
    return f"{1e3 * nbytes / (DATASHEETS[gpu].bytes_per_second or 1.0):.1f} ms"


def _fitting(kept: int) -> str:
    """Sequences of Llama 3 8B that 24 GB hold, as the README's picture draws them."""
    return str(pictures.fitting()[24][kept][-1])


def _less_by_calibration() -> str:
    """How much less calibrated weights diverge, in %, from the least to the most."""
    return _span((float(row[-1]) for row in calibrated_table(tables.study_records("evidence"))[1]), 0, " %")


def _demo_time() -> str:
    """What `halfbyte demo` takes where other processes keep two cores busy."""
    return f"{latest()['halfbyte demo']['seconds']:.0f} s"


FIGURES: dict[str, Callable[[], str]] = {
    "calibrated": _less_by_calibration,
    "cpu_attention": lambda: _cpu_slowdown("decode_attention"),
    "cpu_gqa": _gqa_slowdown,
    "cpu_linear": lambda: _cpu_slowdown("linear"),
    "demo_time": _demo_time,
    "fits_16_bits": lambda: _fitting(0),
    "fits_default": lambda: _fitting(2),
    "floor_4090": lambda: _floor("rtx-4090"),
    "families": lambda: str(tables.served_families()),
    "host_us": _host_time,
    "kv_formats": lambda: str(len(KV_FORMATS)),
    "largest_m": _largest_m,
    "largest_m_8192": lambda: _largest_m(8192**2),
    "parameters": _parameters,
    "prompt_int4": lambda: _at_prompts("int4_sym_g128", "int4_g128"),
    "prompt_int8_x": lambda: _at_prompts("int4_g128_a8"),
    "roofline_int4": lambda: _roofline("int4"),
    "roofline_int8": lambda: _roofline("int8"),
    "rows_64": lambda: _many_rows(64),
    "rows_128": lambda: _many_rows(128),
    "split_k_mean": lambda: f"{100 * (MEAN_GAIN - 1):.0f} %",
    "split_k_peak": lambda: f"{100 * (PEAK_GAIN - 1):.0f} %",
    "vllm_16_bits": lambda: f"{users.stock_step('8x8192')[1]:.2f} ms",
    "weight_formats": lambda: str(len(WEIGHT_FORMATS)),
}
