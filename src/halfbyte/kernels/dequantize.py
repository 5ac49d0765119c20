"""Rows of quantized weights written out in 16 bits: one launch for one weight, for two or three that lie one below the other, or
for the same rows of every expert of a stack that has tokens.

    out[n, k] = round16((unit(code[n, k]) - zero[n, k / g]) * scale[n, k / g])

in f32 and rounded once, which gives the bits of `reference.quantize.dequantize`: kernels are compiled without FP fusion.

A program takes a tile of ROWS rows and GROUPS groups of SIZE columns of one weight, codes as bytes, and one
scale a group. Under one scale for a whole row, SIZE columns are a piece of that row. Tables of 16 values live in the instructions:
a tree of selects on the bits of a code needs no memory. In act-order a column goes where `perm` says,
and where that is out of range to the nearest column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from halfbyte.formats import Format
from halfbyte.kernels.common.encode import as_dtype
from halfbyte.kernels.common.scales import from_e4m3, from_e8m0
from halfbyte.plans.gemm_slabs import slab_shares
from halfbyte.plans.weight_codec import weight_codec
from halfbyte.reference.dequantize import dynamic_map
from halfbyte.tensors import QuantTensor

#: The interpreter rounds to bf16 by cutting off, which integers do better.
INTERPRETED = triton.knobs.runtime.interpret
#: Weights of one launch.
MOST = 3
#: Numbers of a tile, 32 a thread; columns of a tile at most; columns of a piece of a row that has one scale.
_TILE, _COLUMNS, _PIECE = 4096, 1024, 128

#: A weight as the kernel takes it: its tensors (None where it has none; `mean` is the last number of `nested`, `table` the 256
#: values of nested scales) and F, its format (`WeightCodec`).
Weight = NamedTuple(
    "Weight",
    [(name, Any) for name in ("codes", "scales", "offsets", "tensor_scale", "nested", "mean", "table", "perm", "F")],
)


# ------------------------------------------------------------------------------------------------------- the kernel


@triton.jit
def _look_up(code, F: tl.constexpr, BITS: tl.constexpr):
    """F.values[code] in f32 for int32 codes of BITS bits: bit by bit, each level of the tree half of the one before."""
    parts = ()
    for i in tl.static_range(2 ** (BITS - 1)):
        parts += (tl.where((code & 1) == 0, F.values[2 * i], F.values[2 * i + 1]),)
    for bit in tl.static_range(1, BITS):
        left = ()
        for i in tl.static_range(2 ** (BITS - 1 - bit)):
            left += (tl.where((code & (1 << bit)) == 0, parts[2 * i], parts[2 * i + 1]),)
        parts = left
    return parts[0]


@triton.jit
def _unit(code, w: Weight):
    """The value of int32 codes before any scale, f32."""
    if w.F.kind == "unsigned" or w.F.kind == "signed":
        unit = (code - w.F.bias).to(tl.float32)
    elif w.F.mirrored:
        magnitude = _look_up(code & 7, w.F, 3)
        unit = (magnitude.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)
    else:
        unit = _look_up(code, w.F, 4)
    return unit


@triton.jit
def _scales(at, row, seen, w: Weight, STACK: tl.constexpr):
    """The scales at these places, [ROWS, GROUPS], as plain numbers, f32. Rows [ROWS, 1] of a STACK have a tensor scale each."""
    stored = tl.load(w.scales + at, mask=seen, other=0)
    if w.F.nested:
        scale = tl.load(w.table + stored.to(tl.int32)) * tl.load(w.nested + at // w.F.nested, mask=seen, other=0) + tl.load(w.mean)
    elif w.F.scale == "e8m0":
        scale = from_e8m0(stored)
    elif w.F.scale == "e4m3":
        scale = from_e4m3(stored)
        if w.tensor_scale is not None:
            scale *= tl.load(w.tensor_scale + row, mask=seen, other=0) if STACK else tl.load(w.tensor_scale)
    else:
        scale = stored.to(tl.float32)
    return scale


@triton.jit
def _tile(
    out, stride, w: Weight, perm, first, rows, target, block, width,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, STACK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Rows block * ROWS ... of `rows` rows of a weight, which begin at its row `first` and at row `target` of out.

    perm: the order of their columns, or None.
    """
    r = block * ROWS + tl.arange(0, ROWS)
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    row = (first + r).to(tl.int64)
    here = (r < rows)[:, None] & (g * SIZE < width)[None, :]  # [ROWS, GROUPS]
    at = row[:, None] * (width // SIZE) + g[None, :] if w.F.group else row[:, None] + g[None, :] * 0
    scale = _scales(at, row[:, None], here, w, STACK)[:, :, None]

    byte = g[:, None] * (SIZE // w.F.per_byte) + tl.arange(0, SIZE // w.F.per_byte)[None, :]  # [GROUPS, SIZE / per_byte]
    seen = here[:, :, None] & (byte < width // w.F.per_byte)[None, :, :]
    codes = tl.load(w.codes + row[:, None, None] * (width // w.F.per_byte) + byte[None, :, :], mask=seen, other=0).to(tl.int32)
    zero = 0.0
    if w.offsets is not None:
        zero = tl.load(w.offsets + at, mask=here, other=0).to(tl.float32)[:, :, None]
    if w.F.per_byte == 2:
        numbers = tl.interleave((_unit(codes & 15, w) - zero) * scale, (_unit(codes >> 4, w) - zero) * scale)
    else:
        numbers = (_unit(codes, w) - zero) * scale

    column = g[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = here[:, :, None] & (column < width)[None, :, :]
    if perm is not None:
        column = tl.minimum(tl.maximum(tl.load(perm + column, mask=column < width, other=0), 0), width - 1)
    to = out + (target + r).to(tl.int64)[:, None, None] * stride + column[None, :, :]
    rounded = as_dtype(numbers, out.dtype.element_ty) if INTERPRETED else numbers.to(out.dtype.element_ty)
    tl.store(to, rounded, mask=inside)


@triton.jit(do_not_specialize=["a_first", "b_first", "c_first", "a_rows", "b_rows", "c_rows"])
def dequantize_rows(
    out, stride, a: Weight, b: Weight, c: Weight, a_first, b_first, c_first, a_rows, b_rows, c_rows, width,
    SIZES: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out [a_rows + b_rows + c_rows, width]: so many rows of each weight, from row `first` of each on; b and c may be None."""
    block = tl.program_id(0)
    of_a, of_b = tl.cdiv(a_rows, ROWS), tl.cdiv(b_rows, ROWS)
    if block < of_a:
        _tile(out, stride, a, a.perm, a_first, a_rows, 0, block, width, SIZES[0], GROUPS[0], ROWS, False, INTERPRETED)
    if len(SIZES) > 1:  # noqa: SIM102  (known to the compiler, which the block is not)
        if (block >= of_a) & (block < of_a + of_b):
            at = block - of_a
            _tile(out, stride, b, b.perm, b_first, b_rows, a_rows, at, width, SIZES[1], GROUPS[1], ROWS, False, INTERPRETED)
    if len(SIZES) > 2:  # noqa: SIM102
        if block >= of_a + of_b:
            at = block - of_a - of_b
            above = a_rows + b_rows
            _tile(out, stride, c, c.perm, c_first, c_rows, above, at, width, SIZES[2], GROUPS[2], ROWS, False, INTERPRETED)


@triton.jit(do_not_specialize=["first", "rows"])
def dequantize_experts(
    out, starts, w: Weight, first, rows, N, width,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out [E, rows, width]: rows first ... of the N of each expert to which `starts`, [E + 1], gives anything; the others stay."""
    blocks = tl.cdiv(rows, ROWS)
    expert, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if tl.load(starts + expert + 1) > tl.load(starts + expert):
        wide = expert.to(tl.int64)
        perm = w.perm
        if w.perm is not None:
            perm = w.perm + wide * width
        _tile(out, width, w, perm, wide * N + first, rows, wide * rows, block, width, SIZE, GROUPS, ROWS, True, INTERPRETED)


# ------------------------------------------------------------------------------------------------------- the launch


def launch(weights: Sequence[QuantTensor], out: torch.Tensor, first: int) -> None:
    """out [rows, K], fp16 or bf16, with any row stride: rows first, first + 1 ... of one to three weights [N, K], one below
    the other. Their formats may differ. Parts are contiguous and nothing is empty.
    """
    width = out.shape[1]
    shares = slab_shares([w.shape[0] for w in weights], first, out.shape[0])
    absent = MOST - len(weights)
    starts, counts = ([*(share[i] for share in shares), *[0] * absent] for i in (0, 1))
    sizes, columns, tile_rows = _tiles([w.format for w in weights], width)
    groups = [columns // size for size in sizes]
    grid = (sum(triton.cdiv(n, tile_rows) for n in counts), triton.cdiv(width, columns))
    dequantize_rows[grid](
        out, out.stride(0), *(as_argument(w) for w in weights), *[None] * absent, *starts, *counts, width,
        SIZES=tuple(sizes), GROUPS=tuple(groups), ROWS=tile_rows, INTERPRETED=INTERPRETED,
        num_warps=4, enable_fp_fusion=False, enable_reflect_ftz=False,
    )  # fmt: skip


def launch_experts(weight: QuantTensor, starts: torch.Tensor, out: torch.Tensor, first: int) -> None:
    """out [E, rows, K], contiguous, fp16 or bf16: rows first ... of the experts of a stack [E, N, K] that have any pairs.

    starts [E + 1] int32: where the pairs of each expert begin. Other experts' rows of `out` stay as they are.
    """
    (experts, rows, width), (sizes, columns, tile_rows) = out.shape, _tiles([weight.format], out.shape[2])
    grid = (experts * triton.cdiv(rows, tile_rows), triton.cdiv(width, columns))
    dequantize_experts[grid](
        out, starts, as_argument(weight), first, rows, weight.shape[1], width,
        SIZE=sizes[0], GROUPS=columns // sizes[0], ROWS=tile_rows, INTERPRETED=INTERPRETED,
        num_warps=4, enable_fp_fusion=False, enable_reflect_ftz=False,
    )  # fmt: skip


def as_argument(weight: QuantTensor) -> Weight:
    """A weight's tensors and constants."""
    codec, nested = weight_codec(weight.format), weight.nested
    table, mean = (None, None) if nested is None else (dynamic_map(weight.device), nested[-1:])
    # The interpreter takes a constant of a tuple as it is, and sees no attributes through a constexpr.
    of_format = codec if INTERPRETED else tl.constexpr(codec)
    return Weight(weight.codes, weight.scales, weight.offsets, weight.tensor_scale, nested, mean, table, weight.perm, of_format)


def _tiles(formats: Sequence[Format], width: int) -> tuple[list[int], int, int]:
    """Columns under one scale of each format; columns and rows of a tile."""
    sizes = [_size(fmt, width) for fmt in formats]
    columns = max(*sizes, min(_COLUMNS, triton.next_power_of_2(width)))
    return sizes, columns, max(1, _TILE // columns)


def _size(fmt: Format, width: int) -> int:
    """Columns that a program reads under one scale: those of a group, or a piece of a row that has no groups."""
    return fmt.group_size(width) if fmt.granularity == "group" else _PIECE
