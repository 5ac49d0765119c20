"""INT8 W8A8 checkpoints of compressed-tensors (`int-quantized`): the weights as they are, activations in 16 bits.

weight        int8 [N, K]
weight_scale  [N, G], G = 1 for per-channel scales
"""

from __future__ import annotations

import torch

from halfbyte.checkpoints.compressed_tensors import CompressedTensors
from halfbyte.checkpoints.integers import integer_weight
from halfbyte.checkpoints.layer import StoredLayer
from halfbyte.tensors import QuantTensor


class CompressedInt8(CompressedTensors):
    """Symmetric 8-bit weights, per channel or group-wise."""

    docs = (
        ("", "`int-quantized`: symmetric INT8 weights; activations, which W8A8 quantizes as well, stay in 16 bits", "`int8_*`"),
    )
    formats = ("int-quantized",)
    marker = "weight_scale"
    parts = ("weight", "weight_scale", "weight_zero_point")

    def weight(self, layer: StoredLayer) -> QuantTensor:
        n, k = layer.out_features, layer.in_features
        groups = layer.shape("weight_scale", 2)[1]
        codes = layer.tensor("weight", (n, k), torch.int8).view(torch.uint8) ^ 128
        scales = layer.scales("weight_scale", (n, groups), 128)
        if layer.info("weight_zero_point") is not None:
            points = layer.tensor("weight_zero_point", (n, groups), torch.int8)
            if bool(points.any()):
                layer.refuse("weight_zero_point", "is not 0 throughout; halfbyte reads symmetric INT8 weights")
        return integer_weight(layer, 8, codes, scales, None, part="weight_scale")
