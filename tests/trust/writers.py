"""Everything in the library that writes files, made small: what the tests of full disks and of kills interrupt.

A writer can be called again after whatever happened to it, and then leaves exactly the files of an undisturbed run.
"""

from __future__ import annotations

import copy
import functools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tiny_models import base

import halfbyte.hf as hf
from halfbyte.cache_plan import CachePlan, LayerFormats, ModelSizes
from halfbyte.formats import weight_format
from halfbyte.paths import new_folder
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.plans.tuning_cache import Table, TunedEntry
from halfbyte_lab.evals.assignment import Sensitivity
from halfbyte_lab.evals.calibrate import Measurements
from halfbyte_lab.evals.card import Card
from halfbyte_lab.evals.suite import write as write_card
from halfbyte_lab.extract import Metadata, Projections
from halfbyte_lab.measure import records
from halfbyte_lab.report import Report
from halfbyte_lab.tune.search import Store

RESULTS = Path(__file__).parents[2] / "results" / "cpu.jsonl"
SIZES = ModelSizes("llama", 40, 2, 32, 32, 64)


def plan(folder: Path) -> None:
    CachePlan(SIZES, (LayerFormats("int8", "int4_g32"),) * 40, 6.0).write(folder / "plan.json")


def report(folder: Path) -> None:
    Report("A page").code("x" * 5000).write(folder / "page.html")


def card(folder: Path) -> None:
    write_card(Card("owner/name", SIZES, "a text", (8, 512), 16, 0, (), (), (32, 32), {}), folder / "card.json")


def measurements(folder: Path) -> None:
    """As `calibrate` does: what the file holds is not measured again."""
    kept = Measurements(folder / "plan.measured.jsonl", asdict(SIZES))
    for layer in range(len(kept.known), 30):
        kept.add(Sensitivity(layer, "keys", "int8", False, layer / 7))


def bench(folder: Path) -> None:
    file, made = folder / "bench.jsonl", records.read(RESULTS).records[:4]
    records.append(file, [])
    records.append(file, made[len(records.read(file).records) if file.exists() else 0 :])


def tuned_plans(folder: Path) -> None:
    store = Store(folder / "plans.json", Table("NVIDIA H200", 132))
    for m in range(1, 6):
        problem = GemmProblem(((weight_format("int4_g128"), 4096),), 16 * m, 4096, "bf16")
        store.add(problem, TunedEntry(None, 4e-6, 5e-6, "2026-11-22"))


def saved_model(folder: Path) -> None:
    if not (folder / "model").exists():
        hf.save(_quantized(), folder / "model")


def extract(folder: Path) -> None:
    if not (folder / "extract").exists():
        found = Projections(Metadata("m", 0, None, 4, 2, 8, 64, True), _normal(32, 16, 16), _normal(32, 16, 16, width=None))
        with new_folder(folder / "extract") as made:
            found.save(made)


WRITERS: dict[str, Callable[[Path], None]] = {
    write.__name__: write for write in (plan, report, card, measurements, bench, tuned_plans, saved_model, extract)
}


def files(folder: Path) -> dict[str, bytes]:
    """What a folder holds, but for the lock of measured plans."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock"}


@functools.cache
def finished(name: str, folder: Path) -> dict[str, bytes]:
    """The files of an undisturbed run in this empty folder."""
    WRITERS[name](folder)
    return files(folder)


@functools.cache
def _quantized() -> Any:
    return hf.quantize(copy.deepcopy(base("llama")), "int4_g32")


def _normal(*rows: int, width: int | None = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((n,) if width is None else (n, width), generator=rng) for n in rows)
    return q, k, v


def killed(write: Callable[[], None], when: Callable[[], bool]) -> bool:
    """Run something in a process of its own, killed as soon as `when` says so; whether that came before its end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            write()
            code = 0
        finally:
            os._exit(code)
    while not when():
        time.sleep(1e-4)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "it failed by itself"
    return os.WIFSIGNALED(status)
