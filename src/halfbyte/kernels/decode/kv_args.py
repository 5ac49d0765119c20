"""A KV buffer as the portable kernel reads it, of every format, layout and stride: `kv_args` on the host, `place_of` and `read`.

    x = f_t UNIT c + o_t

c is what `codes.unpack` gives, an exact 16-bit number; f and o, in fp32, belong to a token t. So scales of a token, of its heads,
and offsets stay outside of the products. Scales of groups and channels do not: they are applied here, in fp32, and the numbers
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

#: f_t counts between these powers of two: what an fp16 scale can be, and what fp32 sums leave room for.
MIN_EXPONENT = tl.constexpr(-40)
MAX_EXPONENT = tl.constexpr(40)
#: Numbers are brought to this power of two before they become fp16: within its range, and far from its subnormals.
TOP = tl.constexpr(14)

#: A KV buffer as the kernel takes it: tensors, their strides over [batch or page, head, token, dim], and constants:
#: KIND, BITS, LEVELS, PARTS   codes: what `unpack` makes of them; bits, 2^bits, codes in a word
#: DIM, WORDS                  numbers of a row; words of a row, padded to a power of two
#: SPREAD, GROUP               what shares a scale: "none", "tensor", "token" (or a head of one), "group" of GROUP dims,
#:                             "channel" of GROUP tokens
#: STEP, BIAS                  before its scale, the number of a code is STEP * unpacked + BIAS
#: UNIT                        STEP, or 1 where scales are applied already
#: FACTOR, OFFSET              whether tokens have an f and an o
#: DOT, PRECISION              dtype and precision of products
KVArgs = NamedTuple(
    "KVArgs",
    [
        *((name + axis, Any) for name in ("codes", "scales", "offsets", "tail") for axis in ("", "0", "1", "2", "3")),
        *((name, Any) for name in ("KIND", "BITS", "LEVELS", "PARTS", "DIM", "WORDS", "SPREAD", "GROUP", "STEP", "BIAS")),
        *((name, Any) for name in ("UNIT", "FACTOR", "OFFSET", "DOT", "PRECISION")),
    ],
)


@triton.jit
def place_of(token, seen, capacity, sequence, page_table, table0, table1, pages, PAGE: tl.constexpr):
    """Where tokens [N] are: index along the first axis of the buffers, and row, int64; and which may be read at all."""
    place = sequence
    row = token.to(tl.int64)
    inside = token < capacity
    if page_table is not None:
        number = tl.load(page_table + sequence * table0 + row // PAGE * table1, mask=seen, other=0)
        place = tl.minimum(tl.maximum(number, 0), pages - 1).to(tl.int64)  # out of range: some page, nothing beyond the pool
        row = row % PAGE
        inside = seen
    return place, row, inside


@triton.jit
def _scales(scales, s0, s1, s2, s3, place, row, seen, head, x: KVArgs, PART: tl.constexpr):
    """Scales or offsets in fp32: [N], [N, groups], or [N / GROUP, WORDS] of part PART."""
    at = scales + head * s1 + place * s0 + row * s2
    if x.SPREAD == "group":
        column = tl.arange(0, x.WORDS * x.PARTS // x.GROUP).to(tl.int64)
        seen = seen[:, None] & (column < x.DIM // x.GROUP)[None, :]
        at = at[:, None] + column[None, :] * s3
    if x.SPREAD == "channel":
        column = tl.arange(0, x.WORDS).to(tl.int64) * x.PARTS + PART
        seen = seen[:, None] & (column < x.DIM)[None, :]
        at = at[:, None] + column[None, :] * s3
    return tl.load(at, mask=seen, other=0).to(tl.float32)


@triton.jit
def _spread(small, N: tl.constexpr, x: KVArgs):
    """[N, groups] or [N / GROUP, WORDS] over the words of N tokens, [N, WORDS]."""
    if x.SPREAD == "group":
        wide = tl.broadcast_to(small[:, :, None], (N, x.WORDS * x.PARTS // x.GROUP, x.GROUP // x.PARTS))
    else:
        wide = tl.broadcast_to(small[:, None, :], (N // x.GROUP, x.GROUP, x.WORDS))
    return tl.reshape(wide, (N, x.WORDS))


@triton.jit
def _dequantized(codes, place, row, seen, head, N: tl.constexpr, x: KVArgs, EXACT: tl.constexpr):
    """Codes [N, WORDS] a part under scales of groups or channels: 16-bit parts, and the power of two [N] that they count in.

    EXACT: as many parts again, of what rounding to 16 bits left over.
    """
    if x.SPREAD == "channel":  # one row of scales for GROUP tokens: those of the first one, if that one is stored
        block: tl.constexpr = N // x.GROUP
        place = tl.max(tl.reshape(tl.broadcast_to(place, (N,)), (block, x.GROUP)), 1)
        row = tl.max(tl.reshape(row, (block, x.GROUP)), 1) // x.GROUP
        seen = tl.max(tl.reshape(seen.to(tl.int32), (block, x.GROUP)), 1) > 0
    largest = tl.zeros([N if x.SPREAD == "group" else N // x.GROUP], tl.float32)
    for j in tl.static_range(x.PARTS if x.SPREAD == "channel" else 1):
        scale = _scales(x.scales, x.scales0, x.scales1, x.scales2, x.scales3, place, row, seen, head, x, j)
        bound = tl.abs(scale) * x.LEVELS
        if x.offsets is not None:
            bound += tl.abs(_scales(x.offsets, x.offsets0, x.offsets1, x.offsets2, x.offsets3, place, row, seen, head, x, j))
        largest = tl.maximum(largest, tl.max(bound, 1))
    e = tl.minimum(tl.maximum(exponent(largest), MIN_EXPONENT + TOP), MAX_EXPONENT)  # [N] or [N / GROUP]
    up = power_of_two(-e + TOP)[:, None]
    parts = ()
    rests = ()
    for j in tl.static_range(x.PARTS):
        # Loaded again for every part, from L1: a group's scales are the same for all, and the compiler sees that.
        scale = _scales(x.scales, x.scales0, x.scales1, x.scales2, x.scales3, place, row, seen, head, x, j) * up
        number = codes[j].to(tl.float32) * x.STEP + x.BIAS
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
    if x.SPREAD == "channel":
        down = tl.reshape(tl.broadcast_to(down[:, None], (N // x.GROUP, x.GROUP)), (N,))
    return parts + rests, down


@triton.jit
def read(place, row, seen, inside, head, N: tl.constexpr, x: KVArgs, EXACT: tl.constexpr = False):
    """N tokens: parts [N, WORDS] in x.DOT, f [N] if x.FACTOR and o [N] if x.OFFSET; all 0 where `seen` [N] is false.

    EXACT: where numbers are rounded to x.DOT, x.PARTS more parts follow that make up for it.

    Scales of tokens are read where `inside` is true, and those of unseen tokens dropped: `seen` starts and ends anywhere, and under
    such a mask 16-bit numbers would be copied one by one, which cannot be asynchronous.
    """
    word = tl.arange(0, x.WORDS)
    pointers = x.codes + head * x.codes1 + (place * x.codes0 + row * x.codes2)[:, None] + word.to(tl.int64)[None, :] * x.codes3
    mask = seen[:, None]
    if x.WORDS * x.PARTS != x.DIM:
        mask = mask & (word * x.PARTS < x.DIM)[None, :]
    codes = unpack(tl.load(pointers, mask=mask, other=0), x.KIND, x.BITS, x.LEVELS, x.PARTS)
    factor = 1.0
    offset = 0.0
    if x.SPREAD == "group" or x.SPREAD == "channel":
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
            offset = tl.where(seen, offset + x.BIAS * factor, 0.0)
    return parts, factor, offset


# --------------------------------------------------------------------------------------------------------------- host code


def kv_args(buffer: KVBuffer, query: torch.dtype) -> KVArgs:
    """A buffer's tensors, strides and constants. Codes of whole rows on even addresses are read as words of 16 bits."""
    code, codes = buffer.format.code, buffer.codes
    parts, kind = code.per_byte, "plain"
    if code.bits < 16:
        kind = "e4m3" if code.kind == "float" else "signed" if code.dtype.is_signed else "unsigned"
        even = all(n % 2 == 0 for n in (codes.data_ptr(), codes.shape[-1], *codes.stride()[:-1]))
        if even and codes.stride(-1) == 1:
            codes, parts = codes.view(torch.int16), parts * 2
    integer = kind in ("signed", "unsigned")
    spread = {None: "none", "head": "token"}.get(buffer.format.granularity, buffer.format.granularity)
    applied = spread in ("group", "channel")
    step = 2.0**24 if integer else 2.0**8 if kind == "e4m3" else 1.0
    bias = 2 ** (code.bits - 1) - code.bias if kind == "unsigned" else 0
    dot, precision = _dot_of(codes.dtype if kind == "plain" else torch.float16, query)
    constants = (
        *(kind, code.bits, 2**code.bits, parts, buffer.dim, max(16, triton.next_power_of_2(-(-buffer.dim // parts)))),
        *(spread, buffer.format.token_block or buffer.format.group_size(buffer.dim), step, bias, 1.0 if applied else step),
        *(applied or spread == "token", spread == "token" and buffer.offsets is not None, dot, precision),
    )
    tensors = (_with_strides(t) for t in (codes, buffer.scales, buffer.offsets, buffer.tail))
    return KVArgs(*(x for t in tensors for x in t), *map(tl.constexpr, constants))


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
