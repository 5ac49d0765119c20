"""`StoredLayer`, the tensors of one linear layer, checked before they are read; `Adapter`, which makes a QuantTensor of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch

from halfbyte.checkpoints.safetensors_files import TensorInfo, read_tensor
from halfbyte.errors import CheckpointError, InvalidArgument, Unsupported
from halfbyte.formats import Format, Shape
from halfbyte.reference.quantize import quantize
from halfbyte.tensors import QuantTensor

#: What group scales come in.
SCALE_TYPES = (torch.float16, torch.bfloat16, torch.float32)


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
        """`name.part`, which must have this shape and one of these dtypes: looked at before it is read."""
        info = self.info(part)
        if info is None:
            raise CheckpointError(f"{self.name}.{part} is missing; a layer of {self.out_features} x {self.in_features} needs it")
        if info.shape != shape or info.dtype not in dtypes:
            wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            self.refuse(part, f"is {str(info.dtype).removeprefix('torch.')} {list(info.shape)}; expected {wanted} {list(shape)}")
        return info.detach().to("cpu", copy=True) if isinstance(info, torch.Tensor) else read_tensor(info)

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

    def check_scales(self, part: str, plain: torch.Tensor, *, positive: bool = True, signed: bool = False) -> torch.Tensor:
        """`plain`, the decoded numbers of `name.part`, if they are finite and above 0; `signed` ones may be below."""
        good = torch.isfinite(plain) & ((plain != 0 if signed else plain > 0) if positive else True)
        if not bool(good.all()):
            what = "finite and not 0" if signed else "finite and positive" if positive else "finite"
            self.refuse(part, f"holds {int((~good).sum())} scales of {plain.numel()} that are not {what}; the file is damaged")
        if bool((plain.double().abs() * 256 > torch.finfo(torch.float32).max).any()):
            self.refuse(part, "holds scales so large that weights would be infinite; the file is damaged")
        return plain


class Adapter(ABC):
    """How one kind of checkpoint stores a linear layer. Made from its quantization_config, which it checks.

    The files decide which layers are quantized: those with the tensor `marker`. Module lists in configurations have many pattern
    dialects and are not read; a layer on such a list has a plain `weight` in the files, and stays as it is.
    """

    #: Rows of the table in docs/guides/checkpoints.md: (`quant_method`, what loads, the formats that it becomes).
    docs: ClassVar[tuple[tuple[str, str, str], ...]]
    #: Names below a layer: a tensor that only a quantized layer has; those of its weight; those that are not needed anywhere.
    marker: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    unused: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises `CheckpointError` for a damaged configuration, `Unsupported` for one that is not read."""

    @abstractmethod
    def convert(self, layer: StoredLayer) -> QuantTensor:
        """The weight of a layer in the library's own storage, code for code. Errors are the library's own and name the tensor."""

    def expected(self) -> Format | None:
        """The format that the configuration implies for its layers, which files may contradict; None: unknown."""
        return None

    def layers(self, names: Iterable[str]) -> list[str]:
        """The quantized layers among the tensor names of the files."""
        return [name.removesuffix(f".{self.marker}") for name in names if name.endswith(f".{self.marker}")]

    def stacks(self, names: Iterable[str]) -> list[str]:
        """The stacks of experts among the tensor names, by the names of the parameters that they stand for."""
        return []

    def stack(self, name: str, infos: Mapping[str, TensorInfo]) -> QuantTensor:
        """The weights [E, N, K] of a stack of experts, code for code; gate and up rows alternate."""
        raise Unsupported(f"{name}: {type(self).__name__} has no stacks of experts")

    def consumed(self, layer: str) -> set[str]:
        """The names of the tensors that `convert` reads, or leaves out, for this layer."""
        return {f"{layer}.{part}" for part in (*self.parts, *self.unused)}


class Expanded(Adapter):
    """An adapter of codes that no weight format has: layers are dequantized, and quantized again to `into`."""

    into: Format | None = None
    clip: str | None = None

    @abstractmethod
    def values(self, layer: StoredLayer) -> torch.Tensor:
        """The weight of a layer in float32."""

    def convert(self, layer: StoredLayer) -> QuantTensor:
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
