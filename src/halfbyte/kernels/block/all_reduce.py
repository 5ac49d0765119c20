"""Sums over tensor-parallel ranks inside of the launch that needs them: a one-shot all-reduce.

    sum[m, n] = sum_r x_r[m, n],     x_r [M, N] the partial sums of rank r, added in fp32

A program stores its row into an inbox of every rank, over NVLink or PCIe, and waits for all rows in its own. Two 16-bit numbers
travel with the number of the sum (an epoch, counted for each row), 8 bytes that arrive together as in NCCL's LL protocol: no fence,
no flag, no second trip. An inbox is [2, ranks, capacity, N / 2] of them, a double buffer: a rank that sends again has received what
others sent in between, so they have read what it sent before. All ranks get the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Exchange(NamedTuple):
    """What a kernel needs to exchange rows with other ranks.

    inboxes   int64 [ranks], where each rank's inbox lies for this GPU; filled with zeros at first
    counts    int32 [capacity], how many sums each row has had, zeros at first
    rank      of this GPU
    capacity  rows that an inbox has room for
    """

    inboxes: torch.Tensor
    counts: torch.Tensor
    rank: int
    capacity: int


@triton.jit
def _wide(bits, like):
    """16 bits of a number, in fp32."""
    return bits.to(tl.int16).to(like.dtype.element_ty, bitcast=True).to(tl.float32)


@triton.jit
def summed(x, m, width, exchange: Exchange, N: tl.constexpr, RANKS: tl.constexpr):
    """Row m of x [M, width], of an even width, summed over the ranks: fp32 [1, N], 0 beyond the width."""
    # Ranks whose rows are received together: there are registers for no more.
    AT_ONCE: tl.constexpr = 2 if RANKS == 2 else 4 if N <= 8192 else 1
    k, pairs = tl.arange(0, N // 2)[None, :], width // 2
    inside = k < pairs
    count = tl.load(exchange.counts + m) + 1
    stamp = count.to(tl.int64) << 32
    words = tl.load(x.to(tl.pointer_type(tl.int32)) + (m.to(tl.int64) * pairs + k), mask=inside, other=0)
    sent = (words.to(tl.int64) & 0xFFFFFFFF) | stamp
    half = (count & 1).to(tl.int64) * RANKS
    for rank in range(RANKS):
        inbox = tl.multiple_of(tl.load(exchange.inboxes + rank).to(tl.pointer_type(tl.int64)), 16)
        tl.store(inbox + (((half + exchange.rank) * exchange.capacity + m) * pairs + k), sent, mask=inside)
    own = tl.multiple_of(tl.load(exchange.inboxes + exchange.rank).to(tl.pointer_type(tl.int64)), 16)
    even, odd = tl.zeros([N // 2], tl.float32), tl.zeros([N // 2], tl.float32)
    for first in range(0, RANKS, AT_ONCE):
        r = first + tl.arange(0, AT_ONCE)[:, None]
        at, expected = own + (((half + r) * exchange.capacity + m) * pairs + k), inside & (r < RANKS)
        got = tl.load(at, mask=expected, other=stamp, volatile=True)
        while tl.max(tl.max(((got >> 32) != count).to(tl.int32), 0), 0) > 0:
            got = tl.load(at, mask=expected, other=stamp, volatile=True)
        even += tl.sum(_wide(got & 0xFFFF, x), 0)
        odd += tl.sum(_wide((got >> 16) & 0xFFFF, x), 0)
    tl.debug_barrier()  # every thread has read the count
    tl.store(exchange.counts + m, count)
    return tl.reshape(tl.join(even, odd), [1, N])
