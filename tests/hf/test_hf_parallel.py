"""Tensor parallelism: how the tensors of a layer are cut, and whole models over two processes."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tiny_models import LLAMA, base, before
from torch import nn

import halfbyte.hf as hf
from halfbyte.errors import Unsupported
from halfbyte.experts import QuantExperts
from halfbyte.formats import WEIGHT_FORMATS
from halfbyte.hf.quantization_config import mark_quantized
from halfbyte.hf.weights import WHOLE, part_styles, update_plan
from halfbyte.nn import FusedProjections, QuantLinear
from halfbyte.reference.quantize import quantize
from halfbyte.tensors import QuantTensor

PLAIN = [name for name, fmt in WEIGHT_FORMATS.items() if fmt.scale is not None and fmt.scale.nested is None]


def layer(fmt: str, n: int = 48, k: int = 256, act_order: bool = False) -> QuantLinear:
    weight = quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(1)), fmt)
    return QuantLinear(replace(weight, perm=torch.randperm(k).int()) if act_order else weight)


def share(whole: QuantLinear, style: str, rank: int, ranks: int) -> QuantTensor:
    """A rank's part, cut as transformers does: colwise along the first axis, rowwise along the last."""
    styles, parts = part_styles("layer", whole, style, ranks), {}
    assert styles.keys() == whole.weight.parts().keys()
    for part, tensor in whole.weight.parts().items():
        axis = 0 if styles[part] == "colwise" else -1
        parts[part] = tensor if styles[part] == WHOLE else tensor.chunk(ranks, axis)[rank]
    return QuantTensor(whole.format, (parts["codes"].shape[0], parts["codes"].shape[1] * whole.format.code.per_byte), **parts)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("fmt", PLAIN)
def test_column_parallel_shares_are_rows(fmt: str, act_order: bool, ranks: int) -> None:
    whole = layer(fmt, act_order=act_order)
    shares = [share(whole, "colwise", rank, ranks).dequantize() for rank in range(ranks)]
    assert torch.equal(torch.cat(shares), whole.weight.dequantize())


@pytest.mark.parametrize("fmt", PLAIN)
def test_row_parallel_shares_are_columns(fmt: str) -> None:
    whole = layer(fmt)
    shares = [share(whole, "rowwise", rank, 2).dequantize() for rank in range(2)]
    assert torch.equal(torch.cat(shares, 1), whole.weight.dequantize())


@pytest.mark.parametrize(
    ("whole", "style", "message"),
    [
        (layer("int4_g32", act_order=True), "rowwise", r"layer \(int4_g32\) cannot be shared out over 2 ranks.*act-order"),
        (layer("int4_g128", k=128), "rowwise", "cut groups of 128"),
        (layer("int4_col", k=130), "rowwise", "cut groups of 2"),
        (layer("nf4_dq"), "colwise", "nested"),
        (layer("nf4"), "packed_colwise", "packed_colwise"),
    ],
)
def test_what_cannot_be_cut_is_named(whole: QuantLinear, style: str, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        part_styles("layer", whole, style, 2)


def test_experts_are_not_sharded() -> None:
    experts = nn.ModuleDict({"experts": QuantExperts(quantize(torch.randn(2, 8, 64), "nf4"))})
    with pytest.raises(Unsupported, match="experts: quantized experts cannot be sharded over 2 ranks"):
        update_plan(experts, {}, 2)


def test_layers_that_one_rule_cannot_describe() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([layer("int4_g32"), layer("int4_col")])})
    update_plan(model, {"layers.*": "colwise"}, 2)
    with pytest.raises(Unsupported, match=r"layers\.1\.weight_(scales|offsets) would be shared out in another way"):
        update_plan(model, {"layers.*": "rowwise"}, 2)


def test_projections_that_are_gathered_are_not_fused() -> None:
    shards = [layer("nf4") for _ in range(3)]
    shards[1].parallel_style = "colwise_gather_output"
    with pytest.raises(Unsupported, match="colwise_gather_output"):
        FusedProjections(*shards)


def model(fmt: str, act_order: tuple[str, ...] = (), **options: Any) -> Any:
    torch.manual_seed(5)
    config = tf.Qwen2Config(**{**LLAMA, "hidden_size": 128, "intermediate_size": 256, **options})
    config.eos_token_id = config.bos_token_id = None
    config.pad_token_id = 0
    made = hf.quantize(tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), fmt)
    for name, module in made.named_modules():
        if isinstance(module, QuantLinear):
            if module.bias is not None:
                nn.init.normal_(module.bias)
            if name.endswith(act_order):
                perm = torch.randperm(module.in_features).int()
                module.register_parameter("weight_perm", nn.Parameter(perm, requires_grad=False))
    mark_quantized(made, dict(made.hf_quantizer.quantization_config.modules))
    return made


@pytest.mark.slow
@pytest.mark.skipif(before("5.21"), reason="this transformers shares out no output layer of odd size")
def test_models_over_two_processes(tmp_path: Path) -> None:
    """GQA with biases; each format of another kind; act-order where it can be; packed caches, recorded steps; the refusals."""
    made = {
        "act_order": model("int4_g32", ("q_proj", "v_proj", "up_proj")),
        "columns": model("int4_sym_col"),
        "tensor_scale": model("nvfp4"),
        "row_act_order": model("int4_g32", ("o_proj",)),
        "nested": model("nf4_dq"),
    }
    generating = ("qwen3", "phi3", "gemma2")  # norms of q and k; projections that are gathered; norms behind branches
    made |= {name: hf.quantize(copy.deepcopy(base(name)), "int4_g32", keys="int8", values="int4_g32") for name in generating}
    ids, expected = torch.randint(1, 101, (2, 9)), {}
    with torch.no_grad():
        for name, m in made.items():
            given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12}
            words = m.generate(ids, **given) if name in generating else None
            expected[str(hf.save(m, tmp_path / name))] = (ids, m(ids).logits, words)
    torch.save(expected, tmp_path / "expected.pt")
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = str(found.getsockname()[1])
    worker = Path(__file__).with_name("tensor_parallel_worker.py")
    started = [
        subprocess.Popen(
            [sys.executable, str(worker), port, str(rank), "2", str(tmp_path / "expected.pt")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=200) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (out, errors) in zip(started, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
        results = {Path(name).name: result for name, result in json.loads(out.split("RESULT", 1)[1]).items()}
        for name in ("act_order", "columns", "tensor_scale"):
            assert results[name]["apart"] < 1e-4
            assert results[name]["together"] < 1e-4
            assert results[name]["fused"] == 4
            assert results[name]["compiled"]
        for name in generating:
            assert results[name]["together"] < 1e-4
            assert all(results[name][way] for way in ("described", "plain", "graph", "again", "fused", "unfused", "without_memory"))
            assert (results[name]["kept"], results[name]["ended"]) == (1, 12)
        assert "o_proj (int4_g32) cannot be shared out" in results["row_act_order"]["error"]
        assert "nested scales" in results["nested"]["error"]
