"""Integer codes with group scales to a QuantTensor: for GPTQ, AWQ and compressed-tensors.

Nothing is rounded. Scales that fp16 holds exactly are stored in fp16, others in fp32. A group that no format has, such as 256, is
stored as the largest there is that divides it, with its scale repeated.
"""

from __future__ import annotations

import torch

from halfbyte.checkpoints.layer import StoredLayer
from halfbyte.errors import Unsupported
from halfbyte.formats import INT4, INT4_SYM, INT8, WEIGHT_FORMATS, Code, Format
from halfbyte.packing import pack_codes
from halfbyte.tensors import QuantTensor


def integer_weight(
    layer: StoredLayer,
    bits: int,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    g_idx: torch.Tensor | None = None,
    *,
    part: str,
    order: str = "g_idx",
) -> QuantTensor:
    """w[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g]), with g = g_idx[k], or k // (K / G) without one.

    codes uint8 [N, K] of 4 or 8 bits; scales [N, G], checked; zeros uint8 [N, G], None where all are 2^(bits - 1); g_idx ints [K].
    `part` and `order` are the names of the tensors of scales and of g_idx, for errors.
    """
    groups = scales.shape[1]
    if not groups or layer.in_features % groups:
        layer.refuse(part, f"has {groups} groups, which do not divide the {layer.in_features} in features")
    perm = None if g_idx is None else _order(layer, g_idx, groups, order)
    code = _code(layer, bits, symmetric=zeros is None)
    rounding = scales.half()
    if not torch.equal(rounding.float(), scales.float()):
        rounding = scales.float()
    fmt = _format(layer, code, layer.in_features // groups if groups > 1 else None, rounding.dtype)
    repeat = fmt.scale_shape((layer.out_features, layer.in_features))[1] // groups
    if perm is not None:
        codes = codes[:, perm.long()]
    return QuantTensor(
        fmt,
        (layer.out_features, layer.in_features),
        pack_codes(codes.contiguous(), code.bits) if code.per_byte > 1 else (codes ^ 128).view(torch.int8),
        rounding.repeat_interleave(repeat, dim=1),
        None if zeros is None else zeros.repeat_interleave(repeat, dim=1),
        perm=perm,
    )


def _order(layer: StoredLayer, g_idx: torch.Tensor, groups: int, part: str) -> torch.Tensor | None:
    """The columns sorted by group, int32 [K]; None when they are so already, or there is one group only."""
    if int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
        layer.refuse(part, f"points outside of the {groups} groups: {int(g_idx.min())} to {int(g_idx.max())}")
    sizes = torch.bincount(g_idx.long(), minlength=groups)
    if int(sizes.min()) != int(sizes.max()):
        layer.refuse(part, f"makes groups of {int(sizes.min())} to {int(sizes.max())} columns; expected groups of one size")
    if groups == 1 or bool((g_idx.diff() >= 0).all()):
        return None
    return torch.argsort(g_idx, stable=True).int()


def expected_format(bits: int, symmetric: bool, group: int | None) -> Format | None:
    """The format of codes of 4 or 8 bits in groups of so many columns (-1: whole rows), scales in fp16; None if none is known."""
    if group is None or (bits == 8 and not symmetric):
        return None
    whole, size = (None, 0) if group == -1 else (group, group)
    return _widest(_fitting(INT8 if bits == 8 else INT4_SYM if symmetric else INT4, torch.float16), whole, size)


def widest_format(code: Code, storage: torch.dtype, group: int) -> Format | None:
    """The format of a code with the widest groups that divide `group`; None if there is none."""
    return _widest(_fitting(code, storage), group, group)


def _code(layer: StoredLayer, bits: int, *, symmetric: bool) -> Code:
    if bits == 8 and not symmetric:
        raise Unsupported(f"{layer.name}: 8-bit codes with zero points; halfbyte reads 8-bit codes without, and 4-bit codes with")
    return INT8 if bits == 8 else INT4_SYM if symmetric else INT4


def _format(layer: StoredLayer, code: Code, group: int | None, stored: torch.dtype) -> Format:
    """The format with the widest groups that `group` is a multiple of; whole rows for None, if there is such a format."""
    fits, size = _fitting(code, stored), layer.in_features if group is None else group
    widest = _widest(fits, group, size)
    if widest is None:
        sizes = ", ".join(str(f.scale.group) for f in fits if f.scale is not None and f.scale.group)
        raise Unsupported(
            f"{layer.name}: {code.bits}-bit codes in groups of {size} with scales that need {stored}; halfbyte reads "
            + (f"multiples of {sizes}" if sizes else f"{code.bits}-bit codes with scales that fp16 holds exactly")
        )
    return widest


def _fitting(code: Code, stored: torch.dtype) -> list[Format]:
    return [f for f in WEIGHT_FORMATS.values() if f.code == code and f.scale is not None and f.scale.storage is stored]


def _widest(fits: list[Format], group: int | None, size: int) -> Format | None:
    """Whole rows for `group` None, if that is there; else the widest groups that divide `size`."""
    for fmt in fits:
        if group is None and fmt.granularity == "out_channel":
            return fmt
    widths = {f.scale.group: f for f in fits if f.scale is not None and f.scale.group and size % f.scale.group == 0}
    return widths[max(widths)] if widths else None
