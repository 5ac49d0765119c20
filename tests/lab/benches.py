"""What tests of benches and studies share: sessions of a CPU that measure next to nothing, and a GPU that is not here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from halfbyte.device import Device
from halfbyte_lab.measure.environment import Environment
from halfbyte_lab.measure.session import Options, Session
from halfbyte_lab.measure.timing import Effort

BRIEF = Effort(seconds=0.0, repeats=3, block_seconds=1e-5, settle_seconds=0.0)
CPU = Device("cpu", "fake", memory_bytes=2**33, cache_bytes=0, cores=1, threads=1)
GPU = Device("cuda", "fake gpu", 141 * 10**9, 50 * 2**20, 8, 8, index=0, capability=(9, 0), sm_count=132, driver="580.1")
WHERE = Environment("fake", "", 1, {"torch": "2"}, "", "halfbyte bench", "2026-01-01T00:00:00+00:00")


def quick(device: Device = CPU, **options: Any) -> Session:
    return Session(Options(quick=True, threads=1, **options), device)


def make_tables() -> ModuleType:
    """scripts/make_tables.py anew: it remembers what it has read."""
    spec = importlib.util.spec_from_file_location("make_tables", Path(__file__).parents[2] / "scripts" / "make_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
