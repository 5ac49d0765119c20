"""FP8 with a scale a block of the weight (DeepSeek V3, Qwen3-FP8), a row of it, or one in all.

weight            E4M3 [N, K]
weight_scale_inv  [ceil(N / 128), ceil(K / 128)]    a factor, whatever its name; blocks at the edges are smaller
weight_scale_inv, or weight_scale                   [] or [1]; [N] or [N, 1]: without weight_block_size, and in compressed-tensors

value = code * scale in fp32, rounded once. Scales of activations (`activation_scheme`) are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from halfbyte.checkpoints.compressed_tensors import CompressedTensors
from halfbyte.checkpoints.layer import Expanded, StoredLayer, only, setting
from halfbyte.errors import CheckpointError
from halfbyte.formats import E4M3


class Fp8(Expanded):
    """E4M3 codes in blocks, of any size that the configuration names, or in rows, or with one scale."""

    docs: ClassVar[tuple[tuple[str, str, str], ...]] = (
        (
            "`fp8`",
            "scales of blocks, as DeepSeek V3 and Qwen3-FP8 are released, or one: multiplied out in fp32, and rounded again",
            "what `weights=` names",
        ),
    )
    marker = "weight_scale_inv"
    parts: ClassVar[tuple[str, ...]] = ("weight", "weight_scale_inv", "weight_scale")
    #: Rows and columns of a block; None: there are none.
    block: tuple[int, int] | None = None

    def __init__(self, config: Mapping[str, Any]) -> None:
        name = "an FP8 checkpoint"
        only(config, "fmt", ("e4m3",), "e4m3", name)
        only(config, "expert_dtype", ("fp8",), "fp8", name)
        block = setting(config, "weight_block_size", list, None)
        if block is None:
            return
        if len(block) != 2 or not all(type(size) is int and 0 < size < 2**31 for size in block):
            raise CheckpointError(f"quantization_config has weight_block_size={repr(block)[:80]}; expected two positive integers")
        self.block = (block[0], block[1])

    def values(self, layer: StoredLayer) -> torch.Tensor:
        n, k = layer.out_features, layer.in_features
        codes = layer.tensor("weight", (n, k), torch.float8_e4m3fn).float()
        if not bool(torch.isfinite(codes).all()):
            layer.refuse("weight", "holds NaN; the file is damaged")
        if self.block is None:
            return codes.mul_(self._of_rows(layer))
        rows, columns = self.block
        grid = (math.ceil(n / rows), math.ceil(k / columns))
        scales = layer.scales("weight_scale_inv", grid, E4M3.reach).float()
        for first in range(grid[0]):  # one row of blocks at a time: no second weight in memory
            codes[first * rows : (first + 1) * rows] *= scales[first].repeat_interleave(columns)[:k]
        return codes

    def _of_rows(self, layer: StoredLayer) -> torch.Tensor:
        """The scale of each row [N, 1], or one for all [1, 1]."""
        part = "weight_scale" if layer.info("weight_scale") is not None else "weight_scale_inv"
        info = layer.info(part)
        rows = 1 if info is not None and math.prod(info.shape) == 1 else layer.out_features
        return layer.scales(part, (rows, 1), E4M3.reach).float()


class CompressedFp8(Fp8, CompressedTensors):
    """`float-quantized` of compressed-tensors: FP8 with one scale, or one a row."""

    docs = (("`compressed-tensors`", "`float-quantized`: FP8 with a scale a row, or one", "what `weights=` names"),)
    formats = ("float-quantized",)
    marker = "weight_scale"

    def __init__(self, config: Mapping[str, Any]) -> None:
        CompressedTensors.__init__(self, config)
        name = "a compressed-tensors checkpoint in FP8"
        for group in setting(config, "config_groups", dict, {}).values():
            weights = setting(group, "weights", dict, {}) if isinstance(group, dict) else {}
            only(weights, "type", ("float",), "float", name)
            only(weights, "strategy", ("tensor", "channel"), "tensor", name)
