"""`HalfbyteConfig`: the `quantization_config` of config.json, and of `from_pretrained`.

In a folder that halfbyte wrote it has the weight format of every quantized module, by name. Given to `from_pretrained` with a
16-bit model, it has the options of `halfbyte.hf.quantize`, which quantizes while the files are read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from transformers.quantizers import AutoHfQuantizer, register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from halfbyte.checkpoints.adapters import OWN
from halfbyte.errors import CheckpointError, InvalidArgument, Unsupported
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.hf.adapters import register_lora
from halfbyte.nn import QuantLinear

FORMAT_VERSION = 1


@register_quantization_config(OWN)
class HalfbyteConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Quantize while loading: `AutoModelForCausalLM.from_pretrained(id, quantization_config=HalfbyteConfig(...))`.

    weights, keys, values, options  those of `halfbyte.hf.quantize`, with the same result. Each layer is quantized as soon as its
                                    weight is read, so the whole 16-bit model is never in memory
    modules, act_order, version     of a folder that is quantized already: weight formats by module, modules in act-order
    """

    def __init__(
        self,
        weights: str | None = None,
        keys: str | Sequence[str] | None = None,
        values: str | Sequence[str] | None = None,
        modules: dict[str, str] | None = None,
        version: int = FORMAT_VERSION,
        quant_method: str = OWN,
        act_order: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.quant_method, self.version = OWN, version
        self.modules: dict[str, str] = {} if modules is None else modules
        self.act_order = act_order
        formats = {"weights": weights, "keys": keys, "values": values}
        self.options = {**{name: fmt for name, fmt in formats.items() if fmt is not None}, **options}
        self.check()

    def check(self) -> None:
        """Raise `CheckpointError` for a configuration that halfbyte cannot have written."""
        if self.version != FORMAT_VERSION:
            raise CheckpointError(f"quantization_config has version {self.version!r}; this halfbyte reads version {FORMAT_VERSION}")
        if not isinstance(self.modules, dict):
            raise CheckpointError(f"quantization_config has modules of type {type(self.modules).__name__}; expected name -> format")
        for name, fmt in self.modules.items():
            if not isinstance(name, str) or not isinstance(fmt, str) or fmt not in WEIGHT_FORMATS:
                raise CheckpointError(
                    f"quantization_config gives {name!r} the format {fmt!r}; known are {', '.join(WEIGHT_FORMATS)}"
                )
        if not isinstance(self.act_order, list | tuple) or not all(
            isinstance(n, str) and n in self.modules for n in self.act_order
        ):
            raise CheckpointError("quantization_config has an act_order that is no list of names of its modules")

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds."""
        made = {"quant_method": OWN, "version": self.version, "modules": dict(self.modules)}
        return {**made, "act_order": list(self.act_order)} if self.act_order else made


def check_options(options: dict[str, Any], function: Callable[..., Any]) -> None:
    """Raise for an option that `function` does not have."""
    if unknown := sorted(set(options) - (set(inspect.signature(function).parameters) - {"model"})):
        raise InvalidArgument(
            f"{', '.join(unknown)}: no such option; those of halfbyte.hf.quantize are taken here. device_map and the like are "
            f"transformers': give them to from_pretrained"
        )


def mark_quantized(model: Any, modules: dict[str, str]) -> None:
    """Set the quantization_config that lets transformers' save_pretrained write a folder that loads again."""
    config = HalfbyteConfig(
        modules=modules, act_order=[name for name in modules if model.get_submodule(name).weight.perm is not None]
    )
    model.config.quantization_config = config
    model.hf_quantizer = AutoHfQuantizer.from_config(config)
    model.is_quantized, model.quantization_method = True, OWN
    register_lora()
    keep_names(model)


def keep_names(model: Any) -> None:
    """Let transformers save tensors under the model's own names, which are those of `quantization_config`.

    By default it uses a family's old checkpoint names, or drops a prefix that the loaded files lacked.
    """
    model._weight_conversions = []
    if isinstance(
        getattr(model, "get_output_embeddings", lambda: None)(), QuantLinear
    ):  # which transformers would meet when the embedding is replaced
        model.resize_token_embeddings = refuse_resize


def refuse_resize(*args: Any, **kwargs: Any) -> Any:
    """In place of `resize_token_embeddings` of a model with a quantized output layer, which cannot grow."""
    raise Unsupported(
        "resize_token_embeddings: the output layer is quantized, and rows of it cannot be added; resize the 16-bit model, then "
        "quantize it, or leave the output layer in 16 bits (without lm_head=)"
    )
