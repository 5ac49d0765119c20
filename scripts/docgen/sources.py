"""Where generated text comes from. The only lines of `docgen` that know where the laboratory and the programme of tests live."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import make_tables as tables

from halfbyte.formats import key_format
from halfbyte.reference.hadamard import rotated
from halfbyte.settings import CLIP, KEYS, VALUES, WEIGHTS
from halfbyte_lab.cases import experts_cases
from halfbyte_lab.evals.real_model import TEXTS as READ
from halfbyte_lab.measure.chart_style import DARK, LIGHT, css
from halfbyte_lab.measure.page import by_machine
from halfbyte_lab.measure.records import Record
from halfbyte_lab.studies import QUESTIONS, evidence, int4_gqa, int8_granularity, memory, step
from halfbyte_lab.studies.accuracy import QUALITY, formats_of
from halfbyte_lab.studies.calibrated import calibrated_table
from halfbyte_lab.studies.quality_per_bit import HEAD_DIM, OF_WEIGHTS
from halfbyte_lab.studies.w4a16_splitk import MEAN_GAIN, PEAK_GAIN

__all__ = [
    "ATTENTION_OPS",
    "CLIP",
    "DARK",
    "DATA",
    "HEAD_DIM",
    "KEYS",
    "LIGHT",
    "MEAN_GAIN",
    "OF_EXPERTS",
    "OPS",
    "OURS",
    "PEAK_GAIN",
    "QUESTIONS",
    "ROOT",
    "TEXTS",
    "VALUES",
    "WEIGHTS",
    "Record",
    "attention",
    "by_machine",
    "calibrated_table",
    "cpu",
    "css",
    "evidence",
    "formats_of",
    "key_format",
    "linear",
    "memory",
    "of_tests",
    "rotated",
    "step",
    "tables",
]

ROOT = Path(__file__).parents[2]
#: The texts that the real model reads.
TEXTS = tuple(READ)
#: What ships with the library.
DATA = ROOT / "src" / "halfbyte" / "data"

#: What the study `quality-per-bit` calls the divergence of caches and that of weights.
OPS = {True: QUALITY, False: OF_WEIGHTS}
#: Operations that time decode attention of one new token, alone.
ATTENTION_OPS = ("decode_attention", int4_gqa.OP, int8_granularity.OP)
#: Operations of mixtures of experts.
OF_EXPERTS = experts_cases.OPS
#: What an op of halfbyte is called in records, and what its fastest 16-bit competitor is compared with.
OURS = "halfbyte auto"


def attention() -> list[Record]:
    """The last record of each attention case that was timed on a GPU."""
    return [r for r in tables.gpu_records() if r.op == "decode_attention" and r.seconds]


def linear() -> list[Record]:
    """The last record of each of halfbyte's linear layers that was timed on a GPU."""
    return [r for r in tables.linear_records() if r.seconds and r.implementation == OURS]


def cpu() -> list[dict[str, Any]]:
    """Times on a CPU."""
    return [r for r in tables.json_lines("cpu.jsonl") if r["seconds"] is not None]


def of_tests(suite: str, module: str, name: str) -> dict[str, Any]:
    """What a module of tests/trust or tests/mutants calls by this name."""
    sys.path.insert(0, str(ROOT / "tests" / suite))
    found: dict[str, Any] = getattr(importlib.import_module(module), name)
    return found
