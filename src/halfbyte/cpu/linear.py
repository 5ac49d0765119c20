"""A GEMM with a quantized weight: the `cpu` level of `linear`.

A stored weight is w = scale * (unit - zero), with units on a small grid. Where loops can be compiled (`cpu.threads`), x is
multiplied by the codes as they lie in memory, for a small M. A bf16 x: by AMX for M up to `AMX_M`, or in tiles
for M up to `TILE_M`, or by rows for M = 1, as the CPU has instructions. Any other x: for M up to `SMALL_M`. All else decodes a
block of the weight's rows into a buffer that stays in cache until a GEMM multiplies it: torch's, or one by AMX, for a bf16 x. Sums
are fp32 (float64 for a float64 x), and nothing is rounded to x's dtype before the bias is in. For a larger M the block is rounded
to bf16, as in a model of 16 bits, for a bf16 x on CPUs that multiply bf16.

Zero points come off the codes, where the difference is exact; in tiles they come off sums of few columns. Subtracted from the
GEMM instead, as the sum over groups of scale * zero * (sum of x), they would cancel: both terms are many times the result where x
has a mean.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from halfbyte.cpu.codes import unpack_into
from halfbyte.cpu.derived import Derived
from halfbyte.cpu.threads import compiler_works, over_rows
from halfbyte.device import SPINNING, cpu_has_bf16
from halfbyte.formats import Code, Format
from halfbyte.reference.dequantize import block_scales, expert_scales, plain_scales
from halfbyte.reference.linear import rounded_weight, rounded_x, rounds
from halfbyte.tensors import QuantTensor

#: Numbers in one block of rows: few enough for a CPU's cache, enough to hide the cost of calling an operator. torch's GEMM of bf16
#: packs its operands again, and so gains by larger ones.
BLOCK, BLOCK_BF16 = 1 << 19, 1 << 23
#: Largest M for which x is multiplied by the codes: by AMX, in tiles or by rows. Beyond, a GEMM on decoded blocks
#: is faster.
AMX_M, TILE_M, SMALL_M = 64, 16, 8
#: Tokens of x that are put into the order of matrix registers at a time.
AMX_TOKENS = 1024

Array = np.ndarray[Any, Any]


class Matrix(NamedTuple):
    """A weight [N, K], or that of one expert, by its parts; scales [N, G] that were nested are decoded."""

    format: Format
    codes: torch.Tensor
    scales: torch.Tensor | None
    offsets: torch.Tensor | None
    tensor_scale: torch.Tensor | None

    def plain_scales(self, dtype: torch.dtype) -> torch.Tensor | None:
        """[N, G] in `dtype`."""
        return None if self.scales is None else plain_scales(self.scales, self.format, self.tensor_scale, dtype)


def matrix(weight: QuantTensor, dtype: torch.dtype, expert: int | None = None) -> Matrix:
    """The whole weight [N, K], or one of a stack [E, N, K]; scales that were nested in fp32, or float64 if `dtype` is."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    if expert is None:
        scales = weight.scales if weight.nested is None else block_scales(weight, wide)
        return Matrix(weight.format, weight.codes, scales, weight.offsets, weight.tensor_scale)
    parts = (None if part is None else part[expert] for part in (weight.scales, weight.offsets, weight.tensor_scale))
    whole = Matrix(weight.format, weight.codes[expert], *parts)
    return whole if weight.nested is None else whole._replace(scales=expert_scales(weight, expert, wide))


def linear(x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., K] times the rows of `weight` [N, K], plus bias [N]: [..., N] in x's dtype."""
    features, width = weight.shape
    rows = x.reshape(x.shape[:-1].numel(), width)  # [M, K]; either may be 0
    if rounds(x, weight):
        return _plus(_product_of_integers(rows, weight), bias).mT.to(x.dtype).contiguous().view(*x.shape[:-1], features)
    if _fits_tiles(rows, (weight,)):
        return by_tiles(x, tile_rows(x), weight, bias)
    if _fits_blocks(rows, weight):
        return _by_blocks(x, weight, bias)
    if not _multiplies_bf16(rows, bias):
        rows = rows.to(torch.float64 if x.dtype is torch.float64 else torch.float32)
    if weight.perm is not None:
        rows = rows.index_select(1, weight.perm)  # the columns of x in the order of the stored ones
    return product(rows, weight, bias).mT.to(x.dtype).contiguous().view(*x.shape[:-1], features)


def _product_of_integers(rows: torch.Tensor, weight: QuantTensor) -> torch.Tensor:
    """[N, M] in fp32 of x [M, K] and a weight that are rounded, a block of the weight's rows at a time."""
    (c, token), y = rounded_x(rows), rows.new_empty(weight.shape[0], len(rows), dtype=torch.float32)
    columns, step = c.float().mT, max(1, BLOCK // weight.shape[1])
    for lo in range(0, len(y), step):
        parts = {name: part if name == "perm" else part[lo : lo + step] for name, part in weight.parts().items()}
        d, row = rounded_weight(QuantTensor(weight.format, (len(parts["codes"]), weight.shape[1]), **parts))
        torch.mm(d.float(), columns, out=y[lo : lo + step]).mul_(row.unsqueeze(-1))
    return y.mul_(token)


def in_tiles(x: torch.Tensor, weights: Sequence[QuantTensor]) -> bool:
    """Whether x [..., K] is multiplied in tiles of each of these weights [N, K]."""
    return _multiply(x, weights) and _fits_tiles(_rows(x), weights)


def by_codes(x: torch.Tensor, weight: QuantTensor) -> bool:
    """Whether x [..., K], in fp32, is multiplied by the codes of this weight [N, K]."""
    return _multiply(x, (weight,)) and _fits_codes(rows := _rows(x)) and not _fits_tiles(rows, (weight,))


def _multiply(x: torch.Tensor, weights: Sequence[QuantTensor]) -> bool:
    """Whether these are tensors of a product on a CPU."""
    if type(x) is not torch.Tensor or not x.ndim or not x.numel():
        return False
    for w in weights:
        if not isinstance(w, QuantTensor) or len(w.shape) != 2 or w.shape[1] != x.shape[-1] or not w.codes.is_cpu:
            return False
    return True


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[M, K]."""
    return x.view(1, -1) if x.numel() == x.shape[-1] else x.reshape(-1, x.shape[-1])


def _fits_tiles(rows: torch.Tensor, weights: Sequence[QuantTensor]) -> bool:
    """Whether x [M, K] is multiplied in tiles of weights. One row and codes of 8 bits are faster without."""
    count = rows.shape[0]
    if rows.dtype is not torch.bfloat16 or count > AMX_M or not _is_compiled(rows):
        return False
    for w in weights:
        if w.shape[0] < 16 or (count == 1 and w.format.code.per_byte != 2):
            return False
    return _amx_works() or (count <= TILE_M and _tiles_work())


def _fits_codes(rows: torch.Tensor) -> bool:
    """Whether x [M, K] is multiplied by codes, unless it fits tiles."""
    return len(rows) <= SMALL_M and _is_compiled(rows)


def _fits_blocks(rows: torch.Tensor, weight: QuantTensor) -> bool:
    """Whether blocks of a weight, decoded to bf16, are multiplied by a large x [M, K] by AMX."""
    is_large = rows.dtype is torch.bfloat16 and len(rows) > AMX_M and weight.shape[0] >= 16
    scale = weight.tensor_scale  # one number is part of the others
    return is_large and _is_compiled(rows) and _amx_works() and (scale is None or scale.numel() == 1)


@functools.cache
def _tiles_work() -> bool:
    from halfbyte.cpu.compiled.tiles import works

    return works()


@functools.cache
def _amx_works() -> bool:
    from halfbyte.cpu.compiled.amx import works

    return works()


def _multiplies_bf16(rows: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether to take the GEMM of bf16: where it is fast, blocks can be decoded to bf16, and the bias is bf16, too."""
    types = {rows.dtype} if bias is None else {rows.dtype, bias.dtype}
    return types == {torch.bfloat16} and len(rows) > SMALL_M and _is_compiled(rows) and cpu_has_bf16()


def _is_compiled(rows: torch.Tensor) -> bool:
    """Whether compiled loops multiply or decode for x [M, K]."""
    return rows.is_cpu and rows.numel() > 0 and rows.dtype is not torch.float64 and rows.shape[1] % 32 == 0 and compiler_works()


def product(rows: torch.Tensor, weight: QuantTensor | Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """[N, M] of rows [M, K], in fp32 or float64 as they are, or by the GEMM of bf16 rounded to it; bias [N]."""
    if rows.dtype is torch.float32 and _fits_codes(rows):
        return _plus(_by_codes(rows, compiled(weight)), bias)
    is_compiled = _is_compiled(rows)
    if rows.is_cpu and not is_compiled:
        SPINNING.step()
    decode = compiled(weight) if is_compiled else _Torch(_whole(weight, rows.dtype), rows.dtype)
    features = len(weight.codes)
    if rows.dtype is torch.bfloat16:
        return _by_bf16(rows, features, bias, decode)
    y = rows.new_empty(features, rows.shape[0])  # [N, M]: a block's rows are in one piece, and the product is faster so
    columns = decode.columns(rows).mT
    for lo, block in _blocks(rows, features, BLOCK):
        decode.into(block, lo)
        torch.mm(block, columns, out=y[lo : lo + len(block)])
    return _plus(decode.scaled(y), bias)


def _whole(weight: QuantTensor | Matrix, dtype: torch.dtype) -> Matrix:
    return weight if isinstance(weight, Matrix) else matrix(weight, dtype)


def _by_bf16(rows: torch.Tensor, features: int, bias: torch.Tensor | None, decode: _Compiled | _Torch) -> torch.Tensor:
    """`product` of bf16, in the order that torch has a fast GEMM for."""
    y = rows.new_empty(rows.shape[0], features)
    for lo, block in _blocks(rows, features, BLOCK_BF16):
        decode.into(block, lo)
        hi = lo + len(block)
        y[:, lo:hi] = torch.nn.functional.linear(rows, block, None if bias is None else bias[lo:hi])
    return y.mT


def _by_codes(rows: torch.Tensor, weight: _Compiled) -> torch.Tensor:
    """`product` without a bias, without decoding anything to memory."""
    from halfbyte.cpu.compiled.linear import products

    y = rows.new_empty(weight.features, len(rows))
    x = weight.columns(rows.detach()).contiguous()
    over_rows(products, len(y), y.numel() * rows.shape[1], *weight.arrays(), x.numpy(), y.numpy())
    return weight.scaled(y)


def tile_rows(x: torch.Tensor) -> Array:
    """x [..., K] in bf16 as tiles take it: int32 [M, K / 2], pairs of numbers."""
    rows = x.detach().reshape(-1, x.shape[-1]).contiguous()
    pairs: Array = (rows if rows.data_ptr() % 4 == 0 and rows.storage_offset() % 2 == 0 else rows.clone()).view(torch.int32).numpy()
    return pairs


def by_tiles(x: torch.Tensor, rows: Array, weight: QuantTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear` of a bf16 x that fits tiles; `rows` are its rows."""
    return torch.from_numpy(tile_sums(x, rows, weight, bias)).to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def tile_sums(x: torch.Tensor, rows: Array, weight: QuantTensor, bias: torch.Tensor | None) -> Array:
    """The same in fp32, [M, N]."""
    if weight.perm is not None:
        rows = tile_rows(x.reshape(-1, x.shape[-1]).index_select(1, weight.perm))
    own, (count, pairs) = compiled(weight), rows.shape
    y = np.empty((1 << (count - 1).bit_length(), own.features), np.float32)
    loop, steps = own.loops.get(len(y)) or own.tile_loop(len(y))
    over_rows(loop, -(-own.features // 16), steps, *own.tiles, rows, y, 2 * pairs // own.piece)
    y = y[:count]
    if own.tensor_scale is not None:
        own.scaled(torch.from_numpy(y).mT)
    if bias is not None:
        torch.from_numpy(y).add_(bias)
    return y


def code_sums(x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None) -> Array:
    """x W^T + bias in fp32, [M, N], of an x that is multiplied by codes."""
    rows = _rows(x.detach()).float()
    sums: Array = product(rows if weight.perm is None else rows.index_select(1, weight.perm), weight, bias).mT.numpy()
    return sums


def _by_blocks(x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear` of a bf16 x that fits blocks."""
    from halfbyte.cpu.compiled import amx_large
    from halfbyte.cpu.compiled.tiles import aligned

    own, rows = compiled(weight), x.reshape(-1, x.shape[-1])
    assert own.tensor_scale is None
    if weight.perm is not None:
        rows = rows.index_select(1, weight.perm)
    (count, width), features = rows.shape, own.features
    addend = np.zeros(features, np.float32) if bias is None else np.ascontiguousarray(bias.detach().float().numpy())
    y = np.empty((count, features), np.uint16)
    for first in range(0, count, AMX_TOKENS):
        some, part = tile_rows(rows[first : first + AMX_TOKENS]), y[first : first + AMX_TOKENS]
        tiles = -(-len(part) // 32) * 2
        columns = aligned(tiles * width * 8).reshape(tiles, width // 32, 16, 16)
        over_rows(amx_large.arrange, tiles, columns.size, some, columns)
        over_rows(amx_large.amx_large, -(-features // 16), part.size * width, *own.arrays(), columns, addend, part)
    return torch.from_numpy(y).view(torch.bfloat16).view(*x.shape[:-1], features)


def _plus(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y.add_(bias.unsqueeze(-1))


def _blocks(rows: torch.Tensor, features: int, numbers: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, memory [rows, K] to decode to) of each block of a weight; the memory is the same."""
    step = max(1, min(numbers // max(rows.shape[1], 1), features))
    buffer = rows.new_empty(step, rows.shape[1])
    for lo in range(0, features, step):
        yield lo, buffer[: features - lo]


class _Torch:
    """Blocks of rows, decoded by torch's operators. A scale of a whole row stays outside of the product."""

    def __init__(self, weight: Matrix, dtype: torch.dtype) -> None:
        self.weight, self.scales = weight, weight.plain_scales(dtype)

    def columns(self, rows: torch.Tensor) -> torch.Tensor:
        """x [M, K], its columns in the order of decoded ones."""
        return rows

    def into(self, block: torch.Tensor, lo: int) -> None:
        """Rows from `lo` on."""
        weight, scales, hi = self.weight, self.scales, lo + len(block)
        unpack_into(block, weight.codes[lo:hi], weight.format.code, None if weight.offsets is None else weight.offsets[lo:hi])
        if scales is not None and scales.shape[-1] > 1:
            block.unflatten(-1, (scales.shape[-1], -1)).mul_(scales[lo:hi].unsqueeze(-1))

    def scaled(self, y: torch.Tensor) -> torch.Tensor:
        """y [N, M] with what `into` left out."""
        return y.mul_(self.scales) if self.scales is not None and self.scales.shape[-1] == 1 else y


class _Compiled:
    """The same by a compiled loop, which writes the even columns of 4-bit codes first, then the odd ones."""

    def __init__(self, weight: Matrix) -> None:
        assert weight.scales is not None
        code, scales = weight.format.code, weight.scales
        self.features, self.nibbles, self.tensor_scale = len(weight.codes), code.per_byte == 2, weight.tensor_scale
        floats = scales.is_floating_point()
        by_byte = None if floats else _scale_table(weight.format)
        if by_byte is not None and self.tensor_scale is not None and self.tensor_scale.numel() == 1:
            by_byte, self.tensor_scale = by_byte * self.tensor_scale, None
        self.tables = (_codebook(code) if self.nibbles else None, by_byte)
        if floats:
            scales = scales.view(torch.uint16) if scales.dtype is torch.float16 else scales.float()
        self.parts = tuple(None if part is None else part.detach().contiguous() for part in (weight.codes, scales, weight.offsets))
        self.groups = scales.shape[-1]
        group = weight.codes.shape[1] * code.per_byte // self.groups
        #: Of tiles: columns of a piece, and the arrays of all rows.
        self.piece = next((size for size in (128, 96, 64, 32, 16) if group % size == 0), 0)
        codes, _, *rest = self.arrays()
        self.tiles = codes, *(_bf16_tables(code) if self.nibbles else (None, None)), *rest
        #: By M, as a power of two.
        self.loops: dict[int, tuple[Any, int]] = {}

    def tile_loop(self, count: int) -> tuple[Any, int]:
        """The loop of tiles for an x of at most `count` rows, and its steps as `over_rows` counts them."""
        from halfbyte.cpu.compiled import amx, rows, tiles

        columns = self.tiles[0].shape[1] * (2 if self.nibbles else 1)
        steps = count * self.features * columns // 4  # a code takes a quarter of the time that it takes elsewhere
        if count == 1 and self.nibbles:
            loop = rows.loop_for(max(1, rows.STEP * self.groups // columns), columns % rows.STEP)
        elif _amx_works():
            loop = amx.loop_for(-(-count // 16), self.piece, amx.block_of(columns, self.piece))
            steps = self.features * columns // 2
        else:
            loop = tiles.loop_for(count, self.piece == 16)
        self.loops[count] = loop, steps
        return loop, steps

    def arrays(self, lo: int = 0, hi: int | None = None) -> list[Any]:
        """Arguments of a loop: the arrays of rows lo to hi."""
        codes, scales, offsets = (None if part is None else part[lo:hi] for part in self.parts)
        return [None if part is None else part.numpy() for part in (codes, self.tables[0], scales, self.tables[1], offsets)]

    def columns(self, rows: torch.Tensor) -> torch.Tensor:
        """x [M, K], its columns in the order of decoded ones."""
        return torch.cat((rows[:, ::2], rows[:, 1::2]), 1) if self.nibbles else rows

    def into(self, block: torch.Tensor, lo: int) -> None:
        """Rows from `lo` on."""
        from halfbyte.cpu.compiled.linear import decode

        out = block if block.dtype is torch.float32 else block.view(torch.uint16)
        over_rows(decode, len(block), block.numel(), *self.arrays(lo, lo + len(block)), out.numpy())

    def scaled(self, y: torch.Tensor) -> torch.Tensor:
        """y [N, M] with what `into` left out."""
        return y if self.tensor_scale is None else y.mul_(self.tensor_scale.unsqueeze(-1))


def compiled(weight: QuantTensor | Matrix) -> _Compiled:
    """A weight for compiled loops. Made once for a layer, unless its scales are nested: decoded ones would stay in memory."""
    if isinstance(weight, Matrix) or weight.nested is not None:
        return _Compiled(_whole(weight, torch.float32))
    parts = [t for t in (weight.codes, weight.scales, weight.offsets, weight.tensor_scale) if t is not None]
    return _of_layers(weight, parts, copies=weight.tensor_scale is not None or not all(map(torch.Tensor.is_contiguous, parts)))


_of_layers = Derived(lambda weight: _Compiled(matrix(weight, torch.float32)))


@functools.cache
def _codebook(code: Code) -> torch.Tensor:
    return code.codebook()


@functools.cache
def _bf16_tables(code: Code) -> tuple[Array, Array | None]:
    """The values of 4-bit codes twice, as the bits of bf16: uint16 [32]; and what they lack, None if nothing."""
    values = code.codebook().repeat(2)
    rest = values - values.bfloat16().float()
    first, second = (part.bfloat16().view(torch.uint16).numpy() for part in (values, rest))
    return first, second if rest.any() else None


@functools.cache
def _scale_table(fmt: Format) -> torch.Tensor:
    """The scales that bytes stand for, fp32 [256], without the scale of the tensor."""
    return plain_scales(torch.arange(256, dtype=torch.uint8, device="cpu"), fmt, None)
