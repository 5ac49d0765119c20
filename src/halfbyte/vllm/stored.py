"""The weight of one module in the files: the tensors that it consists of, and the QuantTensor that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch.nn import Parameter
from vllm.model_executor.utils import set_weight_attrs

from halfbyte.checkpoints.layer import Adapter, StoredLayer
from halfbyte.checkpoints.safetensors_files import check_perm, check_scales
from halfbyte.errors import CheckpointError, HalfbyteError
from halfbyte.formats import Format, Shape
from halfbyte.tensors import QuantTensor, expected_parts

Found = Mapping[str, torch.Tensor]


def parameter(part: str) -> str:
    """The name of the parameter that catches tensors of this name below a module."""
    return part.replace(".", "_")


def catcher(count: int, loader: Callable[..., bool | None]) -> Parameter:
    """A parameter for `count` tensors of the files, each of which vLLM gives to `loader`."""
    parameter = Parameter(torch.empty(count, dtype=torch.uint8), requires_grad=False)
    set_weight_attrs(parameter, {"weight_loader": loader})
    return parameter


def counted(param: Parameter) -> bool:
    """Whether vLLM only counts the elements of a tensor's parameter, before it loads them all at once (`reload_weights`)."""
    if param.is_meta:
        param[:1].copy_(param[:1])
    return bool(param.is_meta)


class Own(NamedTuple):
    """A weight that halfbyte wrote: the name of its module, its format, whether it is in act-order."""

    name: str
    format: Format
    act_order: bool

    def tensors(self, in_features: int) -> set[str]:
        """Names below the module; "weight" is the empty tensor that stops loaders which do not know halfbyte."""
        return {"weight", *(f"weight_{part}" for part in self._parts((1, in_features)))}

    def complete(self, found: Found) -> bool:
        codes = found.get("weight_codes")
        return codes is not None and {f"weight_{part}" for part in self._parts(self._shape(codes))} <= set(found)

    def weight(self, found: Found, shape: Shape) -> QuantTensor:
        """The weight [N, K], or the stack [E, N, K], of these tensors. Raises `CheckpointError` for a damaged one, naming it."""
        parts = {name.removeprefix("weight_"): t for name, t in found.items() if name.startswith("weight_")}
        try:
            weight = QuantTensor(self.format, self._shape(parts["codes"]), **parts)
        except HalfbyteError as error:
            raise CheckpointError(f"{self.name}: {error}") from error
        if weight.shape != shape:
            raise CheckpointError(
                f"{self.name} is a weight of {' x '.join(map(str, weight.shape))}; vLLM expects {' x '.join(map(str, shape))}"
            )
        check_scales(self.name, self.format, weight.parts())
        if weight.perm is not None:
            check_perm(f"{self.name}.weight_perm", weight.perm)
        return weight

    def _parts(self, shape: Shape) -> Iterable[str]:
        return expected_parts(self.format, shape, act_order=self.act_order)

    def _shape(self, codes: torch.Tensor) -> Shape:
        return (*codes.shape[:-1], codes.shape[-1] * self.format.code.per_byte) if codes.ndim in (2, 3) else (0, 0)


class Foreign(NamedTuple):
    """A weight of another library: the name of its module, what reads it, and which tensors below that name the files hold."""

    name: str
    adapter: Adapter
    held: frozenset[str]

    def tensors(self, in_features: int) -> set[str]:
        return set(self.held)

    def complete(self, found: Found) -> bool:
        """Those that an adapter does not read may go elsewhere."""
        return self.held & set(self.adapter.parts) <= set(found)

    def weight(self, found: Found, shape: tuple[int, int]) -> QuantTensor:
        """The weight [N, K] of these tensors, code for code. Errors are the adapter's and name the tensor."""
        return self.adapter.convert(StoredLayer(self.name, *shape, {f"{self.name}.{part}": t for part, t in found.items()}))


def foreign_weights(adapter: Adapter, names: Iterable[str]) -> dict[str, Foreign]:
    """Module -> its weight, of those that are quantized among the tensor names of the files."""
    tensors = set(names)
    by_module = {module: adapter.consumed(module) & tensors for module in adapter.layers(tensors)}
    return {m: Foreign(m, adapter, frozenset(name.removeprefix(f"{m}.") for name in c)) for m, c in by_module.items()}
