"""Decode attention by a plan that a study has changed, first of all in its number of splits.

`planned` is what halfbyte would launch, `split` the same with another number of splits, `attend` launches it. A split is a share of
the tokens of one unit (a KV head of a sequence). How the shares are added up is a property of the kernel: the tuned one ("gluon")
does it in the same launch, the portable one ("triton") in a second.
"""

from __future__ import annotations

from dataclasses import replace

from halfbyte.errors import Unsupported, check
from halfbyte.plans.decode_attention import DecodePlan
from halfbyte.plans.decode_portable import TritonTiles

Plan = DecodePlan | TritonTiles

#: Where the shares of so many programs begin is computed in 32 bits (`share` in kernels/common/shares.py).
MOST_PROGRAMS = 2**15
#: The fewest tokens of a tile that one warp works on.
_LEAST_TOKENS = 16


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


def splits_of(plan: Plan) -> float:
    """Splits of a unit; where programs of the tuned kernel share units, how many of them there are for each, in the mean."""
    return float(plan.splits) if isinstance(plan, TritonTiles) else plan.programs / plan.work_items


def launches(plan: Plan) -> int:
    """Kernels of a call: 2 where a second one adds the splits up."""
    return 2 if isinstance(plan, TritonTiles) and plan.splits > 1 else 1
