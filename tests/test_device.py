"""Facts about GPUs by compute capability, and what a plan is given where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from itertools import pairwise

import pytest
import torch

from halfbyte import device, errors
from halfbyte.device import (
    DRIVER_SHARED_BYTES,
    H200,
    INTERPRETER,
    Device,
    block_shared_memory,
    sm_limits,
    sm_shared_memory,
    supports_pdl,
    supports_wgmma,
)
from halfbyte_lab.precompile import resident_blocks

#: KB of shared memory of an SM and of a block, as the CUDA C++ Programming Guide has them.
SHARED = {(8, 0): (164, 163), (8, 6): (100, 99), (8, 7): (164, 163), (8, 9): (100, 99), (9, 0): (228, 227), (10, 0): (228, 227)}
SHARED |= {(10, 3): (228, 227), (12, 0): (100, 99)}


CPUINFO = {
    "model name\t: Intel(R) Xeon(R) Processor\nmodel name\t: another core": "Intel(R) Xeon(R) Processor",
    "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\nCPU part\t: 0xd40": "aarch64, implementer 0x41, part 0xd0c",
    "processor\t: 0": "aarch64",
}


@pytest.mark.parametrize("text", CPUINFO)
def test_cpus_of_two_kinds_have_two_names(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on ARM, where /proc/cpuinfo has numbers: records of two machines are told apart by them."""
    monkeypatch.setattr(device.Path, "read_text", lambda path: text)
    monkeypatch.setattr(device.platform, "processor", str)
    monkeypatch.setattr(device.platform, "machine", lambda: "aarch64")
    assert device._cpu_name() == CPUINFO[text]


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


HALF = device.SpinWatch.LEAST


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What a watch sees: nanoseconds run and waited, which a look adds to those before; and where it is."""
    seen: dict[str, object] = {"each": (HALF, HALF), "threads": 2, "libgomp": True, "looks": 0, "sum": (0, 0)}

    def scheduled() -> tuple[int, int]:
        seen["looks"] += 1
        seen["sum"] = tuple(a + b for a, b in zip(seen["sum"], seen["each"], strict=True))
        return seen["sum"]

    monkeypatch.setattr(device, "_scheduled", scheduled)
    monkeypatch.setattr(device, "_has_libgomp", lambda: seen["libgomp"])
    monkeypatch.setattr(torch, "get_num_threads", lambda: seen["threads"])
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(errors, "_WARNED", set())
    for variable in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(variable, raising=False)
    return seen


def said_by(watch: device.SpinWatch, looks: int = 4) -> list[str]:
    """What is said in so many looks."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(looks * watch.EVERY):
            watch.step()
    return [str(one.message) for one in said]


def test_threads_that_spin_on_shared_cpus_are_told_once(watched: dict[str, object]) -> None:
    watch = device.SpinWatch()
    (said,) = said_by(watch)
    assert "torch's 2 threads spin" in said
    assert "GOMP_SPINCOUNT=3000" in said
    assert watched["looks"] == 2  # the first knows nothing yet, and none comes after the warning


@pytest.mark.parametrize(
    "change",
    [
        {"each": (99 * HALF, HALF)},  # a quiet machine
        {"each": (HALF // 8, HALF // 9)},  # too short to tell; longer spans come later
        {"each": (0, 0)},  # a Linux that does not count
        {"threads": 1},
        {"libgomp": False},
    ],
)
def test_a_quiet_machine_and_threads_that_do_not_spin_are_not_told(watched: dict[str, object], change: dict[str, object]) -> None:
    watched |= change
    assert said_by(device.SpinWatch(), looks=3) == []
    assert watched["looks"] == 3


@pytest.mark.parametrize("variable", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY", None])
def test_what_is_set_is_not_looked_at(watched: dict[str, object], monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    if variable is None:
        monkeypatch.setattr(sys, "platform", "darwin")
    else:
        monkeypatch.setenv(variable, "1")
    assert said_by(device.SpinWatch()) == []
    assert watched["looks"] == 0


def test_times_of_two_threads_are_not_compared(watched: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    watch, thread = device.SpinWatch(), [0]
    monkeypatch.setattr(threading, "get_ident", lambda: thread.append(0) or len(thread))
    assert said_by(watch) == []
    assert watched["looks"] == 4


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts how long threads wait for a CPU")
def test_ops_on_a_cpu_are_watched() -> None:
    """Real ops on a real machine, in a process without the variable, where anything at all is too much."""
    code = (
        "import sys; sys.modules['numba'] = None  # torch code, no compiled loops\n"
        "import torch, halfbyte; from halfbyte import device; torch.set_num_threads(2)\n"
        "device.SPINNING.LEAST, device.SPINNING.MOST = 1, -1.0\n"
        "w = halfbyte.quantize(torch.randn(64, 64), 'int4_col'); x = torch.randn(1, 64)\n"
        "cache = halfbyte.KVCache(1, 1, 64, 64, keys='int8', values='int8')\n"
        "k = torch.randn(1, 1, 4, 64); cache.append(k, k); q = torch.randn(1, 1, 1, 64)\n"
        "call = {'linear': lambda: halfbyte.linear(x, w), 'attention': lambda: halfbyte.decode_attention(q, cache)}[sys.argv[1]]\n"
        "for _ in range(80): call()"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    for op, more, told in (("linear", {}, 1), ("attention", {}, 1), ("linear", {"GOMP_SPINCOUNT": "3000"}, 0)):
        done = subprocess.run([sys.executable, "-c", code, op], env=environment | more, capture_output=True, text=True, check=True)
        assert done.stderr.count("threads spin while they wait") == told, (op, more, done.stderr)
