"""Loading checkpoints of other libraries into a transformers model, with torch alone.

transformers would ask for the library that wrote them, so it never sees their `quantization_config`: the layers are converted first
(`halfbyte.checkpoints`), and the model is built from the converted tensors as if halfbyte had saved them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from halfbyte.checkpoints.adapters import Checkpoint
from halfbyte.checkpoints.experts import joined, stack
from halfbyte.checkpoints.layer import UNUSED, Adapter, Expanded, StoredLayer
from halfbyte.checkpoints.safetensors_files import read_tensor
from halfbyte.errors import CheckpointError, warn_once
from halfbyte.hf.mixtures import in_order
from halfbyte.hf.model_support import read_config
from halfbyte.hf.quantization_config import HalfbyteConfig
from halfbyte.hf.stored_names import Source, StoredNames
from halfbyte.hf.weights import check_fits, select, targets, warn_about_rest
from halfbyte.tensors import QuantTensor


def from_state(kind: Any, folder: Path, config: Any, state: dict[str, Any], dtype: torch.dtype | str) -> tuple[Any, dict[str, Any]]:
    """(the model of class `kind` from tensors of a folder, what transformers says about missing and unexpected ones)."""
    model, said = kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype, output_loading_info=True)
    model.name_or_path = model.config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, said


class ExternalCheckpoint:
    """The quantized layers of a folder, by what they become in the model, and the tensors that are plain."""

    def __init__(self, checkpoint: Checkpoint, adapter: Adapter, model: Any, skip_modules: Iterable[str] = ()) -> None:
        """`model` is the empty (meta) model of the folder's configuration. Reads nothing but what zero biases hold.

        skip_modules  of an `Expanded` adapter: what is not quantized again
        """
        self.folder, self.infos, self.adapter, self.model = checkpoint.folder, checkpoint.infos, adapter, model
        self._targets = targets(model)
        #: Names of the weights that become quantized layers.
        self.chosen = {*self._targets}
        if isinstance(adapter, Expanded):
            assert adapter.into is not None
            check_fits(selected := select(model, skip_modules), adapter.into)
            self.chosen = {*selected}
        stored, stacks = adapter.layers(self.infos), adapter.stacks(self.infos)
        if not stored and not stacks:
            raise CheckpointError(f"{self.folder}: config.json says {type(adapter).__name__}, but no layer has a {adapter.marker}")
        used = set[str]().union(*(adapter.consumed(layer) for layer in stored))
        used |= {f"{stacked}_{part}" for stacked in stacks for part in ("blocks", "scales")}
        rest = [name for name in self.infos if name not in used]
        self.names = StoredNames(model, self._targets, rest, self._rows_of)
        layers = [layer for layer in stored if not self.names.is_dropped(f"{layer}.weight")]
        #: Weight of the model that the files hold quantized -> the layers that it is put together of.
        self.sources = {name: source for source in self.names.sources(layers) for name in self.names.rows(source)}
        self.stacks = {self.names.parameter(name): name for name in stacks}
        self._check_whole()
        self._check_ties()
        parts = ((name, name.rpartition(".")[2]) for name in self.infos)
        unused = {name: part for name, part in parts if part in UNUSED and not self.names.has(name)}
        if unused:
            kinds = ", ".join(sorted({*unused.values()}))
            warn_once(
                f"scales of activations and caches in the files ({kinds}) are not used: activations stay in 16 bits, and a packed "
                f"cache has scales of its own"
            )
        #: The tensors that transformers loads as they are.
        self.plain = {
            name: self.infos[name]
            for name in rest
            if name not in unused and not self.names.is_dropped(name) and not self._is_spare(name, {*layers})
        }
        for name, info in self.plain.items():
            if isinstance(adapter, Expanded) and info.dtype is torch.float8_e4m3fn:
                raise CheckpointError(f"{name.rpartition('.')[0]}.{adapter.marker} is missing; {name} is stored as {info.dtype}")

    def load(self, dtype: torch.dtype | str) -> tuple[Any, dict[str, Any]]:
        """(the model, what transformers says about missing and unexpected tensors)."""
        config = read_config(self.folder)
        if dtype == "auto":
            dtype = getattr(config, "dtype", None) or self._plain_type()
        state = {name: read_tensor(info) for name, info in self.plain.items()}
        formats, act_order = {}, []
        for name, weight in self._weights():
            formats[name] = weight.format.name
            act_order += [name] if weight.perm is not None else []
            state |= {f"{name}.weight_{part}": tensor for part, tensor in weight.parts().items()}
        plain_type = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
        state |= {f"{layer}.weight": values.to(plain_type) for layer, values in self._expanded()}
        state = self._with_biases_of_stacks(state, formats)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        if formats:
            config.quantization_config = HalfbyteConfig(modules=formats, act_order=act_order).to_dict()
        model, said = from_state(type(self.model), self.folder, config, state, dtype)
        warn_about_rest(model)
        return model, said

    def _weights(self) -> Iterator[tuple[str, QuantTensor]]:
        """(the model's name, the weight) of everything that is quantized, one after the other."""
        for name, source in self.sources.items():
            if name in self.chosen:
                yield name, self._weight(name, source)
        for name, stored in self.stacks.items():
            target, weight = self._targets.get(name), self.adapter.stack(stored, self.infos)
            if target is None or target.shape != weight.shape:
                shape = None if target is None else list(target.shape)
                raise CheckpointError(f"{stored}_blocks holds {list(weight.shape)}; {type(self.model).__name__} has {shape}")
            yield name, weight

    def _weight(self, name: str, source: Source) -> QuantTensor:
        """One weight of the model. What is rounded here, is rounded as one matrix."""
        rows = self.names.rows(source)[name]
        weights, indices = [], []
        for matrix in rows if rows.ndim == 2 else rows.unsqueeze(0):
            layers, index = source.pieces(matrix)
            stored = [StoredLayer(layer, source.sizes[layer], source.width, self.infos) for layer in layers]
            if isinstance(self.adapter, Expanded):
                values = torch.cat([self.adapter.values(layer) for layer in stored])[index]
                weights.append({name: self.adapter.quantized(name, values)})
                indices.append(torch.arange(len(index)))
            else:
                weights.append({layer.name: self.adapter.convert(layer) for layer in stored})
                indices.append(index)
        return stack(name, weights, indices) if rows.ndim == 2 else joined(name, weights[0], indices[0])

    def _expanded(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The layers that stay in 16 bits, with their values."""
        if isinstance(self.adapter, Expanded):
            for source in {id(source): source for name, source in self.sources.items() if name not in self.chosen}.values():
                for layer in source.names:
                    yield layer, self.adapter.values(StoredLayer(layer, source.sizes[layer], source.width, self.infos))

    def _rows_of(self, layer: str, width: int) -> int:
        return self.adapter.rows(StoredLayer(layer, 0, width, self.infos))

    def _check_whole(self) -> None:
        """Raise for a mixture of which only some projections are quantized."""
        owners = {id(self._targets[name].owner) for name in self.sources}
        for name, target in self._targets.items():
            if target.projection and id(target.owner) in owners and name not in self.sources:
                raise CheckpointError(f"{name}: expert 0 is missing or not quantized; experts are read as a whole")

    def _check_ties(self) -> None:
        """A quantized weight must not be tied to another parameter, which would be left without its values."""
        owners: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            owners.setdefault(id(parameter), []).append(name)
        for name, source in self.sources.items():
            target = self._targets[name]
            if len(tied := owners[id(getattr(target.owner, target.parameters[0]))]) > 1:
                layer = f"{source.names[0]}.{self.adapter.marker}"
                raise CheckpointError(f"{layer} is quantized, but config.json ties {' to '.join(tied)}")

    def _is_spare(self, tensor: str, layers: set[str]) -> bool:
        """A bias of zeros where the model has none: some writers of GPTQ files give every layer one."""
        layer, _, part = tensor.rpartition(".")
        return part == "bias" and layer in layers and not self.names.has(tensor) and not bool(read_tensor(self.infos[tensor]).any())

    def _with_biases_of_stacks(self, state: dict[str, torch.Tensor], formats: Iterable[str]) -> dict[str, torch.Tensor]:
        """The state of a model whose stacks of experts are quantized: their biases lie next to them, in the order of their rows."""
        owners = {f"{name}_bias": name for name in formats if self._targets[name].projection}
        moved = dict(state)
        for stored in state:
            if stored.endswith("_bias") and (name := owners.get(self.names.parameter(stored))) is not None:
                target = self._targets[name]
                moved[f"{name}.bias"] = in_order(target.owner, target.projection, moved.pop(stored))
        return moved

    def _plain_type(self) -> torch.dtype:
        """What the embeddings and norms are stored in."""
        return next((i.dtype for i in self.plain.values() if i.dtype.is_floating_point and i.dtype.itemsize > 1), torch.float16)
