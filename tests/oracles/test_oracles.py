"""Layers packed by other libraries, which run here themselves: their values, bit for bit. `make oracle-test`.

bitsandbytes quantizes and dequantizes; compressed-tensors, AutoRound and GPTQModel pack and unpack; torchao decodes MXFP4 and
NVFP4. All on a CPU.
"""

from __future__ import annotations

import importlib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoint_files import draw
from halfbyte.checkpoints.adapters import make_adapter
from halfbyte.checkpoints.layer import StoredLayer
from halfbyte.checkpoints.safetensors_files import read_header

SHAPE = (48, 512)
WORDS = (64, 512)  # whole words of 8 zero points, in multiples of 32


def loaded(config: dict[str, Any], tensors: dict[str, torch.Tensor], folder: Path, shape: tuple[int, int] = SHAPE) -> torch.Tensor:
    """The values that halfbyte reads, float32 [N, K], through a file."""
    save_file({f"a.b.{name}": t.contiguous() for name, t in tensors.items()}, folder / "x.safetensors")
    return make_adapter(config).convert(StoredLayer("a.b", *shape, read_header(folder / "x.safetensors"))).dequantize()


def normal(seed: int = 0, shape: tuple[int, int] = SHAPE) -> torch.Tensor:
    """Weights with a row of zeros (pruned, or padding), a tiny row and a huge one."""
    return with_extremes(torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05, 2.0**-20, 0.0)


def with_extremes(rows: torch.Tensor, tiny: float, zero: float | None = None) -> torch.Tensor:
    """Weights, or their scales, [N, ...]: the first row times `zero`, the second one times `tiny`, the third one times 1,024."""
    rows[0] *= 1 if zero is None else zero
    rows[1] *= tiny
    rows[2] *= 1024
    return rows


@pytest.mark.parametrize("block", [64, 128, 256])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes(kind: str, nested: bool, block: int, tmp_path: Path) -> None:
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(normal(), blocksize=block, quant_type=kind, compress_statistics=nested)
    theirs = functional.dequantize_4bit(codes, state)
    parts = {"weight": codes, **{f"weight.{name}": t for name, t in state.as_dict(packed=True).items()}}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    assert torch.equal(loaded(config, parts, tmp_path), theirs.view(SHAPE))


#: Bits, group (None: per-channel), symmetric; 8 bits have fewer formats.
PACKED = [*product((4,), (32, 128, None), (True, False)), *product((8,), (128, None), (True,))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("bits", "group", "symmetric"), PACKED)
def test_compressed_tensors(bits: int, group: int | None, symmetric: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Packed by the library with scales and zero points drawn here; it computes in the type of the scales."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    arguments = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, **strategy)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, format="pack-quantized")
    rng, groups = torch.Generator().manual_seed(bits), SHAPE[1] // group if group else 1
    scales = with_extremes(torch.rand(SHAPE[0], groups, generator=rng) * 0.02 + 0.005, 2.0**-6 if bits == 8 else 2.0**-20).to(dtype)
    state = {"weight": normal().to(dtype), "weight_scale": scales}
    if not symmetric:
        state["weight_zero_point"] = torch.randint(-8, 8, scales.shape, generator=rng).to(torch.int8)
    if bits == 8 and dtype is torch.float32:
        state["weight_scale"] = scales.half().float()  # 8-bit formats have fp16 scales; others are refused
    packer = BaseCompressor.get_value_from_registry("pack-quantized")
    packed = packer.compress(dict(state), scheme)
    theirs = packer.decompress(dict(packed), scheme)["weight"]
    group_0 = {"targets": ["Linear"], "weights": arguments.model_dump(mode="json")}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group_0}}
    assert torch.equal(loaded(config, packed, tmp_path).to(dtype), theirs)


#: How AutoRound packs, its module for that, the smallest zero point that the packing keeps, and the configuration's own part.
AUTO_ROUND = (
    ("gptq v1", "qlinear_torch_zp", 1, {"quant_method": "gptq", "checkpoint_format": "gptq"}),
    ("auto_round", "qlinear_torch", 0, {"quant_method": "auto-round", "packing_format": "auto_round"}),
)


@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("packing", "module", "least", "config"), AUTO_ROUND, ids=[name for name, *_ in AUTO_ROUND])
def test_auto_round(
    packing: str, module: str, least: int, config: dict[str, Any], symmetric: bool, group: int, tmp_path: Path
) -> None:
    """Packed by the library with scales and zero points drawn here; a product with the identity gives its own fp16 weights."""
    (rows, columns), rng = WORDS, torch.Generator().manual_seed(group % 1000)
    scales = torch.rand(rows, columns // group if group > 0 else 1, generator=rng) * 0.02 + 0.005
    scales = with_extremes(scales, 2.0**-16).half().float()
    zeros = torch.full(scales.shape, 8) if symmetric else torch.randint(least, 16, scales.shape, generator=rng)
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = normal(shape=WORDS)
    layer = importlib.import_module(f"auto_round_extension.torch.{module}").QuantLinear(4, group, columns, rows, bias=False)
    layer.device = "cpu"  # which packing to v2 reads and nobody sets
    layer.pack(linear, scales, zeros.float(), device="cpu")
    layer.post_init()
    theirs = layer(torch.eye(columns)).T
    parts = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    config = config | {"bits": 4, "group_size": group, "sym": symmetric}
    assert torch.equal(loaded(config, parts, tmp_path, WORDS).half().float(), theirs)
    assert theirs.unique().numel() > 100


def drawn_linear(
    bits: int, symmetric: bool, group: int, rng: torch.Generator
) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    """A layer of `WORDS` to be packed, with scales of fp16 numbers and zero points, float32 [N, groups]; symmetric: the middle."""
    rows, columns = WORDS
    scales = torch.rand(rows, columns // group if group > 0 else 1, generator=rng) * 0.02 + 0.005
    scales = with_extremes(scales, 2.0**-16).half().float()
    zeros = torch.full(scales.shape, 1 << (bits - 1)) if symmetric else torch.randint(1 << bits, scales.shape, generator=rng)
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = normal(shape=WORDS)
    return linear, scales, zeros.float()


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize(
    ("bits", "symmetric", "group"), [*product((4,), (True, False), (32, 128, -1)), (8, True, 128), (8, True, -1)]
)
def test_gptqmodel(
    bits: int, symmetric: bool, group: int, version: str, act_order: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Packed by the library with scales, zero points (0 among them) and an order drawn here, saved as v1 by its own conversion."""
    monkeypatch.setenv("GPTQMODEL_DISABLE_PACK_EXT", "1")  # the same in C++, which would be built first
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    (rows, columns), rng = WORDS, torch.Generator().manual_seed(group % 1000)
    linear, scales, zeros = drawn_linear(bits, symmetric, group, rng)
    g_idx = torch.arange(columns, dtype=torch.int32) // (group if group > 0 else columns)
    if act_order:
        g_idx = g_idx[torch.randperm(columns, generator=rng)]
    layer = TorchLinear(bits, group, symmetric, act_order, columns, rows, register_buffers=False)
    layer.pack(linear, scales, zeros, g_idx)
    layer.post_init()
    theirs = layer.eval().dequantize_weight().T
    if version == "gptq":
        convert_gptq_v2_to_v1_format_module(layer, QuantizeConfig(bits=bits, group_size=group))
    parts = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": act_order}
    config |= {"checkpoint_format": version, "meta": {"quantizer": ["gptqmodel:7.7.0"]}}
    assert torch.equal(loaded(config, parts, tmp_path, WORDS).half(), theirs)
    assert theirs.unique().numel() > 100


@pytest.mark.parametrize("group", [32, 128, -1])
def test_awq_of_gptqmodel(group: int, tmp_path: Path) -> None:
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear

    (rows, columns), rng = WORDS, torch.Generator().manual_seed(group % 1000)
    linear, scales, zeros = drawn_linear(4, False, group, rng)
    layer = AwqTorchLinear(4, group, False, False, columns, rows)
    layer.pack(linear, scales, zeros)
    theirs = layer(torch.eye(columns, dtype=torch.float16)).T
    parts = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    assert torch.equal(loaded(config, parts, tmp_path, WORDS).half(), theirs)
    assert theirs.unique().numel() > 100


@pytest.mark.parametrize("kind", ["quark mxfp4", "ct mxfp4"])
def test_mxfp4_of_torchao(kind: str, tmp_path: Path) -> None:
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    drawn = draw(kind, *SHAPE)
    codes = next(t for name, t in drawn.tensors.items() if name in ("weight", "weight_packed"))
    scales = drawn.tensors["weight_scale"].view(torch.float8_e8m0fnu)
    theirs = to_dtype(codes, scales, torch.float4_e2m1fn_x2, 32, torch.float32)
    assert torch.equal(loaded(drawn.config, drawn.tensors, tmp_path), theirs)


def test_nvfp4_of_torchao(tmp_path: Path) -> None:
    """torchao multiplies block and tensor scale first, as the files of modelopt mean it."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    drawn = draw("modelopt nvfp4", *SHAPE)
    t = drawn.tensors
    made = NVFP4Tensor(t["weight"], t["weight_scale"], 16, torch.float32, t["weight_scale_2"])
    torch.testing.assert_close(loaded(drawn.config, t, tmp_path), made.dequantize(torch.float32), rtol=2**-22, atol=0)
