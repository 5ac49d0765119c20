"""Quantize: the specification of every format. `halfbyte.reference.dequantize` is its counterpart.

    symmetric       s = max|x| / reach           q = round(x / s)            x ~ s * q
    integer zero    s = (max - min) / 15         q = round(x / s) + z        x ~ s * (q - z),  z = round(-min / s)
    float offset    s = c (max - min) / reach    q = round((x - m) / s)      x ~ s * q + m,    m = min + (1 - c) / 2 (max - min)

c is the clip of a format, 1 or less. With an integer zero, the range includes 0. The clipped range of a weight is r * max|x|, or
r * min to r * max. Values outside saturate; the others get finer steps.

Arithmetic is fp32. Scales and offsets are rounded to their storage type first; codes are computed from the stored values with
IEEE division, ties to even (NF4 and FP4: to the lower value), and clamped to the code's range. MXFP4, NVFP4 and double
quantization follow their specifications.

`quantize` raises on NaN and infinity, and on blocks whose scale or offset exceeds fp16.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from halfbyte.arguments import check_tensor, number
from halfbyte.errors import InvalidArgument, check
from halfbyte.formats import E4M3, EVERY_WEIGHT_FORMAT, KV_FORMATS, MIN_SCALE, WEIGHT_FORMATS, Format, weight_format
from halfbyte.reference.codes import encode_unit, nearest_values, sorted_table, to_grid
from halfbyte.reference.dequantize import nest, over_elements, plain_scales, values_of
from halfbyte.reference.error_feedback import check_hessian, error_feedback
from halfbyte.tensors import QuantTensor
from halfbyte.threads import alone, each
from halfbyte.transforms import refuse_transforms

F16_MAX = 65504.0

#: Fractions of the range that the clip search of a weight tries besides 1. Above 1, the range exceeds the largest value, and the
#: others may lie closer to their codes. 1/2 and 2 are the neighboring exponents of MX.
RATIOS = (*(i / 20 for i in range(10, 31) if i != 20), 2.0)
#: Most elements that share a scale whose clip is searched. In wider blocks the least squared error cuts off outliers, which real
#: models cannot spare: they diverge less with the whole range.
WIDEST = 32
#: Most elements of a weight that are worked on at once; temporary memory is a few times that, and on a CPU stays in cache.
AT_ONCE, AT_ONCE_ON_CPU = 1 << 22, 1 << 16


def quantize(
    x: torch.Tensor,
    fmt: str | Format,
    *,
    scale: float | torch.Tensor | None = None,
    clip: str | None = None,
    hessian: torch.Tensor | None = None,
) -> QuantTensor:
    """Quantize a whole tensor: keys or values [B, H, T, D] with a KV format, weights [N, K] or [E, N, K] with a weight format.

    scale    a number that fixes the scale of a per-tensor format instead of measuring it; values beyond it saturate
    clip     "search": each scale of a weight that at most `WIDEST` elements share covers the fraction of its range (`RATIOS`) with
             the least squared error; wider blocks keep the whole range. No calibration data. None: the whole range
    hessian  [K, K] for a weight [N, K]: the sum of x x^T over inputs x of its layer. Errors of columns are fed back to others
             (`error_feedback`). Clips, of blocks of any width, are those of the least squares, weighed by the inputs of columns

    The result has no gradient, even if x requires one. Raises `InvalidArgument` for NaN or infinity in `x`, for a shape the format
    does not divide, and for a scale beyond fp16.
    """
    fmt = any_format(fmt)
    check_tensor("x", x, [*map(str, range(x.ndim))] if isinstance(x, torch.Tensor) else ["..."])
    if not torch.compiler.is_compiling():
        refuse_transforms("quantize", (x,))
    x = x.detach()
    check(x.layout is torch.strided, f"x is {x.layout}; expected a dense tensor: x.to_dense()")
    check(x.device.type != "meta", "x is on the meta device and holds no numbers to quantize; load it first")
    fmt.check_shape(tuple(x.shape))
    if fmt.granularity in ("token", "channel") and x.ndim != 4:
        raise InvalidArgument(f"x has {x.ndim} axes; {fmt.name} quantizes keys or values [B, H, T, D]")
    check_clip(clip, fmt)
    if hessian is not None:
        is_matrix = x.ndim == 2 and _is_weight(fmt)
        check(is_matrix, f"hessian is for a weight [N, K] and its formats; x has {x.ndim} axes, and {fmt.name} was named")
        check_hessian(hessian, x.shape[1])
    tensor_scale = None if scale is None else fixed_scale(scale, fmt, x.device)
    if hessian is None and x.is_cpu and _is_weight(fmt):
        with alone():
            return _quantized(x, fmt, tensor_scale, clip, None)
    return _quantized(x, fmt, tensor_scale, clip, hessian)


def _quantized(
    x: torch.Tensor, fmt: Format, tensor_scale: torch.Tensor | None, clip: str | None, hessian: torch.Tensor | None
) -> QuantTensor:
    check_finite(x, "x")
    wide, x = x, x.to(fmt.code.dtype) if fmt.scale is None else x.float()
    if wide.element_size() > x.element_size():
        check_finite(x, f"x rounded to {x.dtype}")
    if fmt.scale is None:
        return QuantTensor(fmt, tuple(x.shape), x)
    top = _tensor_scale(x, fmt) if fmt.tensor_scale else None
    searches = hessian is not None or (clip is not None and has_searched_clip(fmt))
    ratio = _best_ratios(x, fmt, top, None if hessian is None else hessian.diagonal().float()) if searches else None
    scales, offsets = _measure_stored(x, fmt, ratio, top) if tensor_scale is None else (tensor_scale, None)
    check_range(scales, offsets, fmt)
    plain = plain_scales(scales, fmt, top)
    if hessian is not None and x.numel():
        x = _fed_back(x, plain, offsets, fmt, hessian)
    codes = _encode_in_pieces(x, plain, offsets, fmt)
    if fmt.scale.nested is not None:
        nested_codes, nested = nest(scales, fmt.scale.nested)
        return QuantTensor(fmt, tuple(x.shape), codes, nested_codes, nested=nested)
    return QuantTensor(fmt, tuple(x.shape), codes, scales, offsets, top)


def dequantize(q: QuantTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of a QuantTensor, [*q.shape] in `dtype`: computed in fp32 (float64 on request), then rounded once.

    The columns of a weight in act-order are returned in their original order.
    """
    check(isinstance(q, QuantTensor), f"q is a {type(q).__name__}; expected a QuantTensor")
    return values_of(q, dtype)


def any_format(fmt: str | Format) -> Format:
    """A `Format` is returned as it is; a name is looked up among the weight formats (KV formats share some names)."""
    if isinstance(fmt, Format):
        return fmt
    if isinstance(fmt, str) and fmt in KV_FORMATS and fmt not in WEIGHT_FORMATS:
        alike = [f.name for f in WEIGHT_FORMATS.values() if f.code.bits == KV_FORMATS[fmt].code.bits] or list(WEIGHT_FORMATS)
        raise InvalidArgument(
            f"fmt={fmt!r} is a format of keys and values: for those pass halfbyte.key_format({fmt!r}); "
            f"for weights choose one of: {', '.join(alike)}"
        )
    return weight_format(fmt, "fmt")


def fixed_scale(scale: float | torch.Tensor, fmt: Format, device: torch.device | str, name: str = "scale") -> torch.Tensor:
    """The caller's scale, fp16 [1]. Only per-tensor formats take one."""
    check(
        fmt.granularity == "tensor", f"{name} was given, but {fmt.name} does not have one scale for the whole tensor; leave it out"
    )
    single = isinstance(scale, torch.Tensor) and scale.numel() == 1 and scale.is_floating_point() and scale.device.type != "meta"
    value = float(scale) if single else scale
    value = number(name, value, MIN_SCALE, F16_MAX, f"one number that fp16 holds, {MIN_SCALE:.1e} to {F16_MAX:.0f}")
    return torch.tensor([value], dtype=torch.float16, device=device)


def check_clip(clip: str | None, fmt: Format) -> None:
    """Raise unless `clip` is None, or "search" with a weight format."""
    check(clip in (None, "search"), f"clip={clip!r}; expected None, or 'search' for the range with the least squared error")
    check(
        clip is None or _is_weight(fmt), f"clip={clip!r} searches the range of weights; {fmt.name} is a format of keys and values"
    )


def _is_weight(fmt: Format) -> bool:
    return EVERY_WEIGHT_FORMAT.get(fmt.name) == fmt


def has_searched_clip(fmt: Format) -> bool:
    """Whether clip="search" searches the clip of a weight format; others keep the whole range."""
    return fmt.scale is not None and (fmt.scale.group or math.inf) <= WIDEST


def check_finite(x: torch.Tensor, name: str) -> None:
    """Raise when `x` holds NaN or infinity, which no quantized format can store."""
    if x.numel() and not bool(torch.isfinite(x).all()):
        bad = int((~torch.isfinite(x)).sum())
        raise InvalidArgument(
            f"{name} holds {bad} NaN or infinite values of {x.numel()}; quantized formats store finite numbers only"
        )


def check_range(scales: torch.Tensor, offsets: torch.Tensor | None, fmt: Format, name: str = "x", rows: str = "") -> None:
    """Raise when a scale or a float offset left the range of its storage type. rows: what the first axis counts, to name one."""
    for part in (scales, offsets):
        if part is None or not part.is_floating_point() or bool(torch.isfinite(part).all()):
            continue
        where = f" in {rows} {int((~torch.isfinite(part)).nonzero()[0, 0])}" if rows else ""
        raise InvalidArgument(
            f"{name} is too large for {fmt.name}{where}: a scale or offset exceeds {F16_MAX:.0f}; scale it down first"
        )


# ---------------------------------------------------------------------------------------------------------------- blocks


def in_blocks(x: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A view of `x` with the axes that share a scale split off, and the indices of those axes."""
    assert fmt.scale is not None
    match fmt.scale.granularity:
        case "tensor":
            return x.reshape(1, -1), (1,)
        case "token":
            return x, (-3, -1)
        case "head" | "out_channel":
            return x, (-1,)
        case "group":
            return x.unflatten(-1, (-1, fmt.group_size(x.shape[-1]))), (-1,)
        case "channel":
            return x.unflatten(-2, (-1, fmt.token_block or 1)), (-2,)


# -------------------------------------------------------------------------------------------------- scales, then the codes


def measure(x: torch.Tensor, fmt: Format, ratio: float | torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and offsets of float32 `x`, in their storage types (infinite where fp16 cannot hold them).

    `ratio`: the fraction of a weight's range that codes cover, one number or one per scale; None: all of it.
    """
    if x.numel():
        return _scales_of(_extent(x, fmt), fmt, ratio)
    scales = torch.full(fmt.scale_shape(tuple(x.shape)), MIN_SCALE, dtype=_stored_type(fmt), device=x.device)
    return scales, None if fmt.offset_dtype is None else torch.zeros_like(scales, dtype=fmt.offset_dtype)


def _stored_type(fmt: Format) -> torch.dtype:
    return torch.float16 if fmt.scale is not None and fmt.scale.dtype == "f16" else torch.float32


def _extent(x: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest number of each block, in the shape of the scales; without offsets: 0, the largest magnitude."""
    blocks, axes = in_blocks(x, fmt)
    keep = fmt.granularity == "out_channel"
    if fmt.offset == "none":
        high = blocks.abs().amax(axes, keepdim=keep)
        return torch.zeros_like(high), high
    return blocks.amin(axes, keepdim=keep), blocks.amax(axes, keepdim=keep)


def _scales_of(
    extent: tuple[torch.Tensor, torch.Tensor], fmt: Format, ratio: float | torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`measure` of blocks of this extent."""
    (low, high), dtype = extent, _stored_type(fmt)
    reach = torch.full((), fmt.code.reach, device=high.device)  # a GPU would multiply by the reciprocal of a Python number
    if fmt.offset == "none":
        floor = MIN_SCALE if dtype is torch.float16 else torch.finfo(dtype).tiny
        return (_clipped(high, ratio) / reach).clamp_min(floor).to(dtype), None
    if fmt.offset == "float":
        span = high - low
        if fmt.clip != 1:
            low, span = low + span * ((1 - fmt.clip) / 2), span * fmt.clip
        return (span / reach).clamp_min(MIN_SCALE).to(dtype), low.to(torch.float16)
    low, high = _clipped(low, ratio).clamp_max(0), _clipped(high, ratio).clamp_min(0)  # 0 must be a code
    scales = ((high - low) / reach).clamp_min(MIN_SCALE).to(dtype)
    zeros = (-low / scales.float()).round().clamp(fmt.code.lo, fmt.code.hi)
    return scales, zeros.to(torch.uint8)


def encode(x: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, fmt: Format) -> torch.Tensor:
    """Stored codes of float32 `x` with stored scales and offsets."""
    shape = tuple(x.shape)
    scale = over_elements(scales.float(), fmt, shape)
    if fmt.offset == "float" and offsets is not None:
        offset = over_elements(offsets.float(), fmt, shape)
        # The value of a constant block is its offset, even if fp16 rounded that.
        constant = over_elements(_is_constant(x, fmt), fmt, shape)
        return encode_unit(((x - offset) / scale).masked_fill(constant, 0), fmt.code)
    if fmt.offset == "int" and offsets is not None:
        q = (x / scale).round() + over_elements(offsets.float(), fmt, shape)
        return encode_unit(q, fmt.code)
    return encode_unit(x / scale, fmt.code)


def _encode_in_pieces(x: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, fmt: Format) -> torch.Tensor:
    """`encode`; weights on a CPU in blocks of rows."""
    if not (x.is_cpu and x.numel() and _is_weight(fmt)):
        return encode(x, scales, offsets, fmt)
    return _in_pieces(lambda rows, *own: encode(rows, own[0], own[1], fmt), x, scales, offsets).view(*x.shape[:-1], -1)


def _is_constant(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Which blocks hold one value only, in the shape of the scales."""
    blocks, axes = in_blocks(x, fmt)
    if x.numel() == 0:
        return torch.ones(fmt.scale_shape(tuple(x.shape)), dtype=torch.bool, device=x.device)
    return blocks.amax(axes) == blocks.amin(axes)


# ------------------------------------------------------------------------------------------------------- MXFP4 and NVFP4


def _measure_stored(
    x: torch.Tensor, fmt: Format, ratio: float | torch.Tensor | None, top: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`measure`, also for MXFP4 and NVFP4, whose scales are bytes."""
    if fmt.scale is not None and fmt.scale.dtype in ("e8m0", "e4m3"):
        return _stored_scales(_extent(x, fmt), fmt, ratio, top)
    return measure(x, fmt, ratio)


def _stored_scales(
    extent: tuple[torch.Tensor, torch.Tensor], fmt: Format, ratio: float | torch.Tensor | None, top: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`_measure_stored` of blocks of this extent."""
    if fmt.scale is not None and fmt.scale.dtype == "e8m0":
        return _mx_scales(_clipped(extent[1], ratio)), None
    return _scales_of(extent, fmt, ratio) if top is None else (_nvfp4_scales(_clipped(extent[1], ratio), fmt, top), None)


def _mx_scales(amax: torch.Tensor) -> torch.Tensor:
    """MX: the shared scale is 2^(exponent of the block's largest magnitude - 2); 2 is the largest exponent of E2M1."""
    exponent = amax.view(torch.int32) >> 23  # the biased exponent field, never a logarithm
    return (exponent - 2).clamp(0, 254).to(torch.uint8)


def _tensor_scale(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """NVFP4: g = amax / (6 * 448) of the tensor, float32 [1]; of a stack [E, N, K]: that of each matrix, for all its rows."""
    shape = fmt.tensor_scale_shape(tuple(x.shape))
    matrices = x.unsqueeze(0) if x.ndim < 3 else x
    top = matrices.abs().amax(tuple(range(1, matrices.ndim))) if x.numel() else x.new_zeros(len(matrices))
    largest = torch.full_like(top, fmt.code.reach * E4M3.reach)
    g = (top / largest).clamp_min(torch.finfo(top.dtype).tiny)  # a top below 1e-34 would make it 0
    return torch.where(top > 0, g, torch.ones_like(top)).unsqueeze(-1).expand(len(top), math.prod(shape[1:])).reshape(shape)


def _nvfp4_scales(amax: torch.Tensor, fmt: Format, g: torch.Tensor) -> torch.Tensor:
    """NVFP4: per block of 16 an E4M3 scale amax / (6 * g), as bytes."""
    scales = (amax / (fmt.code.reach * g).unsqueeze(-1)).clamp_max(E4M3.reach)
    scales = torch.where(amax > 0, scales.clamp_min(2.0**-9), torch.ones_like(scales))  # 2^-9: the smallest E4M3 above zero
    return scales.to(torch.float8_e4m3fn).view(torch.uint8)


# -------------------------------------------------------------------------------------- error feedback and the clip search


def _fed_back(
    x: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, fmt: Format, hessian: torch.Tensor
) -> torch.Tensor:
    """`error_feedback` of a weight [N, K] with plain scales."""
    shape = tuple(x.shape)
    scale = over_elements(scales.float(), fmt, shape).expand(shape).T.contiguous()
    zeros = None if offsets is None else over_elements(offsets.float(), fmt, shape).expand(shape).T.contiguous()

    def nearest(column: torch.Tensor, number: int) -> torch.Tensor:
        zero = None if zeros is None else zeros[number]
        return nearest_values(column / scale[number], zero, fmt.code).mul_(scale[number])

    return error_feedback(x, hessian, nearest)


def _clipped(end: torch.Tensor, ratio: float | torch.Tensor | None) -> torch.Tensor:
    return end if ratio is None else end * ratio


def _best_ratios(x: torch.Tensor, fmt: Format, top: torch.Tensor | None, by_column: torch.Tensor | None) -> torch.Tensor:
    """For each scale of a weight, the ratio with the least squared error, in the shape of the scales; 1 wins ties.

    by_column: [K], what the squares of a column are multiplied by.
    """
    return _in_pieces(lambda rows, own: _search(rows, fmt, own, by_column), x, top).view(fmt.scale_shape(tuple(x.shape)))


def _in_pieces(function: Callable[..., torch.Tensor], x: torch.Tensor, *parts: torch.Tensor | None) -> torch.Tensor:
    """What `function` gives for blocks of rows of a weight and their share of `parts`: an entry a row, one for all, or none."""
    rows, last = max(1, (AT_ONCE_ON_CPU if x.is_cpu else AT_ONCE) // max(1, x.shape[-1])), x.ndim - 2
    blocks = x.flatten(0, last).split(rows)
    own = ([part] * len(blocks) if part is None or part.numel() == 1 else part.flatten(0, last).split(rows) for part in parts)
    pieces = [*zip(blocks, *own, strict=True)]
    return torch.cat(each(lambda piece: function(*piece), pieces) if x.is_cpu else [function(*piece) for piece in pieces])


def _search(x: torch.Tensor, fmt: Format, top: torch.Tensor | None, by_column: torch.Tensor | None) -> torch.Tensor:
    if fmt.code.values is not None and sorted_table(fmt.code)[2]:
        x = x.abs()  # as exact as x itself, and half the table
    extent = _extent(x, fmt) if x.numel() else (x.new_zeros(fmt.scale_shape(tuple(x.shape))),) * 2
    blocks, _ = in_blocks(x, fmt)
    factors = None if by_column is None else in_blocks(by_column.unsqueeze(0), fmt)[0]
    scratch = torch.empty(3, *blocks.shape, device=x.device)
    best, least = torch.ones_like(extent[1]), torch.full_like(extent[1], torch.nan)
    ratios = torch.tensor([1.0, *RATIOS], device=x.device)
    scales, offsets = _stored_scales(extent, fmt, ratios.view(-1, *[1] * best.ndim), top)
    scales = plain_scales(scales, fmt, top)
    for i, ratio in enumerate(ratios):
        error = _squared_error(blocks, scales[i], None if offsets is None else offsets[i], fmt, scratch, factors)
        torch.where(error < least, ratio, best, out=best)  # false for NaN, the error of a scale beyond fp16
        torch.fmin(least, error, out=least)
    return best


def _squared_error(
    blocks: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    fmt: Format,
    scratch: torch.Tensor,
    factors: torch.Tensor | None,
) -> torch.Tensor:
    """The squared error of each block, in the shape of its plain scales, before they are nested; scratch [3, *blocks.shape].

    factors: what squares are multiplied by, as one row of the weight in blocks.
    """
    column = (*blocks.shape[:-1], 1)
    scale = scales.view(column)
    unit = torch.div(blocks, scale, out=scratch[0])
    unit = to_grid(unit, None if offsets is None else offsets.float().view(column), fmt.code, scratch)
    errors = unit.mul_(scale).sub_(blocks).square_()
    return (errors if factors is None else errors.mul_(factors)).sum(-1).view(scales.shape)
