"""Of the 16-bit modules whose place quantized layers take: their weight, and their hooks."""

from __future__ import annotations

import torch
from torch import nn

from halfbyte.errors import InvalidArgument

#: Where torch keeps the hooks of a module's calls.
_PLACES = tuple(name for name in vars(nn.Module()) if name.startswith(("_forward_", "_backward_", "_is_full_backward_hook")))
#: Whose hooks stay behind: they make a 16-bit weight (weight norm, pruning), or belong to a parallel plan, which a column-parallel
#: layer of local activations does not need.
_FOREIGN = ("torch.nn.utils.", "torch.distributed.", "transformers.integrations.tensor_parallel")


def dense_weight(layer: nn.Module) -> torch.Tensor:
    """The weight [out_features, in_features] of an `nn.Linear` or a transformers `Conv1D`."""
    weight = getattr(layer, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.ndim == 2:
        if type(layer).__name__ == "Conv1D":
            return weight.detach().T.contiguous()
        if isinstance(layer, nn.Linear):
            return weight.detach()
    raise InvalidArgument(f"layer is a {type(layer).__name__}; pass an nn.Linear or a transformers Conv1D")


def keep_hooks(before: nn.Module, layer: nn.Module) -> None:
    """Give `layer` the hooks of the module whose place it takes, in the same dicts, so that their handles still remove them."""
    for name in _PLACES:
        hooks = vars(layer)[name] = vars(before)[name]
        if isinstance(hooks, dict):
            for key in [key for key, hook in hooks.items() if str(getattr(hook, "__module__", "")).startswith(_FOREIGN)]:
                del hooks[key]
