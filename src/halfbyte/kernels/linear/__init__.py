"""GEMMs with quantized weights."""

from __future__ import annotations

from typing import Any

from halfbyte.plans.linear_large import LinearLargeSpec
from halfbyte.plans.linear_spec import LinearPlan, LinearSpec


def kernel_of(plan: LinearPlan) -> Any:
    """The module whose `launches` run a plan."""
    from halfbyte.kernels.linear import mma, wgmma, wgmma_large

    if isinstance(plan.spec, LinearLargeSpec):
        return wgmma_large
    return mma if isinstance(plan.spec, LinearSpec) else wgmma
