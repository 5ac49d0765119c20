"""A KV buffer as the portable kernel reads it, of every format, layout and stride: `kv_args` on the host, `place_of` and `read`.

    x = f_t UNIT c + o_t

c is what `codes.unpack` gives, an exact 16-bit number; f and o, in fp32, belong to a token t. So scales of a token, of its heads,
and offsets stay outside of the MMA. Group-wise and per-channel ones do not: they are applied here, in fp32, and the numbers
rounded to 16 bits as eager attention would round them, relative to a power of two f_t under which no fp16 overflows. That will do
for values. Of keys what rounding left over is kept, too, for products of its own: a single score has no other error to hide it in.

Words of 16 bits are loaded whole, PARTS codes each, and part j of all words is a tensor of its own: number PARTS * w + j of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from halfbyte.kernels.common.codes import INTERPRETED, exponent, power_of_two, unpack
from halfbyte.kv_buffer import KVBuffer
from halfbyte.plans.kv_codec import kv_codec

#: f_t counts between these powers of two: what an fp16 scale can be, and what fp32 sums leave room for.
MIN_EXPONENT = tl.constexpr(-40)
MAX_EXPONENT = tl.constexpr(40)
#: Numbers are brought to this power of two before they become fp16: within its range, and far from its subnormals.
TOP = tl.constexpr(14)

#: A KV buffer as the kernel takes it: tensors, their strides over [batch or page, head, token, dim], and constants:
#: F                 the format, a `KVCodec`
#: SINKS, RING       rows of the tail for sink tokens, and for the last tokens
#: PARTS             codes in a word that is loaded
#: DIM, WORDS        numbers of a row; words of a row, padded to a power of two
#: UNIT              a code over its unpacked number, or 1 where scales are applied already
#: FACTOR, OFFSET    whether tokens have an f and an o
#: DOT, PRECISION    dtype and precision of products
KVArgs = NamedTuple(
    "KVArgs",
    [
        *((name + axis, Any) for name in ("codes", "scales", "offsets", "tail") for axis in ("", "0", "1", "2", "3")),
        *((name, Any) for name in ("F", "SINKS", "RING", "PARTS", "DIM", "WORDS", "UNIT", "FACTOR", "OFFSET", "DOT", "PRECISION")),
    ],
)


@triton.jit
def place_of(token, seen, sequence, call, PAGE: tl.constexpr):
    """Where tokens [N] are: index along the first axis of the buffers, and row, int64; and which may be read at all."""
    place = sequence
    row = token.to(tl.int64)
    inside = token < call.capacity
    if call.sequences.page_table is not None:
        number = tl.load(call.sequences.page_table + sequence * call.table0 + row // PAGE * call.table1, mask=seen, other=0)
        place = tl.minimum(tl.maximum(number, 0), call.pages - 1).to(tl.int64)  # out of range: some page, nothing beyond the pool
        row = row % PAGE
        inside = seen
    return place, row, inside


@triton.jit
def _scales(scales, s0, s1, s2, s3, place, row, seen, head, x: KVArgs, PART: tl.constexpr):
    """Scales or offsets in fp32: [N], [N, groups], or [N / block, WORDS] of part PART."""
    at = scales + head * s1 + place * s0 + row * s2
    if x.F.spread == "group":
        column = tl.arange(0, x.WORDS * x.PARTS // x.F.group).to(tl.int64)
        seen = seen[:, None] & (column < x.DIM // x.F.group)[None, :]
        at = at[:, None] + column[None, :] * s3
    if x.F.spread == "channel":
        column = tl.arange(0, x.WORDS).to(tl.int64) * x.PARTS + PART
        seen = seen[:, None] & (column < x.DIM)[None, :]
        at = at[:, None] + column[None, :] * s3
    return tl.load(at, mask=seen, other=0).to(tl.float32)


@triton.jit
def _spread(small, N: tl.constexpr, x: KVArgs):
    """[N, groups] or [N / block, WORDS] over the words of N tokens, [N, WORDS]."""
    if x.F.spread == "group":
        wide = tl.broadcast_to(small[:, :, None], (N, x.WORDS * x.PARTS // x.F.group, x.F.group // x.PARTS))
    else:
        wide = tl.broadcast_to(small[:, None, :], (N // x.F.block, x.F.block, x.WORDS))
    return tl.reshape(wide, (N, x.WORDS))


@triton.jit
def _dequantized(codes, place, row, seen, head, N: tl.constexpr, x: KVArgs, EXACT: tl.constexpr):
    """Codes [N, WORDS] a part with group-wise or per-channel scales: 16-bit parts, and the power of two [N] that they count in.

    EXACT: as many parts again, of what rounding to 16 bits left over.
    """
    if x.F.spread == "channel":  # one row of scales for a block of tokens: those of the first one, if that one is stored
        block: tl.constexpr = N // x.F.block
        place = tl.max(tl.reshape(tl.broadcast_to(place, (N,)), (block, x.F.block)), 1)
        row = tl.max(tl.reshape(row, (block, x.F.block)), 1) // x.F.block
        seen = tl.max(tl.reshape(seen.to(tl.int32), (block, x.F.block)), 1) > 0
    largest = tl.zeros([N if x.F.spread == "group" else N // x.F.block], tl.float32)
    for j in tl.static_range(x.PARTS if x.F.spread == "channel" else 1):
        scale = _scales(x.scales, x.scales0, x.scales1, x.scales2, x.scales3, place, row, seen, head, x, j)
        bound = tl.abs(scale) * 2**x.F.bits
        if x.offsets is not None:
            bound += tl.abs(_scales(x.offsets, x.offsets0, x.offsets1, x.offsets2, x.offsets3, place, row, seen, head, x, j))
        largest = tl.maximum(largest, tl.max(bound, 1))
    e = tl.minimum(tl.maximum(exponent(largest), MIN_EXPONENT + TOP), MAX_EXPONENT)  # [N] or [N / block]
    up = power_of_two(-e + TOP)[:, None]
    parts = ()
    rests = ()
    for j in tl.static_range(x.PARTS):
        # Loaded again for every part, from L1: a group's scales are the same for all, and the compiler sees that.
        scale = _scales(x.scales, x.scales0, x.scales1, x.scales2, x.scales3, place, row, seen, head, x, j) * up
        number = codes[j].to(tl.float32) * x.F.step + x.F.centre
        number *= _spread(scale, N, x)
        if x.offsets is not None:
            number += _spread(
                _scales(x.offsets, x.offsets0, x.offsets1, x.offsets2, x.offsets3, place, row, seen, head, x, j) * up, N, x
            )
        part = number.to(x.DOT)
        parts += (part,)
        if EXACT:
            rests += ((number - part.to(tl.float32)).to(x.DOT),)
    down = power_of_two(e - TOP)
    if x.F.spread == "channel":
        down = tl.reshape(tl.broadcast_to(down[:, None], (N // x.F.block, x.F.block)), (N,))
    return parts + rests, down


@triton.jit
def read(place, row, seen, inside, head, N: tl.constexpr, x: KVArgs, EXACT: tl.constexpr = False):
    """N tokens: parts [N, WORDS] in x.DOT, f [N] if x.FACTOR and o [N] if x.OFFSET; all 0 where `seen` [N] is false.

    EXACT: where numbers are rounded to x.DOT, x.PARTS more parts follow that make up for it.

    Per-token scales are read where `inside` is true, and those of unseen tokens dropped: `seen` starts and ends anywhere, and under
    such a mask 16-bit numbers would be copied one by one, which cannot be asynchronous.
    """
    word = tl.arange(0, x.WORDS)
    pointers = x.codes + head * x.codes1 + (place * x.codes0 + row * x.codes2)[:, None] + word.to(tl.int64)[None, :] * x.codes3
    mask = seen[:, None]
    if x.WORDS * x.PARTS != x.DIM:
        mask = mask & (word * x.PARTS < x.DIM)[None, :]
    codes = unpack(tl.load(pointers, mask=mask, other=0), x.F, x.PARTS)
    factor = 1.0
    offset = 0.0
    if x.F.scale_inside:
        parts, factor = _dequantized(codes, place, row, seen, head, N, x, EXACT)
    else:
        parts = ()
        for j in tl.static_range(x.PARTS):
            parts += (codes[j].to(x.DOT),)
        if x.FACTOR:
            factor = _scales(x.scales, x.scales0, x.scales1, x.scales2, x.scales3, place, row, inside, head, x, 0)
            factor = tl.where(seen, factor, 0.0)
        if x.OFFSET:
            offset = _scales(x.offsets, x.offsets0, x.offsets1, x.offsets2, x.offsets3, place, row, inside, head, x, 0)
            offset = tl.where(seen, offset + x.F.centre * factor, 0.0)
    return parts, factor, offset


# --------------------------------------------------------------------------------------------------------------- host code


def kv_args(buffer: KVBuffer, query: torch.dtype) -> KVArgs:
    """A buffer's tensors, strides and constants. Codes of whole rows on even addresses are read as words of 16 bits."""
    codec, codes = kv_codec(buffer.format), buffer.codes
    parts = codec.per_byte
    if codec.scaled:
        even = all(n % 2 == 0 for n in (codes.data_ptr(), codes.shape[-1], *codes.stride()[:-1]))
        if even and codes.stride(-1) == 1:
            codes, parts = codes.view(torch.int16), codec.codes_per_word
    dot, precision = _dot_of(torch.float16 if codec.scaled else codes.dtype, query)
    constants = (
        *(buffer.sink_tokens, buffer.ring, parts, buffer.dim, max(16, triton.next_power_of_2(-(-buffer.dim // parts)))),
        *(1.0 if codec.scale_inside else codec.step, codec.scale_inside or codec.scale_per_token),
        *(codec.scale_per_token and codec.offset, dot, precision),
    )
    tensors = (_with_strides(t) for t in (codes, buffer.scales, buffer.offsets, buffer.tail))
    # The interpreter takes a constant of a tuple as it is, and sees no attributes through a constexpr.
    return KVArgs(*(x for t in tensors for x in t), codec if INTERPRETED else tl.constexpr(codec), *map(tl.constexpr, constants))


def _with_strides(t: torch.Tensor | None) -> tuple[Any, ...]:
    """A tensor and its strides over [batch or page, head, token, dim], 0 for an axis that it does not have."""
    if t is None:
        return (None, 0, 0, 0, 0)
    if t.ndim == 1:
        return (t, 0, 0, 0, 0)
    if t.ndim == 2:  # a scale of a token's heads together
        return (t, t.stride(0), 0, t.stride(1), 0)
    return (t, *t.stride(), *(0,) * (4 - t.ndim))


def _dot_of(stored: torch.dtype, query: torch.dtype) -> tuple[Any, str]:
    """The dtype that products of these take, and their precision."""
    if stored is torch.float16:
        return tl.float16, "ieee"
    if stored is torch.bfloat16 and query is torch.bfloat16 and not INTERPRETED:
        return tl.bfloat16, "ieee"
    return tl.float32, "ieee" if stored is torch.float32 else "tf32"
