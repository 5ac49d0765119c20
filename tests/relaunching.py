"""A CPU that stands in for a GPU where calls are launched like an earlier one: kernels are neither compiled nor run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from halfbyte import KV_FORMATS
from halfbyte.kv_buffer import KVBuffer, new_kv_buffer
from halfbyte.ops import _launch_cache


class Watched(torch.Tensor):
    """A subclass, which wants to see what is done with it."""


def misaligned(t: torch.Tensor) -> torch.Tensor:
    """The same shape and strides, one element behind an address that is a multiple of 16."""
    made = t.new_zeros(t.untyped_storage().nbytes() // t.element_size() + 1)[1:].as_strided(t.shape, t.stride())
    assert made.data_ptr() % 16
    return made


def spread(t: torch.Tensor) -> torch.Tensor:
    """The same shape with twice the strides."""
    return t.new_zeros(2 * t.untyped_storage().nbytes()).as_strided(t.shape, [2 * s for s in t.stride()])


def longer(t: torch.Tensor) -> torch.Tensor:
    return t.new_zeros(t.shape[0] + 1, *t.shape[1:])


def addresses(arguments: Any) -> Any:
    """Tensors as their addresses, in tuples too."""
    if isinstance(arguments, torch.Tensor):
        return arguments.data_ptr()
    return tuple(map(addresses, arguments)) if isinstance(arguments, tuple | list) else arguments


_OTHER_TYPE = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16, torch.float32: torch.float64}
#: Ways in which a tensor becomes one of other facts.
WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "misaligned": misaligned,
    "strides": spread,
    "shape": longer,
    "dtype": lambda t: t.to(_OTHER_TYPE.get(t.dtype, torch.int16)),
}
#: What every kind of call is found by, too.
ENVIRONMENT = [("HALFBYTE_PDL", "0"), ("HALFBYTE_IMPL", "triton")]


def pages(fmt: str) -> KVBuffer:
    """A small plane of pages."""
    return new_kv_buffer(KV_FORMATS[fmt], (8, 2, 16, 64), (2, 2, 1, 64), torch.bfloat16, "cpu")


class Launches(dict[Any, Any]):
    """A launch cache that writes down the results of replays."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []

    def __setitem__(self, key: Any, entry: Any) -> None:
        launch, formats = entry
        super().__setitem__(key, (lambda *args: self.results.append(launch(*args)) or self.results[-1], formats))


def watch_launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """An empty launch cache from now on, to look into."""
    launches = Launches()
    monkeypatch.setattr(_launch_cache, "_launches", launches)
    return launches


@dataclass
class Compiled:
    """A compiled kernel as Triton hands it out. `launched`: arguments of each launch; `hooked`: of those with hooks."""

    launched: list[tuple[Any, ...]] = field(default_factory=list)
    hooked: list[tuple[Any, ...]] = field(default_factory=list)
    function: int = 11
    packed_metadata: tuple[int, ...] = (4, 1, 100)

    def run(self, *args: Any) -> None:
        self.launched.append(args)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, stream=None: self.hooked.append((grid, stream, args))


@dataclass
class Gpu:
    """What a CPU pretends: kernels that were launched the long way, and those that were launched again."""

    kernel: Compiled
    first: list[tuple[Any, Any]] = field(default_factory=list)  # arguments and grid
    floats: torch.Tensor = field(default_factory=lambda: torch.zeros(1 << 18))
    counters: torch.Tensor = field(default_factory=lambda: torch.zeros(1 << 12, dtype=torch.int32))
    recording: bool = False

    def shared(self, device: torch.device, floats: int, counters: int) -> Any:
        assert floats <= self.floats.numel()
        assert counters <= self.counters.numel()
        return None if self.recording else (7, self.floats, self.counters)
