"""The sum and the norm between two branches of a decoder block, rounded as `reference.block` rounds.

Rows are bf16, by its bits (uint16), or fp32, and then nothing is rounded: numba compiles a loop for each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from halfbyte.cpu.compiled import loop
from halfbyte.cpu.compiled.append import as_bf16, from_bf16
from halfbyte.cpu.compiled.linear import Array


def widen(stored: Any) -> Any:
    """The fp32 number of an element of rows."""
    raise NotImplementedError


def narrow(number: Any, rows: Any) -> Any:
    """A number as an element of `rows`."""
    raise NotImplementedError


@overload(widen)
def _widen(stored: Any) -> Any:
    def itself(stored: Any) -> Any:
        return stored

    def from_bits(stored: Any) -> Any:
        return from_bf16(stored)

    return itself if isinstance(stored, types.Float) else from_bits


@overload(narrow)
def _narrow(number: Any, rows: Any) -> Any:
    def itself(number: Any, rows: Any) -> Any:
        return np.float32(number)

    def as_bits(number: Any, rows: Any) -> Any:
        return as_bf16(number)

    return itself if isinstance(rows.dtype, types.Float) else as_bits


@loop
def _rounded(number: float, rows: Array) -> Any:
    """A number as `rows` would hold it."""
    return widen(narrow(number, rows))


@loop
def arrange(rows: Array, x: Array, halves: bool) -> None:
    """x [M, K] = rows in fp32; halves: even columns first, then the odd ones."""
    half = rows.shape[1] // 2
    for m in range(rows.shape[0]):
        if halves:
            for n in range(half):
                x[m, n], x[m, half + n] = widen(rows[m, 2 * n]), widen(rows[m, 2 * n + 1])
        else:
            for n in range(rows.shape[1]):
                x[m, n] = widen(rows[m, n])


@loop
def finish(sums: Array, scales: Array, bias: Array, rows: Array) -> None:
    """sums [M, N] = sums * scales + bias, as `rows` would hold them; scales and bias [N], or without elements."""
    for m in range(sums.shape[0]):
        for n in range(sums.shape[1]):
            own = sums[m, n]
            if scales.size:
                own *= scales[n]
            if bias.size:
                own += bias[n]
            sums[m, n] = _rounded(own, rows)


@loop
def store(numbers: Array, rows: Array) -> None:
    """rows [M, N] = numbers."""
    for m in range(numbers.shape[0]):
        for n in range(numbers.shape[1]):
            rows[m, n] = narrow(numbers[m, n], rows)


@loop
def norm_heads(x: Array, weight: Array, eps: float, kind: int) -> None:
    """x [B, H, 1, D] = its RMSNorm over D, both holding numbers of the weight's type in fp32; weight and kind as of `add_norm`."""
    values, row = np.empty(x.shape[3], np.float32), np.empty(x.shape[3], weight.dtype)
    for b in range(x.shape[0]):
        for h in range(x.shape[1]):
            for d in range(x.shape[3]):
                values[d] = x[b, h, 0, d]
            _norm(values, row, weight, eps, kind)
            for d in range(x.shape[3]):
                x[b, h, 0, d] = widen(row[d])


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
    """hidden = residual + multiplier * x, and out = its RMSNorm: x fp32, the others rows, [M, N]; weight [N], or without elements.
    kind: 0 "rounded", 1 "exact", 2 "offset"."""
    values = np.empty(x.shape[1], np.float32)
    for m in range(x.shape[0]):
        for n in range(x.shape[1]):
            own = _rounded(x[m, n], hidden)
            if multiplier != 1:
                own = _rounded(own * np.float32(multiplier), hidden)
            hidden[m, n] = narrow(widen(residual[m, n]) + own, hidden)
            values[n] = widen(hidden[m, n])
        if weight.size:
            _norm(values, out[m], weight, eps, kind)


@loop
def _norm(values: Array, out: Array, weight: Array, eps: float, kind: int) -> None:
    """out [N] = the RMSNorm of fp32 values."""
    squares = 0.0  # in fp32 a long sum, one number after the other, would be further off than torch's
    for n in range(values.shape[0]):
        squares += np.float64(values[n]) * np.float64(values[n])
    scale = np.float32(1 / np.sqrt(squares / values.shape[0] + eps))
    for n in range(values.shape[0]):
        own, factor = values[n] * scale, widen(weight[n])
        if kind == 0:
            out[n] = narrow(factor * _rounded(own, out), out)
        else:
            out[n] = narrow(own * (factor + np.float32(1) if kind == 2 else factor), out)
