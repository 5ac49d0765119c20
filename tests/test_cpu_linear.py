"""The cpu level of `linear` against float64, for every weight format."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from accuracy import linear_accuracy, products
from gpu.gpu_gemms import Case, build
from halfbyte.cpu import codes, threads
from halfbyte.cpu import linear as cpu
from halfbyte.formats import KV_FORMATS, WEIGHT_FORMATS, Code, weight_format
from halfbyte.packing import pack_codes
from halfbyte.reference import linear as reference
from halfbyte.reference.dequantize import decode_unit
from halfbyte.reference.quantize import quantize
from halfbyte.tensors import QuantTensor
from linear_levels import CALLS, DRAWN, ZEROS
from watched import watched

#: How `product` multiplies: by the codes (a small M), in tiles or by AMX (a bf16 x, else as before), or by a GEMM on blocks
#: that a compiled loop decodes, for torch or for AMX, or that torch decodes.
PATHS = ("codes", "tiles", "amx", "amx blocks", "compiled blocks", "torch")
CODES = {f.code.name: f.code for f in (*KV_FORMATS.values(), *WEIGHT_FORMATS.values())}


def weight_of(name: str, n: int, k: int, seed: int = 0) -> QuantTensor:
    return quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.1, name)


def in_act_order(weight: QuantTensor, seed: int = 2) -> QuantTensor:
    """The same stored columns, said to be others."""
    return replace(weight, perm=torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed)).int())


def inputs(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(cpu, "compiler_works", lambda: False)
    else:
        pytest.importorskip("numba", reason="loops are compiled by numba: pip install halfbyte[cpu]")
        if request.param == "tiles" and not cpu._tiles_work():
            pytest.skip("this CPU has no instructions for bf16")
        if "amx" in request.param and not cpu._amx_works():
            pytest.skip("this CPU has no AMX")
        monkeypatch.setattr(cpu, "SMALL_M", 8 if request.param == "codes" else 0)
        monkeypatch.setattr(cpu, "TILE_M", 16 if request.param == "tiles" else 0)
        monkeypatch.setattr(cpu, "AMX_M", 0 if request.param == "amx blocks" else cpu.AMX_M)
        monkeypatch.setattr(cpu, "_amx_works", lambda: "amx" in request.param)
    return str(request.param)


def check(x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None, block: int = cpu.BLOCK) -> None:
    """Within the promise. Torch's own product rounds the weight to 16 bits first. In fp32 it rounds only its sums, in another order
    than ours, so there the bound is the roundings that a sum of K terms can see.
    """
    with mock.patch.object(cpu, "BLOCK", block), mock.patch.object(cpu, "BLOCK_BF16", block):
        y = cpu.linear(x, weight, bias)
    truth, base = products(x, weight, bias)
    assert y.dtype is x.dtype
    assert y.shape == truth.shape
    size = truth.norm().item()
    if not size:
        assert not y.any()
        return
    promise, more = linear_accuracy(y, base, truth), 0.0
    if x.dtype in (torch.float32, torch.float64):
        terms = x.double().abs() @ weight.dequantize(torch.float64).abs().mT  # the size of what is summed
        more = weight.shape[1] ** 0.5 * torch.finfo(x.dtype).eps * terms.norm().item() / size
    assert promise.error <= promise.allowed + more


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("block", [1, 1000, cpu.BLOCK])
@pytest.mark.usefixtures("path")
def test_every_format(name: str, dtype: torch.dtype, block: int) -> None:
    check(inputs(5, 256, dtype=dtype), weight_of(name, 37, 256), inputs(37), block)


@pytest.mark.parametrize("case", [*CALLS.values(), *DRAWN], ids=[*CALLS, *map(str, range(len(DRAWN)))])
@pytest.mark.usefixtures("path")
def test_every_call(case: Case) -> None:
    call = build(case)
    check(call.x, call.weights[0], call.biases[0])


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.usefixtures("path")
def test_act_order(name: str) -> None:
    stored = weight_of(name, 37, 256)
    weight = in_act_order(stored)
    assert weight.perm is not None
    perm = weight.perm.long()
    assert torch.equal(cpu.linear(inputs(5, 256), weight, None), cpu.linear(inputs(5, 256)[:, perm], stored, None))
    for level in (cpu, reference):
        y = level.linear(inputs(5, 256), weight, None)
        torch.testing.assert_close(y, inputs(5, 256) @ weight.dequantize().T, rtol=1e-4, atol=1e-4)
    assert torch.equal(weight.dequantize()[:, perm], stored.dequantize())


@pytest.mark.parametrize("name", ["int4_g128_a8", "int4_sym_g32_a8"])
@pytest.mark.parametrize("act_order", [False, True])
def test_many_rows_of_x_are_rounded_where_a_format_says_so(name: str, act_order: bool) -> None:
    """Scales and integers computed here, number by number, in float64."""
    x, stored = inputs(512, 256, dtype=torch.bfloat16), weight_of(name, 37, 256)
    weight = in_act_order(stored) if act_order else stored
    exact = QuantTensor(weight_format(name).exact, weight.shape, **weight.parts())
    values = exact.dequantize(torch.float64)
    zeros = torch.full_like(stored.scales, 8) if stored.offsets is None else stored.offsets
    row = (stored.scales.double() * torch.maximum(zeros, 15 - zeros)).amax(-1, keepdim=True) / 127
    token = x.double().abs().amax(-1, keepdim=True) / 127
    truth = (x.double() / token).round() * token @ ((values / row).round() * row).T
    for level in (cpu, reference):
        y = level.linear(x, weight, None)
        # A ratio of scales is rounded to fp16, and another integer than here is one of few thousand.
        assert (y.double() - truth).norm() <= 4e-3 * truth.norm()
        assert (y.double() - x.double() @ values.T).norm() >= 6e-3 * y.double().norm()
        for few in (x[:511], x.float()):
            assert torch.equal(level.linear(few, weight, None), level.linear(few, exact, None))


def test_rows_and_scales_that_are_not_finite_stay_where_they_are() -> None:
    x, weight = inputs(512, 256, dtype=torch.bfloat16), weight_of("int4_g128_a8", 37, 256)
    expected = cpu.linear(x, weight, None)
    x[3], x[5, 7], x[6, 200] = 0, torch.nan, torch.inf
    weight.scales[2, 1] = torch.inf
    for level in (cpu, reference):
        y = level.linear(x, weight, None)
        lost = y.isnan()
        assert lost[[5, 6]].all()
        assert lost[:, 2].all()
        assert int(lost.sum()) == 2 * 37 + 510
        others = [m for m in range(512) if m not in (3, 5, 6)]
        torch.testing.assert_close(y[others][:, 3:], expected[others][:, 3:], rtol=2**-7, atol=1e-6)
        assert not y[3, 3:].any()


@pytest.mark.parametrize("code", CODES.values(), ids=str)
def test_every_code_means_what_the_reference_says(code: Code) -> None:
    if code.bits == 16:
        stored = torch.arange(-(2**15), 2**15).to(torch.int16).view(code.dtype)
        stored = stored[stored.isfinite()]
    else:
        stored = torch.arange(256).to(torch.uint8)
        stored = stored.view(torch.int8) if code.dtype is torch.int8 else stored
    truth = decode_unit(stored, code)
    out = torch.full_like(truth, torch.nan)
    codes.unpack_into(out, stored, code)
    assert out.isnan().sum() == (2 if code.name == "e4m3" else 0)
    assert torch.equal(out.nan_to_num(nan=1e9), truth.nan_to_num(nan=1e9))


@pytest.mark.usefixtures("path")
def test_the_last_block_of_rows_is_its_own_size() -> None:
    for n in (1, 63, 64, 65, 127):
        check(inputs(3, 64), weight_of("int4_g32", n, 64), inputs(n), 64 * 64)


@pytest.mark.usefixtures("path")
def test_leading_axes_strides_and_empty_inputs() -> None:
    weight = weight_of("nf4", 40, 128)
    check(inputs(2, 3, 4, 128), weight, None)
    check(inputs(128), weight, None)
    check(inputs(9, 256)[:, ::2], weight, inputs(80)[::2])
    for shape in ((0, 128), (2, 0, 128)):
        assert cpu.linear(inputs(*shape), weight, None).shape == (*shape[:-1], 40)
    assert cpu.linear(inputs(3, 128), weight_of("nf4", 0, 128), None).shape == (3, 0)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.usefixtures("path")
def test_no_columns_leave_the_bias(name: str) -> None:
    weight, bias = quantize(torch.zeros(4, 0), name), torch.arange(4.0)
    assert torch.equal(cpu.linear(torch.zeros(2, 3, 0), weight, bias), bias.expand(2, 3, 4))
    assert cpu.linear(torch.zeros(0, 3, 0), weight, None).shape == (0, 3, 4)


@pytest.mark.usefixtures("path")
def test_a_bias_is_added_before_rounding() -> None:
    weight = weight_of("int8_col", 64, 256)
    x = inputs(8, 256, dtype=torch.bfloat16)
    bias = inputs(64) * 100
    exact = x.double() @ weight.dequantize(torch.float64).mT + bias.double()
    assert torch.equal(cpu.linear(x, weight, bias), exact.float().to(torch.bfloat16)) or (
        (cpu.linear(x, weight, bias).double() - exact).abs().max() <= (exact.to(torch.bfloat16).double() - exact).abs().max()
    )


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_threads_change_no_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = weight_of("int4_g32", 70, 256), inputs(8, 256, dtype=dtype)
    one = cpu.linear(x, weight, None)
    monkeypatch.setattr(threads, "STEPS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # as `over_rows` reads it
    assert torch.equal(cpu.linear(x, weight, None), one)


@pytest.mark.parametrize("name", ["int4_g64", "nvfp4", "int8_col"])
def test_a_row_of_a_small_batch_has_the_bits_that_it_has_alone(name: str) -> None:
    pytest.importorskip("numba", reason="loops are compiled by numba: pip install halfbyte[cpu]")
    weight, x = weight_of(name, 70, 256), inputs(cpu.SMALL_M, 256)
    together = cpu.linear(x, weight, None)
    for count in range(1, cpu.SMALL_M):
        assert torch.equal(cpu.linear(x[:count], weight, None), together[:count])


def rows_that_are_not_finite_stay_alone(
    x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None, together: torch.Tensor
) -> None:
    """All other rows keep their bits."""
    x[3], x[20, 1], x[40, -1] = torch.nan, torch.inf, -torch.inf
    harmed = [3, 20, 40]
    others = [m for m in range(len(x)) if m not in harmed]
    y = cpu.linear(x, weight, bias)
    assert torch.equal(y[others], together[others])
    assert not y[harmed].isfinite().any()


@pytest.mark.parametrize("width", [32, 96, 128, 320, 512])
@pytest.mark.parametrize("name", ["int4_g32", "int4_col", "int4_sym_g32", "int8_col", "mxfp4", "nvfp4"])
def test_amx_gives_a_row_the_same_bits_in_any_batch(name: str, width: int) -> None:
    if not (threads.compiler_works() and cpu._amx_works()):
        pytest.skip("this CPU has no AMX")
    weight, x = weight_of(name, 37, width), inputs(cpu.AMX_M, width, dtype=torch.bfloat16)
    check(x, weight, inputs(37))
    together = cpu.linear(x, weight, None)
    for count in (2, 16, 17, 33, 63):
        assert torch.equal(cpu.linear(x[:count], weight, None), together[:count])
    rows_that_are_not_finite_stay_alone(x, weight, None, together)


@pytest.mark.parametrize(("rows", "width"), [(37, 32), (150, 320), (300, 4128)])
@pytest.mark.parametrize("name", ["int4_g32", "int4_col", "int8_col", "nvfp4"])
def test_blocks_by_amx_give_a_row_the_same_bits_in_any_batch(
    name: str, rows: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the rows, columns and tokens that are multiplied at a time."""
    if not (threads.compiler_works() and cpu._amx_works()):
        pytest.skip("this CPU has no AMX")
    weight, x, bias = weight_of(name, rows, width), inputs(600, width, dtype=torch.bfloat16), inputs(rows)
    asked = watched(monkeypatch, cpu, "_by_blocks")
    check(x, weight, bias)
    together = cpu.linear(x, weight, bias)
    for count in (65, 97, 128, 513):
        assert torch.equal(cpu.linear(x[-count:], weight, bias), together[-count:])
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "AMX_TOKENS", 96)
        patch.setattr(threads, "STEPS", 1)
        patch.setattr(torch, "get_num_threads", lambda: 3)
        assert torch.equal(cpu.linear(x, weight, bias), together)
    rows_that_are_not_finite_stay_alone(x, weight, bias, together)
    assert len(asked) == 8


@pytest.mark.parametrize("name", ZEROS)
@pytest.mark.usefixtures("path")
def test_rows_whose_codes_cancel(name: str) -> None:
    """Scales of 1/16 are exact in fp16, as are the products: eager rounds only its sums and its result."""
    rows, width = 96, 4096
    weight = weight_of(name, rows, width)
    assert weight.scales is not None
    assert weight.offsets is not None
    codes = torch.randint(0, 15, (rows, width), generator=torch.Generator().manual_seed(4))
    codes[:, ::2] = 14 - codes[:, 1::2]  # pairs add up to twice the zero point
    parts = {"codes": pack_codes(codes.to(torch.uint8), 4), "scales": torch.full_like(weight.scales, 2**-4)}
    weight = replace(weight, **parts, offsets=torch.full_like(weight.offsets, 7))
    check((1000 + 20 * inputs(16, width)).half(), weight, None)


def test_a_forked_process_has_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "STEPS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    seen: list[tuple[int, int]] = []
    threads.over_rows(lambda first, last: seen.append((first, last)), 5, 5)
    assert sorted(seen) == [(0, 2), (2, 5)]
    if not hasattr(os, "fork"):
        return
    child = os.fork()
    if not child:
        threads.over_rows(lambda first, last: None, 5, 5)
        os._exit(0)
    for _ in range(500):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        raise AssertionError("the forked process waits for threads that it does not have")
    assert status == 0


def test_arrays_of_bound_loops_are_those_that_they_were_compiled_for() -> None:
    numba = pytest.importorskip("numba", reason="loops are compiled by numba: pip install halfbyte[cpu]")
    from halfbyte.cpu.compiled import loop

    i64 = numba.int64
    typed, right = loop(_nothing, numba.void(i64[::1], i64, i64)), np.zeros(8, np.int64)
    threads.Bound([(typed, (right,), 8)])(1)
    for wrong in (right.astype(np.int32), right[None], right[::2]):
        with pytest.raises(TypeError, match="for a loop that takes"):
            threads.Bound([(typed, (wrong,), 8)])


def _nothing(x: object, first: int, last: int) -> None:
    pass


def test_bound_loops_run_on_torchs_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of all loops, whichever thread has them; by the caller alone in a forked process, and after a wait for cores."""
    pytest.importorskip("numba", reason="loops are compiled by numba: pip install halfbyte[cpu]")
    from halfbyte.cpu.compiled.linear import products as loop

    weight, x = quantize(torch.randn(40, 256), "int4_g32"), torch.randn(3, 256)
    own, columns = cpu.compiled(weight), cpu.compiled(weight).columns(x).contiguous().numpy()
    sums = [np.empty((40, 3), np.float32) for _ in range(2)]
    bound = threads.Bound([(loop, (*own.arrays(), columns, y), 40) for y in sums])
    loop(*own.arrays(), columns, expected := np.empty((40, 3), np.float32), 0, 40)

    def check_all(steps: int) -> None:
        for y in sums:
            y.fill(np.nan)
        bound(steps)
        assert all(np.array_equal(y, expected) for y in sums)

    before, regions = torch.get_num_threads(), threads._Regions
    monkeypatch.setattr(regions, "left_out", 0)
    try:
        for count in (1, 2, 3, 64):
            torch.set_num_threads(count)
            check_all(1 << 30)
        monkeypatch.setattr(threads, "LATE", 0.0)  # every region has waited
        check_all(1 << 30)
        assert regions.left_out == threads.LEFT_OUT * (threads._openmp()[0] != 0)
        check_all(1 << 30)
        assert regions.left_out == max(0, threads.LEFT_OUT - 1) * (threads._openmp()[0] != 0)
        if hasattr(os, "fork") and not (child := os.fork()):
            regions.left_out = 0
            os._exit(int(threads._regions_pay()))
        if hasattr(os, "fork"):
            assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(before)


#: Of x86 CPUs without AVX-512, and of other CPUs, for which a lookup is made of single loads. All convert fp16.
INSTRUCTIONS = {"haswell": "+avx2,+avx,+fma,+f16c,+bmi,+bmi2,+sse4.2", "x86-64-v2": "+sse4.2,+ssse3,+popcnt,+avx,+f16c"}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_other_cpus(name: str, tmp_path: Path) -> None:
    """The same results from the code that other CPUs run."""
    pytest.importorskip("numba", reason="loops are compiled by numba: pip install halfbyte[cpu]")
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the instructions are those of x86")
    script = """
import torch
from halfbyte.cpu import linear as cpu
from halfbyte.reference.quantize import quantize
for name in ("int4_g32", "nvfp4", "nf4", "int8_g128", "int8_col", "int4_col"):
    torch.manual_seed(0)
    weight, x = quantize(torch.randn(9, 256), name), torch.randn(7, 256)
    truth = x.double() @ weight.dequantize(torch.float64).mT
    for largest in (0, 8):
        cpu.SMALL_M = largest
        assert (cpu.linear(x, weight, None) - truth).norm() < 1e-6 * truth.norm(), name
"""
    machine = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": INSTRUCTIONS[name], "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env={**os.environ, **machine}, check=True)


def _twice(x: object, y: object) -> None:
    y[0] = 2 * x[0]  # type: ignore[index]


def test_kept_loops_are_compiled_anew_when_any_of_their_files_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numba alone looks at the file of the function, and not at those of what it calls."""
    numba = pytest.importorskip("numba")
    from halfbyte.cpu import compiled

    def hits() -> int:
        loop = compiled.loop(_twice)
        x, y = torch.ones(1).numpy(), torch.zeros(1).numpy()
        loop(x, y)
        assert y[0] == 2
        return sum(loop.stats.cache_hits.values())

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert [hits(), hits()] == [0, 1]
    monkeypatch.setattr(compiled, "_DIGEST", "other")
    assert [hits(), hits()] == [0, 1]


def test_a_process_of_vllm_imports_no_numba() -> None:
    """After which vLLM could start no other engine."""
    code = "import sys, types; sys.modules['vllm'] = types.ModuleType('vllm'); import torch, halfbyte as hb; "
    code += "hb.linear(torch.randn(1, 64), hb.quantize(torch.randn(8, 64), 'int8_col')); assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
