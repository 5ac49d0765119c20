"""Loading checkpoints of other libraries into a transformers model, with torch alone.

transformers would ask for the library that wrote them, so it never sees their `quantization_config`: the layers are converted first
(`halfbyte.checkpoints`), and the model is built from the converted tensors as if halfbyte had saved them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import GenerationConfig

from halfbyte.checkpoints.adapters import Checkpoint
from halfbyte.checkpoints.layer import Adapter, Expanded, StoredLayer
from halfbyte.checkpoints.safetensors_files import read_tensor
from halfbyte.errors import CheckpointError, Unsupported
from halfbyte.hf.expert_files import ExpertFiles, moved_biases
from halfbyte.hf.model_support import read_config
from halfbyte.hf.quantization_config import HalfbyteConfig
from halfbyte.hf.weights import check_fits, linear_size, select, targets, warn_about_rest
from halfbyte.tensors import QuantTensor


class ExternalCheckpoint:
    """The quantized layers of a folder by the names that the model has for them, and the tensors that are plain."""

    def __init__(self, checkpoint: Checkpoint, adapter: Adapter, model: Any, skip_modules: Iterable[str] = ()) -> None:
        """`model` is the empty (meta) model of the folder's configuration. Reads nothing but what zero biases hold.

        skip_modules  of an `Expanded` adapter: what is not quantized again
        """
        self.folder, self.infos, self.adapter, self.model = checkpoint.folder, checkpoint.infos, adapter, model
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._targets = targets(model)
        #: Names of the weights that become quantized layers.
        self.chosen = {*self._targets}
        if isinstance(adapter, Expanded):
            assert adapter.into is not None
            check_fits(found := select(model, skip_modules), adapter.into)
            self.chosen = {*found}
        self.experts = ExpertFiles(self._targets, getattr(model, "base_model_prefix", ""))
        stored = adapter.layers(self.infos)
        linear = [layer for layer in stored if not self.experts.take(layer, self.infos)]
        self.experts.check()
        self.layers = dict(self._match(layer) for layer in linear if not self._is_dropped(layer))
        self.stacks = {self.experts.stack_name(name): name for name in adapter.stacks(self.infos)}
        if not stored and not self.stacks:
            raise CheckpointError(f"{self.folder}: config.json says {type(adapter).__name__}, but no layer has a {adapter.marker}")
        self._check_ties()
        used = set[str]().union(*(adapter.consumed(layer) for layer in stored))
        used |= {f"{stack}_{part}" for stack in self.stacks.values() for part in ("blocks", "scales")}
        used |= {name for name in self.infos if name.rpartition(".")[2] in adapter.unused}
        #: The tensors that transformers loads as they are.
        self.plain = {
            name: info
            for name, info in self.infos.items()
            if name not in used and not self._is_spare(name) and not self._is_dropped(name)
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
        kept = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
        state |= {f"{layer.name}.weight": values.to(kept) for layer, values in self._expanded()}
        state = moved_biases(state, [name for name in formats if name not in self.layers], self._targets)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        if formats:
            config.quantization_config = HalfbyteConfig(modules=formats, act_order=act_order).to_dict()
        made, found = type(self.model).from_pretrained(None, config=config, state_dict=state, dtype=dtype, output_loading_info=True)
        warn_about_rest(made)
        made.name_or_path = made.config.name_or_path = str(self.folder)
        if (self.folder / "generation_config.json").is_file():
            made.generation_config = GenerationConfig.from_pretrained(self.folder)
        return made, found

    def _weights(self) -> Iterator[tuple[str, QuantTensor]]:
        """(the model's name, the weight) of everything that is quantized, one after the other."""
        for name, layer in self.layers.items():
            if name in self.chosen:
                yield name, self.adapter.convert(layer)
        for name in self.experts.layers:
            if name in self.chosen:
                yield name, self.experts.weight(name, self.adapter)
        for name, stored in self.stacks.items():
            wanted, made = self._targets.get(name), self.adapter.stack(stored, self.infos)
            if wanted is None or wanted.shape != made.shape:
                shape = None if wanted is None else list(wanted.shape)
                raise CheckpointError(f"{stored}_blocks holds {list(made.shape)}; {type(self.model).__name__} has {shape}")
            yield name, made

    def _expanded(self) -> Iterator[tuple[StoredLayer, torch.Tensor]]:
        """The layers that stay in 16 bits, with their values."""
        if isinstance(self.adapter, Expanded):
            linear = [layer for name, layer in self.layers.items() if name not in self.chosen]
            experts = [layer for name, each in self.experts.layers.items() if name not in self.chosen for layer in each.values()]
            yield from ((layer, self.adapter.values(layer)) for layer in (*linear, *experts))

    def _layer_name(self, stored: str) -> str:
        """The model's name of a layer of the files, which may lack the prefix of the causal model's body."""
        prefixed = f"{getattr(self.model, 'base_model_prefix', '')}.{stored}"
        return prefixed if stored not in self._modules and prefixed in self._modules else stored

    def _match(self, stored: str) -> tuple[str, StoredLayer]:
        """A quantized layer of the files, with the size that the model gives it, under the model's name."""
        name = self._layer_name(stored)
        size = None if name not in self._modules else linear_size(self._modules[name])
        if size is None:
            raise Unsupported(f"{stored}.{self.adapter.marker}: {type(self.model).__name__} has no linear layer {name!r} for it")
        if 0 in size:
            raise CheckpointError(f"{stored}: config.json gives it {size[0]} out and {size[1]} in features")
        return name, StoredLayer(stored, *size, self.infos)

    def _check_ties(self) -> None:
        """A quantized weight must not be tied to another parameter, which would be left without its values."""
        owners: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            owners.setdefault(id(parameter), []).append(name)
        for name, layer in self.layers.items():
            if len(tied := owners[id(self._modules[name].weight)]) > 1:
                raise CheckpointError(f"{layer.name}.{self.adapter.marker} is quantized, but config.json ties {' to '.join(tied)}")

    def _is_dropped(self, name: str) -> bool:
        """Whether it is in a block that the model lacks and transformers leaves out: DeepSeek's for the second next token."""
        block = re.match(r".*?\.\d+(?=\.)", name)
        patterns = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        return block is not None and block[0] not in self._modules and any(re.search(p, name) for p in patterns)

    def _is_spare(self, tensor: str) -> bool:
        """A bias of zeros where the model has none: some writers of GPTQ files give every layer one."""
        layer, _, part = tensor.rpartition(".")
        info, name = self.infos[tensor], self._layer_name(layer) if part == "bias" else ""
        if self.experts.is_spare(tensor):
            return not bool(read_tensor(info).any())
        if name not in self.layers or self._modules[name].bias is not None:
            return False
        return info.shape == (self.layers[name].out_features,) and not bool(read_tensor(info).any())

    def _plain_type(self) -> torch.dtype:
        """What the embeddings and norms are stored in."""
        return next((i.dtype for i in self.plain.values() if i.dtype.is_floating_point and i.dtype.itemsize > 1), torch.float16)
