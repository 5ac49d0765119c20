"""Heads Hadamard-rotated on their own: values before an append, and what attention makes of rotated values back again.

    out[r, :] = x[r, :] H        H as in reference/hadamard.py, symmetric and its own inverse

A program takes some of the B * H * L rows. Sums are in fp32, in the order of the reference, and rounded once: the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halfbyte.kernels.append.rows import rotate
from halfbyte.kernels.common.codes import INTERPRETED, rounded
from halfbyte.reference.hadamard import block_size

#: Numbers that a program holds.
_TILE = 2048


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
