"""`--quantization halfbyte`: vLLM's linear layers over folders that `halfbyte quantize` wrote.

vLLM reads a file tensor by tensor. The parts of one stored weight are collected until all are there, then checked, cut to what this
rank computes (`shares`), and moved to the device. q, k and v, or gate and up, become one weight where they can be one; otherwise
they stay several, computed in one launch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter
from vllm import envs
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, QKVParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.utils import set_weight_attrs

from halfbyte.checkpoints.adapters import OWN, STOP
from halfbyte.checkpoints.safetensors_files import check_perm, check_scales
from halfbyte.errors import CheckpointError, HalfbyteError, Unsupported
from halfbyte.formats import Format, weight_format
from halfbyte.ops.linear import linear_of_parts, projections_of_parts
from halfbyte.tensors import QuantTensor, expected_parts
from halfbyte.vllm.shares import columns_of, merged, rows_of, without_nested_scales

#: Weights that one launch computes.
MOST_PROJECTIONS = 3


class Stored(NamedTuple):
    """A weight in the files: the name of its module, its format, whether it is in act-order."""

    name: str
    format: Format
    act_order: bool

    def parts(self, shape: tuple[int, int]) -> Mapping[str, Any]:
        return expected_parts(self.format, shape, act_order=self.act_order)


class HalfbyteConfig(QuantizationConfig):  # type: ignore[misc]
    """`quantization_config` of config.json: module name -> weight format, and which are in act-order. Workers get it pickled."""

    def __init__(self, modules: dict[str, str], act_order: Sequence[str]) -> None:
        super().__init__()
        self.modules, self.act_order = modules, list(act_order)

    @classmethod
    def get_name(cls) -> str:
        return OWN

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        """Every tensor of the files is wanted."""
        return WeightsMapper()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> HalfbyteConfig:
        from halfbyte.hf.quantization_config import HalfbyteConfig as Written

        if envs.VLLM_BATCH_INVARIANT:
            raise Unsupported(
                "VLLM_BATCH_INVARIANT=1 is not implemented for weights that halfbyte quantized; leave one of them out"
            )
        written = Written(**config)
        return cls(written.modules, written.act_order)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        self.modules = hf_to_vllm_mapper.apply_dict(self.modules)
        self.act_order = hf_to_vllm_mapper.apply_list(self.act_order)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, RoutedExperts) and any(name.startswith(f"{prefix}.") for name in self.modules):
            raise Unsupported(f"{prefix} has quantized experts, which vLLM computes together; halfbyte's plugin has no op for that")
        if isinstance(layer, VocabParallelEmbedding) and prefix in self.modules:
            raise Unsupported(
                f"{prefix} is quantized, and vLLM shares it out by vocabulary; quantize with skip_modules=({prefix!r},)"
            )
        if not isinstance(layer, LinearBase):
            return None
        parent, _, child = prefix.rpartition(".")
        names = [f"{parent}.{shard}".lstrip(".") for shard in self.packed_modules_mapping.get(child, [child])]
        found = [name for name in names if name in self.modules]
        if not found:
            return UnquantizedLinearMethod()
        if found != names:
            raise Unsupported(f"{prefix}: {found} are quantized and the rest of {names} is not; vLLM computes them together")
        return HalfbyteLinear([Stored(n, weight_format(self.modules[n]), n in self.act_order) for n in names])


class HalfbyteLinear(LinearMethodBase):  # type: ignore[misc]
    """The weights of one layer of vLLM: those of one module, or of several that vLLM fuses."""

    def __init__(self, stored: list[Stored]) -> None:
        self.stored = stored

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
        """Empty parameters that catch what the files hold."""
        layer.halfbyte_found = [{} for _ in self.stored]
        layer.halfbyte_weights = [None for _ in self.stored]
        layer.halfbyte_sizes = (output_partition_sizes, input_size_per_partition, input_size)
        dtypes = {"": torch.float32}
        for stored in self.stored:
            dtypes |= {f"_{part}": dtype for part, (_, dtype) in stored.parts((1, input_size)).items()}
        for suffix, dtype in dtypes.items():
            catcher = Parameter(torch.empty(STOP, dtype=dtype), requires_grad=False)
            set_weight_attrs(catcher, {"weight_loader": functools.partial(self._catch, layer, suffix.removeprefix("_"))})
            layer.register_parameter(f"weight{suffix}", catcher)

    def _catch(self, layer: Any, part: str, catcher: Parameter, loaded: torch.Tensor, shard_id: Any = None) -> None:
        """Keep one part; once they are all there, make the weight of this rank of them."""
        if not part:
            return  # the empty tensor that stops loaders which do not know halfbyte
        shard = getattr(loaded, "shard_id", None) if shard_id is None else shard_id
        index = 0 if shard is None else shard if isinstance(shard, int) else "qkv".index(shard)
        stored, found = self.stored[index], layer.halfbyte_found[index]
        found[part] = loaded
        if "codes" in found and set(found) >= set(stored.parts(_shape(found, stored.format))):
            weight = _checked(stored, found)
            layer.halfbyte_weights[index] = self._share(layer, index, weight).to(catcher.device)
            found.clear()

    def _share(self, layer: Any, index: int, weight: QuantTensor) -> QuantTensor:
        """What this rank computes with: rows of a column-parallel layer, columns of a row-parallel one."""
        sizes, columns, all_columns = layer.halfbyte_sizes
        if len(self.stored) > 1:
            sizes = [sizes[index]]
        if weight.shape[1] != all_columns:
            raise CheckpointError(f"{self.stored[index].name} has {weight.shape[1]} in features; the model has {all_columns}")
        if sum(sizes) != weight.shape[0] or columns != all_columns:
            weight = without_nested_scales(weight)
        if columns != all_columns:
            begin = layer.tp_rank * (all_columns // columns) // layer.tp_size * columns
            if weight.perm is not None:
                layer.register_buffer("halfbyte_gather", weight.perm[begin : begin + columns].long(), persistent=False)
            weight = columns_of(weight, begin, begin + columns, self.stored[index].name)
        return rows_of(weight, _rows(layer, sizes, weight.shape[0], self.stored[index].name))

    def process_weights_after_loading(self, layer: Any) -> None:
        """The weights become parameters, in the place of those that caught their parts."""
        for stored, weight, found in zip(self.stored, layer.halfbyte_weights, layer.halfbyte_found, strict=True):
            if weight is None:
                raise CheckpointError(f"{stored.name}: of its weight the files hold only {sorted(found) or 'nothing'}")
        for name in [name for name in layer._parameters if name.startswith("weight")]:
            delattr(layer, name)
        weights = merged(layer.halfbyte_weights)
        del layer.halfbyte_found, layer.halfbyte_weights, layer.halfbyte_sizes
        for i, weight in enumerate(weights):
            for name, part in weight.parts().items():
                layer.register_parameter(f"weight{i}_{name}", Parameter(part, requires_grad=False))
        layer.qweight = layer.weight0_codes  # a LoRA layer asks on which device it is
        layer.halfbyte_names = [[f"weight{i}_{name}" for name in weight.parts()] for i, weight in enumerate(weights)]
        layer.halfbyte_formats = [weight.format.name for weight in weights]
        layer.halfbyte_rows = [weight.shape[0] for weight in weights]

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N], of all the layer's weights side by side."""
        gather = getattr(layer, "halfbyte_gather", None)
        if gather is not None:
            x = tensor_model_parallel_all_gather(x).index_select(-1, gather)
        weights = [[getattr(layer, name) for name in names] for names in layer.halfbyte_names]
        formats, rows = layer.halfbyte_formats, layer.halfbyte_rows
        if len(weights) == 1:
            return linear_of_parts(x, weights[0], bias, formats[0])
        biases = [None] * len(rows) if bias is None else list(bias.split(rows))
        outs: list[torch.Tensor] = []
        for begin in range(0, len(weights), MOST_PROJECTIONS):
            some = slice(begin, begin + MOST_PROJECTIONS)
            outs += projections_of_parts(x, weights[some], biases[some], formats[some])
        return torch.cat(outs, -1)


def _shape(found: Mapping[str, torch.Tensor], fmt: Format) -> tuple[int, int]:
    """Rows and columns of the weight with these codes."""
    codes = found["codes"]
    return (codes.shape[0], codes.shape[1] * fmt.code.per_byte) if codes.ndim == 2 else (0, 0)


def _checked(stored: Stored, found: Mapping[str, torch.Tensor]) -> QuantTensor:
    """The weight of these parts. Raises `CheckpointError` for a damaged one, naming it."""
    try:
        weight = QuantTensor(stored.format, _shape(found, stored.format), **found)
    except HalfbyteError as error:
        raise CheckpointError(f"{stored.name}: {error}") from error
    check_scales(stored.name, stored.format, weight.parts())
    if weight.perm is not None:
        check_perm(f"{stored.name}.weight_perm", weight.perm)
    return weight


def _rows(layer: Any, sizes: Sequence[int], stored: int, name: str) -> list[tuple[int, int]]:
    """The rows, of those that are stored, that this rank has: `sizes` of them from each module that the weight consists of."""
    wholes = _wholes(layer, sizes, stored)
    if sum(wholes) != stored or any(whole % size for whole, size in zip(wholes, sizes, strict=True)):
        raise CheckpointError(f"{name} has {stored} out features; vLLM expects {wholes} and takes {list(sizes)} of them")
    found, at = [], 0
    for whole, size in zip(wholes, sizes, strict=True):
        begin = at + layer.tp_rank * (whole // size) // layer.tp_size * size  # ranks may share KV heads
        found.append((begin, begin + size))
        at += whole
    return found


def _wholes(layer: Any, sizes: Sequence[int], stored: int) -> list[int]:
    """Out features over all ranks of each module that the weight consists of: several where the files hold q, k and v as one."""
    if len(sizes) == 1:
        return [stored]
    if isinstance(layer, QKVParallelLinear):
        heads, kv_heads = layer.total_num_heads, layer.total_num_kv_heads
        return [heads * layer.head_size, kv_heads * layer.head_size, kv_heads * layer.v_head_size]
    return list(layer.output_sizes)
