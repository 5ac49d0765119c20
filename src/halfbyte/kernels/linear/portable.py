"""`linear`, `qkv_projection`, `experts_linear` in plain Triton, for every weight format, M, shape and stride: the portable level.

    y^T [N, M] = W [N, K] x^T + bias        W[n, k] = s[n, k / g] (c[n, k] - z[n, k / g])

A program takes a tile of out features and batch rows and walks its share of K. Decoded numbers are the left operand of the MMA,
so that on Hopper they go from registers into the tensor cores: bytes are copied to shared memory as they are stored, read in the
layout of the operand and decoded there. c - z is exact in 16 bits (portable_weight.py). MMAs take 16-bit operands and accumulate
in fp32.

Per-row scales multiply the finished sums, in fp32. Per-group scales multiply fp32 sums of a step of K inside one group, or, with
`fold`, the numbers in 16 bits ahead of the MMA: exactly for MXFP4 and NVFP4; else with one rounding of the weight for fp16 and two
for bf16, where the scale is rounded as well; a 16-bit weight has one. Relative L2 error, measured over all formats, as a share of
that of a 16-bit GEMM: at most 0.9 with fp32 sums and 1.4 folded, where 2 is promised. Folded, both have the range of 16 bits.

Several weights (q, k and v) are one launch: their tiles follow one another. With routing the weight is a stack of experts, and a
table lists blocks of pairs of a token and an expert, sorted by expert (linear/experts_sort.py). Each meets the tiles of its expert;
results are sorted, too, and with an activation columns 2n and 2n + 1 become one. Splits of K leave fp32 sums in a workspace; the
last to arrive adds them in the order of the splits. No floating-point atomics. Batch rows do not affect each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from halfbyte.kernels.common.codes import INTERPRETED, rounded
from halfbyte.kernels.linear.activated import activated
from halfbyte.kernels.linear.portable_weight import Weight, numbers, operand, read_scale, read_zero, weight
from halfbyte.plans.compiled_for import CompiledFor
from halfbyte.plans.gemm_portable import PortableTiles
from halfbyte.reference.experts import Activation
from halfbyte.tensors import QuantTensor


@dataclass(frozen=True)
class TileSpec(CompiledFor):
    """Everything the kernel is compiled for, except how its weights are stored.

    weights      how many
    n, m, k      of a tile, and of a step
    even         K is whole steps: nothing is masked
    fold         group scales multiply the codes
    split        K is split: partial results are added
    pairs        pairs of a token and an expert that share a batch row; 0: no routing
    activation   with routing: of pairs of columns; None: none
    """

    weights: int
    n: int
    m: int
    k: int
    stages: int
    even: bool
    fold: bool
    split: bool
    interpreted: bool
    pairs: int = 0
    activation: Activation | None = None


#: Tiles over M that run at the same time as those over N: both x and the weight then come from the L2 cache.
_TOGETHER = tl.constexpr(16)

# ------------------------------------------------------------------------------------------------------------ device code


@triton.jit
def _of_step(k, row, end, groups, w: Weight, C: tl.constexpr):
    """Scales (fp32) and zero points (int16) of columns k .. k + C.k: [n, 1] of one group, or [n, C.k / GROUP]."""
    group = k // w.F.group
    if C.k > w.F.group:
        group += tl.arange(0, C.k // w.F.group)[None, :]
    seen = None
    if not C.even and C.k > w.F.group:
        seen = group * w.F.group < end
    scale = read_scale(w, row[:, None], group, groups, seen)
    zero = tl.full([1, 1], w.F.centre, tl.int16)
    if w.offsets is not None:
        zero = read_zero(w, row[:, None], group, seen)
    return scale, zero


@triton.jit
def _spread(small, w: Weight, C: tl.constexpr):
    """[n, k / GROUP] over the columns of its groups, [n, k]; what one group has stays [n, 1]."""
    if w.F.group > 0 and C.k > w.F.group and small.shape[1] > 1:
        small = tl.reshape(tl.broadcast_to(small[:, :, None], (C.n, C.k // w.F.group, w.F.group)), (C.n, C.k))
    return small


@triton.jit
def sums(m, begin, end, K, row, w: Weight, C: tl.constexpr):
    """fp32 [n, m]: weight rows `row` [n] times rows `m` of x over columns begin .. end, without the scale of whole weight rows.

    Row numbers are int64.
    """
    PER: tl.constexpr = w.F.per_byte
    FOLD: tl.constexpr = w.F.group > 0 and (C.fold or C.k > w.F.group)
    column, byte = tl.arange(0, C.k).to(tl.int64), tl.arange(0, C.k // PER).to(tl.int64)
    x_rows, codes = w.x + m[:, None] * w.x0, w.codes + row[:, None] * w.codes0
    groups = K // w.F.group if w.F.group > 0 else 1
    row_zero = tl.full([1, 1], w.F.centre, tl.int16)
    if w.F.group == 0 and w.offsets is not None:
        row_zero = read_zero(w, row[:, None], 0, None)
    acc = tl.full([C.n, C.m], 0.0, tl.float32)
    for k in tl.range(begin, end, C.k, num_stages=C.stages):
        at = codes + (byte + k // PER)[None, :] * w.codes1
        where = (column + k)[None, :]
        if w.perm is not None:
            where = tl.load(w.perm + where, mask=where < K, other=0)
            where = tl.minimum(tl.maximum(where, 0), K - 1).to(tl.int64)
        if C.even:
            stored = tl.load(at)
            values = tl.load(x_rows + where * w.x1)
        else:
            stored = tl.load(at, mask=(k + byte * PER < K)[None, :], other=0)
            values = tl.load(x_rows + where * w.x1, mask=(k + column < K)[None, :], other=0)
        values = tl.trans(values.to(w.DOT))
        if w.F.group == 0:
            acc = tl.dot(numbers(stored, row_zero, w, C.n, C.k), values, acc, input_precision="ieee")
        else:
            scale, zero = _of_step(k, row, end, groups, w, C)
            made = numbers(stored, _spread(zero, w, C), w, C.n, C.k)
            if FOLD:
                made = operand(made * _spread(operand(scale, w), w, C), w)
                acc = tl.dot(made, values, acc, input_precision="ieee")
            else:
                acc += tl.dot(made, values, input_precision="ieee") * scale
    return acc


@triton.jit
def row_factor(row, w: Weight):
    """fp32 [n] or [1]: what finished sums of weight rows are multiplied with, besides the scale of the whole tensor."""
    factor = tl.full([1], w.UNIT, tl.float32)
    if w.F.group == 0:
        factor = read_scale(w, row, 0, 1, None) * w.UNIT
    return factor


@triton.jit
def _finish(y, number, m, M, row, N, routed: tl.constexpr, w: Weight, C: tl.constexpr):
    """Store finished sums y [m, n]: the scale of whole weight rows, the bias, the activation, and one rounding."""
    factor = row_factor(row, w)
    if w.tensor_scale is not None:
        factor *= tl.load(w.tensor_scale + row if routed else w.tensor_scale)
    y *= factor[None, :]
    if w.bias is not None:
        y += tl.load(w.bias + row).to(tl.float32)[None, :]
    HALVES: tl.constexpr = 1 if C.activation is None else 2
    y = activated(y, C.m, C)
    n = number * (C.n // HALVES) + tl.arange(0, C.n // HALVES)
    at = w.out + m.to(tl.int64)[:, None] * (N // HALVES) + n.to(tl.int64)[None, :]
    tl.store(at, rounded(y, w.out, C.interpreted), mask=(m < M)[:, None] & (n < N // HALVES)[None, :])


@triton.jit
def _tile(tile, number, first_row, M, K, split, splits, share, partials, semaphores, expert, N, order, w: Weight, C: tl.constexpr):
    """Tile `number` of the weight's rows, `tile` of the launch. With routing N of an expert; order: pairs, sorted."""
    n = number * C.n + tl.arange(0, C.n)
    m = first_row + tl.arange(0, C.m)
    row = tl.minimum(n, N - 1).to(tl.int64)
    if expert is not None:
        row += expert * N
    begin = split * share * C.k
    end = tl.minimum(begin + share * C.k, K)
    there = tl.minimum(m, M - 1).to(tl.int64)  # a row too many is the last one again
    if order is not None:
        there = (tl.load(order + there) // C.pairs).to(tl.int64)
    y = tl.trans(sums(there, begin, end, K, row, w, C))
    if not C.split:
        _finish(y, number, m, M, row, N, expert is not None, w, C)
    else:
        place = (tl.arange(0, C.m) * C.n)[:, None] + tl.arange(0, C.n)[None, :]
        used = (m < M)[:, None]
        first = partials + tile.to(tl.int64) * (C.m * C.n) * splits
        tl.store(first + split * (C.m * C.n) + place, y, mask=used)
        tl.debug_barrier()  # all of the sums, before they are counted
        if tl.atomic_add(semaphores + tile, 1, sem="acq_rel", scope="gpu") == splits - 1:
            y = tl.full([C.m, C.n], 0.0, tl.float32)
            for i in tl.range(0, splits):
                y += tl.load(first + i * (C.m * C.n) + place, mask=used, other=0, cache_modifier=".cg")
            tl.store(semaphores + tile, 0)
            _finish(y, number, m, M, row, N, expert is not None, w, C)


# Numbers that no address is made of are not specialised on: a kernel for each would be compiled for nothing.
@triton.jit(do_not_specialize=["M", "K", "splits", "share"])
def _linear(weights, partials, semaphores, M, K, splits, share, routing, C: tl.constexpr):
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    if C.pairs == 0:  # a tuple that may hold None is compared with None by no Triton before 3.7
        _dense(tile, split, weights, partials, semaphores, M, K, splits, share, C)
    else:
        _routed(tile, split, weights[0], partials, semaphores, splits, share, routing, C)


@triton.jit
def _routed(tile, split, w: Weight, partials, semaphores, splits, share, routing, C: tl.constexpr):
    """A tile of an expert and a block of its sorted pairs, if there are so many. routing: see `launch`."""
    blocks, order, N, K = routing
    columns = tl.cdiv(N, C.n)
    block, number = tile // columns, tile % columns
    if block < tl.load(blocks):
        at = blocks + 4 * (1 + block)
        expert = tl.load(at).to(tl.int64)
        first = tl.load(at + 2) + (block - tl.load(at + 1)) * C.m
        end = tl.load(at + 3)
        if w.F.group > 0 and not C.fold and C.k <= w.F.group:
            _tile(tile, number, first, end, K, split, splits, share, partials, semaphores, expert, N, order, w, C)
        else:  # MMAs add to sums: outside of a loop, if it is one of one turn, the assembler makes them wait for each other
            for row in tl.range(first, tl.minimum(end, first + C.m), C.m):
                _tile(tile, number, row, end, K, split, splits, share, partials, semaphores, expert, N, order, w, C)


@triton.jit
def _dense_tile(tile, number, first_row, M, K, split, splits, share, partials, semaphores, w: Weight, C: tl.constexpr):
    _tile(tile, number, first_row, M, K, split, splits, share, partials, semaphores, None, w.n, None, w, C)


@triton.jit
def _dense(tile, split, weights, partials, semaphores, M, K, splits, share, C: tl.constexpr):
    """A tile of one of the weights and a block of the batch."""
    WEIGHTS: tl.constexpr = C.weights
    columns = 0  # tiles over the rows of all weights
    for i in tl.static_range(WEIGHTS):
        columns += tl.cdiv(weights[i].n, C.n)
    down = tl.cdiv(M, C.m)
    block = tile // (_TOGETHER * columns)
    height = tl.minimum(down - block * _TOGETHER, _TOGETHER)
    inside = tile - block * _TOGETHER * columns
    first_row = (block * _TOGETHER + inside % height) * C.m
    number = inside // height
    for i in tl.static_range(WEIGHTS):
        count = tl.cdiv(weights[i].n, C.n)
        if (number >= 0) & (number < count):
            _dense_tile(tile, number, first_row, M, K, split, splits, share, partials, semaphores, weights[i], C)
        number -= count


# -------------------------------------------------------------------------------------------------------------- host code


def launch(
    xs: Sequence[torch.Tensor],
    weights: Sequence[QuantTensor],
    biases: Sequence[torch.Tensor | None],
    outs: Sequence[torch.Tensor],
    tiles: PortableTiles,
    partials: torch.Tensor | None,
    semaphores: torch.Tensor | None,
    blocks: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> None:
    """xs [M, K], fp16 or bf16, any strides, one for each weight; outs [M, N] in its dtype, contiguous, all written, not all empty.

    Tensors of one axis are contiguous. With tiles.splits > 1: `partials`, `tiles.floats` fp32, and `semaphores`, `tiles.count`
    int32 zeros, zero again afterwards.
    With routing one weight, a stack [E, N, K], and out [S, N], or N / 2 with an activation, sorted; rows of no expert are left.
    blocks: the list of blocks of sorted pairs. order [S]: the sorted pairs, S / M for each of xs[0]; None: that is sorted, too.
    """
    m, k = xs[0].shape
    features = [w.shape[-2] for w in weights]
    count = tiles.count(features, m)
    shape, options = (tiles.block_n, tiles.block_m, tiles.block_k, tiles.num_stages), (tiles.fold, tiles.splits > 1, INTERPRETED)
    per_row = 0 if blocks is None else 1 if order is None else len(order) // m
    routing = None if blocks is None else (blocks, order, features[0], k)  # numbers here are specialized on
    _linear[(count * tiles.splits,)](
        tuple(weight(*each) for each in zip(xs, weights, biases, outs, strict=True)),
        *(partials, semaphores, m, k, tiles.splits, tiles.share, routing),
        C=TileSpec(len(weights), *shape, k % tiles.block_k == 0, *options, per_row, activation),
        num_warps=tiles.num_warps,
    )
