"""Loading checkpoints of other libraries into a transformers model, with torch alone.

transformers would ask for the library that wrote them, so it never sees their `quantization_config`: the layers are converted first
(`halfbyte.checkpoints`), and the model is built from the converted tensors as if halfbyte had saved them.

Names go through transformers' own renamings and conversions. A quantized layer is placed as its `weight` in 16 bits would be. What
transformers does to a weight while it loads moves rows: it stacks experts, and joins, splits or permutes projections. So the same
conversions run on numbers of rows in place of weights, and say which row of which stored layer each row of the model is.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from halfbyte.checkpoints.adapters import Checkpoint, read_quantization
from halfbyte.checkpoints.experts import DOWN, EXPERT, GATE, UP, joined, stack
from halfbyte.checkpoints.kv_scales import cache_scales, read_scales
from halfbyte.checkpoints.layer import UNUSED, Adapter, Expanded, StoredLayer
from halfbyte.checkpoints.safetensors_files import read_tensor
from halfbyte.errors import CheckpointError, Unsupported, warn_once
from halfbyte.hf.mixtures import alternate, in_order, is_concatenated
from halfbyte.hf.model_support import KV_SCALES, read_config, text_config
from halfbyte.hf.quantization_config import HalfbyteConfig
from halfbyte.hf.weights import Target, check_fits, select, targets, warn_about_rest
from halfbyte.tensors import QuantTensor

#: Names of layers that guess tokens after the next one, which few models of transformers have.
DRAFTS = re.compile(r"(^|\.)mtp(_|\.)")


@dataclass
class Source:
    """Stored layers that one conversion reads.

    first      the name of the parameter that it gives, or of the first one
    converter  None where a layer is a weight of the model as it is
    layers     source pattern of the converter -> stored layers, in the order of experts
    width      in features of all of them
    sizes      out features of each, in order
    """

    first: str
    converter: WeightConverter | None
    layers: dict[str, list[str]] = field(default_factory=dict)
    width: int = 0
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [layer for layers in self.layers.values() for layer in layers]

    def pieces(self, rows: torch.Tensor) -> tuple[list[str], torch.Tensor]:
        """Rows of all layers one below the other -> the layers that hold them, and the same rows of those alone."""
        ends = torch.tensor([*self.sizes.values()]).cumsum(0)
        numbers = torch.searchsorted(ends, rows, right=True)
        indices, places = numbers.unique(return_inverse=True)
        sizes = torch.tensor([*self.sizes.values()])
        shift = (sizes[indices].cumsum(0) - sizes[indices]) - (ends[indices] - sizes[indices])
        return [self.names[number] for number in indices.tolist()], rows + shift[places]


class StoredNames:
    """Names in the files of a model -> names of the model."""

    def __init__(self, model: Any, targets: Mapping[str, Target], plain: Iterable[str], rows_of: Callable[[str, int], int]) -> None:
        """targets  the weights of `model` that may be quantized
        plain    the tensors of the files that are not quantized
        rows_of  (a stored layer, its in features) -> its out features, unchecked
        """
        mapping = get_model_conversion_mapping(model)
        self._model, self._targets, self._rows_of = model, targets, rows_of
        self._renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
        own = [step for step in mapping if isinstance(step, WeightConverter)]
        guesses = _experts_one_by_one(targets)
        self._converters = [*own, *guesses]
        self._by_pattern = {pattern: step for step in reversed(self._converters) for pattern in step.source_patterns}
        self._guessed = {id(step) for step in guesses}
        self._state = model.state_dict()
        # In transformers' order, since some renamings depend on the names that came before.
        self._places = {name: self._place(name) for name in sorted(plain, key=dot_natural_key)}
        self._ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]

    def parameter(self, name: str) -> str:
        """The model's name of a tensor of the files, or of the first one that it becomes a part of."""
        return (self._places.get(name) or self._place(name))[0]

    def has(self, name: str) -> bool:
        return self.parameter(name) in self._state

    def is_dropped(self, name: str) -> bool:
        """Whether the model lacks what a tensor is of, and transformers leaves it out: layers that guess further tokens."""
        match = DRAFTS.search(name) or any(pattern.search(name) for pattern in self._ignored)
        return bool(match) and not self.has(name)

    def sources(self, layers: Iterable[str]) -> list[Source]:
        """Quantized layers of the files, by what they are put together to."""
        sources: dict[str, Source] = {}
        for layer in sorted(layers, key=dot_natural_key):
            first, pattern = self._place(f"{layer}.weight")
            converter = None if pattern is None else self._by_pattern[pattern]
            source = sources.setdefault(first, Source(first, converter))
            if converter is not source.converter or (converter is None and source.layers):
                raise CheckpointError(f"{layer} and {source.names[0]} are both in the files, and both are {first} of the model")
            source.layers.setdefault(pattern or "", []).append(layer)
        return list(sources.values())

    def rows(self, source: Source) -> dict[str, torch.Tensor]:
        """{name of a target: for each of its rows, the row of the source's layers, one below the other}: [N], or [E, N] of experts.

        Sets the sizes of the source, and raises unless the targets have as many rows.
        """
        name = source.first.removesuffix(".weight")
        target = self.target(name, source)
        source.width = target.shape[-1]
        if source.converter is None:
            source.sizes = {source.names[0]: target.shape[0]}
            return {name: torch.arange(target.shape[0])}
        self._check_experts(source, target)
        source.sizes = {layer: self._rows_of(layer, source.width) for layer in source.names}
        count = sum(source.sizes.values())
        if count > sum(math.prod(other.shape[:-1]) for other in self._targets.values()):
            raise CheckpointError(f"{_some(source.names)} have {count} rows, more than the model")
        numbers = iter(torch.arange(count).unsqueeze(1).split([*source.sizes.values()]))
        step = copy.deepcopy(source.converter)
        for pattern, layers in source.layers.items():
            for layer in layers:
                step.add_tensor(source.first, f"{layer}.weight", pattern, next(numbers))
        try:
            tensors = step.convert(source.first, model=self._model, config=self._model.config)
        except Exception as error:  # whatever transformers meets where sizes do not fit
            raise CheckpointError(f"{source.first} cannot be put together from {_some(source.names)}: {error}") from error
        return dict(self._canonical(name.removesuffix(".weight"), t, source) for name, t in tensors.items())

    def target(self, name: str, source: Source) -> Target:
        target = self._targets.get(name)
        if target is None:
            family = type(self._model).__name__
            raise Unsupported(f"{_some(source.names)}: {family} has no linear layer {name!r} for it")
        if 0 in target.shape:
            raise CheckpointError(f"{source.names[0]}: config.json gives its weight the shape {list(target.shape)}")
        return target

    def _place(self, name: str) -> tuple[str, str | None]:
        """(parameter, source pattern of a converter), as transformers finds them."""
        prefix = self._model.base_model_prefix
        place = rename_source_key(name, self._renamings, self._converters, prefix, self._state)
        if place[0] not in self._state and name in self._state:
            place = rename_source_key(name, [], [], prefix, self._state)
        return place  # type: ignore[no-any-return]

    def _check_experts(self, source: Source, target: Target) -> None:
        """Raise unless every expert of a mixture is there."""
        assert source.converter is not None
        if len(target.shape) < 3 or not {type(step) for step in source.converter.operations} <= {MergeModulelist, Concatenate}:
            return
        for pattern in source.converter.source_patterns:
            experts = {int(place[2]): place[0] for layer in source.layers.get(pattern, ()) if (place := EXPERT.fullmatch(layer))}
            if experts and max(experts) >= len(getattr(target.owner, target.projection)):
                raise CheckpointError(
                    f"{experts[max(experts)]} is in the files; config.json gives the mixture {target.shape[0]} experts"
                )
            if missing := sorted({*range(target.shape[0])} - {*experts}):
                raise CheckpointError(
                    f"{source.first}: expert {missing[0]} is missing or not quantized; experts are read as a whole"
                )

    def _canonical(self, name: str, numbers: Any, source: Source) -> tuple[str, torch.Tensor]:
        """(target, its rows), checked, with gate and up rows in turn."""
        tensor = numbers[0] if isinstance(numbers, list) else numbers
        target = self.target(name, source)
        rows = (tensor if tensor.shape[-1] == 1 else tensor.mT)[..., 0]
        if target.projection:  # LongCat has rows of identities behind its experts, which nothing reads
            rows = rows[: target.shape[0]]
        if rows.shape != target.shape[:-1]:
            raise CheckpointError(
                f"{_some(source.names)} make {name} of {list(rows.shape)} rows; the model has {list(target.shape[:-1])}"
            )
        is_joint = target.projection == "gate_up_proj" and (id(source.converter) in self._guessed or is_concatenated(target.owner))
        return name, alternate(rows) if is_joint else rows


def _experts_one_by_one(targets: Mapping[str, Target]) -> Iterator[WeightConverter]:
    """Conversions for files with one expert a tensor, under the usual names, where transformers knows stacks alone."""
    tails = {(".".join(name.split(".")[-3:-1]), target.projection) for name, target in targets.items() if target.projection}
    for tail, projection in sorted(tails):
        every = rf"{re.escape(tail)}.*."
        both = projection == "gate_up_proj"
        for names in zip(GATE, UP, strict=True) if both else ((name,) for name in (DOWN if projection == "down_proj" else UP)):
            steps = [MergeModulelist(dim=0), Concatenate(dim=1)] if both else [MergeModulelist(dim=0)]
            yield WeightConverter([f"{every}{name}.weight" for name in names], f"{tail}.{projection}", steps)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if names[3:] else "")


def from_state(kind: Any, folder: Path, config: Any, state: dict[str, Any], dtype: torch.dtype | str) -> tuple[Any, dict[str, Any]]:
    """(the model of class `kind` from tensors of a folder, what transformers says about missing and unexpected ones)."""
    model, report = kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype, output_loading_info=True)
    model.name_or_path = model.config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, report


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
            check_fits(selection := select(model, skip_modules), adapter.into)
            self.chosen = {*selection}
        layer_names, stacks = adapter.layers(self.infos), adapter.stacks(self.infos)
        if not layer_names and not stacks:
            raise CheckpointError(f"{self.folder}: config.json says {type(adapter).__name__}, but no layer has a {adapter.marker}")
        tensors = set[str]().union(*(adapter.consumed(layer) for layer in layer_names))
        tensors |= {f"{prefix}_{part}" for prefix in stacks for part in ("blocks", "scales")}
        rest = [name for name in self.infos if name not in tensors]
        self.names = StoredNames(model, self._targets, rest, self._rows_of)
        layers = [layer for layer in layer_names if not self.names.is_dropped(f"{layer}.weight")]
        #: Weight of the model that the files hold quantized -> the layers that it is put together of.
        self.sources = {name: source for source in self.names.sources(layers) for name in self.names.rows(source)}
        self.stacks = {self.names.parameter(name): name for name in stacks}
        self._check_whole()
        self._check_ties()
        parts = ((name, name.rpartition(".")[2]) for name in self.infos)
        scales = {name: part for name, part in parts if part in UNUSED and not self.names.has(name)}
        #: The KV format that the files have scales for, and their names by layer and side.
        self.kv_format, self.kv_scales = cache_scales(
            read_quantization(self.folder) or {}, {name: self.infos[name] for name in scales if not DRAFTS.search(name)}
        )
        if others := {part for name, part in scales.items() if name not in self.kv_scales.values()}:
            warn_once(
                f"scales of activations and caches in the files ({', '.join(sorted(others))}) are not used: activations stay in 16 "
                f"bits, and a packed cache has scales of its own"
            )
        ours = {*layers}
        #: The tensors that transformers loads as they are.
        self.plain = {
            name: self.infos[name]
            for name in rest
            if name not in scales and not self.names.is_dropped(name) and not self._is_spare(name, ours)
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
        if self.kv_scales:
            decoder = text_config(config)
            layers = read_scales(self.kv_scales, self.infos, decoder.num_hidden_layers)
            setattr(decoder, KV_SCALES, {"format": self.kv_format, "layers": layers})
        model, report = from_state(type(self.model), self.folder, config, state, dtype)
        warn_about_rest(model)
        return model, report

    def _weights(self) -> Iterator[tuple[str, QuantTensor]]:
        """(the model's name, the weight) of everything that is quantized, one after the other."""
        for name, source in self.sources.items():
            if name in self.chosen:
                yield name, self._weight(name, source)
        for name, prefix in self.stacks.items():
            target, weight = self._targets.get(name), self.adapter.stack(prefix, self.infos)
            if target is None or target.shape != weight.shape:
                shape = None if target is None else list(target.shape)
                raise CheckpointError(f"{prefix}_blocks holds {list(weight.shape)}; {type(self.model).__name__} has {shape}")
            yield name, weight

    def _weight(self, name: str, source: Source) -> QuantTensor:
        """One weight of the model. What is rounded here, is rounded as one matrix."""
        rows = self.names.rows(source)[name]
        weights, indices = [], []
        for matrix in rows if rows.ndim == 2 else rows.unsqueeze(0):
            layers, index = source.pieces(matrix)
            pieces = [StoredLayer(layer, source.sizes[layer], source.width, self.infos) for layer in layers]
            if isinstance(self.adapter, Expanded):
                values = torch.cat([self.adapter.values(layer) for layer in pieces])[index]
                weights.append({name: self.adapter.quantized(name, values)})
                indices.append(torch.arange(len(index)))
            else:
                weights.append({layer.name: self.adapter.convert(layer) for layer in pieces})
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
            if len(names := owners[id(getattr(target.owner, target.parameters[0]))]) > 1:
                layer = f"{source.names[0]}.{self.adapter.marker}"
                raise CheckpointError(f"{layer} is quantized, but config.json ties {' to '.join(names)}")

    def _is_spare(self, tensor: str, layers: set[str]) -> bool:
        """A bias of zeros where the model has none: some writers of GPTQ files give every layer one."""
        layer, _, part = tensor.rpartition(".")
        return part == "bias" and layer in layers and not self.names.has(tensor) and not bool(read_tensor(self.infos[tensor]).any())

    def _with_biases_of_stacks(self, state: dict[str, torch.Tensor], formats: Iterable[str]) -> dict[str, torch.Tensor]:
        """The state of a model whose stacks of experts are quantized: their biases lie next to them, in the order of their rows."""
        owners = {f"{name}_bias": name for name in formats if self._targets[name].projection}
        result = dict(state)
        for tensor in state:
            if tensor.endswith("_bias") and (name := owners.get(self.names.parameter(tensor))) is not None:
                target = self._targets[name]
                result[f"{name}.bias"] = in_order(target.owner, target.projection, result.pop(tensor))
        return result

    def _plain_type(self) -> torch.dtype:
        """What the embeddings and norms are stored in."""
        return next((i.dtype for i in self.plain.values() if i.dtype.is_floating_point and i.dtype.itemsize > 1), torch.float16)
