"""The sum and the norm between two branches of a decoder block, rounded as `reference.block` rounds."""

from __future__ import annotations

import numpy as np

from halfbyte.cpu.compiled import loop
from halfbyte.cpu.compiled.append import as_bf16, from_bf16
from halfbyte.cpu.compiled.linear import Array


@loop
def add_norm(x: Array, residual: Array, hidden: Array, out: Array, weight: Array, multiplier: float, eps: float, kind: int) -> None:
    """hidden = residual + multiplier * x, and out = its RMSNorm: x fp32, the others bits of bf16, [M, N]; weight [N], or without
    elements. kind: 0 "rounded", 1 "exact", 2 "offset"."""
    values = np.empty(x.shape[1], np.float32)
    for m in range(x.shape[0]):
        squares = np.float32(0)
        for n in range(x.shape[1]):
            own = from_bf16(as_bf16(x[m, n]))
            if multiplier != 1:
                own = from_bf16(as_bf16(own * np.float32(multiplier)))
            hidden[m, n] = as_bf16(from_bf16(residual[m, n]) + own)
            values[n] = from_bf16(hidden[m, n])
        if not weight.size:
            continue
        for n in range(x.shape[1]):
            squares += values[n] * values[n]
        scale = np.float32(1) / np.sqrt(squares / np.float32(x.shape[1]) + np.float32(eps))
        for n in range(x.shape[1]):
            own, factor = values[n] * scale, from_bf16(weight[n])
            if kind == 0:
                out[m, n] = as_bf16(factor * from_bf16(as_bf16(own)))
            else:
                out[m, n] = as_bf16(own * (factor + np.float32(1) if kind == 2 else factor))
