"""The quantizer that transformers finds by the name "halfbyte": it loads folders that halfbyte wrote, and quantizes while loading.

A folder is what transformers writes, with the parts of each quantized weight under the names of QuantLinear's parameters, and in
config.json the format of every quantized module. A transformers without halfbyte would skip the unknown quant_method, and make up
weights. So for each weight the files also hold an empty tensor under the plain name, at whose shape every loader stops, and one
whose name says what to do.

Of a 16-bit checkpoint each layer is replaced as soon as its weight has arrived, so the model is never whole in 16 bits.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantizer

from halfbyte.checkpoints.adapters import NOTICE, OWN, STOP
from halfbyte.checkpoints.safetensors_files import TensorInfo, check_parts, check_perm, check_scales, read_files
from halfbyte.errors import CheckpointError, InvalidArgument, Unsupported
from halfbyte.formats import weight_format
from halfbyte.hf.default_cache import saved_settings
from halfbyte.hf.mixtures import SortedExperts, use_experts
from halfbyte.hf.model_support import ranks_of
from halfbyte.hf.quantization_config import HalfbyteConfig, keep_names
from halfbyte.hf.quantize_model import Quantization, check_options, quantize, reports_footprint
from halfbyte.hf.weights import (
    Target,
    quantized,
    replace,
    targets,
    update_plan,
    warn_about_rest,
)
from halfbyte.nn import QuantLayer, QuantLinear


class QuantizeWhileLoading(ConversionOps):  # type: ignore[misc]
    """`halfbyte.hf.quantize` of an empty model, which is checked at once. `convert` gets the weights, `finish` does the rest."""

    def __init__(self, model: Any, options: dict[str, Any], device_map: Any) -> None:
        places = set(map(str, device_map.values() if isinstance(device_map, dict) else [device_map]))
        on_cpu = places <= {"None", "cpu"} or not torch.accelerator.is_available()
        self.job = Quantization(model, options, loading_to="cpu" if on_cpu else "cuda")
        self.targets = self.job.blocks
        if (self.targets or self.job.head) and ranks_of(model) > 1:
            raise Unsupported(
                "weights are not quantized while tensor parallelism shares them out; quantize on one process, save, and load that "
                "folder with tp_plan"
            )
        #: Name of a parameter -> that of its target.
        self.awaited = {
            f"{name if not target.projection else name.rpartition('.')[0]}.{parameter}": name
            for name, target in self.targets.items()
            for parameter in target.parameters
        }
        self.done: set[Target] = set()

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], *, model: nn.Module, **kwargs: Any) -> dict[str, torch.Tensor]:
        """{name of a parameter: its tensor, or a list of it} -> the same, or the parts of the layer that took its place."""
        parts: dict[str, torch.Tensor] = {}
        for name, value in input_dict.items():
            tensor, missing = value[0] if isinstance(value, list) else value, kwargs.get("missing_keys") or set()
            parts |= self._take(model, name, tensor, missing) if name in self.awaited else {name: tensor}
        return parts

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
        missing -= {source for source, other in self.awaited.items() if self.targets[other] == target}
        layer = model.get_submodule(name)
        return {f"{name}.{part}": p for part, p in layer.named_parameters() if not p.is_meta}

    def _quantize(self, model: nn.Module, name: str, target: Target) -> None:
        """Put the quantized layer where the weight is, under all of its names."""
        layer = quantized(name, target, self.job.formats[name], self.job.options["clip"])
        for other, same in self.targets.items():
            if same == target:
                replace(model, other, layer)
        self.done.add(target)
        if not target.projection:
            target.owner.weight = nn.Parameter(layer.weight.codes.new_empty(0), requires_grad=False)  # free the 16 bits

    def finish(self, model: Any) -> None:
        """Quantize the weights that did not arrive under their own names, and do what is not about single layers."""
        for name, target in self.targets.items():
            if target not in self.done:
                self._quantize(model, name, target)
        if self.targets:
            use_experts(model)
            warn_about_rest(model)
            self.job.mark({name: fmt.name for name, fmt in self.job.formats.items()})
        clip = self.job.options["clip"] if self.job.head else None
        rest = {**self.job.options, "weights": None, "skip_modules": (), "clip": clip}
        if any(rest.values()):  # a head may have been tied to the embedding
            quantize(model, **rest)


@register_quantizer(OWN)
class HalfbyteQuantizer(HfQuantizer):  # type: ignore[misc]
    """Builds QuantLinear modules for a folder of `save` to load into, or quantizes the weights of a 16-bit folder one by one."""

    quantization_config: HalfbyteConfig
    #: Of a 16-bit folder: what quantizes its weights.
    loading: QuantizeWhileLoading | None = None
    _own_names = False
    #: What the names in the files begin with where only the base model is made.
    _prefix = ""

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raise for options that do not exist, or that do not belong here."""
        options = self.quantization_config.options
        if self.pre_quantized and options:
            raise CheckpointError(f"quantization_config has unknown entries: {', '.join(sorted(map(str, options)))[:100]}")
        check_options(options)
        if not self.pre_quantized and isinstance(device_map, dict) and "disk" in device_map.values():
            raise Unsupported("device_map offloads to disk; quantize without it, save, and load that folder with device_map")

    @property
    def quantized_element_size(self) -> float | None:
        """Bytes a weight, for transformers' device_map="auto"."""
        name = self.quantization_config.options.get("weights")
        return None if name is None else weight_format(name).nbytes((4096, 4096)) / 4096**2

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        return self.loading is not None and param_name in self.loading.awaited

    def get_quantize_ops(self) -> QuantizeWhileLoading | None:
        return self.loading

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, device_map: Any = None, **kwargs: Any
    ) -> Any:
        if not self.pre_quantized:
            self.loading = QuantizeWhileLoading(model, self.quantization_config.options, device_map)
            return model
        infos = None if checkpoint_files is None else read_files([str(f) for f in checkpoint_files])
        self._own_names = infos is not None and bool(self.quantization_config.modules)
        for name in infos or ():
            self._check_stored(name)
        weights = targets(model)
        self._name_base(model, weights)
        config = self.quantization_config
        ties = {name.removesuffix(".weight") for name in getattr(model, "all_tied_weights_keys", None) or {}}
        if both := sorted(ties & config.modules.keys()):
            raise CheckpointError(
                f"quantization_config names {both[0]!r}, which config.json ties to the embedding; set tie_word_embeddings to false"
            )
        for name in config.modules:
            self._check_named(name, weights, infos)
        layers: dict[Target, QuantLayer] = {}
        for name, target in weights.items():
            if name in config.modules:
                if target not in layers:
                    layers[target] = target.empty(weight_format(config.modules[name]), name in config.act_order)
                replace(model, name, layers[target])
        stops = {rf"^{re.escape(name)}$" for name, info in (infos or {}).items() if info.shape == STOP}
        ignore = model._keys_to_ignore_on_load_unexpected  # a set; in older versions of transformers a list or None
        model._keys_to_ignore_on_load_unexpected = ignore | stops if isinstance(ignore, set) else [*(ignore or ()), *sorted(stops)]
        return model

    def _check_stored(self, name: str) -> None:
        """Raise for a part of a quantized weight that `modules` and `act_order` know nothing of."""
        config: HalfbyteConfig = self.quantization_config
        for suffix, names in ((".weight_codes", config.modules), (".weight_perm", config.act_order)):
            if name.endswith(suffix) and name.removesuffix(suffix) not in names:
                raise CheckpointError(f"{name} is in the files, but quantization_config does not name its module")

    def _name_base(self, model: Any, known: dict[str, Target]) -> None:
        """AutoModel makes the base model alone: take its names without the prefix, as transformers does in the files."""
        config, prefix = self.quantization_config, f"{model.base_model_prefix}."
        base = [name for name in config.modules if name.startswith(prefix) and name.removeprefix(prefix) in known]
        if not base or known.keys() & config.modules.keys():
            return
        self._prefix = prefix
        self.quantization_config = model.config.quantization_config = HalfbyteConfig(
            modules={name.removeprefix(prefix): fmt for name, fmt in config.modules.items() if name.startswith(prefix)},
            act_order=[name.removeprefix(prefix) for name in config.act_order if name.startswith(prefix)],
        )

    def _check_named(self, name: str, known: dict[str, Target], infos: dict[str, TensorInfo] | None) -> None:
        """Raise unless a name of `modules` is a weight of the model that fits its format and lies in the files."""
        config: HalfbyteConfig = self.quantization_config
        target, fmt = known.get(name), weight_format(config.modules[name])
        if target is None and any(other.endswith(f".{name}") for other in known):
            raise Unsupported(f"the folder holds a base model, without the layers around {name!r}; load it with AutoModel")
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
            check_parts(self._prefix + name, fmt, target.shape, infos, act_order=name in config.act_order)

    @reports_footprint
    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> Any:
        if not self.quantization_config.modules:  # formats of the cache alone, or weights that are only now quantized
            self.remove_quantization_config(model)
        if self.loading is not None:
            self.loading.finish(model)
            return model
        if self.quantization_config.modules:
            keep_names(model)
        use_experts(model)
        for name, module in model.named_modules():
            if isinstance(module, QuantLayer) and not any(p.is_meta for p in module.parameters()):
                weight = module.weight  # under tensor parallelism, this rank's share
                check_scales(name, module.format, weight.parts())
                if weight.perm is not None:
                    check_perm(f"{name}.weight_perm", weight.perm)
        if (settings := saved_settings(model.config)) is not None:
            try:
                quantize(model, **settings.options)
            except InvalidArgument as error:
                raise CheckpointError(f"config.json has settings of the cache that do not fit: {error}") from error
        return model

    def update_attn_implementation(self, config: Any) -> Any:
        """Raise for another attention than the one that reads the saved formats of the cache."""
        kind = config._attn_implementation
        if saved_settings(config) is not None and kind not in (None, OWN):
            raise InvalidArgument(
                f"attn_implementation={kind!r}: this folder was saved with a packed cache, which only {OWN!r} reads; leave it "
                f"out, or take halfbyte_cache out of config.json"
            )
        return config

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """What `save_pretrained` writes: the state dict, and what stops a loader that does not know halfbyte."""
        layers = (QuantLinear, SortedExperts)
        linear = [name for name in self.quantization_config.modules if isinstance(model.get_submodule(name), layers)]
        plain = [f"{name}.weight" if name in linear else name for name in self.quantization_config.modules]
        return {**model.state_dict(), **{name: torch.empty(STOP) for name in (*plain, *([NOTICE] if plain else []))}}, {}

    def update_weight_conversions(self, weight_conversions: list[Any], model: nn.Module | None = None) -> list[Any]:
        """How names in files become the model's; those of `keep_names` are. transformers 5.19 passes no model."""
        return [] if self._own_names else weight_conversions

    def update_parallel_plan(self, model: nn.Module, plan: dict[str, str]) -> None:
        """How the parts of a layer are shared out. Versions of transformers that do not ask fail on the shapes of shares."""
        if (ranks := ranks_of(model)) > 1:
            update_plan(model, plan, ranks)

    def _dequantize(self, model: nn.Module, dtype: Any = None) -> Any:
        """In place of transformers' advice to report an issue."""
        raise Unsupported(
            "model.dequantize(): quantized layers stay packed; load the 16-bit model, or read single layers by "
            "halfbyte.dequantize(layer.weight)"
        )

    @property
    def is_trainable(self) -> bool:
        """Whether adapters on quantized layers can be trained, say by transformers' Trainer."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True
