"""Projections of a decoder block with what surrounds them, in one launch each: against the launches one by one, and float64."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import same_bits
from gpu_place import PLACE

import halfbyte as hb
from halfbyte.ops.block import gated
from halfbyte.ops.block_linear import Unscaled, add_projection, gated_projection, projected
from halfbyte.ops.linear import linear, projections
from halfbyte.reference.block import Norm, rms_norm
from halfbyte.tensors import QuantTensor

pytestmark = pytest.mark.compile_first

CASES = [("int4_g128", 1), ("int4_g128", 3), ("int4_g128", 8), ("int4_g32", 16), ("int8_col", 8), ("nf4", 1), ("mxfp4", 16)]
K, N = PLACE.size(4096, 256), PLACE.size(2048, 128)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(PLACE.device)


def weight(n: int, k: int, name: str, seed: int) -> QuantTensor:
    return hb.quantize(randn(n, k, seed=seed) * k**-0.5, name)


def further(found: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor) -> bool:
    """Whether a result is further from the truth than what modules compute, but for single numbers that round the other way."""
    error, other = ((y.double() - truth).norm() for y in (found, plain))
    return not error <= 1.1 * other


@pytest.mark.parametrize(("name", "rows"), CASES)
def test_a_block_in_one_launch_a_projection(name: str, rows: int) -> None:
    x, residual = (randn(rows, n, seed=n).bfloat16() for n in (K, N))
    out, (q, k), pair = weight(N, K, name, 1), [weight(n, N, name, n) for n in (N, 96)], [weight(3 * N, N, name, s) for s in (2, 3)]
    norm, bias = Norm((1 + 0.3 * randn(N, seed=4)).bfloat16(), 1e-5, "rounded"), randn(N, seed=5).bfloat16()
    hidden, left = add_projection(x, out, bias, residual, norm)
    assert left is not None
    assert PLACE.dry or isinstance(left, Unscaled)
    assert torch.equal(hidden, residual + linear(x, out, bias))
    plain = rms_norm(hidden, norm)
    wide = hidden.double()
    truth = wide * (wide.pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    products = [truth @ w.dequantize(torch.float64).T for w in (q, k, *pair)]
    none = [None, None]
    found = [*projected(left, [q, k], none), gated_projection(left, pair, none, "silu")]
    gate, up = projections(plain, pair, none)
    for one, by_modules, exact in zip(
        found,
        [*projections(plain, [q, k], none), gated(gate, up, "silu")],
        [*products[:2], gated(*products[2:], "silu")],
        strict=True,
    ):
        assert not further(one, by_modules, exact)
    again = [*projected(left, [q, k], none), gated_projection(left, pair, none, "silu")]
    assert all(map(same_bits, found, again))
