"""Heads transformed on their own: values before an append, what attention makes of rotated values, calibrated keys and queries.

    out[r, :] = x[r, :] H                  H as in reference/hadamard.py, symmetric and its own inverse
    out[r, :] = (x[r, :] - c[h]) M[h]      h the KV head of row r

Rotated, a program takes some of the B * H * L rows. Sums are in fp32, in the order of the reference, and rounded once: same bits.
Times a matrix, it takes rows of one KV head and some columns, on tensor cores, as three products of TF32: nearly fp32.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from halfbyte.kernels.append.arguments import RopeTables
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


@triton.jit(do_not_specialize=["heads", "tokens", "rows", "rope_stride"])
def transform_rows(
    x, strides,  # [B, H, L, D] and its strides
    rope, rope_stride,
    matrix, center,  # fp32 [H / GROUP, D, D]; fp32 [H / GROUP, D], or None
    out,  # [B, H, L, D], contiguous
    heads, tokens, rows,
    HEAD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """ROWS of the B * GROUP * L rows of a KV head, COLUMNS of the result."""
    DIM: tl.constexpr = HEAD.dim
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kv = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    d = tl.arange(0, HEAD.padded)
    token, head = row % tokens, kv * GROUP + row // tokens % GROUP
    b, real = (row // tokens // GROUP).to(tl.int64), row < rows
    inside = (d < DIM)[:, None] & (column < DIM)[None, :]
    factors = tl.load(matrix + kv * DIM * DIM + d[:, None] * DIM + column[None, :], mask=inside, other=0.0)
    numbers = load_rows(x, strides, b, token, head, real, rope, rope_stride, HEAD)
    if center is not None:
        numbers -= tl.load(center + kv * DIM + d, mask=d < DIM, other=0.0)[None, :]
    sums = tl.dot(numbers, factors, input_precision="tf32x3")
    to = ((b * heads + head) * tokens + token) * DIM
    tl.store(out + to[:, None] + column[None, :], rounded(sums, out, INTERPRETED), mask=real[:, None] & (column < DIM)[None, :])


def launch_product(call: TransformCall, out: torch.Tensor) -> None:
    """x of a call, in fp16, bf16 or fp32, times its matrix, into out, contiguous. Nothing is empty."""
    x, matrix, rope, norms = call.x, call.matrix, call.rope, call.norms
    assert matrix is not None
    (_, heads, tokens, dim), kv_heads = x.shape, matrix.shape[0]
    rows = x.numel() // dim // kv_heads
    rotary = (0, False) if rope is None else (2 * rope.cos.shape[-1], rope.interleaved)
    head = head_of(dim, rotary, ("", 0.0) if norms is None else (norms.kind, norms.eps))
    head = replace(head, queries=call.queries and norms is not None)
    cos, sin = (None, None) if rope is None else (rope.cos.contiguous(), rope.sin.contiguous())
    weights = (None, None) if norms is None else norms[:2]
    rope_stride = cos.stride(0) if cos is not None and cos.ndim == 3 else 0
    width = min(head.padded, _COLUMNS)
    transform_rows[(triton.cdiv(rows, _ROWS), kv_heads, triton.cdiv(dim, width))](
        x, x.stride(), RopeTables(cos, sin, *weights), rope_stride, matrix.float(), call.center, out, heads, tokens, rows,
        HEAD=head, GROUP=heads // kv_heads, ROWS=_ROWS, COLUMNS=width, INTERPRETED=INTERPRETED,
        num_warps=4, enable_fp_fusion=False, enable_reflect_ftz=False,
    )  # fmt: skip
