"""Quantizing while `from_pretrained` reads a 16-bit checkpoint: each layer is replaced as soon as its weight has arrived.

transformers hands every tensor that needs it to a `ConversionOps`, one after the other, so the model is never whole in 16 bits.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps

from halfbyte.errors import Unsupported, check
from halfbyte.formats import weight_format
from halfbyte.hf.parallel import ranks_of
from halfbyte.hf.quantization_config import mark_quantized
from halfbyte.hf.quantize_model import quantize
from halfbyte.hf.weights import check_fits, linear_size, quantized_layer, replace, select, warn_about_experts
from halfbyte.nn import QuantLinear
from halfbyte.reference.quantize import check_clip

#: Options of `quantize` that are carried out layer by layer; the others when all layers are there.
_BY_LAYER = ("weights", "clip", "skip_modules")


class QuantizeWhileLoading(ConversionOps):  # type: ignore[misc]
    """`halfbyte.hf.quantize(model, **options)` for a model whose weights are about to be read.

    Making one checks everything that does not depend on the weights, on the empty model; `convert` gets the weights one by one;
    `finish` does what is left.
    """

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        weights, self.clip = options.get("weights"), options.get("clip")
        self.rest = {name: given for name, given in options.items() if name not in _BY_LAYER}
        check(self.clip is None or weights is not None, f"clip={self.clip!r} is about weights; name weights= as well")
        if weights is not None and ranks_of(model) > 1:
            raise Unsupported(
                "weights are not quantized while tensor parallelism shares them out; quantize on one process, save, and load that "
                "folder with tp_plan"
            )
        self.layers = {} if weights is None else select(model, options.get("skip_modules", ("lm_head",)))
        if weights is not None:
            self.format = weight_format(weights)
            check_clip(self.clip, self.format)
            check_fits(self.layers, dict.fromkeys(self.layers, self.format))
        if self.rest or weights is None:
            quantize(self._rehearsal(model), **self.rest)

    def _rehearsal(self, model: Any) -> Any:
        """The empty model with quantized layers that are empty, too."""
        made = copy.deepcopy(model)
        with torch.device("meta"):
            for name, layer in self.layers.items():
                bias = getattr(layer, "bias", None)
                size = linear_size(layer)
                assert size is not None
                replace(made, name, QuantLinear.empty(*size, self.format, None if bias is None else bias.dtype))
        return made

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], *, model: nn.Module, **kwargs: Any) -> dict[str, torch.Tensor]:
        """{name of a parameter: its tensor, or a list of it} -> the same, or the parts of the layer that took its place."""
        made: dict[str, torch.Tensor] = {}
        for name, found in input_dict.items():
            tensor, module = found[0] if isinstance(found, list) else found, name.removesuffix(".weight")
            if module not in self.layers:
                made[name] = tensor
                continue
            layer = self.layers[module]
            layer.weight = nn.Parameter(tensor, requires_grad=False)
            self._quantize(model, layer, kwargs.get("missing_keys") or set())
            made |= {f"{module}.{part}": p for part, p in model.get_submodule(module).named_parameters() if not p.is_meta}
        return made

    def _quantize(self, model: nn.Module, layer: nn.Module, missing: set[str]) -> None:
        """Put the quantized layer where `layer` is, under all of its names."""
        names = [name for name, other in self.layers.items() if other is layer]
        made = quantized_layer(names[0], layer, self.format, self.clip)
        for name in names:
            replace(model, name, made)
            missing.discard(f"{name}.weight")
        layer.weight = nn.Parameter(made.weight.codes.new_empty(0), requires_grad=False)  # free the 16 bits

    def finish(self, model: Any) -> None:
        """Quantize the layers whose weights did not arrive under their own names, and do what is not about single layers."""
        for name in self.layers:
            layer = model.get_submodule(name)
            if not isinstance(layer, QuantLinear):
                self._quantize(model, layer, set())
        if self.layers:
            warn_about_experts(model)
            mark_quantized(model, dict.fromkeys(self.layers, self.format.name))
        if self.rest:
            quantize(model, **self.rest)
