"""What the bits mean: every number format, described once.

A `Format` is data. The quantizer, the reference, the kernels' constants, cache sizes, loaders, the documentation's tables and the
tests derive from it; no op, plan or kernel tests for a format by its name.

Two families share the description:

* KV formats quantize keys or values, a tensor [B, H, T, D] (batch, KV heads, tokens, head_dim);
* weight formats quantize a matrix [N, K] (out features, in features) along K, or a stack [E, N, K] of experts' matrices.

Sources: OCP Microscaling Formats (MX) v1.0 for MXFP4; NVIDIA's NVFP4 (blocks of 16, E4M3 block scales, one FP32 scale per tensor);
QLoRA (arXiv 2305.14314) and bitsandbytes for NF4 and its FP4; GPTQ and AWQ for integer zero points; KIVI (arXiv 2402.02750) for
per-channel keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from halfbyte.arguments import integer
from halfbyte.errors import InvalidArgument, Unsupported, check

Shape = tuple[int, ...]
Granularity = Literal["tensor", "token", "head", "group", "channel", "out_channel"]

#: M from which on, and K up to which, weight formats with `rounds_x` round x to INT8: sums have 32 bits.
ROUNDED_ROWS, ROUNDED_WIDTH = 512, 2**17

#: Lower bound of fp16 scales: the smallest positive fp16 number, so that no block divides by zero.
MIN_SCALE = 2.0**-24


@dataclass(frozen=True)
class Code:
    """The meaning of one stored code, before scaling.

    `affine`: the integer `stored - bias`, between `lo` and `hi`. `lookup`: `values[stored]`. `float`: the bits of `dtype`.
    `reach` is the value that the largest magnitude of a block is mapped to: scale = amax / reach (with an offset:
    scale = (max - min) / reach).
    """

    name: str
    bits: int
    kind: Literal["affine", "lookup", "float"]
    dtype: torch.dtype
    reach: float = 1.0
    lo: int = 0
    hi: int = 0
    bias: int = 0
    values: tuple[float, ...] | None = None
    ties: Literal["even", "low"] = "even"

    @property
    def per_byte(self) -> int:
        """Codes per byte of storage: 2 of 4 bits, 4 of 2 bits, else 1."""
        return max(1, 8 // self.bits)

    @property
    def is_e4m3(self) -> bool:
        """Whether codes are FP8; by dtype and not by object identity, which copies and unpickled codes lack."""
        return self.dtype is torch.float8_e4m3fn

    def codebook(self) -> torch.Tensor:
        """The value of every code, as float32 [2**bits] indexed by the unsigned code; up to 8 bits."""
        check(self.bits <= 8, f"code {self.name}: a codebook exists for up to 8 bits, not for {self.bits}")
        if self.values is not None:
            return torch.tensor(self.values, dtype=torch.float32, device="cpu")
        raw = torch.arange(2**self.bits, dtype=torch.int32, device="cpu")
        if self.kind == "float":
            return raw.to(torch.uint8).view(self.dtype).float()
        if self.dtype is torch.int8:
            return raw.to(torch.uint8).view(torch.int8).float()
        return (raw - self.bias).float()


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BNB_FP4 = tuple(v / 12 for v in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def _signed(magnitudes: tuple[float, ...]) -> tuple[float, ...]:
    """Sign-magnitude: bit 3 of the code is the sign, so code 8 is -0."""
    return magnitudes + tuple(-v for v in magnitudes)


FP16 = Code("fp16", 16, "float", torch.float16)
BF16 = Code("bf16", 16, "float", torch.bfloat16)
FP32 = Code("fp32", 32, "float", torch.float32)
FP64 = Code("fp64", 64, "float", torch.float64)
INT8 = Code("int8", 8, "affine", torch.int8, reach=127, lo=-127, hi=127)
E4M3 = Code("e4m3", 8, "float", torch.float8_e4m3fn, reach=448)
INT2 = Code("int2", 2, "affine", torch.uint8, reach=3, lo=0, hi=3)
INT4 = Code("int4", 4, "affine", torch.uint8, reach=15, lo=0, hi=15)
INT4_SYM = Code("int4_sym", 4, "affine", torch.uint8, reach=7.5, lo=-8, hi=7, bias=8)
E2M1 = Code("e2m1", 4, "lookup", torch.uint8, reach=6, values=_signed(_E2M1))
NF4 = Code("nf4", 4, "lookup", torch.uint8, reach=1, values=_NF4, ties="low")
BNB_FP4 = Code("fp4_bnb", 4, "lookup", torch.uint8, reach=1, values=_signed(_BNB_FP4), ties="low")


@dataclass(frozen=True)
class Scale:
    """How scales are laid out and stored.

    `granularity` says what shares one scale: `tensor`, all elements; `token`, all heads of a token; `head`, one head of a token;
    `group`, `group` consecutive elements of the last axis; `channel`, one dim over `group` tokens; `out_channel`, one row of a
    weight. `nested`: the block size of double quantization, which stores the scales in 8 bits.
    """

    dtype: Literal["f32", "f16", "e8m0", "e4m3"]
    granularity: Granularity
    group: int | None = None
    nested: int | None = None

    @property
    def storage(self) -> torch.dtype:
        """The dtype scales are stored in; E8M0, E4M3 and nested scales are raw bytes."""
        if self.nested is not None:
            return torch.uint8
        return {"f32": torch.float32, "f16": torch.float16, "e8m0": torch.uint8, "e4m3": torch.uint8}[self.dtype]


@dataclass(frozen=True)
class Format:
    """One number format: codes, their scales, and offsets.

    `offset`: `none`; `int`, a zero point z per scale, x = s*(q - z); `float`, an offset m per scale, x = s*q + m.
    `tensor_scale`: an additional FP32 scale of the whole tensor (NVFP4); a stack [E, N, K] has one per row, so that gate and up
    projections of each expert keep their own.
    `clip`: the centered fraction of a block's range that codes with a float offset cover; values outside saturate.
    `rounds_x`: a 16-bit x of `ROUNDED_ROWS` rows or more, by Hopper's tuned kernel or on a CPU, is rounded to INT8 per token, the
    weight [N, K] to INT8 per out feature, which puts y off by about 1 %; else, and for experts, as the format without `_a8`.
    """

    name: str
    code: Code
    scale: Scale | None = None
    offset: Literal["none", "int", "float"] = "none"
    tensor_scale: bool = False
    clip: float = 1.0
    rounds_x: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def is_quantized(self) -> bool:
        """False for the plain formats (fp16, bf16, fp32, fp64), which have no scales."""
        return self.scale is not None

    @property
    def storage(self) -> torch.dtype:
        """The dtype codes are stored in. FP8 codes are raw bytes."""
        return torch.uint8 if self.code.is_e4m3 else self.code.dtype

    @property
    def offset_dtype(self) -> torch.dtype | None:
        """The dtype offsets are stored in, None without offsets."""
        return {"none": None, "int": torch.uint8, "float": torch.float16}[self.offset]

    @property
    def granularity(self) -> Granularity | None:
        """What shares one scale; None when nothing is scaled."""
        return None if self.scale is None else self.scale.granularity

    @property
    def token_block(self) -> int | None:
        """Tokens that share a scale and are quantized together (per-channel formats); None for all others."""
        return self.scale.group if self.scale is not None and self.scale.granularity == "channel" else None

    @property
    def gains_by_rotation(self) -> bool:
        """Whether keys are rotated by default: codes have at most 4 bits, and outlier channels share scales with others."""
        return self.code.bits <= 4 and self.granularity in ("token", "head", "group")

    def group_size(self, last: int) -> int:
        """Consecutive elements of a last axis of length `last` that share a scale; all of them unless the format has groups."""
        in_groups = self.scale is not None and self.scale.granularity == "group" and self.scale.group is not None
        return self.scale.group if in_groups else last  # type: ignore[union-attr, return-value]

    @property
    def exact(self) -> Format:
        """The format of the same bytes that leaves x as it is."""
        return WEIGHT_FORMATS[self.name.removesuffix("_a8")] if self.rounds_x else self

    def rounds(self, rows: int, width: int) -> bool:
        """Whether x [rows, width] in 16 bits is rounded, see `rounds_x`."""
        return self.rounds_x and rows >= ROUNDED_ROWS and width <= ROUNDED_WIDTH

    def check_shape(self, shape: Shape, name: str = "x") -> None:
        """Raise `InvalidArgument` when a tensor of this shape cannot be stored; the message lists what would fit."""
        least = 2 if self.tensor_scale else 1
        check(len(shape) >= least, f"{name} has shape {list(shape)}; {self.name} needs {least} or more axes")
        last = shape[-1]
        if last % (n := self.code.per_byte):
            raise InvalidArgument(
                f"{name} has a last axis of {last}; {self.name} stores {n} codes in a byte and needs a multiple of {n}; "
                f"use an 8-bit format"
            )
        if self.scale is None or self.scale.group is None:
            return
        axis, what = (-2, "number of tokens") if self.token_block else (-1, "last axis")
        size = shape[axis] if len(shape) >= -axis else 0
        if size % self.scale.group:
            fits = self._others_for(shape[-1]) or ["int8_col"]
            raise InvalidArgument(
                f"{name} has a {what} of {size}, which groups of {self.scale.group} ({self.name}) do not divide; "
                f"{', '.join(fits)} would fit"
            )

    def nearest(self, last: int) -> Format:
        """This weight format or, where its groups do not divide a last axis of `last`, the widest groups of the same codes and
        scales that do; else int8_col, which has no groups."""
        if last % self.group_size(last) == 0 and last % self.code.per_byte == 0:
            return self
        alike = [f for f in map(weight_format, self._others_for(last)) if f.scale and f.scale.group]
        narrower = [f for f in alike if f.scale and self.scale and f.scale.dtype == self.scale.dtype]
        return max(narrower, key=lambda f: f.group_size(last), default=WEIGHT_FORMATS["int8_col"])

    def _others_for(self, last: int) -> list[str]:
        """Formats with the same codes that fit a last axis of `last` and any number of tokens."""
        registry = KV_FORMATS if KV_FORMATS.get(self.name) == self else EVERY_WEIGHT_FORMAT
        alike = [f for f in registry.values() if (f.code, f.rounds_x) == (self.code, self.rounds_x) and f.scale]
        return [f.name for f in alike if not f.token_block and last % f.group_size(last) == 0]

    def codes_shape(self, shape: Shape) -> Shape:
        """Shape of the stored codes of a tensor of shape `shape`."""
        return (*shape[:-1], shape[-1] // self.code.per_byte)

    def scale_shape(self, shape: Shape) -> Shape:
        """Shape of the scales (before nesting) of a tensor of shape `shape`; offsets have the same."""
        check(self.scale is not None, f"{self.name} has no scales")
        assert self.scale is not None
        group = self.scale.group
        match self.scale.granularity:
            case "tensor":
                return (1,)
            case "token":
                return (*shape[:-3], shape[-2])
            case "head":
                return shape[:-1]
            case "group":
                return (*shape[:-1], shape[-1] // group) if group else (*shape[:-1], 1)
            case "channel":
                return (*shape[:-2], shape[-2] // (group or 1), shape[-1])
            case "out_channel":
                return (*shape[:-1], 1)

    def nbytes(self, shape: Shape) -> int:
        """Bytes of codes, scales and offsets that a tensor of this shape takes."""
        total = math.prod(self.codes_shape(shape)) * self.storage.itemsize
        if self.scale is None:
            return total
        scales = math.prod(self.scale_shape(shape))
        total += scales * self.scale.storage.itemsize
        total += scales * (self.offset_dtype.itemsize if self.offset_dtype else 0)
        if self.scale.nested is not None:
            total += 4 * math.ceil(scales / self.scale.nested) + 4
        return total + (4 * math.prod(self.tensor_scale_shape(shape)) if self.tensor_scale else 0)

    def tensor_scale_shape(self, shape: Shape) -> Shape:
        """Shape of the FP32 tensor scales of a tensor of shape `shape`."""
        return shape[:-1] if len(shape) > 2 else (1,)

    def bits_per_element(self, shape: Shape) -> float:
        """Bits per element, scales and offsets included."""
        return 8 * self.nbytes(shape) / math.prod(shape)


def _kv(name: str, code: Code, granularity: Granularity, group: int | None = None, clip: float = 1.0) -> Format:
    offset: Literal["none", "float"] = "float" if code in (INT2, INT4) else "none"
    return Format(name, code, Scale("f16", granularity, group), offset, clip=clip)


def _weight(name: str, code: Code, group: int | None) -> Format:
    granularity: Granularity = "group" if group else "out_channel"
    return Format(name, code, Scale("f16", granularity, group), "int" if code is INT4 else "none")


def _registry(formats: Iterable[Format]) -> dict[str, Format]:
    return {f.name: f for f in formats}


#: Formats of keys and values.
KV_FORMATS: dict[str, Format] = _registry(
    [
        Format("fp16", FP16),
        Format("bf16", BF16),
        _kv("int8", INT8, "head"),
        _kv("int8_tensor", INT8, "tensor"),
        _kv("int8_token", INT8, "token"),
        _kv("int8_g32", INT8, "group", 32),
        _kv("int8_g64", INT8, "group", 64),
        _kv("int8_channel", INT8, "channel", 32),
        _kv("fp8", E4M3, "head"),
        _kv("fp8_tensor", E4M3, "tensor"),
        _kv("int4", INT4, "head"),
        _kv("int4_g32", INT4, "group", 32),
        _kv("int4_g64", INT4, "group", 64),
        _kv("int4_channel", INT4, "channel", 32),
        # The clip with the least squared error of normal numbers, in blocks of 128, 32 and 64: tests/test_clip.py derives it.
        _kv("int2", INT2, "head", clip=19 / 32),
        _kv("int2_g32", INT2, "group", 32, clip=23 / 32),
        _kv("int2_g64", INT2, "group", 64, clip=21 / 32),
    ]
)

#: Formats of weights, quantized along the in features.
WEIGHT_FORMATS: dict[str, Format] = _registry(
    [
        *(_weight(f"int4_{g}", INT4, n) for g, n in (("g32", 32), ("g64", 64), ("g128", 128), ("col", None))),
        *(_weight(f"int4_sym_{g}", INT4_SYM, n) for g, n in (("g32", 32), ("g64", 64), ("g128", 128), ("col", None))),
        # For checkpoints whose scales fp16 cannot hold exactly; wider groups repeat their scale.
        Format("int4_g32_fp32", INT4, Scale("f32", "group", 32), "int"),
        Format("int4_sym_g32_fp32", INT4_SYM, Scale("f32", "group", 32)),
        _weight("int8_col", INT8, None),
        _weight("int8_g128", INT8, 128),
        Format("nf4", NF4, Scale("f32", "group", 64)),
        Format("nf4_dq", NF4, Scale("f32", "group", 64, nested=256)),
        Format("fp4_bnb", BNB_FP4, Scale("f32", "group", 64)),
        Format("mxfp4", E2M1, Scale("e8m0", "group", 32)),
        Format("nvfp4", E2M1, Scale("e4m3", "group", 16), tensor_scale=True),
    ]
)


_IN_GROUPS = [f"int4_{kind}g{group}" for kind in ("", "sym_") for group in (32, 64, 128)]
#: These and those that round x to INT8, requested by name only: `int4_g128_a8`.
EVERY_WEIGHT_FORMAT = WEIGHT_FORMATS | _registry(replace(WEIGHT_FORMATS[n], name=f"{n}_a8", rounds_x=True) for n in _IN_GROUPS)


#: Unquantized formats that attention reads, such as the exact keys of a prompt that was just computed.
_PLAIN: dict[str, Format] = _registry([KV_FORMATS["fp16"], KV_FORMATS["bf16"], Format("fp32", FP32), Format("fp64", FP64)])


def plain_format(name: str | torch.dtype) -> Format:
    """The unquantized format of this name or dtype."""
    for fmt in _PLAIN.values():
        if name in (fmt.name, fmt.code.dtype):
            return fmt
    raise InvalidArgument(f"{name} is not a floating dtype that attention reads; choose float16, bfloat16, float32 or float64")


def kv_format(name: str) -> Format:
    """The format that attention reads of this name: of a cache, or unquantized."""
    return KV_FORMATS.get(name) or plain_format(name)


def _lookup(registry: dict[str, Format], name: str | Format, argument: str) -> Format:
    if isinstance(name, Format) and registry.get(name.name) == name:
        return name
    if isinstance(name, Format):
        name = f"{name.name} (a Format that is not the registered one)"
    if not isinstance(name, str) or name not in registry:
        raise InvalidArgument(f"{argument}={name!r} is not a format; choose one of: {', '.join(registry)}")
    return registry[name]


def key_format(name: str | Format, argument: str = "keys") -> Format:
    """The format of this name for keys."""
    return _lookup(KV_FORMATS, name, argument)


def value_format(name: str | Format, argument: str = "values") -> Format:
    """The format of this name for values; per-channel formats are for keys only."""
    fmt = _lookup(KV_FORMATS, name, argument)
    if fmt.token_block:
        fits = ", ".join(n for n, f in KV_FORMATS.items() if not f.token_block)
        raise InvalidArgument(f"{argument}={fmt.name!r} is for keys only; choose one of: {fits}")
    return fmt


def weight_format(name: str | Format, argument: str = "weights") -> Format:
    """The format of this name for weights."""
    return _lookup(EVERY_WEIGHT_FORMAT, name, argument)


def check_window(sink_tokens: int, recent_tokens: int, keys: Format, values: Format, capacity: int = 2**31 - 1) -> None:
    """Raise unless both are numbers of tokens within `capacity`, and keys and values are quantized token by token."""
    for name, count in (("sink_tokens", sink_tokens), ("recent_tokens", recent_tokens)):
        integer(name, count, 0, 2**31 - 1, "a number of tokens, 0 or more")
    if not sink_tokens and not recent_tokens:
        return
    window = f"sink_tokens={sink_tokens}, recent_tokens={recent_tokens}"
    check(sink_tokens + recent_tokens <= capacity, f"{window}: more than the capacity of {capacity} tokens; make the cache larger")
    for name, fmt in (("keys", keys), ("values", values)):
        check(fmt.is_quantized, f"{window}: {name}={fmt.name!r} is a 16-bit format; choose a quantized one, or leave them out")
        if fmt.token_block:
            raise Unsupported(
                f"{window}: {name}={fmt.name!r} quantizes {fmt.token_block} tokens at once, and tokens leave the window one by "
                f"one; choose a format that is not per channel, or leave them out"
            )
