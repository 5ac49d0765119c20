"""Dequantize: the values of stored codes, for every scale dtype. The counterpart of `halfbyte.reference.quantize`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from halfbyte.errors import check
from halfbyte.formats import Code, Format, Shape
from halfbyte.packing import unpack_codes

if TYPE_CHECKING:
    from halfbyte.tensors import QuantTensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def values_of(q: QuantTensor, dtype: torch.dtype) -> torch.Tensor:
    """`halfbyte.dequantize` without its check of `q`."""
    check(
        isinstance(dtype, torch.dtype) and dtype in _FLOATS,
        f"dtype={dtype!r}; expected torch.float16, bfloat16, float32 or float64",
    )
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    if q.format.scale is None:
        return q.codes.to(dtype)
    values = decode(q.codes, block_scales(q, wide), q.offsets, q.format, q.shape).to(dtype)
    return values if q.perm is None else in_order(values, q.perm)


def in_order(values: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    """Undo act-order: stored column j of [..., N, K] becomes column perm[..., j]."""
    return torch.empty_like(values).scatter_(-1, perm.long().unsqueeze(-2).expand_as(values), values)


def decode(codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, fmt: Format, shape: Shape) -> torch.Tensor:
    """Values of stored codes with decoded scales; computed in the dtype of `scales`."""
    scale = over_elements(scales, fmt, shape)
    unit = decode_unit(codes, fmt.code).to(scales.dtype)
    if fmt.offset == "none" or offsets is None:
        return unit * scale
    offset = over_elements(offsets.to(scales.dtype), fmt, shape)
    return (unit - offset) * scale if fmt.offset == "int" else unit * scale + offset


def decode_unit(codes: torch.Tensor, code: Code) -> torch.Tensor:
    """Values of stored codes before scaling, float32, one for each code of a byte."""
    if code.per_byte > 1:
        codes = unpack_codes(codes, code.bits)
    if code.values is not None:
        return code.codebook().to(codes.device)[codes.int()]
    if code.kind == "float":
        return codes.view(code.dtype).float()
    return codes.float() - code.bias


def over_elements(scales: torch.Tensor, fmt: Format, shape: Shape) -> torch.Tensor:
    """Scales (or offsets) repeated to broadcast against a tensor of shape `shape`."""
    assert fmt.scale is not None
    match fmt.scale.granularity:
        case "tensor":
            return scales.reshape((1,) * len(shape))
        case "token":
            return scales.unsqueeze(-2).unsqueeze(-1)
        case "head":
            return scales.unsqueeze(-1)
        case "out_channel":
            return scales
        case "group":
            return scales.repeat_interleave(fmt.group_size(shape[-1]), dim=-1)
        case "channel":
            return scales.repeat_interleave(fmt.token_block or 1, dim=-2)


# -------------------------------------------------------------------------------------------------- encoded block scales


def block_scales(q: QuantTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The scales of a QuantTensor, decoded to `dtype`, second-level scales included."""
    assert q.scales is not None
    if q.nested is not None:
        return _unnested(q.scales, 0, q.nested, q.format, dtype)
    return plain_scales(q.scales, q.format, q.tensor_scale, dtype)


def expert_scales(q: QuantTensor, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """`block_scales` of one matrix of a stack [E, N, K]."""
    assert q.scales is not None
    raw = q.scales[expert]
    if q.nested is not None:
        return _unnested(raw, expert * raw.numel(), q.nested, q.format, dtype)
    return plain_scales(raw, q.format, None if q.tensor_scale is None else q.tensor_scale[expert], dtype)


def _unnested(stored: torch.Tensor, first: int, nested: torch.Tensor, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """Double-quantized scales, decoded to `dtype`; `first` is the index of the first one in the whole tensor."""
    assert fmt.scale is not None and fmt.scale.nested is not None
    block = torch.arange(first, first + stored.numel(), device=stored.device).div_(fmt.scale.nested, rounding_mode="floor")
    absmax, mean = nested[:-1].to(dtype)[block].view(stored.shape), nested[-1].to(dtype)
    return dynamic_map(stored.device)[stored.int()].to(dtype) * absmax + mean


def nest(scales: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of scales, uint8, and what decodes them: double quantization (QLoRA).

    The mean is subtracted, the rest stored in 8 bits in blocks of `size`. Codes of elements are computed with the exact scales;
    rounding of the stored ones is the format's own error.
    """
    mean = scales.double().mean().float()
    rest = torch.nn.functional.pad((scales - mean).flatten(), (0, -scales.numel() % size))
    blocks = rest.reshape(-1, size)
    absmax = blocks.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny)
    table = dynamic_map(scales.device)
    index = torch.bucketize(blocks / absmax[:, None], (table[1:] + table[:-1]) / 2)
    return index.flatten()[: scales.numel()].reshape(scales.shape).to(torch.uint8), torch.cat([absmax, mean.reshape(1)])


def plain_scales(
    stored: torch.Tensor, fmt: Format, tensor_scale: torch.Tensor | None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Scales that are not nested, decoded to `dtype`, times `tensor_scale`."""
    if stored.is_floating_point():
        return stored.to(dtype)
    if fmt.scale is not None and fmt.scale.dtype == "e8m0":
        return e8m0_to_float(stored).to(dtype)
    scales = stored.view(torch.float8_e4m3fn).to(dtype)
    return scales if tensor_scale is None else scales * tensor_scale.to(dtype).unsqueeze(-1)


def e8m0_to_float(stored: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes as float32: 2^(b - 127); 0 is 2^-127, a subnormal; 255 is NaN (OCP MX v1.0)."""
    value = torch.ldexp(torch.ones_like(stored, dtype=torch.float32), stored.int() - 127)
    return value.masked_fill(stored == 255, torch.nan)


@functools.cache
def dynamic_map(device: torch.device) -> torch.Tensor:
    """bitsandbytes' signed dynamic map, float32 [256], ascending.

    Seven decades, 10^-6 to 1; decade i holds the 2^i midpoints of an even partition of [0.1, 1], both signs; then 0 and 1.
    """
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32, device="cpu")
        middle = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (i - 6)
        values += [*middle.tolist(), *(-middle).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)
