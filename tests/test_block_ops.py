"""`add_norm`, `norm_rows`, `gated`: results against float64, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import halfbyte as hb
from halfbyte.cpu import block as cpu
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.ops.block import add_norm, gated, norm_rows
from halfbyte.ops.block_linear import add_projection, gated_projection, halves, projected
from halfbyte.ops.linear import linear
from halfbyte.reference import block as reference
from halfbyte.reference.block import GATES, KINDS, Norm
from halfbyte.tensors import QuantTensor


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def norm(width: int = 8, kind: str = "exact") -> Norm:
    return Norm(r(width) + 0.5, 1e-5, kind)


def exactly(x: torch.Tensor, by: Norm) -> torch.Tensor:
    return x.double() / (x.double().pow(2).mean(-1, keepdim=True) + by.eps).sqrt() * (by.weight.double() + (by.kind == "offset"))


@pytest.mark.parametrize("kind", KINDS)
def test_sums_and_norms(kind: str) -> None:
    x, residual, after, before = r(2, 3, 8), r(2, 3, 8) + 1, norm(8, kind), norm(8, kind)
    hidden, out = add_norm(x, residual, before, after=after, multiplier=0.5)
    truth = residual.double() + 0.5 * exactly(x, after)
    torch.testing.assert_close(hidden.double(), truth, rtol=1e-5, atol=1e-6)
    assert out is not None
    torch.testing.assert_close(out.double(), exactly(truth, before), rtol=1e-5, atol=1e-6)
    hidden, out = add_norm(x, residual, None)
    assert torch.equal(hidden, x + residual)
    assert out is None
    heads, rows = norm_rows([r(2, 4, 8), r(2, 32)], [norm(8, kind), norm(32, kind)])
    torch.testing.assert_close(heads.double(), exactly(r(2, 4, 8), norm(8, kind)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rows.double(), exactly(r(2, 32), norm(32, kind)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", GATES)
def test_gates(activation: str) -> None:
    gate, up = r(3, 14).chunk(2, -1)
    x = gate.double()
    inner = x if activation != "gelu_tanh" else 2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    truth = (1 if activation == "sigmoid" else x) * torch.sigmoid(inner) * up
    torch.testing.assert_close(gated(gate, up, activation).double(), truth, rtol=1e-5, atol=1e-6)


def weight(n: int, name: str = "int4_g32", width: int = 64) -> QuantTensor:
    return hb.quantize(r(n, width), name)


@pytest.mark.parametrize("name", ["int4_g32", "nvfp4", "int8_col"])
def test_projections_and_what_surrounds_them_one_by_one(name: str) -> None:
    x, residual, by, both, bias = r(2, 3, 64), r(2, 3, 16), norm(16), weight(32, name), r(32)
    (gate, up), (gate_bias, up_bias) = halves(both, bias)
    assert torch.equal(torch.cat([gate.dequantize(), up.dequantize()]), both.dequantize())
    whole = linear(x, both, bias)
    torch.testing.assert_close(torch.cat(projected(x, [gate, up], [gate_bias, up_bias]), -1), whole)
    torch.testing.assert_close(gated_projection(x, [gate, up], [gate_bias, up_bias], "silu"), gated(*whole.chunk(2, -1), "silu"))
    hidden, out = add_projection(x, up, up_bias, residual, by, multiplier=0.5)
    expected = add_norm(whole[..., 16:], residual, by, multiplier=0.5)
    torch.testing.assert_close((hidden, out), expected)
    assert add_projection(x, up, None, residual, None)[1] is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1,), (2, 3), (16,)])
@pytest.mark.parametrize("name", ["int4_g32", "nvfp4", "int8_col"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_sums_have_the_bits_of_single_ops(name: str, shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    """Norms but for the order of their sum."""
    x, residual, w = r(*shape, 64).to(dtype), r(*shape, 48).to(dtype) + 1, weight(48, name)
    before = Norm(norm(48).weight.to(dtype), 1e-5, kind)
    for bias, multiplier in ((None, 1.0), (r(48).to(dtype), 0.5)):
        hidden, out = add_projection(x, w, bias, residual, before, multiplier=multiplier)
        expected, normalized = reference.add_norm(linear(x, w, bias), residual, None, multiplier, before)
        assert torch.equal(hidden, expected)
        assert normalized is not None
        torch.testing.assert_close(out, normalized, rtol=2**-7 if dtype is torch.bfloat16 else 1e-6, atol=0)
        assert add_projection(x, w, bias, residual, None)[1] is None
    both = [weight(48, name), weight(48, "int4_sym_g32")]
    gate, up = (linear(x, each) for each in both)
    assert torch.equal(gated_projection(x, both, (None, None), "silu"), gated(gate, up, "silu"))


def test_compiled_sums_run() -> None:
    """The case above is not compared to itself."""
    pytest.importorskip("numba", reason="loops are compiled by numba: pip install halfbyte[cpu]")
    x, residual = r(2, 64).bfloat16(), r(2, 48).bfloat16()
    assert cpu.add_projection(x, weight(48), None, residual, None, 1.0) is not None
    assert cpu.add_projection(x.float(), weight(48), None, residual.float(), None, 1.0) is not None
    assert cpu.add_projection(x, weight(48), None, residual.float(), None, 1.0) is None
    assert cpu.add_projection(r(9, 64), weight(48), None, r(9, 48), None, 1.0) is None
    assert cpu.projections(x, [weight(48, width=32)], [None]) is None


def test_a_norm_with_a_gradient_is_no_compiled_sum() -> None:
    """Its gradient would be lost without a word."""
    x, residual, before = r(2, 64).bfloat16(), r(2, 48).bfloat16(), norm(48)
    before = Norm(before.weight.bfloat16().requires_grad_(), before.eps, before.kind)
    out = add_projection(x, weight(48), None, residual, before)[1]
    assert isinstance(out, torch.Tensor)
    assert out.requires_grad


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "residual of another shape": (lambda: add_norm(r(2, 8), r(3, 8), None), InvalidArgument, "residual has shape"),
    "residual of another type": (lambda: add_norm(r(2, 8), r(2, 8).half(), None), InvalidArgument, "residual is torch.float16"),
    "residual elsewhere": (lambda: add_norm(r(2, 8), r(2, 8).to("meta"), None), InvalidArgument, "residual is on meta"),
    "a norm of another width": (lambda: add_norm(r(2, 8), r(2, 8), norm(4)), InvalidArgument, r"before.weight has shape \[4\]"),
    "an unknown norm": (lambda: add_norm(r(2, 8), r(2, 8), None, after=norm(8, "mean")), InvalidArgument, "after.kind='mean'"),
    "x of integers": (lambda: add_norm(r(2, 8).int(), r(2, 8).int(), None), InvalidArgument, "x is torch.int32"),
    "a norm too few": (lambda: norm_rows([r(2, 8), r(2, 8)], [norm()]), InvalidArgument, "2 tensors and 1 norms"),
    "three tensors": (lambda: norm_rows([r(2, 8)] * 3, [norm()] * 3), InvalidArgument, "one or two of each"),
    "rows of another width": (lambda: norm_rows([r(2, 4)], [norm()]), InvalidArgument, r"norms\[0\].weight"),
    "up of another shape": (lambda: gated(r(2, 8), r(2, 4), "silu"), InvalidArgument, "up has shape"),
    "up of another type": (lambda: gated(r(2, 8), r(2, 8).half(), "silu"), InvalidArgument, "up is torch.float16"),
    "an unknown activation": (lambda: gated(r(2, 8), r(2, 8), "relu"), InvalidArgument, "activation='relu'; choose one of: silu"),
    "a residual of other rows": (
        lambda: add_projection(r(2, 64), weight(8), None, r(3, 8), None),
        InvalidArgument,
        "residual has shape",
    ),
    "a residual in 16 bits": (
        lambda: add_projection(r(2, 64), weight(8), None, r(2, 8).half(), None),
        InvalidArgument,
        "residual is torch.float16",
    ),
    "a norm of x": (
        lambda: add_projection(r(2, 64), weight(8), None, r(2, 8), norm(64)),
        InvalidArgument,
        r"before.weight has shape \[64\]",
    ),
    "gate alone": (lambda: gated_projection(r(2, 64), [weight(8)], [None], "silu"), InvalidArgument, "1 weights and 1 biases"),
    "up of another size": (
        lambda: gated_projection(r(2, 64), [weight(8), weight(16)], [None] * 2, "silu"),
        InvalidArgument,
        r"up has shape \[16",
    ),
    "x of another size": (
        lambda: gated_projection(r(2, 32), [weight(8)] * 2, [None] * 2, "silu"),
        InvalidArgument,
        r"x \(for gate weight\)",
    ),
    "an activation that no kernel has": (
        lambda: gated_projection(r(2, 64), [weight(8)] * 2, [None] * 2, "relu"),
        InvalidArgument,
        "activation='relu'",
    ),
    "an unknown level": (lambda: gated(r(2, 8), r(2, 8), "silu", impl="cuda"), InvalidArgument, "impl='cuda'"),
    "a kernel on a CPU": (lambda: gated(r(2, 8), r(2, 8), "silu", impl="triton"), Unsupported, "runs on an NVIDIA GPU"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    call, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        call()
