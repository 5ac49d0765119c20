"""Facts about GPUs by compute capability, and what a plan is given where there is no GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest

from halfbyte import device
from halfbyte.device import (
    DRIVER_SHARED_BYTES,
    H200,
    INTERPRETER,
    Device,
    block_shared_memory,
    resident_blocks,
    sm_limits,
    sm_shared_memory,
    supports_pdl,
    supports_wgmma,
)

#: KB of shared memory of an SM and of a block, as the CUDA C++ Programming Guide has them.
SHARED = {(8, 0): (164, 163), (8, 6): (100, 99), (8, 7): (164, 163), (8, 9): (100, 99), (9, 0): (228, 227), (10, 0): (228, 227)}
SHARED |= {(10, 3): (228, 227), (12, 0): (100, 99)}


@pytest.mark.parametrize("capability", SHARED)
def test_shared_memory_is_as_documented(capability: tuple[int, int]) -> None:
    of_sm, of_block = SHARED[capability]
    assert sm_shared_memory(capability) == of_sm * 1024
    assert block_shared_memory(capability) == of_block * 1024


def test_an_unlisted_capability_gets_the_least_of_all() -> None:
    unknown = sm_limits((12, 1))
    assert all(mine <= theirs for c in SHARED for mine, theirs in zip(unknown, sm_limits(c), strict=True))
    assert block_shared_memory((12, 1)) == 99 * 1024


def test_pdl_is_there_from_hopper_on_and_wgmma_on_hopper_only() -> None:
    assert [c for c in SHARED if supports_pdl(c)] == [(9, 0), (10, 0), (10, 3), (12, 0)]
    assert [c for c in SHARED if supports_wgmma(c)] == [(9, 0)]


@pytest.mark.parametrize(
    ("block", "count"),
    [
        ({"threads": 128, "registers": 32, "shared_bytes": 0}, 16),  # threads: 2048 / 128
        ({"threads": 32, "registers": 32, "shared_bytes": 0}, 32),  # blocks
        ({"threads": 128, "registers": 128, "shared_bytes": 0}, 4),  # registers
        ({"threads": 128, "registers": 121, "shared_bytes": 0}, 4),  # registers come in eights
        ({"threads": 32, "registers": 32, "shared_bytes": 113 * 1024}, 2),  # shared memory, the driver's included
        ({"threads": 32, "registers": 32, "shared_bytes": 113 * 1024 + 1}, 1),
        ({"threads": 1024, "registers": 255, "shared_bytes": 0}, 1),  # never none
    ],
)
def test_occupancy_is_what_the_scarcest_resource_allows(block: dict[str, int], count: int) -> None:
    assert resident_blocks((9, 0), **block) == count


def test_occupancy_falls_as_shared_memory_grows() -> None:
    blocks = [resident_blocks((8, 0), threads=128, registers=64, shared_bytes=n * DRIVER_SHARED_BYTES) for n in range(163)]
    assert all(first >= second for first, second in pairwise(blocks))


def test_plans_get_facts_of_the_gpu_or_of_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Device("cuda", "NVIDIA L4", 1, 1, 1, 1, index=1, capability=(8, 9), sm_count=58)
    monkeypatch.setattr(device, "describe", lambda which: {"cuda:1": fake}[which])
    assert device.gpu(1) == ("NVIDIA L4", 58, (8, 9))
    assert device.gpu(-1) == INTERPRETER
    assert not supports_pdl(INTERPRETER.capability)
    assert supports_wgmma(H200.capability)
