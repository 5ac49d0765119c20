"""The dequantize kernel, interpreted: it writes the bits of `halfbyte.dequantize`, into the rows it is given and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import halfbyte as hb
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.kernels.dequantize import launch
from halfbyte.ops import _linear_on_gpu
from halfbyte.reference.linear import LinearCall
from halfbyte.tensors import QuantTensor
from halfbyte_lab.cases.linear_baselines import dequantize_rows

#: numpy warns of what a GPU computes silently, and as meant: numbers beyond fp32 become infinite.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = (torch.bfloat16, torch.float16)


def weight(name: str, rows: int, width: int, seed: int = 0) -> QuantTensor:
    """Rows from tiny to large."""
    w = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    return hb.quantize(w * torch.logspace(-4, 2, rows)[:, None], name)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bits, with every NaN the same."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int16)


def written(weights: list[QuantTensor], first: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """What the kernel writes; what lies around it must stay."""
    width = weights[0].shape[1]
    buffer = torch.full((rows + 2, width + 3), 7.0, dtype=dtype)
    launch(weights, buffer[1 : rows + 1, :width], first)
    assert bool((buffer[0] == 7).all() and (buffer[-1] == 7).all() and (buffer[:, width:] == 7).all())
    return buffer[1 : rows + 1, :width]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_the_bits_are_those_of_the_reference(name: str, dtype: torch.dtype) -> None:
    for rows, width in ((5, 256), (9, 1152)):
        w = weight(name, rows, width)
        assert torch.equal(bits(written([w], 0, rows, dtype)), bits(hb.dequantize(w, dtype)))


@pytest.mark.parametrize(("name", "width"), [("int4_col", 202), ("int4_sym_col", 2), ("int8_col", 131), ("nvfp4", 48)])
def test_odd_widths(name: str, width: int) -> None:
    w = weight(name, 3, width)
    assert torch.equal(bits(written([w], 0, 3, torch.bfloat16)), bits(hb.dequantize(w, torch.bfloat16)))


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_every_code_and_every_scale(name: str) -> None:
    """All 256 bytes as codes; as scales everything that is stored in a byte, NaN and subnormals with it."""
    w = weight(name, 512, 512)
    codes = torch.arange(256, dtype=torch.uint8).repeat(w.codes.numel() // 256).view(w.codes.shape)
    w = replace(w, codes=codes.view(w.codes.dtype))
    if w.scales is not None and w.scales.dtype is torch.uint8:
        w = replace(w, scales=torch.arange(w.scales.numel(), dtype=torch.int64).remainder(256).to(torch.uint8).view(w.scales.shape))
    assert torch.equal(bits(written([w], 0, 512, torch.bfloat16)), bits(hb.dequantize(w, torch.bfloat16)))


@pytest.mark.parametrize("formats", [("nf4", "nf4"), ("mxfp4",) * 3, ("int4_g128", "nf4_dq", "int8_col")])
def test_weights_below_each_other_in_one_launch(formats: tuple[str, ...]) -> None:
    weights = [weight(name, rows, 256, rows) for name, rows in zip(formats, (70, 5, 33), strict=False)]
    whole = torch.cat([hb.dequantize(w, torch.float16) for w in weights])
    assert torch.equal(bits(written(weights, 0, len(whole), torch.float16)), bits(whole))
    for first, last in ((0, 1), (3, 71), (69, 74), (70, 75), (len(whole) - 9, len(whole))):
        assert torch.equal(bits(written(weights, first, last - first, torch.float16)), bits(whole[first:last])), (first, last)


@pytest.mark.parametrize("name", ["int4_g128", "nf4_dq", "int8_col"])
def test_act_order(name: str) -> None:
    perm = torch.randperm(256, generator=torch.Generator().manual_seed(0)).int()
    w = replace(weight(name, 5, 256), perm=perm)
    assert torch.equal(bits(written([w], 0, 5, torch.float16)), bits(hb.dequantize(w, torch.float16)))
    both = torch.cat([hb.dequantize(w, torch.float16), hb.dequantize(replace(w, perm=None), torch.float16)])
    assert torch.equal(bits(written([w, replace(w, perm=None)], 0, 10, torch.float16)), bits(both))
    written([replace(w, perm=perm * 1000 - 9)], 0, 5, torch.float16)  # out of range: nothing beyond the rows


def test_a_slab_of_rows_and_none_at_all() -> None:
    w = weight("nf4_dq", 40, 128)
    assert torch.equal(bits(written([w], 17, 11, torch.bfloat16)), bits(hb.dequantize(w, torch.bfloat16)[17:28]))
    assert written([w], 40, 0, torch.bfloat16).shape == (0, 128)


@pytest.mark.parametrize("rows", [4, 24, 33, 200])
def test_gemms_over_slabs_of_weights_below_each_other(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab may hold parts of up to three weights; each product gets the bits of its own weight, with a bias or without."""
    monkeypatch.setattr(_linear_on_gpu, "slab_rows", lambda width: rows)
    weights, x = (
        [weight(name, n, 64, n) for name, n in (("nf4", 24), ("int8_col", 9), ("int4_g32", 33), ("nf4", 5))],
        torch.randn(3, 64).bfloat16(),
    )
    outs = [torch.full((3, w.shape[0]), torch.nan).bfloat16() for w in weights]
    biases = [None, torch.randn(9), None, torch.randn(5)]
    _linear_on_gpu._by_slabs(LinearCall(x, weights, biases), outs)
    for w, bias, out in zip(weights, biases, outs, strict=True):
        exact = hb.dequantize(w, x.dtype).double()
        ref, most = (a.double() @ b.T + (0 if bias is None else bias.bfloat16()) for a, b in ((x, exact), (x.abs(), exact.abs())))
        assert bool(((out.double() - ref).abs() <= 2**-8 * ref.abs() + 2**-16 * most).all())


def test_without_a_gpu_torch_dequantizes() -> None:
    w, out = weight("nf4", 8, 128), torch.zeros(6, 128).bfloat16()
    dequantize_rows([w], out, 1)
    assert torch.equal(out, hb.dequantize(w, torch.bfloat16)[1:7])
