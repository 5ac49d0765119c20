"""The variants of the kernel that merges attention over disjoint sets of keys."""

from __future__ import annotations

import torch

from halfbyte.kernels.compiling import Configuration, empty, recorded
from halfbyte.kernels.decode.merge import launch


def configurations() -> list[Configuration]:
    """Two parts of a prompt, and three of a split sequence with sinks."""
    return [*_variant(2, (2, 32, 512, 128), torch.bfloat16), *_variant(3, (4, 64, 1, 80), torch.float16, sinks=True)]


def _variant(parts: int, shape: tuple[int, ...], dtype: torch.dtype, sinks: bool = False) -> list[Configuration]:
    outs = [empty(*shape, dtype=dtype) for _ in range(parts)]
    lses = [empty(*shape[:3], dtype=torch.float32) for _ in range(parts)]
    sink = empty(shape[1], dtype=torch.float32) if sinks else None
    return recorded(f"{parts}-parts{'-sinks' * sinks}", lambda: launch(outs, lses, sink, outs[0], lses[0]))
