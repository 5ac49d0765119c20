"""Projections of a block with what surrounds them in one launch, emulated: against the launches one by one, and float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from emulation import EARLY, ORDERS, machine, multiply
from gpu_cases import same_bits

import halfbyte as hb
from halfbyte.device import GPU
from halfbyte.ops import _linear_on_gpu, block_linear
from halfbyte.ops.block_linear import Unscaled, add_projection, gated_projection, projected
from halfbyte.plans.gemm import tuned_gemm
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.plans.gemm_spec import MmaSpec
from halfbyte.reference.block import Norm, add_norm, gated, rms_norm
from halfbyte.tensors import QuantTensor

EPS = 1e-5


@contextmanager
def pretended(num_sms: int, order: int = 0, backwards: bool = False) -> Iterator[list[GemmPlan]]:
    """A GPU of so many multiprocessors; the plans of launches on it."""
    found: list[GemmPlan] = []

    def plan(problem: GemmProblem, *_: Any) -> GemmPlan | str:
        made = tuned_gemm(problem, GPU("", num_sms, (9, 0)), use_pdl=True)
        found.extend([made] if isinstance(made, GemmPlan) else [])
        return made

    gpu = mock.patch.multiple(block_linear, can_bypass_dispatcher=lambda *_: True, level=lambda *_: "gluon")
    with gpu, mock.patch.object(_linear_on_gpu, "_plan", plan), machine(ORDERS[order], backwards):
        yield found


@dataclass(frozen=True)
class Case:
    """x [rows, width] and weights of n rows. num_sms: few, so that programs share tiles."""

    weight: str
    rows: int
    n: int
    width: int
    kind: str = "rounded"
    activation: str = "silu"
    bias: bool = False
    num_sms: int = 3
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return f"{self.weight}-{self.rows}x{self.n}x{self.width}"


CASES = (
    Case("int4_g128", 1, 96, 1536),
    Case("int4_g128", 8, 72, 1536, "offset", "gelu_tanh", bias=True),
    Case("int4_sym_col", 3, 64, 1056, "exact", bias=True),
    Case("int8_col", 4, 40, 1040, num_sms=8),
    Case("int4_g32", 2, 80, 1152, "exact"),
    Case("nf4", 16, 72, 1088, num_sms=1),
    Case("mxfp4", 5, 64, 1152, "offset"),
    Case("nvfp4", 1, 66, 1088, num_sms=8),
)


def made(case: Case, n: int, width: int, seed: int) -> tuple[QuantTensor, torch.Tensor | None]:
    rng = torch.Generator().manual_seed(seed)
    weight = hb.quantize(torch.randn(n, width, generator=rng) * 0.1, case.weight)
    return weight, torch.randn(n, generator=rng).to(case.dtype) if case.bias else None


def rows(m: int, n: int, dtype: torch.dtype, seed: int = 5) -> torch.Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normed(case: Case) -> Norm:
    return Norm(rows(1, case.n, case.dtype)[0].float().mul(0.3).add(1).to(case.dtype), EPS, case.kind)


def stored(*weights: QuantTensor) -> set[int]:
    return {t.untyped_storage().data_ptr() for w in weights for t in (w.codes, w.scales, w.offsets) if t is not None}


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_residual_sum_and_what_a_norm_needs(case: Case) -> None:
    """The bits of the launches one by one; the norm's factor from sums of squares in fp32."""
    (weight, bias), x, residual = made(case, case.n, case.width, 1), rows(case.rows, case.width, case.dtype), None
    residual, norm = rows(case.rows, case.n, case.dtype, 6), normed(case)
    multiplier = 0.22 if case.bias else 1.0
    found = []
    for order in (0, 1):
        with pretended(case.num_sms, order, order == 1):
            found.append(add_projection(x, weight, bias, residual, norm, multiplier=multiplier))
        assert stored(weight) >= EARLY, "all else may still be written by the kernel before"
        assert EARLY, "weights need not wait for the kernel before"
    y = multiply(x, [weight], [bias], ORDERS[0], case.num_sms)[0]
    hidden, unscaled = found[0]
    assert isinstance(unscaled, Unscaled)
    assert torch.equal(hidden, add_norm(y, residual, None, multiplier, None)[0])
    factor = norm.weight.double() + (case.kind == "offset")
    assert torch.equal(unscaled.weighted, (hidden.double() * factor).to(case.dtype))
    squares = unscaled.squares.double().sum(0)
    torch.testing.assert_close(squares, hidden.double().pow(2).sum(1), rtol=1e-5, atol=0)
    for a, b in zip(found[0][1] or (), found[1][1] or (), strict=True):
        assert not isinstance(a, torch.Tensor) or same_bits(a, b)


def unscaled(case: Case) -> tuple[Unscaled, torch.Tensor]:
    """Rows for weights [n, width] as another launch leaves them, and normalized in float64."""
    hidden = 30 * rows(case.rows, case.width, case.dtype)
    weight = rows(1, case.width, case.dtype)[0].float().mul(0.3).add(1).to(case.dtype)
    norm, wide = Norm(weight, EPS, case.kind), hidden.double()
    factor = weight.double() + (case.kind == "offset")
    squares = torch.stack([part.pow(2).sum(1) for part in wide.split(-(-case.width // 5), 1)])
    truth = wide * (wide.pow(2).mean(1, keepdim=True) + EPS).rsqrt() * factor
    return Unscaled(hidden, (wide * factor).to(case.dtype), squares.float(), norm), truth


def check(found: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor) -> None:
    """No further from the truth than what modules compute, but for single numbers that round the other way."""
    error, other = ((y.double() - truth).norm() for y in (found, plain))
    assert torch.isfinite(found).all()
    assert error <= 1.1 * other


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_projections_of_rows_without_their_factor(case: Case) -> None:
    """Up to four, some of fewer rows than a tile has."""
    x, truth = unscaled(case)
    pairs = [made(case, n, case.width, n) for n in (case.n, 32, 8, 24)]
    weights, biases = zip(*pairs, strict=True)
    with pretended(case.num_sms):
        found = projected(x, weights, biases)
    with pretended(case.num_sms, 1, backwards=True):
        assert all(map(same_bits, found, projected(x, weights, biases)))
    plain = multiply(rms_norm(x.hidden, x.norm), weights, biases, ORDERS[0], case.num_sms)
    exact = [truth @ w.dequantize(torch.float64).T + (0 if bias is None else bias.double()) for w, bias in pairs]
    check(*(torch.cat([*outs], -1) for outs in (found, plain, exact)))  # few numbers round the other way by chance


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gated_products(case: Case) -> None:
    """Of rows as they are with the bits of the launches one by one, where no tile is split; and of rows without their factor."""
    pairs = [made(case, case.n, case.width, seed) for seed in (1, 2)]
    weights, biases = zip(*pairs, strict=True)
    x, truth = unscaled(case)
    plain = rms_norm(x.hidden, x.norm)
    with pretended(case.num_sms) as plans:
        found = [gated_projection(rows, weights, biases, case.activation) for rows in (plain, x)]
    assert stored(*weights) >= EARLY
    gate, up = multiply(plain, weights, biases, ORDERS[0], case.num_sms)
    one_by_one = gated(gate, up, case.activation)
    gate, up = (
        truth @ w.dequantize(torch.float64).T + (0 if b is None else b.double()) for w, b in zip(weights, biases, strict=True)
    )
    for out in found:
        check(out, one_by_one, gated(gate, up, case.activation))
    assert len(plans) == 2
    with pretended(case.num_sms, 1, backwards=True):
        assert same_bits(found[1], gated_projection(x, weights, biases, case.activation))


def test_odd_rows_of_scales_do_not_alternate() -> None:
    """10 zero points a row: rows of gate and up would begin 2 bytes apart. Each projection has a tile of its own then."""
    case = Case("int4_g128", 1, 40, 1280)
    weights, (x, truth) = [made(case, 40, 1280, seed)[0] for seed in (1, 2)], unscaled(case)
    with pretended(3) as plans:
        found = gated_projection(x, weights, [None, None], "silu")
    assert [plan.spec.odd_zeros for plan in plans if isinstance(plan.spec, MmaSpec)] == [True, True]
    exact = gated(*(truth @ w.dequantize(torch.float64).T for w in weights), "silu")
    assert (found.double() - exact).norm() < 2**-6 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gated_bits_where_no_tile_is_split(dtype: torch.dtype) -> None:
    case = Case("int4_g128", 2, 64, 1024, num_sms=8, dtype=dtype)
    weights = [made(case, 64, 1024, seed)[0] for seed in (1, 2)]
    x = rows(2, 1024, dtype)
    with pretended(4) as plans:
        found = gated_projection(x, weights, [None, None], "silu")
    assert not plans[0].split_tiles
    gate, up = multiply(x, weights, [None, None], ORDERS[0], 4)
    close = gated(gate, up, "silu")
    assert (found != close).sum() <= 2  # exp of the GPU is not torch's
    torch.testing.assert_close(found, close, rtol=2**-7, atol=0)
