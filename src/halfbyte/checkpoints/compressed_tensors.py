"""compressed-tensors, as llm-compressor writes it: int4 (and symmetric int8), MXFP4, NVFP4. What a layer is, its tensors say.

int    weight_packed int32 [N, K * bits / 32], along K, stored + 2^(bits - 1);  weight_scale [N, G];  weight_shape: N, K
       weight_zero_point int32 [N * bits / 32, G], packed along N and raised alike, or int8 [N, G];  weight_g_idx int32 [K]
MXFP4  weight_packed uint8 [N, K/2];  weight_scale uint8 (E8M0) [N, K/32]
NVFP4  weight_packed uint8 [N, K/2];  weight_scale E4M3 [N, K/16];  weight_global_scale fp32 [1], a divisor
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from halfbyte.checkpoints.fp4 import mxfp4_weight, nvfp4_weight
from halfbyte.checkpoints.integers import integer_weight
from halfbyte.checkpoints.layer import Adapter, StoredLayer, group_setting, only, setting, unpack_words, words
from halfbyte.checkpoints.overrides import Overrides, expression
from halfbyte.errors import Unsupported
from halfbyte.tensors import QuantTensor


class CompressedTensors(Adapter):
    """The packed formats. Scales of activations and caches are left out: activations stay in 16 bits here."""

    docs: ClassVar[tuple[tuple[str, str, str], ...]] = (
        (
            "`compressed-tensors`",
            "`pack-quantized`: 4 bits with and without zero points, 8 bits without, act-order",
            "`int4_*`, `int4_sym_*`, `int8_*`",
        ),
        ("", "`nvfp4-pack-quantized`: the divisor of a tensor is stored as its reciprocal, which is rounded to fp32", "`nvfp4`"),
        ("", "`mxfp4-pack-quantized`", "`mxfp4`"),
    )
    formats: ClassVar[tuple[str, ...]] = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision")
    marker = "weight_packed"
    parts: ClassVar[tuple[str, ...]] = (
        *("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
        "weight_global_scale",
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        name = "a compressed-tensors checkpoint"
        only(config, "format", self.formats, None, name)
        only(setting(config, "sparsity_config", dict, {}), "format", ("dense",), "dense", f"{name}, sparse")
        transforms = setting(setting(config, "transform_config", dict, {}), "config_groups", dict, {})
        if transforms:
            raise Unsupported(f"{name} with transforms (rotated weights), which are not undone here")
        groups = [g for g in setting(config, "config_groups", dict, {}).values() if isinstance(g, dict)]
        for group in groups:
            only(group, "format", self.formats, self.formats[0], name)
        weights = [setting(group, "weights", dict, {}) for group in groups]
        #: Numbers of bits, and group sizes, that the configuration knows of.
        self.bits = {setting(w, "num_bits", int, 4) for w in weights}
        self.groups = {None if w.get("strategy") == "channel" else group_setting(w) for w in weights}
        #: A target is a class of modules, the name of a layer, or an expression that matches the beginning of a name.
        targets = [(str(target), {"config_groups": {"": g}}) for g in groups for target in setting(g, "targets", list, [])]
        rules = ((target.removeprefix("re:"), own) for target, own in targets if target.startswith("re:"))
        self.config = config
        self.overrides = Overrides(dict(targets), tuple((expression(rule, anchored=True), own) for rule, own in rules))

    def weight(self, layer: StoredLayer) -> QuantTensor:
        info = layer.info("weight_packed")
        if info is not None and info.dtype is torch.int32:
            return self._integers(layer)
        if layer.info("weight_global_scale") is not None:
            return nvfp4_weight(layer, "weight_packed", "weight_global_scale", divides=True)
        return mxfp4_weight(layer, "weight_packed")

    def _integers(self, layer: StoredLayer) -> QuantTensor:
        n, k = layer.out_features, layer.in_features
        columns, groups = layer.shape("weight_packed", 2)[1], layer.shape("weight_scale", 2)[1]
        bits = 8 if columns == words(k, 8) else 4
        codes = unpack_words(layer.tensor("weight_packed", (n, words(k, bits)), torch.int32), bits, 1, k)
        self._check_setting(layer, bits, groups)
        _check_shape(layer)
        scales = layer.scales("weight_scale", (n, groups), 255)
        zeros, g_idx = _zeros(layer, bits, groups), _order(layer)
        return integer_weight(layer, bits, codes, scales, zeros, g_idx, part="weight_scale", order="weight_g_idx")

    def _check_setting(self, layer: StoredLayer, bits: int, groups: int) -> None:
        if self.bits and bits not in self.bits:
            layer.refuse("weight_packed", f"holds {bits}-bit codes; the configuration says {sorted(self.bits)}")
        sizes = {1 if size in (None, -1) else layer.in_features / size for size in self.groups}
        if sizes and groups not in sizes:
            layer.refuse("weight_scale", f"has {groups} groups; the configuration makes that {sorted(sizes)}")


def _check_shape(layer: StoredLayer) -> None:
    if layer.info("weight_shape") is None:
        return
    shape = layer.tensor("weight_shape", (2,), torch.int64, torch.int32).tolist()
    if shape != [layer.out_features, layer.in_features]:
        layer.refuse("weight_shape", f"says {shape}; the model has {[layer.out_features, layer.in_features]}")


def _zeros(layer: StoredLayer, bits: int, groups: int) -> torch.Tensor | None:
    """Zero points as codes are stored, uint8 [N, G]; None without any: the middle code."""
    info, n = layer.info("weight_zero_point"), layer.out_features
    if info is None:
        return None
    if info.dtype is torch.int8:
        plain = layer.tensor("weight_zero_point", (n, groups), torch.int8)
        if int(plain.min()) < -(1 << (bits - 1)) or int(plain.max()) >= 1 << (bits - 1):
            layer.refuse("weight_zero_point", f"holds {int(plain.min())} to {int(plain.max())}, which are no {bits}-bit numbers")
        return (plain.int() + (1 << (bits - 1))).to(torch.uint8)
    packed = layer.tensor("weight_zero_point", (words(n, bits), groups), torch.int32)
    return unpack_words(packed, bits, 0, n).contiguous()


def _order(layer: StoredLayer) -> torch.Tensor | None:
    """The group of each column; None when the columns are in order (no tensor, or one that was never filled: -1)."""
    if layer.info("weight_g_idx") is None:
        return None
    g_idx = layer.tensor("weight_g_idx", (layer.in_features,), torch.int32, torch.int64)
    return None if bool((g_idx == -1).all()) else g_idx
