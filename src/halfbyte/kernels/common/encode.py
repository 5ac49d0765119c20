"""Numbers to stored codes, in registers: the arithmetic of `reference.quantize`, bit for bit.

    symmetric      s = f16(max|x| / reach)          q = round(x / s)
    float offset   s = f16(c (max - min) / reach)   q = round((x - m) / s),    m = f16(min + (1 - c) / 2 (max - min)),  c: the clip

F is the `KVCodec` of a format. In f32, with IEEE division and ties to even; kernels that use this are compiled without FP fusion.

What cannot be raised on a device: a scale is NaN where its block holds NaN or infinity; scales and offsets beyond 65504 are 65504.
Under a scale that is not the block's own, NaN becomes code 0 (E4M3: NaN, and infinity too).
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.formats import MIN_SCALE

MIN = tl.constexpr(MIN_SCALE)
F16_MAX = tl.constexpr(65504.0)
INF = tl.constexpr(0x7F800000)  # the bits of infinity; those of a NaN are larger
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
HIGH = tl.constexpr(-(2**12))  # all but the last 12 bits
LARGE = tl.constexpr(2.0**100)
INT_MIN = tl.constexpr(-(2**31))
ROUND = tl.constexpr(1.5 * 2**23)  # added to an f32 of less than 2^22, leaves the nearest integer, ties to even, in the low bits


@triton.jit
def bits_of(x):
    """The bits of f32 `x`, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """The f32 of these bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def ordered(bits):
    """Bits of an f32 as an integer that is ordered as the numbers are, NaN outermost; its own inverse."""
    return bits ^ ((bits >> 31) & MAGNITUDE)


@triton.jit
def as_dtype(x, dtype: tl.constexpr):
    """f32 `x` rounded to `dtype`, ties to even. BF16 by integers: the interpreter's own conversion truncates."""
    if dtype == tl.bfloat16:
        bits = bits_of(x)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        y = tl.where(x == x, rounded, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(dtype)
    return y


@triton.jit
def quotient(x, s):
    """f32 x / s as IEEE rounds it, without the branches of a division. `s` has at most 12 significant bits (an f16 has 11).

    q = x * (1 / s) is a few units in its last place off. Each half of q's bits times s is exact in f32, and so is r = x - q * s.
    q + r / s then rounds as x / s does, because that is never nearer than 2^-13 units to the middle between two numbers.
    Where it does not matter to a code or a scale, the result is only about right: below 2^-60, and beyond 2^100.
    """
    y = 1.0 / s
    q = x * y
    held = tl.minimum(tl.maximum(q, -LARGE), LARGE)  # infinity has no difference from itself
    high = float_of(bits_of(held) & HIGH)
    r = (x - high * s) - (held - high) * s
    return tl.where(tl.abs(r) > 0.0, q + r * y, q)  # -0 stays -0, and NaN NaN


@triton.jit
def f16_scale(spread, broken, F: tl.constexpr):
    """The f16 scale of blocks whose magnitudes (or spans) are `spread`."""
    s = quotient(spread, F.reach)
    s = tl.where(s < MIN, MIN, s)
    s = tl.where(s > F16_MAX, F16_MAX, s)
    return tl.where(broken, float("nan"), s).to(tl.float16)


@triton.jit
def measure(x, valid, AXIS: tl.constexpr, F: tl.constexpr):
    """Blocks of f32 `x` along AXIS: (f16 scales, f16 offsets, whether a block's codes are all 0).

    By integers, so that NaN and infinity are the largest of all and not lost in a maximum.
    """
    if F.offset:
        order = ordered(bits_of(x))
        high = tl.max(tl.where(valid, order, INT_MIN), AXIS)
        low = tl.min(tl.where(valid, order, MAGNITUDE), AXIS)
        broken = (high >= INF) | (low <= ~INF)
        top, bottom = float_of(ordered(high)), float_of(ordered(low))
        span, start = tl.where(broken, 0.0, top - bottom), bottom
        if F.clip != 1:
            start += span * ((1 - F.clip) / 2)
            span *= F.clip
        scale = f16_scale(span, broken, F)
        offset = tl.where(broken, 0.0, tl.minimum(tl.maximum(start, -F16_MAX), F16_MAX)).to(tl.float16)
        zero = broken | (top == bottom)  # the value of a constant block is its offset, whatever rounding to f16 did to it
    else:
        amax = tl.max(bits_of(x) & MAGNITUDE, AXIS)  # what is not valid is 0
        zero = amax >= INF
        scale = f16_scale(float_of(amax), zero, F)
        offset = scale
    return scale, offset, zero


@triton.jit
def encode(x, scale, offset, zero, F: tl.constexpr):
    """int32 codes of f32 `x` under f16 scales (and offsets) that broadcast against it; 0 where `zero`."""
    if F.offset:
        x = x - offset.to(tl.float32)
    unit = tl.where(zero, 0.0, quotient(x, scale.to(tl.float32)))
    return nearest(unit, F)


@triton.jit
def nearest(unit, F: tl.constexpr):
    """The codes of values that are already divided by their scale."""
    if F.floating:
        q = e4m3(unit, F.reach)
    else:
        unit = tl.where(unit == unit, unit, 0.0)
        q = bits_of(tl.minimum(tl.maximum(unit, F.lo * 1.0), F.hi * 1.0) + ROUND) - 0x4B400000
    return q


@triton.jit
def e4m3(x, REACH: tl.constexpr):
    """E4M3 bits of f32 `x`: nearest, ties to even, saturating; NaN and infinity are NaN. By integers, for GPUs without FP8."""
    bits = bits_of(x)
    magnitude = bits & MAGNITUDE
    held = tl.minimum(float_of(magnitude), REACH)
    a = bits_of(held)
    normal = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - (120 << 3)  # 20 mantissa bits off, exponent bias 127 -> 7
    subnormal = bits_of(held + 16384.0) - 0x46800000  # multiples of 2^-9: 2^14 has its last bit there
    code = tl.where(a < 0x3C800000, subnormal, normal)  # 2^-6
    return tl.where(magnitude >= INF, 0x7F, code) | ((bits >> 24) & 0x80)


@triton.jit
def beyond(unit, REACH: tl.constexpr):
    """Whether |unit|, rounded to an integer with ties to even, exceeds REACH. NaN does."""
    within = tl.abs(unit) <= REACH + 0.5 if REACH % 2 == 0 else tl.abs(unit) < REACH + 0.5
    return within == 0
