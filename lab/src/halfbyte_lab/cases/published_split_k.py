"""The published Triton kernel for skinny products with int4 weights (arXiv 2402.00025), written again from its description: a peer.

    y[m, n] = sum_k x[m, k] (q[k, n] - z[g, n]) s[g, n]

Weights in GPTQ's layout, groups of 128, x and y in fp16. Tiles of 16 x 32 outputs and 128 along K are dequantized to fp16 and
multiplied on tensor cores; SPLIT programs share the K of a tile and add their parts to y by fp16 atomics, in whatever order they
come, so y is zeroed first. SPLIT = 1 is the data-parallel form, which stores. Import this on a GPU, or with Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from halfbyte.errors import check
from halfbyte.packing import unpack_codes
from halfbyte.tensors import QuantTensor

TILE_M, TILE_N, TILE_K = 16, 32, 128
#: The split that its authors ship, and those that they sweep.
SPLIT, SPLITS = 4, (2, 4, 8, 16)
WARPS, STAGES = 4, 3


@dataclass(frozen=True)
class GptqWeight:
    """A weight [n, k] in GPTQ's first layout: qweight int32 [k/8, n], qzeros int32 [k/128, n/8] that hold z - 1, scales fp16
    [k/128, n]; field j of a word is bits 4j ... 4j + 3.
    """

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.qweight.nbytes + self.qzeros.nbytes + self.scales.nbytes

    def clone(self) -> GptqWeight:
        """A copy in memory of its own."""
        return GptqWeight(self.qweight.clone(), self.qzeros.clone(), self.scales.clone())

    @staticmethod
    def of(weight: QuantTensor) -> GptqWeight:
        """The same numbers as `weight`, symmetric int4 in groups of 128."""
        fmt, (n, k) = weight.format, weight.shape
        good = fmt.code.bits == 4 and fmt.code.bias == 8 and fmt.group_size(k) == TILE_K and weight.scales is not None
        check(
            good and n % TILE_N == 0, f"weight is {fmt.name} {[n, k]}; the published kernel takes int4_sym_g128, N % {TILE_N} == 0"
        )
        assert weight.scales is not None
        fields = unpack_codes(weight.codes, 4).T.int()  # [k, n]
        zeros = torch.full((k // TILE_K, n), fmt.code.bias - 1, dtype=torch.int32, device=weight.device)
        return GptqWeight(
            _words(fields.reshape(k // 8, 8, n), 1), _words(zeros.reshape(-1, n // 8, 8), 2), weight.scales.T.contiguous()
        )


def _words(fields: torch.Tensor, axis: int) -> torch.Tensor:
    """int32 words of eight fields of four bits that lie along `axis`."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int64, device=fields.device)
    shifts = shifts.view([8 if i == axis else 1 for i in range(fields.ndim)])
    word = (fields.long() << shifts).sum(axis)
    return torch.where(word >= 2**31, word - 2**32, word).int().contiguous()


# fmt: off
def _split_k(
    x: tl.tensor, qweight: tl.tensor, qzeros: tl.tensor, scales: tl.tensor, out: tl.tensor,
    rows: tl.tensor, n: tl.tensor, k: tl.tensor,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, SPLIT: tl.constexpr,
) -> None:
# fmt: on
    """One tile of outputs, one of SPLIT parts of its K."""
    across = n // TILE_N
    i = tl.program_id(0) // across * TILE_M + tl.arange(0, TILE_M)
    j = tl.program_id(0) % across * TILE_N + tl.arange(0, TILE_N)
    step = tl.arange(0, TILE_K)
    acc = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    for group in range(tl.program_id(1), k // TILE_K, SPLIT):
        at = group * TILE_K + step
        a = tl.load(x + i[:, None] * k + at[None, :], mask=(i < rows)[:, None], other=0.0)
        word = tl.load(qweight + (at // 8)[:, None] * n + j[None, :])
        zero = ((tl.load(qzeros + group * (n // 8) + j // 8) >> (j % 8 * 4)) & 15) + 1
        scale = tl.load(scales + group * n + j)
        code = (word >> (at % 8 * 4)[:, None]) & 15
        b = (code - zero[None, :]).to(tl.float16) * scale[None, :]
        acc = tl.dot(a, b, acc)
    to = out + i[:, None] * n + j[None, :]
    if SPLIT == 1:
        tl.store(to, acc.to(tl.float16), mask=(i < rows)[:, None])
    else:
        tl.atomic_add(to, acc.to(tl.float16), mask=(i < rows)[:, None], sem="relaxed")


kernel = triton.jit(_split_k)


def programs(rows: int, n: int, split: int) -> int:
    """Thread blocks of one call."""
    return -(-rows // TILE_M) * (n // TILE_N) * split


def published(x: torch.Tensor, weight: GptqWeight, split: int = SPLIT) -> torch.Tensor:
    """y [rows, n] of x fp16 [rows, k], contiguous; the zeroing of y included."""
    return run(x, weight, split)[0]


def run(x: torch.Tensor, weight: GptqWeight, split: int) -> tuple[torch.Tensor, Any]:
    """(y, what Triton compiled)."""
    (rows, k), n = x.shape, weight.scales.shape[1]
    y = x.new_empty(rows, n) if split == 1 else x.new_zeros(rows, n)
    grid = (programs(rows, n, 1), split)
    binary = kernel[grid](
        x, weight.qweight, weight.qzeros, weight.scales, y, rows, n, k,
        TILE_M, TILE_N, TILE_K, split, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return y, binary
