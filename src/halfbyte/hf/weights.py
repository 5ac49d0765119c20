"""Replacing the linear layers of a model: which modules, whether the format fits, and the replacement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from halfbyte.errors import InvalidArgument, Unsupported, check, warn_once
from halfbyte.formats import Format, weight_format
from halfbyte.hf.model_support import blocks, check_weights_support, encoder_blocks
from halfbyte.nn import QuantLinear

#: Small layers that choose experts: they stay in 16 bits, a wrong choice costs more than they weigh.
ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "wg", "weights_proj"})


#: Small layers that a model multiplies by itself, without calling them (Mamba).
UNCALLED = frozenset({"dt_proj"})


def linear_size(module: Any) -> tuple[int, int] | None:
    """(out features, in features) of an `nn.Linear` (Falcon has its own) or a transformers `Conv1D`; None for anything else."""
    if type(module) is nn.Linear or type(module).__name__ == "FalconLinear":
        return module.out_features, module.in_features
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, torch.Tensor) and weight.ndim == 2:
        return weight.shape[1], weight.shape[0]
    return None


def select(model: nn.Module, skip_modules: Iterable[str]) -> dict[str, nn.Module]:
    """Name -> module of every linear layer in the transformer blocks, but those that must stay, and those of `skip_modules`."""
    check_weights_support(model)
    within = blocks(model)
    if not within:
        raise Unsupported(
            f"{type(model).__name__} has no list of transformer blocks with num_hidden_layers entries; there is nothing to quantize"
        )
    inside = {id(m) for block in (*within, *encoder_blocks(model)) for m in block.modules()} - of_adapters(model)
    skips = list(skip_modules)
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for skip in skips:
        if skip != "lm_head" and not any(is_skipped(name, [skip]) for name in names):
            raise InvalidArgument(f"skip_modules names {skip!r}, and {type(model).__name__} has no module of that name")
    linear = {name: m for name, m in model.named_modules(remove_duplicate=False) if id(m) in inside and linear_size(m)}
    if not linear:
        raise Unsupported(f"{type(model).__name__} has no linear layers in its transformer blocks; there is nothing to quantize")
    return {n: m for n, m in linear.items() if not is_skipped(n, skips) and n.rpartition(".")[2] not in ROUTERS | UNCALLED}


def of_adapters(model: nn.Module) -> set[int]:
    """The modules that an adapter (LoRA of PEFT, say) adds to the layer it wraps, its `base_layer`."""
    wrappers: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "base_layer", None), nn.Module)]
    return {id(m) for w in wrappers for m in w.modules()} - {id(m) for w in wrappers for m in w.base_layer.modules()}


def is_skipped(name: str, skips: Iterable[str]) -> bool:
    """Whether one of `skips` is this module's name, a part of it between dots, or the beginning of it."""
    return any(s == name or s in name.split(".") or name.startswith(f"{s}.") for s in skips)


def check_fits(modules: Mapping[str, nn.Module], formats: Mapping[str, Format]) -> None:
    """Raise before anything is changed when a format cannot hold a module's weight."""
    for name, module in modules.items():
        size = linear_size(module)
        assert size is not None
        try:
            formats[name].check_shape(size, f"{name}.weight {list(size)}")
        except InvalidArgument as error:
            raise InvalidArgument(f"{error}; or leave it in 16 bits with skip_modules=({name!r},)") from error


def check_loaded(modules: Mapping[str, nn.Module]) -> None:
    """Raise for a module whose weight is not there."""
    for name, module in modules.items():
        check(
            not any(p.is_meta for p in module.parameters()),
            f"{name} is on the meta device; load the weights first. Where accelerate has offloaded them, quantize before: load the "
            f"model without device_map, quantize and save it, then load that folder with device_map",
        )


def quantize_modules(model: nn.Module, fmt: str | Format, skip_modules: Iterable[str], clip: str | None = None) -> dict[str, str]:
    """Replace the selected layers by `QuantLinear`; all of them, or, on any error, none. Returns name -> format name."""
    chosen = weight_format(fmt)
    modules = select(model, skip_modules)
    check_fits(modules, dict.fromkeys(modules, chosen))
    check_loaded(modules)
    made: dict[int, QuantLinear] = {}
    for name, module in modules.items():
        if id(module) not in made:
            made[id(module)] = quantized_layer(name, module, chosen, clip)
    for name, module in modules.items():
        replace(model, name, made[id(module)])
    warn_about_experts(model)
    return dict.fromkeys(modules, chosen.name)


def quantized_layer(name: str, module: nn.Module, fmt: Format, clip: str | None) -> QuantLinear:
    """The layer that takes the place of a linear one; an error names it."""
    try:
        return QuantLinear.from_linear(module, fmt, clip=clip)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from error


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` where `name` is."""
    parent, _, child = name.rpartition(".")
    module.train(model.training)
    setattr(model.get_submodule(parent), child, module)


def packed_share(model: nn.Module) -> float:
    """The share of a model's weights that is quantized, from 0 to 1."""
    layers = [m for m in model.modules() if isinstance(m, QuantLinear)]
    parts = {id(p) for layer in layers for p in layer.parameters()}
    packed = sum(layer.out_features * layer.in_features for layer in layers)
    return packed / max(1, packed + sum(p.numel() for p in model.parameters() if id(p) not in parts))


#: From this share of a model's weights on, those outside of linear layers are worth a warning.
MENTIONED = 0.05


def warn_about_experts(model: nn.Module) -> None:
    """Warn that expert weights which are not in linear layers stay in 16 bits, and how little of the model is quantized then."""
    owners = {id(m): m for block in blocks(model) for m in block.modules()}.values()
    stay = {
        id(p): (p.numel(), type(m).__name__)
        for m in owners
        if not isinstance(m, QuantLinear) and not linear_size(m)
        for p in m.parameters(recurse=False)
        if p.ndim > 1 and p.is_floating_point()
    }
    count, kinds = sum(n for n, _ in stay.values()), ", ".join(sorted({kind for _, kind in stay.values()}))
    if count > MENTIONED * sum(p.numel() for p in model.parameters()):
        warn_once(
            f"{type(model).__name__} keeps its experts in parameters of their own ({kinds}), not in linear layers; these {count:,} "
            f"weights stay in 16 bits, and {packed_share(model):.1%} of the model's weights are quantized"
        )
