"""Quantize and dequantize against quantizers written here in numpy from the formats' definitions, bit for bit."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import decoders
from halfbyte.errors import InvalidArgument
from halfbyte.formats import EVERY_WEIGHT_FORMAT, KV_FORMATS, WEIGHT_FORMATS, Format
from halfbyte.packing import unpack_codes
from halfbyte.reference.dequantize import block_scales, decode, dynamic_map
from halfbyte.reference.quantize import dequantize, encode, measure, quantize
from halfbyte.tensors import QuantTensor
from sizes import head_dim
from test_formats import CLIPS, KV_TABLE

F32, F16 = np.float32, np.float16
FLOOR = F32(2.0**-24)
KV_QUANTIZED = [name for name, f in KV_FORMATS.items() if f.is_quantized]
#: Granularity: axes of [B, H, T / 32, 32, D / g, g] that share a scale.
AXES = {"tensor": (0, 1, 2, 3, 4, 5), "token": (1, 4, 5), "head": (4, 5), "group": (5,), "channel": (3,)}
E4M3_TABLE = decoders.e4m3(np.arange(0x7F)).astype(np.float64)


def e4m3_code(x: np.ndarray) -> np.ndarray:
    """Nearest E4M3 byte of float32 x, ties to the even code, saturating: by search in the table of all magnitudes."""
    magnitude = np.abs(x).astype(np.float64).clip(max=448)
    low = (np.searchsorted(E4M3_TABLE, magnitude, "right") - 1).clip(0, 0x7E)
    high = (low + 1).clip(max=0x7E)
    below, above = magnitude - E4M3_TABLE[low], E4M3_TABLE[high] - magnitude
    up = (above < below) | ((above == below) & (low % 2 == 1))
    return (np.where(up, high, low) | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def e2m1_code(x: np.ndarray) -> np.ndarray:
    """Nearest E2M1 code of float32 x, ties to the even code, saturating; what is 0 is code 0."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    distance = np.abs(np.abs(x)[..., None].astype(np.float64) - table)
    preferred = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # argmin takes the first: even codes win ties
    code = preferred[distance[..., preferred].argmin(-1)]
    return (code + np.where(x < 0, 8, 0)).astype(np.uint8)


def nearest_code(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    return np.abs(x[..., None].astype(np.float64) - table.astype(np.float64)).argmin(-1).astype(np.uint8)


def kv(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
    """(codes, scales, offsets, values), one code an element; scales and offsets spread over the elements."""
    bits, granularity, group, *_, storage = KV_TABLE[name]
    code, axes = f"int{bits}" if bits in (2, 4) else "int8" if storage is torch.int8 else "fp8", AXES[str(granularity)]
    g = int(group or 32) if granularity == "group" else 32
    b, h, t, d = x.shape
    blocks = x.reshape(b, h, t // 32, 32, d // g, g)
    if code in ("int2", "int4"):
        low, high = blocks.min(axes, keepdims=True), blocks.max(axes, keepdims=True)
        top, clip = F32(15 if code == "int4" else 3), F32(CLIPS.get(name, 1))
        s = np.maximum((high - low) * clip / top, FLOOR).astype(F16)
        m = (low + (high - low) * ((1 - clip) / 2)).astype(F16)  # clips of KV formats are exact in fp32, and so are their halves
        q = np.rint((blocks - m.astype(F32)) / s.astype(F32)).clip(0, top)
        q = np.where(high == low, F32(0), q)
        value = q * s.astype(F32) + m.astype(F32)
        offsets = np.broadcast_to(m, blocks.shape).reshape(x.shape)
    else:
        reach = F32(127 if code == "int8" else 448)
        s = np.maximum(np.abs(blocks).max(axes, keepdims=True) / reach, FLOOR).astype(F16)
        unit = blocks / s.astype(F32)
        if code == "int8":
            q = np.rint(unit).clip(-127, 127)
            value = q * s.astype(F32)
        else:
            q = e4m3_code(unit)
            value = decoders.e4m3(q) * s.astype(F32)
        offsets = None
    return q.reshape(x.shape), np.broadcast_to(s, blocks.shape).reshape(x.shape), offsets, value.reshape(x.shape)


def spread(scales: torch.Tensor, fmt: Format, shape: tuple[int, ...]) -> np.ndarray:
    """Scales as the definition's table shapes them, over the elements: by indices, without the library's help."""
    s = scales.numpy()
    match fmt.granularity:
        case "tensor":
            return np.broadcast_to(s, shape)
        case "token":
            return np.broadcast_to(s[:, None, :, None], shape)
        case "head":
            return np.broadcast_to(s[..., None], shape)
        case "channel":
            return s[:, :, np.arange(shape[2]) // 32]
    assert fmt.scale is not None
    assert fmt.scale.group is not None
    return s[..., np.arange(shape[-1]) // fmt.scale.group]


KINDS = ["normal", "large", "tiny", "constant", "zero", "offset", "outlier", "huge_offset", "positive", "bf16", "mixed"]


def data(kind: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """float32 data of one kind."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    match kind:
        case "large":
            return x.clamp(-3, 3) * 20_000
        case "tiny":
            return x * 1e-6
        case "constant":
            return torch.full(shape, -3.7)
        case "zero":
            return torch.zeros(shape)
        case "offset":
            return x + 100
        case "outlier":
            x.view(-1)[x.numel() // 3] = 60_000.0
        case "huge_offset":
            return x * 0.01 + 60_000
        case "positive":
            return x.abs()
        case "bf16":
            return x.bfloat16().float()
        case "mixed":  # rows of very different sizes, some zero
            return x * torch.logspace(-5, 4, shape[-2]).view(-1, 1) * (torch.arange(shape[-2]) % 7 > 0).view(-1, 1)
    return x


# --------------------------------------------------------------------------------------------------------------- KV formats


@pytest.mark.parametrize("name", KV_QUANTIZED)
@pytest.mark.parametrize("kind", KINDS)
def test_kv_formats_are_exact(name: str, kind: str) -> None:
    fmt, shape = KV_FORMATS[name], (2, 3, 64, 128)
    x = data(kind, shape)
    q = quantize(x, fmt)
    codes, scales, offsets, values = kv(x.numpy(), name)
    assert q.scales is not None
    assert q.scales.shape == fmt.scale_shape(shape)
    np.testing.assert_array_equal(spread(q.scales, fmt, shape), scales)
    found = unpack_codes(q.codes, fmt.code.bits) if fmt.code.bits < 8 else q.codes
    np.testing.assert_array_equal(found.numpy(), codes)
    if offsets is not None:
        assert q.offsets is not None
        np.testing.assert_array_equal(spread(q.offsets, fmt, shape), offsets)
    np.testing.assert_array_equal(dequantize(q).numpy(), values)


@pytest.mark.parametrize("name", KV_QUANTIZED)
@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**31 - 1),
    exponent=st.floats(-5, 4),
    mean=st.floats(-1000, 1000),
    heads=st.integers(1, 3),
    times=st.sampled_from([1, 2, 4]),
)
def test_kv_formats_are_exact_on_any_data(name: str, seed: int, exponent: float, mean: float, heads: int, times: int) -> None:
    shape = (1, heads, 32, times * head_dim(name))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10**exponent + mean
    q = quantize(x, KV_FORMATS[name])
    codes, _, _, values = kv(x.numpy(), name)
    bits = KV_FORMATS[name].code.bits
    found = unpack_codes(q.codes, bits) if bits < 8 else q.codes
    np.testing.assert_array_equal(found.numpy(), codes)
    np.testing.assert_array_equal(dequantize(q).numpy(), values)


def test_int4_uses_its_codes_at_the_scale_floor() -> None:
    x = (torch.arange(64) % 16 * 2.0**-24).view(1, 1, 1, 64)
    assert torch.equal(dequantize(quantize(x, KV_FORMATS["int4"])), x)


@pytest.mark.parametrize("name", KV_QUANTIZED)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_raise(name: str, bad: float) -> None:
    x = torch.randn(1, 2, 32, head_dim(name))
    x[0, 1, 3, 5] = bad
    with pytest.raises(InvalidArgument, match="x holds 1 NaN or infinite"):
        quantize(x, KV_FORMATS[name])


@pytest.mark.parametrize("name", KV_QUANTIZED)
def test_a_scale_or_offset_beyond_fp16_raises(name: str) -> None:
    fmt = KV_FORMATS[name]
    top = 65504.0 if fmt.offset == "float" else 65504.0 * fmt.code.reach
    x = torch.full((1, 1, 32, head_dim(name)), top)
    assert torch.equal(dequantize(quantize(x, fmt)), x)  # the last that fits
    for sign in (1, -1):
        with pytest.raises(InvalidArgument, match="too large"):
            quantize(x * 1.01 * sign, fmt)


def test_a_range_beyond_fp16_raises() -> None:
    x = torch.tensor([-5e5, 5e5] * 32).view(1, 1, 1, 64)
    with pytest.raises(InvalidArgument, match="too large"):
        quantize(x, KV_FORMATS["int4"])


@pytest.mark.parametrize("name", ["int8_tensor", "fp8_tensor"])
def test_a_fixed_scale_saturates(name: str) -> None:
    fmt, x = KV_FORMATS[name], torch.tensor([0.0, 0.3, -1e9, 1e9]).view(1, 1, 1, 4)
    q = quantize(x, fmt, scale=torch.tensor([0.25]))
    top = 0.25 * fmt.code.reach
    assert dequantize(q)[..., 2:].flatten().tolist() == [-top, top]
    assert q.scales is not None
    assert q.scales.tolist() == [0.25]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["int8", "int4_g32", "fp8"])
def test_the_input_type_does_not_matter(dtype: torch.dtype, name: str) -> None:
    x = torch.randn(1, 2, 8, 64).to(dtype)
    a, b = quantize(x, KV_FORMATS[name]), quantize(x.float(), KV_FORMATS[name])
    assert all(torch.equal(s, t) for s, t in zip(a.parts().values(), b.parts().values(), strict=True))


@pytest.mark.parametrize("name", KV_FORMATS)
def test_views_quantize_like_their_copies(name: str) -> None:
    base = torch.randn(64, 3, 2, 130)
    x = base.permute(2, 1, 0, 3)[..., 1:129]
    a, b = quantize(x, KV_FORMATS[name]), quantize(x.contiguous(), KV_FORMATS[name])
    assert all(torch.equal(s, t) for s, t in zip(a.parts().values(), b.parts().values(), strict=True))


# ------------------------------------------------------------------------------------------------------------- weight formats


def grouped(x: np.ndarray, name: str) -> np.ndarray:
    scale = WEIGHT_FORMATS[name].scale
    assert scale is not None
    return x.reshape(x.shape[0], -1, scale.group or x.shape[1])


def integer_weight(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
    """(codes, scales [N, G], zero points, values) of the int4 and int8 weight formats."""
    w = grouped(x, name)
    zeros = None
    wide = name.endswith("fp32")  # how scales are stored
    kind, floor = (F32, np.finfo(F32).tiny) if wide else (F16, FLOOR)
    if name.startswith("int8"):
        s = np.maximum(np.abs(w).max(-1, keepdims=True) / F32(127), FLOOR).astype(F16)
        q = np.rint(w / s.astype(F32)).clip(-127, 127)
        unit = q
    elif name.startswith("int4_sym"):
        s = np.maximum(np.abs(w).max(-1, keepdims=True) / F32(7.5), floor).astype(kind)
        q = (np.rint(w / s.astype(F32)) + 8).clip(0, 15)
        unit = q - 8
    else:
        low, high = np.minimum(w.min(-1, keepdims=True), 0), np.maximum(w.max(-1, keepdims=True), 0)
        s = np.maximum((high - low) / F32(15), FLOOR).astype(kind)
        zeros = np.rint(-low / s.astype(F32)).clip(0, 15)
        q = (np.rint(w / s.astype(F32)) + zeros).clip(0, 15)
        unit = q - zeros
    values = (unit.astype(F32) * s.astype(F32)).reshape(x.shape)
    return q.reshape(x.shape), s[..., 0], None if zeros is None else zeros[..., 0], values


@pytest.mark.parametrize("name", [n for n in WEIGHT_FORMATS if n.startswith("int")])
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "huge_offset"])
def test_integer_weights_are_exact(name: str, kind: str) -> None:
    x = data(kind, (48, 256), 1)
    q = quantize(x, name)
    codes, scales, zeros, values = integer_weight(x.numpy(), name)
    assert q.scales is not None
    np.testing.assert_array_equal(q.scales.numpy(), scales)
    found = q.codes if name.startswith("int8") else unpack_codes(q.codes, 4)
    np.testing.assert_array_equal(found.numpy(), codes)
    assert (zeros is None) == (q.offsets is None)
    if zeros is not None and q.offsets is not None:
        np.testing.assert_array_equal(q.offsets.numpy(), zeros)
    np.testing.assert_array_equal(dequantize(q).numpy(), values)


@pytest.mark.parametrize(("name", "code"), [("nf4", decoders.NF4), ("fp4_bnb", decoders.BNB_FP4)])
@pytest.mark.parametrize("kind", ["normal", "large", "outlier", "constant", "zero", "positive", "bf16", "tiny"])
def test_lookup_weights_are_exact(name: str, code: np.ndarray, kind: str) -> None:
    x = data(kind, (24, 256), 2)
    q = quantize(x, name)
    absmax = np.abs(x.numpy().reshape(24, -1, 64)).max(-1)
    assert q.scales is not None
    np.testing.assert_array_equal(q.scales.numpy(), np.maximum(absmax, np.finfo(F32).tiny))
    unit = (x.numpy().reshape(24, -1, 64) / q.scales.numpy()[..., None]).reshape(24, 256)
    got, best = code[unpack_codes(q.codes, 4).numpy()], code[nearest_code(unit, code)]
    # A unit within an ulp of the middle between two levels may go to either.
    assert (np.abs(got - unit).astype(np.float64) <= np.abs(best - unit) + 1.2e-7).all()
    assert (got == best).mean() > 0.999
    hi_first = ((q.codes & 15) << 4 | q.codes >> 4).numpy()  # as bitsandbytes stores it
    expected = decoders.bnb_4bit(hi_first, q.scales.numpy().reshape(-1), (24, 256), 64, code)
    np.testing.assert_array_equal(dequantize(q).numpy(), expected)


@pytest.mark.parametrize("kind", ["normal", "outlier", "mixed", "zero", "constant"])
@pytest.mark.parametrize("rows", [1, 40, 100])
def test_double_quantization(kind: str, rows: int) -> None:
    x = data(kind, (rows, 256), 3)
    plain, q = quantize(x, "nf4"), quantize(x, "nf4_dq")
    assert torch.equal(plain.codes, q.codes)
    assert plain.scales is not None
    assert q.scales is not None
    assert q.nested is not None
    absmax = plain.scales.numpy().reshape(-1)
    mean = q.nested[-1].numpy()
    np.testing.assert_allclose(mean, absmax.astype(np.float64).mean(), rtol=1e-6)
    rest = np.pad(absmax - mean, (0, -len(absmax) % 256)).reshape(-1, 256)
    np.testing.assert_array_equal(q.nested[:-1].numpy(), np.maximum(np.abs(rest).max(-1), np.finfo(F32).tiny))

    table = dynamic_map(torch.device("cpu")).numpy()
    unit = (rest / q.nested[:-1].numpy()[:, None]).reshape(-1)[: len(absmax)]
    got, best = table[q.scales.numpy().reshape(-1)], table[nearest_code(unit, table)]
    assert (np.abs(got - unit).astype(np.float64) <= np.abs(best - unit) + 1.2e-7).all()
    hi_first = ((q.codes & 15) << 4 | q.codes >> 4).numpy()
    nested = (table, q.nested[:-1].numpy(), float(mean), 256)
    expected = decoders.bnb_4bit(hi_first, q.scales.numpy().reshape(-1), (rows, 256), 64, decoders.NF4, nested)
    np.testing.assert_array_equal(dequantize(q).numpy(), expected)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 2.0**-126, 2.0**-140, 2.0**120, 6.0, 7.99])
@pytest.mark.parametrize("kind", ["normal", "outlier", "mixed", "zero", "constant", "bf16"])
def test_mxfp4_is_exact(kind: str, scale: float) -> None:
    x = data(kind, (40, 128), 4).clamp(-200, 200) * scale
    q = quantize(x, "mxfp4")
    blocks = x.numpy().reshape(40, 4, 32)
    amax = np.abs(blocks).max(-1)
    exponent = np.frexp(amax.astype(np.float64))[1] - 1  # floor(log2), exactly
    normal = amax >= 2.0**-126
    stored = np.where(normal, exponent - 2 + 127, 0).clip(0, 254).astype(np.uint8)
    assert q.scales is not None
    np.testing.assert_array_equal(q.scales.numpy(), stored)
    unit = (blocks.astype(np.float64) / np.ldexp(1.0, stored.astype(np.int32) - 127)[..., None]).reshape(40, 128)
    np.testing.assert_array_equal(unpack_codes(q.codes, 4).numpy(), e2m1_code(unit))
    np.testing.assert_array_equal(dequantize(q).numpy(), decoders.mxfp4(q.codes.numpy(), q.scales.numpy()))


def test_mxfp4_of_the_largest_floats_saturates() -> None:
    x = torch.full((1, 32), torch.finfo(torch.float32).max)
    q = quantize(x, "mxfp4")
    assert q.scales is not None
    assert q.scales.item() == 252
    assert dequantize(q).max() == 6 * 2.0**125


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25, 448.0])
@pytest.mark.parametrize("kind", ["normal", "outlier", "mixed", "zero", "constant", "bf16", "positive"])
def test_nvfp4_is_exact(kind: str, scale: float) -> None:
    x = data(kind, (40, 128), 5) * scale
    if kind == "mixed":
        x[3] *= 1e-9  # non-zero blocks whose scale would round to 0
    q = quantize(x, "nvfp4")
    blocks = x.numpy().reshape(40, 8, 16)
    amax = np.abs(blocks).max(-1)
    g = amax.max() / F32(6 * 448) if amax.max() > 0 else F32(1)
    wanted = amax / (F32(6) * g)
    code = np.where(amax > 0, np.maximum(e4m3_code(wanted), 1), 0x38).astype(np.uint8)  # 1 is 2^-9, 0x38 is 1.0
    assert q.scales is not None
    assert q.tensor_scale is not None
    assert q.tensor_scale.item() == g
    np.testing.assert_array_equal(q.scales.numpy(), code)
    unit = (blocks / (decoders.e4m3(code) * g)[..., None]).reshape(40, 128)
    np.testing.assert_array_equal(unpack_codes(q.codes, 4).numpy(), e2m1_code(unit))
    expected = decoders.nvfp4_modelopt(q.codes.numpy(), q.scales.numpy(), q.tensor_scale.numpy())
    np.testing.assert_array_equal(dequantize(q).numpy(), expected)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_nan_and_infinity_in_weights_raise(name: str) -> None:
    for bad in (torch.nan, torch.inf):
        x = torch.randn(2, 128)
        x[1, 7] = bad
        with pytest.raises(InvalidArgument, match="x holds 1 NaN"):
            quantize(x, name)


@pytest.mark.parametrize("name", [n for n in WEIGHT_FORMATS if n.startswith("int") and not n.endswith("fp32")])
def test_weights_beyond_fp16_scales_raise(name: str) -> None:
    with pytest.raises(InvalidArgument, match="too large"):
        quantize(torch.full((2, 128), 1e9), name)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("shape", [(0, 128), (3, 0), (0, 0)])
def test_empty_weights(name: str, shape: tuple[int, int]) -> None:
    assert dequantize(quantize(torch.zeros(shape), name)).shape == shape


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_columns_do_not_touch_each_other(name: str) -> None:
    """Quantizing some rows alone gives the same codes, except under a scale of the whole tensor."""
    x = data("mixed", (30, 256), 6)
    whole, part = quantize(x, name), quantize(x[10:20], name)
    if WEIGHT_FORMATS[name].tensor_scale or whole.nested is not None:
        assert whole.codes.shape[0] == 30
        whole, part = quantize(torch.cat([x, x]), name), quantize(x, name)  # the same tensor maximum
        assert torch.equal(whole.codes[30:], part.codes)
        return
    assert torch.equal(whole.codes[10:20], part.codes)


def test_dequantize_rounds_once() -> None:
    q = quantize(torch.randn(4, 128), "int4_g32")
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(dequantize(q, dtype), dequantize(q).to(dtype))
    assert torch.equal(dequantize(q, torch.float64).float(), dequantize(q))


@pytest.mark.parametrize("name", KV_QUANTIZED)
def test_measure_encode_decode_are_quantize_in_steps(name: str) -> None:
    fmt, x = KV_FORMATS[name], data("offset", (1, 2, 64, 128), 8)
    scales, offsets = measure(x, fmt)
    q = quantize(x, fmt)
    assert torch.equal(encode(x, scales, offsets, fmt), q.codes)
    assert torch.equal(decode(q.codes, block_scales(q), offsets, fmt, q.shape), dequantize(q))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tables_do_not_depend_on_defaults_of_torch(dtype: torch.dtype) -> None:
    """Programs set a default type before they load a model; the table is made once in a process."""
    x = torch.randn(4, 512)
    expected = [(f, quantize(x, f)) for f in WEIGHT_FORMATS]
    dynamic_map.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        for f, e in expected:
            made = quantize(x, f)
            assert all(torch.equal(part, e.parts()[name]) for name, part in made.parts().items()), f
            assert torch.equal(made.dequantize(), e.dequantize()), f
    finally:
        torch.set_default_dtype(torch.float32)
        dynamic_map.cache_clear()


def test_tables_do_not_lie_on_the_default_device() -> None:
    x = torch.randn(4, 512)
    expected = [quantize(x, f).dequantize() for f in WEIGHT_FORMATS]
    dynamic_map.cache_clear()
    with torch.device("meta"):  # in place of a GPU
        assert all(torch.equal(quantize(x, f).dequantize(), e) for f, e in zip(WEIGHT_FORMATS, expected, strict=True))


# ------------------------------------------------------------------------------------------------- the search of the clip

SEARCHABLE = [name for name, fmt in WEIGHT_FORMATS.items() if fmt.group_size(4096) <= 32]


def block_errors(q: QuantTensor, x: torch.Tensor) -> torch.Tensor:
    """Squared errors [N, groups], over the elements that share a scale."""
    return (dequantize(q, torch.float64) - x).square().unflatten(-1, (-1, q.format.group_size(x.shape[1]))).sum(-1)


@pytest.mark.parametrize("name", SEARCHABLE)
@pytest.mark.parametrize("kind", ["normal", "outlier", "zero", "constant", "positive"])
def test_the_searched_clip_is_no_worse_in_any_group_and_the_best_of_its_grid(name: str, kind: str) -> None:
    x = data(kind, (6, 256))
    fmt = WEIGHT_FORMATS[name]
    searched, whole = quantize(x, fmt, clip="search"), quantize(x, fmt)
    ours = block_errors(searched, x)
    assert (ours <= block_errors(whole, x) * (1 + 1e-5)).all()
    for ratio in (0.5, 0.75, 0.9, 1.25):  # of a part of the grid, by the definition of each format
        assert (ours <= block_errors(clipped(x, fmt, ratio), x) * (1 + 1e-5) + 1e-12).all()
    if kind == "normal":
        assert ours.sum() < 0.98 * block_errors(whole, x).sum()


@pytest.mark.parametrize("name", [name for name in WEIGHT_FORMATS if name not in SEARCHABLE])
def test_wide_blocks_keep_their_range(name: str) -> None:
    """Real models diverge more where the clip of a wide block is searched."""
    x = data("outlier", (6, 256))
    searched, whole = quantize(x, name, clip="search").parts(), quantize(x, name).parts()
    assert all(torch.equal(searched[part], whole[part]) for part in whole)


def clipped(x: torch.Tensor, fmt: Format, ratio: float) -> QuantTensor:
    """`x` with its range shrunk by `ratio`, from the definitions: scales of what is clipped there, codes of all under them."""
    groups = x.unflatten(-1, (-1, fmt.group_size(x.shape[1])))
    if fmt.offset == "int":
        low, high = groups.amin(-1, keepdim=True).clamp_max(0) * ratio, groups.amax(-1, keepdim=True).clamp_min(0) * ratio
        ends = torch.cat([low, high, torch.zeros_like(groups[..., 2:])], -1)
    else:
        ends = torch.cat([groups.abs().amax(-1, keepdim=True) * ratio, torch.zeros_like(groups[..., 1:])], -1)
    q = quantize(ends.flatten(-2), fmt)
    if fmt.tensor_scale:  # of the whole tensor, whatever is clipped
        top = x.abs().max() / 2688 if x.any() else torch.ones(())
        wanted = (groups.abs().amax(-1) * ratio / (6 * top)).clamp(2**-9, 448)
        scales = torch.where(groups.abs().amax(-1) > 0, wanted, 1.0).to(torch.float8_e4m3fn).view(torch.uint8)
        q = QuantTensor(fmt, q.shape, q.codes, scales, tensor_scale=top.reshape(1))
    return QuantTensor(fmt, q.shape, encode(x, block_scales(q), q.offsets, fmt), q.scales, q.offsets, q.tensor_scale)


@pytest.mark.parametrize("name", ["int4_g32", "int4_sym_g32_fp32", "mxfp4", "nvfp4"])
def test_a_searched_weight_has_the_same_bits_in_any_number_of_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = data("normal", (24, 256))
    whole = quantize(x, name, clip="search").parts()
    monkeypatch.setattr("halfbyte.reference.quantize.AT_ONCE_ON_CPU", 5 * 256)
    pieces = quantize(x, name, clip="search").parts()
    assert all(torch.equal(whole[part], pieces[part]) for part in whole)


def test_a_clip_is_searched_for_weights_only() -> None:
    with pytest.raises(InvalidArgument, match="clip='half'; expected None, or 'search'"):
        quantize(torch.randn(4, 64), "nf4", clip="half")
    with pytest.raises(InvalidArgument, match="int4_g32 is a format of keys and values"):
        quantize(torch.randn(1, 1, 4, 64), KV_FORMATS["int4_g32"], clip="search")
    assert quantize(torch.randn(0, 64), "int4_g32", clip="search").codes.shape == (0, 32)


@pytest.mark.parametrize(("fmt", "advised"), [("int4", "int4_g32, int4_g64"), ("fp8", "int8_col, int8_g128"), ("int2", "nvfp4")])
def test_a_kv_format_for_weights_gets_advice(fmt: str, advised: str) -> None:
    with pytest.raises(InvalidArgument, match=f"halfbyte.key_format.*for weights choose one of: .*{advised}"):
        quantize(torch.zeros(64, 64), fmt)


def test_a_quant_tensor_is_shown_in_one_line() -> None:
    q = quantize(torch.randn(8, 256), "nf4")
    assert repr(q) == f"QuantTensor(nf4, shape=[8, 256], {q.nbytes:,} bytes, device='cpu')"


@pytest.mark.parametrize("name", [*EVERY_WEIGHT_FORMAT, "int8", "fp8_tensor", "int4_channel"])
def test_a_saved_tensor_is_loaded_as_plain_data(name: str) -> None:
    """By `torch.load` as it is by default, which runs no code of a file; formats of weights and of caches share names."""
    fmt = EVERY_WEIGHT_FORMAT.get(name) or KV_FORMATS[name]
    x, file = torch.randn((4, 256) if name in EVERY_WEIGHT_FORMAT else (1, 2, 32, 64)), io.BytesIO()
    made = quantize(x, fmt)
    torch.save(made, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert loaded.format is fmt
    assert loaded.shape == made.shape
    assert loaded.parts().keys() == made.parts().keys()
    assert all(
        torch.equal(part.view(torch.uint8), made.parts()[part_name].view(torch.uint8)) for part_name, part in loaded.parts().items()
    )


def test_a_saved_tensor_is_not_trusted() -> None:
    made, file = quantize(torch.randn(4, 256), "nf4"), io.BytesIO()
    restore, (kind, named, shape, parts) = made.__reduce__()
    with pytest.raises(InvalidArgument, match="a stored tensor has format 'nf5'; known are"):
        restore(kind, (named[0], "nf5"), shape, parts)
    with pytest.raises(InvalidArgument, match="codes is"):
        restore(kind, named, (8, 256), parts)
    own = dataclasses.replace(WEIGHT_FORMATS["nf4"], name="own")
    torch.save(QuantTensor(own, (4, 256), **parts), file)
    assert torch.load(io.BytesIO(file.getvalue()), weights_only=False).format == own
