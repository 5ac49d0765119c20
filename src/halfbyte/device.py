"""What this machine is, and what a GPU of each compute capability can do.

Plans take a `Device`, a `GPU` or a capability, so that a test can pass a fake.
Limits by capability are those of the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; memory and
bandwidth by name are those of NVIDIA's data sheets.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from halfbyte.errors import CapacityError, InvalidArgument, Unsupported, check, warn_once

Capability = tuple[int, int]


class GPU(NamedTuple):
    """The facts of a GPU that plans depend on."""

    name: str
    num_sms: int
    capability: Capability


#: The default without a GPU: `halfbyte explain` describes it, and kernels are compiled for it ahead of time.
H200 = GPU("NVIDIA H200", 132, (9, 0))
#: What plans assume in Triton's interpreter: few SMs, so that small tests share work among programs, and no PDL.
INTERPRETER = GPU("", 8, (8, 0))


class SMLimits(NamedTuple):
    """What a streaming multiprocessor (SM) holds at a time."""

    shared_bytes: int
    threads: int
    blocks: int
    registers: int = 65536


#: By capability. Others get `_LEAST`, the minimum of each.
_SM_LIMITS = {
    (8, 0): SMLimits(164 << 10, 2048, 32),
    (8, 6): SMLimits(100 << 10, 1536, 16),
    (8, 7): SMLimits(164 << 10, 1536, 16),
    (8, 9): SMLimits(100 << 10, 1536, 24),
    (9, 0): SMLimits(228 << 10, 2048, 32),
    (10, 0): SMLimits(228 << 10, 2048, 32),
    (10, 3): SMLimits(228 << 10, 2048, 32),
    (12, 0): SMLimits(100 << 10, 1536, 24),
}
_LEAST = SMLimits(100 << 10, 1536, 16)
#: Shared memory that the driver reserves for itself in every resident block, on top of what the kernel allocates.
DRIVER_SHARED_BYTES = 1 << 10


def sm_limits(capability: Capability) -> SMLimits:
    """The limits of one SM."""
    return _SM_LIMITS.get(capability, _LEAST)


def sm_shared_memory(capability: Capability) -> int:
    """Bytes of shared memory of one SM, which its resident blocks divide; each also takes `DRIVER_SHARED_BYTES` of it."""
    return sm_limits(capability).shared_bytes


def block_shared_memory(capability: Capability) -> int:
    """The most bytes of shared memory that one block can allocate."""
    return sm_shared_memory(capability) - DRIVER_SHARED_BYTES


@dataclass(frozen=True)
class Datasheet:
    """Memory in bytes and its bandwidth in bytes per second; None where it is not known."""

    memory_bytes: int
    bytes_per_second: float | None


#: By the words of a GPU's name, joined by dashes: (GB of memory, GB/s).
DATASHEETS = {
    name: Datasheet(gb * 10**9, rate * 1e9)
    for name, gb, rate in (
        ("a10", 24, 600),
        ("a100-40gb", 40, 1555),
        ("a100-80gb", 80, 2039),
        ("b200", 180, 8000),
        ("h100", 80, 3350),
        ("h100-nvl", 94, 3900),
        ("h100-pcie", 80, 2000),
        ("h200", 141, 4800),
        ("l4", 24, 300),
        ("l40s", 48, 864),
        ("rtx-3090", 24, 936),
        ("rtx-4090", 24, 1008),
        ("rtx-5090", 32, 1792),
        ("rtx-6000-ada", 48, 960),
    )
}
#: Words in names of variants with another bandwidth.
_OTHER_VARIANTS = {"ti", "super", "laptop", "mig"}


def datasheet_name(gpu: str) -> str | None:
    """The key in `DATASHEETS` of a name that the driver gives, such as "NVIDIA H100 80GB HBM3"; None if there is none."""
    words = set(re.findall(r"[a-z0-9]+", gpu.lower()))
    names = [name for name in DATASHEETS if words.issuperset(name.split("-"))]
    return None if not names or words & _OTHER_VARIANTS else max(names, key=len)


def supports_pdl(capability: Capability) -> bool:
    """Whether kernels can be launched with programmatic dependent launch (PDL): from Hopper on."""
    return capability >= (9, 0)


def supports_wgmma(capability: Capability) -> bool:
    """Whether there are warp-group MMA instructions (`wgmma`): on Hopper only."""
    return capability == (9, 0)


@dataclass(frozen=True)
class Device:
    """One device, as plain data.

    cache_bytes    last-level cache, which a cold measurement must exceed: L2 of a GPU, L3 of a CPU; 0 when unknown
    memory_bytes   total memory; on a CPU at most the container's limit
    capability     CUDA compute capability, (9, 0) for an H200; None on a CPU
    sm_count       streaming multiprocessors; None on a CPU
    driver         version of the kernel driver, "" when unknown or on a CPU
    cores, threads logical CPUs that the process may use, threads that torch uses; both of the CPU, always set
    """

    kind: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int
    cache_bytes: int
    cores: int
    threads: int
    index: int | None = None
    capability: Capability | None = None
    sm_count: int | None = None
    driver: str = ""

    @property
    def torch(self) -> torch.device:
        return torch.device("cpu") if self.index is None else torch.device(self.kind, self.index)

    @property
    def gpu(self) -> GPU:
        return GPU(self.name, self.sm_count or 1, self.capability or (0, 0))


def describe(device: torch.device | str | int | None = None) -> Device:
    """Describe `device`; None takes the current GPU if there is one, else the CPU."""
    target = _parse(device)
    if target.type == "cpu":
        return Device("cpu", _cpu_name(), _cpu_memory(), _cpu_cache(), _cores(), torch.get_num_threads())
    if target.type != "cuda":
        raise Unsupported(f"device={str(device)!r} is of kind {target.type!r}; halfbyte runs on 'cpu' and 'cuda'")
    return _describe_cuda(target)


def check_room(nbytes: float, device: torch.device, what: str) -> None:
    """Raise `CapacityError` for what no memory of the device could hold, before any of it is touched."""
    if nbytes < 2**30 or device.type not in ("cpu", "cuda") or torch.compiler.is_compiling():
        return
    memory = describe(device).memory_bytes
    if 0 < memory < nbytes:
        raise CapacityError(f"{what} take {nbytes / 1e9:,.1f} GB, and {device} has {memory / 1e9:,.1f} GB; pass fewer")


def gpu(index: int) -> GPU:
    """The `GPU` of index `index`; -1: Triton's interpreter."""
    return INTERPRETER if index < 0 else describe(f"cuda:{index}").gpu


def gpu_count() -> int:
    """How many GPUs torch sees; 0 without a CUDA build."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@functools.cache
def triton_version() -> tuple[int, int]:
    """(major, minor) of the installed Triton; (0, 0) without one."""
    try:
        import triton
    except ImportError:
        return (0, 0)
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def _parse(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if gpu_count() else "cpu")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise InvalidArgument(f"device={device!r} is not a device; use 'cpu', 'cuda' or 'cuda:N'") from error


def _describe_cuda(wanted: torch.device) -> Device:
    count = gpu_count()
    if not count:
        raise Unsupported(f"device={str(wanted)!r}, but torch {torch.__version__} sees no GPU here; use device='cpu'")
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    check(0 <= index < count, f"device={str(wanted)!r}, but there are {count} GPUs, cuda:0 to cuda:{count - 1}")
    facts = torch.cuda.get_device_properties(index)
    return Device(
        kind="cuda",
        name=facts.name,
        memory_bytes=facts.total_memory,
        cache_bytes=int(getattr(facts, "L2_cache_size", 0)),
        cores=_cores(),
        threads=torch.get_num_threads(),
        index=index,
        capability=(facts.major, facts.minor),
        sm_count=facts.multi_processor_count,
        driver=_driver(),
    )


def _driver() -> str:
    """The NVIDIA driver's version from /proc (no library needed), "" if not available."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""
    numbers = [word for word in first.split() if word[0].isdigit() and "." in word]
    return numbers[0] if numbers else ""


def _cores() -> int:
    """Logical CPUs this process may run on, in a container often fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    """Of an ARM CPU, whose name the system does not say, the numbers of its designer and its kind."""
    facts: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            fact, _, value = line.partition(":")
            facts.setdefault(fact.strip().lower(), value.strip())
    except OSError:
        pass
    numbers = [f"{name} {facts[f'cpu {name}']}" for name in ("implementer", "part") if f"cpu {name}" in facts]
    return facts.get("model name") or ", ".join([platform.processor() or platform.machine() or "CPU", *numbers])


@functools.cache
def cpu_has_bf16() -> bool:
    """Whether the CPU has instructions for products of bf16."""
    facts = torch.cpu.get_capabilities()
    return any(facts.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def fastest_type(half: torch.dtype, device: torch.device) -> torch.dtype:
    """The type that a 16-bit model computes in fastest: its own, or fp32 on a CPU without instructions for it."""
    return half if device.type == "cuda" or (half is torch.bfloat16 and cpu_has_bf16()) else torch.float32


def _cpu_memory() -> int:
    """Bytes of memory: the machine's, or the container's limit if that is lower."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def _cpu_cache() -> int:
    """Bytes of the largest cache that core 0 sees; 0 when the system does not say."""
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        factor = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 0)
        if factor and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * factor)
    return max(sizes)


class SpinWatch:
    """Warns once if torch's OpenMP threads, which spin while they wait for each other, share their CPUs with other programs.

    Linux counts how long a runnable thread waits for a CPU: on an idle machine less than 1 % of its time, next to a busy program
    up to 40 %. The command line sets GOMP_SPINCOUNT; a library cannot, because OpenMP reads it when torch is loaded.
    """

    #: Calls between two checks, nanoseconds that must have passed in between, and the fraction spent waiting that is too much.
    EVERY, LEAST, MOST = 64, 500_000_000, 0.1

    def __init__(self) -> None:
        self._on = sys.platform == "linux" and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
        self._calls, self._thread, self._before = 0, 0, (0, 0)

    def step(self) -> None:
        """CPU attention and GEMMs call this; one call in `EVERY` checks."""
        if self._on:
            if self._calls % self.EVERY == 0:
                self._look()
            self._calls += 1

    def _look(self) -> None:
        here, thread = _scheduled(), threading.get_ident()
        ran, queue_time = (now - then for now, then in zip(here, self._before, strict=True))
        if thread != self._thread:
            self._thread, self._before = thread, here
        elif ran + queue_time >= self.LEAST:
            self._before = here
            if queue_time > self.MOST * (ran + queue_time) and torch.get_num_threads() > 1 and _has_libgomp():
                self._on = False
                warn_once(
                    f"other programs use these CPUs, and torch's {torch.get_num_threads()} threads spin while they wait for each "
                    "other, which can make a call several times slower; set GOMP_SPINCOUNT=3000 in the environment before Python "
                    "starts, or call torch.set_num_threads(1)"
                )


#: Shared by the ops on a CPU.
SPINNING = SpinWatch()


def _scheduled() -> tuple[int, int]:
    """Nanoseconds that this thread has run, and has waited for a CPU; zeros where Linux does not count them."""
    try:
        ran, queue_time, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):
        return 0, 0
    return int(ran), int(queue_time)


def _has_libgomp() -> bool:
    """Whether GNU's OpenMP is loaded, which reads GOMP_SPINCOUNT."""
    try:
        return b"libgomp" in Path("/proc/self/maps").read_bytes()
    except OSError:
        return False
