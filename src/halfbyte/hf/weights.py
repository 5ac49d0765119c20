"""Replacing the linear layers and the experts of a model: which ones, whether the format fits, and the replacement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from halfbyte.errors import InvalidArgument, Unsupported, check, warn_once
from halfbyte.formats import Format, Shape, weight_format
from halfbyte.hf.called_experts import SortedExperts, is_sorted
from halfbyte.hf.mixtures import empty_stack, layout, projections, quantize_stack, stack_shape, use_experts
from halfbyte.hf.model_support import blocks, check_weights_support, encoder_blocks
from halfbyte.nn import QuantLayer, QuantLinear

#: Small layers that choose experts: they stay in 16 bits, a wrong choice costs more than they weigh.
ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "wg", "weights_proj"})

#: Small layers that a model multiplies by itself, without calling them (Mamba).
UNCALLED = frozenset({"dt_proj"})

#: Seconds before a progress bar shows.
_PATIENCE = 3.0


def linear_size(module: Any) -> tuple[int, int] | None:
    """(out features, in features) of an `nn.Linear` (Falcon has its own) or a transformers `Conv1D`; None for anything else."""
    if type(module) is nn.Linear or type(module).__name__ == "FalconLinear":
        return module.out_features, module.in_features
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, torch.Tensor) and weight.ndim == 2:
        return weight.shape[1], weight.shape[0]
    return None


@dataclass(frozen=True)
class Target:
    """A weight that can be quantized: that of a linear layer, or one projection of all experts of a mixture.

    owner       the layer, or the mixture
    shape       [out_features, in_features], of experts [experts, out_features, in_features]
    projection  the mixture's name for it; "" of a layer
    """

    owner: nn.Module
    shape: Shape
    projection: str = ""

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters of `owner` that a quantized layer replaces."""
        if not self.projection:
            return ("weight",)
        return (self.projection, f"{self.projection}_bias") if layout(self.owner).has_bias else (self.projection,)

    def quantized(self, fmt: Format, clip: str | None) -> QuantLayer:
        if self.projection:
            return quantize_stack(self.owner, self.projection, self.shape[0], fmt, clip)
        if is_sorted(self.owner):
            return SortedExperts.from_stack(self.owner.weight, fmt, clip=clip)  # type: ignore[arg-type]
        return QuantLinear.from_linear(self.owner, fmt, clip=clip)

    def empty(self, fmt: Format, act_order: bool = False) -> QuantLayer:
        """What a checkpoint is loaded into."""
        if self.projection:
            return empty_stack(self.owner, self.projection, self.shape, fmt, act_order)
        bias, kind = getattr(self.owner, "bias", None), SortedExperts if is_sorted(self.owner) else QuantLinear
        return kind.empty(self.shape, fmt, None if bias is None else bias.dtype, act_order=act_order)


def targets(model: nn.Module) -> dict[str, Target]:
    """Name -> weight, of every linear layer and every mixture of a model that is not quantized yet."""
    found: dict[str, Target] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if (size := linear_size(module)) is not None:
            found[name] = Target(module, size)
        elif is_sorted(module):
            found[name] = Target(module, (*module.weight.shape,))
        for projection in projections(module) or ():
            if isinstance(getattr(module, projection), torch.Tensor):
                found[f"{name}.{projection}"] = Target(module, stack_shape(module, projection), projection)
    return found


def select(model: nn.Module, skip_modules: Iterable[str]) -> dict[str, Target]:
    """Every weight in the transformer blocks, by name, but those that must stay, and those of `skip_modules`.

    A mixture stays as a whole: its projections are computed by one function.
    """
    check_weights_support(model)
    within = blocks(model)
    if not within:
        raise Unsupported(
            f"{type(model).__name__} has no list of transformer blocks with num_hidden_layers entries; there is nothing to quantize"
        )
    inside = {id(m) for block in (*within, *encoder_blocks(model)) for m in block.modules()} - of_adapters(model)
    skips, every = list(skip_modules), targets(model)
    names = [*(name for name, _ in model.named_modules(remove_duplicate=False)), *every]
    for skip in skips:
        if skip != "lm_head" and not any(is_skipped(name, [skip]) for name in names):
            raise InvalidArgument(f"skip_modules names {skip!r}, and {type(model).__name__} has no module of that name")
    found = {name: target for name, target in every.items() if id(target.owner) in inside}
    if not found and not any(isinstance(m, QuantLayer) for m in model.modules()):
        raise Unsupported(f"{type(model).__name__} has no linear layers in its transformer blocks; there is nothing to quantize")
    stay = {id(t.owner) for name, t in found.items() if is_skipped(name, skips) or _stays(name)}
    return {name: target for name, target in found.items() if id(target.owner) not in stay}


def _stays(name: str) -> bool:
    """Whether a layer is a router, a part of one, or not called."""
    return bool(ROUTERS & {*name.split(".")}) or name.rpartition(".")[2] in UNCALLED


def of_adapters(model: nn.Module) -> set[int]:
    """The modules that an adapter (LoRA of PEFT, say) adds to the layer it wraps, its `base_layer`."""
    wrappers: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "base_layer", None), nn.Module)]
    return {id(m) for w in wrappers for m in w.modules()} - {id(m) for w in wrappers for m in w.base_layer.modules()}


def is_skipped(name: str, skips: Iterable[str]) -> bool:
    """Whether one of `skips` is this module's name, a part of it between dots, or the beginning of it."""
    return any(s == name or s in name.split(".") or name.startswith(f"{s}.") for s in skips)


def check_fits(chosen: Mapping[str, Target], fmt: Format) -> None:
    """Raise before anything is changed when the format cannot hold a weight."""
    for name, target in chosen.items():
        try:
            fmt.check_shape(target.shape, f"{name}.weight {list(target.shape)}")
        except InvalidArgument as error:
            raise InvalidArgument(f"{error}; or leave it in 16 bits with skip_modules=({name!r},)") from error


def check_loaded(chosen: Mapping[str, Target]) -> None:
    """Raise for a weight that is not there."""
    for name, target in chosen.items():
        check(
            not any(p.is_meta for p in target.owner.parameters()),
            f"{name} is on the meta device; load the weights first. Where accelerate has offloaded them, quantize before: load the "
            f"model without device_map, quantize and save it, then load that folder with device_map",
        )


def quantize_modules(
    model: Any, weights: str | None, skip_modules: Iterable[str], lm_head: str | None = None, clip: str | None = None
) -> dict[str, str]:
    """Quantize the selected weights to the format `weights` and the output layer to `lm_head`: all, or, on any error, none.

    Returns name -> format name.
    """
    asked: dict[str, tuple[Target, Format]] = {}
    if weights is not None:
        fmt, found = weight_format(weights), select(model, skip_modules)
        check_fits(found, fmt)
        asked |= {name: (target, fmt) for name, target in found.items()}
    if lm_head is not None:
        fmt = weight_format(lm_head)
        asked |= {name: (target, fmt) for name, target in find_lm_head(model, fmt).items()}
    check_loaded({name: target for name, (target, _) in asked.items()})
    made: dict[Target, QuantLayer] = {}
    for name, (target, fmt) in logging.tqdm(asked.items(), desc="Quantizing", unit=" weights", delay=_PATIENCE):
        if target not in made:
            made[target] = quantized(name, target, fmt, clip)
    if lm_head is not None:
        untie(model)
        _keep_hook(model.get_output_embeddings(), made[target])  # the head comes last
    for name, (target, _) in asked.items():
        replace(model, name, made[target])
    use_experts(model)
    if weights is not None:
        warn_about_rest(model)
    return {name: fmt.name for name, (_, fmt) in asked.items()}


def find_lm_head(model: Any, fmt: Format, skip_modules: Iterable[str] = ()) -> dict[str, Target]:
    """Name -> weight of the output layer; raises where it is none that `fmt` can replace, or one that `skip_modules` leaves."""
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    head, family, asked = find(), type(model).__name__, f"lm_head={fmt.name!r}"
    if isinstance(head, QuantLayer):
        raise InvalidArgument(f"{asked}: the output layer is quantized already ({head.format.name}); leave lm_head out")
    found = {name: target for name, target in targets(model).items() if target.owner is head and not target.projection}
    if not found:
        raise Unsupported(f"{asked}: {family} has no single linear output layer (get_output_embeddings)")
    for name, target in found.items():
        fmt.check_shape(target.shape, f"lm_head: {name}.weight {list(target.shape)}")
    skipped = [name for name in found if is_skipped(name, skip_modules)]
    check(not skipped, f"{asked} quantizes what skip_modules leaves in 16 bits ({skipped}); name it once")
    both = {id(head.weight), id(model.get_input_embeddings().weight)}  # one, or, before the weights are read, two
    shares = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in both}
    ties = (getattr(model, "all_tied_weights_keys", None) or {}).items()
    others = sorted({name for tie in ties for name in tie} - shares)
    if others or (is_tied(model) and getattr(model.config, "is_encoder_decoder", False)):
        raise Unsupported(
            f"{asked}: {family} ties more to its output layer than the embedding ({', '.join(others) or 'an encoder'}), which "
            f"a head of its own would separate; leave lm_head out"
        )
    return found


def is_tied(model: Any) -> bool:
    """Whether the output layer and the embedding share one weight."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return getattr(head, "weight", None) is getattr(embedding, "weight", None)


def _keep_hook(before: nn.Module, layer: nn.Module) -> None:
    """Give `layer` the hook of accelerate that brings its inputs to its device: the head may have a GPU of its own."""
    if (hook := getattr(before, "_hf_hook", None)) is not None:
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(layer, hook)


def untie(model: Any) -> None:
    """Let the output layer have a weight of its own, here and in the folder that is saved; the embedding keeps its 16 bits."""
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}


def quantized(name: str, target: Target, fmt: Format, clip: str | None) -> QuantLayer:
    """The layer that takes the place of a weight; an error names it."""
    try:
        return target.quantized(fmt, clip)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from error


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` where `name` is: another module, or the stacked parameter of a mixture (and its bias)."""
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    if owner._parameters.pop(child, None) is not None:
        owner._parameters.pop(f"{child}_bias", None)
        vars(owner)["_is_hf_initialized"] = True  # transformers must not fill with random numbers what is gone
    module.train(model.training)
    setattr(owner, child, module)


def packed_share(model: nn.Module) -> float:
    """The share of a model's weights that is quantized, from 0 to 1."""
    layers = [m for m in model.modules() if isinstance(m, QuantLayer)]
    parts = {id(p) for layer in layers for p in layer.parameters()}
    packed = sum(math.prod(layer.weight.shape) for layer in layers)
    return packed / max(1, packed + sum(p.numel() for p in model.parameters() if id(p) not in parts))


#: From this share of a model's weights on, those outside of linear layers are worth a warning.
MENTIONED = 0.05


def warn_about_rest(model: nn.Module) -> None:
    """Warn of weights in 16 bits that are in no linear layer, by the modules that hold them, and how little is quantized then."""
    owners = {id(m): m for block in blocks(model) for m in block.modules()}.values()
    stay = {
        id(p): (p.numel(), type(m).__name__)
        for m in owners
        if not isinstance(m, QuantLayer) and not linear_size(m)
        for p in m.parameters(recurse=False)
        if p.ndim > 1 and p.is_floating_point()
    }
    count, kinds = sum(n for n, _ in stay.values()), ", ".join(sorted({kind for _, kind in stay.values()}))
    if count > MENTIONED * sum(p.numel() for p in model.parameters()):
        warn_once(
            f"{count:,} weights of {type(model).__name__} in {kinds}, which are no linear layers, stay in 16 bits; "
            f"{packed_share(model):.1%} of the model's weights are quantized"
        )
