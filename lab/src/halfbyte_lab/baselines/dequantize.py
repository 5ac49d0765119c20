"""`dequantize_rows`: rows of quantized weights written into a 16-bit buffer, for torch's GEMMs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import halfbyte
from halfbyte.tensors import QuantTensor


def dequantize_rows(weights: Sequence[QuantTensor], out: torch.Tensor, first: int = 0) -> None:
    """out [rows, K], fp16 or bf16: rows first, first + 1, ... of one to three weights [N, K], one below the other; in one launch.

    The bits are those of `halfbyte.dequantize`, which runs on a CPU. The last axis of `out` is dense. Formats may differ.
    """
    if out.device.type == "cpu":
        out.copy_(torch.cat([halfbyte.dequantize(w, out.dtype) for w in weights])[first : first + len(out)])
        return
    from halfbyte.kernels.dequantize import launch

    with torch.cuda.device_of(out):
        launch(weights, out, first)
