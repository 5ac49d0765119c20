"""`experts_linear` in plain Triton, for every weight format: grouped GEMMs of a mixture of experts.

    y[p, n] = sum_k x[row(p), k] W[e(p), n, k] + bias[e(p), n]      for each pair p = (token, i) of a token and its i-th expert e(p)

then, with an activation, columns 2n and 2n + 1 are a gate and its up projection and become one number; then, with gates, the pairs
of a token are added: out[t, n] = sum_i gate[t, i] y[(t, i), n], in the order of i.

A program takes a *slot* (an expert that is hit, or a block of its pairs; plans/gemm_portable.py), a tile of its rows of the weight,
and a share of K. It lists the pairs of the expert, so that a weight is read once for all of them, and multiplies as
linear/portable.py does. In one launch every expert is one below the other: the weight is a matrix [E * N, K].

What a program does not finish alone goes to a workspace [splits, S, N] in fp32: splits of K, and with gates everything. The last
program to arrive at a tile adds it up, in the order of the splits and of the experts of a token. No floating-point atomics. A pair
whose id is no expert gets zeros and counts nothing in sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from halfbyte.kernels.common.codes import INTERPRETED, rounded
from halfbyte.kernels.linear.activated import activated
from halfbyte.kernels.linear.portable import row_factor, sums
from halfbyte.kernels.linear.portable_weight import Weight, weight
from halfbyte.plans.compiled_for import CompiledFor
from halfbyte.plans.gemm_portable import PortableTiles
from halfbyte.reference.experts import Activation, ExpertsCall

#: Ids that a program looks at together, and tokens whose sums it makes together.
_IDS, _TOKENS = tl.constexpr(128), tl.constexpr(16)


@dataclass(frozen=True)
class ExpertsSpec(CompiledFor):
    """Everything the kernel is compiled for, but how its weights are stored. n, m, k, stages, even, fold: as in `TileSpec`.

    top_k       experts of a token
    shared      x has one row a token, and not one a pair
    inline, by_expert   see `PortableTiles`
    split       K is split
    activation  of pairs of columns; None: none
    """

    n: int
    m: int
    k: int
    stages: int
    even: bool
    fold: bool
    top_k: int
    shared: bool
    inline: bool
    by_expert: bool
    split: bool
    activation: Activation | None
    interpreted: bool


# -------------------------------------------------------------------------------------------------------- the pairs of a slot


@triton.jit
def _count_before(ids, expert, end):
    """How many of ids[0 .. end) are `expert`."""
    count = 0
    for first in tl.range(0, end, _IDS):
        s = first + tl.arange(0, _IDS)
        count += tl.sum((tl.load(ids + s, mask=s < end, other=-1) == expert).to(tl.int32))
    return count


@triton.jit
def _nth_pairs(ids, expert, S, first, C: tl.constexpr):
    """Numbers first .. first + C.m among the pairs of an expert: the pairs, int32 [m], and which there are."""
    wanted = first + tl.arange(0, C.m)
    pair = tl.full([C.m], 0, tl.int32)
    seen = 0
    for begin in tl.range(0, S, _IDS):
        s = begin + tl.arange(0, _IDS)
        mine = (tl.load(ids + s, mask=s < S, other=-1) == expert).to(tl.int32)
        number = seen + tl.cumsum(mine) - 1
        here = (mine[None, :] == 1) & (number[None, :] == wanted[:, None])
        pair += tl.sum(tl.where(here, s[None, :], 0), 1)
        seen += tl.sum(mine)
    return pair, wanted < seen


@triton.jit
def _expert_of(ids, starts, slot, S, E, BLOCK_E: tl.constexpr, C: tl.constexpr):
    """(expert, its first pair's number, the number behind its last) of a slot; nothing to do: as many pairs as from 0 to 0."""
    first = 0
    if C.inline:
        if C.by_expert:
            expert = slot.to(tl.int64)
            end = _count_before(ids, expert, S)
        else:
            expert = tl.load(ids + slot).to(tl.int64)
            new = (expert >= 0) & (expert < E) & (_count_before(ids, expert, slot) == 0)
            end = tl.where(new, _count_before(ids, expert, S), 0)
    else:
        e = tl.arange(0, BLOCK_E)
        count = tl.load(starts + e + 1, mask=e < E, other=0) - tl.load(starts + e, mask=e < E, other=0)
        behind = tl.cumsum(tl.cdiv(count, C.m))
        place = tl.sum((behind <= slot).to(tl.int32))  # experts whose blocks all come before; without any to do, E or more
        there = place < E
        expert = tl.where(there, place, 0).to(tl.int64)
        own = tl.sum(tl.where(e == expert, tl.cdiv(count, C.m), 0))
        first = (slot - (tl.sum(tl.where(e == expert, behind, 0)) - own)) * C.m
        end = tl.where(there, tl.minimum(first + C.m, tl.sum(tl.where(e == expert, count, 0))), 0)
        first = tl.where(there, first, 0)
    return expert, first, end


@triton.jit
def _pairs(ids, order, starts, expert, first, S, C: tl.constexpr):
    """Pairs number first .. first + C.m of an expert, int32 [m], and which there are."""
    if C.inline:
        pair, there = _nth_pairs(ids, expert, S, first, C)
    else:
        begin = tl.load(starts + expert)
        place = begin + first + tl.arange(0, C.m)
        there = place < tl.load(starts + expert + 1)
        pair = tl.load(order + place, mask=there, other=0)
    return pair, there


# ------------------------------------------------------------------------------------------------------- what sums turn into


@triton.jit
def _store(y, row, number, there, N, w: Weight, C: tl.constexpr):
    """Rows y [rows, n] before their activation to rows `row` of out, where `there`."""
    EACH: tl.constexpr = C.n // 2 if C.activation is not None else C.n
    width = N // 2 if C.activation is not None else N
    column = number * EACH + tl.arange(0, EACH)
    at = w.out + row.to(tl.int64)[:, None] * width + column[None, :]
    y = activated(y, row.shape[0], C)
    tl.store(at, rounded(y, w.out, C.interpreted), mask=there[:, None] & (column < width)[None, :])


@triton.jit
def _summed(partials, pair, there, column, splits, S, N):
    """The partial results of pairs [rows] at columns [n], added in the order of the splits."""
    y = tl.full([pair.shape[0], column.shape[0]], 0.0, tl.float32)
    seen = there[:, None] & (column < N)[None, :]
    for split in tl.range(0, splits):
        at = partials + (pair.to(tl.int64) + split * S)[:, None] * N + column[None, :]
        y += tl.load(at, mask=seen, other=0.0, cache_modifier=".cg")
    return y


@triton.jit
def _weigh(partials, ids, gates, number, splits, T, S, N, E, w: Weight, C: tl.constexpr):
    """The sums of all tokens in one tile of N."""
    column = number * C.n + tl.arange(0, C.n)
    EACH: tl.constexpr = C.n // 2 if C.activation is not None else C.n
    width = N // 2 if C.activation is not None else N
    for begin in tl.range(0, T, _TOKENS):
        token = begin + tl.arange(0, _TOKENS)
        total = tl.full([_TOKENS, EACH], 0.0, tl.float32)
        for i in tl.range(0, C.top_k):
            pair = token.to(tl.int64) * C.top_k + i
            expert = tl.load(ids + pair, mask=token < T, other=-1)
            there = (expert >= 0) & (expert < E)
            gate = tl.load(gates + pair, mask=there, other=0.0).to(tl.float32)
            total += gate[:, None] * activated(_summed(partials, pair, there, column, splits, S, N), _TOKENS, C)
        out = number * EACH + tl.arange(0, EACH)
        at = w.out + token.to(tl.int64)[:, None] * width + out[None, :]
        tl.store(at, rounded(total, w.out, C.interpreted), mask=(token < T)[:, None] & (out < width)[None, :])


@triton.jit
def _zeros(ids, number, S, N, E, w: Weight, C: tl.constexpr):
    """Zeros for the pairs whose id is no expert."""
    for first in tl.range(0, S, _TOKENS):
        pair = first + tl.arange(0, _TOKENS)
        expert = tl.load(ids + pair, mask=pair < S, other=0)
        there = (pair < S) & ((expert < 0) | (expert >= E))
        if tl.sum(there.to(tl.int32)) > 0:
            _store(tl.full([_TOKENS, C.n], 0.0, tl.float32), pair, number, there, N, w, C)


# ------------------------------------------------------------------------------------------------------------------ the kernel


@triton.jit(do_not_specialize=["T", "E", "slots", "splits", "share"])
def _experts(
    w: Weight,
    ids,  # [T * top_k]
    gates,  # [T * top_k], or None
    order,  # [T * top_k] int32: the pairs, sorted by expert; None where they are found by reading ids
    starts,  # [E + 1] int32: where the pairs of each expert begin in it
    partials,
    semaphores,
    T,
    E,
    N,
    K,
    slots,
    splits,
    share,
    BLOCK_E: tl.constexpr,
    C: tl.constexpr,
):
    S, tiles = T * C.top_k, tl.cdiv(N, C.n)
    item, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    slot, number = item // tiles, item % tiles
    n = number * C.n + tl.arange(0, C.n)
    if slot == slots:
        _zeros(ids, number, S, N, E, w, C)  # the last one, where nothing is summed over experts
    else:
        expert, first, end = _expert_of(ids, starts, slot, S, E, BLOCK_E, C)
        row = expert * N + tl.minimum(n, N - 1)
        begin = split * share * C.k
        for block in tl.range(first, end, C.m):
            pair, there = _pairs(ids, order, starts, expert, block, S, C)
            x_row = (pair // C.top_k if C.shared else pair).to(tl.int64)
            y = tl.trans(sums(x_row, begin, tl.minimum(begin + share * C.k, K), K, row, w, C))
            factor = row_factor(row, w)
            if w.tensor_scale is not None:
                factor *= tl.load(w.tensor_scale + row)
            y *= factor[None, :]
            if w.bias is not None:
                bias = tl.load(w.bias + row).to(tl.float32)
                y += tl.where(split == 0, bias, 0.0)[None, :]
            if C.split or gates is not None:
                at = partials + (pair.to(tl.int64) + split * S)[:, None] * N + n[None, :]
                tl.store(at, y, mask=there[:, None] & (n < N)[None, :])
            else:
                _store(y, pair, number, there, N, w, C)
        if gates is not None:
            tl.debug_barrier()  # all of the sums, before they are counted
            if tl.atomic_add(semaphores + number, 1, sem="acq_rel", scope="gpu") == slots * splits - 1:
                tl.store(semaphores + number, 0)
                _weigh(partials, ids, gates, number, splits, T, S, N, E, w, C)
        elif C.split:
            tl.debug_barrier()
            if tl.atomic_add(semaphores + item, 1, sem="acq_rel", scope="gpu") == splits - 1:
                tl.store(semaphores + item, 0)
                for block in tl.range(first, end, C.m):
                    pair, there = _pairs(ids, order, starts, expert, block, S, C)
                    _store(_summed(partials, pair, there, n, splits, S, N), pair, number, there, N, w, C)


# ------------------------------------------------------------------------------------------------------------------- host code


def launch(
    call: ExpertsCall,
    out: torch.Tensor,
    tiles: PortableTiles,
    table: tuple[torch.Tensor, torch.Tensor] | tuple[None, None],
    partials: torch.Tensor | None,
    semaphores: torch.Tensor | None,
) -> None:
    """x [T, K] or [T * top_k, K], fp16 or bf16, any strides; stack [E, N, K]; ids, gates [T, top_k], bias [E, N] contiguous.

    out is contiguous and all written: [T, top_k, N], or N / 2 with an activation; with gates without top_k. Nothing is empty.
    table: the pairs sorted by expert and where each expert's begin, int32, unless tiles.inline. partials: `tiles.floats` fp32;
    semaphores: `tiles.counters` int32, zero before and after.
    """
    x, stack, ids, gates, bias, activation = call[:6]
    (tokens, top_k), (experts, features, width) = ids.shape, stack.shape
    spec = ExpertsSpec(
        *(tiles.block_n, tiles.block_m, tiles.block_k, tiles.num_stages, width % tiles.block_k == 0, tiles.fold),
        *(top_k, x.shape[0] == tokens and top_k > 1, tiles.inline, tiles.by_expert, tiles.splits > 1, activation, INTERPRETED),
    )
    slots = tiles.slots + (gates is None)
    _experts[(slots * -(-features // tiles.block_n) * tiles.splits,)](
        *(weight(x, stack, bias, out), ids, gates, *table, partials, semaphores),
        *(tokens, experts, features, width, tiles.slots, tiles.splits, tiles.share),
        BLOCK_E=triton.next_power_of_2(experts),
        C=spec,
        num_warps=tiles.num_warps,
    )
