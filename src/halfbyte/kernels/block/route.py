"""The router of a mixture from its logits on, in one launch: scores, the choice of experts, their gates. A program takes a token.

The experts are a tile [groups, experts of each]. Numbers are compared by `ordered`, integers of 32 bits, whose maximum over a warp
is one instruction; of equal ones the first expert is taken, and left out of the rounds that follow:

    top_k times: e = the first with the largest key; gates[i] = s[e]; key[e] = nothing
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.block.greedy import ordered
from halfbyte.kernels.common.codes import INTERPRETED, rounded
from halfbyte.reference.route import RouteCall

#: Below the key of every number, and above every index.
_NOTHING, _BEYOND = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)


@triton.jit
def _number(key):
    """The fp32 number whose `ordered` is `key`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _open(keys, column, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr, ROWS: tl.constexpr):
    """Whether a group [ROWS] is among the best TOP_GROUPS, by the sum of its BEST largest keys."""
    total = tl.zeros([ROWS], tl.float32)
    for _ in tl.static_range(BEST):
        largest = tl.max(keys, 1)
        total += _number(largest)
        first = tl.min(tl.where(keys == largest[:, None], column, _BEYOND), 1)
        keys = tl.where(column == first[:, None], _NOTHING, keys)
    group = tl.arange(0, ROWS)
    sums = tl.where(group < GROUPS, ordered(total), _NOTHING)
    is_open = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        first = tl.min(tl.where(sums == tl.max(sums, 0), group, _BEYOND), 0)
        is_open = is_open | (group == first)
        sums = tl.where(group == first, _NOTHING, sums)
    return is_open


@triton.jit
def route(
    logits, bias, ids, gates, stride, eps, scale,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCORE: tl.constexpr, NORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr, USE_PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """ids and gates [T, TOP_K], contiguous, of a row of logits [T, EXPERTS]; bias [EXPERTS] or None. Powers of two hold what
    there is: ROWS groups of COLUMNS experts, and SLOTS experts that are chosen.
    """
    WIDTH: tl.constexpr = EXPERTS // GROUPS
    row, group, column = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    expert, inside = group * WIDTH + column, (group < GROUPS) & (column < WIDTH)
    shift = 0.0
    if bias is not None:
        shift = tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(logits + row * stride + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if SCORE == "softmax":
        scores = tl.exp(x - tl.max(x))
        scores = scores / tl.sum(scores)
    else:
        power = tl.exp(-tl.abs(x))
        scores = tl.where(x < 0, power, 1.0) / (1 + power)
    if bias is not None or GROUPS > 1:
        x = scores + shift
    keys = tl.where(inside, ordered(x), _NOTHING)
    if GROUPS > 1:
        keys = tl.where(_open(keys, column, GROUPS, TOP_GROUPS, BEST, ROWS)[:, None], keys, _NOTHING)
    bits, slot = scores.to(tl.int32, bitcast=True), tl.arange(0, SLOTS)
    experts, values, total = tl.zeros([SLOTS], tl.int32), tl.zeros([SLOTS], tl.float32), 0.0
    for i in tl.static_range(TOP_K):
        first = tl.min(tl.where(keys == tl.max(keys), expert, _BEYOND))
        value = tl.max(tl.where(expert == first, bits, _NOTHING)).to(tl.float32, bitcast=True)
        keys = tl.where(expert == first, _NOTHING, keys)
        experts, values, total = tl.where(slot == i, first, experts), tl.where(slot == i, value, values), total + value
    if NORMALIZED:
        values = values / (total + eps)
    at, inside = row * TOP_K + slot, slot < TOP_K
    tl.store(ids + at, experts.to(tl.int64), mask=inside)
    tl.store(gates + at, rounded(values * scale, gates, INTERPRETED), mask=inside)


def launch(call: RouteCall, ids: torch.Tensor, gates: torch.Tensor, use_pdl: bool) -> None:
    """ids int64 and gates [T, top_k], contiguous, of a call whose logits have a last stride of 1; none empty."""
    logits, (top_k, score, eps, scale, groups, top_groups, best) = call.logits, call.routing
    tokens, experts = logits.shape
    columns = triton.next_power_of_2(experts // groups)
    route[(tokens,)](
        logits, call.bias, ids, gates, logits.stride(0), 0.0 if eps is None else eps, scale,
        EXPERTS=experts, TOP_K=top_k, SCORE=score, NORMALIZED=eps is not None, GROUPS=groups, TOP_GROUPS=top_groups, BEST=best,
        ROWS=triton.next_power_of_2(groups), COLUMNS=columns, SLOTS=triton.next_power_of_2(top_k), USE_PDL=use_pdl,
        INTERPRETED=INTERPRETED, num_warps=1, **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip
