"""`transform_heads`: heads times a matrix, the Hadamard matrix or, of calibrated keys and their queries, one of their KV head."""

from __future__ import annotations

import torch

from halfbyte.arguments import check_tensor
from halfbyte.errors import check
from halfbyte.ops._library import level
from halfbyte.ops.declare import Op
from halfbyte.reference.hadamard import block_size
from halfbyte.reference.transform import TransformCall, transformed

#: What the kernels read: they add up in 32 bits.
_KNOWN = (torch.float16, torch.bfloat16, torch.float32)


def _run(call: TransformCall) -> torch.Tensor:
    x, impl = call.x, call.impl
    if impl != "triton" or x.dtype not in _KNOWN or not x.numel():
        return transformed(*call[:3]).to(x.dtype).contiguous()
    from halfbyte.kernels.append.rotation import launch, launch_product

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):
        if call.matrix is None:
            launch(x if x.stride(3) == 1 else x.contiguous(), out)
        else:
            launch_product(call, out)
    return out


TRANSFORM_HEADS = Op("transform_heads", TransformCall)
TRANSFORM_HEADS.register(_run, lambda call: torch.empty(call.x.shape, dtype=call.x.dtype, device=call.x.device))


def transform_heads(
    x: torch.Tensor, matrix: torch.Tensor | None = None, shift: torch.Tensor | None = None, *, impl: str = "auto"
) -> torch.Tensor:
    """x [B, Hq, L, D], any float type and strides, with each head times a matrix, contiguous: x matrix + shift.

    matrix   [H, D, D], any float type, contiguous: of the H KV heads, whose Hq / H heads each follow one another. None: the
             Hadamard matrix of `reference.hadamard`; twice, it gives x back but for its rounding
    shift    [H, D], float32 or float64; None: nothing is added

    Computed in fp32 (float64 in float64) and rounded once. Of values it is undone behind attention, P (V H) H = P V; of keys at
    the queries, (q M^-T) . (k M) = q . k. Raises `InvalidArgument` where 16 does not divide D and no matrix is given.
    """
    check_tensor("x", x, ("B", "Hq", "L", "D"))
    dim = x.shape[3]
    if matrix is None:
        check(shift is None, "shift belongs to a matrix; pass it, or leave shift out")
        block_size(dim)
    else:
        check_matrix("x", x.shape[1], matrix, shift, dim, x.device)
    result: torch.Tensor = TRANSFORM_HEADS(TransformCall(x, matrix, shift, level("transform_heads", impl, x.device)))
    return result


def check_matrix(name: str, heads: int, matrix: torch.Tensor, shift: torch.Tensor | None, dim: int, device: torch.device) -> None:
    """A matrix and a shift for so many heads of the argument `name`."""
    check_tensor("matrix", matrix, ("H", dim, dim), device=device)
    kv_heads = matrix.shape[0]
    check(kv_heads > 0 and heads % kv_heads == 0, f"{name} has {heads} heads and matrix {kv_heads}; expected a multiple of them")
    if shift is not None:
        check_tensor("shift", shift, (kv_heads, dim), device=device)
    for argument, t in (("matrix", matrix), ("shift", shift)):
        check(t is None or t.is_contiguous(), f"{argument} is not contiguous; pass {argument}.contiguous()")
