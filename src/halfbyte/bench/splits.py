"""Decode attention by a plan that a study has changed, first of all in its number of splits.

`planned` is what halfbyte would launch, `split` the same with another number of splits, `attend` launches it. A split is a share of
the tokens of one unit (a KV head of a sequence). How the shares are added up is a property of the kernel: the tuned one ("gluon")
does it in the same launch, the portable one ("triton") in a second.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from halfbyte.cache import KVCache
from halfbyte.errors import Unsupported, check
from halfbyte.kv_buffer import AttentionOptions, DecodeCall
from halfbyte.ops import _decode_on_gpu as gpu
from halfbyte.plans.decode_attention import DecodePlan
from halfbyte.plans.decode_portable import TritonTiles
from halfbyte.settings import interpreted, pair_launches

Plan = DecodePlan | TritonTiles

#: Where the shares of so many programs begin is computed in 32 bits (`gluon_tiles.share`).
MOST_PROGRAMS = 2**15
#: The fewest tokens of a tile that one warp works on.
_LEAST_TOKENS = 16


def planned(q: torch.Tensor, cache: KVCache, impl: str, alibi_slopes: torch.Tensor | None = None) -> Plan:
    """What halfbyte launches for q [B, Hq, 1, D] when told `impl`: "auto", "gluon" or "triton". Raises `Unsupported`."""
    if q.device.type == "cpu" and not interpreted():
        raise Unsupported("splits are those of kernels, which run on an NVIDIA GPU, or in Triton's interpreter")
    # Paired where the GPU can; `attend` takes that back where the environment says so.
    return gpu.plan_of(call_of(q, cache, alibi_slopes)._replace(impl=impl), use_pdl=True)


def split(plan: Plan, splits: int, context: int) -> Plan:
    """The same with so many splits of each unit, `context` tokens long. Raises `Unsupported` for what the kernel cannot do.

    A split has one tile at least. Where that asks for more tiles than there are, the tuned kernel takes smaller ones.
    """
    check(splits >= 1, f"splits={splits}; a unit has at least one")
    if isinstance(plan, TritonTiles):
        blocks = -(-context // plan.block_tokens)
        if splits > blocks:
            raise Unsupported(f"{splits} splits of {context} tokens; the portable kernel has {blocks} blocks of them")
        return replace(plan, splits=splits, chunk=0)
    programs, spec = splits * plan.work_items, plan.spec
    if programs > MOST_PROGRAMS:
        raise Unsupported(f"{splits} splits of {plan.work_items} work items; the tuned kernel has at most {MOST_PROGRAMS} programs")
    while splits > -(-context // spec.tile) and spec.tokens > _LEAST_TOKENS:
        spec = replace(spec, tokens=spec.tokens // 2)
    if splits > -(-context // spec.tile):
        raise Unsupported(f"{splits} splits of {context} tokens; the tuned kernel's tiles have {spec.tile} at least")
    return replace(plan, spec=spec, programs=programs, why=f"{splits} splits asked for")


def attend(q: torch.Tensor, cache: KVCache, plan: Plan, alibi_slopes: torch.Tensor | None = None) -> torch.Tensor:
    """`halfbyte.decode_attention`, as planned here; launches are paired only where HALFBYTE_PDL allows it."""
    call = call_of(q, cache, alibi_slopes)
    out, lse = q.new_empty(*q.shape[:3], cache.value_dim), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    gpu.launch(call, plan if pair_launches() else unpaired(plan), out, lse, own=False)
    return out


def unpaired(plan: Plan) -> Plan:
    """The same, launched when its predecessor has ended."""
    return replace(plan, pdl=False) if isinstance(plan, TritonTiles) else replace(plan, spec=replace(plan.spec, use_pdl=False))


def splits_of(plan: Plan) -> float:
    """Splits of a work item; where programs of the tuned kernel share items, how many of them there are for each, in the mean."""
    return float(plan.splits) if isinstance(plan, TritonTiles) else plan.programs / plan.work_items


def launches(plan: Plan) -> int:
    """Kernels of a call: 2 where a second one adds the splits up."""
    return 2 if isinstance(plan, TritonTiles) and plan.splits > 1 else 1


def call_of(q: torch.Tensor, cache: KVCache, alibi_slopes: torch.Tensor | None = None) -> DecodeCall:
    """The call. Slopes are fp32 and contiguous."""
    options = AttentionOptions(q.shape[-1] ** -0.5, alibi_slopes=alibi_slopes, rotate_keys=cache.rotate_keys)
    return DecodeCall(q, cache.keys, cache.values, cache.lengths, None, cache.page_table, options)
