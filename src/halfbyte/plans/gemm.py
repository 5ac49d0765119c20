"""Which tuned kernel takes a GEMM, dense or of experts, and how: the first of its candidates that can, fastest first."""

from __future__ import annotations

from collections.abc import Callable

from halfbyte.device import GPU
from halfbyte.plans import gemm_large, gemm_wgmma
from halfbyte.plans.gemm_large import large_plan
from halfbyte.plans.gemm_mma import mma_plan
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.plans.gemm_wgmma import wgmma_plan


def tuned_gemm(p: GemmProblem, gpu: GPU, use_pdl: bool) -> GemmPlan | str:
    """How a tuned kernel computes a GEMM; in words, why none can."""
    reasons = []
    for plan in (kernel(p, gpu, use_pdl) for kernel in _candidates(p)):
        if isinstance(plan, GemmPlan):
            return plan
        reasons.append(plan)
    return "; ".join(dict.fromkeys(reasons))


def _candidates(p: GemmProblem) -> tuple[Callable[[GemmProblem, GPU, bool], GemmPlan | str], ...]:
    """The kernels whose M it is, or whose number of pairs."""
    if p.routing is not None:
        return mma_plan, wgmma_plan, large_plan
    if p.rows < gemm_wgmma.FEWEST_ROWS:
        return (mma_plan,)
    return (wgmma_plan,) if p.rows < gemm_large.FEWEST_ROWS else (large_plan, wgmma_plan)
