"""The sum and the norm between two branches of a decoder block, rounded as `reference.block` rounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from halfbyte.cpu.compiled import loop
from halfbyte.cpu.compiled.append import as_bf16, from_bf16
from halfbyte.cpu.compiled.linear import Array


@loop
def finish(sums: Array, scales: Array, bias: Array) -> None:
    """sums [M, N] = sums * scales + bias, rounded to bf16; scales and bias [N], or without elements."""
    for m in range(sums.shape[0]):
        for n in range(sums.shape[1]):
            own = sums[m, n]
            if scales.size:
                own *= scales[n]
            if bias.size:
                own += bias[n]
            sums[m, n] = from_bf16(as_bf16(own))


@loop
def as_bits(numbers: Array, bits: Array) -> None:
    """bits [M, N] = those of numbers in bf16."""
    for m in range(numbers.shape[0]):
        for n in range(numbers.shape[1]):
            bits[m, n] = as_bf16(numbers[m, n])


@loop
def norm_heads(x: Array, weight: Array, eps: float, kind: int) -> None:
    """x [B, H, 1, D] = its RMSNorm over D, both holding bf16 numbers in fp32; weight and kind as of `add_norm`."""
    values, bits = np.empty(x.shape[3], np.float32), np.empty(x.shape[3], np.uint16)
    for b in range(x.shape[0]):
        for h in range(x.shape[1]):
            for d in range(x.shape[3]):
                values[d] = x[b, h, 0, d]
            _norm(values, bits, weight, eps, kind)
            for d in range(x.shape[3]):
                x[b, h, 0, d] = from_bf16(bits[d])


@loop
def count_token(lengths: Array, starts: Array, before: Array, places: Array) -> Any:
    """Where the next token of each sequence goes, `before` [B], and what it sees: `places` [B, 4] of `attention`. The longest."""
    longest = np.int64(0)
    for b in range(lengths.shape[0]):
        length = np.int64(lengths[b])
        before[b] = length
        places[b, 0], places[b, 1] = length, np.int64(starts[b]) if starts.size else np.int64(0)
        places[b, 2], places[b, 3] = length + 1, length + 1
        longest = max(longest, length + 1)
    return longest


@loop
def add_norm(x: Array, residual: Array, hidden: Array, out: Array, weight: Array, multiplier: float, eps: float, kind: int) -> None:
    """hidden = residual + multiplier * x, and out = its RMSNorm: x fp32, the others bits of bf16, [M, N]; weight [N], or without
    elements. kind: 0 "rounded", 1 "exact", 2 "offset"."""
    values = np.empty(x.shape[1], np.float32)
    for m in range(x.shape[0]):
        for n in range(x.shape[1]):
            own = from_bf16(as_bf16(x[m, n]))
            if multiplier != 1:
                own = from_bf16(as_bf16(own * np.float32(multiplier)))
            hidden[m, n] = as_bf16(from_bf16(residual[m, n]) + own)
            values[n] = from_bf16(hidden[m, n])
        if weight.size:
            _norm(values, out[m], weight, eps, kind)


@loop
def _norm(values: Array, out: Array, weight: Array, eps: float, kind: int) -> None:
    """out [N] = the RMSNorm of fp32 values, as bits of bf16."""
    squares = np.float32(0)
    for n in range(values.shape[0]):
        squares += values[n] * values[n]
    scale = np.float32(1) / np.sqrt(squares / np.float32(values.shape[0]) + np.float32(eps))
    for n in range(values.shape[0]):
        own, factor = values[n] * scale, from_bf16(weight[n])
        if kind == 0:
            out[n] = as_bf16(factor * from_bf16(as_bf16(own)))
        else:
            out[n] = as_bf16(own * (factor + np.float32(1) if kind == 2 else factor))
