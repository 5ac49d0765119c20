"""`transform_heads`: heads times a matrix, the Hadamard matrix or, of calibrated keys and their queries, one of their KV head."""

from __future__ import annotations

import torch

from halfbyte.arguments import check_tensor
from halfbyte.errors import check
from halfbyte.kv_buffer import HeadNorms, Rope
from halfbyte.ops._library import level
from halfbyte.ops.declare import Op
from halfbyte.reference.hadamard import block_size
from halfbyte.reference.transform import TransformCall, transformed

#: What the kernels read: they add up in 32 bits.
_KNOWN = (torch.float16, torch.bfloat16, torch.float32)


def _run(call: TransformCall) -> torch.Tensor:
    x, impl = call.x, call.impl
    if impl != "triton" or x.dtype not in _KNOWN or not x.numel():
        return transformed(call).to(x.dtype).contiguous()
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
    x: torch.Tensor,
    matrix: torch.Tensor | None = None,
    center: torch.Tensor | None = None,
    *,
    rope: Rope | None = None,
    norms: HeadNorms | None = None,
    queries: bool = False,
    impl: str = "auto",
) -> torch.Tensor:
    """x [B, Hq, L, D], any float type and strides, with each head times a matrix, contiguous: (x - center) matrix.

    matrix   [H, D, D], float32 or float64, contiguous: of the H KV heads, whose Hq / H heads each follow one another. None: the
             Hadamard matrix of `reference.hadamard`; twice, it gives x back but for its rounding
    center   [H, D], of the same type, subtracted first; None: nothing
    rope, norms   as in `KVCache.append`, applied before that to what is multiplied by a matrix; norms are those of `queries`, or
             of keys

    Computed in fp32 (float64 in float64) and rounded once. Of values it is undone behind attention, P (V H) H = P V; of keys at
    the queries, (q M^-T) . (k M) = q . k. Raises `InvalidArgument` where 16 does not divide D and no matrix is given.
    """
    check_tensor("x", x, ("B", "Hq", "L", "D"))
    dim = x.shape[3]
    if matrix is None:
        alone = center is None and rope is None and norms is None
        check(alone, "center, rope and norms belong to a matrix; pass it, or leave them out")
        block_size(dim)
    else:
        check_tensor("matrix", matrix, ("H", dim, dim), device=x.device)
        heads = matrix.shape[0]
        check(heads > 0 and x.shape[1] % heads == 0, f"x has {x.shape[1]} heads and matrix {heads}; expected a multiple of them")
        if center is not None:
            check_tensor("center", center, (heads, dim), device=x.device)
        for name, t in (("matrix", matrix), ("center", center)):
            check(t is None or t.is_contiguous(), f"{name} is not contiguous; pass {name}.contiguous()")
    call = TransformCall(x, matrix, center, rope, norms, queries, level("transform_heads", impl, x.device))
    result: torch.Tensor = TRANSFORM_HEADS(call)
    return result
