"""`linear` and `qkv_projection` in plain Triton, for every weight format, number of rows, shape and stride: the portable level.

    y^T [N, M] = W [N, K] x^T + bias        W[n, k] = s[n, k / g] (c[n, k] - z[n, k / g])

A program takes a tile of weight rows and of rows of x and walks its share of K. Decoded numbers are the left operand of the
product, so that on Hopper they go from registers into the tensor cores: bytes are copied to shared memory as they are stored, read
in the layout of the operand and decoded there. c - z is exact in 16 bits (portable_weight.py). Products take 16-bit operands
and add in fp32.

Scales of rows multiply the finished sums, in fp32. Those of groups multiply fp32 sums of a step of K inside of one group, or, FOLD,
the numbers in 16 bits before the product: exactly for MXFP4 and NVFP4; else with one rounding of the weight for fp16 and two for
bf16, where the scale is rounded too; a 16-bit weight has one. Relative L2 error, measured over all formats, as a share of that of
a 16-bit product: at most 0.9 with fp32 sums and 1.4 folded, where 2 is promised. Folded, both have the range of 16 bits.

Several weights (q, k and v) are one launch: their tiles follow one another. Splits of K leave fp32 sums in a workspace; the last
to arrive adds them in the order of the splits. No floating-point atomics. A row of x meets no other row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from halfbyte.formats import WEIGHT_FORMATS, Format
from halfbyte.kernels.aot.compiling import Configuration, empty, recorded
from halfbyte.kernels.common.codes import rounded
from halfbyte.kernels.decode.kv_args import INTERPRETED
from halfbyte.kernels.linear.portable_weight import Weight, numbers, operand, read_scale, read_zero, weight
from halfbyte.plans.linear_portable import LinearTiles, linear_tiles
from halfbyte.tensors import QuantTensor, expected_parts

# ------------------------------------------------------------------------------------------------------------ device code


@triton.jit
def _of_step(k, row, end, groups, w: Weight, K: tl.constexpr, EVEN: tl.constexpr):
    """Scales (fp32) and zero points (int16) of columns k .. k + K: [N, 1] of one group, or [N, K / GROUP]."""
    group = k // w.GROUP
    if w.GROUP < K:
        group += tl.arange(0, K // w.GROUP)[None, :]
    seen = None
    if not EVEN and w.GROUP < K:
        seen = group * w.GROUP < end
    scale = read_scale(w, row[:, None], group, groups, seen)
    zero = tl.full([1, 1], w.ZERO, tl.int16)
    if w.offsets is not None:
        zero = read_zero(w, row[:, None], group, seen)
    return scale, zero


@triton.jit
def _spread(small, w: Weight, N: tl.constexpr, K: tl.constexpr):
    """[N, K / GROUP] over the columns of its groups, [N, K]; what one group has stays [N, 1]."""
    if w.GROUP > 0 and w.GROUP < K and small.shape[1] > 1:
        small = tl.reshape(tl.broadcast_to(small[:, :, None], (N, K // w.GROUP, w.GROUP)), (N, K))
    return small


@triton.jit
def _sums(
    first_row, rows, begin, end, width, row, w: Weight,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, FOLD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """fp32 [N, M]: weight rows `row` [N] times M rows of x over columns begin .. end, but for what a whole weight row shares."""
    PER: tl.constexpr = 8 // w.BITS
    m = tl.minimum(first_row + tl.arange(0, M), rows - 1).to(tl.int64)  # a row too many is the last one again
    column, byte = tl.arange(0, K).to(tl.int64), tl.arange(0, K // PER).to(tl.int64)
    x_rows, codes = w.x + m[:, None] * w.x0, w.codes + row[:, None] * w.codes0
    groups = width // w.GROUP if w.GROUP > 0 else 1
    row_zero = tl.full([1, 1], w.ZERO, tl.int16)
    if w.GROUP == 0 and w.offsets is not None:
        row_zero = read_zero(w, row[:, None], 0, None)
    acc = tl.zeros([N, M], tl.float32)
    for k in tl.range(begin, end, K, num_stages=STAGES):
        at = codes + (byte + k // PER)[None, :] * w.codes1
        where = (column + k)[None, :]
        if w.perm is not None:
            where = tl.load(w.perm + where, mask=where < width, other=0)
            where = tl.minimum(tl.maximum(where, 0), width - 1).to(tl.int64)
        if EVEN:
            stored = tl.load(at)
            values = tl.load(x_rows + where * w.x1)
        else:
            stored = tl.load(at, mask=(k + byte * PER < width)[None, :], other=0)
            values = tl.load(x_rows + where * w.x1, mask=(k + column < width)[None, :], other=0)
        values = tl.trans(values.to(w.DOT))
        if w.GROUP == 0:
            acc = tl.dot(numbers(stored, row_zero, w, N, K), values, acc, input_precision="ieee")
        else:
            scale, zero = _of_step(k, row, end, groups, w, K, EVEN)
            made = numbers(stored, _spread(zero, w, N, K), w, N, K)
            if FOLD:
                made = operand(made * _spread(operand(scale, w), w, N, K), w)
                acc = tl.dot(made, values, acc, input_precision="ieee")
            else:
                acc += tl.dot(made, values, input_precision="ieee") * scale
    return acc


@triton.jit
def _finish(y, n, m, rows, row, w: Weight, INTERPRETED: tl.constexpr):
    """Store finished sums y [M, N]: what a weight row shares, the bias, and one rounding."""
    factor = tl.full([1], w.UNIT, tl.float32)
    if w.GROUP == 0:
        factor = read_scale(w, row, 0, 1, None) * w.UNIT
    if w.tensor_scale is not None:
        factor *= tl.load(w.tensor_scale)
    y *= factor[None, :]
    if w.bias is not None:
        y += tl.load(w.bias + row).to(tl.float32)[None, :]
    at = w.out + m.to(tl.int64)[:, None] * w.n + n.to(tl.int64)[None, :]
    tl.store(at, rounded(y, w.out, INTERPRETED), mask=(m < rows)[:, None] & (n < w.n)[None, :])


@triton.jit
def _tile(
    tile, number, first_row, split, splits, share, rows, width, partial, counters, w: Weight,
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
    y = tl.trans(_sums(first_row, rows, begin, end, width, row, w, N, M, K, EVEN, FOLDED, STAGES))
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
    weights, partial, counters, rows, width, splits, share,
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
                tile, number, first_row, split, splits, share, rows, width, partial, counters, weights[i],
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
    xs: Sequence[torch.Tensor],
    weights: Sequence[QuantTensor],
    biases: Sequence[torch.Tensor | None],
    outs: Sequence[torch.Tensor],
    tiles: LinearTiles,
    workspace: torch.Tensor | None,
    counters: torch.Tensor | None,
) -> None:
    """xs [M, K], fp16 or bf16, any strides, one for each weight; outs [M, N] in its dtype, contiguous, all written, not all empty.

    Tensors of one axis are contiguous. With tiles.splits > 1: `workspace`, `workspace_floats` fp32, which may hold anything, and
    `counters`, `tile_count` int32 zeros, zero again afterwards.
    """
    rows, width = xs[0].shape
    features = [w.shape[0] for w in weights]
    _linear[(tile_count(features, rows, tiles) * tiles.splits,)](
        tuple(weight(*each) for each in zip(xs, weights, biases, outs, strict=True)),
        workspace, counters, rows, width, tiles.splits, tiles.share,
        WEIGHTS=len(weights), N=tiles.block_n, M=tiles.block_m, K=tiles.block_k, EVEN=width % tiles.block_k == 0, FOLD=tiles.fold,
        STAGES=tiles.num_stages, SPLIT=tiles.splits > 1, TOGETHER=16, INTERPRETED=INTERPRETED, num_warps=tiles.num_warps,
    )  # fmt: skip


#: (formats, rows, N, K, options): every format and kind of tile is in it, most with both kinds of x.
_SAMPLE = (
    *((name, rows, 4096, 4096, "") for name in WEIGHT_FORMATS for rows in (16, 1024)),
    ("int4_g128", 1, 4096, 4096, "fp16"),
    ("int4_g128", 64, 4096, 4096, "fp16 bias"),
    ("int4_g128", 100, 4096, 4096, "fp16"),
    ("int4_g64", 4096, 8192, 8192, "fp16"),
    ("nf4", 1024, 4096, 4096, "fp16"),
    ("mxfp4", 1024, 4096, 4096, "fp16"),
    ("int4_sym_g32", 64, 4096, 4096, "invariant"),
    ("int4_g128", 8, 4001, 4224, "perm bias strided"),
    ("nf4", 16, 4001, 4160, "perm fp16"),
    ("int4_g128 int4_g128 int4_g128", 1, 2048, 4096, ""),
    ("int4_g64 nf4 nvfp4", 1024, 2048, 4096, "bias"),
)


def configurations() -> list[Configuration]:
    """The sample's calls, with the tiles that a plan gives them: those of Hopper, and those of older GPUs."""
    return [c for call in _SAMPLE for c in _configurations(*call)]


def _configurations(formats: str, rows: int, n: int, width: int, options: str) -> Iterator[Configuration]:
    dtype = torch.float16 if "fp16" in options else torch.bfloat16
    weights = [_empty_weight(WEIGHT_FORMATS[name], n, width, "perm" in options) for name in formats.split()]
    x = empty(rows, 2 * width, dtype=dtype)[:, ::2] if "strided" in options else empty(rows, width, dtype=dtype)
    biases = [empty(n, dtype=dtype) if "bias" in options else None for _ in weights]
    outs = [empty(rows, n, dtype=dtype) for _ in weights]
    facts = [(w.format, n) for w in weights]
    seen: dict[LinearTiles, tuple[int, ...]] = {}
    for capability in (8, 9, 10):
        tiles = linear_tiles(
            facts,
            m=rows,
            width=width,
            num_sms=132,
            capability=(capability, 0),
            row_invariant="invariant" in options,
        )
        seen[tiles] = (*seen.get(tiles, ()), 10 * capability)
    for tiles, targets in seen.items():
        name = "-".join([*formats.split(), f"M{rows}", f"{tiles.block_n}x{tiles.block_m}x{tiles.block_k}", *options.split()])
        parts = empty(1, dtype=torch.float32), empty(1)
        yield from recorded(
            name, functools.partial(launch, [x] * len(weights), weights, biases, outs, tiles, *parts), targets=targets
        )


def _empty_weight(fmt: Format, n: int, width: int, act_order: bool) -> QuantTensor:
    parts = expected_parts(fmt, (n, width), act_order=act_order)
    return QuantTensor(fmt, (n, width), **{name: empty(*shape, dtype=dtype) for name, (shape, dtype) in parts.items()})
