"""Names for torch's profiler of what runs past torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
profiler_runs = torch._C._autograd._profiler_enabled


def profiled(op: str, run: Callable[..., T], *args: Any) -> T:
    """run(*args), by the name of an op in a profile."""
    if not profiler_runs():
        return run(*args)
    with torch.profiler.record_function(f"halfbyte::{op}"):
        return run(*args)
