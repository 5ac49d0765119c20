"""Appends to caches that keep S sink tokens and the W most recent ones in 16 bits (`KVBuffer.tail`).

When token t of an append arrives at position n + t, the one at n + t - W leaves the window. It is quantized from its 16 bits: of
row S + (n + t) % W of the tail, or of what is new, where t >= W. That row is read and written by the same program, also where more
than W tokens arrive: then its next token is the last new one that belongs there. S = 0 or W = 0 leaves out one part or the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.append.rows import load_rows
from halfbyte.kernels.common.encode import as_dtype


@triton.jit
def _tail_rows(tail, s, b, h, row, wanted, HEAD: tl.constexpr):
    """Pointers [R, padded] to rows of the tail, and their mask."""
    d = tl.arange(0, HEAD.padded)
    rows = tail + (b * s[0] + h.to(tl.int64) * s[1] + row.to(tl.int64) * s[2])
    return rows[:, None] + d.to(tl.int64)[None, :] * s[3], wanted[:, None] & (d < HEAD.dim)[None, :]


@triton.jit
def rows_to_encode(
    x, s, tail, tail_s, b, t, h, length, wanted, rope, rope_stride, HEAD: tl.constexpr, C: tl.constexpr, m=None
):  # fmt: skip
    """f32 rows [R, padded] of what is quantized when token t [R] arrives: the token itself, or the one that leaves the window.

    m: of `load_rows`.
    """
    RING: tl.constexpr = C.recent
    WIDTH: tl.constexpr = HEAD.padded
    if tail is None:
        result = load_rows(x, s, b, t, h, wanted, rope, rope_stride, HEAD, m)
    elif C.through:
        new = load_rows(x, s, b, t - RING, h, wanted & (t >= RING), rope, rope_stride, HEAD, m)
        result = as_dtype(new, tail.dtype.element_ty).to(tl.float32)
    else:
        result = tl.zeros([t.shape[0], WIDTH], tl.float32)
    if tail is not None and RING > 0:
        in_ring = wanted & (t < RING) & (length + t >= RING + C.sinks)
        pointers, mask = _tail_rows(tail, tail_s, b, h, C.sinks + (length + t) % RING, in_ring, HEAD)
        result = tl.where(in_ring[:, None], tl.load(pointers, mask=mask, other=0.0).to(tl.float32), result)
    return result


@triton.jit
def _store(x, s, tail, tail_s, b, t, h, row, wanted, rope, rope_stride, HEAD: tl.constexpr, m):
    """Token t [R] into a row of the tail."""
    new = load_rows(x, s, b, t, h, wanted, rope, rope_stride, HEAD, m)
    pointers, mask = _tail_rows(tail, tail_s, b, h, row, wanted, HEAD)
    tl.store(pointers, as_dtype(new, tail.dtype.element_ty), mask=mask)


@triton.jit
def keep_rows(
    x, s, tail, tail_s, b, t, h, length, fit, wanted, rope, rope_stride, HEAD: tl.constexpr, C: tl.constexpr, m=None
):  # fmt: skip
    """Write new tokens into the tail. `wanted` [R]: of these heads; every thread has read the rows that are written."""
    RING: tl.constexpr = C.recent
    sink = length + t < C.sinks
    if not C.through:  # all of them stay
        row = tl.where(sink, length + t, C.sinks + (length + t) % RING)
        _store(x, s, tail, tail_s, b, t, h, row, wanted & (t < fit), rope, rope_stride, HEAD, m)
    else:
        if C.sinks > 0:
            _store(x, s, tail, tail_s, b, t, h, length + t, wanted & (t < fit) & sink, rope, rope_stride, HEAD, m)
        if RING > 0:
            last = t + tl.maximum(fit - 1 - t, 0) // RING * RING  # the last new token that belongs into the row of token t
            stays = (t < RING) & (t < fit) & (length + last >= C.sinks)
            row = C.sinks + (length + t) % RING
            _store(x, s, tail, tail_s, b, last, h, row, wanted & stays, rope, rope_stride, HEAD, m)
