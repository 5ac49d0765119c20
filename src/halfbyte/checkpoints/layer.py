"""`StoredLayer`, the tensors of one linear layer, checked before they are read; `Adapter`, which makes a QuantTensor of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch

from halfbyte.checkpoints.overrides import Overrides
from halfbyte.checkpoints.safetensors_files import TensorInfo, read_tensor, scale_fault
from halfbyte.errors import CheckpointError, InvalidArgument, Unsupported
from halfbyte.formats import Format, Shape
from halfbyte.reference.quantize import quantize
from halfbyte.tensors import QuantTensor

#: What group scales come in.
SCALE_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class StoredLayer:
    """The tensors below `name`, in files or in memory, of a layer that has `out_features` and `in_features` in the model."""

    name: str
    out_features: int
    in_features: int
    infos: Mapping[str, TensorInfo | torch.Tensor]

    def info(self, part: str) -> TensorInfo | torch.Tensor | None:
        """Where `name.part` lies; None when there is no such tensor."""
        return self.infos.get(f"{self.name}.{part}")

    def tensor(self, part: str, shape: Shape, *dtypes: torch.dtype) -> torch.Tensor:
        """`name.part`, which must have this shape, up to axes of 1, and one of these dtypes: looked at before it is read."""
        info = self.info(part)
        if info is None:
            raise CheckpointError(f"{self.name}.{part} is missing; a layer of {self.out_features} x {self.in_features} needs it")
        if [n for n in info.shape if n != 1] != [n for n in shape if n != 1] or info.dtype not in dtypes:
            types = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            self.refuse(part, f"is {str(info.dtype).removeprefix('torch.')} {list(info.shape)}; expected {types} {list(shape)}")
        data = info.detach().to("cpu", copy=True) if isinstance(info, torch.Tensor) else read_tensor(info)
        return data.reshape(shape)

    def scales(self, part: str, shape: Shape, reach: float) -> torch.Tensor:
        """`name.part` of this shape, scales of codes up to `reach`, in floating point, as `check_scales` lets them pass."""
        plain = self.tensor(part, shape, *SCALE_TYPES)
        return self.check_scales(part, plain.float() if plain.dtype.itemsize == 1 else plain, reach)

    def shape(self, part: str, axes: int) -> Shape:
        """The shape that `name.part` has; it must have so many axes."""
        info = self.info(part)
        if info is None:
            raise CheckpointError(f"{self.name}.{part} is missing; a layer of {self.out_features} x {self.in_features} needs it")
        if len(info.shape) != axes:
            self.refuse(part, f"has shape {list(info.shape)}; expected {axes} axes")
        return info.shape

    def refuse(self, part: str, why: str) -> NoReturn:
        """Raise `CheckpointError` about `name.part`."""
        raise CheckpointError(f"{self.name}.{part} {why}")

    def check_scales(self, part: str, plain: torch.Tensor, reach: float) -> torch.Tensor:
        """`plain`, the decoded numbers of `name.part`; raises if one makes the weight of a code up to `reach` NaN or infinite."""
        if why := scale_fault(plain, reach):
            self.refuse(part, why)
        return plain


#: Scales and zero points of activations and caches, which no weight needs: activations stay in 16 bits here, and caches have scales
#: of their own.
UNUSED: tuple[str, ...] = tuple(
    f"{what}_{kind}"
    for what in ("input", "output", "act", "activation", "q", "k", "v", "kv", "qkv", "attn", "prob", "prob_output", "softmax")
    for kind in ("scale", "scale_inv", "scale_2", "global_scale", "zero_point")
)


class Adapter(ABC):
    """How one kind of checkpoint stores a linear layer. Made from its quantization_config, which it checks.

    The files decide which layers are quantized: those with the tensor `marker`. Module lists in configurations have many pattern
    dialects and are not read; a layer on such a list has a plain `weight` in the files, and stays as it is.
    """

    #: Rows of the table in docs/guides/checkpoints.md: (`quant_method`, what loads, the formats that it becomes).
    docs: ClassVar[tuple[tuple[str, str, str], ...]]
    #: Names below a layer: a tensor that every quantized layer has; all tensors of its weight.
    marker: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    #: The configuration, and what it says of single layers.
    config: Mapping[str, Any] = {}
    overrides: Overrides | None = None

    @abstractmethod
    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises `CheckpointError` for a damaged configuration, `Unsupported` for one that is not read."""

    def convert(self, layer: StoredLayer) -> QuantTensor:
        """The weight of a layer in the library's own storage, code for code. Errors are the library's own and name the tensor."""
        return self.at(layer.name).weight(layer)

    @abstractmethod
    def weight(self, layer: StoredLayer) -> QuantTensor:
        """`convert` for a layer that has the settings of this adapter."""

    def at(self, name: str) -> Adapter:
        """The adapter of the layer `name`, whose settings may differ from those of the whole model."""
        own = {} if self.overrides is None else self.overrides.of(name)
        if not own:
            return self
        try:
            return type(self)({**self.config, "dynamic": None, "extra_config": None, **own})
        except (CheckpointError, Unsupported) as error:
            raise type(error)(f"{name}: {error}") from error

    def expected(self) -> Format | None:
        """The format that the configuration implies for its layers, which files may contradict; None: unknown."""
        return None

    def layers(self, names: Iterable[str]) -> list[str]:
        """The quantized layers among the tensor names of the files: those with any tensor that a plain layer has not."""
        ends = tuple(f".{part}" for part in (self.marker, *self.parts) if part != "weight")
        pairs = ((name, next((end for end in ends if name.endswith(end)), None)) for name in names)
        return list(dict.fromkeys(name.removesuffix(end) for name, end in pairs if end is not None))

    def rows(self, layer: StoredLayer) -> int:
        """The out features of a layer, of which only the in features are known; `convert` checks them."""
        return layer.shape(self.parts[0], 2)[0]

    def stacks(self, names: Iterable[str]) -> list[str]:
        """The stacks of experts among the tensor names, by the names of the parameters that they stand for."""
        return []

    def stack(self, name: str, infos: Mapping[str, TensorInfo]) -> QuantTensor:
        """The weights [E, N, K] of a stack of experts, code for code; gate and up rows alternate."""
        raise Unsupported(f"{name}: {type(self).__name__} has no stacks of experts")

    def consumed(self, layer: str) -> set[str]:
        """The names of the tensors that `convert` reads, or leaves out, for this layer."""
        return {f"{layer}.{part}" for part in (*self.parts, *UNUSED)}


class Expanded(Adapter):
    """An adapter of codes that no weight format has: layers are dequantized, and quantized again to `into`."""

    into: Format | None = None
    clip: str | None = None

    @abstractmethod
    def values(self, layer: StoredLayer) -> torch.Tensor:
        """The weight of a layer in float32."""

    def weight(self, layer: StoredLayer) -> QuantTensor:
        return self.quantized(layer.name, self.values(layer))

    def quantized(self, name: str, values: torch.Tensor) -> QuantTensor:
        """Values rounded to the format; an error names the layer."""
        assert self.into is not None
        try:
            return quantize(values, self.into, clip=self.clip)
        except InvalidArgument as error:
            raise InvalidArgument(f"{name}: {error}") from error


def setting(config: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    """`config[name]`, which must be of this kind; `default` when it is absent or null."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise CheckpointError(f"quantization_config has {name}={repr(value)[:80]} of type {type(value).__name__}")
    return value


def only(config: Mapping[str, Any], name: str, allowed: tuple[Any, ...], default: Any, what: str) -> Any:
    """`config[name]`, which must be one of `allowed`."""
    value = config.get(name)
    value = default if value is None else value
    if not any(type(value) is type(a) and value == a for a in allowed):
        raise Unsupported(f"{what}: {name}={repr(value)[:80]}; halfbyte reads {', '.join(map(repr, allowed))}")
    return value


def group_setting(config: Mapping[str, Any], default: int | None = None) -> int | None:
    """`group_size`: -1, a positive number, or `default`."""
    group = setting(config, "group_size", int, default)
    if group is not None and group != -1 and not 0 < group < 2**31:
        raise CheckpointError(f"quantization_config has group_size={group}; expected -1 or a positive number")
    return group  # type: ignore[no-any-return]


def words(count: int, bits: int) -> int:
    """32-bit words that hold so many codes."""
    return math.ceil(count * bits / 32)


def unpack_words(packed: torch.Tensor, bits: int, axis: int, count: int) -> torch.Tensor:
    """int32 words -> codes one a byte, uint8, `count` of them along `axis`: field j of a word is at its bits j * `bits`."""
    last = packed.movedim(axis, -1).clone(memory_format=torch.contiguous_format)
    fields = last.view(torch.uint8)  # little endian, so the bytes of a word are its fields in order
    if bits == 4:
        fields = torch.stack([fields & 15, fields >> 4], dim=-1).flatten(-2)
    return fields[..., :count].movedim(-1, axis)
