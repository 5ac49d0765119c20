"""Linear layers with quantized weights, and fused projections: several layers of one input in one launch."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from threading import get_ident
from typing import Any, Self, TypeVar

import torch
from torch import nn

from halfbyte.errors import Unsupported, check
from halfbyte.formats import Format, Shape, weight_format
from halfbyte.modules import dense_weight, keep_hooks
from halfbyte.ops.linear import linear, linear_of_parts, projections, projections_of_parts
from halfbyte.reference.quantize import quantize
from halfbyte.tensors import PARTS, QuantTensor, expected_parts
from halfbyte.transforms import refuse_transforms

LinearT = TypeVar("LinearT", bound="QuantLinear")

#: A layer's parameters that are its weight, in storage order.
_WEIGHT = tuple(f"weight_{name}" for name in PARTS)


class NoTensor(Unsupported, AttributeError):
    """A quantized weight was used as a tensor. An AttributeError, so that `hasattr` returns False."""


class LayerWeight(QuantTensor):
    """The weight of a layer. Not a tensor: the tensor attributes that models use raise. They are listed because Dynamo cannot trace
    a `__getattr__`.
    """

    #: transformers must not fill it with random numbers (GPT-2 does so with every `c_proj.weight`).
    _is_hf_initialized = True

    def _refuse(self, *args: object, **kwargs: object) -> Any:
        raise NoTensor(
            f"the weight {list(self.shape)} of a layer is quantized ({self.format.name}), and the model "
            f"computes with it as a tensor instead of calling the layer; leave that layer in 16 bits (skip_modules)"
        )

    dtype = data = T = mT = t = float = half = detach = clone = view = transpose = div_ = mul_ = property(_refuse)
    size = type = reshape = squeeze = unsqueeze = copy_ = requires_grad = requires_grad_ = property(_refuse)
    __matmul__ = __rmatmul__ = __mul__ = __rmul__ = __add__ = __radd__ = __getitem__ = _refuse

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """torch.nn.functional.linear(x, layer.weight) and the like."""
        return next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, cls))._refuse()

    def parts(self) -> dict[str, torch.Tensor]:
        """As in QuantTensor, written so that torch.compile follows it on Python 3.11."""
        tensors = {name: getattr(self, name) for name in PARTS}
        return {name: part for name, part in tensors.items() if part is not None}


class QuantLayer(nn.Module):
    """A module with a quantized weight and a bias of one element per row.

    The parts of the QuantTensor are parameters without gradient named weight_codes, weight_scales, ... with the out features first,
    so that checkpoints, device maps and tensor parallelism treat them like any weight. Casting the module (`.half()`, `.to(dtype)`)
    casts the bias, but never these parameters.
    """

    bias: nn.Parameter | None

    def __init__(self, weight: QuantTensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.format_name = weight.format.name
        for name, part in weight.parts().items():
            self.register_parameter(f"weight_{name}", nn.Parameter(part, requires_grad=False))
        if bias is not None:
            check(bias.shape == weight.shape[:-1], f"bias has shape {list(bias.shape)}; the weight has {list(weight.shape)}")
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
        #: The weight, and what it was made of: the parameters, and the type of the scales.
        self._weight: tuple[QuantTensor, tuple[object, ...]] | None = None

    @classmethod
    def empty(
        cls, shape: Shape, fmt: Format, bias_dtype: torch.dtype | None, device: str = "meta", *, act_order: bool = False
    ) -> Self:
        """A layer of the right shapes and types for a checkpoint to be loaded into; without a bias when `bias_dtype` is None."""
        expected = expected_parts(fmt, shape, act_order=act_order)
        parts = {name: torch.empty(size, dtype=dtype, device=device) for name, (size, dtype) in expected.items()}
        bias = None if bias_dtype is None else torch.empty(shape[:-1], dtype=bias_dtype, device=device)
        return cls(QuantTensor(fmt, shape, **parts), bias)

    @property
    def format(self) -> Format:
        """What the codes mean. The layer stores the name only: a `Format` shared by many layers is one more Dynamo guard each."""
        return weight_format(self.format_name)

    @property
    def weight(self) -> QuantTensor:
        """The parameters as a QuantTensor; under tensor parallelism, this rank's shard.

        Cached until a parameter is replaced, so that a decode step does not check shapes again.
        """
        own, known = self._parameters, self._weight
        facts = (*own.values(), getattr(own["weight_scales"], "dtype", None))
        if known is not None and len(known[1]) == len(facts) and all(map(operator.is_, known[1], facts)):
            return known[0]
        parts = {name: local_shard(part) for name, part in self._parts().items()}
        *rows, width = parts["codes"].shape
        shape = (*rows, width * self.format.code.per_byte)
        if not torch.compiler.is_compiling():
            _undo_casts(parts, expected_parts(self.format, shape))
        tensor = LayerWeight(self.format, shape, **parts)
        if not torch.compiler.is_compiling():
            self._weight = None if self._offloaded() else (tensor, (*own.values(), parts["scales"].dtype))
        return tensor

    def _offloaded(self) -> bool:
        """Whether accelerate loads the parameters for each call and frees them after it; a cached weight would keep them alive."""
        hook = getattr(self, "_hf_hook", None)
        return any(getattr(h, "offload", False) for h in getattr(hook, "hooks", (hook,)))

    def _bias(self) -> torch.Tensor | None:
        return None if self.bias is None else local_shard(self.bias)

    def _parts(self) -> dict[str, torch.Tensor]:
        tensors = {name: self._parameters.get(f"weight_{name}") for name in PARTS}
        return {name: part for name, part in tensors.items() if part is not None}

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move the quantized parts wherever `fn` moves tensors, but keep their types: a scale cast to bf16 is another number."""
        before = {name: part.data for name, part in self._parts().items()}
        self._weight = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, part in self._parts().items():
            if part.dtype is not before[name].dtype:
                part.data = before[name].to(part.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """The format goes into the metadata of a state: others have parts of the same shapes and types."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (metadata := getattr(destination, "_metadata", None)) is not None:
            metadata[prefix[:-1]]["halfbyte_format"] = self.format_name

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        if (name := local_metadata.get("halfbyte_format", self.format_name)) != self.format_name:
            errors.append(
                f"{prefix}weight is {name} in the state and {self.format_name} in the model; quantize the model to {name}"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]  # without what `Module.compile` made
        return {**state, "_weight": None}


def _undo_casts(parts: dict[str, torch.Tensor], expected: dict[str, tuple[Shape, torch.dtype]]) -> None:
    """Cast back what was cast to a wider type, as PEFT's prepare_model_for_kbit_training casts parameters; both are exact."""
    for name in parts.keys() & expected.keys():
        if parts[name].dtype.itemsize > expected[name][1].itemsize:
            parts[name].data = parts[name].data.to(expected[name][1])


class QuantLinear(QuantLayer):
    """y = x W^T + b with W [out_features, in_features] quantized."""

    in_features: int
    out_features: int
    #: transformers: under tensor parallelism hand over local shards. Without it TP runs and gives wrong numbers.
    _hf_quantized_needs_local_tp = True
    #: How transformers shares the layer out over ranks (`hf/weights.py`); out_features and in_features stay those of the whole.
    parallel_style: str | None = None

    def __init__(self, weight: QuantTensor, bias: torch.Tensor | None = None) -> None:
        check(len(weight.shape) == 2, f"weight has shape {list(weight.shape)}; a linear layer holds [out_features, in_features]")
        super().__init__(weight, bias)
        self.out_features, self.in_features = weight.shape

    @classmethod
    def from_linear(cls, layer: nn.Module, fmt: str | Format, **options: Any) -> QuantLinear:
        """Quantize an `nn.Linear`, or a transformers `Conv1D` (GPT-2), whose weight is transposed; options of `quantize`."""
        return cls(quantize(dense_weight(layer), weight_format(fmt), **options), getattr(layer, "bias", None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return linear_of_parts(x, *stored(self._parameters), self.format_name)
        if x.requires_grad and torch.is_grad_enabled():
            refuse_transforms("linear", (x,))
            out: torch.Tensor = _Frozen.apply(x, self.weight, self._bias())  # type: ignore[no-untyped-call]
            return out
        return linear(x, self.weight, self._bias())

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, format={self.format.name}, bias={self.bias is not None}"


class _Frozen(torch.autograd.Function):
    """Gradients for x (an adapter or a prompt is trained before the layer), none for the weight.

    The backward dequantizes the weight for one GEMM and keeps nothing.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: QuantTensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.weight = weight
        return linear(x, weight, bias).clone()  # a view of what is made here could not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0] @ ctx.weight.dequantize(gradients[0].dtype), None, None


def local_shard(t: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    if type(t).__name__ != "DTensor":  # not hasattr(t, "to_local"): False for a DTensor under Dynamo
        return t
    with torch.no_grad():  # the same object every time
        return t.to_local()  # type: ignore[attr-defined, no-any-return]


def stored(parameters: Mapping[str, nn.Parameter | None]) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """A layer's weight as flat parts, and its bias: all that compiled code reads, as every traced attribute becomes a guard."""
    shards = {name: local_shard(part) for name, part in parameters.items() if part is not None}
    # In the order of names: a parameter that was removed and registered again comes last.
    return [shards[name] for name in _WEIGHT if name in shards], shards.get("bias")


# ------------------------------------------------------------------------------------------------------- fused projections


class _Ready:
    """(input, output) of a projection that compiled code has computed and that has not been called yet."""

    held: tuple[torch.Tensor, torch.Tensor] | None = None

    def __getstate__(self) -> None:
        """Copies start empty."""


class FusedSlot(QuantLinear):
    """Replaces a projection that another layer computes with its own (k and v with q, up with gate).

    Holds the parameters, and returns the result of `FusedProjections` for the same input.
    """

    #: Between compiled functions, usually within one graph; not per thread.
    _ready: _Ready
    #: Thread -> (input, output): several threads may run one model.
    _waiting: dict[int, tuple[torch.Tensor, torch.Tensor]]

    def keep(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Hold the result for `x` until this projection is called."""
        self._waiting[get_ident()] = (x, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        compiling = torch.compiler.is_compiling()
        entry = None if compiling else self._waiting.pop(get_ident(), None)
        if entry is None:  # the other one may have been compiled without this one
            entry, self._ready.held = self._ready.held, None
        source, out = entry or (x, None)
        # While tracing there are no addresses to compare; eager code compares them.
        if out is None or not (source is x or (not compiling and _same_memory(source, x))):
            raise Unsupported(
                f"a fused projection was called {'before the one' if out is None else 'with another input than the one'} that "
                f"computes it (q for k and v, gate for up); this model does not fit fuse_qkv=True or fuse_gate_up=True: leave them "
                f"out, or call halfbyte.nn.unfuse(model)"
            )
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_waiting": {}}


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.data_ptr() == b.data_ptr()


class FusedProjections(QuantLinear):
    """Replaces the first of several projections of one input and computes all in one launch; `FusedSlot`s return the others.

    No modeling file is patched: it fits every attention that calls q_proj before k_proj and v_proj, and every MLP that calls
    gate_proj before up_proj. Each projection keeps its own QuantTensor, module, name and format; state dicts are unchanged.
    """

    def __init__(self, first: QuantLinear, *others: QuantLinear) -> None:
        for i, shard in enumerate(others, 1):
            check(
                shard.in_features == first.in_features,
                f"projection {i} has {shard.in_features} in features and the first {first.in_features}; fused ones read one input",
            )
        if any(shard.parallel_style not in (None, "colwise") for shard in (first, *others)):
            styles = ", ".join(str(shard.parallel_style) for shard in (first, *others))
            raise Unsupported(f"the projections are sharded as {styles}; fused ones must be column-parallel (colwise)")
        nn.Module.__init__(self)
        _adopt(self, first)
        # In a tuple, so that they are not submodules of this layer: they are submodules of the model.
        self.slots = tuple(_become(FusedSlot, shard) for shard in others)
        for slot in self.slots:
            slot._waiting, slot._ready = {}, _Ready()
        # For compiled code: through the slots, Dynamo would reach every parameter in two ways and guard that they are the same.
        self._shards = tuple(shard._parameters for shard in (self, *self.slots))
        self._formats = tuple(shard.format_name for shard in (self, *self.slots))
        self._ready = tuple(slot._ready for slot in self.slots)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self._compiled(x)
        if any(slot._offloaded() for slot in self.slots):
            raise Unsupported(
                "accelerate has offloaded the weights of fused projections, and brings those of the others after the launch that "
                "computes all of them; call halfbyte.nn.unfuse(model), or leave fuse_qkv=True and fuse_gate_up=True out"
            )
        shards = (self, *self.slots)
        if x.requires_grad and torch.is_grad_enabled():  # one launch has no backward
            first, *others = (QuantLinear.forward(shard, x) for shard in shards)
            for slot, out in zip(self.slots, others, strict=True):
                slot.keep(x, out)
            return first
        first, *others = projections(x, [shard.weight for shard in shards], [shard._bias() for shard in shards])
        for slot, out in zip(self.slots, others, strict=True):
            slot.keep(x, out)
        return first

    def _compiled(self, x: torch.Tensor) -> torch.Tensor:
        parts, biases = zip(*(stored(shard) for shard in self._shards), strict=True)
        first, *others = projections_of_parts(x, parts, biases, self._formats)
        for ready, out in zip(self._ready, others, strict=True):
            ready.held = (x, out)
        return first

    def unfuse(self) -> tuple[QuantLinear, ...]:
        """Separate layers over the same parameters."""
        return tuple(_become(QuantLinear, shard) for shard in (self, *self.slots))


def _become(kind: type[LinearT], layer: QuantLinear) -> LinearT:
    instance = kind.__new__(kind)
    nn.Module.__init__(instance)
    _adopt(instance, layer)
    return instance


def _adopt(made: QuantLinear, layer: QuantLinear) -> None:
    """Give `made` the parameters and hooks of `layer`, the same objects."""
    made.out_features, made.in_features, made.format_name = layer.out_features, layer.in_features, layer.format_name
    made.parallel_style, made.training, made._weight = layer.parallel_style, layer.training, None
    for name, parameter in layer._parameters.items():
        made.register_parameter(name, parameter)
    keep_hooks(layer, made)


_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def fuse_qkv(model: nn.Module) -> int:
    """Fuse q_proj, k_proj and v_proj wherever all three are QuantLinear on one module; returns how many were fused."""
    return _fuse(model, _QKV)


def fuse_gate_up(model: nn.Module) -> int:
    """Fuse gate_proj and up_proj wherever both are QuantLinear on one module; returns how many were fused."""
    return _fuse(model, _GATE_UP)


def _fuse(model: nn.Module, names: tuple[str, ...]) -> int:
    count = 0
    for module in list(model.modules()):
        shards = [getattr(module, name, None) for name in names]
        if all(type(shard) is QuantLinear for shard in shards):
            first = FusedProjections(*shards)  # type: ignore[arg-type]
            for name, projection in zip(names, (first, *first.slots), strict=True):
                setattr(module, name, projection)
            count += 1
    return count


def unfuse(model: nn.Module) -> int:
    """Undo `fuse_qkv` and `fuse_gate_up`, also inside of PEFT's LoRA adapters; returns how many were unfused."""
    count = 0
    for module, names in itertools.product(list(model.modules()), (_QKV, _GATE_UP)):
        holders = [_holder(module, name) for name in names]
        if isinstance(first := getattr(*holders[0], None), FusedProjections):
            for (holder, name), projection in zip(holders, first.unfuse(), strict=True):
                setattr(holder, name, projection)
            count += 1
    return count


def _holder(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """(parent, attribute) of a layer of `module`: the module itself, or the adapter that wraps the layer."""
    adapter = getattr(module, name, None)
    if isinstance(adapter, nn.Module) and isinstance(getattr(adapter, "base_layer", None), nn.Module):
        return adapter, "base_layer"
    return module, name
