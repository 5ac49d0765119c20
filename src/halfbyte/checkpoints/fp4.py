"""FP4 with block scales, MXFP4 and NVFP4, of any writer. All store the even k in the low nibble, as we do.

MXFP4   codes uint8 [N, K/2], scales uint8 (E8M0) [N, K/32]                      compressed-tensors, quark
NVFP4   codes uint8 [N, K/2], scales E4M3 [N, K/16], one fp32 number a tensor    modelopt: a factor; compressed-tensors: a divisor
    gpt-oss, experts alone: NAME_blocks uint8 [E, out, K/32, 16], NAME_scales uint8 [E, out, K/32] for a parameter NAME [E, K, out]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from halfbyte.checkpoints.layer import Adapter, StoredLayer, only, setting
from halfbyte.checkpoints.safetensors_files import TensorInfo, reach_of, read_tensor
from halfbyte.errors import CheckpointError, Unsupported
from halfbyte.formats import WEIGHT_FORMATS, Format
from halfbyte.reference.dequantize import e8m0_to_float
from halfbyte.tensors import QuantTensor

MXFP4, NVFP4 = WEIGHT_FORMATS["mxfp4"], WEIGHT_FORMATS["nvfp4"]
#: The scales of blocks, as every writer calls them.
SCALES = "weight_scale"


def mxfp4_weight(layer: StoredLayer, codes: str) -> QuantTensor:
    """From the codes of this name below the layer."""
    n, k = _even_blocks(layer, codes, 32)
    exponents = layer.tensor(SCALES, (n, k // 32), torch.uint8, torch.float8_e8m0fnu).view(torch.uint8)
    layer.check_scales(SCALES, e8m0_to_float(exponents), reach_of(MXFP4))
    return QuantTensor(MXFP4, (n, k), layer.tensor(codes, (n, k // 2), torch.uint8), exponents)


def nvfp4_weight(layer: StoredLayer, codes: str, tensor_scale: str, *, divides: bool) -> QuantTensor:
    """From the tensors of these names below the layer. `divides`: the tensor's scale is the reciprocal of ours."""
    n, k = _even_blocks(layer, codes, 16)
    block_scales = layer.tensor(SCALES, (n, k // 16), torch.float8_e4m3fn)
    factor = layer.check_scales(tensor_scale, layer.tensor(tensor_scale, (1,), torch.float32), 1)
    if divides:
        factor = layer.check_scales(tensor_scale, 1 / factor, 1)
    layer.check_scales(SCALES, block_scales.float() * factor, reach_of(NVFP4))
    return QuantTensor(
        NVFP4, (n, k), layer.tensor(codes, (n, k // 2), torch.uint8), block_scales.view(torch.uint8), tensor_scale=factor
    )


def _even_blocks(layer: StoredLayer, part: str, block: int) -> tuple[int, int]:
    if layer.in_features % block:
        layer.refuse(part, f"cannot have {layer.in_features} in features in blocks of {block}")
    return layer.out_features, layer.in_features


class ModelOpt(Adapter):
    """NVIDIA's modelopt, NVFP4. Scales of activations and caches are left out: activations stay in 16 bits here."""

    docs = (("`modelopt`", "NVFP4, from config.json or hf_quant_config.json", "`nvfp4`"),)
    marker = "weight_scale"
    parts = ("weight", "weight_scale", "weight_scale_2")

    def __init__(self, config: Mapping[str, Any]) -> None:
        algorithm = setting(config, "quant_algo", str, "")
        only({"quant_algo": algorithm.upper()}, "quant_algo", ("NVFP4",), None, "a modelopt checkpoint")

    def expected(self) -> Format | None:
        return NVFP4

    def weight(self, layer: StoredLayer) -> QuantTensor:
        if layer.info("pre_quant_scale") is not None:
            raise Unsupported(f"{layer.name}.pre_quant_scale: a factor of the activations (NVFP4_AWQ), which is not applied here")
        return nvfp4_weight(layer, "weight", "weight_scale_2", divides=False)


class Quark(Adapter):
    """AMD's quark, MXFP4."""

    docs = (("`quark`", "MXFP4", "`mxfp4`"),)
    marker = "weight_scale"
    parts = ("weight", "weight_scale")

    def __init__(self, config: Mapping[str, Any]) -> None:
        weight = setting(setting(config, "global_quant_config", dict, {}), "weight", dict, {})
        name = "a quark checkpoint"
        only(weight, "dtype", ("fp4",), "fp4", name)
        only(weight, "group_size", (32,), 32, name)
        only(weight, "scale_format", ("e8m0",), "e8m0", name)

    def expected(self) -> Format | None:
        return MXFP4

    def weight(self, layer: StoredLayer) -> QuantTensor:
        return mxfp4_weight(layer, "weight")


class GptOss(Quark):
    """OpenAI's gpt-oss: stacks of experts in MXFP4; all else is bf16 in the files."""

    docs = (
        (
            "`mxfp4`",
            "gpt-oss, as released: its experts; all else stays in 16 bits",
            "`mxfp4`",
        ),
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Nothing in this configuration changes the layout."""

    def expected(self) -> Format | None:
        """Only experts have it."""
        return None

    def stacks(self, names: Iterable[str]) -> list[str]:
        return [name.removesuffix("_blocks") for name in names if name.endswith("_blocks")]

    def stack(self, name: str, infos: Mapping[str, TensorInfo]) -> QuantTensor:
        blocks, scales = infos[f"{name}_blocks"], infos.get(f"{name}_scales")
        if scales is None or blocks.dtype is not torch.uint8 or scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
            raise CheckpointError(f"{name}_blocks and {name}_scales must both be there, of uint8")
        if len(blocks.shape) != 4 or blocks.shape != (*scales.shape, 16):
            raise CheckpointError(
                f"{name}_blocks is {list(blocks.shape)} and {name}_scales {list(scales.shape)}; "
                f"expected [E, N, G, 16] and [E, N, G]"
            )
        experts, out_features, groups = scales.shape
        exponents = read_tensor(scales).view(torch.uint8)
        if bool((exponents == 255).any()):
            raise CheckpointError(f"{name}_scales holds scales that are NaN")
        return QuantTensor(MXFP4, (experts, out_features, groups * 32), read_tensor(blocks).flatten(2), exponents)
