"""What the few-rows kernel copies into shared memory, without a GPU: its own functions, run by all threads of a block.

After each step every byte of shared memory is compared with what the readers' layouts expect there; what nothing is copied to
keeps the noise that was in it. Of a step that is not wanted no codes are copied, and x and scales are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from halfbyte.device import H200
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.kernels.common.layouts import code_ring_layout
from halfbyte.kernels.linear import async_copy, ring, sync
from halfbyte.kernels.linear.ring import Weights
from halfbyte.plans.gemm_mma import mma_plan
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.plans.gemm_spec import MmaSpec
from machine.arithmetic import Array
from machine.inline import Threads, on_block
from machine.memory import SHARED

#: Columns of each format: some whole steps, and a tail that the format allows.
WIDTHS = {"int4_sym_g128": 2304, "int4_g128": 2560, "int4_g32": 2176, "int4_sym_g32_fp32": 2144, "int4_sym_col": 2144}
WIDTHS |= {"int8_col": 2256, "int8_g128": 2304, "nf4": 2240, "mxfp4": 2176, "nvfp4": 2112}


def planned(name: str, rows: int, n: int) -> MmaSpec:
    """For two weights of n / 2 rows."""
    weight = (WEIGHT_FORMATS[name], n // 2)
    found = mma_plan(GemmProblem((weight, weight), rows, WIDTHS[name], "bf16"), H200, use_pdl=True)
    assert not isinstance(found, str), found
    assert isinstance(found.spec, MmaSpec)
    return found.spec


@dataclass
class Tensors:
    """Bytes in the GPU's memory, row after row; noise is between them. x has rows that lie `gap` numbers apart."""

    memory: Array
    at: dict[str, int]
    rows: dict[str, Array]

    @classmethod
    def of(cls, spec: MmaSpec, width: int, rows: int, features: tuple[int, ...], gap: int) -> Tensors:
        weight = spec.weights[0]
        groups = width // weight.group if weight.group else 0
        shapes = {"x": (rows, 2 * (width + gap))}
        for i, n in enumerate(features):
            shapes |= {f"codes{i}": (n, 2 * width // weight.codes_per_word), f"scales{i}": (n, groups * weight.scale_bytes)}
            shapes |= {f"zeros{i}": (n, groups * weight.zero)}
        at, end = {}, 128
        for name, (n, size) in shapes.items():
            at[name], end = end, -(-(end + n * size + 128) // 128) * 128
        memory = np.random.default_rng(1).integers(1, 256, end, np.uint8)
        return cls(memory, at, {name: memory[at[name] :][: n * size].reshape(n, size) for name, (n, size) in shapes.items()})

    def address(self, name: str) -> torch.Tensor:
        return torch.tensor([[[self.memory.ctypes.data + self.at[name]]]])


def expect_codes(shared: Array, codes: Array, slot: int, step: int, spec: MmaSpec) -> None:
    """codes: bytes of the rows of a tile, up to where K ends."""
    words = spec.weights[0].words(spec)
    layout = code_ring_layout(words)
    ring = shared[: spec.x_at].view(np.int16).reshape(-1, spec.k_slices, spec.tile, words)
    row, column = np.indices((spec.tile, words))
    phase = row // layout.per_phase % layout.max_phase
    swizzled = (column // layout.vec ^ phase) * layout.vec + column % layout.vec
    for w in range(spec.k_slices):
        first = (step * spec.k_slices + w) * words
        there = codes.view(np.int16)[:, first : first + words]
        inside = tuple(slice(0, n) for n in there.shape)
        ring[slot, w][row[inside], swizzled[inside]] = there


def expect_x(shared: Array, x: Array, slot: int, step: int, spec: MmaSpec) -> None:
    """x: bytes of its rows, up to where K ends."""
    shape = (spec.stages, spec.k_slices, spec.x_high, spec.chunk // 32, spec.x_low, 32)
    ring = shared[spec.x_at : spec.scales_at].view(np.int16).reshape(shape)
    there = x.view(np.int16)[:, step * spec.step : (step + 1) * spec.step]
    for m, row in enumerate(there):
        whole = np.pad(row, (0, spec.step - row.size))
        ring[slot, :, m // spec.x_low, :, m % spec.x_low, :] = whole.reshape(spec.k_slices, -1, 32)


def expect_scales(ring: Array, scales: Array, slot: int, step: int, size: int, spec: MmaSpec) -> None:
    """Scales (or zero points) of `size` bytes: those of the rows of a tile, up to where K ends."""
    each = spec.columns(spec.weights[0]) * size
    there = scales[:, step * each : (step + 1) * each]
    ring[: spec.scale_slots * spec.tile * each].reshape(spec.scale_slots, spec.tile, each)[slot, : len(there)] = np.pad(
        there, ((0, 0), (0, each - there.shape[1]))
    )


def expected(
    block: Threads, tensors: Tensors, tile: tuple[str, int], slots: tuple[int, int], step: int, k: int, spec: MmaSpec
) -> Array:
    """Shared memory once a step of a tile of K = k is there. tile: which weight's, and its first row."""
    shared, weight = block.shared.bytes.copy(), spec.weights[0]
    rows = slice(tile[1], tile[1] + spec.tile)
    groups = k // weight.group if weight.group else 0
    expect_codes(shared, tensors.rows["codes" + tile[0]][rows, : 2 * k // weight.codes_per_word], slots[0], step, spec)
    expect_x(shared, tensors.rows["x"][:, : 2 * k], slots[0], step, spec)
    if weight.groups:
        scales = tensors.rows["scales" + tile[0]][rows, : groups * weight.scale_bytes]
        expect_scales(shared[spec.scales_at :], scales, slots[1], step, weight.scale_bytes, spec)
    if weight.zero:
        expect_scales(shared[spec.zeros_at :], tensors.rows["zeros" + tile[0]][rows, :groups], slots[1], step, 1, spec)
    return shared


#: Rows of x, and of all weights that are planned for: few make small tiles. The weights of the test have two tiles, and one.
SIZES = ((1, 28672), (2, 4096), (3, 28672), (8, 28672), (16, 4096), (16, 28672))
CASES = [(name, *size) for name in WIDTHS for size in SIZES]


@pytest.mark.parametrize(("name", "rows", "n"), CASES)
def test_a_step_comes_to_where_it_is_read(name: str, rows: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last two steps of a tile at the edge of the first weight and of one of the second, and one that is not wanted."""
    spec, width, gap = planned(name, rows, n), WIDTHS[name], 8
    weight, features = spec.weights[0], (2 * spec.tile - 11, spec.tile)
    tensors = Tensors.of(spec, width, rows, features, gap)
    block = Threads((spec.k_slices, spec.warps_m, 32), spec.ring_bytes, torch.from_numpy(tensors.memory))
    on_block(block, (async_copy, ring, sync), monkeypatch)
    sync.make_barriers(spec)
    addresses: list[tuple[torch.Tensor | None, ...]] = [
        tuple(tensors.address(f"{kind}{i}") for i in range(2)) for kind in ("codes", "scales", "zeros")
    ]
    if not weight.zero:
        addresses[2] = (None, None)
    nothing = (None, None)
    weights = Weights(*addresses, nothing, nothing, addresses[0], features)
    steps = -(-width // spec.step)
    for number, tile in ((1, ("0", spec.tile)), (2, ("1", 0))):
        there = min(spec.tile, features[int(tile[0])] - tile[1])
        step = torch.tensor([[[steps - 2]]], dtype=torch.int32)
        tile_number = torch.full_like(step, number)
        at = async_copy.weight_at(tile_number, step, weights, width, weight, spec)
        for i, wanted in enumerate((True, True, False)):
            slot, turn = (number + i) % spec.stages, number + i
            now = min(steps - 2 + i, steps - 1)
            scale_slot = turn % spec.scale_slots
            shared = expected(block, tensors, tile, (slot, scale_slot), now, width if wanted else 0, spec)
            block.meet_all()
            step.fill_(now)
            if weight.groups:
                before, asked = {at: one.phases for at, one in block.barriers.items()}, block.copies.asked
                at = async_copy.fetch_scales(torch.full_like(step, turn), at, step, wanted, width, weight, spec)
                full = SHARED + spec.barriers_at + 8 * scale_slot
                assert {at: one.phases for at, one in block.barriers.items()} == before | {full: before[full] + 1}
                assert all(one.missing == one.count for one in block.barriers.values())
                assert block.copies.asked - asked == there * spec.columns(weight) * (weight.scale_bytes + weight.zero), "once each"
            at = async_copy.fetch_codes(slot, at, step, wanted, width, weight, spec)
            async_copy.fetch_x(slot, step, wanted, tensors.address("x"), rows, width, width + gap, spec)
            wrong = np.flatnonzero(block.shared.bytes != shared)
            assert not wrong.size, f"bytes from {wrong[0]} on; x lies at {spec.x_at}, scales at {spec.scales_at}"


@pytest.mark.parametrize("name", WIDTHS)
def test_weights_may_be_larger_than_32_bits_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a tile begins, of a weight of 2^32 columns and rows: nothing is read."""
    spec, width, tile = planned(name, 1, 4096), 1 << 20, 1 << 20
    block = Threads((spec.k_slices, spec.warps_m, 32))
    on_block(block, (async_copy, ring, sync), monkeypatch)
    start, nothing = (torch.zeros(1, 1, 1, dtype=torch.int64),) * 2, (None, None)
    number = torch.tensor([[[tile]]], dtype=torch.int32)
    weight, many = spec.weights[0], (1 << 30, 1 << 30)
    zeros = start if weight.zero else nothing
    weights = Weights(start, start, zeros, nothing, nothing, start, many)
    at = async_copy.weight_at(number, 0, weights, width, weight, spec)
    row = tile * spec.tile
    groups = width // weight.group if weight.group else 0
    assert int(at[0].min()) == row * width // weight.codes_per_word * 2
    assert int(at[1].min()) == row * groups * weight.scale_bytes
    assert int(at[2].min()) == (row * groups if weight.zero else 0)


@pytest.mark.parametrize(("name", "rows", "n"), CASES)
def test_rings_lie_one_behind_the_other(name: str, rows: int, n: int) -> None:
    """In whole pieces of 128 bytes, as the one allocation counts them; the sums of a tile fit the slot that they take."""
    spec = planned(name, rows, n)
    weight = spec.weights[0]
    assert 0 < spec.x_at < spec.scales_at <= spec.zeros_at <= spec.barriers_at <= spec.ring_bytes <= spec.shared_bytes
    assert not any(at % 128 for at in (spec.x_at, spec.scales_at, spec.zeros_at, spec.barriers_at, spec.ring_bytes))
    if not spec.separate_reduce_smem:
        assert 4 * spec.k_slices * spec.partial_floats <= weight.slot_bytes(spec)
