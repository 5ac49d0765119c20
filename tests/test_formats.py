"""Formats: every code and every scale code against the numbers of the formats' own documents, written out or computed here."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import decoders
from halfbyte.cache import KVCache
from halfbyte.cpu.codes import unpack_into
from halfbyte.errors import InvalidArgument
from halfbyte.formats import (
    BNB_FP4,
    E2M1,
    E4M3,
    EVERY_WEIGHT_FORMAT,
    FP16,
    INT2,
    INT4,
    INT4_SYM,
    INT8,
    KV_FORMATS,
    NF4,
    WEIGHT_FORMATS,
    Code,
    Format,
    key_format,
    plain_format,
    value_format,
    weight_format,
)
from halfbyte.packing import pack_codes, unpack_codes
from halfbyte.reference.codes import encode_unit
from halfbyte.reference.dequantize import decode_unit, dynamic_map, e8m0_to_float
from halfbyte.reference.quantize import quantize
from halfbyte.tensors import QuantTensor, expected_parts
from sizes import head_dim

CODES = {"int8": INT8, "e4m3": E4M3, "int2": INT2, "int4": INT4, "int4_sym": INT4_SYM, "e2m1": E2M1, "nf4": NF4, "fp4_bnb": BNB_FP4}
LEVELS = {
    "int8": [*range(128), *range(-128, 0)],
    "e4m3": decoders.e4m3(np.arange(256)).tolist(),
    "int2": [*range(4)],
    "int4": [*range(16)],
    "int4_sym": [*range(-8, 8)],
    "e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6],
    "nf4": decoders.NF4.tolist(),
    "fp4_bnb": decoders.BNB_FP4.tolist(),
}
#: name: bits, granularity, group, offset, dtype of the scales, dtype of the codes
KV_TABLE = {
    "fp16": (16, None, None, "none", None, torch.float16),
    "bf16": (16, None, None, "none", None, torch.bfloat16),
    "int8": (8, "head", None, "none", torch.float16, torch.int8),
    "int8_tensor": (8, "tensor", None, "none", torch.float16, torch.int8),
    "int8_token": (8, "token", None, "none", torch.float16, torch.int8),
    "int8_g32": (8, "group", 32, "none", torch.float16, torch.int8),
    "int8_g64": (8, "group", 64, "none", torch.float16, torch.int8),
    "int8_channel": (8, "channel", 32, "none", torch.float16, torch.int8),
    "fp8": (8, "head", None, "none", torch.float16, torch.uint8),
    "fp8_tensor": (8, "tensor", None, "none", torch.float16, torch.uint8),
    "int4": (4, "head", None, "float", torch.float16, torch.uint8),
    "int4_g32": (4, "group", 32, "float", torch.float16, torch.uint8),
    "int4_g64": (4, "group", 64, "float", torch.float16, torch.uint8),
    "int4_channel": (4, "channel", 32, "float", torch.float16, torch.uint8),
    "int2": (2, "head", None, "float", torch.float16, torch.uint8),
    "int2_g32": (2, "group", 32, "float", torch.float16, torch.uint8),
    "int2_g64": (2, "group", 64, "float", torch.float16, torch.uint8),
}
#: The share of a block's span that codes cover, where that is not all of it.
CLIPS = {"int2": 0.59375, "int2_g32": 0.71875, "int2_g64": 0.65625}
WEIGHT_TABLE = {
    **{f"int4_g{g}": (4, "group", g, "int", torch.float16, torch.uint8) for g in (32, 64, 128)},
    "int4_col": (4, "out_channel", None, "int", torch.float16, torch.uint8),
    **{f"int4_sym_g{g}": (4, "group", g, "none", torch.float16, torch.uint8) for g in (32, 64, 128)},
    "int4_sym_col": (4, "out_channel", None, "none", torch.float16, torch.uint8),
    "int4_g32_fp32": (4, "group", 32, "int", torch.float32, torch.uint8),
    "int4_sym_g32_fp32": (4, "group", 32, "none", torch.float32, torch.uint8),
    "int8_col": (8, "out_channel", None, "none", torch.float16, torch.int8),
    "int8_g128": (8, "group", 128, "none", torch.float16, torch.int8),
    "nf4": (4, "group", 64, "none", torch.float32, torch.uint8),
    "nf4_dq": (4, "group", 64, "none", torch.uint8, torch.uint8),
    "fp4_bnb": (4, "group", 64, "none", torch.float32, torch.uint8),
    "mxfp4": (4, "group", 32, "none", torch.uint8, torch.uint8),
    "nvfp4": (4, "group", 16, "none", torch.uint8, torch.uint8),
}
KV_SHAPES = [(2, 3, 64, 128), (1, 1, 32, 64), (0, 2, 32, 64), (2, 1, 96, 256)]


def stored(code: Code) -> torch.Tensor:
    """Every stored code once, one a byte, in the storage type."""
    raw = torch.arange(2**code.bits, dtype=torch.int32).to(torch.uint8)
    return raw.view(torch.int8) if code is INT8 else raw


def packed(code: Code) -> torch.Tensor:
    """Every stored code once, as it is stored."""
    return pack_codes(stored(code), code.bits) if code.bits < 8 else stored(code)


def encoded(values: torch.Tensor, code: Code) -> torch.Tensor:
    """The unsigned code of each value, one a byte."""
    whole = torch.nn.functional.pad(values, (0, -len(values) % 4))
    found = encode_unit(whole, code)
    return (unpack_codes(found, code.bits) if code.bits < 8 else found.view(torch.uint8))[: len(values)]


# --------------------------------------------------------------------------------------------------------------- every code


@pytest.mark.parametrize("name", CODES)
def test_every_code_means_what_the_format_says(name: str) -> None:
    code, expected = CODES[name], np.array(LEVELS[name], np.float32)
    np.testing.assert_array_equal(code.codebook().numpy(), expected)
    real = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(code.codebook().numpy()[real]), np.signbit(expected[real]))
    np.testing.assert_array_equal(decode_unit(packed(code), code).numpy(), expected)
    out = torch.full((2**code.bits,), torch.nan)
    unpack_into(out, packed(code), code)  # as the cpu level decodes them
    np.testing.assert_array_equal(out.numpy()[real], expected[real])


@pytest.mark.parametrize("name", [name for name, code in CODES.items() if code.bits < 8])
def test_every_byte_holds_its_codes_lowest_bits_first(name: str) -> None:
    code = CODES[name]
    fields = [byte >> shift & 2**code.bits - 1 for byte in range(256) for shift in range(0, 8, code.bits)]
    expected = torch.tensor([LEVELS[name][field] for field in fields], dtype=torch.float32)
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(decode_unit(every, code), expected)
    out = torch.full_like(expected, torch.nan)
    unpack_into(out, every, code)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", CODES)
def test_encode_undoes_decode(name: str) -> None:
    code = CODES[name]
    found = encoded(code.codebook().nan_to_num(0), code)
    expected = stored(code).view(torch.uint8).clone()
    if code is INT8:
        expected[128] = 129  # -128 is never written: -127
    elif code is E4M3:
        expected[0x7F] = expected[0xFF] = 0  # NaN: replaced by 0 above
    elif code in (E2M1, BNB_FP4):
        expected[8] = 0  # -0 is written as 0
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", CODES)
def test_every_fp16_number_goes_to_a_nearest_level(name: str) -> None:
    code = CODES[name]
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = every[every.isfinite()].float()
    values = torch.cat([values, torch.linspace(-9, 9, 20_000)])
    levels = np.array(LEVELS[name], np.float64)
    usable = levels[np.isfinite(levels) & (levels != -128)]
    order = np.unique(usable)
    x = values.double().numpy()
    right = np.searchsorted(order, x).clip(1, len(order) - 1)
    best = np.minimum(np.abs(x - order[right]), np.abs(x - order[right - 1]))
    got = levels[encoded(values, code).numpy()]
    # Table entries and midpoints are fp32 numbers: a value within an ulp of a midpoint may go either way.
    slack = 0 if name in ("int8", "e4m3", "int2", "int4", "int4_sym", "e2m1") else 1e-7
    assert (np.abs(x - got) <= best + slack).all()


def test_e2m1_ties_go_to_the_even_code() -> None:
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    x = torch.tensor([*ties, *(-t for t in ties), 0.0])
    expected = torch.tensor([*ties.values(), *(-v for v in ties.values()), 0.0])
    assert torch.equal(E2M1.codebook()[encoded(x, E2M1).int()], expected)
    above, below = x[:7] * (1 + 2**-22), x[:7] * (1 - 2**-22)
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert torch.equal(E2M1.codebook()[encoded(above, E2M1).int()], levels[1:])
    assert torch.equal(E2M1.codebook()[encoded(below, E2M1).int()], levels[:-1])


def test_e4m3_ties_go_to_the_even_code() -> None:
    levels = decoders.e4m3(np.arange(0x7F)).astype(np.float64)
    middle = torch.from_numpy((levels[1:] + levels[:-1]) / 2).float()  # exact in fp32
    found = encoded(middle, E4M3).numpy()
    low = np.arange(0x7E)
    assert (found == low + low % 2).all()
    assert (encoded(-middle, E4M3).numpy() == (low + low % 2) + 0x80).all()


@pytest.mark.parametrize("name", ["int8", "int2", "int4", "int4_sym"])
def test_integer_ties_go_to_even(name: str) -> None:
    code = CODES[name]
    x = torch.arange(code.lo, code.hi, dtype=torch.float32) + 0.5
    values = code.codebook()[encoded(x, code).int()]
    assert torch.equal(values, torch.tensor([round(v) for v in x.tolist()], dtype=torch.float32))
    assert not (values % 2).any()


# --------------------------------------------------------------------------------------------------------- every scale code


def test_every_e8m0_scale() -> None:
    expected = [2.0 ** (b - 127) for b in range(255)]
    found = e8m0_to_float(torch.arange(256, dtype=torch.int32).to(torch.uint8))
    assert found[:255].tolist() == expected
    assert found[0] > 0
    assert found[255].isnan()


def test_every_mxfp4_scale_through_a_tensor() -> None:
    rng = np.random.default_rng(0)
    scales = np.arange(256, dtype=np.uint8).reshape(256, 1)
    codes = rng.permuted(np.tile(np.arange(16, dtype=np.uint8) * 17, (256, 1)), axis=1)
    q = QuantTensor(WEIGHT_FORMATS["mxfp4"], (256, 32), torch.from_numpy(codes), torch.from_numpy(scales))
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(q.dequantize().numpy(), decoders.mxfp4(codes, scales))
    assert q.dequantize()[255].isnan().all()
    assert q.dequantize()[0].abs().max() == 6 * 2.0**-127


@pytest.mark.parametrize("tensor_scale", [1.0, 0.25, 3.1e-5, 7e20])
def test_every_nvfp4_scale_through_a_tensor(tensor_scale: float) -> None:
    scales = np.arange(256, dtype=np.uint8).reshape(256, 1)
    codes = np.tile(np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], np.uint8), (256, 1))
    g = torch.tensor([tensor_scale])
    q = QuantTensor(WEIGHT_FORMATS["nvfp4"], (256, 16), torch.from_numpy(codes), torch.from_numpy(scales), tensor_scale=g)
    np.testing.assert_array_equal(q.dequantize().numpy(), decoders.nvfp4_modelopt(codes, scales, g.numpy()))
    assert q.dequantize()[[0x7F, 0xFF]].isnan().all()


def bitsandbytes_dynamic_map() -> np.ndarray:
    """create_dynamic_map(signed=True, max_exponent_bits=7, total_bits=8) of bitsandbytes, in numpy."""
    data: list[float] = []
    for i in range(7):
        edges = np.linspace(0.1, 1, 2**i + 1, dtype=np.float32)
        means = (edges[:-1] + edges[1:]) / 2.0
        data += ((10 ** (-6 + i)) * means).tolist()
        data += (-(10 ** (-6 + i)) * means).tolist()
    return np.array(sorted([*data, 0, 1.0]), np.float32)


def test_every_code_of_double_quantized_scales() -> None:
    table = dynamic_map(torch.device("cpu")).numpy()
    assert table.shape == (256,)
    np.testing.assert_allclose(table, bitsandbytes_dynamic_map(), rtol=3e-7)
    assert (np.diff(table) > 0).all()
    absmax = torch.tensor([0.5, 2.0])
    nested = torch.cat([absmax, torch.tensor([3.0])])
    scales = torch.arange(512, dtype=torch.int32).to(torch.uint8).reshape(512, 1)  # two blocks of all 256
    codes = torch.full((512, 32), 0xFF, dtype=torch.uint8)  # NF4 15 = 1.0
    q = QuantTensor(WEIGHT_FORMATS["nf4_dq"], (512, 64), codes, scales, nested=nested)
    expected = np.concatenate([table * np.float32(0.5), table * np.float32(2)]) + np.float32(3)
    np.testing.assert_array_equal(q.dequantize()[:, 0].numpy(), expected)


# ------------------------------------------------------------------------------------------------------- names and derived numbers


@pytest.mark.parametrize(("registry", "table"), [(KV_FORMATS, KV_TABLE), (WEIGHT_FORMATS, WEIGHT_TABLE)])
def test_the_registry_is_the_documented_table(registry: dict[str, Format], table: dict[str, tuple[object, ...]]) -> None:
    assert set(registry) == set(table)
    for name, (bits, granularity, group, offset, scale_dtype, code_dtype) in table.items():
        f = registry[name]
        assert str(f) == f.name == name
        assert (f.code.bits, f.granularity, f.offset, f.storage) == (bits, granularity, offset, code_dtype)
        assert (f.scale.group if f.scale else None) == group
        assert (f.scale.storage if f.scale else None) is scale_dtype
        assert f.is_quantized == (bits < 16)
        assert f.clip == CLIPS.get(name, 1)
        assert f.token_block == (32 if granularity == "channel" else None)
    assert [n for n, f in registry.items() if f.tensor_scale] == [n for n in registry if n == "nvfp4"]


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        *(("int4_g32", 5.0), ("int4_g64", 4.5), ("int4", 4.25), ("int2_g32", 3.0), ("int2_g64", 2.5), ("int2", 2.25)),
        *(("int8_g32", 8.5), ("int8", 8.125), ("int8_channel", 8.5), ("fp16", 16)),
    ],
)
def test_bits_of_kv_formats(name: str, bits: float) -> None:
    assert KV_FORMATS[name].bits_per_element((1, 8, 32, 128)) == bits


@pytest.mark.parametrize(("name", "bits"), [("mxfp4", 4.25), ("nf4", 4.5), ("int4_sym_g128", 4.125), ("int4_g32", 4.75)])
def test_bits_of_weight_formats(name: str, bits: float) -> None:
    assert WEIGHT_FORMATS[name].bits_per_element((256, 4096)) == bits


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("shape", KV_SHAPES)
def test_nbytes_of_kv_formats_are_real_bytes(name: str, shape: tuple[int, ...]) -> None:
    fmt = KV_FORMATS[name]
    if fmt.scale and fmt.scale.group and shape[-1] % fmt.scale.group:
        pytest.skip("does not divide")
    q = quantize(torch.randn(shape), fmt)
    assert q.nbytes == fmt.nbytes(shape) == sum(t.numel() * t.element_size() for t in q.parts().values())


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize("shape", [(5, 128), (33, 256), (1, 640), (2, 3, 128), (0, 128)])
def test_nbytes_of_weight_formats_are_real_bytes(name: str, shape: tuple[int, ...]) -> None:
    fmt = WEIGHT_FORMATS[name]
    q = quantize(torch.randn(shape), fmt)
    assert q.nbytes == fmt.nbytes(shape) == sum(t.numel() * t.element_size() for t in q.parts().values())
    assert {n: (tuple(t.shape), t.dtype) for n, t in q.parts().items()} == expected_parts(fmt, shape)


@pytest.mark.parametrize("keys", KV_FORMATS)
def test_nbytes_of_a_cache_are_real_bytes(keys: str) -> None:
    dim = head_dim(keys)
    cache = KVCache(3, 2, dim, 96, keys=keys, values="int4_g32", value_dim=96)
    scales_and_codes = [t for t in cache.tensors() if t.dtype not in (torch.int32, torch.int64)]
    assert cache.nbytes == sum(t.numel() * t.element_size() for t in scales_and_codes)
    assert cache.nbytes == sum(f.nbytes((3, 2, 96, d)) for f, d in ((cache.keys.format, dim), (cache.values.format, 96))) + (
        0 if cache.keys.tail is None else 3 * 2 * 32 * dim * 2
    )
    per_token = 3 * 96 * cache.bytes_per_token
    constant = (2 if keys.endswith("tensor") else 0) + (0 if cache.keys.tail is None else cache.keys.tail.nbytes)
    assert cache.nbytes == per_token + constant


# --------------------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("int4_g32", (1, 1, 8, 80), r"last axis of 80.*groups of 32.*; int4 would fit"),
        ("int4_g64", (1, 1, 8, 96), r"last axis of 96.*groups of 64.*; int4, int4_g32 would fit"),
        ("int4_g32", (1, 1, 8, 40), r"last axis of 40.*; int4 would fit"),
        ("int4", (1, 1, 8, 59), r"last axis of 59.*stores 2 codes in a byte and needs a multiple of 2"),
        ("int2", (1, 1, 8, 58), r"last axis of 58.*stores 4 codes in a byte and needs a multiple of 4"),
        ("int2_g64", (1, 1, 8, 96), r"last axis of 96.*groups of 64.*; int2, int2_g32 would fit"),
        ("int4_channel", (1, 1, 33, 64), r"tokens of 33.*groups of 32"),
        ("int8_channel", (1, 1, 48, 64), r"tokens of 48.*; int8, int8_tensor, .* would fit"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_with_what_would(name: str, shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        KV_FORMATS[name].check_shape(shape, "k")
    with pytest.raises(InvalidArgument, match="k has a"):
        KV_FORMATS[name].check_shape(shape, "k")


def test_formats_that_round_x_are_those_of_integers_in_groups_byte_for_byte() -> None:
    found = {name: fmt for name, fmt in EVERY_WEIGHT_FORMAT.items() if name not in WEIGHT_FORMATS}
    assert set(found) == {f"int4_{kind}g{group}_a8" for kind in ("", "sym_") for group in (32, 64, 128)}
    for name, fmt in found.items():
        exact = WEIGHT_FORMATS[name.removesuffix("_a8")]
        assert weight_format(name) is fmt
        assert fmt.exact is exact
        assert expected_parts(fmt, (8, 256)) == expected_parts(exact, (8, 256))
        assert [fmt.rounds(rows, 2**17) for rows in (1, 511, 512)] == [False, False, True]
        assert not fmt.rounds(512, 2**17 + 128)
        assert not exact.rounds(4096, 4096)
    assert 127 * 127 * 2**17 < 2**31


@pytest.mark.parametrize("name", [*WEIGHT_FORMATS, "int8", "int4", "fp8", "bf16"])
def test_a_row_alone_is_stored_or_refused(name: str) -> None:
    fmt, x = WEIGHT_FORMATS.get(name) or KV_FORMATS[name], torch.randn(256)
    with pytest.raises(InvalidArgument, match=r"x has shape \[\]; .* needs [12] or more axes"):
        fmt.check_shape(())
    if fmt.tensor_scale:
        with pytest.raises(InvalidArgument, match=r"x has shape \[256\]; nvfp4 needs 2 or more axes"):
            quantize(x, fmt)
        return
    assert torch.equal(quantize(x, fmt).dequantize(), quantize(x[None], fmt).dequantize()[0])


@pytest.mark.parametrize("lookup", [key_format, value_format, weight_format])
@pytest.mark.parametrize("name", ["int5", "", "INT8", None, 3, ["int8"]])
def test_an_unknown_name_is_refused_with_those_that_exist(lookup: object, name: object) -> None:
    with pytest.raises(InvalidArgument, match="choose one of") as caught:
        lookup(name, "what")  # type: ignore[operator]
    known = WEIGHT_FORMATS if lookup is weight_format else KV_FORMATS
    assert all(n in str(caught.value) for n in known)
    assert "what=" in str(caught.value)


@pytest.mark.parametrize("name", ["int8_channel", "int4_channel"])
def test_per_channel_values_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="for keys only") as caught:
        value_format(name)
    assert "int4_g32" in str(caught.value)
    assert "_channel," not in str(caught.value)


def test_plain_formats() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert plain_format(dtype).code.dtype is dtype
        assert plain_format(dtype).nbytes((2, 3, 4, 8)) == 2 * 3 * 4 * 8 * dtype.itemsize
    with pytest.raises(InvalidArgument, match="int32 is not a floating dtype"):
        plain_format(torch.int32)


def test_there_is_no_table_of_a_sixteen_bit_code() -> None:
    with pytest.raises(InvalidArgument, match="fp16"):
        FP16.codebook()
    assert all(math.isfinite(v) for v in NF4.values or ())


@pytest.mark.parametrize(
    ("name", "last", "nearest"),
    [
        ("int4_g128", 4096, "int4_g128"),
        ("int4_g128", 576, "int4_g64"),
        ("int4_sym_g128", 2880, "int4_sym_g64"),
        ("int4_g128", 1856, "int4_g64"),
        ("int4_g64", 96, "int4_g32"),
        ("int4_g32", 48, "int8_col"),
        ("nvfp4", 2880, "nvfp4"),
        ("nvfp4", 24, "int8_col"),
        ("nf4", 96, "int8_col"),
        ("int4_col", 33, "int8_col"),
        ("int8_col", 33, "int8_col"),
        ("int4_g128_a8", 576, "int4_g64_a8"),
        ("int4_sym_g128_a8", 48, "int8_col"),
    ],
)
def test_the_nearest_format_that_divides_an_axis(name: str, last: int, nearest: str) -> None:
    fmt = weight_format(name).nearest(last)
    assert fmt.name == nearest
    fmt.check_shape((8, last))
