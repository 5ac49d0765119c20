"""Error feedback against the least squares that it solves, column by column, and what it gains in every format."""

from __future__ import annotations

import math

import pytest
import torch

from halfbyte.errors import InvalidArgument
from halfbyte.formats import KV_FORMATS, WEIGHT_FORMATS
from halfbyte.reference.codes import encode_unit, nearest_values
from halfbyte.reference.dequantize import decode_unit
from halfbyte.reference.error_feedback import DAMPING, error_feedback
from halfbyte.reference.quantize import quantize

FOUR_BITS = [name for name, fmt in WEIGHT_FORMATS.items() if fmt.code.bits == 4]


def inputs(tokens: int, size: int, seed: int = 0) -> torch.Tensor:
    """Inputs [tokens, size] of correlated channels, whose sizes differ; the channels are the same for every seed."""
    mix = torch.randn(size, size, generator=torch.Generator().manual_seed(7)) * torch.logspace(-1, 1, size)
    return torch.randn(tokens, size, generator=torch.Generator().manual_seed(seed)) @ mix


def weight(rows: int, size: int) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(3))


def output_error(w: torch.Tensor, other: torch.Tensor, x: torch.Tensor) -> float:
    return float((x @ (w - other).T).norm() / (x @ w.T).norm())


@pytest.mark.parametrize("size", [5, 24, 200])
def test_each_column_is_where_least_squares_puts_it(size: int) -> None:
    """Brute force in float64: with the rounded columns fixed, all others are solved for anew before each step."""
    w, x = weight(3, size).double(), inputs(400, size).double()
    hessian = x.T @ x
    moved = error_feedback(w, hessian, lambda column, number: (column / 0.5).round() * 0.5)
    damped = hessian + DAMPING * hessian.diagonal().median() * torch.eye(size, dtype=torch.float64)
    order = hessian.diagonal().argsort(descending=True).tolist()
    values = w.clone()
    for step, column in enumerate(order):
        rounded, free = order[:step], order[step:]
        errors = (values - w)[:, rounded]
        best = w[:, free] - errors @ damped[rounded][:, free] @ torch.linalg.inv(damped[free][:, free])
        torch.testing.assert_close(moved[:, column], best[:, 0], rtol=1e-7, atol=1e-7)
        values[:, column] = (best[:, 0] / 0.5).round() * 0.5


def test_scales_follow_the_numbers_of_columns() -> None:
    """Columns go by their inputs, and are rounded as what they are."""
    steps = torch.linspace(0.1, 1, 40)
    rounded = {}

    def nearest(column: torch.Tensor, number: int) -> torch.Tensor:
        rounded[number] = (column / steps[number]).round() * steps[number]
        return rounded[number]

    x = inputs(300, 40)
    moved = error_feedback(weight(2, 40), x.T @ x, nearest)
    assert list(rounded) == (x.T @ x).diagonal().argsort(descending=True).tolist()
    assert torch.equal((moved / steps).round() * steps, torch.stack([rounded[i] for i in range(40)], 1))


@pytest.mark.parametrize("name", FOUR_BITS)
def test_columns_are_rounded_to_what_their_codes_mean(name: str) -> None:
    """Between the values of a code and at them, and beyond: as stored codes are."""
    code = WEIGHT_FORMATS[name].code
    values = code.codebook().unique()
    unit = torch.cat([values, (values[1:] + values[:-1]) / 2, 1.3 * values, torch.linspace(-9, 17, 1001)])
    unit = unit[: len(unit) // 2 * 2]  # two codes a byte
    assert torch.equal(nearest_values(unit, None, code), decode_unit(encode_unit(unit, code), code))


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_inputs_of_no_correlation_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight(12, 256)
    monkeypatch.setattr("halfbyte.reference.quantize.WIDEST", math.inf)
    searched, same = quantize(w, name, clip="search").parts(), quantize(w, name, hessian=4 * torch.eye(256)).parts()
    assert all(torch.equal(searched[part], same[part]) for part in searched)


@pytest.mark.parametrize("name", FOUR_BITS)
def test_other_inputs_of_the_same_kind_lose_less(name: str) -> None:
    """Than by the nearest codes, with the same scales and with the clips of least error."""
    w, x, other = weight(48, 256), inputs(4000, 256), inputs(1000, 256, seed=1)
    fed = output_error(w, quantize(w, name, hessian=x.T @ x).dequantize(), other)
    assert fed < 0.8 * output_error(w, quantize(w, name).dequantize(), other)
    assert fed < 0.9 * output_error(w, quantize(w, name, clip="search").dequantize(), other)


@pytest.mark.parametrize("name", ["int4_g32", "nvfp4"])
def test_a_clip_costs_least_where_inputs_are_large(name: str) -> None:
    """A column without inputs may be clipped as much as others gain by it."""
    w = weight(48, 256)
    w[:, ::16] *= 6
    silent, spoken = inputs(1000, 256).T @ inputs(1000, 256), torch.ones(256, dtype=torch.bool)
    spoken[::16] = False
    silent[~spoken] = silent[:, ~spoken] = 0
    errors = [
        (quantize(w, name, **option).dequantize() - w)[:, spoken].norm()
        for option in ({"clip": "search"}, {"hessian": silent.diagonal().diag()})
    ]
    assert errors[1] < 0.9 * errors[0]


def test_a_token_of_huge_activations_does_not_take_it_all() -> None:
    """The first token of a text: others gain nearly as much as without it."""
    w, x, other = weight(48, 256), inputs(4000, 256), inputs(1000, 256, seed=1)
    x[0] = 0
    x[0, [17, 99]] = 3e5
    fed, without = (quantize(w, "int4_g32", hessian=sums) for sums in (x.T @ x, x[1:].T @ x[1:]))
    errors = [output_error(w, q.dequantize(), other) for q in (fed, without, quantize(w, "int4_g32"))]
    assert errors[0] < 1.25 * errors[1]
    assert errors[0] < 0.75 * errors[2]


def test_inputs_that_are_always_zero_and_empty_weights() -> None:
    x = inputs(50, 64)
    x[:, :40] = 0
    assert quantize(weight(4, 64), "nvfp4", hessian=x.T @ x).dequantize().isfinite().all()
    assert quantize(weight(4, 64), "nf4", hessian=torch.zeros(64, 64)).dequantize().isfinite().all()
    assert quantize(torch.zeros(0, 64), "nf4", hessian=torch.eye(64)).codes.shape == (0, 32)


def test_refusals() -> None:
    w, x = weight(4, 64), inputs(10, 64)
    hessian = x.T @ x
    with pytest.raises(InvalidArgument, match=r"hessian has shape \[32, 32\]; expected \[64, 64\]"):
        quantize(w, "nf4", hessian=hessian[:32, :32])
    with pytest.raises(InvalidArgument, match="hessian is"):
        quantize(w, "nf4", hessian=hessian.long())
    with pytest.raises(InvalidArgument, match="hessian holds NaN or infinity"):
        quantize(w, "nf4", hessian=hessian.log())
    with pytest.raises(InvalidArgument, match="not positive semidefinite"):
        quantize(w, "nf4", hessian=-hessian)
    with pytest.raises(InvalidArgument, match="x has 3 axes"):
        quantize(w[None], "nf4", hessian=hessian)
    with pytest.raises(InvalidArgument, match="int4_g32"):
        quantize(w, KV_FORMATS["int4_g32"], hessian=hessian)
