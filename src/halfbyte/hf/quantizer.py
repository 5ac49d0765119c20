"""What transformers finds by the name "halfbyte": the `quantization_config` of config.json, and the quantizer that loads by it.

A folder is what transformers writes, with the parts of each quantized weight under the names of QuantLinear's parameters, and in
config.json the weight format of every quantized module.

Where halfbyte is not imported, transformers skips a quant_method that it does not know and makes up random weights. So the files
also hold an empty tensor, of shape [0], under each weight's plain name (`layer.weight`, `experts.down_proj`): every loader that
does not know halfbyte stops at its shape.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from halfbyte.checkpoints.adapters import OWN, STOP
from halfbyte.checkpoints.safetensors_files import TensorInfo, check_parts, check_perm, check_scales, read_files
from halfbyte.errors import CheckpointError, InvalidArgument
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.hf.adapters import register_lora
from halfbyte.hf.mixtures import use_experts
from halfbyte.hf.parallel import ranks_of, update_plan
from halfbyte.hf.weights import Target, replace, targets
from halfbyte.nn import QuantLayer, QuantLinear

FORMAT_VERSION = 1


@register_quantization_config(OWN)
class HalfbyteConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """`quantization_config` of config.json: the weight format of every quantized module, by name, and which are in act-order."""

    def __init__(
        self,
        modules: dict[str, str] | None = None,
        version: int = FORMAT_VERSION,
        quant_method: str = OWN,
        act_order: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        self.quant_method, self.version = OWN, version
        self.modules: dict[str, str] = {} if modules is None else modules
        self.act_order = act_order
        self.check()

    def check(self) -> None:
        """Raise `CheckpointError` for what no halfbyte wrote."""
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
        made = {"quant_method": OWN, "version": self.version, "modules": dict(self.modules)}
        return {**made, "act_order": list(self.act_order)} if self.act_order else made


@register_quantizer(OWN)
class HalfbyteQuantizer(HfQuantizer):  # type: ignore[misc]
    """Builds QuantLinear modules for the checkpoint to load into. Only for checkpoints that `save` wrote."""

    requires_calibration = True  # transformers' word for: quantized checkpoints only

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Nothing beyond torch is needed."""

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any) -> Any:
        infos = None if checkpoint_files is None else read_files([str(f) for f in checkpoint_files])
        self._renames = infos is None
        config: HalfbyteConfig = self.quantization_config
        for name in infos or ():
            for suffix, named in ((".weight_codes", config.modules), (".weight_perm", config.act_order)):
                if name.endswith(suffix) and name.removesuffix(suffix) not in named:
                    raise CheckpointError(f"{name} is in the files, but quantization_config does not name its module")
        known = targets(model)
        for name in config.modules:
            self._check_named(name, known, infos)
        made: dict[Target, QuantLayer] = {}
        for name, target in known.items():
            if name in config.modules:
                if target not in made:
                    made[target] = target.empty(WEIGHT_FORMATS[config.modules[name]], name in config.act_order)
                replace(model, name, made[target])
        stops = {rf"^{re.escape(name)}$" for name, info in (infos or {}).items() if info.shape == STOP}
        model._keys_to_ignore_on_load_unexpected = stops | set(model._keys_to_ignore_on_load_unexpected or ())
        return model

    def _check_named(self, name: str, known: dict[str, Target], infos: dict[str, TensorInfo] | None) -> None:
        """Raise unless a name of `modules` is a weight of the model that fits its format and lies in the files."""
        config: HalfbyteConfig = self.quantization_config
        target, fmt = known.get(name), WEIGHT_FORMATS[config.modules[name]]
        if target is None:
            raise CheckpointError(f"quantization_config names {name!r}, which is no linear layer and no experts of the model")
        whole = [other for other, t in known.items() if target.projection and t.owner is target.owner]
        if missing := [other for other in whole if other not in config.modules]:
            raise CheckpointError(f"quantization_config names {name!r} and not {missing[0]!r}; experts are quantized as a whole")
        try:
            fmt.check_shape(target.shape, f"{name}.weight {list(target.shape)}")
        except InvalidArgument as error:
            raise CheckpointError(str(error)) from error
        if infos is not None:
            check_parts(name, fmt, target.shape, infos, act_order=name in config.act_order)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> Any:
        register_lora()
        _keep_names(model)
        use_experts(model)
        for name, module in model.named_modules():
            if isinstance(module, QuantLayer) and not any(p.is_meta for p in module.parameters()):
                weight = module.weight  # under tensor parallelism, this rank's share
                check_scales(name, module.format, weight.parts())
                if weight.perm is not None:
                    check_perm(f"{name}.weight_perm", weight.perm)
        return model

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """What `save_pretrained` writes: the state dict, and what stops a loader that does not know halfbyte."""
        linear = [name for name in self.quantization_config.modules if isinstance(model.get_submodule(name), QuantLinear)]
        plain = [f"{name}.weight" if name in linear else name for name in self.quantization_config.modules]
        return {**model.state_dict(), **{name: torch.empty(STOP) for name in plain}}, {}

    def update_weight_conversions(self, weight_conversions: list[Any], model: nn.Module) -> list[Any]:
        """How the names in files become those of the model. Those in folders of halfbyte are: `_keep_names`."""
        return weight_conversions if self._renames else []

    def update_parallel_plan(self, model: nn.Module, plan: dict[str, str]) -> None:
        """How the parts of a layer are shared out. Versions of transformers that do not ask fail on the shapes of shares."""
        if (ranks := ranks_of(model)) > 1:
            update_plan(model, plan, ranks)

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True


def mark_quantized(model: Any, modules: dict[str, str]) -> None:
    """Tell transformers what the model is, so that its own save_pretrained writes a folder that loads again."""
    config = HalfbyteConfig(modules, act_order=[name for name in modules if model.get_submodule(name).weight.perm is not None])
    model.config.quantization_config = config
    model.hf_quantizer = HalfbyteQuantizer(config)
    model.is_quantized, model.quantization_method = True, OWN
    register_lora()
    _keep_names(model)


def _keep_names(model: Any) -> None:
    """Let transformers save tensors under the names that the model has for them, which are those of `quantization_config`.

    It would save under the names of the checkpoint that a family once had, or without the prefix that the loaded files lacked.
    """
    model._weight_conversions = []
