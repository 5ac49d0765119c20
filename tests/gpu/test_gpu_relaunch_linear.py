"""Products that are launched like an earlier one give what they would have given without it, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_place import PLACE
from test_gpu_graphs import needs_gpu
from test_gpu_linear import MARKED, Call, Case, build, drawn, normal
from test_gpu_relaunch import again, check_each, check_equal, check_like_the_first, moved

import halfbyte as hb
from halfbyte.nn import FusedProjections, QuantLinear

__all__ = ["again"]  # a fixture

CASES = [*MARKED, *(replace(case, act_order=False) for case in drawn(PLACE.size(40, 6), seed=5))]
TUNED = Case(("int4_g64",), (PLACE.size(2000, 40),), 4, PLACE.size(4096, 256), bias=True)


@pytest.mark.compile_first
@pytest.mark.parametrize("number", range(len(CASES)))
def test_another_layer_is_launched_like_the_first(number: int, impl: str) -> None:
    """Other weights and another x, the same shapes."""
    first, second = build(CASES[number]), build(replace(CASES[number], seed=77))
    check_like_the_first(first, second, impl)


@needs_gpu
@pytest.mark.parametrize("rows", [1, 16, 40])
def test_the_second_call_is_launched_again(rows: int, again: list[Any]) -> None:
    call = build(replace(TUNED, rows=rows))
    expected = call.run("auto")
    assert not again
    got = call.run("auto")
    assert got[0] is again[0][0]
    check_equal(got, expected)
    call.check(got)


@needs_gpu
def test_a_layer_and_fused_projections_are_launched_again(again: list[Any]) -> None:
    """As models call them, parameters and all, and with another x of the same shape."""
    weights = tuple(hb.quantize(normal(n, 1024, seed=n), "int4_g64") for n in (512, 128, 128))
    layers = [QuantLinear(w) for w in weights]
    fused = FusedProjections(*layers)
    with torch.no_grad():
        for seed in range(3):
            x = normal(2, 3, 1024, seed=seed).bfloat16()
            q, slots = fused(x), fused.slots
            k, v = slots[0](x), slots[1](x)
            for got, w in zip((q, k, v), weights, strict=True):
                Call(x.flatten(0, 1), [w], [None]).check((got.flatten(0, 1),))
    assert len(again) == 2


@pytest.mark.parametrize("by", [1, 2, 4, 8])
def test_addresses_that_are_no_multiple_of_16(by: int, impl: str) -> None:
    """The kernel of aligned addresses must not be given others."""
    call = build(TUNED)
    (w,), (bias,) = call.weights, call.biases
    assert bias is not None
    calls = [
        *(call, replace(call, x=moved(call.x, by)), replace(call, biases=[moved(bias, by)])),
        replace(call, weights=[replace(w, codes=moved(w.codes, 4 * by))]),
        replace(call, weights=[replace(w, scales=moved(w.scales, by))]),  # type: ignore[arg-type]
    ]
    for each, wanted in zip(calls, check_each(calls, impl), strict=True):
        each.check(wanted)


def test_a_workspace_that_grew_in_between(impl: str) -> None:
    """A larger call has the memory of the stream replaced: the smaller one must not use what was given back."""
    small = build(replace(TUNED, rows=1))
    expected = small.run(impl)
    for rows in (16, 64):
        build(replace(TUNED, rows=rows, features=(PLACE.size(6000, 40),))).run(impl)
        others = [torch.full((1 << 18,), torch.nan, device=PLACE.device) for _ in range(PLACE.size(64, 1))]
        check_equal(small.run(impl), expected)
        assert all(bool(t.isnan().all()) for t in others)
