"""Peers: other implementations of what halfbyte does, each behind a small adapter that says whether it runs here, and why not.

An adapter turns the inputs of a case into calls that can be timed. What a peer computes is judged like everything else: relative L2
error against float64 over the numbers that it holds itself, at most 1 %; a peer that is wrong gets no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from halfbyte.device import Device

Call = Callable[[], torch.Tensor]
#: How many copies of so many bytes make a rotation.
Copies = Callable[[int], int]


@dataclass(frozen=True)
class Prepared:
    """A peer on one case: its rotation of calls, the bytes that each reads, and the keys and values or the weight that it holds."""

    calls: Sequence[Call]
    nbytes: int
    held: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Baseline:
    """One peer.

    op        "attention" or "linear"
    formats   what it reads, as records say it
    prepare   (q, k, v, copies) or (x, w, copies) to what is timed; None: `decode.candidates` and `linear.candidates` bring it
    packages  modules that must be installed, by `pip install` of `install`
    gpu       whether it needs an NVIDIA GPU
    """

    name: str
    op: str
    formats: str
    prepare: Callable[..., Prepared] | None = None
    packages: tuple[str, ...] = ()
    install: str = ""
    gpu: bool = False

    def missing(self, device: Device) -> str:
        """Why it does not run on `device`; "" when it does."""
        absent = [name for name in self.packages if not _installed(name)]
        reasons = [f"not installed: pip install {self.install}"] if absent else []
        reasons += ["needs an NVIDIA GPU"] if self.gpu and device.kind != "cuda" else []
        return "; ".join(reasons)


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package around it is missing
        return False
