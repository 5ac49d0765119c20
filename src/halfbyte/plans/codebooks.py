"""Codebooks in 16 bits: the unit that values are divided by before they are rounded."""

from __future__ import annotations

import functools
import itertools
import struct
from statistics import NormalDist

from halfbyte.formats import Code

#: The K that units are optimized for.
_LONG = 8192


@functools.cache
def unit_of_codebook(code: Code, dtype: str) -> float:
    """What the values of a codebook are divided by before they are rounded to 16 bits.

    1 / d for the smallest d = 1..16 that makes all of them exact. If there is none (NF4), the unit with the least error of long
    sums: where x has one sign, the mean rounding error grows with K, deviations from it with sqrt(K).
    """
    assert code.values is not None
    values = code.values
    for d in range(1, 17):
        if all(abs(_rounded(value * d, dtype) - value * d) <= 2**-22 * abs(value * d) for value in values):
            return 1.0 / d
    shares = _shares(values)

    def cost(factor: float) -> float:
        errors = [_rounded(value * factor, dtype) / factor - value for value in values]
        mean = sum(share * error for share, error in zip(shares, errors, strict=True))
        return sum(share * error**2 for share, error in zip(shares, errors, strict=True)) + _LONG * mean**2

    return 1.0 / min((1.0 + i / 1024 for i in range(1024)), key=cost)


def _shares(values: tuple[float, ...], block: int = 64) -> list[float]:
    """How often each value is the nearest in blocks of normal numbers divided by their largest magnitude."""
    normal, ascending = NormalDist(), sorted(values)
    edges = [-1.0, *((a + b) / 2 for a, b in itertools.pairwise(ascending)), 1.0]
    tops = [
        normal.inv_cdf((1 + ((i + 0.5) / block) ** (1 / block)) / 2) for i in range(block)
    ]  # the largest of a block, by quantiles
    frequencies = dict.fromkeys(ascending, 0.0)
    for level, low, high in zip(ascending, edges, edges[1:], strict=False):
        inside = sum((normal.cdf(high * top) - normal.cdf(low * top)) / (2 * normal.cdf(top) - 1) for top in tops) / block
        frequencies[level] += inside * (block - 1) / block + (0.5 / block if abs(level) == 1.0 else 0.0)
    return [frequencies[value] for value in values]


def _rounded(value: float, dtype: str) -> float:
    """The 16-bit number nearest to `value`."""
    bits = pattern(value, dtype)
    if dtype == "fp16":
        return float(struct.unpack("<e", struct.pack("<H", bits))[0])
    return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])


def pattern(value: float, dtype: str) -> int:
    """The bits of the 16-bit number nearest to `value`."""
    if dtype == "fp16":
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    bits = int(struct.unpack("<I", struct.pack("<f", value))[0])
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
