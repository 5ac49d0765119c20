"""FP8 with one scale a block of the weight, as DeepSeek V3 and the FP8 releases of Qwen3 are stored.

weight            E4M3 [N, K]
weight_scale_inv  [ceil(N / 128), ceil(K / 128)]    a factor, whatever its name; blocks at the edges are smaller

value = code * scale in fp32, rounded once. Scales of activations (`activation_scheme`) are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from halfbyte.checkpoints.layer import SCALE_TYPES, Expanded, StoredLayer, only, setting
from halfbyte.errors import CheckpointError, Unsupported


class BlockFp8(Expanded):
    """E4M3 codes in blocks, of any size that the configuration names."""

    docs = (
        (
            "`fp8`",
            "blocks of 128 x 128, as DeepSeek V3 and Qwen3-FP8 are released: multiplied out in fp32, and rounded again",
            "what `weights=` names",
        ),
    )
    marker = "weight_scale_inv"
    parts = ("weight", "weight_scale_inv")
    unused = ("input_scale", "activation_scale")

    def __init__(self, config: Mapping[str, Any]) -> None:
        name = "an FP8 checkpoint"
        only(config, "fmt", ("e4m3",), "e4m3", name)
        only(config, "expert_dtype", ("fp8",), "fp8", name)
        block = setting(config, "weight_block_size", list, None)
        if block is None:
            raise Unsupported(f"{name} without weight_block_size; halfbyte reads scales of blocks, such as [128, 128]")
        if len(block) != 2 or not all(type(size) is int and 0 < size < 2**31 for size in block):
            raise CheckpointError(f"quantization_config has weight_block_size={repr(block)[:80]}; expected two positive integers")
        self.block: tuple[int, int] = (block[0], block[1])

    def values(self, layer: StoredLayer) -> torch.Tensor:
        n, k = layer.out_features, layer.in_features
        rows, columns = self.block
        codes = layer.tensor("weight", (n, k), torch.float8_e4m3fn).float()
        if not bool(torch.isfinite(codes).all()):
            layer.refuse("weight", "holds NaN; the file is damaged")
        grid = (math.ceil(n / rows), math.ceil(k / columns))
        scales = layer.tensor("weight_scale_inv", grid, *SCALE_TYPES).float()
        layer.check_scales("weight_scale_inv", scales, positive=False)
        for first in range(grid[0]):  # one row of blocks at a time: no second weight in memory
            codes[first * rows : (first + 1) * rows] *= scales[first].repeat_interleave(columns)[:k]
        return codes
