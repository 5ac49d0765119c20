"""`linear` and `qkv_projection` in plain Triton, for every weight format, number of rows, shape and stride: the portable level.

    y^T [N, M] = W [N, K] x^T + bias        W[n, k] = s[n, k / g] (c[n, k] - z[n, k / g])

A program takes a tile of weight rows and rows of x and walks its share of K. Decoded numbers are the left operand of the product, so
that on Hopper they go from registers into the tensor cores: a byte is copied to shared memory as it is stored, read in the layout of
the operand and decoded there. c - z is exact in 16 bits (kernels/linear_weight.py). Products take 16-bit operands and add in fp32.

Scales of rows multiply the finished sums, in fp32. Those of groups multiply fp32 sums of a step of K inside of one group, or, FOLD,
the numbers in 16 bits before the product: exactly for MXFP4 and NVFP4, with one rounding of the weight for fp16 and two for bf16
(the scale itself is rounded there), where a 16-bit weight has one. Relative L2 error as a share of that of a 16-bit product, measured
over all formats (tests/interpreted/test_triton_linear.py): at most 0.9 in fp32 sums and 1.3 folded; 2 is promised. Folded fp16
numbers count in a power of two for each weight row, so that no scale leaves fp16's range.

Several weights (q, k and v) are one launch: their tiles follow one another. Splits of K leave fp32 sums in a workspace; the last to
arrive adds them in the order of the splits. No floating-point atomics. A row of x meets no other row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.kernels.codes import exponent, power_of_two, rounded
from halfbyte.kernels.compiling import Configuration, empty, recorded
from halfbyte.kernels.linear_weight import Weight, numbers, operand, read_scale, read_zero, weight
from halfbyte.kernels.stored import INTERPRETED
from halfbyte.plans.triton_linear import LinearTiles, linear_tiles
from halfbyte.tensors import QuantTensor, expected_parts

# ------------------------------------------------------------------------------------------------------------ device code


@triton.jit
def _of_group(k, row, end, groups, w: Weight, N: tl.constexpr, K: tl.constexpr):
    """Scales (fp32) and zero points (int16) of columns k .. k + K: [N, 1] of one group, or [N, K / GROUP]."""
    COUNT: tl.constexpr = K // w.GROUP if w.GROUP < K else 1
    group = k // w.GROUP + tl.arange(0, COUNT)
    seen = (group * w.GROUP < end)[None, :]
    at = group.to(tl.int64)[None, :]
    scale = read_scale(w, row[:, None], at, groups, seen)
    zero = tl.full([1, 1], w.ZERO, tl.int16)
    if w.offsets is not None:
        zero = read_zero(w, row[:, None], at, seen)
    return scale, zero


@triton.jit
def _spread(small, w: Weight, N: tl.constexpr, K: tl.constexpr):
    """[N, K / GROUP] over the columns of its groups, [N, K]; what one group has stays [N, 1]."""
    if w.GROUP > 0 and w.GROUP < K and small.shape[1] > 1:
        small = tl.reshape(tl.broadcast_to(small[:, :, None], (N, K // w.GROUP, w.GROUP)), (N, K))
    return small


@triton.jit
def _row_exponent(row, width, groups, w: Weight, N: tl.constexpr):
    """For each weight row the power of two [N, 1] of its largest scale, in fp16's reach of everything that fp32 holds."""
    largest = tl.zeros([N], tl.float32)
    for first in tl.range(0, groups, 16):
        group = (first + tl.arange(0, 16)).to(tl.int64)[None, :]
        scale = tl.abs(read_scale(w, row[:, None], group, groups, group < groups))
        largest = tl.maximum(largest, tl.max(scale, 1))
    return tl.minimum(tl.maximum(exponent(largest), -100), 100)[:, None]


@triton.jit
def _sums(
    x, x0, x1, first_row, rows, begin, end, width, row, w: Weight,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, FOLD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """fp32 [N, M]: weight rows `row` [N] times M rows of x over columns begin .. end, but for what a whole weight row shares."""
    PER: tl.constexpr = 8 // w.BITS
    m = tl.minimum(first_row + tl.arange(0, M), rows - 1).to(tl.int64)  # a row too many is the last one again
    column, byte = tl.arange(0, K).to(tl.int64), tl.arange(0, K // PER).to(tl.int64)
    x_rows, codes = x + m[:, None] * x0, w.codes + row[:, None] * w.codes0
    groups = width // w.GROUP if w.GROUP > 0 else 1
    zero = tl.full([1, 1], w.ZERO, tl.int16)
    if w.GROUP > 0:
        scale, zero = _of_group(begin, row, end, groups, w, N, K)
    elif w.offsets is not None:
        zero = read_zero(w, row[:, None], tl.zeros([1, 1], tl.int64), tl.full([1, 1], 1, tl.int1))
    down = 1.0
    SHIFTED: tl.constexpr = FOLD and w.DOT == tl.float16 and w.SCALE != "e4m3"  # noqa: SIM300 (an operand, not a constant)
    if SHIFTED:
        e = _row_exponent(row, width, groups, w, N)
        up, down = power_of_two(-e), power_of_two(e)
    acc = tl.zeros([N, M], tl.float32)
    for k in tl.range(begin, end, K, num_stages=STAGES):
        at = codes + (byte + k // PER)[None, :] * w.codes1
        where = (column + k)[None, :]
        if w.perm is not None:
            where = tl.load(w.perm + where, mask=where < width, other=0)
            where = tl.minimum(tl.maximum(where, 0), width - 1).to(tl.int64)
        if EVEN:
            stored = tl.load(at)
            values = tl.load(x_rows + where * x1)
        else:
            stored = tl.load(at, mask=(k + byte * PER < width)[None, :], other=0)
            values = tl.load(x_rows + where * x1, mask=(k + column < width)[None, :], other=0)
        values = tl.trans(values.to(w.DOT))
        made = numbers(stored, _spread(zero, w, N, K), w, N, K)
        if w.GROUP > 0:
            # Of the next step, a step early: too small to be copied asynchronously.
            next_scale, next_zero = _of_group(k + K, row, end, groups, w, N, K)
            if FOLD:
                factor = scale
                if SHIFTED:
                    factor = scale * up
                made = operand(made * _spread(operand(factor, w), w, N, K), w)
                acc = tl.dot(made, values, acc, input_precision="ieee")
            else:
                acc += tl.dot(made, values, input_precision="ieee") * scale
            scale, zero = next_scale, next_zero
        else:
            acc = tl.dot(made, values, acc, input_precision="ieee")
    return acc * down


@triton.jit
def _finish(y, n, m, rows, row, w: Weight, INTERPRETED: tl.constexpr):
    """Store finished sums y [M, N]: what a weight row shares, the bias, and one rounding."""
    factor = tl.full([1], w.UNIT, tl.float32)
    if w.GROUP == 0:
        factor = read_scale(w, row, 0, 1, n >= 0) * w.UNIT
    if w.tensor_scale is not None:
        factor *= tl.load(w.tensor_scale)
    y *= factor[None, :]
    if w.bias is not None:
        y += tl.load(w.bias + row).to(tl.float32)[None, :]
    at = w.out + m.to(tl.int64)[:, None] * w.n + n.to(tl.int64)[None, :]
    tl.store(at, rounded(y, w.out, INTERPRETED), mask=(m < rows)[:, None] & (n < w.n)[None, :])


@triton.jit
def _tile(
    x, x0, x1, tile, number, first_row, split, splits, share, rows, width, partial, counters, w: Weight,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, FOLD: tl.constexpr, STAGES: tl.constexpr,
    SPLIT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Tile `number` of the weight's rows, `tile` of the launch."""
    n = number * N + tl.arange(0, N)
    m = first_row + tl.arange(0, M)
    row = tl.minimum(n, w.n - 1).to(tl.int64)
    begin = split * share * K
    end = tl.minimum(begin + share * K, width)
    FOLDED: tl.constexpr = w.GROUP > 0 and (FOLD or w.GROUP < K)
    y = tl.trans(_sums(x, x0, x1, first_row, rows, begin, end, width, row, w, N, M, K, EVEN, FOLDED, STAGES))
    if not SPLIT:
        _finish(y, n, m, rows, row, w, INTERPRETED)
    else:
        place = (tl.arange(0, M) * N)[:, None] + tl.arange(0, N)[None, :]
        used = (m < rows)[:, None]
        first = partial + tile.to(tl.int64) * (M * N) * splits
        tl.store(first + split * (M * N) + place, y, mask=used)
        tl.debug_barrier()  # all of the sums, before they are counted
        if tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == splits - 1:
            y = tl.zeros([M, N], tl.float32)
            for i in tl.range(0, splits):
                y += tl.load(first + i * (M * N) + place, mask=used, other=0, cache_modifier=".cg")
            tl.store(counters + tile, 0)
            _finish(y, n, m, rows, row, w, INTERPRETED)


# Numbers that no address is made of are not specialised on: a kernel for each would be compiled for nothing.
@triton.jit(do_not_specialize=["rows", "width", "splits", "share"])
def _linear(
    x, x0, x1, weights, partial, counters, rows, width, splits, share,
    WEIGHTS: tl.constexpr, N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, FOLD: tl.constexpr,
    STAGES: tl.constexpr, SPLIT: tl.constexpr, TOGETHER: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    columns = 0  # tiles over the rows of all weights
    for i in tl.static_range(WEIGHTS):
        columns += tl.cdiv(weights[i].n, N)
    # Programs that run at the same time share both rows of x and rows of the weight, which then come from the L2 cache.
    down = tl.cdiv(rows, M)
    block = tile // (TOGETHER * columns)
    height = tl.minimum(down - block * TOGETHER, TOGETHER)
    inside = tile - block * TOGETHER * columns
    first_row = (block * TOGETHER + inside % height) * M
    number = inside // height
    for i in tl.static_range(WEIGHTS):
        count = tl.cdiv(weights[i].n, N)
        if (number >= 0) & (number < count):
            _tile(
                x, x0, x1, tile, number, first_row, split, splits, share, rows, width, partial, counters, weights[i],
                N, M, K, EVEN, FOLD, STAGES, SPLIT, INTERPRETED,
            )  # fmt: skip
        number -= count


# -------------------------------------------------------------------------------------------------------------- host code


def tile_count(features: Sequence[int], rows: int, tiles: LinearTiles) -> int:
    """Tiles of a launch, each with a counter where K is split."""
    return sum(-(-n // tiles.block_n) for n in features) * -(-rows // tiles.block_m)


def workspace_floats(features: Sequence[int], rows: int, tiles: LinearTiles) -> int:
    """fp32 numbers of workspace."""
    return tile_count(features, rows, tiles) * tiles.splits * tiles.block_n * tiles.block_m if tiles.splits > 1 else 0


def launch(
    x: torch.Tensor,
    weights: Sequence[QuantTensor],
    biases: Sequence[torch.Tensor | None],
    outs: Sequence[torch.Tensor],
    tiles: LinearTiles,
    workspace: torch.Tensor | None,
    counters: torch.Tensor | None,
) -> None:
    """x [M, K], fp16 or bf16, any strides; outs [M, N] each in x's dtype, contiguous, all written. Nothing is empty.

    Tensors of one axis are contiguous. With tiles.splits > 1: `workspace`, `workspace_floats` fp32, which may hold anything, and
    `counters`, `tile_count` int32 zeros, zero again afterwards.
    """
    rows, width = x.shape
    features = [w.shape[0] for w in weights]
    _linear[(tile_count(features, rows, tiles) * tiles.splits,)](
        x, *x.stride(), tuple(weight(*each, x.dtype) for each in zip(weights, biases, outs, strict=True)),
        workspace, counters, rows, width, tiles.splits, tiles.share,
        WEIGHTS=len(weights), N=tiles.block_n, M=tiles.block_m, K=tiles.block_k, EVEN=width % tiles.block_k == 0, FOLD=tiles.fold,
        STAGES=tiles.num_stages, SPLIT=tiles.splits > 1, TOGETHER=16, INTERPRETED=INTERPRETED, num_warps=tiles.num_warps,
    )  # fmt: skip
