"""Dequantizing on the GPU gives the bits that the reference gives on a CPU, in every weight format."""

from __future__ import annotations

import pytest
import torch
from gpu_place import PLACE

import halfbyte as hb
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte_lab.cases.linear_baselines import dequantize_rows

ROWS, WIDTH = PLACE.size(1000, 20), PLACE.size(2176, 256)


def weight(name: str, rows: int, width: int, seed: int) -> hb.QuantTensor:
    """Rows from tiny to large."""
    rng = torch.Generator().manual_seed(seed)
    return hb.quantize(torch.randn(rows, width, generator=rng) * torch.logspace(-4, 2, rows)[:, None], name)


@pytest.mark.compile_first
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_the_bits_are_those_of_a_cpu(name: str, dtype: torch.dtype) -> None:
    w = weight(name, ROWS, WIDTH, 0)
    buffer = torch.full((ROWS + 1, WIDTH + 8), 7.0, dtype=dtype, device=PLACE.device)
    dequantize_rows([w.to(PLACE.device)], buffer[:ROWS, :WIDTH])
    assert torch.equal(buffer[:ROWS, :WIDTH].cpu(), hb.dequantize(w, dtype))
    assert bool((buffer[ROWS:] == 7).all() and (buffer[:, WIDTH:] == 7).all())


@pytest.mark.parametrize("formats", [("nf4",) * 3, ("int4_g128", "nf4_dq", "int8_col")])
def test_slabs_of_three_weights(formats: tuple[str, ...]) -> None:
    weights = [weight(name, rows, WIDTH, rows) for name, rows in zip(formats, (ROWS, 7, ROWS // 2), strict=True)]
    whole = torch.cat([hb.dequantize(w, torch.bfloat16) for w in weights])
    there = [w.to(PLACE.device) for w in weights]
    for first, rows in ((0, len(whole)), (ROWS - 1, 10), (len(whole) - 1, 1)):
        out = torch.empty(rows, WIDTH, dtype=torch.bfloat16, device=PLACE.device)
        dequantize_rows(there, out, first)
        assert torch.equal(out.cpu(), whole[first : first + rows])


def test_memory_beyond_two_to_the_31() -> None:
    """More numbers than 32 bits count, in one buffer and one weight."""
    rows, width = PLACE.size(2**17 + 3, 5), PLACE.size(16384, 256)
    w = weight("int8_col", 3, width, 0)
    parts = {name: t.to(PLACE.device).repeat(-(-rows // 3), 1)[:rows].contiguous() for name, t in w.parts().items()}
    large = hb.QuantTensor(w.format, (rows, width), **parts)
    out = torch.empty(rows, width, dtype=torch.bfloat16, device=PLACE.device)
    dequantize_rows([large], out)
    expected = hb.dequantize(w, torch.bfloat16)
    for row in (0, 1, rows // 2, rows - 2, rows - 1):
        assert torch.equal(out[row].cpu(), expected[row % 3])
