"""Ops with an explicit plan: the plan that halfbyte would use, and a launch with any plan. For tuning and studies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from halfbyte.device import gpu as gpu_of
from halfbyte.errors import Unsupported
from halfbyte.kv_buffer import AttentionOptions, DecodeCall
from halfbyte.ops._linear_on_gpu import HALVES, rows_of_plans
from halfbyte.ops._linear_on_gpu import run_plan as linear
from halfbyte.ops.decode_attention import Plan, launch
from halfbyte.ops.workspace import prepare
from halfbyte.plans.decode_attention import plan_of
from halfbyte.plans.decode_portable import TritonTiles
from halfbyte.plans.decode_problem import DecodeProblem
from halfbyte.plans.decode_problem import problem_of as _problem_of
from halfbyte.settings import interpreted, pair_launches

if TYPE_CHECKING:
    from halfbyte.cache import KVCache

__all__ = ["HALVES", "Plan", "attend", "call_of", "linear", "planned", "prepare", "problem_of", "rows_of_plans", "unpaired"]


def planned(q: torch.Tensor, cache: KVCache, impl: str, alibi_slopes: torch.Tensor | None = None) -> Plan:
    """The plan for q [B, Hq, 1, D] with `impl`: "auto", "gluon" or "triton". Raises `Unsupported`."""
    if q.device.type == "cpu" and not interpreted():
        raise Unsupported("splits are those of kernels, which run on an NVIDIA GPU, or in Triton's interpreter")
    # Paired where the GPU can; `attend` takes that back where the environment says so.
    return plan_of(problem_of(q, cache, alibi_slopes), impl, gpu_of(-1 if q.device.type == "cpu" else q.device.index), use_pdl=True)


def attend(q: torch.Tensor, cache: KVCache, plan: Plan, alibi_slopes: torch.Tensor | None = None) -> torch.Tensor:
    """`halfbyte.decode_attention` with this plan; PDL only if HALFBYTE_PDL allows it."""
    call = call_of(q, cache, alibi_slopes)
    out, lse = q.new_empty(*q.shape[:3], cache.value_dim), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    launch(call, plan if pair_launches() else unpaired(plan), out, lse, own=False)
    return out


def unpaired(plan: Plan) -> Plan:
    """The same plan without PDL."""
    return replace(plan, pdl=False) if isinstance(plan, TritonTiles) else replace(plan, spec=replace(plan.spec, use_pdl=False))


def call_of(q: torch.Tensor, cache: KVCache, alibi_slopes: torch.Tensor | None = None) -> DecodeCall:
    """The call. Slopes are fp32 and contiguous."""
    options = AttentionOptions(q.shape[-1] ** -0.5, alibi_slopes=alibi_slopes, rotate_keys=cache.rotate_keys)
    return DecodeCall(q, cache.keys, cache.values, cache.lengths, None, cache.page_table, options)


def problem_of(q: torch.Tensor, cache: KVCache, alibi_slopes: torch.Tensor | None = None) -> DecodeProblem:
    """What a plan needs to know of a call."""
    return _problem_of(call_of(q, cache, alibi_slopes))
