"""`--quantization halfbyte`: vLLM's linear layers over folders that halfbyte, or a library that it reads, quantized.

vLLM reads a file tensor by tensor. Those of one stored weight are collected until all are there, then converted (`stored`), cut to
what this rank computes (`shares`), and moved to the device. q, k and v, or gate and up, become one weight where they can be one;
otherwise they stay several, computed in one launch.

`reload_weights`, which follows a sleep of level 2, loads the same way: vLLM puts the catching parameters back, counts the elements
that each load would fill, and at the last one loads the layer and copies the result into the memory that CUDA graphs know.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, QKVParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm.transformers_utils.config import get_safetensors_params_metadata

from halfbyte.checkpoints.adapters import NOTICE, OWN, make_adapter
from halfbyte.checkpoints.experts import without_nested_scales
from halfbyte.checkpoints.layer import Adapter
from halfbyte.errors import CheckpointError, Unsupported
from halfbyte.formats import weight_format
from halfbyte.ops.by_plan import HALVES
from halfbyte.ops.linear import level_of, linear_of_parts, projections_of_parts
from halfbyte.ops.workspace import replay_in_turn
from halfbyte.plans.gemm_problem import GemmProblem
from halfbyte.tensors import QuantTensor
from halfbyte.vllm.experts import HalfbyteExperts, own_stacks_mapper, sorted_out
from halfbyte.vllm.options import check_saved
from halfbyte.vllm.registered import Registered
from halfbyte.vllm.selection import check_used
from halfbyte.vllm.shares import columns_of, merged, rows_of
from halfbyte.vllm.stored import Foreign, Own, catcher, counted, foreign_weights, parameter
from halfbyte.vllm.warm_up import KERNELS, compile_layer

#: What config.json, and vLLM, call OpenAI's stacks of experts in MXFP4.
GPT_OSS = ("mxfp4", "gpt_oss_mxfp4")
#: A module of a layer; in heads of Step 3.5 vLLM's name has a word more than that in the files.
LAYER = re.compile(r"(.*\b)layers\.(\d{1,9})\.(?:mtp_block\.)?(.+)")
#: What vLLM fuses, for models whose class does not say: MTP heads, and LongCat.
FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
}
#: Weights that one launch computes.
MOST_PROJECTIONS = 3


class HalfbyteConfig(Registered):
    """`quantization_config` of config.json: the stored weight of each quantized module. Workers get it pickled.

    Of a folder that halfbyte wrote, the configuration lists the modules; of another library's, `adapter` reads the weights, and
    the files say which there are.
    """

    def __init__(self, stored: Mapping[str, Own | Foreign], adapter: Adapter | None = None) -> None:
        super().__init__()
        self.adapter = adapter
        self.stored, self.mixtures = sorted_out(stored)
        #: The model type whose published files have other names than transformers, and so than folders of halfbyte.
        self.model_type = ""
        #: The formats of the cache that a folder was saved with.
        self.cache: Mapping[str, Any] | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> HalfbyteConfig:
        from halfbyte.hf.quantization_config import HalfbyteConfig as Written

        if envs.VLLM_BATCH_INVARIANT:
            raise Unsupported("VLLM_BATCH_INVARIANT=1 is not implemented for halfbyte's linear layers; leave one of them out")
        if config.get("quant_method") in GPT_OSS:
            raise Unsupported(
                "gpt-oss in its own files: vLLM reads them itself, leave --quantization out; with it, serve the folder that "
                "halfbyte.hf.save(halfbyte.hf.load(...), folder) writes"
            )
        if config.get("quant_method") != OWN:
            return cls({}, make_adapter(config))
        if config.get("modules") is None:
            raise CheckpointError(
                "quantization_config has no modules, so no weights are quantized yet; serve the folder that `halfbyte quantize "
                "MODEL -o FOLDER` writes"
            )
        written = Written(**config)
        return cls({name: Own(name, weight_format(fmt), name in written.act_order) for name, fmt in written.modules.items()})

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Look up the formats of the cache, and in the headers of the files which weights another library quantized."""
        from halfbyte.hf.default_cache import SAVED

        self.cache = getattr(hf_config, SAVED, None)
        if self.adapter is None:
            self.model_type = getattr(type(hf_config), "model_type", "")  # of a draft, vLLM has changed that of hf_config
            names = self._published_names()
            self.stored, self.mixtures = names.apply_dict(self.stored), names.apply_dict(self.mixtures)
            return
        names = get_safetensors_params_metadata(model_name, revision=revision)
        self.stored, self.mixtures = sorted_out(foreign_weights(self.adapter, names))
        if not self.stored and not self.mixtures:
            raise CheckpointError(
                f"{model_name}: no tensor is called *.{self.adapter.marker}, which every weight quantized as config.json says has"
            )

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """Every tensor of the files is wanted; in names of parameters there is no dot. May be applied twice."""
        foreign = [source for source in self.stored.values() if isinstance(source, Foreign)]
        foreign += [one for mixture in self.mixtures.values() for stack in mixture.values() for one in stack.foreign()]
        dotted = {part for source in foreign for part in source.held if "." in part}
        suffixes = {f".{part}": f".{parameter(part)}" for part in sorted(dotted)}
        names = self._published_names()
        own = own_stacks_mapper(self.mixtures.values(), names)
        return names | WeightsMapper(orig_to_new_suffix=suffixes, orig_to_new_substr={NOTICE: None}) | own

    def _published_names(self) -> WeightsMapper:
        from halfbyte.hf.quantization_config import published_names

        return WeightsMapper(orig_to_new_renaming=published_names(self.model_type))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        self.stored = hf_to_vllm_mapper.apply_dict(self.stored)
        self.mixtures = hf_to_vllm_mapper.apply_dict(self.mixtures)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        config = get_current_vllm_config()
        if config.load_config.load_format == "dummy":
            raise Unsupported("load_format='dummy' makes up no quantized weights; serve the folder's own: leave load_format out")
        _read_by_mapped_names(config)
        prefix = self.name_in_files(prefix, config.model_config.hf_text_config.num_hidden_layers)
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            if prefix not in self.stored:
                return None
            if not isinstance(layer, ParallelLMHead):
                raise Unsupported(f"{prefix} is a quantized embedding; halfbyte quantizes linear layers only")
            return HalfbyteHead([self.stored[prefix]])
        if isinstance(layer, Attention):
            check_used(config, layer.attn_backend.get_name())
            check_saved(self.cache or {}, layer.attn_backend.get_name())
        if not isinstance(layer, LinearBase):
            return None
        parent, _, child = prefix.rpartition(".")
        shards = self.packed_modules_mapping.get(child) or FUSED.get(child, [child])
        names = [prefix] if prefix in self.stored else [f"{parent}.{shard}".lstrip(".") for shard in shards]
        own = [name for name in names if name in self.stored]
        if not own:
            return UnquantizedLinearMethod()
        if own != names:
            raise Unsupported(f"{prefix}: {own} are quantized and the rest of {names} is not; vLLM computes them together")
        return HalfbyteLinear([self.stored[name] for name in names])

    def name_in_files(self, prefix: str, layers: int) -> str:
        """What files call a module, of a model with so many layers: those of MTP heads may be numbered by themselves there."""
        place = LAYER.fullmatch(prefix)
        if place is None or int(place[2]) < layers:
            return prefix
        index = int(place[2])
        names = (f"{place[1]}layers.{index}.", *(f"{place[1]}{mtp}.{index - layers}." for mtp in ("mtp_layers", "mtp_block")))
        modules = (*self.stored, *self.mixtures)
        return next((name + place[3] for name in names if any(module.startswith(name) for module in modules)), prefix)

    def _experts_method(self, layer: RoutedExperts, prefix: str) -> HalfbyteExperts | None:
        """None: in 16 bits."""
        mixture = self.mixtures.get(prefix)
        return None if mixture is None else HalfbyteExperts(layer, prefix, mixture)


def _read_by_mapped_names(config: Any) -> None:
    """Let the classes of an engine's model and its drafts rename what they read: some, as most MTP heads, ask no configuration."""
    from vllm.model_executor.model_loader import get_model_architecture

    speculation = config.speculative_config
    for model_config in (config.model_config, None if speculation is None else speculation.draft_model_config):
        model = None if model_config is None else get_model_architecture(model_config)[0]
        if model is not None and not hasattr(model.load_weights, "by_mapped_names"):
            model.load_weights = _by_mapped_names(model.load_weights)


def _by_mapped_names(load_weights: Callable[..., Any]) -> Callable[..., Any]:
    """`load_weights` of a model, by names of parameters where one of its layers has a `HalfbyteConfig`."""

    @functools.wraps(load_weights)
    def load(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **options: Any) -> Any:
        configs = (getattr(module, "quant_config", None) for module in model.modules())
        config = next((config for config in configs if isinstance(config, HalfbyteConfig)), None)
        if config is not None:
            weights = config.get_checkpoint_weight_mapper().apply(weights)
        return load_weights(model, weights, *args, **options)

    load.by_mapped_names = True  # type: ignore[attr-defined]
    return load


class HalfbyteLinear(LinearMethodBase):  # type: ignore[misc]
    """The weights of one layer of vLLM: those of one module, or of several that vLLM fuses."""

    def __init__(self, stored: Sequence[Own | Foreign]) -> None:
        self.stored = stored
        #: Ranks exchange x: columns are in another order.
        self._gathers = False

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Parameters that catch what the files hold: one element for each stored weight with a tensor of that name."""
        layer.halfbyte_sizes = (output_partition_sizes, input_size_per_partition, input_size)
        self._dtype, self._most_rows = params_dtype, self._rows(get_current_vllm_config().scheduler_config)
        self._forget(layer)
        expected = [stored.tensors(input_size) for stored in self.stored]
        for name in sorted(set().union(*expected)):
            catchers = catcher(sum(name in names for names in expected), self._loader(layer, name))
            layer.register_parameter(parameter(name), catchers)
        layer.halfbyte_catchers = sorted(parameter(name) for name in set().union(*expected))

    def _rows(self, scheduler: Any) -> int:
        """The largest M of a step."""
        return int(scheduler.max_num_batched_tokens)

    def _forget(self, layer: Any) -> None:
        """Nothing is loaded yet."""
        layer.halfbyte_found = [{} for _ in self.stored]
        layer.halfbyte_weights = [None for _ in self.stored]

    def _loader(self, layer: Any, name: str) -> Callable[..., None]:
        """What vLLM calls with each tensor of this name. Its parameters outlive the layer, which it must not keep alive."""
        there = weakref.ref(layer)

        def load(param: Parameter, loaded: torch.Tensor, shard_id: Any = None) -> None:
            if not counted(param):
                shard = getattr(loaded, "shard_id", None) if shard_id is None else shard_id
                self._catch(there(), name, param.device, loaded, shard)

        return load

    def _catch(self, layer: Any, name: str, device: torch.device, loaded: torch.Tensor, shard: Any) -> None:
        """Keep one tensor; once they are all there, make the weight of this rank of them."""
        index = 0 if shard is None else shard if isinstance(shard, int) else "qkv".index(shard)
        source, tensors = self.stored[index], layer.halfbyte_found[index]
        tensors[name] = loaded
        if layer.halfbyte_weights[index] is None and source.complete(tensors):
            wholes = _out_features(layer)
            rows = sum(wholes) if len(self.stored) == 1 else wholes[index]
            weight = source.weight(tensors, (rows, layer.halfbyte_sizes[2]))
            layer.halfbyte_weights[index] = self._share(layer, index, weight, device).to(device)
            tensors.clear()

    def _share(self, layer: Any, index: int, weight: QuantTensor, device: torch.device) -> QuantTensor:
        """What this rank computes with: rows of a column-parallel layer, columns of a row-parallel one."""
        _, columns, all_columns = layer.halfbyte_sizes
        ranges = self._ranges(layer, index)
        if ranges != [(0, weight.shape[0])] or columns != all_columns:
            weight = without_nested_scales(weight)
        if columns != all_columns:
            begin = layer.tp_rank * (all_columns // columns) // layer.tp_size * columns
            if weight.perm is not None:
                self._gathers = True
                layer.register_buffer("halfbyte_gather", weight.perm[begin : begin + columns].to(device, torch.int64))
            weight = columns_of(weight, begin, begin + columns, self.stored[index].name)
        return rows_of(weight, ranges)

    def _ranges(self, layer: Any, index: int) -> list[tuple[int, int]]:
        """The rows of a stored weight that this rank has: some of each module that the weight consists of."""
        sizes, wholes = layer.halfbyte_sizes[0], _out_features(layer)
        if len(self.stored) > 1:
            sizes, wholes = sizes[index : index + 1], wholes[index : index + 1]
        ranges, at = [], 0
        for whole, size in zip(wholes, sizes, strict=True):
            begin = at + layer.tp_rank * (whole // size) // layer.tp_size * size  # ranks may share KV heads
            ranges.append((begin, begin + size))
            at += whole
        return [(0, at)] if sizes == wholes else ranges

    def process_weights_after_loading(self, layer: Any) -> None:
        """The weights become parameters, in the place of those that caught their parts."""
        for source, weight, tensors in zip(self.stored, layer.halfbyte_weights, layer.halfbyte_found, strict=True):
            if weight is None:
                raise CheckpointError(f"{source.name}: of its weight the files hold only {sorted(tensors) or 'nothing'}")
        for name in layer.halfbyte_catchers:
            delattr(layer, name)
        weights = merged(layer.halfbyte_weights)
        self._forget(layer)
        for i, weight in enumerate(weights):
            for name, part in weight.parts().items():
                layer.register_parameter(f"weight{i}_{name}", Parameter(part, requires_grad=False))
        layer.qweight = layer.weight0_codes  # a LoRA layer asks on which device it is
        layer.halfbyte_names = [[f"weight{i}_{name}" for name in weight.parts()] for i, weight in enumerate(weights)]
        layer.halfbyte_formats = [weight.format.name for weight in weights]
        layer.halfbyte_rows = [weight.shape[0] for weight in weights]
        device = weights[0].codes.device
        self._level = level_of(torch.empty(0, dtype=self._dtype, device=device))
        replay_in_turn(device)
        self._begin_to_compile(layer, weights)

    def _begin_to_compile(self, layer: Any, weights: Sequence[QuantTensor]) -> None:
        """Compile kernels in the background, unless ranks exchange x first."""
        half, width, device = HALVES.get(self._dtype), weights[0].shape[1], weights[0].codes.device
        if half is None or self._gathers:
            return
        JitWarmupRegistry.register(KERNELS)
        there = weakref.ref(layer)
        bias = None if getattr(layer, "skip_bias_add", False) else getattr(layer, "bias", None)

        def multiply(rows: int) -> None:
            layer = there()
            if layer is not None:
                self.apply(layer, torch.empty(rows, width, dtype=self._dtype, device=device), bias)

        for begin in range(0, len(weights), MOST_PROJECTIONS):
            shapes = tuple((weight.format, weight.shape[0]) for weight in weights[begin : begin + MOST_PROJECTIONS])
            problem = GemmProblem(shapes, 1, width, half)
            compile_layer([problem], bias is not None, self._most_rows, device, multiply)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N], of all the layer's weights side by side."""
        if self._gathers:
            x = tensor_model_parallel_all_gather(x).index_select(-1, layer.halfbyte_gather)
        weights = [[getattr(layer, name) for name in names] for names in layer.halfbyte_names]
        formats, rows = layer.halfbyte_formats, layer.halfbyte_rows
        if len(weights) == 1:
            return linear_of_parts(x, weights[0], bias, formats[0], level=self._level)
        biases = [None] * len(rows) if bias is None else list(bias.split(rows))
        outs: list[torch.Tensor] = []
        for begin in range(0, len(weights), MOST_PROJECTIONS):
            some = slice(begin, begin + MOST_PROJECTIONS)
            outs += projections_of_parts(x, weights[some], biases[some], formats[some], level=self._level)
        return torch.cat(outs, -1)


class HalfbyteHead(HalfbyteLinear):
    """An output layer, of which each rank has the rows of some tokens."""

    def _rows(self, scheduler: Any) -> int:
        return int(scheduler.max_num_seqs)

    def _ranges(self, layer: Any, index: int) -> list[tuple[int, int]]:
        return [(layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index)]

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The same number of logits on each rank: those of tokens that there are not are dropped by vLLM."""
        out = super().apply(layer, x, bias)
        missing = layer.num_embeddings_per_partition - out.shape[-1]
        return torch.nn.functional.pad(out, (0, missing)) if missing else out


def _out_features(layer: Any) -> list[int]:
    """Out features over all ranks of each module that vLLM computes in a layer."""
    if isinstance(layer, VocabParallelEmbedding):
        return [layer.org_vocab_size]
    if isinstance(layer, QKVParallelLinear):
        heads, kv_heads = layer.total_num_heads, layer.total_num_kv_heads
        return [heads * layer.head_size, kv_heads * layer.head_size, kv_heads * layer.v_head_size]
    return list(getattr(layer, "output_sizes", [layer.output_size]))
