"""Which tensors of a foreign checkpoint are experts of a mixture: stored as a stack, or one expert a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from halfbyte.checkpoints.experts import DOWN, EXPERT, GATE, UP, stack
from halfbyte.checkpoints.layer import Adapter, Expanded, StoredLayer
from halfbyte.checkpoints.safetensors_files import TensorInfo
from halfbyte.errors import CheckpointError
from halfbyte.hf.mixtures import in_order, layout
from halfbyte.hf.weights import Target
from halfbyte.tensors import QuantTensor

#: The name that files of some families have for the module that holds the experts, and the model's.
_RENAMED = (".block_sparse_moe.", ".mlp.")


class ExpertFiles:
    """The mixtures of a model, and where the files keep the weights of each expert."""

    def __init__(self, targets: Mapping[str, Target], prefix: str) -> None:
        """`prefix`: of the causal model's body, which names in files may lack."""
        self._stacks = {name: target for name, target in targets.items() if target.projection}
        self._prefix = prefix
        #: Name of a projection -> (expert, half) -> its layer in the files.
        self.layers: dict[str, dict[tuple[int, int], StoredLayer]] = {}

    def take(self, stored: str, infos: Mapping[str, TensorInfo]) -> bool:
        """Whether a quantized layer of the files is a projection of one expert, which is then remembered."""
        place = self._place(stored)
        if place is None:
            return False
        name, expert, half = place
        experts, features, width = self._stacks[name].shape
        if 0 in (experts, features, width):
            raise CheckpointError(f"{stored}: config.json gives its mixture {list(self._stacks[name].shape)} weights")
        if expert >= experts:
            raise CheckpointError(f"{stored} is in the files; config.json gives the mixture {experts} experts")
        layer = StoredLayer(stored, features // self._halves(name), width, infos)
        self.layers.setdefault(name, {})[expert, half] = layer
        return True

    def weight(self, name: str, adapter: Adapter) -> QuantTensor:
        """The stack of a projection, from the layers of its experts."""
        (experts, *_), halves = self._stacks[name].shape, self._halves(name)
        stored = ([self.layers[name][expert, half] for half in range(halves)] for expert in range(experts))
        if isinstance(adapter, Expanded):  # gate and up projections are rounded as one matrix
            rows = (torch.stack([adapter.values(layer) for layer in each], 1).flatten(0, 1) for each in stored)
            return stack(name, [[adapter.quantized(name, each)] for each in rows])
        return stack(name, [[adapter.convert(layer) for layer in each] for each in stored])

    def check(self) -> None:
        """Raise unless every expert of a mixture is there, with each of its projections."""
        owners = {id(self._stacks[name].owner) for name in self.layers}
        for name, target in self._stacks.items():
            if id(target.owner) in owners:
                wanted = {(expert, half) for expert in range(target.shape[0]) for half in range(self._halves(name))}
                if missing := sorted(wanted - set(self.layers.get(name, ()))):
                    raise CheckpointError(
                        f"{name}: expert {missing[0][0]} is missing or not quantized; experts are read as a whole"
                    )

    def is_spare(self, tensor: str) -> bool:
        """Whether a tensor is the bias of an expert's layer that has none in the model."""
        layer, _, part = tensor.rpartition(".")
        place = self._place(layer) if part == "bias" else None
        owner: Any = None if place is None else self._stacks[place[0]].owner
        return owner is not None and not layout(owner).has_bias

    def stack_name(self, stored: str) -> str:
        """The model's name of a stack of the files."""
        return f"{self._prefix}.{stored}" if stored not in self._stacks else stored

    def _place(self, stored: str) -> tuple[str, int, int] | None:
        """(name of the projection, expert, half) of a layer of the files."""
        found = EXPERT.fullmatch(stored)
        if found is None:
            return None
        owner, expert, role = found[1].replace(*_RENAMED), int(found[2]), found[3]
        half = 1 if role in UP else 0
        kinds = ("down_proj",) if role in DOWN else ("gate_up_proj", "up_proj") if role in (*GATE, *UP) else ()
        for name in (f"{base}.{kind}" for base in (owner, f"{self._prefix}.{owner}") for kind in kinds):
            if name in self._stacks:
                return name, expert, half if self._halves(name) == 2 else 0
        return None

    def _halves(self, name: str) -> int:
        return 2 if self._stacks[name].projection == "gate_up_proj" else 1


def moved_biases(state: dict[str, torch.Tensor], names: list[str], targets: Mapping[str, Target]) -> dict[str, torch.Tensor]:
    """The state of a model whose stacks `names` are quantized: their biases lie next to them, in the order of their rows."""
    moved = dict(state)
    for name in names:
        if (bias := moved.pop(f"{name}_bias", None)) is not None:
            moved[f"{name}.bias"] = in_order(targets[name].owner, targets[name].projection, bias)
    return moved
