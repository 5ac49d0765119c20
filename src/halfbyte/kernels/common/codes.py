"""Stored codes to numbers, in registers.

A word of 8 or 16 bits holds PARTS codes; unpacking gives one tensor a part, in the shape of the words. An integer below 1024 in the
bits of an fp16 is the subnormal u * 2^-24, and E4M3 bits put in place are the fp16 v * 2^-8, both exact: no conversion, and the
power of two goes into a scale. Integers are centred, u - 2^(BITS - 1), so that sums of products do not cancel.
"""

import triton
import triton.language as tl

#: The interpreter runs on a CPU, where bf16 arithmetic is wrong: it is given fp32 instead, and no instructions of a GPU.
INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def unpack(words, F: tl.constexpr, PARTS: tl.constexpr):
    """PARTS fp16 tensors of the codes that `KVCodec` F describes: (u - LEVELS / 2) * 2^-24 for "unsigned" codes u of LEVELS values,
    c * 2^-24 for "signed" c, v * 2^-8 for "e4m3". The words themselves where nothing is quantized.
    """
    LEVELS: tl.constexpr = 2**F.bits
    parts = ()
    for j in tl.static_range(PARTS):
        if not F.scaled:
            parts += (words,)
        else:
            field = (words.to(tl.int16) >> (F.bits * j)) & (LEVELS - 1)
            if F.kind == "e4m3":
                parts += (e4m3_bits(field).to(tl.float16, bitcast=True),)
            else:
                if F.kind == "signed":
                    field = field ^ (LEVELS // 2)
                parts += (field.to(tl.float16, bitcast=True) - (LEVELS // 2) * 2.0**-24,)
    return parts


@triton.jit
def e4m3_bits(field):
    """The int16 bits of v * 2^-8 in fp16 for E4M3 bits 0..255. E4M3 has no infinity; its NaN becomes one: all ones carry over."""
    bits = ((field & 0x7F) << 7) | ((field & 0x80) << 8)
    return (bits | ((bits + 0x80) & 0x4000)).to(tl.int16)


@triton.jit
def exponent(x):
    """floor(log2 |x|) as int32; -127 for zeros and subnormals, 128 for infinity and NaN. x fp32."""
    return ((x.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127


@triton.jit
def power_of_two(e):
    """2^e in fp32 for int32 e in -126..127."""
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def nearest(x, DROPPED: tl.constexpr):
    """x, fp32, rounded to nearest even where its DROPPED lowest bits are 0: 13 for TF32, 16 for bf16."""
    bits = x.to(tl.int32, bitcast=True)
    half: tl.constexpr = 2 ** (DROPPED - 1)
    bits = (bits + (half - 1) + ((bits >> DROPPED) & 1)) & -(2 * half)
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # a NaN of all ones would carry over to 0


@triton.jit
def rounded(x, target, INTERPRETED: tl.constexpr):
    """x, fp32, in the dtype that `target` points to. The interpreter would cut the low half off for bf16."""
    if INTERPRETED and target.dtype.element_ty.is_bf16():
        x = nearest(x, 16)
    return x.to(target.dtype.element_ty)
