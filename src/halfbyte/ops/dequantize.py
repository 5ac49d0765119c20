"""`dequantize_rows`: rows of quantized weights written into a 16-bit buffer, for cuBLAS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import torch

from halfbyte.arguments import Mark
from halfbyte.errors import check
from halfbyte.formats import weight_format
from halfbyte.ops._library import level
from halfbyte.ops.declare import Op
from halfbyte.reference.quantize import dequantize
from halfbyte.tensors import QuantTensor

#: Weights of one call: q, k and v at most.
MOST = 3


class DequantizeCall(NamedTuple):
    """One call of `dequantize_rows`: the declaration of the op."""

    out: Annotated[torch.Tensor, Mark.WRITTEN]
    weights: Sequence[QuantTensor]
    first: int
    impl: str


def _run(call: DequantizeCall) -> None:
    out, weights, first, impl = call
    if not out.numel():
        return
    if impl == "triton":
        from halfbyte.kernels.dequantize import launch

        with torch.cuda.device_of(out):
            launch(weights, out, first)
        return
    whole = torch.cat([dequantize(w, out.dtype) for w in weights])
    out.copy_(whole[first : first + out.shape[0]])


DEQUANTIZE = Op("dequantize_rows", DequantizeCall)
DEQUANTIZE.register(_run, lambda call: None)


def dequantize_rows(weights: Sequence[QuantTensor], out: torch.Tensor, first: int = 0, *, impl: str = "auto") -> None:
    """out [rows, K], fp16 or bf16: rows first, first + 1, ... of one to three weights [N, K], one below the other; in one launch.

    The bits are those of `halfbyte.dequantize`. The last axis of `out` must be dense; its row stride is free. Formats may differ.
    impl: "auto", "triton" (a GPU), "reference". Raises `InvalidArgument` naming the argument at fault.
    """
    good = isinstance(weights, tuple | list) and 1 <= len(weights) <= MOST and all(isinstance(w, QuantTensor) for w in weights)
    check(good, f"weights must be one to {MOST} QuantTensors from halfbyte.quantize")
    for w in weights:
        weight_format(w.format, "the format of a weight")
        fits = len(w.shape) == 2 and w.shape[1] == weights[0].shape[1] and w.device == weights[0].device
        check(fits, f"weights: {list(w.shape)} on {w.device} and {list(weights[0].shape)} on {weights[0].device}; expected [N, K]")
    rows, width = sum(w.shape[0] for w in weights), weights[0].shape[1]
    good = isinstance(out, torch.Tensor) and out.dtype in (torch.float16, torch.bfloat16) and out.ndim == 2
    check(good, f"out is {getattr(out, 'dtype', type(out).__name__)}; expected fp16 or bf16 [rows, K]")
    check(out.shape[1] == width and out.stride(1) == 1, f"out has shape {list(out.shape)}; expected dense rows of {width}")
    check(out.device == weights[0].device, f"out is on {out.device} and the weights on {weights[0].device}; move one of them")
    inside = isinstance(first, int) and 0 <= first <= rows - out.shape[0]
    check(inside, f"first={first!r} and {out.shape[0]} rows of out; the weights have {rows} rows")
    dense = [QuantTensor(w.format, w.shape, **{name: part.contiguous() for name, part in w.parts().items()}) for w in weights]
    DEQUANTIZE(DequantizeCall(out, dense, first, level("dequantize", impl, out.device)))
