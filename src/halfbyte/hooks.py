"""Hooks of a module move to the layer that takes its place."""

from __future__ import annotations

from torch import nn

#: Where torch keeps the hooks of a module's calls.
_PLACES = tuple(name for name in vars(nn.Module()) if name.startswith(("_forward_", "_backward_", "_is_full_backward_hook")))
#: Whose hooks stay behind: they make a 16-bit weight (weight norm, pruning), or belong to a parallel plan, which a column-parallel
#: layer of local activations does not need.
_FOREIGN = ("torch.nn.utils.", "torch.distributed.", "transformers.integrations.tensor_parallel")


def keep_hooks(before: nn.Module, layer: nn.Module) -> None:
    """Give `layer` the hooks of the module whose place it takes, in the same dicts, so that their handles still remove them."""
    for name in _PLACES:
        hooks = vars(layer)[name] = vars(before)[name]
        if isinstance(hooks, dict):
            for key in [key for key, hook in hooks.items() if str(getattr(hook, "__module__", "")).startswith(_FOREIGN)]:
                del hooks[key]
