"""`HalfbyteConfig`: the `quantization_config` of config.json, and of `from_pretrained`; and PEFT's view of a quantized model.

In a folder that halfbyte wrote the configuration has the weight format of every quantized module, by name. Given to
`from_pretrained` with a 16-bit model, it has the options of `halfbyte.hf.quantize`, which quantizes while the files are read.

PEFT asks a list of functions who wraps a layer with LoRA, and knows none for QuantLinear. The list has no public way in, so the
last function of it is wrapped, and so is the one that looks for all linear layers, once PEFT has been imported. halfbyte does not
import it.
"""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers import AutoHfQuantizer, register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from halfbyte.checkpoints.adapters import OWN
from halfbyte.errors import CheckpointError, InvalidArgument, Unsupported
from halfbyte.formats import EVERY_WEIGHT_FORMAT
from halfbyte.hf.model_support import inner_model
from halfbyte.nn import NoTensor, QuantLayer, QuantLinear


def register_lora() -> None:
    """Teach PEFT about QuantLinear, if it has been imported. Called when it reads a model's configuration, as it first does."""
    lora, tuners = sys.modules.get("peft.tuners.lora.model"), sys.modules.get("peft.tuners.tuners_utils")
    default = getattr(lora, "dispatch_default", None)
    if lora is None or tuners is None or default is None or hasattr(default, "__wrapped__"):
        return
    plain = sys.modules["peft.tuners.lora.layer"].Linear

    class QuantLora(plain):  # type: ignore[misc, valid-type]
        """A LoRA adapter on a QuantLinear."""

        def _get_base_layer_device_and_dtype(self, base_layer: QuantLinear) -> tuple[torch.device, None]:
            """PEFT asks the weight, which is no tensor; adapters keep their own type."""
            return base_layer.weight.codes.device, None

        def get_delta_weight(self, adapter: str) -> Any:
            """What merging would add to the weight: refused."""
            raise Unsupported(
                "an adapter cannot be merged into a quantized weight; load the model in 16 bits, merge there (merge_and_unload), "
                "and quantize the result"
            )

    @functools.wraps(default)
    def dispatch(target: nn.Module, adapter_name: str, config: Any, **kwargs: Any) -> Any:
        find: Any = getattr(target, "get_base_layer", lambda: target)
        layer = find()
        if not isinstance(layer, QuantLinear):
            return default(target, adapter_name, config=config, **kwargs)
        if getattr(config, "use_dora", False):
            raise Unsupported("use_dora=True computes with the weight itself, and this one is quantized; leave it out")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Unsupported layer type", UserWarning)  # PEFT lists those that it knows
                return QuantLora(target, adapter_name, config=config, **kwargs)
        except NoTensor as error:
            raise Unsupported(
                f"init_lora_weights={config.init_lora_weights!r} computes with the weight itself, and this one is quantized; leave "
                f"it out, or take 'gaussian'"
            ) from error

    lora.dispatch_default = dispatch  # type: ignore[attr-defined]
    _register_targets(tuners)


def _register_targets(tuners: Any) -> None:
    """Let "all-linear" mean quantized layers, too, and refuse kinds of adapters that are not LoRA on them in words of our own."""
    search = tuners._maybe_include_all_linear_layers

    @functools.wraps(search)
    def targets(config: Any, model: nn.Module) -> Any:
        pattern = getattr(config, "target_modules", None)
        everything = isinstance(pattern, str) and pattern.lower() == tuners.INCLUDE_LINEAR_LAYERS_SHORTHAND
        config = search(config, model)
        head = getattr(model, "get_output_embeddings", lambda: None)()
        layers = {
            name.removesuffix(".base_layer")  # of an adapter that is there already
            for name, m in model.named_modules()
            if isinstance(m, QuantLinear) and m is not getattr(head, "base_layer", head)
        }
        matches = layers if everything else {name for name in layers if tuners.check_target_module_exists(config, name)}
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if matches and kind != "LORA":
            raise Unsupported(f"peft_type={kind}: quantized layers take LoRA adapters only ({min(matches)} is one); use LoraConfig")
        for name, m in model.named_modules() if (whole := tuple(getattr(config, "modules_to_save", None) or ())) else ():
            if name.endswith(whole) and any(isinstance(part, QuantLayer) for part in m.modules()):
                raise Unsupported(
                    f"modules_to_save={list(whole)} trains whole modules, and {name} is quantized; leave it out, or leave "
                    f"that module in 16 bits (skip_modules=)"
                )
        if everything:
            config.target_modules = {*config.target_modules, *layers}
        return config

    tuners._maybe_include_all_linear_layers = targets


def refuse_second_configs() -> None:
    """Let transformers raise for a HalfbyteConfig that is given for a quantized folder: it would be ignored."""
    merge = AutoHfQuantizer.merge_quantization_configs

    @functools.wraps(merge)
    def merged(stored: Any, given: Any) -> Any:
        if isinstance(given, HalfbyteConfig):
            method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
            way = "leave it out" if method == OWN else "load it with halfbyte.hf.load"
            raise InvalidArgument(
                f"quantization_config=HalfbyteConfig(...): the folder is quantized already ({getattr(method, 'value', method)}); "
                f"{way}, then set the formats of the cache by halfbyte.hf.quantize(model, keys=..., values=...)"
            )
        return merge(stored, given)

    AutoHfQuantizer.merge_quantization_configs = staticmethod(merged)


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
            if not isinstance(name, str) or not isinstance(fmt, str) or fmt not in EVERY_WEIGHT_FORMAT:
                raise CheckpointError(
                    f"quantization_config gives {name!r} the format {fmt!r}; known are {', '.join(EVERY_WEIGHT_FORMAT)}"
                )
        if not isinstance(self.act_order, list | tuple) or not all(
            isinstance(n, str) and n in self.modules for n in self.act_order
        ):
            raise CheckpointError("quantization_config has an act_order that is no list of names of its modules")

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds."""
        register_lora()
        entries = {"quant_method": OWN, "version": self.version, "modules": dict(self.modules)}
        return {**entries, "act_order": list(self.act_order)} if self.act_order else entries


def mark_quantized(model: Any, modules: dict[str, str]) -> None:
    """Set the quantization_config that lets transformers' save_pretrained write a folder that loads again."""
    config = HalfbyteConfig(
        modules=modules, act_order=[name for name in modules if model.get_submodule(name).weight.perm is not None]
    )
    model.config.quantization_config = config
    model.hf_quantizer = AutoHfQuantizer.from_config(config)
    model.is_quantized, model.quantization_method = True, OWN
    keep_names(model)


def mark_as_it_is(model: Any) -> None:
    """Let the quantization_config of a model name what is quantized now: layers may have been replaced, or left out."""
    config = getattr(model.config, "quantization_config", None)
    if isinstance(config, HalfbyteConfig) and config.modules:
        modules = {name: m.format.name for name, m in model.named_modules() if isinstance(m, QuantLayer)}
        if modules and modules != config.modules:
            mark_quantized(model, modules)


def with_own_config(model: Any) -> Any:
    """The transformers model inside `model`, with a configuration of its own: others may be made from the same object."""
    inner, copies = inner_model(model), dict[int, Any]()
    copy.deepcopy(inner.config, copies)
    for module in model.modules():
        for name, value in [*vars(module).items()]:
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                setattr(module, name, copies[id(value)])
    return inner


def keep_names(model: Any) -> None:
    """Let transformers save tensors under the names of `quantization_config`: not a family's old ones, nor without a prefix."""
    model._weight_conversions = []
    if isinstance(
        getattr(model, "get_output_embeddings", lambda: None)(), QuantLinear
    ):  # which transformers would meet when the embedding is replaced
        model.resize_token_embeddings = refuse_resize


@functools.cache
def published_names(model_type: str) -> list[WeightRenaming]:
    """What gives the tensors of such a folder the names that published files of the family have, as transformers writes models.

    Steps for parts of layers; not for stacks of experts, which a folder holds in parts, nor for prefixes.
    """
    steps = get_checkpoint_conversion_mapping(model_type) or []
    own = [step for step in steps[::-1] if type(step) is WeightRenaming and not step.source_patterns[0].startswith("^")]
    return [step.reverse_transform() for step in own if not step.target_patterns[0].endswith(("gate_up_proj", "down_proj"))]


def refuse_resize(*args: Any, **kwargs: Any) -> Any:
    """In place of `resize_token_embeddings` of a model with a quantized output layer, which cannot grow."""
    raise Unsupported(
        "resize_token_embeddings: the output layer is quantized, and rows of it cannot be added; resize the 16-bit model, then "
        "quantize it, or leave the output layer in 16 bits (without lm_head=)"
    )


refuse_second_configs()
