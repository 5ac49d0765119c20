"""GEMMs with quantized weights."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from halfbyte.plans.gemm_plan import GemmPlan


def kernel_of(plan: GemmPlan) -> Any:
    """The module whose `launches` run a plan."""
    return import_module(f"{__name__}.{plan.spec.kernel}")
