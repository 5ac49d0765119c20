"""Heads transformed on their own: values before an append, what attention makes of rotated values, calibrated keys of a prompt.

    out[r, :] = x[r, :] H                  H as in reference/hadamard.py, symmetric and its own inverse
    out[r, :] = x[r, :] M[h] + s[h]      h the KV head of row r

Rotated, a program takes some of the B * H * L rows. Sums are in fp32, in the order of the reference, and rounded once: same bits.
Times a matrix, it takes rows of one KV head and some columns, on tensor cores: exact products in 16 bits, or
three of TF32, nearly fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halfbyte.kernels.append.rows import load_rows, rotate
from halfbyte.kernels.common.codes import INTERPRETED, rounded
from halfbyte.plans.append import head_of
from halfbyte.reference.hadamard import block_size
from halfbyte.reference.transform import TransformCall

#: Numbers that a program holds.
_TILE = 2048
#: Rows and columns of a product that a program makes: with more the operands of three TF32 products spill.
_ROWS = 16
_COLUMNS = 32


@triton.jit(do_not_specialize=["heads", "tokens", "rows"])
def rotate_rows(
    x,  # [B, H, L, D], of any strides but the last, which is 1
    strides,  # by B, H and L
    out,  # [B, H, L, D], contiguous
    heads, tokens, rows,
    DIM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, LOG: tl.constexpr, FACTOR: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the result; D is DIM rounded up to a power of two."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)[None, :]
    real = (row < rows)[:, None] & (d < DIM)
    at = row // tokens // heads * strides[0] + row // tokens % heads * strides[1] + row % tokens * strides[2]
    found = tl.load(x + at[:, None] + d, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * DIM + d, rounded(rotate(found, LOG, FACTOR), out, INTERPRETED), mask=real)


def launch(x: torch.Tensor, out: torch.Tensor) -> None:
    """x [B, H, L, D] in fp16, bf16 or fp32, its last stride 1, into out, contiguous. Nothing is empty."""
    (_, heads, tokens, dim), block = x.shape, block_size(x.shape[3])
    rows, columns = x.numel() // dim, triton.next_power_of_2(dim)
    tile = max(1, _TILE // columns)
    rotate_rows[(triton.cdiv(rows, tile),)](
        x, x.stride()[:3], out, heads, tokens, rows,
        DIM=dim, D=columns, ROWS=tile, LOG=block.bit_length() - 1, FACTOR=block**-0.5, INTERPRETED=INTERPRETED,
        num_warps=4, enable_fp_fusion=False, enable_reflect_ftz=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "tokens", "rows"])
def transform_rows(
    x, strides,  # [B, H, L, D] and its strides
    matrix, shift,  # [H / GROUP, D, D]; fp32 [H / GROUP, D], or None
    out,  # [B, H, L, D], contiguous
    heads, tokens, rows,
    HEAD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """ROWS of the B * GROUP * L rows of a KV head, COLUMNS of the result."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kv = tl.program_id(1).to(tl.int64)
    token, head = row % tokens, kv * GROUP + row // tokens % GROUP
    b, real = (row // tokens // GROUP).to(tl.int64), row < rows
    d, column = tl.arange(0, HEAD.padded), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (d < HEAD.dim)[:, None] & (column < HEAD.dim)[None, :]
    factors = tl.load(matrix + kv * HEAD.dim * HEAD.dim + d[:, None] * HEAD.dim + column[None, :], mask=inside, other=0.0)
    numbers = load_rows(x, strides, b, token, head, real, None, 0, HEAD)
    if factors.dtype == x.dtype.element_ty and factors.dtype != tl.float32 and not INTERPRETED:
        sums = tl.dot(numbers.to(factors.dtype), factors)
    else:
        sums = tl.dot(numbers, factors.to(tl.float32), input_precision="tf32x3")
    if shift is not None:
        sums += tl.load(shift + kv * HEAD.dim + column, mask=column < HEAD.dim, other=0.0)[None, :]
    to = ((b * heads + head) * tokens + token) * HEAD.dim
    mask = real[:, None] & (column < HEAD.dim)[None, :]
    tl.store(out + to[:, None] + column[None, :], rounded(sums, out, INTERPRETED), mask=mask)


def launch_product(call: TransformCall, out: torch.Tensor) -> None:
    """x of a call, in fp16, bf16 or fp32, times its matrix, into out, contiguous. Nothing is empty."""
    x, matrix = call.x, call.matrix
    assert matrix is not None
    (_, heads, tokens, dim), kv_heads = x.shape, matrix.shape[0]
    rows, head = x.numel() // dim // kv_heads, head_of(dim, (0, False), ("", 0.0))
    width = min(head.padded, _COLUMNS)
    transform_rows[(triton.cdiv(rows, _ROWS), kv_heads, triton.cdiv(dim, width))](
        x, x.stride(), matrix, call.shift, out, heads, tokens, rows,
        HEAD=head, GROUP=heads // kv_heads, ROWS=_ROWS, COLUMNS=width, INTERPRETED=INTERPRETED,
        num_warps=4, enable_fp_fusion=False, enable_reflect_ftz=False,
    )  # fmt: skip
