"""The clips of formats: found again by the error of a Gaussian, and better than the whole range on heads of a real model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import halfbyte as hb
from halfbyte.formats import KV_FORMATS, Format
from halfbyte.reference.hadamard import rotate
from halfbyte.reference.quantize import quantize
from halfbyte.text import heldout_text, windows
from halfbyte_lab.evals.model import load
from halfbyte_lab.evals.outliers import recorded_heads

CLIPPED = {name: fmt for name, fmt in KV_FORMATS.items() if fmt.clip < 1}


def sqnr(x: torch.Tensor, fmt: Format) -> float:
    """Signal over the squared error of quantizing x, in dB."""
    return 10 * math.log10(x.square().sum() / (quantize(x, fmt).dequantize() - x).square().sum())


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIPPED)
def test_a_clip_has_the_least_squared_error_of_normal_numbers(name: str) -> None:
    """Of all multiples of 1 / 32, for blocks of 128 numbers, or of a group."""
    fmt = CLIPPED[name]
    size = fmt.group_size(128)
    x = torch.randn(1, 1, 2**21 // size, size, generator=torch.Generator().manual_seed(0))
    errors = {i / 32: -sqnr(x, replace(fmt, clip=i / 32)) for i in range(12, 33)}
    assert min(errors, key=errors.__getitem__) == fmt.clip
    assert errors[1.0] - errors[fmt.clip] > 1.5  # dB


def test_four_bits_gain_little() -> None:
    """Which is why INT4 covers the whole span: half a dB of 20, where two bits gain 3 of 6."""
    x = torch.randn(1, 1, 2**14, 128, generator=torch.Generator().manual_seed(0))
    gain = max(sqnr(x, replace(KV_FORMATS["int4"], clip=i / 32)) for i in range(24, 32)) - sqnr(x, KV_FORMATS["int4"])
    assert 0.2 < gain < 0.5


@pytest.mark.parametrize("name", CLIPPED)
def test_a_clip_helps_real_heads(name: str) -> None:
    """Keys and values of every layer of the shipped model, as they are and rotated; outliers, once they are rotated."""
    model, tokenizer = load("demo", torch.device("cpu"))
    layers = recorded_heads(model, windows(tokenizer.encode(heldout_text()), 256, 2))
    fmt = CLIPPED[name]
    whole = replace(fmt, clip=1.0)
    for heads in layers:
        outliers = heads.k.float().clone()
        outliers[..., [3, 35]] *= 10
        for x in (heads.k.float(), heads.v.float(), rotate(heads.k.float()), rotate(heads.v.float()), rotate(outliers)):
            assert sqnr(x, fmt) > sqnr(x, whole)


@pytest.mark.parametrize("name", CLIPPED)
def test_a_clip_moves_with_its_block(name: str) -> None:
    """It is taken off both ends of the span: a mean, as of keys with a bias, costs nothing but the rounding of offsets."""
    x = torch.randn(1, 1, 256, 128, generator=torch.Generator().manual_seed(1))
    moved = quantize(x + 64, CLIPPED[name]).dequantize() - 64
    assert (moved - x).norm() < 1.01 * (quantize(x, CLIPPED[name]).dequantize() - x).norm()


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_scores_in_the_thousands_stay_numbers(impl: str) -> None:
    generator = torch.Generator().manual_seed(2)
    k, v, q = (torch.randn(1, h, t, 128, generator=generator).bfloat16() for h, t in ((2, 200), (2, 200), (8, 1)))
    for name in CLIPPED:
        cache = hb.KVCache(1, 2, 128, 256, keys=name, values=name)
        cache.append(k * 40, v)
        out = hb.decode_attention(q * 40, cache, impl=impl)
        assert out.isfinite().all()
        assert out.abs().max() <= cache.dequantized()[1].abs().max() * (1 + 2.0**-8)
