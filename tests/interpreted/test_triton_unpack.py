"""The kernel that unpacks pages, interpreted: numbers of the reference rounded once, in the rows it is given and nowhere else."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from halfbyte import engine
from halfbyte.engine import PAGE_FORMATS, unpack_pages
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.ops.small_calls import unpack_error
from halfbyte.reference import attention as reference
from halfbyte.reference.hadamard import rotate
from varlen_cases import MIXED, Batch, batch_of

op = importlib.import_module("halfbyte.ops.unpack_pages")  # the package has the function of this name
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = (torch.bfloat16, torch.float16)
#: Of the tokens of MIXED how many are kept: all, some, one, none.
KEPT = (19, 50, 1, 0, 150, 1)


def unpacked(batch: Batch, kept: tuple[int, ...], dtype: torch.dtype, impl: str, new: bool) -> list[torch.Tensor]:
    """Rows of keys and values; those around must stay."""
    bounds = torch.tensor([0, *kept]).cumsum(0).int()
    dims, count = (batch.view.keys.dim, batch.view.values.dim), int(bounds[-1])
    memory = [torch.full((count + 5, batch.view.keys.heads + 1, dim + 2), 7.0, dtype=dtype) for dim in dims]
    rows = [x[:-2, :-1, :dim] for x, dim in zip(memory, dims, strict=True)]
    unpack_pages(batch.view, bounds, *rows, new=(batch.k, batch.v, batch.bounds) if new else None, impl=impl)
    for x, dim in zip(memory, dims, strict=True):
        assert bool((x[count:] == 7).all() and (x[:, -1] == 7).all() and (x[..., dim:] == 7).all())
    return [x[:count] for x in rows]


def assert_rounded_once(batch: Batch, kept: tuple[int, ...], dtype: torch.dtype, new: bool = False) -> None:
    """Within half a unit in the last place of 16 bits, and what fp32 adds; NaN nowhere."""
    found = unpacked(batch, kept, dtype, "triton", new)
    view, at = batch.view, 0
    exact = [reference.read(x, view.lengths, view.page_table) for x in (view.keys, view.values)]
    exact[0] = rotate(exact[0]) if view.rotate_keys else exact[0]
    half = torch.finfo(dtype).eps / 2
    for b, count in enumerate(kept):
        length, (first, last) = int(view.lengths[b]), batch.bounds[b : b + 2].tolist()
        for side, (rows, x, own) in enumerate(zip(found, exact, (batch.k, batch.v), strict=True)):
            expected = x[b, :, length - count : length].transpose(0, 1).clone()
            if new:
                some = min(count, last - first)
                expected[count - some :] = own[last - some : last].double()
            size = expected.abs().amax() if expected.numel() else 0  # codes and offsets cancel, and a rotation adds up
            error = (rows[at : at + count].double() - expected).abs()
            assert bool((error <= half * expected.abs() + 1e-6 * size + torch.finfo(dtype).smallest_normal).all()), (b, side)
        at += count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("keys", "values"), [(name, list(PAGE_FORMATS)[3 - i]) for i, name in enumerate(PAGE_FORMATS)])
def test_every_format(keys: str, values: str, dtype: torch.dtype) -> None:
    if {"fp16", "bf16"} & {keys, values}:
        dtype = torch.float16 if "fp16" in (keys, values) else torch.bfloat16
    assert_rounded_once(batch_of(MIXED, keys, values, dtype=dtype, value_dim=128), KEPT, dtype)


@pytest.mark.parametrize("dim", [64, 96, 256])
@pytest.mark.parametrize("rotate_keys", [False, True])
def test_heads(dim: int, rotate_keys: bool) -> None:
    """Of sizes that are no powers of two; rotated keys come out as they went in."""
    batch = batch_of(MIXED[:3], "int4_g32", "int4", dim=dim, heads=(3, 3), dtype=torch.bfloat16, rotate_keys=rotate_keys)
    assert_rounded_once(batch, KEPT[:3], torch.bfloat16)


@pytest.mark.parametrize("rotate_keys", [False, True])
def test_new_tokens_are_taken_as_they_come(rotate_keys: bool) -> None:
    batch = batch_of(MIXED, "int4", "int2", dtype=torch.bfloat16, rotate_keys=rotate_keys, padding=3)
    assert_rounded_once(batch, KEPT, torch.bfloat16, new=True)
    assert_rounded_once(batch, (5, 33, 0, 0, 3, 1), torch.bfloat16, new=True)


def test_rows_of_latents() -> None:
    """Rotary keys and latents (MLA), of one KV head, beside each other in rows of fp32."""
    batch = batch_of(MIXED[:3], "int8", "int4_g32", dim=64, value_dim=512, heads=(4, 1), dtype=torch.float32)
    assert_rounded_once(batch, KEPT[:3], torch.float32)


@pytest.mark.parametrize("new", [False, True])
def test_the_reference_writes_the_same(new: bool) -> None:
    batch = batch_of(MIXED, "int8", "int4_g32", dtype=torch.float16, page=32)
    pairs = zip(*(unpacked(batch, KEPT, torch.float16, impl, new) for impl in ("triton", "reference")), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=1e-6)


def test_a_scale_times_the_largest_code_may_exceed_fp16() -> None:
    """It saturates; NaN stays NaN."""
    batch = batch_of([(4, 4)], "int8", "int8", dtype=torch.float32)
    for side in (batch.view.keys, batch.view.values):
        assert side.scales is not None
        side.scales.fill_(65504.0)
        side.scales[:, 1] = torch.nan
    for x in unpacked(batch, (4,), torch.float16, "triton", False):
        assert float(x[:, 0].abs().max()) == 65504.0
        assert bool(x[:, 1].isnan().all())


def test_no_contents_of_index_tensors_lead_outside() -> None:
    """Bounds and lengths that no engine makes: rows around stay, and what does not exist is 0 or some page's."""
    batch = batch_of(MIXED, "int4", "int8", dtype=torch.bfloat16)
    for bounds in ([0, 5, 3, 99, -7, 10, 2], [9, 9, 9, 9, 9, 9, 10**6], [-(2**31)] * 7, [2**31 - 1] * 7):
        for lengths in (batch.view.lengths, torch.tensor([-5, 10**9, 2**31 - 1, -(2**31), 3, 0], dtype=torch.int32)):
            view = batch.view._replace(lengths=lengths)
            memory = [torch.full((3, 40, 2, 64), 7.0, dtype=torch.bfloat16) for _ in range(2)]
            index = torch.tensor(bounds, dtype=torch.int32)
            unpack_pages(view, index, memory[0][1], memory[1][1], new=(batch.k, batch.v, index), impl="triton")
            assert all(bool((x[::2] == 7).all()) for x in memory)


def test_what_is_refused() -> None:
    batch = batch_of(MIXED, "int8", "int8", dtype=torch.bfloat16)
    rows, index = torch.empty(9, 2, 64, dtype=torch.bfloat16), torch.zeros(7, dtype=torch.int32)
    with pytest.raises(InvalidArgument, match=r"keys has shape \[9, 1, 64\]; expected \[9, 2, 64\]"):
        unpack_pages(batch.view, index, rows[:, :1], rows)
    with pytest.raises(InvalidArgument, match=r"keys is torch\.float64 with strides"):
        unpack_pages(batch.view, index, rows.double(), rows.double())
    with pytest.raises(InvalidArgument, match=r"cu_seqlens_k has shape \[3\]"):
        unpack_pages(batch.view, index[:3], rows, rows)
    with pytest.raises(InvalidArgument, match=r"cu_seqlens_q is torch\.int64; expected int32"):
        unpack_pages(batch.view, index, rows, rows, new=(batch.k, batch.v, index.long()))
    with pytest.raises(Unsupported, match="read them by decode_attention"):
        unpack_pages(batch.view._replace(page_table=None), index, rows, rows)
    assert engine.unpack_pages is unpack_pages


@pytest.mark.parametrize("new", [False, True])
def test_the_kernel_passes_the_small_case_that_it_checks_itself_on(new: bool) -> None:
    batch, rows = batch_of(MIXED), torch.empty(0, 2, 64, dtype=torch.bfloat16)
    call = op.UnpackCall(rows, rows, batch.bounds, batch.view, (batch.k, batch.v, batch.bounds) if new else None)

    def wrong(call: Any) -> None:
        op._launch(call)
        call.values.mul_(1.1)

    assert unpack_error(call, op._launch, op._reference) <= 0.5
    assert unpack_error(call, wrong, op._reference) > 1
