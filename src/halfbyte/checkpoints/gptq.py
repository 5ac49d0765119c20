"""GPTQ, as AutoGPTQ, GPTQModel and AutoRound write it: v1, v2, and files that say one and are the other.

    qweight int32 [K * bits / 32, N]    row r holds the codes of the in features r * 32 / bits ..., lowest bits first
    qzeros  int32 [G, N * bits / 32]    v2: the zero point z, along N;  v1: z - 1
    scales  [G, N]
    g_idx   int32 [K]                   the group of each in feature

`dynamic` of GPTQModel has settings of single layers: {"+:REGEX" or "REGEX": {...}}, matched from the beginning of a name, the first
one counts; "-:REGEX" names layers that stay in 16 bits.

v1's z - 1 wraps where z is 0. GPTQModel subtracts from whole words, so a 0 borrows from the next field; other writers, and the
kernels that read them, take each field by itself. Which one it was is in the configuration (`meta.quantizer`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from halfbyte.checkpoints.integers import expected_format, integer_weight
from halfbyte.checkpoints.layer import Adapter, StoredLayer, group_setting, only, setting, unpack_words, words
from halfbyte.checkpoints.overrides import Overrides, expression, settings
from halfbyte.errors import Unsupported
from halfbyte.formats import Format
from halfbyte.tensors import QuantTensor


class Gptq(Adapter):
    """4 bits, and symmetric 8 bits; any order of the columns."""

    docs = (
        (
            "`gptq`, or quantize_config.json",
            "4 bits with and without zero points, 8 bits without; v1 and v2; act-order; a bias",
            "`int4_*`, `int4_sym_*`, `int8_*`",
        ),
    )
    marker = "qweight"
    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        name = "a GPTQ checkpoint"
        self.bits: int = only(config, "bits", (4, 8), None, name)
        self.symmetric: bool = setting(config, "sym", bool, True)
        self.act_order: bool = setting(config, "desc_act", bool, False)
        self.group = group_setting(config)
        kind = "checkpoint_format" if config.get("checkpoint_format") is not None else "format"
        self.v1: bool = only(config, kind, ("gptq", "gptq_v2"), "gptq", name) == "gptq"
        only(config, "pack_dtype", ("int32",), "int32", name)
        only(config, "is_marlin_format", (False,), False, name)
        self.config, self.overrides = config, dynamic(config)
        #: Names of layers in the files may differ from those in the overrides; bits and groups are then what the tensors say.
        self.uniform = self.overrides is None
        writers = setting(config, "meta", dict, {}).get("quantizer")
        self.by_words = "gptqmodel" in str(writers).lower()

    def expected(self) -> Format | None:
        return expected_format(self.bits, self.symmetric, self.group)

    def rows(self, layer: StoredLayer) -> int:
        return layer.shape("qweight", 2)[1]

    def weight(self, layer: StoredLayer) -> QuantTensor:
        n, k = layer.out_features, layer.in_features
        groups, rows = layer.shape("scales", 2)[0], layer.shape("qweight", 2)[0]
        bits = self._bits(layer, rows, k)
        codes = unpack_words(layer.tensor("qweight", (words(k, bits), n), torch.int32), bits, 0, k).T
        scales = layer.scales("scales", (groups, n), 255)
        if self.uniform and self.group is not None and groups * (self.group if self.group != -1 else k) != k:
            layer.refuse("scales", f"has {groups} groups; the configuration says groups of {self.group}, of {k} in features")
        qzeros = layer.tensor("qzeros", (groups, words(n, bits)), torch.int32)
        if self.symmetric:
            _check_symmetric(layer, qzeros, bits)
        zeros = None if self.symmetric else self._zeros(qzeros, bits, n).T.contiguous()
        return integer_weight(layer, bits, codes, scales.T.contiguous(), zeros, self._groups(layer), part="scales")

    def _bits(self, layer: StoredLayer, rows: int, k: int) -> int:
        """The bits of a code: those of the configuration, or what the tensor of a single layer says."""
        width = next((bits for bits in range(2, 9) if rows == words(k, bits)), self.bits)
        if width not in (4, 8):
            raise Unsupported(f"{layer.name}.qweight holds {width}-bit codes; halfbyte reads 4 and 8 bits")
        return self.bits if self.uniform else width

    def _groups(self, layer: StoredLayer) -> torch.Tensor | None:
        """The group of each column; None for columns in order: no tensor, an empty one, or one that was never filled."""
        info = layer.info("g_idx")
        if not self.act_order and (info is None or 0 in info.shape):
            return None
        g_idx = layer.tensor("g_idx", (layer.in_features,), torch.int32, torch.int64)
        return None if not self.act_order and not bool(g_idx.any()) else g_idx

    def _zeros(self, stored: torch.Tensor, bits: int, count: int) -> torch.Tensor:
        """Zero points, uint8 [G, count]."""
        if not self.v1:
            return unpack_words(stored, bits, 1, count)
        if self.by_words:
            ones = sum(1 << shift for shift in range(0, 32, bits))
            return unpack_words(stored + ones, bits, 1, count)
        return unpack_words(stored, bits, 1, count).add_(1).bitwise_and_((1 << bits) - 1)


def dynamic(config: Mapping[str, Any]) -> Overrides | None:
    """The settings of single layers that GPTQModel writes."""
    rules = setting(config, "dynamic", dict, {}).items()
    pairs = ((re.sub(r"^[+-]:", "", rule), {} if rule.startswith("-:") else settings(own, rule)) for rule, own in rules)
    return Overrides({}, tuple((expression(pattern, anchored=True), own) for pattern, own in pairs)) if rules else None


def _check_symmetric(layer: StoredLayer, stored: torch.Tensor, bits: int) -> None:
    """A symmetric layer has the middle code as its zero point, stored as it is (v2) or less 1 (v1), whatever its label says."""
    middle, fields = 1 << (bits - 1), unpack_words(stored, bits, 1, layer.out_features)
    if not bool((fields == middle).all()) and not bool((fields == middle - 1).all()):
        layer.refuse("qzeros", f"is neither {middle - 1} (v1) nor {middle} (v2) throughout, and the configuration has sym=true")
