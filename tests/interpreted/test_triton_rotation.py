"""The kernel that rotates heads on their own, interpreted: the bits of the specification, from rows that lie anywhere."""

from __future__ import annotations

import pytest
import torch

from halfbyte.kernels.append.rotation import launch, launch_product
from halfbyte.ops.transform_heads import transform_heads
from halfbyte.reference.hadamard import rotate
from halfbyte.reference.transform import TransformCall, transformed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 3, 5, 80), (3, 2, 7, 96), (2, 4, 9, 128), (1, 2, 11, 256)])
def test_heads_are_rotated_as_specified(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rows between others, all of which are NaN; nothing beyond the result is written."""
    b, heads, tokens, dim = shape
    whole = torch.full((b, tokens, heads, 2 * dim + 3), torch.nan, dtype=dtype)
    x = whole[..., 2 : 2 + dim].transpose(1, 2)
    x.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(dim)) * torch.logspace(-2, 2, dim))
    memory = torch.full((x.numel() + 64,), torch.nan, dtype=dtype)
    out = memory[: x.numel()].view(shape)
    launch(x, out)
    assert torch.equal(out, rotate(x.float()).to(dtype))
    assert bool(memory[x.numel() :].isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 6, 5, 80), (3, 2, 7, 96), (2, 8, 19, 128), (1, 2, 11, 256)])
@pytest.mark.parametrize("wide", [True, False])
def test_heads_times_a_matrix(shape: tuple[int, ...], dtype: torch.dtype, wide: bool) -> None:
    """Heads of keys and of queries, of several a KV head and of one, between rows of NaN; within the rounding of fp32 sums."""
    b, heads, tokens, dim = shape
    generator = torch.Generator().manual_seed(dim)
    whole = torch.full((b, tokens, heads, 2 * dim + 3), torch.nan, dtype=dtype)
    x = whole[..., 2 : 2 + dim].transpose(1, 2)
    x.copy_(torch.randn(shape, generator=generator))
    kv_heads = 2 - heads % 2
    matrix, shift = (torch.randn(kv_heads, *rest, generator=generator) for rest in ((dim, dim), (dim,)))
    matrix = matrix if wide else matrix.to(dtype)
    for call in (TransformCall(x, matrix, shift), TransformCall(x, matrix)):
        memory = torch.full((x.numel() + 64,), torch.nan, dtype=dtype)
        out = memory[: x.numel()].view(shape)
        launch_product(call, out)
        exact = transformed(x.double(), matrix, call.shift)
        rounding = torch.finfo(dtype).eps * exact.abs() + dim * 2.0**-20 * exact.abs().amax()
        assert bool(((out.double() - exact).abs() <= rounding).all())
        assert bool(memory[x.numel() :].isnan().all())


def test_the_op_takes_the_kernel() -> None:
    strided = torch.randn(2, 3, 4, 64).half()[..., ::2]
    assert torch.equal(transform_heads(strided, impl="triton"), transform_heads(strided, impl="reference"))
    wide = torch.randn(2, 3, 4, 64, dtype=torch.float64)
    assert torch.equal(transform_heads(wide, impl="triton"), rotate(wide))
    assert transform_heads(torch.randn(0, 3, 4, 64), impl="triton").shape == (0, 3, 4, 64)
