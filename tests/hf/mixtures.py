"""The plain model with the values of a quantized one, experts included."""

from __future__ import annotations

from typing import Any

import torch

from halfbyte.experts import QuantExperts
from halfbyte.hf.mixtures import SortedExperts
from halfbyte.nn import QuantLinear


def expand(packed: Any, plain: Any) -> Any:
    """Give the plain model the values of the quantized weights, in its own order of rows."""
    for name, layer in packed.named_modules(remove_duplicate=False):
        if isinstance(layer, QuantLinear | SortedExperts):
            target, values = plain.get_submodule(name), layer.weight.dequantize(torch.float32)
            target.weight.data = values.T if type(target).__name__ == "Conv1D" else values
        elif isinstance(layer, QuantExperts):
            parent, _, child = name.rpartition(".")
            set_stack(plain.get_submodule(parent), child, layer)
    return plain


def set_stack(mixture: Any, name: str, layer: QuantExperts) -> None:
    """The values of one projection of a mixture."""
    values = layer.weight.dequantize(torch.float32)
    if name == "gate_up_proj" and type(mixture).__name__ != "GptOssExperts":
        values = torch.cat((values[:, ::2], values[:, 1::2]), 1)
    transposed = getattr(mixture, "is_transposed", type(mixture).__name__ == "Llama4TextExperts")
    getattr(mixture, name).data = (values.mT if transposed else values).contiguous()
