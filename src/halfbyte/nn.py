"""Linear layers that keep their weight quantised, and the fused q/k/v projection."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import nn

from halfbyte.errors import InvalidArgument, Unsupported, check
from halfbyte.formats import Format, weight_format
from halfbyte.ops.linear import linear, qkv_projection
from halfbyte.reference.quantize import quantize
from halfbyte.tensors import PARTS, QuantTensor, expected_parts

Layer = TypeVar("Layer", bound="QuantLinear")


class NoTensor(Unsupported, AttributeError):
    """What a tensor would do was asked of a quantised weight. An AttributeError, so that `hasattr` says no."""


class LayerWeight(QuantTensor):
    """The weight of a layer. transformers must not fill it with random numbers (GPT-2 does so with every `c_proj.weight`).

    It is no tensor. What models do with weights that are says so by name: with a `__getattr__`, Dynamo does not come back.
    """

    _is_hf_initialized = True

    def _refuse(self, *args: object, **kwargs: object) -> Any:
        raise NoTensor(
            f"the weight [{self.shape[0]}, {self.shape[1]}] of a linear layer is quantised ({self.format.name}), and the model "
            f"computes with it as a tensor instead of calling the layer; leave that layer in 16 bits (skip_modules)"
        )

    dtype = data = T = mT = t = float = half = detach = clone = view = transpose = div_ = mul_ = property(_refuse)
    __matmul__ = __rmatmul__ = __mul__ = __rmul__ = __add__ = __radd__ = __getitem__ = _refuse

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """torch.nn.functional.linear(x, layer.weight) and the like."""
        return next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, cls))._refuse()

    def parts(self) -> dict[str, torch.Tensor]:
        """As in QuantTensor, written so that torch.compile follows it on Python 3.11."""
        found = {name: getattr(self, name) for name in PARTS}
        return {name: part for name, part in found.items() if part is not None}


class QuantLinear(nn.Module):
    """y = x W^T + b with W [out_features, in_features] quantised.

    The parts of the QuantTensor are parameters without gradient named weight_codes, weight_scales, ... with the out features first,
    so that checkpoints, device maps and tensor parallelism treat them like any weight. Casting the module (`.half()`, `.to(dtype)`)
    moves them and never changes their types; the bias is cast.
    """

    in_features: int
    out_features: int
    bias: nn.Parameter | None
    #: transformers: under tensor parallelism hand over local shards. Without it TP runs and gives wrong numbers.
    _hf_quantized_needs_local_tp = True
    #: How transformers shares the layer out over ranks (`hf/parallel.py`); out_features and in_features stay those of the whole.
    parallel_style: str | None = None

    def __init__(self, weight: QuantTensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        check(len(weight.shape) == 2, f"weight has shape {list(weight.shape)}; a linear layer holds [out_features, in_features]")
        self.out_features, self.in_features = weight.shape
        self.format = weight.format
        for name, part in weight.parts().items():
            self.register_parameter(f"weight_{name}", nn.Parameter(part, requires_grad=False))
        if bias is not None:
            check(
                tuple(bias.shape) == (self.out_features,),
                f"bias has shape {list(bias.shape)}; the layer has {self.out_features} out features",
            )
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
        self._weight: QuantTensor | None = None

    @classmethod
    def from_linear(cls, layer: nn.Module, fmt: str | Format) -> QuantLinear:
        """Quantise an `nn.Linear`, or a transformers `Conv1D` (GPT-2), whose weight is transposed."""
        return cls(quantize(dense_weight(layer), weight_format(fmt)), getattr(layer, "bias", None))

    @classmethod
    def empty(
        cls,
        out_features: int,
        in_features: int,
        fmt: Format,
        bias_dtype: torch.dtype | None,
        device: str = "meta",
        *,
        act_order: bool = False,
    ) -> QuantLinear:
        """A layer of the right shapes and types for a checkpoint to be loaded into; without a bias when `bias_dtype` is None."""
        shape = (out_features, in_features)
        expected = expected_parts(fmt, shape, act_order=act_order)
        parts = {name: torch.empty(size, dtype=dtype, device=device) for name, (size, dtype) in expected.items()}
        bias = None if bias_dtype is None else torch.empty(out_features, dtype=bias_dtype, device=device)
        return cls(QuantTensor(fmt, shape, **parts), bias)

    @property
    def weight(self) -> QuantTensor:
        """The parameters as a QuantTensor; of this rank, where they are shared out over several.

        Kept until a parameter is replaced, so that a decode step does not check shapes again.
        """
        parts = {name: _local(part) for name, part in self._parts().items()}
        kept = self._weight
        if kept is None or any(getattr(kept, name) is not part for name, part in parts.items()):
            shape = (parts["codes"].shape[0], parts["codes"].shape[1] * self.format.code.per_byte)
            kept = LayerWeight(self.format, shape, **parts)
            if not torch.compiler.is_compiling():
                self._weight = None if self._offloaded() else kept
        return kept

    def _offloaded(self) -> bool:
        """Whether accelerate brings the parameters for each call and takes them away after it; kept ones would stay behind."""
        hook = getattr(self, "_hf_hook", None)
        return any(getattr(h, "offload", False) for h in getattr(hook, "hooks", (hook,)))

    def _bias(self) -> torch.Tensor | None:
        return None if self.bias is None else _local(self.bias)

    def _parts(self) -> dict[str, torch.Tensor]:
        named = {name: self._parameters.get(f"weight_{name}") for name in PARTS}
        return {name: part for name, part in named.items() if part is not None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self._bias())

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, format={self.format.name}, bias={self.bias is not None}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move the quantised parts wherever `fn` moves tensors, but keep their types: a scale cast to bf16 is another number."""
        before = {name: part.data for name, part in self._parts().items()}
        self._weight = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, part in self._parts().items():
            if part.dtype is not before[name].dtype:
                part.data = before[name].to(part.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weight": None}


def _local(t: torch.Tensor) -> torch.Tensor:
    """This rank's share of a distributed tensor; any other tensor as it is."""
    if not hasattr(t, "to_local"):
        return t
    with torch.no_grad():  # the same object every time
        return t.to_local()  # type: ignore[no-any-return]


def dense_weight(layer: nn.Module) -> torch.Tensor:
    """The weight [out_features, in_features] of an `nn.Linear` or a transformers `Conv1D`."""
    weight = getattr(layer, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.ndim == 2:
        if type(layer).__name__ == "Conv1D":
            return weight.detach().T.contiguous()
        if isinstance(layer, nn.Linear):
            return weight.detach()
    raise InvalidArgument(f"layer is a {type(layer).__name__}; pass an nn.Linear or a transformers Conv1D")


# ------------------------------------------------------------------------------------------------------------ fused q, k, v


class QKVTap(QuantLinear):
    """Stands at k_proj or v_proj: holds that shard's parameters, and hands out what `FusedQKV` computed from the same input."""

    #: Within compiled code, where one graph computes all three.
    _ready: torch.Tensor | None = None
    #: Thread -> (the input, its product): several threads may run one model.
    _waiting: dict[int, tuple[torch.Tensor, torch.Tensor]]

    def keep(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Hold what `FusedQKV` computed from `x` until this projection is called."""
        if torch.compiler.is_compiling():
            self._ready = out
        else:
            self._waiting[get_ident()] = (x, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ready, self._ready = self._ready, None
        given, out = (x, ready) if torch.compiler.is_compiling() else self._waiting.pop(get_ident(), (x, ready))
        if out is None or not _same_memory(given, x):
            raise Unsupported(
                f"a fused k or v projection was called {'before its' if out is None else 'with another input than its'} q "
                f"projection; this attention does not fit fuse_qkv=True: call unfuse_qkv(model), or quantise with fuse_qkv=False"
            )
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_ready": None, "_waiting": {}}


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.stride() == b.stride() and a.data_ptr() == b.data_ptr())


class FusedQKV(QuantLinear):
    """Stands at q_proj and computes q, k and v in one launch; k and v wait in the two taps.

    No modelling file is patched: it fits every attention that calls the three projections on one input, q first. Each shard keeps
    its own QuantTensor, in its own module and under its own name, and may have its own format; a state dict is the same as unfused.
    """

    def __init__(self, q: QuantLinear, k: QuantLinear, v: QuantLinear) -> None:
        for name, shard in (("k", k), ("v", v)):
            check(
                shard.in_features == q.in_features,
                f"{name} has {shard.in_features} in features and q has {q.in_features}; fused projections read one input",
            )
        if any(shard.parallel_style not in (None, "colwise") for shard in (q, k, v)):
            styles = ", ".join(str(shard.parallel_style) for shard in (q, k, v))
            raise Unsupported(f"the projections are shared out as {styles}; fused ones must be column-parallel (colwise)")
        nn.Module.__init__(self)
        _adopt(self, q)
        self.taps = (_become(QKVTap, k), _become(QKVTap, v))  # a tuple: they are submodules of the attention, not of this
        for tap in self.taps:
            tap._waiting = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k, v = self.taps
        if k._offloaded() or v._offloaded():
            raise Unsupported(
                "accelerate has offloaded the weights of fused projections, and brings those of k and v after the launch that "
                "computes all three; call halfbyte.nn.unfuse_qkv(model), or quantise with fuse_qkv=False"
            )
        q_out, k_out, v_out = qkv_projection(x, (self.weight, k.weight, v.weight), (self._bias(), k._bias(), v._bias()))
        k.keep(x, k_out)
        v.keep(x, v_out)
        return q_out

    def unfuse(self) -> tuple[QuantLinear, QuantLinear, QuantLinear]:
        """Three layers of their own over the same memory."""
        return _become(QuantLinear, self), _become(QuantLinear, self.taps[0]), _become(QuantLinear, self.taps[1])


def _become(kind: type[Layer], layer: QuantLinear) -> Layer:
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    _adopt(made, layer)
    return made


def _adopt(made: QuantLinear, layer: QuantLinear) -> None:
    """Give `made` the parameters of `layer`, the same objects.

    What a parallel plan hooked to its forward stays behind: a column-parallel layer of local activations does not need it.
    """
    made.out_features, made.in_features, made.format = layer.out_features, layer.in_features, layer.format
    made.parallel_style, made._weight = layer.parallel_style, None
    for name, parameter in layer._parameters.items():
        made.register_parameter(name, parameter)


_QKV = ("q_proj", "k_proj", "v_proj")


def fuse_qkv(model: nn.Module) -> int:
    """Fuse q_proj, k_proj and v_proj wherever all three are QuantLinear on one module; returns how many were fused."""
    count = 0
    for module in list(model.modules()):
        shards = [getattr(module, name, None) for name in _QKV]
        if all(type(shard) is QuantLinear for shard in shards):
            fused = FusedQKV(*shards)  # type: ignore[arg-type]
            for name, made in zip(_QKV, (fused, *fused.taps), strict=True):
                setattr(module, name, made)
            count += 1
    return count


def unfuse_qkv(model: nn.Module) -> int:
    """Undo `fuse_qkv`; returns how many were taken apart."""
    count = 0
    for module in list(model.modules()):
        if isinstance(fused := getattr(module, "q_proj", None), FusedQKV):
            for name, made in zip(_QKV, fused.unfuse(), strict=True):
                setattr(module, name, made)
            count += 1
    return count
