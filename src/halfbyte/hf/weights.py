"""The linear layers and the experts of a model: which are quantized, whether the format fits, their replacement, and their shards.

Tensor parallelism in transformers shards each tensor of a quantized layer:

    column-parallel (q, k, v, gate, up)   a rank has some out features: codes, scales and offsets are cut along N;
                                          perm and tensor_scale are replicated
    row-parallel (o, down)                a rank has some in features: codes, scales and offsets are cut along K, between groups;
                                          scales per out channel, and tensor_scale, are replicated

Refused: a row-parallel layer in act-order, whose stored columns need activations of every rank; nested scales, whose blocks span
rows; and experts.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers.utils import logging

from halfbyte.errors import InvalidArgument, Unsupported, check, warn_once
from halfbyte.experts import QuantExperts
from halfbyte.formats import Format, Shape
from halfbyte.hf.mixtures import (
    SortedExperts,
    empty_stack,
    is_sorted,
    layout,
    projections,
    quantize_stack,
    stack_shape,
    use_experts,
)
from halfbyte.hf.model_support import blocks, encoder_blocks
from halfbyte.modules import keep_hooks
from halfbyte.nn import QuantLayer, QuantLinear

T = TypeVar("T")

#: Small layers that choose experts: they stay in 16 bits, a wrong choice costs more than they weigh.
ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "wg", "weights_proj"})

#: Small layers that a model multiplies by itself, without calling them (Mamba).
UNCALLED = frozenset({"dt_proj"})

#: Seconds before a progress bar shows, and between its updates where they do not overwrite each other, such as in a log.
_PATIENCE, _PAUSE = 3.0, 10.0
#: Whether progress bars show although transformers' own are off.
_SHOWN: ContextVar[bool] = ContextVar("_SHOWN", default=False)


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

    def quantized(self, fmt: Format, clip: str | None, hessian: torch.Tensor | None = None) -> QuantLayer:
        """hessian: of the inputs, for a linear layer only (`halfbyte.quantize`)."""
        if self.projection:
            return quantize_stack(self.owner, self.projection, self.shape[0], fmt, clip)
        if is_sorted(self.owner):
            return SortedExperts.from_stack(self.owner.weight, fmt, clip=clip)  # type: ignore[arg-type]
        return QuantLinear.from_linear(self.owner, fmt, clip=clip, hessian=hessian)

    def empty(self, fmt: Format, act_order: bool = False) -> QuantLayer:
        """What a checkpoint is loaded into."""
        if self.projection:
            return empty_stack(self.owner, self.projection, self.shape, fmt, act_order)
        bias, kind = getattr(self.owner, "bias", None), SortedExperts if is_sorted(self.owner) else QuantLinear
        return kind.empty(self.shape, fmt, None if bias is None else bias.dtype, act_order=act_order)


def targets(model: nn.Module) -> dict[str, Target]:
    """Name -> weight, of every linear layer and every mixture of a model that is not quantized yet."""
    weights: dict[str, Target] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if (size := linear_size(module)) is not None:
            weights[name] = Target(module, size)
        elif is_sorted(module):
            weights[name] = Target(module, (*module.weight.shape,))
        for projection in projections(module) or ():
            if isinstance(getattr(module, projection), torch.Tensor):
                weights[f"{name}.{projection}"] = Target(module, stack_shape(module, projection), projection)
    return weights


def select(model: nn.Module, skip_modules: Iterable[str]) -> dict[str, Target]:
    """Every weight in the transformer blocks, by name, but those that must stay, and those of `skip_modules`.

    A mixture stays as a whole: its projections are computed by one function.
    """
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
    weights = {name: target for name, target in every.items() if id(target.owner) in inside}
    if not weights and not any(isinstance(m, QuantLayer) for m in model.modules()):
        raise Unsupported(f"{type(model).__name__} has no linear layers in its transformer blocks; there is nothing to quantize")
    stay = {id(t.owner) for name, t in weights.items() if is_skipped(name, skips) or _stays(name)}
    return {name: target for name, target in weights.items() if id(target.owner) not in stay}


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


def nearest_formats(chosen: Mapping[str, Target], fmt: Format) -> dict[str, Format]:
    """Name -> `fmt` or, for a weight that its groups do not divide, the nearest format that does; one line tells which."""
    formats = {name: fmt.nearest(target.shape[-1]) for name, target in chosen.items()}
    others = Counter(other.name for other in formats.values() if other != fmt)
    if others:
        parts = " and ".join(f"{count} to {name}" for name, count in others.items())
        warn_once(f"{fmt.name} does not divide {others.total()} of {len(formats)} weights, which are quantized {parts}")
    return formats


def check_replaceable(chosen: Mapping[str, Target]) -> None:
    """Raise for a weight that is not there, and for a layer with a `forward` of its own, which a quantized one would not call."""
    for name, target in chosen.items():
        if not target.projection and "forward" in vars(target.owner) and not hasattr(target.owner, "_hf_hook"):  # accelerate's
            raise Unsupported(
                f"{name}.forward was replaced on this layer, and a quantized one would not call it; leave the layer in 16 bits: "
                f"skip_modules=({name!r},), or without lm_head="
            )
        check(
            not any(p.is_meta for p in target.owner.parameters()),
            f"{name} is on the meta device; load the weights first. Where accelerate has offloaded them, quantize before: load the "
            f"model without device_map, quantize and save it, then load that folder with device_map",
        )


@contextmanager
def show_progress() -> Iterator[None]:
    """In this block quantizing shows its progress, also in a process that loads models without transformers' progress bars."""
    before = _SHOWN.set(True)
    try:
        yield
    finally:
        _SHOWN.reset(before)


def progress_bar(parts: Collection[T], action: str, unit: str) -> Iterable[T]:
    """`parts` behind a bar that tells how long the rest takes, unless transformers' progress bars are off."""
    hidden = not (_SHOWN.get() or logging.is_progress_bar_enabled())
    pause = 0.1 if sys.stderr.isatty() else _PAUSE
    bar: Iterable[T] = tqdm(parts, desc=action, unit=f" {unit}", delay=_PATIENCE, mininterval=pause, disable=hidden)
    return bar


def quantize_modules(
    model: Any, chosen: Mapping[str, tuple[Target, Format]], clip: str | None, ready: Mapping[Target, QuantLayer]
) -> None:
    """Quantize weights, each to its format: all, or, on any error, none. The output layer gets a weight of its own.

    ready: layers that are quantized already.
    """
    layers = dict(ready)
    for name, (target, fmt) in progress_bar(chosen.items(), "Quantizing", "weights"):
        if target not in layers:
            layers[target] = quantized(name, target, fmt, clip)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for target, layer in layers.items():
        if target.owner is head:
            untie(model)
            _keep_hook(head, layer)
    for name, (target, _) in chosen.items():
        replace(model, name, layers[target])
    use_experts(model)
    if any(target.owner is not head for target in layers):
        warn_about_rest(model)


def find_lm_head(model: Any, fmt: Format, skip_modules: Iterable[str] = ()) -> dict[str, Target]:
    """Name -> weight of the output layer; raises where it is none that `fmt` can replace, or one that `skip_modules` leaves."""
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    head, family, option = find(), type(model).__name__, f"lm_head={fmt.name!r}"
    if isinstance(head, QuantLayer):
        raise InvalidArgument(f"{option}: the output layer is quantized already ({head.format.name}); leave lm_head out")
    heads = {name: target for name, target in targets(model).items() if target.owner is head and not target.projection}
    if not heads:
        raise Unsupported(f"{option}: {family} has no single linear output layer (get_output_embeddings)")
    for name, target in heads.items():
        fmt.check_shape(target.shape, f"lm_head: {name}.weight {list(target.shape)}")
    left = [name for name in heads if is_skipped(name, skip_modules)]
    check(not left, f"{option} quantizes what skip_modules leaves in 16 bits ({left}); name it once")
    both = {id(head.weight), id(model.get_input_embeddings().weight)}  # one, or, before the weights are read, two
    shares = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in both}
    ties = (getattr(model, "all_tied_weights_keys", None) or {}).items()
    others = sorted({name for tie in ties for name in tie} - shares)
    if others or (is_tied(model) and getattr(model.config, "is_encoder_decoder", False)):
        raise Unsupported(
            f"{option}: {family} ties more to its output layer than the embedding ({', '.join(others) or 'an encoder'}), which "
            f"a head of its own would separate; leave lm_head out"
        )
    return heads


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


def quantized(name: str, target: Target, fmt: Format, clip: str | None, hessian: torch.Tensor | None = None) -> QuantLayer:
    """The layer that takes the place of a weight; an error names it."""
    try:
        return target.quantized(fmt, clip, hessian)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from error


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` where `name` is: another module, or the stacked parameter of a mixture (and its bias)."""
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    if owner._parameters.pop(child, None) is not None:
        owner._parameters.pop(f"{child}_bias", None)
        vars(owner)["_is_hf_initialized"] = True  # transformers must not fill with random numbers what is gone
    if isinstance(before := getattr(owner, child, None), nn.Module):
        keep_hooks(before, module)
    module.train(model.training)
    setattr(owner, child, module)


def packed_share(model: nn.Module) -> float:
    """The share of a model's weights that is quantized, from 0 to 1."""
    layers = [m for m in model.modules() if isinstance(m, QuantLayer)]
    parts = {id(p) for layer in layers for p in layer.parameters()}
    packed = sum(math.prod(layer.weight.shape) for layer in layers)
    return packed / max(1, packed + sum(p.numel() for p in model.parameters() if id(p) not in parts))


def weight_bytes(model: Any) -> int:
    """Bytes of a model's weights: quantized ones as they are stored, all others at 16 bits, whatever type they compute in."""
    sizes = {id(p): p.nbytes for m in model.modules() if isinstance(m, QuantLayer) for p in m.weight.parts().values()}
    return sum(sizes.get(id(p), 2 * p.numel()) for p in model.parameters())


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


_COLUMN = ("colwise", "colwise_rep", "colwise_gather_output")
_ROW = ("rowwise", "rowwise_rep", "rowwise_split_input")
#: transformers' word for a parameter that every rank has whole.
WHOLE = "replicate"


def update_plan(model: nn.Module, plan: dict[str, str], ranks: int) -> None:
    """Add to transformers' plan (module name, with * for numbers -> style) what differs for the parts of quantized layers.

    Raises `Unsupported`, naming the layer, for one that cannot be shared out.
    """
    styles: dict[str, str] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, QuantExperts):
            raise Unsupported(f"{name}: quantized experts cannot be sharded over {ranks} ranks; keep them with skip_modules")
        general = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if not isinstance(layer, QuantLinear) or general not in plan:
            continue
        layer.parallel_style = plan[general]
        for part, style in part_styles(name, layer, plan[general], ranks).items():
            if styles.setdefault(f"{general}.weight_{part}", style) != style:
                raise Unsupported(
                    f"{name}.weight_{part} would be shared out in another way than in the layers before it, which is not done"
                )
    plan.update(styles)


def part_styles(name: str, layer: QuantLinear, style: str, ranks: int) -> dict[str, str]:
    """Part of the weight -> style, for a layer that the plan gives `style`."""
    parts, fmt = set(layer.weight.parts()), layer.format
    message = f"{name} ({fmt.name}) cannot be shared out over {ranks} ranks"
    if style not in (*_COLUMN, *_ROW):
        raise Unsupported(f"{message} in the style {style!r}; known are {', '.join((*_COLUMN, *_ROW))}")
    if "nested" in parts:
        raise Unsupported(f"{message}: blocks of its nested scales run across rows; quantize to a format without them")
    styles = dict.fromkeys(parts, style)
    if style in _ROW:
        _check_rows(layer, message, ranks)
        if fmt.granularity == "out_channel":
            styles |= dict.fromkeys(parts & {"scales", "offsets"}, WHOLE)
    return styles | dict.fromkeys(parts & {"perm", "tensor_scale"}, WHOLE)


def _check_rows(layer: QuantLinear, shared: str, ranks: int) -> None:
    if layer.weight.perm is not None:
        raise Unsupported(f"{shared} by its in features: it is in act-order, and the columns of a rank would come from all over")
    size = layer.format.code.per_byte if layer.format.granularity == "out_channel" else layer.format.group_size(layer.in_features)
    if layer.in_features % (size * ranks):
        raise Unsupported(f"{shared} by its {layer.in_features} in features: that would cut groups of {size}")
