"""Tensor parallelism in transformers: how each tensor of a quantized layer is sharded, and what cannot be.

    column-parallel (q, k, v, gate, up)   a rank has some out features: codes, scales and offsets are cut along N;
                                          perm and tensor_scale are replicated
    row-parallel (o, down)                a rank has some in features: codes, scales and offsets are cut along K, between groups;
                                          scales per out channel, and tensor_scale, are replicated

Refused: a row-parallel layer in act-order, whose stored columns need activations of every rank; nested scales, whose blocks span
rows; and experts.
"""

from __future__ import annotations

import re
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from halfbyte.errors import Unsupported
from halfbyte.experts import QuantExperts
from halfbyte.nn import QuantLinear
from halfbyte.ops.all_reduce import AllReduce, of_all

_COLUMN = ("colwise", "colwise_rep", "colwise_gather_output")
_ROW = ("rowwise", "rowwise_rep", "rowwise_split_input")
#: transformers' word for a parameter that every rank has whole.
WHOLE = "replicate"
_sums: WeakKeyDictionary[Any, AllReduce] = WeakKeyDictionary()


def ranks_of(model: Any) -> int:
    """Ranks that share each layer; 1 without tensor parallelism."""
    return getattr(getattr(model.config, "distributed_config", None), "tp_size", None) or 1


def _together(model: Any) -> bool:
    """Whether the ranks that share each layer are those of the default process group: otherwise some may do something else."""
    return dist.is_available() and dist.is_initialized() and 1 < ranks_of(model) == dist.get_world_size()


def all_reduce_of(model: Any) -> AllReduce | None:
    """How partial sums of a model's ranks are added up, kept with the model; None: as transformers does. All ranks call it."""
    if not _together(model):
        return None
    if model not in _sums:
        _sums[model] = AllReduce(model.config.get_text_config().hidden_size, model.dtype, model.device)
    return _sums[model]


def all_agree(model: Any, mine: bool) -> bool:
    """Whether all ranks of a model say so, where `all_reduce_of` adds up their sums; else `mine`. All ranks call it."""
    return all(of_all(mine, model.device)) if _together(model) else mine


def partial_layer(layer: Any) -> QuantLinear | None:
    """A row-parallel layer that gives a rank's partial sums; None for others, and with a bias, which is added behind the sum."""
    known = type(layer) is QuantLinear and layer.parallel_style == "rowwise" and layer.bias is None
    return layer if known else None


def update_plan(model: nn.Module, plan: dict[str, str], ranks: int) -> None:
    """Add to transformers' plan (module name, with * for numbers -> style) what differs for the parts of quantized layers.

    Raises `Unsupported`, naming the layer, for one that cannot be shared out.
    """
    added: dict[str, str] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, QuantExperts):
            raise Unsupported(f"{name}: quantized experts cannot be sharded over {ranks} ranks; keep them with skip_modules")
        general = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if not isinstance(layer, QuantLinear) or general not in plan:
            continue
        layer.parallel_style = plan[general]
        for part, style in part_styles(name, layer, plan[general], ranks).items():
            if added.setdefault(f"{general}.weight_{part}", style) != style:
                raise Unsupported(
                    f"{name}.weight_{part} would be shared out in another way than in the layers before it, which is not done"
                )
    plan.update(added)


def part_styles(name: str, layer: QuantLinear, style: str, ranks: int) -> dict[str, str]:
    """Part of the weight -> style, for a layer that the plan gives `style`."""
    parts, fmt = set(layer.weight.parts()), layer.format
    shared = f"{name} ({fmt.name}) cannot be shared out over {ranks} ranks"
    if style not in (*_COLUMN, *_ROW):
        raise Unsupported(f"{shared} in the style {style!r}; known are {', '.join((*_COLUMN, *_ROW))}")
    if "nested" in parts:
        raise Unsupported(f"{shared}: blocks of its nested scales run across rows; quantize to a format without them")
    styles = dict.fromkeys(parts, style)
    if style in _ROW:
        _check_rows(layer, shared, ranks)
        if fmt.granularity == "out_channel":
            styles |= dict.fromkeys(parts & {"scales", "offsets"}, WHOLE)
    return styles | dict.fromkeys(parts & {"perm", "tensor_scale"}, WHOLE)


def _check_rows(layer: QuantLinear, shared: str, ranks: int) -> None:
    if layer.weight.perm is not None:
        raise Unsupported(f"{shared} by its in features: it is in act-order, and the columns of a rank would come from all over")
    size = layer.format.code.per_byte if layer.format.granularity == "out_channel" else layer.format.group_size(layer.in_features)
    if layer.in_features % (size * ranks):
        raise Unsupported(f"{shared} by its {layer.in_features} in features: that would cut groups of {size}")
