"""`rotate_heads`: a Hadamard rotation of whole heads, for values whose rotation no weight can take."""

from __future__ import annotations

from typing import NamedTuple

import torch

from halfbyte.arguments import check_tensor
from halfbyte.ops._library import level
from halfbyte.ops.declare import Op
from halfbyte.reference.hadamard import block_size, rotate

#: What the kernel reads: it adds up in 32 bits.
_KNOWN = (torch.float16, torch.bfloat16, torch.float32)


class RotateCall(NamedTuple):
    """One call of `rotate_heads`: the declaration of the op."""

    x: torch.Tensor
    impl: str


def _run(call: RotateCall) -> torch.Tensor:
    x, impl = call
    if impl != "triton" or x.dtype not in _KNOWN or not x.numel():
        wide = x if x.dtype is torch.float64 else x.float()
        return rotate(wide).to(x.dtype).contiguous()
    from halfbyte.kernels.append.rotation import launch

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        launch(x if x.stride(3) == 1 else x.contiguous(), out)
    return out


ROTATE_HEADS = Op("rotate_heads", RotateCall)
ROTATE_HEADS.register(_run, lambda call: torch.empty(call.x.shape, dtype=call.x.dtype, device=call.x.device))


def rotate_heads(x: torch.Tensor, *, impl: str = "auto") -> torch.Tensor:
    """x [B, H, L, D], any float type and strides, with each head times the Hadamard matrix of `reference.hadamard`; contiguous.

    Computed in fp32 (float64 in float64) and rounded once; twice gives x back but for that rounding. In attention P (V H) H = P V:
    rotate values before they are appended, and the output. Raises `InvalidArgument` where 16 does not divide D.
    """
    check_tensor("x", x, ("B", "H", "L", "D"))
    block_size(x.shape[3])
    rotated: torch.Tensor = ROTATE_HEADS(RotateCall(x, level("rotate_heads", impl, x.device)))
    return rotated
