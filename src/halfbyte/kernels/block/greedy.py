"""The greedy choice of tokens in two launches: t[b] = argmax logits[b], then what the batch holds.

A logit and its column are one integer of 64 bits, so that a maximum finds the first of the largest, as torch does:

    ordered(logit) << 32 | (2^31 - 1 - column)

A program of `candidates` takes BLOCK columns of one row; one of `take` the candidates of a sequence, whose next token it writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halfbyte.reference.greedy import Ends, Held

_BLOCK = 4096


@triton.jit
def _is_one_of(token, ends, count):
    """Whether tokens are among the first `count` of ends."""
    found = token != token
    for i in range(count):
        found = found | (token == tl.load(ends + i))
    return found


@triton.jit
def ordered(x):
    """fp32 numbers as int32 in their order: NaN above all, -0 as 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, 0x7FFFFFFF, rank)


@triton.jit(do_not_specialize=["count"])
def candidates(logits, stride, ends, count, found, width, REFUSED: tl.constexpr, BLOCK: tl.constexpr):
    """The best of BLOCK columns of a row [width], in found [B, blocks]."""
    row, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < width, other=float("-inf")).to(tl.float32)
    if REFUSED:
        x = tl.where(_is_one_of(column, ends, count), float("-inf"), x)
    best = tl.max((ordered(x).to(tl.int64) << 32) + (0x7FFFFFFF - column), 0)
    tl.store(found + row * tl.num_programs(0) + tl.program_id(0), best)


@triton.jit(do_not_specialize=["count"])
def take(
    found, blocks, ends, count, padding, ids, ids_stride, columns, last, lengths, unfinished, PARTS: tl.constexpr
):  # fmt: skip
    """The next token of one sequence. What does not fit into its row of ids is not written there."""
    b = tl.program_id(0).to(tl.int64)
    best = tl.max(tl.load(found + b * blocks + tl.minimum(tl.arange(0, PARTS), blocks - 1)), 0)
    token = 0x7FFFFFFF - (best & 0xFFFFFFFF)
    wanted = tl.load(unfinished + b) != 0
    length = tl.load(lengths + b)
    if ends is not None:
        token = tl.where(wanted, token, tl.load(padding))
        tl.store(unfinished + b, (wanted & (_is_one_of(token, ends, count) == 0)).to(tl.uint8))
    tl.store(ids + b * ids_stride + length, token, mask=(length >= 0) & (length < columns))
    tl.store(last + b, token)
    tl.store(lengths + b, length + wanted.to(tl.int64))


def launch(logits: torch.Tensor, held: Held, ends: Ends | None) -> None:
    """logits [B, V], none empty. Last strides are 1, and tensors of one axis contiguous."""
    rows, width = logits.shape
    blocks = triton.cdiv(width, _BLOCK)
    found = torch.empty(rows, blocks, dtype=torch.int64, device=logits.device)
    tokens, padding, refused = (None, None, False) if ends is None else ends
    count = 0 if ends is None else len(ends.tokens)
    candidates[(blocks, rows)](
        logits, logits.stride(0), tokens, count, found, width, REFUSED=refused, BLOCK=_BLOCK, num_warps=8
    )  # fmt: skip
    take[(rows,)](
        found, blocks, tokens, count, padding, held.ids, held.ids.stride(0), held.ids.shape[1],
        held.last, held.lengths, held.unfinished.view(torch.uint8), PARTS=triton.next_power_of_2(blocks), num_warps=1,
    )  # fmt: skip
