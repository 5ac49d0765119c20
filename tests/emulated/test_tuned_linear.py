"""The tuned linear kernels, emulated: every kind of code and number of rows, against float64, with the same bits in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from emulation import EARLY, ORDERS, multiply
from gpu_cases import same_bits

import halfbyte as hb
from accuracy import check_product
from halfbyte import formats
from halfbyte.device import GPU
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.ops import launch_cache
from halfbyte.plans import toolchain
from halfbyte.plans.gemm import tuned_gemm
from halfbyte.plans.gemm_mma import mma_plan
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.plans.gemm_spec import MmaSpec
from halfbyte.plans.gemm_wgmma import wgmma_plan


@dataclass(frozen=True)
class Product:
    """x [rows, width] times weights of these features. num_sms: few, so that programs share tiles; or more than tiles.

    capability: of the GPU that makes the plan; before 9.0 no launch starts ahead of the one before it. kernel: whose plan it is.
    """

    weight: str
    rows: int
    features: tuple[int, ...]
    width: int
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    num_sms: int = 3
    capability: tuple[int, int] = (9, 0)
    kernel: Callable[[GemmProblem, GPU, bool], GemmPlan | str] = tuned_gemm


CASES = (
    Product("int4_g128", 1, (96,), 2560),
    Product("int4_sym_g128", 16, (200,), 1280, bias=True),
    Product("int4_g32", 2, (64, 32, 32), 1152, torch.float16),
    Product("int4_g64", 4, (40,), 2304, num_sms=1),
    Product("int4_sym_col", 5, (64,), 1568),
    Product("int8_g128", 8, (33,), 768),
    Product("int8_col", 3, (64,), 1040, torch.float16, bias=True),
    Product("nf4", 1, (70,), 1088, num_sms=8),
    Product("fp4_bnb", 9, (64,), 832, torch.float16),
    Product("mxfp4", 2, (64,), 2176, num_sms=8),
    Product("nvfp4", 16, (72, 8, 8), 1088),
    Product("nvfp4", 1, (64,), 2112, torch.float16),
    Product("mxfp4", 1, (66,), 1472),  # scales 2 bytes off a multiple of 4
    Product("int4_g32", 8, (40, 34), 1472),
    Product("int4_g32", 16, (128,), 8192, num_sms=2),  # one tile for each SM: eight K slices, whose warps do not divide it
    Product("int4_g128", 12, (128,), 8448, num_sms=2),
    Product("int4_g32", 11, (64, 40), 1152, torch.float16, num_sms=4),
    Product("int4_g32", 9, (200,), 1280),
    Product("nf4", 8, (64,), 1088, capability=(8, 6)),  # smaller tiles and chunks, as an SM has 100 KB of shared memory
    Product("fp4_bnb", 16, (130,), 832, torch.float16, capability=(8, 6)),
    Product("int4_g64", 8, (130,), 1664, num_sms=1, capability=(8, 6)),
    Product("int4_g128", 24, (128,), 1024),  # warp groups from here on
    Product("int4_sym_g32", 33, (200,), 1152, bias=True, kernel=wgmma_plan),
    Product("nf4", 17, (128,), 1088, num_sms=8),
    Product("mxfp4", 64, (130,), 640, torch.float16, kernel=wgmma_plan),
    Product("nvfp4", 40, (128, 64, 64), 576, kernel=wgmma_plan),
    Product("int8_g128", 32, (128,), 1024),
    Product("int4_g128", 24, (130,), 1152),  # an odd number of scales
    Product("int4_g128", 70, (250,), 640, num_sms=2, kernel=wgmma_plan),  # tiles of 256 rows
    Product("int4_g128", 70, (250,), 640, kernel=wgmma_plan),  # programs that go from block to block and from tile to tile
    Product("nf4", 70, (130, 64), 576, num_sms=2, kernel=wgmma_plan),  # and to the next weight
    Product("int4_sym_col", 20, (300,), 544, torch.float16, num_sms=2),
    Product("int4_g32_fp32", 24, (130,), 1056),
    Product("nvfp4", 20, (130,), 1056, torch.float16, num_sms=2),  # a step whose last scales are half a word
    Product("int4_g128", 40, (130, 64, 64), 128, num_sms=2, kernel=wgmma_plan),  # tiles of one step
    Product("int4_g128", 300, (200,), 640),  # one warp copies x, eight multiply
    Product("int4_sym_g128", 192, (128,), 4096, num_sms=6),  # two tiles, three parts of each
    Product("int4_g64", 193, (130,), 320, torch.float16, bias=True, num_sms=8),
    Product("int8_g128", 192, (130,), 384, num_sms=2),
    Product("int8_col", 192, (40,), 1040, torch.float16, num_sms=2),  # rings are gone round more than once
    Product("nf4", 192, (130, 64), 448, num_sms=2),
    Product("mxfp4", 513, (128,), 160, num_sms=2),
    Product("nvfp4", 200, (66,), 1056, torch.float16, num_sms=1),
    Product("nvfp4", 192, (128,), 256, num_sms=1),
    Product("int4_sym_g32", 256, (128,), 224),
    Product("int4_g128", 40, (128,), 1024, num_sms=2),  # tiles of 64 batch rows in two parts, whose programs wait for each other
    Product("nvfp4", 65, (136,), 512, num_sms=2),
    Product("int8_col", 100, (128,), 2048, torch.float16, bias=True, num_sms=4),
    Product("mxfp4", 70, (72, 64), 800, num_sms=3),
    Product("int4_g128_a8", 257, (130,), 640),  # x in INT8 from here on
    Product("int4_g64_a8", 300, (40, 64), 448, torch.float16, bias=True),
    Product("int4_sym_g128_a8", 256, (128,), 2048, num_sms=4),
    Product("int4_g32_a8", 256, (72,), 1056, num_sms=1),
)


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.weight}-{c.rows}x{','.join(map(str, c.features))}x{c.width}")
def test_products_keep_their_promise(case: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "ROUNDED_ROWS", 256)
    rng = torch.Generator().manual_seed(case.rows)
    x = torch.randn(case.rows, case.width, generator=rng).to(case.dtype)
    weights = [hb.quantize(torch.randn(n, case.width, generator=rng) * 0.1, case.weight) for n in case.features]
    biases = [torch.randn(n, generator=rng) if case.bias else None for n in case.features]
    outs = multiply(x, weights, biases, ORDERS[0], case.num_sms, capability=case.capability, kernel=case.kernel)
    stored = {t.untyped_storage().data_ptr() for w in weights for t in (w.codes, w.scales, w.offsets) if t is not None}
    if case.capability >= (9, 0):
        assert stored >= EARLY, "the kernel before may still write x"
        assert EARLY, "weights need not wait for the kernel before"
    for out, weight, bias in zip(outs, weights, biases, strict=True):
        check_product(out, x, weight, bias)
    again = multiply(x, weights, biases, ORDERS[1], case.num_sms, True, capability=case.capability, kernel=case.kernel)
    assert all(map(same_bits, outs, again))


def test_rows_that_are_not_finite_harm_no_other_row_of_x_in_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "ROUNDED_ROWS", 256)
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[3], x[5, 7], x[6, 200], x[8, 1], x[9] = 0, float("nan"), float("inf"), 3e38, 1e-38
    weight = hb.quantize(torch.randn(40, 256, generator=torch.Generator().manual_seed(1)), "int4_g64_a8")
    weight.scales[2, 1] = float("nan")
    (out,) = multiply(x, [weight], [None], ORDERS[0])
    reference = hb.linear(x, weight, impl="reference")
    assert torch.equal(out.isnan(), reference.isnan())
    assert out[[5, 6]].isnan().all()
    assert out[:, 2].isnan().all()
    fine = [n for n in range(40) if n != 2]
    assert not out[3, fine].any()
    assert not out[9, fine].any(), "below 2^-107 all is zero"
    rows = [m for m in range(256) if m not in (3, 5, 6, 9)]
    torch.testing.assert_close(out[rows][:, fine], reference[rows][:, fine], rtol=2**-7, atol=0)


def test_owners_of_split_tiles_leave_zeros_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five steps a tile four programs take 3, 3, 2, 2: an owner waits for numbers of others, NaN among them, and clears them."""
    words = torch.zeros(1 << 12, dtype=torch.int32)
    monkeypatch.setattr(launch_cache, "counters", lambda device, size, own: words[:size])
    x = torch.randn(2, 5120, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[1, 4000] = float("nan")
    weight = hb.quantize(torch.randn(40, 5120, generator=torch.Generator().manual_seed(1)), "int4_sym_g128")
    plan = mma_plan(GemmProblem(((weight.format, 40),), 2, 5120, "bf16"), GPU("", 5, (9, 0)), use_pdl=True)
    assert isinstance(plan, GemmPlan)
    assert plan.owner_reduces
    assert (plan.tiles, plan.steps, plan.programs) == (2, 5, 4)
    (out,) = multiply(x, [weight], [None], ORDERS[0], 5)
    check_product(out[:1], x[:1], weight, None)
    assert out[1].isnan().all()
    assert not words.any()


def test_parts_of_tiles_for_large_m_leave_zeros_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.zeros(1 << 12, dtype=torch.int32)
    monkeypatch.setattr(launch_cache, "counters", lambda device, size, own: words[:size])
    x = torch.randn(40, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = hb.quantize(torch.randn(128, 1024, generator=torch.Generator().manual_seed(1)), "int4_sym_g128")
    plan = tuned_gemm(GemmProblem(((weight.format, 128),), 40, 1024, "bf16"), GPU("", 2, (9, 0)), use_pdl=True)
    assert isinstance(plan, GemmPlan)
    assert (plan.spec.kernel, plan.split_tiles, plan.programs) == ("wgmma_large", 1, 2)
    for backwards in (False, True):
        (out,) = multiply(x, [weight], [None], ORDERS[backwards], 2, backwards)
        check_product(out, x, weight, None)
        assert not words.any()


@pytest.mark.parametrize("case", [Product("int4_sym_g128", 16, (200,), 1280), Product("nf4", 2, (200,), 1088, num_sms=1)])
def test_rings_of_equal_parts_keep_it_too(case: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Triton 3.8 wants them: codes in two halves, a codebook in two parts."""
    monkeypatch.setattr(toolchain, "triton_version", lambda: (3, 8))
    weights = tuple((WEIGHT_FORMATS[case.weight], n) for n in case.features)
    plan = mma_plan(GemmProblem(weights, case.rows, case.width, "bf16"), GPU("", case.num_sms, (9, 0)), use_pdl=True)
    assert isinstance(plan, GemmPlan)
    assert isinstance(plan.spec, MmaSpec)
    assert plan.spec.code_parts == 2
    assert plan.spec.table_parts == 2
    test_products_keep_their_promise(case, monkeypatch)
