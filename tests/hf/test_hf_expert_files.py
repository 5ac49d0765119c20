"""Mixtures that other libraries quantized, one expert a tensor: loaded as stacks, code for code, or refused by name."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from external_folders import gpt_oss
from families import tiny_config
from safetensors.torch import load_file

import decoders
import halfbyte.hf as hf
from allocated import Allocated
from checkpoint_files import Drawn, draw, gptq
from halfbyte.checkpoints.experts import joined, stack
from halfbyte.errors import HalfbyteError, Unsupported
from halfbyte.experts import QuantExperts
from halfbyte.hf.quantize_model import footprint, resident_peak
from halfbyte.hf.weights import ROUTERS, packed_share, targets
from halfbyte.reference.quantize import quantize
from saved_folders import configure, in_shards, same, store

#: What files call an expert's gate, up and down projections, and the mixture.
NAMES = {"mixtral": ("w1", "w3", "w2", ".block_sparse_moe.")}
PLAIN = ("gate_proj", "up_proj", "down_proj", ".mlp.")
CASES = {
    "gptq v1": "qwen3_moe",
    "gptq v2 act-order": "mixtral",
    "awq": "mixtral",
    "auto-round sym": "qwen2_moe",
    "ct int4 asym": "olmoe",
    "ct int8 group 128": "qwen3_moe",
    "ct mxfp4": "phimoe",
    "ct nvfp4": "qwen2_moe",
    "modelopt nvfp4": "deepseek_v3",
    "quark mxfp4": "glm4_moe",
    "gptq v2": "longcat_flash",
    "ct int4": "llama4_text",
}


def tiny(family: str) -> Any:
    """A random mixture whose layers fit every kind."""
    config = tiny_config(family)
    wide = ("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank")
    config.update({name: 128 for name in wide if getattr(config, name, None)})
    if not hasattr(config, "qk_rope_head_dim"):
        config.update({"head_dim": 64})
    torch.manual_seed(3)
    return tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def drawn_expert(kind: str, features: int, width: int, seed: int) -> list[Drawn]:
    """The gate and up projections of an expert, in one act-order if they are in any."""
    gate, up = (draw(kind, features, width, seed + i) for i in range(2))
    if "act-order" in kind:
        t = up.tensors
        t["g_idx"] = gate.tensors["g_idx"].clone()
        up.values = decoders.gptq(
            *(t[n].numpy() for n in ("qweight", "qzeros")), t["scales"].float().numpy(), t["g_idx"].numpy(), False
        )
    return [gate, up]


def write(
    folder: Path, family: str, kind: str, edit: Callable[[dict[str, torch.Tensor]], object] = lambda state: None, model: Any = None
) -> Any:
    """A folder of a tiny model, or of `model`, as another library would write it; returns the model with the values of it."""
    model = tiny(family) if model is None else model
    state = {name: t.clone() for name, t in model.state_dict().items()}
    gate, up, down, owner = NAMES.get(family, PLAIN)
    for seed, (name, target) in enumerate(targets(model).items()):
        if "lm_head" in name or ROUTERS & {*name.split(".")}:
            continue
        if not target.projection:
            made = draw(kind, *target.shape, seed)
            state.pop(f"{name}.weight")
            state |= {f"{name}.{part}": t for part, t in made.tensors.items()}
            target.owner.weight.data = torch.from_numpy(made.values)
            continue
        (experts, features, width), stacked = target.shape, []
        state.pop(name)
        for expert in range(experts):
            one = 1000 * seed + 2 * expert
            parts = (
                drawn_expert(kind, features // 2, width, one)
                if target.projection != "down_proj"
                else [draw(kind, features, width, one)]
            )
            for role, made in zip((gate, up) if len(parts) == 2 else (down,), parts, strict=True):
                stored = f"{name.rpartition('.')[0]}.{expert}.{role}".replace(".mlp.", owner)
                state |= {f"{stored}.{part}": t for part, t in made.tensors.items()}
            stacked.append(torch.cat([torch.from_numpy(part.values) for part in parts]))
        values = torch.stack(stacked)
        getattr(target.owner, target.projection).data = values.mT.contiguous() if family == "llama4_text" else values
    state = {name.replace(".mlp.", owner) if ".gate." in name else name: t for name, t in state.items()}
    edit(state)
    model.config.save_pretrained(folder)
    configure(folder, quantization_config=made.config)
    store(folder, state)
    return model


@pytest.mark.slow(sample=4)
@pytest.mark.filterwarnings("ignore:.*stay in 16 bits")
@pytest.mark.parametrize("kind", CASES)
def test_every_kind(kind: str, prompt: Any, tmp_path: Path) -> None:
    model = write(tmp_path / "theirs", CASES[kind], kind)
    loaded = hf.load(tmp_path / "theirs")
    assert any(isinstance(m, QuantExperts) for m in loaded.modules())
    assert packed_share(loaded) > 0.85
    again = hf.load(hf.save(loaded, tmp_path / "ours"))
    same(again, loaded)
    with torch.no_grad():
        wanted = model(prompt()).logits
        for each in (loaded, again):
            assert (each(prompt()).logits - wanted).abs().max() < 1e-3 * wanted.std()


def drop(part: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(state: dict[str, torch.Tensor]) -> None:
        for name in [name for name in state if part in name]:
            del state[name]

    return edit


def add(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda state: state.update({name: tensor})


ONE = "model.layers.1.mlp.experts.2.up_proj"


@pytest.mark.parametrize(
    ("kind", "edit", "message"),
    [
        ("gptq v1", drop(ONE), r"layers.1.mlp.experts.gate_up_proj: expert 2 is missing"),
        ("gptq v1", drop("layers.0.mlp.experts.3.down_proj"), r"layers.0.mlp.experts.down_proj: expert 3 is missing"),
        ("gptq v1", drop(f"{ONE}.scales"), rf"{ONE}.scales is missing"),
        ("gptq v1", add("model.layers.0.mlp.experts.7.up_proj.qweight", torch.zeros(4)), "config.json gives the mixture 4 experts"),
        ("gptq v1", add(f"{ONE}.bias", torch.ones(128)), "unexpected"),
        ("gptq v2 act-order", add(f"{ONE}.g_idx", torch.arange(128).div(32, rounding_mode="floor").int()), "different act-orders"),
        ("ct nvfp4", add(f"{ONE}.weight_global_scale", torch.tensor([torch.nan])), rf"{ONE}.weight_global_scale holds"),
    ],
)
def test_what_is_wrong_is_named(kind: str, edit: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path, "qwen2_moe", kind, edit)
    with pytest.raises(HalfbyteError, match=message):
        hf.load(tmp_path)


def test_biases_of_zeros_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "qwen2_moe", "gptq v1", add(f"{ONE}.bias", torch.zeros(128)))
    hf.load(tmp_path)


def test_what_cannot_be_put_together() -> None:
    """Codes of two kinds; rows of one matrix with tensor scales of their own."""
    x, rows = torch.randn(8, 256), torch.arange(8)
    with pytest.raises(Unsupported, match=r"no format holds its parts exactly: a is nf4, b is int4_g32"):
        stack("experts", [{"a": quantize(x, "nf4")}, {"b": quantize(x, "int4_g32")}], [rows, rows])
    with pytest.raises(Unsupported, match="a, b have scales of their own"):
        joined("layer", {"a": quantize(x, "nvfp4"), "b": quantize(3 * x, "nvfp4")}, torch.arange(16))


@pytest.mark.parametrize(
    ("formats", "common"),
    [
        (("int4_g128", "int4_g32"), "int4_g32"),
        (("int4_col", "int4_g128"), "int4_g128"),
        (("int4_sym_g64", "int4_g128"), "int4_g64"),
        (("int4_g64", "int4_sym_g32_fp32"), "int4_g32_fp32"),
        (("int8_col", "int8_g128"), "int8_g128"),
        (("nf4_dq", "nf4"), "nf4"),
        (("nf4_dq", "nf4_dq"), "nf4"),
    ],
)
def test_parts_in_several_formats_are_put_together_exactly(formats: tuple[str, str], common: str) -> None:
    first, second = (quantize(torch.randn(8, 256), name) for name in formats)
    rows = torch.randperm(16)
    values = torch.cat([first.dequantize(), second.dequantize()])[rows]
    made = stack("experts", [{"a": first, "b": second}], [rows])
    assert made.format.name == joined("layer", {"a": first, "b": second}, rows).format.name == common
    assert torch.equal(made.dequantize()[0], values)
    assert torch.equal(joined("layer", {"a": first, "b": second}, rows).dequantize(), values)


def test_experts_in_groups_of_several_sizes(tmp_path: Path) -> None:
    """One expert of a layer in groups of 64, as `dynamic` allows it: all get the narrower groups, with the same values."""
    wide = gptq(128, 128, 9, group=64)
    model = write(tmp_path, "qwen3_moe", "gptq v1", lambda state: state.update({f"{ONE}.{n}": t for n, t in wide.tensors.items()}))
    model.model.layers[1].mlp.experts.gate_up_proj.data[2, 128:] = torch.from_numpy(wide.values)
    dynamic = {r"+:.*layers\.1\..*experts\.2\.up_proj": {"group_size": 64}}
    configure(tmp_path, lambda config: config["quantization_config"].update(dynamic=dynamic))
    weight = hf.load(tmp_path).model.layers[1].mlp.experts.gate_up_proj.weight
    assert weight.format.name == "int4_g32"
    gate_up = model.model.layers[1].mlp.experts.gate_up_proj
    assert torch.equal(weight.dequantize(), torch.stack((gate_up[:, :128], gate_up[:, 128:]), 2).flatten(1, 2))


def test_files_hold_what_was_moved(tmp_path: Path) -> None:
    """Each expert's codes lie in its rows, gate and up in turn, and its own tensor scale with them."""
    write(tmp_path, "qwen2_moe", "ct nvfp4")
    loaded, stored = hf.load(tmp_path), load_file(tmp_path / "model.safetensors")
    weight = loaded.model.layers[1].mlp.experts.gate_up_proj.weight
    for expert in range(4):
        for half, role in enumerate(("gate_proj", "up_proj")):
            name = f"model.layers.1.mlp.experts.{expert}.{role}"
            assert torch.equal(weight.codes[expert, half::2], stored[f"{name}.weight_packed"])
            assert torch.equal(weight.scales[expert, half::2], stored[f"{name}.weight_scale"].view(torch.uint8))
            assert (weight.tensor_scale[expert, half::2] == 1 / stored[f"{name}.weight_global_scale"]).all()


@pytest.mark.parametrize(("kind", "layers"), [("gptq v1", 2), ("ct nvfp4", 1)])
def test_memory_stays_below_the_packed_size_and_one_shard(kind: str, layers: int, tmp_path: Path, monkeypatch: Any) -> None:
    """16 experts a layer, and so many layers a file."""
    config = tiny_config("qwen3_moe")
    config.update({"num_hidden_layers": 6, "layer_types": None, "num_experts": 16, "num_local_experts": 16, "head_dim": 64})
    config.update({"hidden_size": 128, "moe_intermediate_size": 128})
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()
    monkeypatch.setattr(sys.modules[__name__], "tiny", lambda family: model)
    write(tmp_path, "qwen3_moe", kind)
    shard = in_shards(tmp_path, lambda name: 1 + int(name.split(".")[2]) // layers if ".layers." in name else 0)
    with Allocated() as memory:
        loaded = hf.load(tmp_path)
    packed = sum(t.nbytes for t in loaded.state_dict().values())
    assert 0.9 * packed < memory.most < packed + shard
    assert packed < 0.4 * sum(2 * p.numel() for p in model.parameters())


# ------------------------------------------------------------------------------------------------- what a load says on stderr

LINE = re.compile(
    r"halfbyte: (\w+) takes (\S+) GB, (\S+)% of it packed \((\S+)% of its weights\); "
    r"peak memory of this process: (\S+) GB on the host\n"
)


def qwen3_moe(folder: Path) -> None:
    tiny("qwen3_moe").half().save_pretrained(folder)


#: As released: one tensor an expert in 16 bits; blocks and scales of MXFP4; NVFP4 by modelopt.
RELEASED = {
    "qwen3_moe": (qwen3_moe, {"weights": "int4_g32"}),
    "gpt_oss": (gpt_oss, {}),
    "deepseek_v3": (lambda folder: write(folder, "deepseek_v3", "modelopt nvfp4"), {}),
}


@pytest.mark.filterwarnings("ignore:.*stay in 16 bits")
@pytest.mark.parametrize("family", RELEASED)
def test_a_load_tells_bytes_and_peak_once(family: str, tmp_path: Path, capfd: Any) -> None:
    tf.utils.logging.enable_progress_bar()  # an evaluation in this process may have turned them off
    make, options = RELEASED[family]
    make(tmp_path / "released")
    while_loading = {"quantization_config": hf.HalfbyteConfig(**options)} if options else None
    ways: list[Callable[[], Any]] = [lambda: hf.load(tmp_path / "released", **options)]
    ways += [lambda: tf.AutoModelForCausalLM.from_pretrained(tmp_path / "released", **while_loading)] if while_loading else []
    ways += [lambda: tf.AutoModelForCausalLM.from_pretrained(hf.save(ways[0](), tmp_path / "ours"), dtype="auto")]
    for load in ways:
        capfd.readouterr()
        before = resident_peak() or 0
        model = load()
        found = LINE.findall(capfd.readouterr().err)
        name, total, packed, weights, peak = found[-1]
        assert len(found) == (2 if load is ways[-1] else 1)  # the last way loads twice
        state = {name: t.nbytes for name, t in model.state_dict().items()}
        inside = sum(n for name, n in state.items() if ".weight_" in name)
        tables = sum(t.nbytes for n, t in model.named_buffers() if n not in state)
        assert name == type(model).__name__
        assert float(total) == pytest.approx((sum(state.values()) + tables) / 1e9, rel=1e-3)
        assert float(packed) == pytest.approx(100 * inside / (sum(state.values()) + tables), abs=0.06)
        assert float(weights) == pytest.approx(100 * packed_share(model), abs=0.06)
        assert 0.99 * before < float(peak) * 1e9 < 1.01 * (resident_peak() or 0)


def test_nothing_is_told_without_packed_weights_or_progress_bars(tmp_path: Path, capfd: Any) -> None:
    qwen3_moe(tmp_path / "plain")
    model = hf.load(tmp_path / "plain", keys="int8")
    assert footprint(model) == ""
    tf.utils.logging.disable_progress_bar()
    try:
        hf.quantize(model, "nf4")
    finally:
        tf.utils.logging.enable_progress_bar()
    assert "takes" not in capfd.readouterr().err
    assert footprint(model)
