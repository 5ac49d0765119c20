"""LoRA adapters of PEFT on quantized layers: PEFT asks a list of functions who wraps a layer, and knows none for QuantLinear.

The list has no public way in, so the last function of it is wrapped, and so is the one that looks for all linear layers, once PEFT
has been imported. halfbyte does not import it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn

from halfbyte.errors import Unsupported
from halfbyte.nn import QuantLinear


def register_lora() -> None:
    """Teach PEFT about QuantLinear, if it has been imported. Called wherever quantized layers come to be."""
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
        return QuantLora(target, adapter_name, config=config, **kwargs)

    lora.dispatch_default = dispatch  # type: ignore[attr-defined]
    _register_targets(tuners)


def _register_targets(tuners: Any) -> None:
    """Let "all-linear" mean quantized layers, too, and refuse kinds of adapters that are not LoRA on them in words of our own."""
    search = tuners._maybe_include_all_linear_layers

    @functools.wraps(search)
    def targets(config: Any, model: nn.Module) -> Any:
        named = getattr(config, "target_modules", None)
        everything = isinstance(named, str) and named.lower() == tuners.INCLUDE_LINEAR_LAYERS_SHORTHAND
        config = search(config, model)
        head = getattr(model, "get_output_embeddings", lambda: None)()
        layers = {name for name, m in model.named_modules() if isinstance(m, QuantLinear) and m is not head}
        chosen = layers if everything else {name for name in layers if tuners.check_target_module_exists(config, name)}
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if chosen and kind != "LORA":
            raise Unsupported(f"peft_type={kind}: quantized layers take LoRA adapters only ({min(chosen)} is one); use LoraConfig")
        if everything:
            config.target_modules = {*config.target_modules, *layers}
        return config

    tuners._maybe_include_all_linear_layers = targets
