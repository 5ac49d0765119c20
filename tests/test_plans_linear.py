"""The plan of the tuned linear kernel: what it takes, what it leaves to the portable one, and how work is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfbyte import quantize
from halfbyte.device import H200
from halfbyte.formats import WEIGHT_FORMATS, weight_format
from halfbyte.packing import unpack_codes
from halfbyte.plans import toolchain
from halfbyte.plans.codebooks import unit_of_codebook
from halfbyte.plans.gemm import tuned_gemm
from halfbyte.plans.gemm_large import LargeSpec, large_plan, parts_of
from halfbyte.plans.gemm_mma import mma_plan, shares
from halfbyte.plans.gemm_plan import GemmPlan
from halfbyte.plans.gemm_problem import GemmProblem, Routing
from halfbyte.plans.gemm_spec import MmaSpec, WgmmaSpec
from halfbyte.plans.gemm_wgmma import wgmma_plan
from halfbyte.plans.tuning_cache import key_of
from halfbyte.plans.weight_spec import CODEBOOK_BYTES

#: Shared memory of a multiprocessor, and what the driver takes of it for each block.
EVERYTHING = {(8, 0): 164 << 10, (8, 9): 100 << 10, (9, 0): 228 << 10, (10, 0): 228 << 10}
DRIVER = 1024


def planned(name: str, n: int | tuple[int, ...], k: int, rows: int = 1, dtype: str = "bf16", **device: Any) -> GemmPlan | str:
    return mma_plan(problem(name, n, k, rows, dtype), H200._replace(**device), use_pdl=True)


def problem(name: str, n: int | tuple[int, ...], k: int, rows: int, dtype: str) -> GemmProblem:
    features = n if isinstance(n, tuple) else (n,)
    return GemmProblem(tuple((WEIGHT_FORMATS[name], one) for one in features), rows, k, dtype)


def tuned(*args: Any, **more: Any) -> GemmPlan:
    found = planned(*args, **more)
    assert isinstance(found, GemmPlan), found
    return found


@pytest.mark.parametrize("capability", list(EVERYTHING))
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    "name", ["int4_sym_g128", "int4_g32", "int4_sym_col", "int8_col", "int8_g128", "nf4", "fp4_bnb", "mxfp4", "nvfp4"]
)
def test_as_many_blocks_run_at_once_as_planned(name: str, rows: int, capability: tuple[int, int]) -> None:
    """One block more on a multiprocessor, and paired launches would not be spread evenly."""
    for n, k in ((1024, 4096), (4096, 14336), (8192, 8192), (28672, 4096)):
        found = tuned(name, n, k, rows, capability=capability)
        taken = found.spec.shared_bytes + DRIVER
        assert found.programs_per_sm * taken <= EVERYTHING[capability] < (found.programs_per_sm + 1) * taken
        assert found.spec.stages >= 2
        if found.spec.weights[0].codebook:  # the table begins at a multiple of its size, behind the stages, within the ring
            weight, spec = found.spec.weights[0], found.spec
            assert weight.codebook_at(spec) >= spec.stages * weight.slot_bytes(spec)
            assert weight.codebook_at(spec) + CODEBOOK_BYTES <= weight.slots(spec) * weight.slot_bytes(spec)


@pytest.mark.parametrize(
    ("n", "k", "programs", "cut"),
    [
        (4096, 4096, 128, "data-parallel"),
        (6144, 4096, 192, "data-parallel"),
        (8192, 8192, 256, "data-parallel"),
        (16384, 16384, 256, "data-parallel"),
        (1024, 4096, 128, "split-K, 4 parts a tile"),
        (4096, 14336, 256, "split-K, 2 parts a tile"),
        (10240, 8192, 264, "stream-K"),
        (28672, 4096, 264, "stream-K"),
        (8192, 28672, 128, "data-parallel"),
        (65536, 4096, 256, "data-parallel"),
    ],
)
def test_decompositions_by_hand(n: int, k: int, programs: int, cut: str) -> None:
    found = tuned("int4_sym_g128", n, k)
    assert found.programs == programs
    assert cut in found.why


@pytest.mark.parametrize("n", [1, 31, 33, 500, 4096, 10240, 57344])
@pytest.mark.parametrize("k", [256, 1280, 4096, 28672])
@pytest.mark.parametrize("rows", [1, 7, 16])
def test_every_program_has_a_step(n: int, k: int, rows: int) -> None:
    """At most two partial results a program, or one part of a tile for its owner: so much workspace is planned."""
    for name in ("int4_sym_g128", "int8_col"):
        found = tuned(name, n, k, rows)
        assert 1 <= found.programs <= found.tiles * found.steps
        assert found.tiles * found.spec.tile >= n > (found.tiles - 1) * found.spec.tile
        assert found.steps * found.spec.step >= k > (found.steps - 1) * found.spec.step
        shared = found.tiles % found.programs  # else nothing is added up
        owner = rows <= 8 and shared > 0 and found.programs <= 2 * found.tiles
        assert found.owner_reduces == owner
        assert found.floats == (2 * found.programs * found.spec.tile * found.spec.block_m if shared and not owner else 1)
        assert found.counters == (found.programs * found.spec.tile * found.spec.x_rows if owner else shared)


@pytest.mark.parametrize(("tiles", "steps", "programs"), [(5, 3, 5), (1, 8, 3), (320, 8, 256), (7, 4, 3), (3, 5, 13), (10, 1, 4)])
def test_every_step_is_computed_once(tiles: int, steps: int, programs: int) -> None:
    whole, shared, each, more = shares(tiles, steps, programs)
    done = []
    for program in range(programs):
        first = program * each + min(program, more)
        done += range(first, first + each + (program < more))
        own = (shared + program * whole) * steps
        done += range(own, own + whole * steps)
    assert sorted(done) == list(range(tiles * steps))
    assert each + (more > 0) <= steps  # a part lies in two tiles at most


@pytest.mark.parametrize(
    ("name", "rows", "groups_per_mma", "halved", "columns"),
    [
        ("mxfp4", 1, 8, False, 1),
        ("mxfp4", 3, 2, False, 4),
        ("mxfp4", 8, 1, True, 8),
        ("nvfp4", 1, 8, False, 1),
        ("nvfp4", 2, 4, False, 2),
        ("nvfp4", 4, 2, True, 4),
        ("nvfp4", 8, 1, False, 8),
        ("int4_g32", 16, 1, True, 16),
        ("int4_sym_g128", 1, 1, False, 8),
        ("int4_sym_col", 1, 1, False, 8),
    ],
)
def test_few_rows_leave_columns_for_more_groups(name: str, rows: int, groups_per_mma: int, halved: bool, columns: int) -> None:
    spec = tuned(name, 4096, 4096, rows).spec
    assert isinstance(spec, MmaSpec)
    weight = spec.weights[0]
    assert (weight.groups_per_mma(spec), weight.halved(spec), spec.sums) == (groups_per_mma, halved, columns)
    assert weight.operands_scaled(spec) == (name == "nvfp4" and rows > 4)


def test_three_weights_share_a_launch() -> None:
    found = tuned("nf4", (4096, 1024, 1000), 4096)
    assert found.tiles == 128 + 32 + 32
    assert len(found.spec.weights) == 3


@pytest.mark.parametrize(
    ("name", "n", "k", "rows", "why"),
    [
        ("int4_sym_g128", 4096, 4096, 17, "M = 17; the tuned kernel takes up to 16"),
        ("nf4_dq", 4096, 4096, 1, "portable kernel only"),
        ("int4_col", 4096, 4096, 1, "per-channel zero points"),
        ("int4_sym_col", 4096, 4104, 1, "not a multiple of 16"),
        ("int4_g128", 4096, 128, 1, "2-byte copies"),
        ("int4_g128", 131, 1280, 1, "an odd N"),
        ("int4_g64", 4096, 2880, 1, "2-byte copies"),
    ],
)
def test_what_is_left_to_the_portable_kernel(name: str, n: int, k: int, rows: int, why: str) -> None:
    assert why in str(planned(name, n, k, rows))


def test_scales_two_bytes_off_a_multiple_of_four() -> None:
    """Copied in pieces of 4 bytes that begin ahead of odd rows: MXFP4 with K = 2880, zero points with K = 768."""
    scales, zeros = tuned("mxfp4", 2880, 2880).spec, tuned("int4_g128", 2048, 768).spec
    assert (scales.odd_scales, scales.scales_per_copy, scales.scale_stride(False)) == (True, 4, 36)
    assert (zeros.odd_scales, zeros.odd_zeros, zeros.zeros_per_copy, zeros.scale_stride(True)) == (False, True, 4, 12)
    assert not tuned("mxfp4", 4096, 4096).spec.odd_scales


def test_x_is_rounded_where_all_formats_say_so_and_rows_are_many() -> None:
    def bits(*names: str, rows: int = 2048, width: int = 4096) -> int:
        plan = tuned_gemm(
            GemmProblem(tuple((weight_format(name), 4096) for name in names), rows, width, "bf16"), H200, use_pdl=True
        )
        assert isinstance(plan, GemmPlan)
        assert not isinstance(plan.spec, MmaSpec)
        return plan.spec.x_bits

    assert bits("int4_g128_a8") == bits("int4_sym_g32_a8", "int4_sym_g32_a8") == bits("int4_g64_a8", rows=512) == 8
    assert bits("int4_g64_a8", rows=511) == bits("int4_g64_a8", rows=17) == bits("int4_g64_a8", width=2**17 + 64) == 16
    assert bits("int4_g128") == 16
    few, same = (GemmProblem(((weight_format(name), 4096),), 16, 4096, "bf16") for name in ("int4_g128_a8", "int4_g128"))
    assert tuned_gemm(few, H200, use_pdl=True) == tuned_gemm(same, H200, use_pdl=True)
    assert key_of(few) == key_of(same)
    assert "different formats" in str(tuned_gemm(few._replace(weights=few.weights + same.weights), H200, use_pdl=True))


def test_formats_are_not_mixed_and_old_gpus_refused() -> None:
    mixed = (WEIGHT_FORMATS["nf4"], 64), (WEIGHT_FORMATS["mxfp4"], 64)
    assert "different formats" in str(mma_plan(GemmProblem(mixed, 1, 4096, "bf16"), H200, use_pdl=True))
    assert "compute capability 7.5" in str(planned("nf4", 64, 4096, capability=(7, 5)))
    assert not tuned("nf4", 64, 4096, capability=(8, 0)).spec.use_pdl


@pytest.mark.parametrize("capability", list(EVERYTHING))
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
def test_a_triton_that_sees_equal_parts_only_has_rings_of_them(
    rows: int, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for case in ((name, n, 4096, rows) for name in WEIGHT_FORMATS for n in (4096, 28672)):
        monkeypatch.setattr(toolchain, "triton_version", lambda: (3, 9))
        usual = planned(*case, capability=capability)
        monkeypatch.setattr(toolchain, "triton_version", lambda: (3, 8))
        found = planned(*case, capability=capability)
        assert type(found) is type(usual) or capability == (8, 9), (case, found)  # 100 KB are too few for some of them
        if isinstance(usual, GemmPlan) and isinstance(found, GemmPlan):
            assert isinstance(found.spec, MmaSpec)
            assert found.spec.used_bytes <= found.spec.ring_bytes < found.spec.used_bytes + (16 << 10)
            assert not [ring for ring in seen(found.spec) if ring[0] % ring[1] or found.spec.ring_bytes % ring[1]], case
            assert not [ring for ring in seen(usual.spec) if ring[0] % ring[1]], case


def seen(spec: MmaSpec) -> list[tuple[int, int]]:
    """(where it begins, bytes of a slot) of what kernels see as matrices."""
    weight = spec.weights[0]
    found = [(0, weight.slot_bytes(spec) // spec.code_parts), (spec.x_at, 2 * spec.step * spec.x_rows)]
    if weight.groups and not spec.odd_scales:
        found += [(spec.scales_at, spec.tile * spec.columns(weight) * weight.scale_bytes)]
    if weight.zero and not spec.odd_zeros:
        found += [(spec.zeros_at, spec.tile * spec.columns(weight))]
    if not spec.separate_reduce_smem:
        found += [(0, 4 * spec.k_slices * spec.partial_floats)]
    if weight.codebook:
        found += [(weight.codebook_at(spec), CODEBOOK_BYTES // spec.table_parts)]
    return found


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_operands_have_too_much(dtype: str) -> None:
    """code -> operand is code * unit + shift, but for zero points; tables hold the values themselves."""
    for name, code, operand in (
        ("int4_sym_g128", 8, 128 + 8 if dtype == "bf16" else 8 * 2.0**-24),
        ("int8_col", 0, 0 if dtype == "bf16" else 128 * 2.0**-24),
        ("nf4", 0, 0),
    ):
        weight = tuned(name, 64, 4096, dtype=dtype).spec.weights[0]
        assert operand == (code - weight.bias) * weight.unit(dtype) + weight.shift(dtype)


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_codebooks_that_no_unit_makes_exact_have_no_mean_error(dtype: str, torch_dtype: torch.dtype) -> None:
    """With x of one sign a mean error of 2e-4 (NF4 rounded as it is) would be ten times that of a 16-bit weight at K = 8192."""
    weight = quantize(torch.randn(256, 4096, generator=torch.Generator().manual_seed(0)), "nf4")
    codes = unpack_codes(weight.codes, 4).long()
    exact, unit = weight.format.code.codebook().double(), unit_of_codebook(weight.format.code, dtype)
    rounded = (exact / unit).to(torch_dtype).double() * unit
    assert abs(float((rounded - exact)[codes].mean())) < 2e-6
    assert float((rounded - exact)[codes].square().mean().sqrt()) < 4.1e-4
    assert unit_of_codebook(WEIGHT_FORMATS["fp4_bnb"].code, dtype) == 1 / 3  # all exact


def test_codebooks_hold_the_nearest_16_bit_numbers() -> None:
    thirds = tuned("fp4_bnb", 64, 4096).spec.weights[0].codebook
    assert thirds[:8] == (0x0000, 0x3C80, 0x4000, 0x4040, 0x3F80, 0x3FC0, 0x3F00, 0x3F40)
    assert thirds[8:] == tuple(bits | 0x8000 for bits in thirds[:8])
    assert tuned("fp4_bnb", 64, 4096, dtype="fp16").spec.weights[0].codebook[1:3] == (0x2400, 0x4000)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize(("dtype", "torch_dtype", "shift"), [("bf16", torch.bfloat16, 6), ("fp16", torch.float16, 9)])
def test_the_bits_of_e2m1_are_the_number(dtype: str, torch_dtype: torch.dtype, shift: int, name: str, rows: int) -> None:
    """Operand times what x and scales were multiplied by is the value in units."""
    spec = tuned(name, 64, 4096, rows, dtype).spec
    assert isinstance(spec, MmaSpec)
    weight, code = spec.weights[0], torch.arange(16, dtype=torch.int32)
    operands = (((code & 7) << shift) | ((code & 8) << 12)).to(torch.int16).view(torch_dtype).double()
    factor = weight.x_factor(spec) * (weight.scale_factor(spec) if weight.operands_scaled(spec) else 1.0)
    assert not weight.codebook
    assert torch.equal(operands * factor / weight.unit(dtype), WEIGHT_FORMATS[name].code.codebook().double())


# ----------------------------------------------------------------------------------------------------- wgmma


def on_hopper(name: str, n: int | tuple[int, ...], k: int, rows: int, dtype: str = "bf16", **device: Any) -> GemmPlan | str:
    return tuned_gemm(problem(name, n, k, rows, dtype), H200._replace(**device), use_pdl=True)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("rows", [17, 32, 33, 64, 65])
@pytest.mark.parametrize(
    "name", ["int4_sym_g128", "int4_g128", "int4_g64", "int4_g32", "int4_sym_col", "int8_col", "int8_g128", "nf4", "mxfp4", "nvfp4"]
)
def test_warp_groups_fill_a_multiprocessor(name: str, rows: int, dtype: str) -> None:
    for n, k in ((1024, 4096), (4096, 11008), (8192, 8192), ((4096, 1024, 1024), 4096), (28672, 4096)):
        found = wgmma_plan(problem(name, n, k, rows, dtype), H200, use_pdl=True)
        if isinstance(found, str):
            pytest.fail(found)
        spec = found.spec
        assert isinstance(spec, WgmmaSpec)
        assert found.programs_per_sm == 1
        assert spec.shared_bytes + DRIVER <= EVERYTHING[9, 0] < 2 * (spec.shared_bytes + DRIVER)
        assert spec.block_m == (32 if rows <= 32 else 64)
        assert spec.stages >= 3  # one is read by products that still run, one is worked on


@pytest.mark.parametrize(
    ("name", "n", "k", "rows", "spec"),
    [
        ("int4_sym_g128", 8192, 8192, 16, MmaSpec),
        ("int4_sym_g128", 4096, 4096, 32, WgmmaSpec),
        ("int4_sym_g128", 8192, 8192, 64, WgmmaSpec),
        ("int4_sym_g128", 4096, 4096, 33, LargeSpec),  # short tiles
        ("nf4", 6144, 4096, 64, WgmmaSpec),
        ("nf4", 1024, 4096, 64, LargeSpec),
        ("int4_sym_g128", 8192, 8192, 65, LargeSpec),
        ("int4_sym_g128", 8192, 8192, 8192, LargeSpec),
    ],
)
def test_rows_choose_the_kernel(name: str, n: int, k: int, rows: int, spec: type) -> None:
    assert type(getattr(on_hopper(name, n, k, rows), "spec", None)) is spec


@pytest.mark.parametrize(
    ("name", "n", "k", "rows", "programs"),
    [
        ("int4_sym_g128", 4096, 4096, 32, 128),
        ("int4_sym_g128", 8192, 8192, 64, 128),
        ("int4_sym_g128", 16384, 16384, 32, 128),
        ("int4_sym_g128", 8192, 8192, 128, 128),  # 64 tiles, for two blocks of x each
        ("int4_sym_g128", 8192, 8192, 129, 131),
        ("int4_sym_g128", 6144, 4096, 64, 128),  # 48 tiles: two parts of each would leave a quarter of the GPU idle
        ("nvfp4", 128, 256, 33, 1),
        ("int4_sym_g128", 28672, 4096, 64, 112),  # tiles of 256 rows, none of which is split
        ("int4_sym_g128", 16384, 4096, 65, 128),
        ("int4_g64", 28672, 4096, 64, 128),
        ("int4_sym_g128", 4096, 4224, 32, 128),  # 33 scales of a row
    ],
)
def test_how_warp_groups_share_the_work(name: str, n: int, k: int, rows: int, programs: int) -> None:
    found = wgmma_plan(problem(name, n, k, rows, "bf16"), H200, use_pdl=True)
    assert isinstance(found, GemmPlan)
    assert isinstance(found.spec, WgmmaSpec)
    assert found.programs == programs


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["int4_sym_g128", "int4_g32", "int4_sym_col", "int8_col", "int8_g128", "nf4", "mxfp4", "nvfp4"])
def test_many_rows_fill_a_multiprocessor(name: str, dtype: str) -> None:
    """Codes, mbarriers, the codebook and x lie one behind the other."""
    if (name, dtype) == ("mxfp4", "fp16"):
        pytest.skip("refused: see test_scales_beyond_fp16_are_not_multiplied_in_it")
    for rows in (65, 192, 512, 4096):
        found = on_hopper(name, 8192, 8192, rows, dtype)
        assert isinstance(found, GemmPlan)
        spec = found.spec
        assert isinstance(spec, LargeSpec)
        weight = spec.weights[0]
        table = weight.codebook_at(spec), weight.codebook_at(spec) + CODEBOOK_BYTES
        assert spec.x_at >= spec.barriers_at + 16 * spec.x_stages
        assert not weight.codebook or (spec.barriers_at + 16 * spec.x_stages <= table[0] and table[1] <= spec.x_at)
        assert spec.x_stages * spec.chunk >= 256  # MMAs read 128 k, and as many are on their way
        assert spec.shared_bytes + DRIVER <= EVERYTHING[9, 0]


@pytest.mark.parametrize(
    ("n", "k", "rows", "programs", "block_m", "split", "how"),
    [
        (8192, 8192, 512, 128, 256, 0, "data-parallel"),
        (8192, 8192, 8192, 128, 256, 0, "data-parallel"),
        (4096, 4096, 512, 128, 256, 64, "split-K, 2 parts a tile"),
        (6144, 4096, 128, 96, 128, 48, "split-K, 2 parts a tile"),
        (28672, 4096, 128, 112, 128, 0, "data-parallel"),
        (6144, 4096, 512, 96, 256, 0, "data-parallel"),
        (4096, 14336, 512, 128, 256, 64, "split-K, 2 parts a tile"),
        (28672, 4096, 512, 132, 256, 52, "data-parallel, then split-K, 2 parts a tile"),
        (128, 4096, 192, 12, 64, 3, "split-K, 4 parts a tile"),
    ],
)
def test_how_many_rows_share_the_work(n: int, k: int, rows: int, programs: int, block_m: int, split: int, how: str) -> None:
    found = on_hopper("int4_sym_g128", n, k, rows)
    assert isinstance(found, GemmPlan)
    assert (found.programs, found.spec.block_m, found.split_tiles) == (programs, block_m, split)
    assert found.why.endswith(how)
    assert found.floats == (programs * 128 * block_m if split else 1)


@pytest.mark.parametrize(
    ("name", "n", "k", "rows", "device", "why"),
    [
        ("int4_sym_g128", 4096, 4096, 17, {"capability": (10, 0)}, "compute capability 10.0; wgmma needs 9.0"),
        ("nf4_dq", 4096, 4096, 32, {}, "nf4_dq is read by the portable kernel only"),
        ("int8_col", 4096, 4104, 32, {}, "not a multiple of 16"),
        ("int4_sym_g128", 4096, 4096, 512, {"capability": (10, 0)}, "compute capability 10.0; wgmma needs 9.0"),
        ("nf4_dq", 4096, 4096, 512, {}, "nf4_dq is read by the portable kernel only"),
        ("int8_col", 4096, 4104, 512, {}, "not a multiple of 16"),
        ("int4_sym_g128", 4096, 4096, 1 << 25, {}, "the kernel numbers up to 8388608 tiles"),
    ],
)
def test_what_warp_groups_refuse(name: str, n: int, k: int, rows: int, device: dict[str, Any], why: str) -> None:
    found = on_hopper(name, n, k, rows, **device)
    assert isinstance(found, str)
    assert why in found


@pytest.mark.parametrize(
    ("name", "k", "rows", "chunk"),
    [("int4_g128", 4096, 128, 128), ("int4_g128", 4096, 512, 64), ("int4_g128", 8192, 128, 64), ("nf4", 8192, 128, 128)],
)
def test_copies_for_large_m_are_of_whole_steps_where_these_are_faster(name: str, k: int, rows: int, chunk: int) -> None:
    found = on_hopper(name, 28672, k, rows)
    assert isinstance(found, GemmPlan)
    assert isinstance(found.spec, LargeSpec)
    assert found.spec.chunk == chunk


@pytest.mark.parametrize("sms", [114, 132])
@pytest.mark.parametrize(
    ("n", "k"),
    [((8192, 8192), 3072), ((8192, 8192), 2048), (4096, 4096), ((14336, 14336), 4096), ((9728, 9728), 2560), (128256, 2048)],
)
def test_every_part_of_a_tile_for_large_m_has_steps(n: int | tuple[int, ...], k: int, sms: int) -> None:
    """A part without a step would not arrive at the exchange: its tile would stay unwritten, and its semaphore set."""
    for rows in range(65, 8193, 64):
        plan = large_plan(problem("int4_sym_g128", n, k, rows, "bf16"), H200._replace(num_sms=sms), use_pdl=True)
        assert isinstance(plan, GemmPlan)
        assert parts_of(plan.tiles, plan.programs) <= plan.steps, f"M = {rows}: {plan.why}"


def test_scales_beyond_fp16_are_not_multiplied_in_it() -> None:
    assert "E8M0" in str(large_plan(problem("mxfp4", 4096, 4096, 512, "fp16"), H200, use_pdl=True))
    assert isinstance(large_plan(problem("mxfp4", 4096, 4096, 512, "bf16"), H200, use_pdl=True), GemmPlan)


@pytest.mark.parametrize(("capability", "num_sms"), [((8, 6), 82), ((8, 9), 128), ((12, 0), 170)])
def test_experts_of_one_token_share_an_sm_as_far_as_its_memory_reaches(capability: tuple[int, int], num_sms: int) -> None:
    """100 KB hold two programs where 228 KB hold four."""
    routing = Routing(128, 8)
    p = problem("int4_sym_g128", 1536, 2048, 1, "bf16")._replace(routing=routing)
    plan = mma_plan(p, H200._replace(capability=capability, num_sms=num_sms), use_pdl=True)
    assert isinstance(plan, GemmPlan), plan
    taken = plan.spec.shared_bytes + DRIVER
    assert plan.programs_per_sm == 2
    assert 2 * taken <= EVERYTHING[8, 9] < 3 * taken
