"""The kernels around a block's projections, interpreted, against float64 and against the bits of the modules."""

from __future__ import annotations

import pytest
import torch

import halfbyte.ops.block as ops
from halfbyte.errors import InvalidArgument
from halfbyte.kernels.block.all_reduce import Exchange
from halfbyte.kernels.block.gate import launch as launch_gated
from halfbyte.kernels.block.norm import launch_add_norm, launch_norm_rows
from halfbyte.reference.block import GATES, KINDS, Norm, gated, rms_norm

#: numpy warns of what a GPU computes silently, and as meant: exp of a large number.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DTYPES = (torch.bfloat16, torch.float16)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def norm_of(width: int, kind: str, dtype: torch.dtype, seed: int = 9) -> Norm:
    return Norm(drawn(width, dtype=dtype, seed=seed), 1e-5, kind)


def exactly(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """The norm in float64, without a rounding."""
    if norm is None:
        return x.double()
    weight = norm.weight.double() + (norm.kind == "offset")
    return x.double() / (x.double().pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * weight


def close(found: torch.Tensor, truth: torch.Tensor, roundings: int) -> None:
    """Within so many roundings to the 16 bits of `found`."""
    step = torch.finfo(found.dtype).eps / 2
    torch.testing.assert_close(found.double(), truth, rtol=1.01 * roundings * step, atol=1e-6)


def nan_like(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, torch.nan)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 96), (2, 300)])
@pytest.mark.parametrize(("has_after", "has_before"), [(False, True), (True, True), (True, False), (False, False)])
def test_sum_and_norm(rows: int, width: int, kind: str, dtype: torch.dtype, has_after: bool, has_before: bool) -> None:
    x, residual = drawn(rows, width, dtype=dtype, scale=3), drawn(rows, width, dtype=dtype, seed=1)
    after, before = (norm_of(width, kind, dtype, i) if has else None for i, has in enumerate((has_after, has_before)))
    hidden, out = nan_like(x), nan_like(x)
    launch_add_norm(x, residual, after, 0.22, before, hidden, out if has_before else None, False)
    branch = nan_like(x)
    if after is None:
        branch = x
    else:
        launch_norm_rows([x], [after], [branch], False)
        close(branch, exactly(x, after), 2 if kind == "rounded" else 1)
    assert torch.equal(hidden, residual + branch * 0.22)  # the bits of the modules, given the norm of x
    if before is None:
        assert bool(out.isnan().all())
    else:
        close(out, exactly(hidden, before), 2 if kind == "rounded" else 1)


def test_a_multiplier_of_one_adds_no_rounding() -> None:
    x, residual = (drawn(4, 64, dtype=torch.bfloat16, seed=i) for i in range(2))
    hidden = nan_like(x)
    launch_add_norm(x, residual, None, 1.0, None, hidden, None, False)
    assert torch.equal(hidden, x + residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "ranks", "before"), [(0, 2, 0), (1, 2, 2**31 - 2), (2, 3, 0), (2, 5, 0)])
def test_sums_over_ranks(rank: int, ranks: int, before: int, dtype: torch.dtype) -> None:
    """A rank among others whose rows are in its inbox already; three sums, of different numbers of rows, after some `before`."""
    width, capacity = 98, 4
    inboxes = [torch.zeros(2, ranks, capacity, width // 2, dtype=torch.int64) for _ in range(ranks)]
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes])
    exchange = Exchange(addresses, torch.full((capacity,), before, dtype=torch.int32), rank, capacity)
    counts, norm = [before] * capacity, norm_of(width, "rounded", dtype)
    for seed, rows in enumerate((3, 1, 4)):
        parts = [drawn(rows, width, dtype=dtype, seed=10 * seed + r) for r in range(ranks)]
        counts = [(count + (row < rows) + 2**31) % 2**32 - 2**31 for row, count in enumerate(counts)]  # int32 wraps around
        sent = [[(part[m].view(torch.int32).long() & 0xFFFFFFFF) | counts[m] << 32 for m in range(rows)] for part in parts]
        for other in set(range(ranks)) - {rank}:
            for m in range(rows):
                inboxes[rank][counts[m] % 2, other, m] = sent[other][m]
        residual = drawn(rows, width, dtype=dtype, seed=5)
        hidden, out = nan_like(residual), nan_like(residual)
        launch_add_norm(parts[rank], residual, None, 1.0, norm, hidden, out, False, exchange)
        total = torch.zeros(rows, width)
        for part in parts:
            total += part.float()
        assert torch.equal(hidden, residual + total.to(dtype))
        close(out, exactly(hidden, norm), 2)
        for inbox in inboxes:
            assert all(torch.equal(inbox[counts[m] % 2, rank, m], sent[rank][m]) for m in range(rows))
        assert exchange.counts.tolist() == counts


@pytest.mark.parametrize("kind", KINDS)
def test_norms_of_queries_and_keys_in_one_launch(kind: str) -> None:
    """Of two widths, and more rows than a program takes, that do not fill the last one."""
    xs = [drawn(37, 80, dtype=torch.bfloat16), drawn(5, 300, dtype=torch.bfloat16, seed=1)]
    norms, outs = [norm_of(x.shape[1], kind, x.dtype) for x in xs], [nan_like(x) for x in xs]
    launch_norm_rows(xs, norms, outs, False)
    for x, norm, out in zip(xs, norms, outs, strict=True):
        close(out, exactly(x, norm), 2 if kind == "rounded" else 1)
        modules = rms_norm(x, norm)
        assert bool(((out.float() - modules.float()).abs() <= 2**-7 * modules.float().abs()).all())  # one step of bf16 at most
        assert (out == modules).float().mean() > 0.99


def test_a_row_of_zeros_and_one_that_is_not_finite() -> None:
    """As the modules: zeros stay zeros, NaN stays in its row."""
    x = drawn(3, 64, dtype=torch.bfloat16)
    x[0], x[1, 5] = 0, torch.nan
    norm, out = norm_of(64, "rounded", x.dtype), nan_like(x)
    launch_norm_rows([x], [norm], [out], False)
    assert bool((out[0] == 0).all())
    assert bool(out[1].isnan().all())
    assert bool(out[2].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize(("rows", "width"), [(1, 7), (3, 256), (3, 1100)])
def test_gated_activations(rows: int, width: int, activation: str, dtype: torch.dtype) -> None:
    both = drawn(rows, 2 * width, dtype=dtype, scale=4)
    gate, up = both.chunk(2, -1)  # with the stride of both
    out = torch.full((rows, width), torch.nan, dtype=dtype)
    launch_gated(gate, up, activation, out, False)
    # Where an activation falls below the normal numbers of its type, it is rounded to a multiple of the least one.
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * up.double().abs().max() + 1e-7
    truth = gated(gate.double(), up.double(), activation)
    torch.testing.assert_close(out.double(), truth, rtol=2.1 * torch.finfo(dtype).eps / 2, atol=float(least))
    if activation != "gelu_tanh":  # torch's GELU loses digits to 1 + tanh(u) where the gate is negative
        assert (out == gated(gate, up, activation)).float().mean() > 0.98


@pytest.mark.parametrize("activation", GATES)
def test_activations_of_large_numbers(activation: str) -> None:
    gate = torch.tensor([[-3e4, -100.0, 0.0, 100.0, 3e4, torch.nan]], dtype=torch.bfloat16)
    out = nan_like(gate)
    launch_gated(gate, torch.ones_like(gate), activation, out, False)
    assert out[0, :5].tolist() == ([0, 0, 0.5, 1, 1] if activation == "sigmoid" else [0, 0, 0, 100, float(gate[0, 4])])
    assert bool(out[0, 5].isnan())


def test_ops_launch_the_kernels_or_say_why_not() -> None:
    """By name; leading axes and strides of any kind."""
    x, residual = (drawn(3, 2, 64, dtype=torch.bfloat16, seed=i).transpose(0, 1) for i in range(2))
    norm = norm_of(64, "rounded", x.dtype)
    hidden, out = ops.add_norm(x, residual, norm, impl="triton")
    assert torch.equal(hidden, x + residual)
    assert out is not None
    assert (out == rms_norm(x + residual, norm)).float().mean() > 0.99
    assert (ops.norm_rows([x], [norm], impl="triton")[0] == rms_norm(x, norm)).float().mean() > 0.99
    gate, up = drawn(2, 3, 96, dtype=torch.bfloat16).chunk(2, -1)
    assert (ops.gated(gate, up, "silu", impl="triton") == gated(gate, up, "silu")).float().mean() > 0.98
    assert ops.gated(gate[:0], up[:0], "silu", impl="triton").shape == (0, 3, 48)
    with pytest.raises(InvalidArgument, match=r"impl='triton': norm_rows has a kernel for tensors of float16 or of bfloat16"):
        ops.norm_rows([x], [norm._replace(weight=norm.weight.float())], impl="triton")
    wide = torch.zeros(1, ops.WIDEST + 1, dtype=torch.bfloat16)
    with pytest.raises(InvalidArgument, match="rows of 16385 are wider than the 16384"):
        ops.add_norm(wide, wide, None, impl="triton")
    with pytest.raises(InvalidArgument, match="add_norm has no gradient"):
        ops.add_norm(x.clone().requires_grad_(), residual, None, impl="triton")
