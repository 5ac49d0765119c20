"""Ranks of a tensor-parallel model: whether they fuse blocks together, and how their partial sums are added up."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from halfbyte.nn import QuantLinear
from halfbyte.ops.all_reduce import AllReduce, of_all

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
    is_partial = type(layer) is QuantLinear and layer.parallel_style == "rowwise" and layer.bias is None
    return layer if is_partial else None
