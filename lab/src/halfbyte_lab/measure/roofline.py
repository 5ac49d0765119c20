"""The roofline: how fast this machine reads, copies and multiplies, measured in the same run as what is compared with it.

The read roofline is the best of several read-only torch reductions over the same number of bytes, and on a GPU of several shapes
of a Triton kernel that only reads. It is a lower bound on what the memory can do: a kernel that shows more than 100 % of it reads
faster than any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from halfbyte.device import Device
from halfbyte.errors import check
from halfbyte_lab.measure.checks import BenchmarkRefused
from halfbyte_lab.measure.timing import Call, Effort, measure, measure_interleaved, rotation_copies

Reader = Callable[[torch.Tensor], torch.Tensor]
Copier = Callable[[torch.Tensor, torch.Tensor], object]

#: Read-only reductions of a float32 vector. Which is fastest depends on the machine and the size, so all are tried.
READERS: dict[str, Reader] = {
    "torch.sum": torch.sum,
    "torch.amax": torch.amax,
    "torch.dot": lambda x: torch.dot(x, x),
    "matrix-vector product in fp32": lambda x: _times_ones(x),
    "matrix-vector product in bf16": lambda x: _times_ones(x.view(torch.bfloat16)),
}
_CACHED_ONES: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

#: Bytes of a matrix row in the products: 8,192 bf16 numbers, as long as the rows of a large layer.
_ROW = 2**14


@dataclass(frozen=True)
class Roof:
    """Bytes per second (10^9) of reading `nbytes`, and which reader was fastest."""

    nbytes: int
    gb_per_s: float
    reader: str


@dataclass
class Roofline:
    """Measures the read roofline once for each number of bytes and remembers it."""

    device: Device
    threads: int
    effort: Effort
    known: dict[int, Roof] = field(default_factory=dict)

    def read(self, nbytes: int) -> Roof:
        """The read roofline at `nbytes`, cold."""
        if nbytes not in self.known:
            self.known[nbytes] = self._measure_read(nbytes)
        return self.known[nbytes]

    def _measure_read(self, nbytes: int) -> Roof:
        buffers = _buffers(nbytes, self.device)
        actual = buffers[0].nbytes
        candidates = {name: [_bind(reader, x) for x in buffers] for name, reader in self._readers(buffers[0]).items()}
        times = measure_interleaved(candidates, device=self.device, threads=self.threads, effort=self.effort)
        best = min(times, key=lambda name: times[name].median)
        return Roof(nbytes, actual / times[best].median / 1e9, best)

    def _readers(self, x: torch.Tensor) -> dict[str, Reader]:
        """What reads; a kernel of ours that does not read all of `x` is no roofline."""
        if self.device.kind != "cuda":
            return torch_readers(x)
        from halfbyte_lab.measure.roofline_kernels import readers

        ours = readers(self.device.sm_count or 1)
        expected = int(x.view(torch.int32).sum())
        for name, reader in ours.items():
            if (int(reader(x).sum()) - expected) % 2**32:
                raise BenchmarkRefused(
                    f"the read roofline, {name}: its sum over {x.nbytes} bytes is not torch's; report this as a bug"
                )
        return {**torch_readers(x), **ours}

    def copy(self, nbytes: int) -> float:
        """10^9 bytes per second of a copy of `nbytes`, its reads and writes counted."""
        seconds, actual = self._measure_copy(nbytes)
        return 2 * actual / seconds / 1e9

    def copy_seconds(self, moved: int) -> float:
        """Seconds of the fastest copy kernel that moves `moved` bytes in all, half of them read and half written."""
        return self._measure_copy(moved // 2)[0]

    def _measure_copy(self, nbytes: int) -> tuple[float, int]:
        """Seconds of the fastest copy of about `nbytes`, and how many it copied."""
        pairs = [(torch.empty_like(x), x) for x in _buffers(nbytes, self.device)]
        copiers: dict[str, Copier] = {"torch": torch.Tensor.copy_}
        if self.device.kind == "cuda":
            from halfbyte_lab.measure import roofline_kernels

            copiers |= roofline_kernels.copiers()
        candidates = {name: [_bind_copy(copier, *pair) for pair in pairs] for name, copier in copiers.items()}
        times = measure_interleaved(candidates, device=self.device, threads=self.threads, effort=self.effort)
        return min(t.median for t in times.values()), pairs[0][0].nbytes

    def matmul(self, size: int) -> float:
        """10^12 operations per second of a bf16 product [size, size] x [size, size]."""
        check(size > 0, f"size={size}; it must be above 0")
        a = torch.randn(size, size, device=self.device.torch).bfloat16()
        b = torch.randn(size, size, device=self.device.torch).bfloat16()
        seconds = measure([lambda: a @ b], device=self.device, threads=self.threads, effort=self.effort).median
        return 2 * size**3 / seconds / 1e12


def torch_readers(x: torch.Tensor) -> dict[str, Reader]:
    """Those of torch that take as many numbers as x has: cuBLAS's dot counts them in 31 bits."""
    return {name: reader for name, reader in READERS.items() if name != "torch.dot" or x.numel() < 2**31}


def _bind(reader: Reader, x: torch.Tensor) -> Call:
    return lambda: reader(x)


def _bind_copy(copier: Copier, target: torch.Tensor, x: torch.Tensor) -> Call:
    return lambda: copier(target, x)


def _buffers(nbytes: int, device: Device) -> list[torch.Tensor]:
    """A rotation of float32 vectors of `nbytes` (a little less: whole rows for the products), enough of them to be cold."""
    check(nbytes >= 256, f"nbytes={nbytes}; a roofline needs at least 256 bytes")
    unit = _ROW if nbytes >= 64 * _ROW else 256
    numel = nbytes // unit * unit // 4
    # Random, as a cache is: constant data may cost the memory less.
    return [torch.rand(numel, device=device.torch) for _ in range(rotation_copies(nbytes, device))]


def _times_ones(x: torch.Tensor) -> torch.Tensor:
    """x as a matrix of long rows, times a vector of ones that is made only once, or making it would be part of what is timed."""
    row = _ROW if x.nbytes >= 64 * _ROW else 256
    key = (row // x.element_size(), x.dtype, x.device)
    if key not in _CACHED_ONES:
        _CACHED_ONES[key] = torch.ones(key[0], dtype=x.dtype, device=x.device)
    return torch.mv(x.view(-1, key[0]), _CACHED_ONES[key])
