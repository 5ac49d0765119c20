"""FP8 in blocks, as DeepSeek V3 and Qwen3 are released: multiplied out as transformers does it, and quantized again."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as tf
from families import tiny_config
from safetensors.torch import load_file
from tiny_models import before

import decoders
import halfbyte.hf as hf
from allocated import Allocated
from command_line import run
from fuzz import load_damaged
from halfbyte.checkpoints.adapters import open_checkpoint, weight_from_tensors
from halfbyte.checkpoints.fp8 import Fp8
from halfbyte.checkpoints.layer import StoredLayer
from halfbyte.errors import CheckpointError, HalfbyteError, InvalidArgument, Unsupported
from halfbyte.hf.weights import packed_share
from saved_folders import configure, in_shards, same, store

pytestmark = pytest.mark.filterwarnings("ignore:.*stay in 16 bits")
BLOCK = (32, 64)
#: What stays in 16 bits in the released files.
PLAIN = ("lm_head", "embed_tokens", "norm", ".gate.weight")
State = dict[str, torch.Tensor]


def stored(weight: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, factors) of a weight [N, K], block by block."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    factors = torch.empty(math.ceil(weight.shape[0] / block[0]), math.ceil(weight.shape[1] / block[1]), dtype=dtype)
    for i, rows in enumerate(weight.split(block[0])):
        for j, part in enumerate(rows.split(block[1], 1)):
            factors[i, j] = part.abs().max() / 448
            to = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            codes[to] = (part / factors[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, factors


def write(
    folder: Path,
    family: str,
    edit: Callable[[State], object] = lambda state: None,
    *,
    block: tuple[int, int] = BLOCK,
    dtype: torch.dtype = torch.float32,
    **sizes: Any,
) -> Path:
    """A tiny random model as it would be released."""
    config = tiny_config(family)
    config.update(sizes)
    torch.manual_seed(2)
    tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    for name in [n for n, t in state.items() if t.ndim == 2 and not any(part in n for part in PLAIN)]:
        state[name], state[f"{name}_scale_inv"] = stored(state[name].float(), block, dtype)
    edit(state)
    store(folder, state)
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [*block]}
    configure(folder, quantization_config=fp8)
    return folder


def expanded(folder: Path) -> Any:
    """The model in float32, multiplied out by transformers."""
    config = tf.FineGrainedFP8Config(dequantize=True, weight_block_size=BLOCK)
    with patch("transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: True):  # it is not used
        return tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config).float()


@pytest.mark.slow(sample=4)
@pytest.mark.parametrize("fmt", ["int4_g32", "int8_col", "nvfp4", "nf4"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "qwen3", "mixtral"])
def test_as_transformers_multiplies_out(family: str, fmt: str, tmp_path: Path) -> None:
    if family == "mixtral" and before("5.21"):
        pytest.skip("this transformers leaves what it renames in the dtype of the file")
    folder = write(tmp_path / "released", family)
    loaded = hf.load(folder, fmt, dtype=torch.float32)
    assert packed_share(loaded) > 0.8
    same(loaded, hf.quantize(expanded(folder), fmt))
    same(hf.load(hf.save(loaded, tmp_path / "own")), loaded)


def test_options_are_those_of_quantize(tmp_path: Path, prompt: Any) -> None:
    """Layers that are left out, experts among them, are multiplied out; what was plain in the files is quantized, too."""
    folder = write(tmp_path / "released", "deepseek_v3")
    options: dict[str, Any] = {"skip_modules": ("o_proj", "model.layers.1.mlp.experts"), "clip": "search", "lm_head": "int8_col"}
    loaded = hf.load(folder, "int4_g32", dtype=torch.float32, **options)
    same(loaded, hf.quantize(expanded(folder), "int4_g32", **options))
    with torch.no_grad():
        assert loaded(prompt()).logits.isfinite().all()
    cached = hf.load(write(tmp_path / "dense", "qwen3"), "nf4", "int8", "int4_g32", fuse_qkv=True, skip_modules=("o_proj",))
    assert cached.generate(prompt(), max_new_tokens=3).shape == (2, 24)
    assert cached.model.norm.weight.dtype is torch.bfloat16


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "targets": ["Linear"]}},
}


@pytest.mark.parametrize(
    ("config", "part", "shape"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", ()),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_scale_inv", (1,)),
        ({"quant_method": "fp8"}, "weight_scale", (-1,)),
        (COMPRESSED, "weight_scale", (-1, 1)),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_one_scale_and_scales_of_rows(config: Any, part: str, shape: tuple[int, ...], family: str, tmp_path: Path) -> None:
    """By hand, code by code, into the 16-bit model; scales of activations are left out."""
    folder, plain = write(tmp_path / "released", family), tmp_path / "plain"
    state, values = load_file(folder / "model.safetensors"), dict[str, torch.Tensor]()
    for factor in [name for name in state if name.endswith("weight_scale_inv")]:
        del state[factor]
        layer = factor.removesuffix(".weight_scale_inv")
        codes = state[f"{layer}.weight"]
        rows = torch.linspace(0.01, 0.02, 1 if shape in ((), (1,)) else len(codes)).to(torch.bfloat16)
        state |= {f"{layer}.{part}": rows.reshape(shape), f"{layer}.input_scale": torch.ones(())}
        values[f"{layer}.weight"] = codes.float() * rows.float().view(-1, 1)
    kept = {name: t for name, t in state.items() if not name.endswith((part, "input_scale"))}
    described = json.loads((folder / "config.json").read_text())
    del described["quantization_config"]
    plain.mkdir()
    for to, tensors, more in ((folder, state, {"quantization_config": config}), (plain, kept | values, {})):
        store(to, tensors)
        (to / "config.json").write_text(json.dumps(described | more))
    same(hf.load(folder, "int4_g32", dtype=torch.float32), hf.load(plain, "int4_g32", dtype=torch.float32))


def test_scales_that_are_neither(tmp_path: Path) -> None:
    layer = {"a.weight": torch.ones(4, 32).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(2)}
    with pytest.raises(CheckpointError, match=r"a\.weight_scale is float32 \[2\]; expected .* \[4, 1\]"):
        Fp8({}).values(StoredLayer("a", 4, 32, layer))
    with pytest.raises(CheckpointError, match=r"a\.weight_scale_inv is missing"):
        Fp8({}).values(StoredLayer("a", 4, 32, {"a.weight": layer["a.weight"]}))
    with pytest.raises(Unsupported, match="no weight format has the codes of 'compressed-tensors float-quantized'"):
        weight_from_tensors(COMPRESSED, {}, 4, 32)
    blocks = {"config_groups": {"group_0": {"weights": {"strategy": "block"}}}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "quantization_config": COMPRESSED | blocks}))
    with pytest.raises(Unsupported, match="strategy='block'; halfbyte reads 'tensor', 'channel'"):
        open_checkpoint(tmp_path)


def keep(part: str) -> Callable[[State], None]:
    """In 16 bits, as `modules_to_not_convert` says in some releases."""

    def edit(state: State) -> None:
        for name in [name for name in state if part in name and name.endswith("_scale_inv")]:
            state.pop(name)
            state[name.removesuffix("_scale_inv")] = state[name.removesuffix("_scale_inv")].to(torch.bfloat16)

    return edit


def test_layers_in_16_bits_among_them(tmp_path: Path) -> None:
    folder = write(tmp_path, "qwen3", keep("layers.0."))
    same(hf.load(folder, "nf4", dtype=torch.float32), hf.quantize(expanded(folder), "nf4"))


def test_blocks_at_the_edges_and_scales_of_16_bits(tmp_path: Path) -> None:
    """Sizes that blocks of 128 do not divide; transformers refuses them, so layers are compared with one that goes by elements."""
    folder = write(tmp_path, "qwen3", block=(128, 128), dtype=torch.bfloat16, hidden_size=192, intermediate_size=320)
    tensors, adapter = load_file(folder / "model.safetensors"), Fp8({"weight_block_size": [128, 128]})
    layers = [name.removesuffix(".weight_scale_inv") for name in tensors if name.endswith("_scale_inv")]
    assert len(layers) == 14
    assert tensors["model.layers.0.mlp.up_proj.weight_scale_inv"].shape == (3, 2)
    loaded = hf.load(folder, "int8_col", dtype=torch.float32)
    for name in layers[:7]:
        codes, factors = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"].float()
        wanted = torch.from_numpy(decoders.fp8_blocks(codes.view(torch.uint8).numpy(), factors.numpy(), (128, 128)))
        assert torch.equal(adapter.values(StoredLayer(name, *codes.shape, tensors)), wanted)
        assert (loaded.get_submodule(name).weight.dequantize() - wanted).abs().max() < wanted.abs().max() / 200


def test_the_block_of_the_second_next_token_is_left_out(tmp_path: Path) -> None:
    """DeepSeek's files hold one block more than the model; transformers leaves it out, too."""

    def edit(state: State) -> None:
        extra = {name.replace("layers.1.", "layers.61."): t.clone() for name, t in state.items() if "layers.1." in name}
        state.update(extra)

    same(hf.load(write(tmp_path / "more", "deepseek_v3", edit), "nf4"), hf.load(write(tmp_path / "plain", "deepseek_v3"), "nf4"))


def test_a_block_of_that_number_is_read(tmp_path: Path, monkeypatch: Any) -> None:
    """A model with more blocks than DeepSeek's own has one of the number that is left out there."""
    folder = write(tmp_path, "deepseek_v3")
    loaded = hf.load(folder, "nf4")
    monkeypatch.setattr(type(loaded), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.1.*"])
    same(hf.load(folder, "nf4"), loaded)


UP, ONE = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.experts.2.up_proj"


def drop(name: str) -> Callable[[State], object]:
    return lambda state: state.pop(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[State], object]:
    return lambda state: state.update({name: tensor})


def spoil(name: str, value: float) -> Callable[[State], object]:
    def edit(state: State) -> None:
        state[name][0, 0] = value

    return edit


@pytest.mark.parametrize(
    ("family", "edit", "message"),
    [
        ("qwen3", drop(f"{UP}.weight_scale_inv"), rf"{UP}.weight_scale_inv is missing; .* stored as torch.float8_e4m3fn"),
        ("qwen3", drop(f"{UP}.weight"), rf"{UP}.weight is missing"),
        ("qwen3", put(f"{UP}.weight", torch.zeros(128, 32).to(torch.float8_e4m3fn)), rf"{UP}.weight is float8_e4m3fn \[128, 32\]"),
        ("qwen3", put(f"{UP}.weight", torch.zeros(128, 64)), rf"{UP}.weight is float32 .*expected float8_e4m3fn \[128, 64\]"),
        ("qwen3", put(f"{UP}.weight_scale_inv", torch.ones(4, 2)), rf"{UP}.weight_scale_inv is float32 \[4, 2\]; .*\[4, 1\]"),
        ("qwen3", put(f"{UP}.weight_scale_inv", torch.ones(4, 1).int()), rf"{UP}.weight_scale_inv is int32"),
        ("qwen3", spoil(f"{UP}.weight_scale_inv", torch.nan), rf"{UP}.weight_scale_inv holds 1 scales of 4 that are not finite"),
        ("qwen3", spoil(f"{UP}.weight", torch.nan), rf"{UP}.weight holds NaN"),
        ("qwen3", put("model.norm.weight_scale_inv", torch.ones(1, 1)), "Qwen3ForCausalLM has no linear layer 'model.norm'"),
        ("qwen3_moe", drop(f"{ONE}.weight_scale_inv"), r"layers.1.mlp.experts.gate_up_proj: expert 2 is missing or not quantized"),
        ("qwen3_moe", spoil(f"{ONE}.weight", torch.nan), rf"{ONE}.weight holds NaN"),
    ],
)
def test_what_is_wrong_is_named(family: str, edit: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(HalfbyteError, match=message) as caught:
        hf.load(write(tmp_path, family, edit), "int4_g32")
    assert isinstance(caught.value, CheckpointError | Unsupported)


def test_no_scale_at_all_in_a_mixture(tmp_path: Path) -> None:
    def edit(state: State) -> None:
        for name in [name for name in state if ".experts." in name and name.endswith("_scale_inv")]:
            del state[name]

    with pytest.raises(CheckpointError, match=r"experts\.\d\.\w+_proj\.weight_scale_inv is missing"):
        hf.load(write(tmp_path, "qwen3_moe", edit), "int4_g32")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"weight_block_size": [64, 32]}, r"weight_scale_inv is float32 \[\d, 1\]; expected float32 or .*\[\d, 2\]|expected"),
        ({"weight_block_size": None}, r"weight_scale_inv is float32 \[\d, \d\]; expected .* \[\d+, 1\]"),
        ({"weight_block_size": [0, 32]}, r"weight_block_size=\[0, 32\]; expected two positive integers"),
        ({"weight_block_size": 128}, "weight_block_size=128"),
        ({"fmt": "e5m2"}, "fmt='e5m2'"),
        ({"expert_dtype": "fp4"}, "expert_dtype='fp4'"),
    ],
)
def test_configurations(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    configure(write(tmp_path, "qwen3"), lambda config: config["quantization_config"].update(entries))
    with pytest.raises((CheckpointError, Unsupported), match=message):
        hf.load(tmp_path, "int4_g32")


def test_fuzzed_folders(tmp_path: Path) -> None:
    """Damaged configurations and headers: only the library's errors."""
    count, rng = int(os.environ.get("HALFBYTE_FUZZ", "20")), random.Random(int(os.environ.get("HALFBYTE_FUZZ_SEED", "4")))
    load_damaged(write(tmp_path, "qwen3"), lambda folder: hf.load(folder, "int4_g32"), count, rng)


def test_the_format_must_be_named(tmp_path: Path, capsys: Any) -> None:
    folder = write(tmp_path / "released", "qwen3")
    with pytest.raises(InvalidArgument, match=r"no weight format has the codes of .*such as weights='int8_g128'"):
        hf.load(folder)
    with pytest.raises(InvalidArgument, match=r"int4_g128.*skip_modules"):
        hf.load(folder, "int4_g128")
    with pytest.raises(InvalidArgument, match="clip='x'"):
        hf.load(folder, "int4_g32", clip="x")
    with pytest.raises(Unsupported, match="rotate_values changes weights"):
        hf.load(folder, "int4_g32", rotate_values=True)
    with pytest.raises(Unsupported, match="no weight format has the codes of 'fp8'"):
        weight_from_tensors({"quant_method": "fp8"}, {}, 8, 8)
    assert run("quantize", str(folder), "--weights", "nf4", "-o", str(tmp_path / "own")) == 0
    assert "equal bit for bit" in capsys.readouterr().out
    same(hf.load(tmp_path / "own"), hf.load(folder, "nf4", dtype=torch.bfloat16))


def test_memory_stays_below_the_packed_size_and_one_shard(tmp_path: Path) -> None:
    sizes = {"num_experts": 16, "hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 6, "layer_types": None}
    folder = write(tmp_path, "qwen3_moe", **sizes)
    shard = in_shards(folder, lambda name: 1 + int(name.split(".")[2]) // 2 if ".layers." in name else 0)
    with Allocated() as memory:
        loaded = hf.load(folder, "int4_g32")
    packed = sum(t.nbytes for t in loaded.state_dict().values())
    assert 0.9 * packed < memory.most < packed + shard
