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
from halfbyte.hf.mixtures import use_experts
from halfbyte.hf.parallel import ranks_of
from halfbyte.hf.quantization_config import mark_quantized
from halfbyte.hf.quantize_model import check_about_weights, quantize
from halfbyte.hf.weights import Target, check_fits, find_lm_head, quantized, replace, select, warn_about_rest
from halfbyte.reference.quantize import check_clip
from halfbyte.settings import CLIP, KEYS, VALUES, WEIGHTS

#: Options of `quantize` that are carried out layer by layer; the others when all layers are there.
_BY_LAYER = ("weights", "clip", "skip_modules")
#: Options of `quantize` that need all weights: a head may be tied to the embedding.
_AFTER = ("lm_head", "clip")
#: Options that name formats of the cache.
_CACHE = ("keys", "values", "plan")
#: Options that say more about the cache.
_OF_CACHE = ("rotate_keys", "sink_tokens", "recent_tokens", "skip_layers")


class QuantizeWhileLoading(ConversionOps):  # type: ignore[misc]
    """`halfbyte.hf.quantize(model, **options)` for a model whose weights are about to be read.

    Making one checks everything that does not depend on the weights, on the empty model; `convert` gets the weights one by one;
    `finish` does what is left.
    """

    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        if not any(options.get(name) for name in ("weights", *_CACHE, "rotate_values", "lm_head")):
            options = {**options, "weights": WEIGHTS, "clip": CLIP, "keys": KEYS, "values": VALUES}
        weights, self.clip, lm_head = (options.get(name) for name in ("weights", "clip", "lm_head"))
        self.rest = {name: given for name, given in options.items() if name not in (*_BY_LAYER, *_AFTER) and given}
        cached = any(name in self.rest for name in _CACHE)
        if cached and options.get("rotate_keys") is False:  # None is another answer
            self.rest["rotate_keys"] = False
        self.after: dict[str, Any] = {name: options.get(name) for name in _AFTER} if lm_head is not None else {}
        check(
            cached or (weights or lm_head) is None or not {*_OF_CACHE} & self.rest.keys(),
            f"{', '.join(_OF_CACHE)} are about the KV cache; name keys= or values= as well",
        )
        if "rotate_values" in self.rest and (weights is not None or not cached):
            raise Unsupported("rotate_values changes 16-bit weights; load the model without, then call halfbyte.hf.quantize")
        check_about_weights(weights or lm_head, self.clip, options.get("skip_modules") or ())
        if (weights or lm_head) is not None and ranks_of(model) > 1:
            raise Unsupported(
                "weights are not quantized while tensor parallelism shares them out; quantize on one process, save, and load that "
                "folder with tp_plan"
            )
        self.targets = {} if weights is None else select(model, options.get("skip_modules", ()))
        #: Name of a parameter -> that of its target.
        self.awaited = {
            f"{name if not target.projection else name.rpartition('.')[0]}.{parameter}": name
            for name, target in self.targets.items()
            for parameter in target.parameters
        }
        self.done: set[Target] = set()
        if weights is not None:
            self.format = weight_format(weights)
            check_clip(self.clip, self.format)
            check_fits(self.targets, self.format)
        if lm_head is not None:
            check_clip(self.clip, fmt := weight_format(lm_head))
            find_lm_head(model, fmt, options.get("skip_modules", ()))
        if self.rest or weights is lm_head is None:
            quantize(self._rehearsal(model), **self.rest)

    def _rehearsal(self, model: Any) -> Any:
        """The empty model with quantized layers that are empty, too."""
        made = copy.deepcopy(model)
        with torch.device("meta"):
            for name, target in self.targets.items():
                replace(made, name, target.empty(self.format))
        return made

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], *, model: nn.Module, **kwargs: Any) -> dict[str, torch.Tensor]:
        """{name of a parameter: its tensor, or a list of it} -> the same, or the parts of the layer that took its place."""
        made: dict[str, torch.Tensor] = {}
        for name, found in input_dict.items():
            tensor = found[0] if isinstance(found, list) else found
            made |= self._take(model, name, tensor, kwargs.get("missing_keys") or set()) if name in self.awaited else {name: tensor}
        return made

    def _take(self, model: nn.Module, parameter: str, tensor: torch.Tensor, missing: set[str]) -> dict[str, torch.Tensor]:
        """Quantize a weight once it is complete: experts may have biases, which arrive right after."""
        name = self.awaited[parameter]
        target = self.targets[name]
        if target in self.done:  # a layer of two names
            return {}
        setattr(target.owner, parameter.rpartition(".")[2], nn.Parameter(tensor, requires_grad=False))
        if any(getattr(target.owner, own).is_meta for own in target.parameters):
            return {}
        self._quantize(model, name, target)
        missing -= {given for given, other in self.awaited.items() if self.targets[other] == target}
        layer = model.get_submodule(name)
        return {f"{name}.{part}": p for part, p in layer.named_parameters() if not p.is_meta}

    def _quantize(self, model: nn.Module, name: str, target: Target) -> None:
        """Put the quantized layer where the weight is, under all of its names."""
        made = quantized(name, target, self.format, self.clip)
        for other, same in self.targets.items():
            if same == target:
                replace(model, other, made)
        self.done.add(target)
        if not target.projection:
            target.owner.weight = nn.Parameter(made.weight.codes.new_empty(0), requires_grad=False)  # free the 16 bits

    def finish(self, model: Any) -> None:
        """Quantize the weights that did not arrive under their own names, and do what is not about single layers."""
        for name, target in self.targets.items():
            if target not in self.done:
                self._quantize(model, name, target)
        if self.targets:
            use_experts(model)
            warn_about_rest(model)
            mark_quantized(model, dict.fromkeys(self.targets, self.format.name))
        if self.rest or self.after:
            quantize(model, **self.rest, **self.after)
