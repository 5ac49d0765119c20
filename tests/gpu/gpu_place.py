"""Where the GPU's suite runs, how large, and what it has counted: apart from conftest.py, so that compiling processes import it."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass, field

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the switch that poisons memory makes cuBLAS insist on it

import torch

MODE = os.environ.get("HALFBYTE_GPU_TESTS", "")
DRY = MODE == "dry"


@dataclass(frozen=True)
class Place:
    """`device` and the implementations to try; `size(full, dry)` picks a number."""

    device: str
    impls: tuple[str, ...]
    dry: bool

    def size(self, full: int, dry: int) -> int:
        return dry if self.dry else full

    def sync(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()


def _impls() -> tuple[str, ...]:
    """What is tried: `auto`, which takes the tuned kernel wherever that can run, and the portable one. HALFBYTE_GPU_IMPLS picks."""
    if DRY:
        return ("cpu",)
    if chosen := os.environ.get("HALFBYTE_GPU_IMPLS"):
        return tuple(chosen.split(","))
    return "auto", "triton"


@dataclass
class Tally:
    """What ran, for the last lines of the report."""

    ran: Counter[str] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)


PLACE, TALLY = Place("cpu" if DRY else "cuda", _impls(), DRY), Tally()


def kernels_compiled() -> int:
    """Variants of kernels that this process holds: what the drawn calls really needed."""
    from triton.runtime.jit import JITFunction

    modules = [module for name, module in sys.modules.items() if name.startswith("halfbyte.kernels.")]
    kernels = {found for module in modules for found in vars(module).values() if isinstance(found, JITFunction)}
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())
