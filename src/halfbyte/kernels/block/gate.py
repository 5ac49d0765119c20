"""A gate in one launch: out = act(gate) * up, with act(gate) rounded to 16 bits as modules round it.

    silu(x) = x sigmoid(x)        gelu_tanh(x) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)

A program takes BLOCK columns of one row. gate and up may be the halves of one tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.common.codes import INTERPRETED, rounded

#: Columns of a program, at most.
_BLOCK = 1024


@triton.jit
def gated(
    gate, up, out, gate_stride, up_stride, width,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a row of gate, up and out [M, width]; out is contiguous."""
    row, d = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(gate + row * gate_stride + d, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + d, mask=inside, other=0.0).to(tl.float32)
    exponent = x
    if ACTIVATION == "gelu_tanh":
        exponent = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    factor = x
    if ACTIVATION == "sigmoid":
        factor = 1.0
    x = rounded(factor / (1 + tl.exp(-exponent)), out, INTERPRETED).to(tl.float32)
    tl.store(out + row * width + d, rounded(x * y, out, INTERPRETED), mask=inside)


def launch(gate: torch.Tensor, up: torch.Tensor, activation: str, out: torch.Tensor, use_pdl: bool) -> None:
    """out [M, N], contiguous, from gate and up [M, N], whose last strides are 1; all of one 16-bit type, none empty."""
    rows, width = out.shape
    block = min(_BLOCK, triton.next_power_of_2(width))
    gated[(triton.cdiv(width, block), rows)](
        gate, up, out, gate.stride(0), up.stride(0), width,
        ACTIVATION=activation, BLOCK=block, USE_PDL=use_pdl, INTERPRETED=INTERPRETED,
        num_warps=4, **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip
