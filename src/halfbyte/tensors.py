"""QuantTensor: codes, scales and offsets with the format that says what they mean. KeyTransform, LatentHeads: matrices of heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from halfbyte.errors import check
from halfbyte.formats import EVERY_WEIGHT_FORMAT, KV_FORMATS, Format, Shape
from halfbyte.reference.dequantize import values_of


class KeyTransform(NamedTuple):
    """What keys and queries of one layer are multiplied by before keys are stored: k keys + shift, and q queries.

    keys      [H, D, D], an invertible matrix for each KV head, of bfloat16 numbers
    queries   [H, D, D], its inverse, transposed: scores are q . k + q . shift
    shift     [H, D], the same for all keys, so that no softmax changes; None: nothing is added
    """

    keys: torch.Tensor
    queries: torch.Tensor
    shift: torch.Tensor | None

    def like(self, x: torch.Tensor) -> KeyTransform:
        """On the device of `x` and in its type, in which tensor cores multiply; the shift in at least 32 bits."""
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        keys, queries = (t.to(x.device, x.dtype).contiguous() for t in self[:2])
        return KeyTransform(keys, queries, None if self.shift is None else self.shift.to(x.device, wide).contiguous())

    def of_heads(self, first: int, count: int) -> KeyTransform:
        """That of `count` KV heads from `first` on, which a rank of a tensor-parallel layer has."""
        keys, queries, shift = (None if t is None else t[first : first + count].contiguous() for t in self)
        assert keys is not None and queries is not None
        return KeyTransform(keys, queries, shift)


class LatentHeads(NamedTuple):
    """How the heads of multi-head latent attention (MLA) make keys and values of a latent: keys [Hq, R, D], values [Hq, R, Dv].

        k_j = [c_j K, r_j]    v_j = c_j V      of a head with matrices K [R, D], V [R, Dv]; all heads share the rotary key r_j

    A cache holds the latents c as values and r as keys, for one KV head. Attention over them needs no k_j and no v_j (the absorbed
    form): q . k_j = (q_nope K^T) . c_j + q_rope . r_j, and out = (sum_j p_j c_j) V.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def absorbed(self, q: torch.Tensor) -> torch.Tensor:
        """q [B, Hq, L, D + rotary dims] as `decode_attention` takes it with latent=True: [B, Hq, L, R + rotary dims]."""
        own, rotary = q.split([self.keys.shape[2], q.shape[3] - self.keys.shape[2]], -1)
        return torch.cat([torch.einsum("bhld,hrd->bhlr", own, self.keys), rotary], -1)

    def expanded(self, out: torch.Tensor) -> torch.Tensor:
        """Weighted sums of latents [B, Hq, L, R] -> of values [B, Hq, L, Dv]."""
        return torch.einsum("bhlr,hrv->bhlv", out, self.values)


@dataclass(frozen=True)
class QuantTensor:
    """A quantized tensor of logical shape `shape`.

    codes         [..., last / codes per byte] in `format.storage`
    scales        `format.scale_shape(shape)` in `format.scale.storage`; None for 16-bit formats
    offsets       same shape: uint8 zero points or fp16 offsets; None when the format has none
    tensor_scale  float32 [1]: the second-level scale of NVFP4; of a stack [E, N, K], [E, N]
    nested        float32 [ceil(scales / 256) + 1]: with double quantization, the absmax of each block of scales, then their mean
    perm          int32 [K], of a weight [N, K] in act-order: stored column j is column perm[j]; groups are consecutive stored
                  columns. Of a stack [E, N, K]: [E, K]. None: columns in order. Only loaders check that it is a permutation:
                  the check synchronizes with the GPU
    """

    format: Format
    shape: Shape
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    tensor_scale: torch.Tensor | None = None
    nested: torch.Tensor | None = None
    perm: torch.Tensor | None = None

    def __post_init__(self) -> None:
        check(isinstance(self.format, Format), f"format={self.format!r}; expected a Format, such as halfbyte.WEIGHT_FORMATS['nf4']")
        self.format.check_shape(self.shape, "a tensor")
        expected = expected_parts(self.format, self.shape, act_order=self.perm is not None)
        for name, (shape, dtype) in expected.items():
            part = getattr(self, name)
            check(part is not None, f"{name} is missing; {self.format.name} of shape {list(self.shape)} needs it")
            check(
                tuple(part.shape) == shape and part.dtype is dtype,
                f"{name} is {part.dtype} {list(part.shape)}; {self.format.name} of shape {list(self.shape)} "
                f"stores {dtype} {list(shape)}",
            )
            check(
                part.device == self.codes.device, f"{name} is on {part.device} and codes on {self.codes.device}; move them together"
            )
        for name in set(PARTS) - set(expected):
            check(getattr(self, name) is None, f"{name} was given, but {self.format.name} stores none")

    def __reduce__(self) -> tuple[Any, ...]:
        """As a name and tensors, which `torch.load` with `weights_only=True` restores."""
        name = self.format.name
        place = next(((i, name) for i, formats in enumerate(_FORMATS) if formats.get(name) == self.format), None)
        return _restored, (type(self), place or self.format, self.shape, self.parts())

    def __repr__(self) -> str:
        order = ", act-order" * (self.perm is not None)
        return f"QuantTensor({self.format}, shape={list(self.shape)}{order}, {self.nbytes:,} bytes, device={str(self.device)!r})"

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of everything stored."""
        return sum(part.nbytes for part in self.parts().values())

    def parts(self) -> dict[str, torch.Tensor]:
        """The stored tensors by name; `QuantTensor(format, shape, **parts)` is the inverse."""
        by_name = {name: getattr(self, name) for name in PARTS}
        return {name: part for name, part in by_name.items() if part is not None}

    def to(self, device: torch.device | str) -> QuantTensor:
        """The same tensor on another device."""
        return QuantTensor(self.format, self.shape, **{name: part.to(device) for name, part in self.parts().items()})

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, [*shape] in `dtype`; see `halfbyte.dequantize`."""
        return values_of(self, dtype)


_FORMATS = EVERY_WEIGHT_FORMAT, KV_FORMATS


def _restored(
    kind: type[QuantTensor], named: tuple[int, str] | Format, shape: Shape, parts: dict[str, torch.Tensor]
) -> QuantTensor:
    """What was pickled. A file is untrusted, and its parts are checked as those of any QuantTensor are."""
    if isinstance(named, Format):
        return kind(named, shape, **parts)
    known, name = _FORMATS[named[0]], named[1]
    check(name in known, f"a stored tensor has format {name!r}; known are {', '.join(known)}")
    return kind(known[name], shape, **parts)


torch.serialization.add_safe_globals([QuantTensor, _restored])


def weight_of(fmt: Format, parts: Sequence[torch.Tensor]) -> QuantTensor:
    """A weight from its flat parts: the tensors of `expected_parts`, in that order, then `perm` if there is one."""
    shape = (*parts[0].shape[:-1], parts[0].shape[-1] * fmt.code.per_byte)
    act_order = len(parts) > len(expected_parts(fmt, shape))
    return QuantTensor(fmt, shape, **dict(zip(expected_parts(fmt, shape, act_order=act_order), parts, strict=True)))


#: Names of the tensors that a QuantTensor may hold, in storage order.
PARTS: tuple[str, ...] = tuple(f.name for f in fields(QuantTensor) if f.name not in ("format", "shape"))


def expected_parts(fmt: Format, shape: Shape, *, act_order: bool = False) -> dict[str, tuple[Shape, torch.dtype]]:
    """Name -> (shape, dtype) of each tensor that `fmt` stores for shape `shape`; `act_order` adds `perm`, for weights."""
    parts: dict[str, tuple[Shape, torch.dtype]] = {"codes": (fmt.codes_shape(shape), fmt.storage)}
    if fmt.scale is None:
        return parts
    scales = fmt.scale_shape(shape)
    parts["scales"] = (scales, fmt.scale.storage)
    if fmt.offset_dtype is not None:
        parts["offsets"] = (scales, fmt.offset_dtype)
    if fmt.tensor_scale:
        parts["tensor_scale"] = (fmt.tensor_scale_shape(shape), torch.float32)
    if fmt.scale.nested is not None:
        parts["nested"] = ((math.ceil(math.prod(scales) / fmt.scale.nested) + 1,), torch.float32)
    if act_order and len(shape) in (2, 3):
        parts["perm"] = ((*shape[:-2], shape[-1]), torch.int32)
    return parts
