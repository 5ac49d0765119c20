"""A quantized weight [N, K] as kernels read it: `weight()` on the host, `read_scale` and `numbers` on the device, for every format.

    W[n, k] = scale[n, k / group] UNIT (c[n, k] - zero[n, k / group])        y = x W^T + bias

c - zero is exact in 16 bits, and so is what a lookup code means, up to its UNIT: E2M1 as it is, bitsandbytes' FP4 in twelfths. Only
NF4's levels are not: they are rounded to 16 bits, as they are in a 16-bit weight. Integers become floating point without a
conversion: an integer below 1024 in the low bits of the fp16 1024 (below 128 in those of the bf16 128) adds to it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from halfbyte.formats import Code
from halfbyte.kernels.common.codes import INTERPRETED, nearest, power_of_two
from halfbyte.kernels.common.scales import from_e4m3, from_e8m0
from halfbyte.plans.codebooks import unit_of_codebook
from halfbyte.plans.weight_codec import weight_codec
from halfbyte.tensors import QuantTensor

#: A weight as the kernel takes it: tensors, their strides over [n, k], and constants:
#: n                     out features
#: x                     [M, K]: what this weight is multiplied with
#: out                   [M, N] contiguous: what is written for this weight
#: F                     its format (`WeightCodec`)
#: LOOK_UP, TABLE        how a table is read, in PTX; in the interpreter "", and its levels / UNIT as fp32, 32 bits each
#: UNIT                  what the numbers of a code are multiples of
#: SCALES_PER, OFFSETS_PER  scales (zero points) in one of the words that are read: 1, or as many as 32 bits hold
#: DOT                   dtype of the products: x's; fp32 for bf16 in the interpreter, whose bf16 arithmetic is wrong
Weight = NamedTuple(
    "Weight",
    [
        *((name + axis, Any) for name in ("x", "codes", "scales", "offsets") for axis in ("", "0", "1")),
        *((name, Any) for name in ("tensor_scale", "nested", "bias", "perm", "out", "n")),
        *((name, Any) for name in ("F", "LOOK_UP", "TABLE", "UNIT", "DOT", "SCALES_PER", "OFFSETS_PER")),
    ],
)


@triton.jit
def _field(pointer, row, group, stride0, stride1, seen, PER: tl.constexpr):
    """Number `group` of a row that is stored PER in a word of 32 bits; PER 1: as it is.

    Words, because a copy of less cannot be asynchronous. One load for each place in a word, all but one of them masked: a shift by
    a variable number would keep the compiler from decoding in the layout of the product's operand.
    """
    at = pointer + row * stride0 + group // PER * stride1
    if PER == 1:
        raw = tl.load(at) if seen is None else tl.load(at, mask=seen, other=0)
    else:
        BITS: tl.constexpr = 32 // PER
        raw = 0
        for i in tl.static_range(PER):
            here = group % PER == i
            if seen is not None:
                here = here & seen
            raw |= (tl.load(at, mask=here, other=0) >> (i * BITS)) & (2**BITS - 1)
    return raw


@triton.jit
def read_scale(w: Weight, row, group, groups, seen):
    """fp32 scales of weight rows `row` and groups `group` (of `groups` in a row), 0 where `seen` is false (None: nowhere)."""
    raw = _field(w.scales, row, group, w.scales0, w.scales1, seen, w.SCALES_PER)
    if w.F.nested:
        absmax = _field(w.nested, (row * groups + group) // w.F.nested, 0, 1, 0, seen, 1)
        # A tensor and not a number: what is spread over a tensor would keep decoding away from the operand's layout.
        mean = tl.load(w.nested + tl.cdiv(w.n * groups, w.F.nested) + row * 0)
        scale = _dynamic(raw.to(tl.int32)) * absmax + mean
    elif w.F.scale == "e8m0":
        scale = from_e8m0(raw)
    elif w.F.scale == "e4m3":
        scale = from_e4m3(raw)
    else:
        if w.SCALES_PER > 1:
            raw = raw.to(tl.int16).to(tl.float16, bitcast=True)
        scale = raw.to(tl.float32)
    return scale


@triton.jit
def _dynamic(index):
    """bitsandbytes' signed dynamic map (`reference.dequantize.dynamic_map`) of int32 0..255, in arithmetic instead of a table.

    Code 127 is 0 and 255 is 1. Between them 127 magnitudes of each sign: number p = 1..127 is 2^d (1 + f), and means the middle of
    its part of [0.1, 1] cut into 2^d, times 10^(d - 6).
    """
    p = tl.where(index < 127, 127 - index, index - 127)
    bits = p.to(tl.float32).to(tl.int32, bitcast=True)
    d = (bits >> 23) - 127
    fraction = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    value = (0.1 + 0.9 * (fraction + 0.5 * power_of_two(-d))) * tl.exp2((d - 6).to(tl.float32) * 3.3219280948873623)
    value = tl.where(index < 127, -value, value)
    return tl.where(index == 127, 0.0, tl.where(index == 255, 1.0, value))


@triton.jit
def read_zero(w: Weight, row, group, seen):
    """Zero points as `numbers` takes them: int16, 0 where `seen` is false (None: nowhere)."""
    return _field(w.offsets, row, group, w.offsets0, w.offsets1, seen, w.OFFSETS_PER).to(tl.int16)


@triton.jit
def numbers(codes, zero, w: Weight, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """What stored codes mean, less their zero points, in units of UNIT: [ROWS, WIDTH] in w.DOT. zero: int16, broadcastable."""
    if w.F.kind == "e2m1":
        wide = codes.to(tl.int32)
        made = _e2m1(tl.reshape(tl.join(wide << 28, wide << 24), (ROWS, WIDTH)), w)
    elif w.F.kind == "table":
        if w.LOOK_UP == "":
            low, high = _table(codes & 0xF, w), _table(codes >> 4, w)
        else:
            low, high = tl.inline_asm_elementwise(w.LOOK_UP, "=r,=r,=r,=r,r", [codes], (tl.int16, tl.int16), is_pure=True, pack=4)
            low, high = low.to(w.DOT, bitcast=True), high.to(w.DOT, bitcast=True)
        made = tl.reshape(tl.join(low, high), (ROWS, WIDTH))
    elif w.F.kind == "unsigned":
        made = _integer(tl.reshape(tl.join((codes & 0xF).to(tl.int16), (codes >> 4).to(tl.int16)), (ROWS, WIDTH)), zero, w)
    else:
        made = _integer(codes.to(tl.int16) + 128, zero, w)  # int8, from 0 on
    return made


@triton.jit
def operand(a, w: Weight):
    """Numbers rounded to nearest in w.DOT; in the interpreter, fp32 that bf16 holds."""
    if w.DOT == tl.float32:  # noqa: SIM300 (an operand, not a constant)
        a = nearest(a.to(tl.float32), 16)
    return a.to(w.DOT)


@triton.jit
def _integer(u, zero, w: Weight):
    """u - zero, exact; u and zero 0..255 in int16."""
    if w.DOT == tl.float16:  # noqa: SIM300 (an operand, not a constant)
        made = (u | 0x6400).to(tl.float16, bitcast=True)
        if w.offsets is None:
            made -= 1024.0 + w.F.centre
        else:
            made -= (zero | 0x6400).to(tl.float16, bitcast=True)
    elif w.DOT == tl.bfloat16 and w.F.kind == "unsigned":  # noqa: SIM300
        made = (u | 0x4300).to(tl.bfloat16, bitcast=True)
        if w.offsets is None:
            made -= 128.0 + w.F.centre
        else:  # 128 + zero may need more bits than a bf16 has; the difference does not
            made = (made - 128.0) - zero.to(tl.float32).to(tl.bfloat16)
    else:  # 8 bits do not fit behind the leading one of a bf16: through fp32, the same way
        made = (u.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
        if w.offsets is None:
            made -= 2.0**23 + w.F.centre
        else:
            made -= (zero.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
        made = made.to(w.DOT)
    return made


@triton.jit
def _e2m1(top, w: Weight):
    """Codes in the upper four bits of int32: sign, exponent (2), mantissa (1). Spread, they are a number but for a power of two."""
    if w.DOT == tl.bfloat16:  # noqa: SIM300
        made = ((top >> 22) & 0x81C0).to(tl.int16).to(tl.bfloat16, bitcast=True) * 2.0**126
    else:
        made = (((top >> 19) & 0x8E00).to(tl.int16).to(tl.float16, bitcast=True) * 2.0**14).to(w.DOT)
    return made


@triton.jit
def _table(u, w: Weight):
    """Level u, uint8, of a table: for the interpreter, which knows no instructions of a GPU."""
    made = tl.zeros(u.shape, tl.float32)
    for i in tl.static_range(16):
        bits: tl.constexpr = (w.TABLE >> (32 * i)) & 0xFFFFFFFF
        level = tl.full([], bits - ((bits >> 31) << 32), tl.int32).to(tl.float32, bitcast=True)
        made = tl.where(u == i, level, made)
    return made.to(w.DOT)


# --------------------------------------------------------------------------------------------------------------- host code


def weight(x: torch.Tensor, q: QuantTensor, bias: torch.Tensor | None, out: torch.Tensor) -> Weight:
    """A QuantTensor's tensors, strides and constants, for its product with x [M, K], fp16 or bf16.

    Of a stack [E, N, K] the matrices lie one below the other, [E * N, K]; in act-order x must come in the order of each.
    """
    codec, code = weight_codec(q.format), q.format.code
    dot = tl.float16 if x.dtype is torch.float16 else tl.float32 if INTERPRETED else tl.bfloat16
    unit, look_up, table = 1.0, "", 0
    if codec.kind == "table":
        unit = unit_of_codebook(code, "fp16" if x.dtype is torch.float16 else "bf16")
        levels = _levels(code, unit, x.dtype)
        look_up, table = ("", _in_one_integer(levels)) if INTERPRETED else (look_up_ptx(levels), 0)
    codes, stored, zeros = (None if t is None else t.flatten(0, -2) for t in (q.codes, q.scales, q.offsets))
    scales, scales_per = _in_words(stored)
    offsets, offsets_per = _in_words(zeros)
    constants = map(tl.constexpr, (look_up, table, unit, dot, scales_per, offsets_per))
    strided = (part for t in (x, codes, scales, offsets) for part in (t, *((0, 0) if t is None else t.stride())))
    # The interpreter takes a constant of a tuple as it is, and sees no attributes through a constexpr.
    of_format = codec if INTERPRETED else tl.constexpr(codec)
    return Weight(*strided, q.tensor_scale, q.nested, bias, q.perm, out, math.prod(q.shape[:-1]), of_format, *constants)


def _in_words(t: torch.Tensor | None) -> tuple[Any, int]:
    """A matrix of small numbers as int32 words and how many each holds, if rows are whole words at aligned addresses."""
    if t is None or t.element_size() == 4:
        return t, 1
    per = 4 // t.element_size()
    whole = t.stride(1) == 1 and all(n % per == 0 for n in (t.shape[1], t.stride(0))) and t.data_ptr() % 4 == 0
    return (t.view(torch.int32), per) if whole else (t, 1)


def _levels(code: Code, unit: float, dtype: torch.dtype) -> torch.Tensor:
    """All levels / unit in 16 bits, [16]."""
    return (code.codebook().double() / unit).float().to(dtype)


def _in_one_integer(levels: torch.Tensor) -> int:
    """Their patterns in fp32: a constant of a kernel is a number or a string."""
    return sum((b & 0xFFFFFFFF) << (32 * i) for i, b in enumerate(levels.float().view(torch.int32).tolist()))


def look_up_ptx(levels: torch.Tensor) -> str:
    """PTX that looks up the eight codes of four bytes ($4) in a table of 16 numbers of 16 bits: $0, $1 lower, $2, $3 upper codes.

    Four codes at a time, a byte of the number at a time: `prmt` picks bytes of two registers by the lower three bits of each code;
    the fourth bit, spread over a byte, selects between both halves of the table.
    """
    patterns = [b & 0xFFFF for b in levels.view(torch.int16).tolist()]
    low, high = ([int.from_bytes(bytes((b >> shift) & 0xFF for b in patterns[i : i + 4]), "little") for i in range(0, 16, 4)]
                 for shift in (0, 8))  # fmt: skip

    def half(lower: str, upper: str) -> str:
        picked = "".join(
            f"prmt.b32 a, {t[0]:#x}, {t[1]:#x}, s; prmt.b32 b, {t[2]:#x}, {t[3]:#x}, s; lop3.b32 {name}, a, b, m, 0xd8; "
            for name, t in (("l", low), ("h", high))
        )
        return f"prmt.b32 m, 0, 0x80000000, f; {picked}prmt.b32 {lower}, l, h, 0x6240; prmt.b32 {upper}, l, h, 0x7351; "

    return (
        "{ .reg .b32 s, f, t, a, b, l, h, m; "
        "and.b32 s, $4, 0x77777777; and.b32 f, $4, 0x88888888; "  # three bits of each code; its fourth
        "shr.u32 t, f, 3; sub.u32 t, f, t; or.b32 f, f, t; "  # 0xF where that is 1: the sign of byte 7; else byte 0
        f"{half('$0', '$2')}shr.u32 s, s, 16; shr.u32 f, f, 16; {half('$1', '$3')}}}"
    )
