"""Walks over the modules of a model, several times faster than torch's own: their host time is part of every first token."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from halfbyte.nn import local_shard

#: What PEFT changes of a layer to turn adapters on and off, without touching a tensor.
_OF_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


class Survey(NamedTuple):
    """What one walk over a model finds.

    addresses   of its weights, and which adapters are on: other ones once it was moved, cast, quantized or adapted
    devices     where its weights lie
    has_hooks   whether a module's calls are watched
    by_length   whether a rotary embedding depends on the length of the text
    """

    addresses: tuple[Hashable, ...]
    devices: set[torch.device]
    has_hooks: bool
    by_length: bool


def survey(model: nn.Module) -> Survey:
    """Look at every module of a model once."""
    addresses: list[Hashable] = []
    adapters, rotations, devices, any_hooks = [], [], set(), False
    for module in modules_of(model):
        own = vars(module)
        any_hooks = any_hooks or has_hooks(module)
        adapters += [str(own[name]) for name in _OF_ADAPTERS if name in own]
        rotations += [own["rope_type"]] if "rope_type" in own else []
        for t in (*own["_parameters"].values(), *own["_buffers"].values()):
            if t is not None:
                addresses.append(local_shard(t).data_ptr())
                devices.add(t.device)
    return Survey((*addresses, *adapters), devices, any_hooks, any(map(depends_on_length, rotations)))


def rotations_by_length(model: nn.Module) -> list[nn.Module]:
    """The rotary embeddings that depend on the length of the text: they change where it is longer than another length."""
    return [m for m in modules_of(model) if depends_on_length(vars(m).get("rope_type", ""))]


def depends_on_length(rope_type: object) -> bool:
    """Whether a rotary embedding of this type does."""
    return "dynamic" in str(rope_type) or "longrope" in str(rope_type)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The modules of a model, each once."""
    modules, stack = {id(model): model}, [model]
    while stack:
        children = [m for m in vars(stack.pop())["_modules"].values() if m is not None and id(m) not in modules]
        modules.update((id(m), m) for m in children)
        stack.extend(children)
    return list(modules.values())


def tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """The parameters and buffers of a model, shared ones as often as they are there."""
    stack: list[nn.Module | None] = [model]
    while stack:
        if (module := stack.pop()) is not None:
            own = vars(module)
            stack.extend(own["_modules"].values())
            yield from (t for kind in ("_parameters", "_buffers") for t in own[kind].values() if t is not None)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, other than those by which transformers collects outputs: they stay, and do nothing in between."""
    collecting = "transformers.utils.output_capturing"
    return bool(module._forward_pre_hooks) or any(
        getattr(h, "__module__", "") != collecting for h in module._forward_hooks.values()
    )
