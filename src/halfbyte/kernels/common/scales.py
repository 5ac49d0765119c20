"""Stored scales to numbers: every type once in Triton and once in Gluon, which cannot call each other.

E8M0 is a power of two: 0 is 2^-127, a subnormal of fp32, and 255 NaN. E4M3 has no infinity; 127 and 255 are NaN.
"""

# ruff: noqa: RET505
# Triton compiles a part of Python: an `else` after a return is how a branch is left out of what it compiles.

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.common.codes import e4m3_bits


@triton.jit
def from_e8m0(stored):
    """fp32 numbers of E8M0 bits, any integers."""
    bits = tl.maximum(stored.to(tl.int32) << 23, 0x00400000)
    return tl.where(stored == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def from_e4m3(stored):
    """fp32 numbers of E4M3 bits, any integers."""
    return e4m3_bits(stored.to(tl.int16)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@gluon.jit
def to_float(s, S: gl.constexpr):
    """fp32 numbers of the scales of a weight that is stored as S says. Bits alone, which an operand's layout survives."""
    if S.scale == "e8m0":
        # 255 is infinity's exponent, and with one more bit NaN.
        bits = gl.maximum(s.to(gl.int32) << 23, 0x00400000) | (s.to(gl.int32) + 1 >> 8 << 22)
        return bits.to(gl.float32, bitcast=True)
    elif S.scale == "e4m3":
        bits = (s.to(gl.int8, bitcast=True).to(gl.int32) << 20) & -0x78100000  # 0x87F00000: the sign stands in all bits above
        number = bits.to(gl.float32, bitcast=True) * 1.329227995784916e36
        return gl.where(gl.abs(number) > 448.0, float("nan"), number)
    else:
        return s.to(gl.float32)
