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

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accuracy import linear_accuracy, products
from halfbyte.cpu import codes, threads
from halfbyte.cpu import linear as cpu
from halfbyte.formats import KV_FORMATS, WEIGHT_FORMATS, Code
from halfbyte.reference import linear as reference
from halfbyte.reference.dequantize import decode_unit
from halfbyte.reference.quantize import quantize
from halfbyte.tensors import QuantTensor

#: How `product` multiplies: by the codes (a small M), in tiles (a bf16 x, else as before), or by a GEMM on blocks that a compiled
#: loop decodes, or that torch decodes.
PATHS = ("codes", "tiles", "compiled blocks", "torch")
CODES = {f.code.name: f.code for f in (*KV_FORMATS.values(), *WEIGHT_FORMATS.values())}


def build(name: str, n: int, k: int, seed: int = 0) -> QuantTensor:
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
        monkeypatch.setattr(cpu, "SMALL_M", 8 if request.param == "codes" else 0)
        monkeypatch.setattr(cpu, "TILE_M", 16 if request.param == "tiles" else 0)
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
    check(inputs(5, 256, dtype=dtype), build(name, 37, 256), inputs(37), block)


@pytest.mark.parametrize("name", [name for name, fmt in WEIGHT_FORMATS.items() if fmt.code.per_byte == 2])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.usefixtures("path")
def test_an_x_with_a_mean(name: str, rows: int) -> None:
    """Values of codes that are rounded would be as wrong in every group."""
    for mean in (0.5, 2):
        check((inputs(rows, 1024) + mean).bfloat16(), build(name, 64, 1024), None)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.usefixtures("path")
def test_act_order(name: str) -> None:
    stored = build(name, 37, 256)
    weight = in_act_order(stored)
    assert weight.perm is not None
    perm = weight.perm.long()
    assert torch.equal(cpu.linear(inputs(5, 256), weight, None), cpu.linear(inputs(5, 256)[:, perm], stored, None))
    for level in (cpu, reference):
        y = level.linear(inputs(5, 256), weight, None)
        torch.testing.assert_close(y, inputs(5, 256) @ weight.dequantize().T, rtol=1e-4, atol=1e-4)
    assert torch.equal(weight.dequantize()[:, perm], stored.dequantize())
    check(inputs(2, 3, 256, dtype=torch.bfloat16), weight, inputs(37))


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
        check(inputs(3, 64), build("int4_g32", n, 64), inputs(n), 64 * 64)


@pytest.mark.usefixtures("path")
def test_leading_axes_strides_and_empty_inputs() -> None:
    weight = build("nf4", 40, 128)
    check(inputs(2, 3, 4, 128), weight, None)
    check(inputs(128), weight, None)
    check(inputs(128, 7).mT, weight, inputs(40))
    check(inputs(9, 256)[:, ::2], weight, inputs(80)[::2])
    for shape in ((0, 128), (2, 0, 128)):
        assert cpu.linear(inputs(*shape), weight, None).shape == (*shape[:-1], 40)
    assert cpu.linear(inputs(3, 128), build("nf4", 0, 128), None).shape == (3, 0)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.usefixtures("path")
def test_no_columns_leave_the_bias(name: str) -> None:
    weight, bias = quantize(torch.zeros(4, 0), name), torch.arange(4.0)
    assert torch.equal(cpu.linear(torch.zeros(2, 3, 0), weight, bias), bias.expand(2, 3, 4))
    assert cpu.linear(torch.zeros(0, 3, 0), weight, None).shape == (0, 3, 4)


@pytest.mark.usefixtures("path")
def test_a_bias_is_added_before_rounding() -> None:
    weight = build("int8_col", 64, 256)
    x = inputs(8, 256, dtype=torch.bfloat16)
    bias = inputs(64) * 100
    exact = x.double() @ weight.dequantize(torch.float64).mT + bias.double()
    assert torch.equal(cpu.linear(x, weight, bias), exact.float().to(torch.bfloat16)) or (
        (cpu.linear(x, weight, bias).double() - exact).abs().max() <= (exact.to(torch.bfloat16).double() - exact).abs().max()
    )


@pytest.mark.parametrize("name", ["int4_g32", "int8_g128", "nf4", "mxfp4", "nvfp4"])
@pytest.mark.usefixtures("path")
def test_extreme_scales(name: str) -> None:
    for factor in (1e-4, 1e3):
        weight = quantize(inputs(16, 256) * factor, name)
        check(inputs(4, 256, dtype=torch.bfloat16), weight, None)


@pytest.mark.usefixtures("path")
def test_strided_weights_are_read_through_their_strides() -> None:
    weight = build("int4_g64", 24, 128)
    parts = {name: part.mT.contiguous().mT for name, part in weight.parts().items()}
    other = replace(weight, **parts)
    assert not other.codes.is_contiguous()
    assert torch.equal(cpu.linear(inputs(3, 128), other, None), cpu.linear(inputs(3, 128), weight, None))


@settings(max_examples=40, deadline=None, print_blob=True)
@given(
    st.sampled_from(list(WEIGHT_FORMATS)),
    st.integers(1, 70),
    st.integers(1, 3),
    st.lists(st.integers(1, 5), max_size=3),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.booleans(),
    st.sampled_from([1, 2000, cpu.BLOCK]),
)
def test_awkward_shapes(name: str, n: int, width: int, lead: list[int], dtype: torch.dtype, biased: bool, block: int) -> None:
    check(inputs(*lead, 128 * width, dtype=dtype), build(name, n, 128 * width), inputs(n) if biased else None, block)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_threads_change_no_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = build("int4_g32", 70, 256), inputs(8, 256, dtype=dtype)
    one = cpu.linear(x, weight, None)
    monkeypatch.setattr(threads, "STEPS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # as `over_rows` reads it
    assert torch.equal(cpu.linear(x, weight, None), one)


@pytest.mark.parametrize("name", ["int4_g64", "nvfp4", "int8_col"])
def test_a_row_of_a_small_batch_has_the_bits_that_it_has_alone(name: str) -> None:
    pytest.importorskip("numba", reason="loops are compiled by numba: pip install halfbyte[cpu]")
    weight, x = build(name, 70, 256), inputs(cpu.SMALL_M, 256)
    together = cpu.linear(x, weight, None)
    for count in range(1, cpu.SMALL_M):
        assert torch.equal(cpu.linear(x[:count], weight, None), together[:count])


@pytest.mark.parametrize("name", ["int4_g128", "int4_sym_g32_fp32", "int4_col", "int8_g128", "int8_col", "nvfp4", "nf4_dq"])
@pytest.mark.usefixtures("path")
def test_every_size_of_a_batch_and_rows_that_fill_no_tile(name: str) -> None:
    """16 columns in common of a last tile; pieces of 96 and 128 columns, where formats allow them."""
    for count, features, width in ((1, 16, 256), (2, 17, 512), (3, 31, 256), (9, 70, 640), (16, 33, 256), (17, 33, 384)):
        check(inputs(count, width, dtype=torch.bfloat16), build(name, features, width), inputs(features))
    if WEIGHT_FORMATS[name].granularity == "out_channel":
        check(inputs(4, 576, dtype=torch.bfloat16), build(name, 40, 576), None)


@pytest.mark.parametrize("name", ["int4_g32", "int4_g128", "int4_col"])
@pytest.mark.usefixtures("path")
def test_a_mean_of_x_and_high_zero_points_cancel_nothing(name: str) -> None:
    weight = build(name, 48, 4096)
    assert weight.offsets is not None
    check(inputs(5, 4096, dtype=torch.bfloat16) + 8, weight, None)
    check(inputs(5, 4096, dtype=torch.bfloat16), replace(weight, offsets=torch.full_like(weight.offsets, 255)), None)


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
