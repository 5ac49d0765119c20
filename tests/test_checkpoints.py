"""Checkpoints of other libraries, layer by layer: the values by independent decoders, the codes by hand, and what is refused."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from checkpoint_files import KINDS, REFUSED, Drawn, awq, bnb, compressed, draw, gptq, mxfp4, nvfp4, pack
from fuzz import damage_config, mutate
from halfbyte.checkpoints.adapters import ADAPTERS, make_adapter, read_quantization, weight_from_tensors
from halfbyte.checkpoints.layer import StoredLayer
from halfbyte.checkpoints.safetensors_files import read_header
from halfbyte.errors import CheckpointError, HalfbyteError, InvalidArgument, Unsupported
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.packing import unpack_codes
from halfbyte.reference.dequantize import block_scales, dynamic_map
from halfbyte.tensors import QuantTensor


def convert(drawn: Drawn, folder: Path, shape: tuple[int, int] | None = None) -> QuantTensor:
    """The layer through a file."""
    save_file({f"a.b.{name}": t.contiguous() for name, t in drawn.tensors.items()}, folder / "x.safetensors")
    infos = read_header(folder / "x.safetensors")
    adapter = make_adapter(drawn.config)
    assert adapter.layers(infos) == ["a.b"]
    assert set(infos) <= adapter.consumed("a.b")
    layer = StoredLayer("a.b", *(shape or drawn.values.shape), infos)
    assert adapter.rows(layer) == layer.out_features
    return adapter.convert(layer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_tells_the_format_unless_files_have_another(kind: str, tmp_path: Path) -> None:
    drawn = draw(kind, 16, 256)
    told, found = make_adapter(drawn.config).expected(), convert(drawn, tmp_path).format
    if kind.startswith("ct "):
        assert told is None
    elif "fp32" in kind or "other blocks" in kind or kind == "bnb fp4 nested":
        assert told is None or told.code == found.code
    else:
        assert told == found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(16, 256), (40, 128), (8, 1024)])
def test_values_of_the_independent_decoders(kind: str, shape: tuple[int, int], tmp_path: Path) -> None:
    drawn = draw(kind, *shape, seed=shape[0])
    weight = convert(drawn, tmp_path)
    values = weight.dequantize().numpy()
    if kind == "ct nvfp4":  # a quotient there, the product with a reciprocal here
        np.testing.assert_allclose(values, drawn.values, rtol=3e-7)
    else:
        np.testing.assert_array_equal(values, drawn.values)


@pytest.mark.parametrize(
    ("drawn", "name"),
    [
        (gptq(8, 128), "int4_g32"),
        (gptq(8, 128, sym=True, group=64), "int4_sym_g64"),
        (gptq(8, 512, group=128), "int4_g128"),
        (gptq(8, 512, group=256), "int4_g128"),  # wider groups repeat their scale
        (gptq(8, 576, group=192), "int4_g64"),
        (gptq(8, 128, group=-1), "int4_col"),
        (gptq(8, 128, dtype=torch.float32), "int4_g32_fp32"),
        (gptq(8, 128, sym=True, group=-1, dtype=torch.float32), "int4_sym_g32_fp32"),
        (compressed(8, 128), "int4_sym_g32"),  # bf16 scales that fp16 holds
        (awq(8, 128), "int4_g32"),
        (bnb(8, 128), "nf4"),
        (bnb(8, 128, nested=True), "nf4_dq"),
        (bnb(8, 128, nested=True, second=512), "nf4"),
        (bnb(8, 128, kind="fp4", nested=True), "fp4_bnb"),
        (mxfp4(8, 128), "mxfp4"),
        (nvfp4(8, 128), "nvfp4"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_formats(drawn: Drawn, name: str, tmp_path: Path) -> None:
    weight = convert(drawn, tmp_path)
    assert weight.format.name == name
    np.testing.assert_array_equal(weight.dequantize().numpy(), drawn.values)


def test_tiny_bf16_scales_are_not_rounded(tmp_path: Path) -> None:
    drawn = compressed(8, 128)
    drawn.tensors["weight_scale"] = torch.full((8, 4), 1.7e-7, dtype=torch.bfloat16)
    weight = convert(drawn, tmp_path)
    assert weight.format.name == "int4_sym_g32_fp32"
    assert torch.equal(weight.scales.bfloat16(), drawn.tensors["weight_scale"])  # type: ignore[union-attr]


def test_act_order_keeps_groups_together(tmp_path: Path) -> None:
    drawn = gptq(8, 128, v1=False, act_order=True)
    weight = convert(drawn, tmp_path)
    assert weight.perm is not None
    assert torch.equal(drawn.tensors["g_idx"][weight.perm.long()], torch.arange(128).int() // 32)
    assert convert(gptq(8, 128), tmp_path).perm is None  # in order already
    assert convert(gptq(8, 128, group=-1, act_order=True), tmp_path).perm is None  # one group


def test_nested_scales_stay_in_eight_bits(tmp_path: Path) -> None:
    drawn = bnb(8, 4096, nested=True)
    weight = convert(drawn, tmp_path)
    assert torch.equal(weight.scales.flatten(), drawn.tensors["weight.absmax"])  # type: ignore[union-attr]
    assert torch.equal(dynamic_map(torch.device("cpu")), drawn.tensors["weight.nested_quant_map"])


# ------------------------------------------------------------------- by hand: which bits are which code, and what a zero point is


def by_hand(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Drawn:
    """One layer of [8, 32], filled by the caller."""
    return Drawn(config, tensors, np.zeros((8, 32), np.float32))


def codes_of(weight: QuantTensor) -> torch.Tensor:
    return unpack_codes(weight.codes, 4).int()


def test_gptq_by_hand(tmp_path: Path) -> None:
    """Word r of a column holds the in features 8r to 8r + 7, the first in the lowest bits; v1 stores the zero point less 1."""
    qweight = torch.zeros(4, 8, dtype=torch.int32)
    qweight[0, 3], qweight[2, 3] = 0x76543210, 0x000000F0
    qzeros = torch.tensor([[0x76543210]], dtype=torch.int32)
    scales = torch.arange(1, 9).half().view(1, 8)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq"}
    weight = convert(by_hand(config, {"qweight": qweight, "qzeros": qzeros, "scales": scales}), tmp_path)
    assert codes_of(weight)[3].tolist() == [*range(8), *[0] * 9, 15, *[0] * 14]
    assert weight.codes[3, :4].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert weight.offsets.flatten().tolist() == list(range(1, 9))  # type: ignore[union-attr]
    assert weight.dequantize()[3, :3].tolist() == [4 * (0 - 4), 4 * (1 - 4), 4 * (2 - 4)]
    config["checkpoint_format"] = "gptq_v2"
    weight = convert(by_hand(config, {"qweight": qweight, "qzeros": qzeros, "scales": scales}), tmp_path)
    assert weight.offsets.flatten().tolist() == list(range(8))  # type: ignore[union-attr]


def test_gptq_v1_zero_points_of_zero(tmp_path: Path) -> None:
    """A stored 15 is the zero point 0: alone in its field, or with a borrow from the next one if GPTQModel wrote it."""
    config: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    tensors = {"qweight": torch.zeros(4, 8, dtype=torch.int32), "scales": torch.ones(1, 8).half()}
    tensors["qzeros"] = torch.tensor([[0x77777F7F]], dtype=torch.int32)
    assert convert(by_hand(config, tensors), tmp_path).offsets.flatten().tolist() == [0, 8, 0, 8, 8, 8, 8, 8]  # type: ignore[union-attr]
    config["meta"] = {"quantizer": ["gptqmodel:2.2.0"]}
    assert convert(by_hand(config, tensors), tmp_path).offsets.flatten().tolist() == [0, 9, 0, 9, 8, 8, 8, 8]  # type: ignore[union-attr]


def test_gptq_of_eight_bits(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 256, (128, 8))
    scales = torch.rand(1, 8).half() + 0.01
    for stored, group in ((127, 128), (128, -1)):  # v1, v2
        config = {"quant_method": "gptq", "bits": 8, "group_size": group, "sym": True}
        tensors = {"qweight": pack(codes, 0, 8), "qzeros": pack(np.full((1, 8), stored), 1, 8), "scales": scales}
        weight = convert(Drawn(config, tensors, np.zeros((8, 128))), tmp_path)
        assert weight.format.name == "int8_col"
        assert torch.equal(weight.codes.int(), torch.from_numpy(codes.T).int() - 128)
        assert torch.equal(weight.dequantize(), (torch.from_numpy(codes.T).float() - 128) * scales.float().T)


def test_awq_by_hand(tmp_path: Path) -> None:
    """A word holds 8 out features in the order 0, 2, 4, 6, 1, 3, 5, 7; zero points as they are."""
    qweight = torch.zeros(32, 1, dtype=torch.int32)
    qweight[5] = 0x76543210
    tensors = {"qweight": qweight, "qzeros": torch.tensor([[0x00000F01]], dtype=torch.int32), "scales": torch.ones(1, 8).half()}
    weight = convert(by_hand({"quant_method": "awq", "bits": 4, "group_size": 32}, tensors), tmp_path)
    assert codes_of(weight)[:, 5].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert weight.offsets.flatten().tolist() == [1, 0, 0, 0, 15, 0, 0, 0]  # type: ignore[union-attr]


def test_awq_groups_are_of_128_unless_it_says_so(tmp_path: Path) -> None:
    drawn = awq(8, 256, group=128)
    del drawn.config["group_size"]
    np.testing.assert_array_equal(convert(drawn, tmp_path).dequantize().numpy(), drawn.values)
    drawn = awq(8, 256, group=64)
    drawn.config["q_group_size"] = drawn.config.pop("group_size")
    np.testing.assert_array_equal(convert(drawn, tmp_path).dequantize().numpy(), drawn.values)


def test_bitsandbytes_by_hand(tmp_path: Path) -> None:
    """The even element is in the high nibble."""
    drawn = bnb(2, 64)
    drawn.tensors["weight"] = torch.zeros(64, 1, dtype=torch.uint8)
    drawn.tensors["weight"][0], drawn.tensors["weight"][33] = 0x7F, 0xF7
    weight = convert(drawn, tmp_path)
    assert codes_of(weight)[0, :2].tolist() == [7, 15]
    assert codes_of(weight)[1, 2:4].tolist() == [15, 7]
    absmax = drawn.tensors["weight.absmax"]
    assert weight.dequantize()[1, 2:4].tolist() == [float(absmax[1]), 0.0]
    drawn.tensors["weight"] = (
        drawn.tensors["weight"].view(32, 2).view(torch.bfloat16)
    )  # quant_storage of another type, the same bytes
    assert torch.equal(convert(drawn, tmp_path).codes, weight.codes)


def test_compressed_tensors_by_hand(tmp_path: Path) -> None:
    """Along the in features, first in the lowest bits, raised by 8; zero points along the out features, raised by 8 too."""
    packed = torch.zeros(8, 4, dtype=torch.int32)
    packed[2, 1] = 0x76543210
    tensors = {"weight_packed": packed, "weight_scale": torch.ones(8, 1).half()}
    tensors["weight_zero_point"] = torch.tensor([[0x76543210]], dtype=torch.int32)
    group = {"weights": {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": False}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
    weight = convert(by_hand(config, tensors), tmp_path)
    assert codes_of(weight)[2].tolist() == [*[0] * 8, *range(8), *[0] * 16]
    assert weight.offsets.flatten().tolist() == list(range(8))  # type: ignore[union-attr]
    del tensors["weight_zero_point"]
    weight = convert(by_hand(config, tensors), tmp_path)
    assert weight.dequantize()[2, 8:16].tolist() == [-8, -7, -6, -5, -4, -3, -2, -1]


def test_fp4_by_hand(tmp_path: Path) -> None:
    """The low nibble is the even element; E2M1 with bit 3 for the sign; modelopt's second scale multiplies, the other divides."""
    for writer, factor in (("modelopt", 0.25), ("compressed-tensors", 0.25)):
        drawn = nvfp4(8, 32, writer=writer, factor=factor)
        name = "weight" if writer == "modelopt" else "weight_packed"
        drawn.tensors[name][0, 0] = 0xF1
        drawn.tensors["weight_scale"].view(torch.uint8)[0, 0] = 0x40  # 2
        assert convert(drawn, tmp_path).dequantize()[0, :2].tolist() == [0.25, -3.0]
    drawn = mxfp4(8, 32)
    drawn.tensors["weight"][0, 0], drawn.tensors["weight_scale"][0, 0] = 0xF1, 129
    assert convert(drawn, tmp_path).dequantize()[0, :2].tolist() == [2.0, -24.0]


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_give_what_files_give(kind: str, tmp_path: Path) -> None:
    drawn = draw(kind, 40, 128, seed=3)
    before = {name: t.clone() for name, t in drawn.tensors.items()}
    from_file, weight = convert(drawn, tmp_path), weight_from_tensors(drawn.config, drawn.tensors, 40, 128)
    assert (weight.format, weight.shape) == (from_file.format, from_file.shape)
    memory = {t.data_ptr() for t in drawn.tensors.values()}
    for (name, ours), theirs in zip(weight.parts().items(), from_file.parts().values(), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name
        assert ours.data_ptr() not in memory
    assert all(torch.equal(drawn.tensors[name], t) for name, t in before.items())


def test_tensors_that_do_not_fit_are_refused() -> None:
    drawn = gptq(8, 128)
    with pytest.raises(CheckpointError, match=r"q_proj\.qweight is int32 \[16, 8\]; expected int32 \[16, 16\]"):
        weight_from_tensors(drawn.config, drawn.tensors, 16, 128, "q_proj")
    with pytest.raises(CheckpointError, match=r"layer\.scales is missing; a layer of 8 x 128 needs it"):
        weight_from_tensors(drawn.config, {name: t for name, t in drawn.tensors.items() if name != "scales"}, 8, 128)
    with pytest.raises(CheckpointError, match="quantization_config has no quant_method"):
        weight_from_tensors({}, drawn.tensors, 8, 128)
    with pytest.raises(InvalidArgument, match=r"tensors\['scales'\] is a list"):
        weight_from_tensors(drawn.config, drawn.tensors | {"scales": [1]}, 8, 128)  # type: ignore[dict-item]
    with pytest.raises(InvalidArgument, match="in_features=0; expected an integer of at least 1"):
        weight_from_tensors(drawn.config, drawn.tensors, 8, 0)


# ------------------------------------------------------------------------------------------------- scales, orders and overrides


#: Kind -> the tensor of its scales, and how many in features one of them is for.
SCALES = {
    "gptq v2": ("scales", 32),
    "gptq v1 sym": ("scales", 32),
    "awq": ("scales", 32),
    "bnb nf4": ("weight.absmax", 64),
    "bnb fp4": ("weight.absmax", 64),
    "bnb nf4, saved after a forward on a CPU": ("weight.absmax", 64),
    "ct int4": ("weight_scale", 32),
    "ct int4 asym": ("weight_scale", 64),
    "ct int8": ("weight_scale", 128),
    "ct nvfp4": ("weight_scale", 16),
    "modelopt nvfp4": ("weight_scale", 16),
}


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("factor", [0.0, -1.0, 2.0**-8])
def test_scales_of_zero_below_zero_and_of_tiny_rows(kind: str, factor: float, tmp_path: Path) -> None:
    """The first scale times a factor: the values of its block, and no others, are multiplied by it."""
    drawn, (part, block) = draw(kind, 16, 128), SCALES[kind]
    first = drawn.tensors[part].view(-1)[:1]
    before = first.float().clone()
    first.copy_((before * factor).to(first.dtype))
    drawn.values[0, :block] *= (first.float() / before).numpy()
    values = convert(drawn, tmp_path).dequantize().numpy()
    np.testing.assert_allclose(values, drawn.values, rtol=1e-3 if part == "scales" else 1e-6)
    assert (values[0, :block] == 0).all() == (factor == 0)


@pytest.mark.parametrize(("make", "part", "reach"), [(awq, "scales", 15), (gptq, "scales", 255), (compressed, "weight_scale", 255)])
def test_a_scale_is_as_large_as_its_codes_allow(make: Any, part: str, reach: int, tmp_path: Path) -> None:
    drawn, most = make(8, 128, dtype=torch.float32), torch.finfo(torch.float32).max / reach
    drawn.tensors[part].view(-1)[0] = 0.999 * most
    assert convert(drawn, tmp_path).dequantize().isfinite().all()
    drawn.tensors[part].view(-1)[0] = 1.001 * most
    with pytest.raises(CheckpointError, match=rf"a\.b\.{part} holds scales so large that weights would be infinite"):
        convert(drawn, tmp_path)


def test_nested_scales_of_zero_blocks(tmp_path: Path) -> None:
    """bitsandbytes rounds the scale of an empty block to a little on either side of 0, and of other tables to exactly 0."""
    for options in ({}, {"block": 128, "second": 512}):
        drawn = bnb(8, 256, nested=True, **options)
        drawn.tensors["weight.absmax"][:] = int(np.abs(dynamic_map(torch.device("cpu")).numpy()).argmin())
        state = next(name for name in drawn.tensors if "quant_state" in name)
        raw = bytes(drawn.tensors[state].tolist()).replace(b'"nested_offset": 0.029999999329447746', b'"nested_offset": 0.0')
        drawn.tensors[state] = torch.tensor(list(raw), dtype=torch.uint8)
        assert not convert(drawn, tmp_path, (8, 256)).dequantize().any()


def test_scales_as_powers_of_two(tmp_path: Path) -> None:
    """E8M0 by its own type: as numbers of integers, and as the bytes of MXFP4."""
    drawn, power = gptq(8, 128), torch.full((4, 8), 0.25)
    drawn.tensors["scales"] = power.half()
    expected = convert(drawn, tmp_path).dequantize()
    drawn.tensors["scales"] = power.to(torch.float8_e8m0fnu)
    assert torch.equal(convert(drawn, tmp_path).dequantize(), expected)
    for writer in ("quark", "compressed-tensors"):
        drawn = mxfp4(8, 128, writer=writer)
        drawn.tensors["weight_scale"] = drawn.tensors["weight_scale"].view(torch.float8_e8m0fnu)
        np.testing.assert_array_equal(convert(drawn, tmp_path).dequantize().numpy(), drawn.values)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_single_numbers_have_any_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    drawn = nvfp4(8, 128)
    drawn.tensors["weight_scale_2"] = drawn.tensors["weight_scale_2"].view(shape)
    np.testing.assert_array_equal(convert(drawn, tmp_path).dequantize().numpy(), drawn.values)


@pytest.mark.parametrize("g_idx", [torch.zeros(0), torch.zeros(128)])
def test_orders_that_were_never_filled(g_idx: torch.Tensor, tmp_path: Path) -> None:
    drawn = gptq(8, 128)
    drawn.tensors["g_idx"] = g_idx.int()
    np.testing.assert_array_equal(convert(drawn, tmp_path).dequantize().numpy(), drawn.values)


def eight_bits(stored: int) -> dict[str, torch.Tensor]:
    codes = pack(np.random.default_rng(0).integers(0, 256, (128, 8)), 0, 8)
    return {"qweight": codes, "qzeros": pack(np.full((1, 8), stored), 1, 8), "scales": torch.ones(1, 8).half()}


@pytest.mark.parametrize(
    ("config", "own", "tensors", "name"),
    [
        ({"sym": False}, {"bits": 8, "sym": True, "group_size": 128}, eight_bits(127), "int8_col"),
        ({"sym": True}, {"sym": False}, gptq(8, 128).tensors, "int4_g32"),
        ({"sym": False, "desc_act": True}, {"desc_act": False, "sym": True}, gptq(8, 128, sym=True).tensors, "int4_sym_g32"),
        ({"sym": False, "group_size": 128}, {"group_size": 64}, gptq(8, 128, group=64).tensors, "int4_g64"),
        ({"checkpoint_format": "gptq_v2", "sym": False}, {"checkpoint_format": "gptq"}, gptq(8, 128).tensors, "int4_g32"),
    ],
)
def test_settings_of_single_layers(config: dict[str, Any], own: dict[str, Any], tensors: Any, name: str) -> None:
    """GPTQModel's `dynamic`, by expressions of which the first counts, and AutoRound's `extra_config`, by names and expressions."""
    base = {"bits": 4, "group_size": 32, **config}
    later = {"+:model": {"bits": 4}}
    places = [{"dynamic": {rule: own, **later}} for rule in ("+:.*up_proj", r"model\.layers\.\d+\.mlp")]
    places += [{"dynamic": {"-:lm_head": {}, "+:up_proj": {"bits": 3}, r".*\.(?:up|gate)_proj": own}}]
    if "checkpoint_format" not in config:
        places += [{"extra_config": {rule: own}} for rule in ("model.layers.0.mlp.up_proj", r"up_.*")]
    for place in places:
        method = {"quant_method": "auto-round" if "extra_config" in place else "gptq"}
        made = weight_from_tensors({**base, **method, **place}, tensors, 8, 128, "model.layers.0.mlp.up_proj")
        assert made.format.name == name
        expected = weight_from_tensors({**base, **own, **method}, tensors, 8, 128)
        assert torch.equal(made.dequantize(), expected.dequantize())


@pytest.mark.parametrize("pattern", ["a" * 1000, "a*b*c*d*", "x?" * 12])
def test_expressions_at_the_limits_are_read(pattern: str) -> None:
    drawn = gptq(8, 128)
    assert weight_from_tensors(drawn.config | {"dynamic": {pattern: {}}}, drawn.tensors, 8, 128).format.name == "int4_g32"


def test_eight_bits_have_no_zero_points() -> None:
    config = {"quant_method": "gptq", "bits": 8, "sym": False, "group_size": -1}
    assert make_adapter(config).expected() is None
    assert make_adapter(config | {"sym": True}).expected() == WEIGHT_FORMATS["int8_col"]
    with pytest.raises(Unsupported, match="8-bit codes with zero points; halfbyte reads 8-bit codes without"):
        weight_from_tensors(config, eight_bits(127), 8, 128)


def test_groups_of_awq_are_those_of_its_scales_where_layers_have_their_own() -> None:
    drawn = awq(8, 256, group=64)
    config = drawn.config | {"group_size": 128, "dynamic": {"+:another": {"group_size": 32}}}
    np.testing.assert_array_equal(weight_from_tensors(config, drawn.tensors, 8, 256).dequantize().numpy(), drawn.values)


def test_groups_of_single_layers_of_compressed_tensors() -> None:
    """What a layer may be is what its own group says: a name before a class."""
    weights = {"num_bits": 4, "strategy": "group"}
    groups = {
        "a": {"targets": ["Linear"], "weights": {**weights, "group_size": 64}},
        "b": {"targets": [r"re:.*up_proj"], "weights": {**weights, "group_size": 32}},
    }
    drawn = compressed(8, 128)
    config = {**drawn.config, "config_groups": groups}
    assert weight_from_tensors(config, drawn.tensors, 8, 128, "x.up_proj").format.name == "int4_sym_g32"
    config["config_groups"]["b"]["weights"]["group_size"] = 128
    with pytest.raises(CheckpointError, match=r"x\.up_proj\.weight_scale has 4 groups; the configuration makes that \[1\.0\]"):
        weight_from_tensors(config, drawn.tensors, 8, 128, "x.up_proj")


# ---------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("make", "options", "change", "message"), REFUSED)
def test_refusals_name_the_tensor(make: Any, options: dict[str, Any], change: Any, message: str, tmp_path: Path) -> None:
    drawn = make(8, 128, **options)
    change(drawn)
    save_file({f"a.b.{name}": t.contiguous() for name, t in drawn.tensors.items()}, tmp_path / "x.safetensors")
    with pytest.raises((CheckpointError, Unsupported), match=message):
        make_adapter(drawn.config).convert(StoredLayer("a.b", 8, 128, read_header(tmp_path / "x.safetensors")))


def test_other_methods_are_named(tmp_path: Path) -> None:
    for method in ("hqq", 3, []):
        with pytest.raises(Unsupported, match=rf"(hqq'|3|\[\]); halfbyte reads {', '.join(ADAPTERS)}"):
            make_adapter({"quant_method": method})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_quantization(tmp_path) is None
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4", "group_size": 16}}')
    assert read_quantization(tmp_path) == {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": 3}')
    with pytest.raises(HalfbyteError, match="does not describe"):
        read_quantization(tmp_path)
    (tmp_path / "hf_quant_config.json").unlink()
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 128}')
    assert read_quantization(tmp_path) == {"quant_method": "gptq", "bits": 4, "group_size": 128}


# -------------------------------------------------------------------------------------------------------- ten thousand mutants


TYPES = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)


def damage_tensor(drawn: Drawn, rng: random.Random) -> None:
    """Another type, shape or content for one tensor, or none."""
    name = rng.choice(sorted(drawn.tensors))
    raw = drawn.tensors[name].contiguous().view(-1).view(torch.uint8).clone()
    match rng.randrange(5):
        case 0:
            del drawn.tensors[name]
        case 1:
            kind = rng.choice(TYPES)
            drawn.tensors[name] = raw[: raw.numel() // kind.itemsize * kind.itemsize].view(kind)
        case 2:
            shape = rng.choice([(), (1,), (0,), (0, 5), (2, 2), tuple(reversed(drawn.tensors[name].shape)), (8, 4), (4, 8)])
            drawn.tensors[name] = torch.zeros(shape, dtype=drawn.tensors[name].dtype)
        case 3:
            raw[rng.randrange(raw.numel())] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
            drawn.tensors[name] = raw.view(drawn.tensors[name].dtype).view(drawn.tensors[name].shape)
        case 4:
            raw.fill_(rng.choice([0, 0x7F, 0x80, 0xFF]))
            drawn.tensors[name] = raw.view(drawn.tensors[name].dtype).view(drawn.tensors[name].shape)


def test_fuzzed_layers(tmp_path: Path) -> None:
    """Damaged configurations, tensors and bytes of every kind: a weight with finite scales, or the library's own error.

    HALFBYTE_FUZZ=10000 for as many; HALFBYTE_FUZZ_SEED for others.
    """
    count, seed = int(os.environ.get("HALFBYTE_FUZZ", "800")), int(os.environ.get("HALFBYTE_FUZZ_SEED", "4"))
    rng, file, refused = random.Random(seed), tmp_path / "x.safetensors", 0
    for i in range(count):
        kind = rng.choice(sorted(KINDS))
        drawn, config = draw(kind, 8, 128, i), None
        match i % 3:
            case 0:
                config = damage_config(drawn.config, rng)
            case 1:
                damage_tensor(drawn, rng)
        save_file({f"a.b.{name}": t.contiguous() for name, t in drawn.tensors.items()}, file)
        if i % 3 == 2:
            file.write_bytes(mutate(file.read_bytes(), rng))
        try:
            described = {**config, "quant_method": drawn.config["quant_method"]} if isinstance(config, dict) else drawn.config
            weight = make_adapter(described).convert(StoredLayer("a.b", 8, 128, read_header(file)))
            assert weight.shape == (8, 128)
            assert bool(block_scales(weight).isfinite().all())
        except HalfbyteError:
            refused += 1
        except Exception as error:
            pytest.fail(f"seed {seed}, round {i}, {kind}: {type(error).__name__}: {error}")
    assert count * 0.3 < refused < count * 0.95  # many are refused, and harmless changes are not
