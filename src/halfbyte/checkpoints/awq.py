"""AWQ in its `gemm` layout, as AutoAWQ and GPTQModel write it.

GPTQModel's `dynamic` has settings of single layers, as in GPTQ.

qweight int32 [K, N / 8]    field j of word c is out feature 8c + [0, 2, 4, 6, 1, 3, 5, 7][j]
qzeros  int32 [G, N / 8]    the zero points, in the same order; nothing is added to them
scales  [G, N]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from halfbyte.checkpoints.gptq import dynamic
from halfbyte.checkpoints.integers import expected_format, integer_weight
from halfbyte.checkpoints.layer import Adapter, StoredLayer, group_setting, only, setting, unpack_words
from halfbyte.formats import Format
from halfbyte.tensors import QuantTensor

#: Where the out features of a word are among its fields: the inverse of the order above.
FIELDS = (0, 4, 1, 5, 2, 6, 3, 7)


class Awq(Adapter):
    """4 bits with zero points."""

    docs = (("`awq`", "4 bits with zero points, layout `gemm`", "`int4_*`"),)
    marker = "qweight"
    parts = ("qweight", "qzeros", "scales")

    def __init__(self, config: Mapping[str, Any]) -> None:
        name = "an AWQ checkpoint"
        only(config, "bits" if "bits" in config else "w_bit", (4,), 4, name)
        only(config, "backend", ("autoawq",), "autoawq", name)
        only(config, "zero_point", (True,), True, name)
        kind = "version" if config.get("version") is not None else "format"
        version = setting(config, kind, str, "gemm")
        only({kind: version.lower()}, kind, ("gemm",), "gemm", name)
        self.group = group_setting(config if "group_size" in config else {"group_size": config.get("q_group_size")}, 128)
        self.config, self.overrides = config, dynamic(config)

    def expected(self) -> Format | None:
        return expected_format(4, False, self.group)

    def rows(self, layer: StoredLayer) -> int:
        return 8 * layer.shape("qweight", 2)[1]

    def weight(self, layer: StoredLayer) -> QuantTensor:
        n, k = layer.out_features, layer.in_features
        if n % 8:
            layer.refuse("qweight", f"cannot hold {n} out features: AWQ packs 8 in a word")
        group = k if self.group in (-1, None) else self.group
        if self.overrides is not None:  # which may name this layer in another way
            group = k // max(1, layer.shape("scales", 2)[0])
        if not group or k % group:
            layer.refuse("scales", f"cannot have groups of {group}, which do not divide the {k} in features")
        codes = _unpack(layer.tensor("qweight", (k, n // 8), torch.int32), n).T
        zeros = _unpack(layer.tensor("qzeros", (k // group, n // 8), torch.int32), n).T.contiguous()
        scales = layer.scales("scales", (k // group, n), 15).T.contiguous()
        return integer_weight(layer, 4, codes, scales, zeros, part="scales")


def _unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    """int32 [R, N / 8] -> uint8 [R, N], out features in order."""
    words = unpack_words(packed, 4, 1, count).view(-1, count // 8, 8)
    return words[..., list(FIELDS)].flatten(1)
