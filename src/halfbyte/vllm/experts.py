"""Mixtures of experts under `--quantization halfbyte`: vLLM's routed experts over packed stacks [E, N, K].

A folder of halfbyte holds a stack as one tensor a part, which is loaded here; other libraries' files hold one expert a tensor,
which vLLM's own loaders bring. Either way tensors are collected as those of linear layers are (`weights`), and become one stack a
projection, of which this rank keeps its share: rows of gate and up, which alternate, and columns of down.
"""

from __future__ import annotations

import math
import re
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

from halfbyte.checkpoints.experts import DOWN, EXPERT, GATE, UP, alternating, stack, without_nested_scales
from halfbyte.errors import CheckpointError, Unsupported
from halfbyte.formats import Shape
from halfbyte.ops.by_plan import HALVES
from halfbyte.ops.experts_mlp import Projection, experts_mlp
from halfbyte.ops.workspace import replay_in_turn
from halfbyte.plans.gemm_problem import GemmProblem, Routing
from halfbyte.reference.experts import KINDS, Activation
from halfbyte.tensors import QuantTensor
from halfbyte.vllm.shares import columns_of, rows_of
from halfbyte.vllm.stored import Foreign, Own, catcher, counted, parameter
from halfbyte.vllm.warm_up import KERNELS, compile_layer

#: The projections of a mixture as folders of halfbyte call them, and vLLM.
PROJECTIONS = {"gate_up_proj": "w13", "down_proj": "w2"}
#: What vLLM has between the name of a mixture and its parameters.
INNER = "routed_experts"
#: Begins the names of parameters that catch parts of a folder's stacks: no rule of vLLM's about names of files has it.
PACKED = "packed_"


class OwnStack(NamedTuple):
    """A stack that halfbyte wrote: one tensor a part."""

    projection: str
    stored: Own

    def tensors(self, bias: bool) -> dict[str, int]:
        """Parameter -> how many tensors it catches."""
        parts = self.stored.tensors(1) - {"weight"} | ({"bias"} if bias else set())
        return {f"{PACKED}{PROJECTIONS[self.projection]}_{part}": 1 for part in parts}

    def foreign(self) -> Iterable[Foreign]:
        return ()

    def key(self, caught_by: str, expert: int, shard: str) -> str:
        return caught_by.removeprefix(f"{PACKED}{PROJECTIONS[self.projection]}_")

    def complete(self, found: Mapping[Any, torch.Tensor]) -> bool:
        return self.stored.complete(found)

    def weight(self, found: Mapping[Any, torch.Tensor], shape: Shape) -> QuantTensor:
        return self.stored.weight(found, shape)


class ForeignStack(NamedTuple):
    """A stack of another library's weights, by (expert, half): a half is 1 for the up projection, else 0."""

    projection: str
    experts: dict[tuple[int, int], Foreign]

    def tensors(self, bias: bool) -> dict[str, int]:
        if bias:
            raise Unsupported(f"{self.experts[min(self.experts)].name}: experts with biases are read from folders of halfbyte only")
        count = Counter(part for stored in self.experts.values() for part in stored.held)
        return {f"{PROJECTIONS[self.projection]}_{parameter(part)}": n for part, n in count.items()}

    def foreign(self) -> Iterable[Foreign]:
        return self.experts.values()

    def key(self, caught_by: str, expert: int, shard: str) -> tuple[int, int, str]:
        half = int(shard == "w3")
        part = caught_by.removeprefix(f"{PROJECTIONS[self.projection]}_")
        return expert, half, next(held for held in self.experts[expert, half].held if parameter(held) == part)

    def complete(self, found: Mapping[Any, torch.Tensor]) -> bool:
        return len(found) == sum(len(stored.held) for stored in self.experts.values())

    def weight(self, found: Mapping[Any, torch.Tensor], shape: Shape) -> QuantTensor:
        count, features, width = shape
        halves = 2 if self.projection == "gate_up_proj" else 1
        parts: dict[tuple[int, int], dict[str, torch.Tensor]] = {place: {} for place in self.experts}
        for (expert, half, part), tensor in found.items():
            parts[expert, half][part] = tensor
        name = EXPERT.sub(r"\1", self.experts[min(self.experts)].name)
        for expert in range(count):
            if any((expert, half) not in self.experts for half in range(halves)):
                raise CheckpointError(f"{name}: expert {expert} is missing or not quantized; experts are read as a whole")
        size = (features // halves, width)
        each = [[self.experts[expert, half] for half in range(halves)] for expert in range(count)]
        weights = [{one.name: one.weight(parts[e, half], size) for half, one in enumerate(x)} for e, x in enumerate(each)]
        return stack(f"{name}.{self.projection}", weights, [alternating(halves, size[0])] * count)


#: Projection -> its stack, of one mixture.
Mixture = dict[str, OwnStack | ForeignStack]


def sorted_out(stored: Mapping[str, Own | Foreign]) -> tuple[dict[str, Own | Foreign], dict[str, Mixture]]:
    """The weights of linear layers, by name; and mixtures, by the name of the module that holds their experts."""
    linear: dict[str, Own | Foreign] = {}
    mixtures: dict[str, Mixture] = {}
    for name, weight in stored.items():
        owner, _, child = name.rpartition(".")
        place = EXPERT.fullmatch(name)
        if isinstance(weight, Own) and child in PROJECTIONS and owner.endswith(".experts"):
            mixtures.setdefault(owner, {})[child] = OwnStack(child, weight)
        elif isinstance(weight, Foreign) and place and place[3] in (*GATE, *UP, *DOWN):
            projection = "down_proj" if place[3] in DOWN else "gate_up_proj"
            foreign = mixtures.setdefault(place[1], {}).setdefault(projection, ForeignStack(projection, {}))
            assert isinstance(foreign, ForeignStack)
            foreign.experts[int(place[2]), int(place[3] in UP)] = weight
        else:
            linear[name] = weight
    return linear, mixtures


def own_stacks_mapper(mixtures: Iterable[Mixture], names: WeightsMapper) -> WeightsMapper:
    """Renames the parts of stacks in folders of halfbyte to parameters, and drops what stops other loaders at them.

    names: applied before
    """
    own = [stack.stored.name for mixture in mixtures for stack in mixture.values() if isinstance(stack, OwnStack)]
    stacks = names.apply_list(own)
    if not stacks:
        return WeightsMapper()
    patterns: dict[re.Pattern[str], str | None] = {re.compile(rf"^({'|'.join(map(re.escape, stacks))})$"): None}
    for ours, theirs in PROJECTIONS.items():
        patterns[re.compile(rf"\.experts\.{ours}\.(\w+)$")] = rf".experts.{INNER}.{PACKED}{theirs}_\1"
    return WeightsMapper(orig_to_new_regex=patterns)


class HalfbyteExperts(FusedMoEMethodBase):  # type: ignore[misc]
    """The routed experts of one layer. Raises `Unsupported`, naming the layer, for unsupported configurations."""

    def __init__(self, layer: Any, name: str, mixture: Mixture) -> None:
        super().__init__(layer.moe_config)
        self.name, self.activation = name, _activation(layer, name)
        self._most_tokens: int = get_current_vllm_config().scheduler_config.max_num_batched_tokens
        if set(mixture) != set(PROJECTIONS):
            raise Unsupported(f"{name}: only {', '.join(mixture)} is quantized; experts are computed with both projections packed")
        self.stacks = [mixture[projection] for projection in PROJECTIONS]
        _check_parallel(layer, name)

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        """Of the ids that `apply` gets: kernels are compiled for it."""
        return torch.int32

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: vLLM's own kernels are not used."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Parameters that catch what the files hold: one element for each tensor that comes."""
        inner = self.moe.intermediate_size
        if inner != intermediate_size_per_partition * self.moe.tp_size:
            raise Unsupported(f"{self.name}: {inner} rows of an expert cannot be cut for {self.moe.tp_size} ranks; use fewer")
        layer.halfbyte_shapes = ((num_experts, 2 * inner, hidden_size), (num_experts, hidden_size, inner))
        self._forget(layer)
        layer.halfbyte_catchers = {}
        for index, source in enumerate(self.stacks):
            for name, count in source.tensors(self.moe.has_bias).items():
                layer.register_parameter(name, catcher(count, self._loader(layer, index, name)))
                layer.halfbyte_catchers[name] = index
        if isinstance(self.stacks[0], OwnStack):
            layer.load_weights = _load_weights_of(layer)

    def _forget(self, layer: Any) -> None:
        """Nothing is loaded yet."""
        layer.halfbyte_found = [{} for _ in self.stacks]
        layer.halfbyte_weights = [None for _ in self.stacks]
        layer.halfbyte_biases = [None for _ in self.stacks]

    def _loader(self, layer: Any, index: int, name: str) -> Callable[..., bool | None]:
        """What vLLM calls with each tensor for this parameter, which outlives the layer and must not keep it alive."""
        there, source = weakref.ref(layer), self.stacks[index]

        def load(
            param: Parameter,
            loaded_weight: torch.Tensor,
            weight_name: str = "",
            shard_id: str = "",
            expert_id: int = 0,
            return_success: bool = False,
        ) -> bool | None:
            if not counted(param):
                self._catch(there(), index, source.key(name, expert_id, shard_id), param.device, loaded_weight)
            return True if return_success else None

        return load

    def _catch(self, layer: Any, index: int, key: Hashable, device: torch.device, loaded: torch.Tensor) -> None:
        """Keep one tensor; once they are all there, make the stack of this rank of them."""
        if key == "bias":
            layer.halfbyte_biases[index] = self._bias_share(index, loaded).to(device)
            return
        source, tensors = self.stacks[index], layer.halfbyte_found[index]
        tensors[key] = loaded
        if layer.halfbyte_weights[index] is None and source.complete(tensors):
            weight = source.weight(tensors, layer.halfbyte_shapes[index])
            layer.halfbyte_weights[index] = self._share(index, weight).to(device)
            tensors.clear()

    def _share(self, index: int, weight: QuantTensor) -> QuantTensor:
        """What this rank computes with."""
        rank, ranks = self.moe.tp_rank, self.moe.tp_size
        if ranks == 1:
            return weight
        weight = without_nested_scales(weight)
        size = weight.shape[1 + index] // ranks
        begin, end = rank * size, (rank + 1) * size
        if index == 0:
            return rows_of(weight, [(begin, end)])
        if weight.perm is not None:
            raise Unsupported(f"{self.name}.down_proj is in act-order, and cannot be cut for {ranks} ranks; use one")
        return columns_of(weight, begin, end, f"{self.name}.down_proj")

    def _bias_share(self, index: int, bias: torch.Tensor) -> torch.Tensor:
        """Of gate and up, the rows of this rank; the results of down are added up over ranks, so one rank has its bias."""
        if index == 0:
            size = bias.shape[1] // self.moe.tp_size
            return bias.narrow(1, self.moe.tp_rank * size, size).contiguous()
        return bias if self.moe.tp_rank == 0 else torch.zeros_like(bias)

    def process_weights_after_loading(self, layer: Any) -> None:
        """The stacks become parameters, in the place of those that caught their parts."""
        for name, weight, bias in zip(PROJECTIONS, layer.halfbyte_weights, layer.halfbyte_biases, strict=True):
            if weight is None or (self.moe.has_bias and bias is None):
                raise CheckpointError(f"{self.name}.{name}: the files do not hold all parts of it")
        for name in layer.halfbyte_catchers:
            delattr(layer, name)
        layer.halfbyte_names = []
        for projection, weight, bias in zip(PROJECTIONS, layer.halfbyte_weights, layer.halfbyte_biases, strict=True):
            parts = weight.parts() | ({} if bias is None else {"bias": bias.to(layer.params_dtype)})
            for name, part in parts.items():
                layer.register_parameter(f"{projection}_stack_{name}", Parameter(part, requires_grad=False))
            layer.halfbyte_names.append([f"{projection}_stack_{name}" for name in weight.parts()])
        layer.halfbyte_formats = [weight.format.name for weight in layer.halfbyte_weights]
        device = layer.halfbyte_weights[0].codes.device
        replay_in_turn(device)
        self._begin_to_compile(layer, device)
        self._forget(layer)

    def _begin_to_compile(self, layer: Any, device: torch.device) -> None:
        """Compile kernels in the background, for every number of tokens."""
        dtype, top_k, there = self.moe.in_dtype, self.moe.experts_per_token, weakref.ref(layer)
        if (half := HALVES.get(dtype)) is None:
            return
        up, down = (
            GemmProblem(
                ((weight.format, weight.shape[1]),),
                1,
                weight.shape[2],
                half,
                Routing(weight.shape[0], top_k, shared=i == 0, gated=i == 1, ids_early=i == 1),
                self.activation if i == 0 else None,
            )
            for i, weight in enumerate(layer.halfbyte_weights)
        )

        def multiply(tokens: int) -> None:
            if (layer := there()) is not None:
                gates = torch.empty(tokens, top_k, device=device)
                x, ids = torch.empty(tokens, up.width, dtype=dtype, device=device), torch.zeros_like(gates, dtype=torch.int32)
                self.apply(layer, x, gates, ids, None, None)

        JitWarmupRegistry.register(KERNELS)
        compile_layer([up, down], self.moe.has_bias, self._most_tokens, device, multiply)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """x [T, hidden size] -> [T, hidden size], this rank's part of the sum. vLLM computes and adds shared experts."""
        facts = zip(PROJECTIONS, layer.halfbyte_names, layer.halfbyte_formats, strict=True)
        up, down = (
            Projection([getattr(layer, part) for part in parts], fmt, getattr(layer, f"{projection}_stack_bias", None))
            for projection, parts, fmt in facts
        )
        return experts_mlp(x, up, down, topk_ids, topk_weights, self.activation)


def _load_weights_of(layer: Any) -> Callable[[Iterable[tuple[str, torch.Tensor]]], Iterator[str]]:
    """`load_weights` of a layer that takes tensors by the names of parameters; vLLM's takes them by those of experts."""
    there = weakref.ref(layer)

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
        layer: Any = there()
        for name, tensor in weights:
            own = name.removeprefix(f"{INNER}.")
            param = getattr(layer, own, None)  # of a packed stack, or the router's bias in some models
            if not isinstance(param, Parameter):
                raise CheckpointError(f"{layer.layer_name}.{name} is in the files; expected the parts of packed stacks only")
            getattr(param, "weight_loader", default_weight_loader)(param, tensor)
            yield own

    return load


def _activation(layer: Any, name: str) -> Activation:
    """The activation of a layer, whose numbers vLLM keeps next to its name."""
    moe = layer.moe_config
    kind, limit = moe.activation.value, math.inf if moe.swiglu_limit is None else moe.swiglu_limit
    if kind == "swigluoai":  # of gpt-oss, whose numbers vLLM has in its op
        return Activation("silu", 1.702, 7.0, 1.0)
    if kind == "swigluoai_uninterleave":
        return Activation("silu", moe.swiglu_alpha or 1.0, limit, moe.swiglu_beta or 0.0)
    if kind not in KINDS:
        raise Unsupported(f"{name}: activation {kind!r} of experts; halfbyte computes {', '.join(KINDS)} and swigluoai")
    return Activation(kind, limit=limit if kind == "silu" else math.inf)


def _check_parallel(layer: Any, name: str) -> None:
    """Raise for ways to run a mixture that halfbyte's op does not support."""
    moe = layer.moe_config
    parallel = moe.moe_parallel_config
    kinds = {
        "expert parallelism": parallel.use_ep,
        "data parallelism": parallel.dp_size > 1 or parallel.pcp_size > 1,
        "LoRA": moe.is_lora_enabled,
        "a router that scales the input of experts": layer.apply_router_weight_on_input,
    }
    if reasons := [what for what, requested in kinds.items() if requested]:
        raise Unsupported(f"{name} has quantized experts, which halfbyte does not serve with {' and '.join(reasons)}; leave it out")
