"""The cpu level of `linear` where sums cancel: inputs with a mean, rows whose codes add up to nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halfbyte.cpu import linear as cpu
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.packing import pack_codes
from halfbyte.reference.quantize import quantize
from halfbyte.tensors import QuantTensor

WITH_ZEROS = [name for name, fmt in WEIGHT_FORMATS.items() if fmt.offset == "int"]


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error_against_eager(x: torch.Tensor, weight: QuantTensor) -> float:
    """The L2 error against float64, as a multiple of that of torch's product with the dequantized weight in x's dtype."""
    full = weight.dequantize(torch.float64)
    truth = x.double() @ full.mT
    eager = torch.nn.functional.linear(x, full.to(x.dtype))
    return ((cpu.linear(x, weight, None).double() - truth).norm() / (eager.double() - truth).norm()).item()


@pytest.mark.parametrize("name", WITH_ZEROS)
@pytest.mark.parametrize("rows", [1, 16, 200])
@pytest.mark.parametrize("mean", [0, 50])
def test_zero_points_do_not_cancel(name: str, rows: int, mean: float) -> None:
    weight = quantize(drawn(96, 1024, seed=1) * 0.1, name)
    assert error_against_eager(drawn(rows, 1024, seed=2) + mean, weight) <= 2


@pytest.mark.parametrize("name", WITH_ZEROS)
def test_rows_whose_codes_cancel(name: str) -> None:
    """Scales of 1/16 are exact in fp16, as are the products: eager rounds only its sums and its result."""
    rows, width = 96, 4096
    weight = quantize(drawn(rows, width, seed=3), name)
    assert weight.scales is not None
    assert weight.offsets is not None
    codes = torch.randint(0, 15, (rows, width), generator=torch.Generator().manual_seed(4))
    codes[:, ::2] = 14 - codes[:, 1::2]  # pairs add up to twice the zero point
    parts = {"codes": pack_codes(codes.to(torch.uint8), 4), "scales": torch.full_like(weight.scales, 2**-4)}
    weight = replace(weight, **parts, offsets=torch.full_like(weight.offsets, 7))
    x = (1000 + 20 * drawn(16, width, seed=5)).half()
    assert error_against_eager(x, weight) <= 2


@pytest.mark.parametrize("zero", [15, 128, 129, 255])
def test_a_zero_point_beyond_every_code(zero: int) -> None:
    """128 is the last whose differences from codes a signed byte holds."""
    weight = quantize(drawn(8, 64, seed=5), "int4_g32")
    assert weight.offsets is not None
    zeros = torch.full_like(weight.offsets, zero)
    for few in (zeros, torch.where(torch.arange(len(zeros)).view(-1, 1) % 2 == 0, zeros, 3)):
        assert error_against_eager(drawn(3, 64, seed=6), replace(weight, offsets=few.to(zeros.dtype))) <= 2
