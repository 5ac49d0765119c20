"""Layers as other libraries write them, drawn at random: tensors, configuration, and the values by the independent decoders.

The packers here are written from the descriptions of the layouts, for numbers one a byte; nothing of the library is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import decoders


@dataclass
class Drawn:
    """`config`: the quantization_config; `tensors` by their names below the layer; `values` float32 [N, K]."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    values: np.ndarray


def pack(fields: np.ndarray, axis: int, bits: int = 4) -> torch.Tensor:
    """Numbers one an element -> int32 words along `axis`, the first in the lowest bits; zeros where the last word is not full."""
    last = np.moveaxis(fields, axis, -1).astype(np.uint64)
    per = 32 // bits
    last = np.concatenate([last, np.zeros((*last.shape[:-1], -last.shape[-1] % per), np.uint64)], -1)
    last = last.reshape(*last.shape[:-1], -1, per)
    words = sum(last[..., j] << np.uint64(bits * j) for j in range(per))
    return torch.from_numpy(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis).copy())


def draw_scales(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(rng.uniform(0.005, 0.05, shape)).to(dtype)


def groups_of(rng: np.random.Generator, k: int, group: int, act_order: bool) -> np.ndarray:
    g_idx = np.arange(k) // group
    return rng.permutation(g_idx) if act_order else g_idx


def gptq(
    n: int,
    k: int,
    seed: int = 0,
    *,
    group: int = 32,
    v1: bool = True,
    sym: bool = False,
    act_order: bool = False,
    label: str | None = None,
    dtype: torch.dtype = torch.float16,
    low: int = 1,
    packing: str | None = None,
) -> Drawn:
    """4 bits. `packing`: AutoRound's packing_format; its symmetric scales have either sign.

    `label`: what checkpoint_format says, if it lies. `low`: the least zero point; 0 needs v2, or a writer by words."""
    rng, size = np.random.default_rng(seed), k if group == -1 else group
    codes, scales = rng.integers(0, 16, (k, n)), draw_scales(rng, (k // size, n), dtype)
    if packing and sym:
        scales = scales * torch.from_numpy(rng.choice([-1, 1], scales.shape)).to(dtype)
    zeros = np.full((k // size, n), 8) if sym else rng.integers(low, 16, (k // size, n))
    g_idx = groups_of(rng, k, size, act_order)
    stored = pack(zeros, 1).numpy().view(np.uint32) - np.uint32(0x11111111 if v1 else 0)
    qzeros = torch.from_numpy(stored.view(np.int32))
    tensors = {"qweight": pack(codes, 0), "qzeros": qzeros, "scales": scales, "g_idx": torch.from_numpy(g_idx.astype(np.int32))}
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "sym": sym,
        "desc_act": act_order,
        "checkpoint_format": label or ("gptq" if v1 else "gptq_v2"),
        "meta": {"quantizer": ["gptqmodel:5.0.0"]} if low == 0 else {},
    }
    if packing:
        config = {"quant_method": "auto-round", "bits": 4, "group_size": group, "sym": sym, "packing_format": packing}
    values = decoders.gptq(tensors["qweight"].numpy(), qzeros.numpy(), scales.float().numpy(), g_idx, v1)
    return Drawn(config, tensors, values)


def awq(n: int, k: int, seed: int = 0, *, group: int = 32, dtype: torch.dtype = torch.float16) -> Drawn:
    rng, size = np.random.default_rng(seed), k if group == -1 else group
    order = np.arange(n).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
    codes, zeros = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (k // size, n))
    scales = draw_scales(rng, (k // size, n), dtype)
    tensors = {"qweight": pack(codes[:, order], 1), "qzeros": pack(zeros[:, order], 1), "scales": scales}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    values = decoders.awq_gemm(tensors["qweight"].numpy(), tensors["qzeros"].numpy(), scales.float().numpy(), size)
    return Drawn(config, tensors, values)


def bnb(
    n: int,
    k: int,
    seed: int = 0,
    *,
    kind: str = "nf4",
    nested: bool = False,
    block: int = 64,
    second: int = 256,
    used: bool = False,
) -> Drawn:
    """`used`: saved after a forward on a CPU, which leaves the scales in bf16 and transposed."""
    rng, blocks = np.random.default_rng(seed), -(-n * k // block)
    table = decoders.NF4 if kind == "nf4" else decoders.BNB_FP4
    weight = rng.integers(0, 256, (n * k // 2, 1)).astype(np.uint8)
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
    tensors = {"weight": torch.from_numpy(weight), "weight.quant_map": torch.from_numpy(table.copy())}
    if nested:
        code = dynamic_map()
        absmax = rng.integers(0, 256, blocks).astype(np.uint8)
        outer, offset = rng.uniform(0.01, 0.02, -(-blocks // second)).astype(np.float32), float(np.float32(0.03))
        tensors |= {"weight.absmax": torch.from_numpy(absmax), "weight.nested_absmax": torch.from_numpy(outer)}
        tensors |= {"weight.nested_quant_map": torch.from_numpy(code)}
        state |= {"nested_blocksize": second, "nested_dtype": "float32", "nested_offset": offset}
        values = decoders.bnb_4bit(weight, absmax, (n, k), block, table, (code, outer, offset, second))
    else:
        scales = torch.from_numpy(rng.uniform(0.01, 0.1, blocks).astype(np.float32))
        tensors |= {"weight.absmax": scales.to(torch.bfloat16).view(n, -1).T.contiguous() if used else scales}
        absmax = scales.to(torch.bfloat16).float().numpy() if used else scales.numpy()
        values = decoders.bnb_4bit(weight, absmax, (n, k), block, table)
    raw = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.from_numpy(raw)
    config = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    return Drawn({"quant_method": "bitsandbytes", **config}, tensors, values)


def dynamic_map() -> np.ndarray:
    """bitsandbytes' signed dynamic map, from its description: seven decades, the i-th with 2^i numbers of each sign; 0 and 1."""
    positive = []
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        positive += ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 6)).tolist()
    return np.array(sorted([*positive, *(-p for p in positive), 0.0, 1.0]), np.float32)


def compressed(
    n: int,
    k: int,
    seed: int = 0,
    *,
    group: int = 32,
    sym: bool = True,
    act_order: bool = False,
    zeros: str = "packed",
    dtype: torch.dtype = torch.bfloat16,
) -> Drawn:
    rng, size = np.random.default_rng(seed), k if group == -1 else group
    codes, scales = rng.integers(0, 16, (n, k)), draw_scales(rng, (n, k // size), dtype)
    points, g_idx = rng.integers(0, 16, (n, k // size)), groups_of(rng, k, size, act_order)
    tensors = {"weight_packed": pack(codes, 1), "weight_scale": scales, "weight_shape": torch.tensor([n, k])}
    if not sym:
        packed = zeros == "packed"
        tensors["weight_zero_point"] = pack(points, 0) if packed else torch.from_numpy((points - 8).astype(np.int8))
    if act_order:
        tensors["weight_g_idx"] = torch.from_numpy(g_idx.astype(np.int32))
    weights = {"num_bits": 4, "type": "int", "group_size": group, "strategy": "group" if group > 0 else "channel", "symmetric": sym}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    zp = None if sym else pack(points, 0).numpy()
    values = decoders.ct_pack_quantized(tensors["weight_packed"].numpy(), scales.float().numpy(), size, zp, g_idx)
    return Drawn(config, tensors, values[:n])


def compressed_int8(n: int, k: int, seed: int = 0, *, group: int = -1, dtype: torch.dtype = torch.bfloat16) -> Drawn:
    rng, size = np.random.default_rng(seed), k if group == -1 else group
    codes, scales = rng.integers(-128, 128, (n, k)).astype(np.int8), draw_scales(rng, (n, k // size), dtype)
    weights = {"num_bits": 8, "type": "int", "strategy": "channel" if group == -1 else "group", "symmetric": True}
    weights |= {} if group == -1 else {"group_size": group}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"]}
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    parts = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": "int-quantized"}
    config["config_groups"] = {"group_0": parts}
    values = codes.astype(np.float32) * np.repeat(scales.float().numpy(), size, 1)
    return Drawn(config, {"weight": torch.from_numpy(codes), "weight_scale": scales}, values)


def bytes_of(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 256, shape).astype(np.uint8)


def mxfp4(n: int, k: int, seed: int = 0, *, writer: str = "quark") -> Drawn:
    rng = np.random.default_rng(seed)
    codes, scales = bytes_of(rng, n, k // 2), rng.integers(110, 125, (n, k // 32)).astype(np.uint8)
    name = "weight" if writer == "quark" else "weight_packed"
    tensors = {name: torch.from_numpy(codes), "weight_scale": torch.from_numpy(scales)}
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    configs = {
        "quark": {"quant_method": "quark", "global_quant_config": {"weight": weight}, "exclude": ["lm_head"]},
        "compressed-tensors": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    }
    return Drawn(configs[writer], tensors, decoders.mxfp4(codes, scales))


def nvfp4(n: int, k: int, seed: int = 0, *, writer: str = "modelopt", factor: float = 0.003) -> Drawn:
    rng = np.random.default_rng(seed)
    codes, scales = bytes_of(rng, n, k // 2), rng.integers(1, 0x7F, (n, k // 16)).astype(np.uint8)
    stored = torch.from_numpy(scales).view(torch.float8_e4m3fn)
    if writer == "modelopt":
        number = torch.tensor(factor, dtype=torch.float32)
        tensors = {"weight": torch.from_numpy(codes), "weight_scale": stored, "weight_scale_2": number}
        tensors["input_scale"] = torch.tensor(0.5)
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
        return Drawn(config, tensors, decoders.nvfp4_modelopt(codes, scales, number.numpy()))
    number = torch.tensor([1 / factor], dtype=torch.float32)
    tensors = {"weight_packed": torch.from_numpy(codes), "weight_scale": stored, "weight_global_scale": number}
    tensors["input_global_scale"] = torch.tensor([100.0])
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    return Drawn(config, tensors, decoders.nvfp4_ct(codes, scales, number.numpy()))


#: One of each kind and option, for a layer [N, K] that all fit: name -> (drawing function, options).
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq v1": (gptq, {}),
    "gptq v1, zeros of 0, by words": (gptq, {"low": 0}),
    "gptq v2": (gptq, {"v1": False, "low": 0}),
    "gptq v2 act-order": (gptq, {"v1": False, "act_order": True}),
    "gptq v1 act-order, group 64": (gptq, {"act_order": True, "group": 64}),
    "gptq v1 sym": (gptq, {"sym": True}),
    "gptq v2 sym": (gptq, {"sym": True, "v1": False}),
    "gptq v2 sym labelled v1": (gptq, {"sym": True, "v1": False, "label": "gptq"}),
    "gptq v1 sym labelled v2, act-order": (gptq, {"sym": True, "label": "gptq_v2", "act_order": True}),
    "gptq column": (gptq, {"group": -1}),
    "gptq column, act-order": (gptq, {"group": -1, "act_order": True}),
    "gptq group 64, bf16": (gptq, {"group": 64, "dtype": torch.bfloat16}),
    "gptq fp32 scales": (gptq, {"group": 64, "dtype": torch.float32}),
    "auto-round sym": (gptq, {"sym": True, "packing": "auto_round:auto_gptq"}),
    "auto-round": (gptq, {"v1": False, "low": 0, "packing": "auto_round"}),
    "awq": (awq, {}),
    "awq group 64": (awq, {"group": 64}),
    "awq column": (awq, {"group": -1}),
    "bnb nf4": (bnb, {}),
    "bnb nf4 nested": (bnb, {"nested": True}),
    "bnb nf4 nested, other blocks": (bnb, {"nested": True, "block": 128, "second": 512}),
    "bnb nf4, blocks of 256": (bnb, {"block": 256}),
    "bnb nf4, saved after a forward on a CPU": (bnb, {"used": True}),
    "bnb fp4": (bnb, {"kind": "fp4"}),
    "bnb fp4 nested": (bnb, {"kind": "fp4", "nested": True}),
    "ct int4": (compressed, {}),
    "ct int4 column, fp32": (compressed, {"group": -1, "dtype": torch.float32}),
    "ct int4 asym": (compressed, {"sym": False, "group": 64}),
    "ct int4 asym, int8 zeros": (compressed, {"sym": False, "zeros": "int8"}),
    "ct int4 g_idx": (compressed, {"act_order": True}),
    "ct int4 asym g_idx": (compressed, {"act_order": True, "sym": False}),
    "ct int8": (compressed_int8, {}),
    "ct int8 group 128": (compressed_int8, {"group": 128, "dtype": torch.float16}),
    "ct mxfp4": (mxfp4, {"writer": "compressed-tensors"}),
    "ct nvfp4": (nvfp4, {"writer": "compressed-tensors"}),
    "modelopt nvfp4": (nvfp4, {}),
    "quark mxfp4": (mxfp4, {}),
}


def draw(kind: str, n: int, k: int, seed: int = 0) -> Drawn:
    """A layer of this entry of KINDS."""
    make, options = KINDS[kind]
    drawn: Drawn = make(n, k, seed, **options)
    return drawn


# ---------------------------------------------------------------------------------------------------------------- refusals


def put(name: str, tensor: torch.Tensor) -> Callable[[Drawn], Any]:
    return lambda d: d.tensors.update({name: tensor})


def fill(name: str, value: float) -> Callable[[Drawn], Any]:
    return lambda d: d.tensors[name].view(-1)[:4][-1:].fill_(value)


def say(**entries: Any) -> Callable[[Drawn], Any]:
    return lambda d: d.config.update(entries)


def drop(name: str) -> Callable[[Drawn], Any]:
    return lambda d: d.tensors.pop(name)


def restate(**entries: Any) -> Callable[[Drawn], Any]:
    """Other entries in the state of bitsandbytes."""

    def change(drawn: Drawn) -> None:
        name = next(n for n in drawn.tensors if "quant_state" in n)
        state = json.loads(bytes(drawn.tensors[name].tolist()))
        drawn.tensors[name] = torch.tensor(list(json.dumps({**state, **entries}).encode()), dtype=torch.uint8)

    return change


def modelopt_block(value: float) -> Callable[[Drawn], Any]:
    def change(drawn: Drawn) -> None:
        drawn.tensors["weight_scale"].view(torch.uint8)[0, 1] = value

    return change


#: (kind, its options, a change to the layer, what the error says): see `test_refusals_name_the_tensor`.
REFUSED: list[tuple[Callable[..., Drawn], dict[str, Any], Callable[[Drawn], Any], str]] = [
    (gptq, {}, drop("qzeros"), r"a\.b\.qzeros is missing"),
    (gptq, {"act_order": True}, drop("g_idx"), r"a\.b\.g_idx is missing"),
    (gptq, {}, put("qweight", torch.zeros(15, 8).int()), r"a\.b\.qweight is int32 \[15, 8\]; expected int32 \[16, 8\]"),
    (gptq, {}, put("qweight", torch.zeros(16, 8)), r"a\.b\.qweight is float32"),
    (gptq, {}, put("qzeros", torch.zeros(4, 2).int()), r"a\.b\.qzeros is int32 \[4, 2\]; expected int32 \[4, 1\]"),
    (gptq, {}, put("scales", torch.ones(4, 8).double()), r"a\.b\.scales is float64"),
    (gptq, {}, put("scales", torch.ones(32)), r"a\.b\.scales has shape \[32\]; expected 2 axes"),
    (gptq, {}, put("scales", torch.ones(3, 8).half()), r"a\.b\.scales has 3 groups"),
    (gptq, {}, fill("scales", torch.nan), r"a\.b\.scales holds 1 scales of 32 that are not finite"),
    (gptq, {}, fill("scales", torch.inf), r"a\.b\.scales holds 1"),
    (gptq, {}, fill("g_idx", 4), r"a\.b\.g_idx points outside of the 4 groups: 0 to 4"),
    (gptq, {}, fill("g_idx", -1), r"a\.b\.g_idx points outside"),
    (gptq, {}, fill("g_idx", 2), r"a\.b\.g_idx makes groups of 31 to 33 columns"),
    (gptq, {"sym": True}, fill("qzeros", 0x77777776), r"a\.b\.qzeros is neither 7 \(v1\) nor 8 \(v2\)"),
    (gptq, {}, say(bits=3), "bits=3"),
    (gptq, {}, put("qweight", torch.zeros(8, 8).int()), r"a\.b\.qweight holds 2-bit codes; halfbyte reads 4 and 8 bits"),
    (gptq, {}, put("qweight", torch.zeros(12, 8).int()), r"a\.b\.qweight holds 3-bit codes; halfbyte reads 4 and 8 bits"),
    (
        gptq,
        {"packing": "auto_round", "v1": False},
        say(packing_format="auto_round:auto_awq"),
        "packing_format='auto_round:auto_awq'",
    ),
    (gptq, {}, say(bits="4"), "bits='4'"),
    (gptq, {}, say(group_size=64), r"a\.b\.scales has 4 groups; the configuration says groups of 64"),
    (gptq, {}, say(group_size=0), "group_size=0"),
    (gptq, {}, say(group_size=1), r"a\.b\.scales has 4 groups; the configuration says groups of 1"),
    (gptq, {}, say(group_size=[]), "group_size"),
    (gptq, {}, say(sym="no"), "sym"),
    (gptq, {}, say(checkpoint_format="marlin"), "checkpoint_format='marlin'"),
    (gptq, {"group": 16}, say(), "groups of 16"),
    (gptq, {}, say(dynamic={"a" * 1001: {}}), "at most 4 repeats"),
    (gptq, {}, say(dynamic={"a*b*c*d*e*": {}}), "at most 4 repeats"),
    (awq, {}, say(bits=8), "bits=8"),
    (awq, {}, say(version="gemv"), "'gemv'"),
    (awq, {}, say(backend="llm-awq"), "backend"),
    (awq, {}, say(zero_point=False), "zero_point"),
    (awq, {}, say(group_size=48), r"a\.b\.scales cannot have groups of 48"),
    (awq, {}, drop("scales"), r"a\.b\.scales is missing"),
    (awq, {}, fill("scales", torch.nan), r"a\.b\.scales holds 1"),
    (awq, {}, put("qzeros", torch.zeros(2, 1).int()), r"a\.b\.qzeros is int32 \[2, 1\]"),
    (bnb, {}, put("weight.quant_map", torch.arange(16.0)), r"a\.b\.weight\.quant_map is not the table of nf4"),
    (bnb, {}, put("weight", torch.zeros(512, 1)), r"a\.b\.weight is float32 \[512, 1\]"),
    (bnb, {}, put("weight", torch.zeros(511, 1).byte()), r"a\.b\.weight is uint8 \[511, 1\]"),
    (bnb, {}, fill("weight.absmax", torch.nan), r"a\.b\.weight\.absmax holds 1"),
    (bnb, {"used": True}, fill("weight.absmax", torch.inf), r"a\.b\.weight\.absmax holds 1"),
    (bnb, {}, put("weight.absmax", torch.ones(2, 9)), r"a\.b\.weight\.absmax is float32 \[2, 9\]"),
    (bnb, {"nested": True}, fill("weight.nested_absmax", torch.nan), r"a\.b\.weight\.nested_absmax holds 1"),
    (bnb, {}, restate(shape=[16, 64]), r"bitsandbytes__nf4 has the shape \[16, 64\]; the model has \[8, 128\]"),
    (bnb, {}, restate(quant_type="fp4"), r"has the quant_type 'fp4'"),
    (bnb, {}, restate(blocksize=32), r"a\.b\.weight: blocks of 32"),
    (bnb, {}, restate(blocksize=0), "blocks of 0"),
    (bnb, {}, restate(blocksize=2**31), "has blocks of 2147483648 and 256"),
    (bnb, {}, restate(blocksize=1.5), "blocksize"),
    (bnb, {"nested": True}, restate(nested_offset=1e300), "offset"),
    (bnb, {"nested": True}, restate(nested_offset="x"), "nested_offset"),
    (bnb, {}, put("weight.quant_state.bitsandbytes__nf4", torch.zeros(5).byte()), r"bitsandbytes__nf4: its state is damaged"),
    (bnb, {}, drop("weight.quant_state.bitsandbytes__nf4"), r"a\.b: 0 quantization states"),
    (bnb, {}, say(load_in_8bit=True), "load_in_8bit"),
    (compressed, {}, say(format="float-quantized"), "no weight format has the codes of 'compressed-tensors float-quantized'"),
    *(
        (compressed_int8, {"group": g, "dtype": torch.float16}, say(), f"8-bit codes in groups of {g} .*multiples of 128")
        for g in (32, 64)
    ),
    (compressed_int8, {}, put("weight_zero_point", torch.eye(8, 1).to(torch.int8)), r"a\.b\.weight_zero_point is not 0"),
    (compressed_int8, {}, fill("weight_scale", torch.nan), r"a\.b\.weight_scale holds 1 scales of 8 that are not finite"),
    (compressed, {}, say(format=None), "format=None"),
    (compressed, {}, say(transform_config={"config_groups": {"R1": {}}}), "transforms"),
    (compressed, {}, say(sparsity_config={"format": "sparse-24-bitmask"}), "sparse"),
    (compressed, {}, say(config_groups={"g": {"weights": {"num_bits": 8}}}), r"a\.b\.weight_packed holds 4-bit codes"),
    (compressed, {}, say(config_groups={"g": {"weights": {"group_size": 64}}}), r"a\.b\.weight_scale has 4 groups"),
    (compressed, {}, say(config_groups={"g": {"weights": {"group_size": "x"}}}), "group_size"),
    (compressed, {}, put("weight_shape", torch.tensor([8, 64])), r"a\.b\.weight_shape says \[8, 64\]"),
    (compressed, {"act_order": True}, fill("weight_g_idx", 9), r"a\.b\.weight_g_idx points outside"),
    (compressed, {"sym": False, "zeros": "int8"}, fill("weight_zero_point", 8), r"a\.b\.weight_zero_point holds -\d to 8"),
    (compressed, {"sym": False}, put("weight_zero_point", torch.zeros(1, 3).int()), r"a\.b\.weight_zero_point is int32 \[1, 3\]"),
    (compressed, {}, fill("weight_scale", torch.inf), r"a\.b\.weight_scale holds 1"),
    (mxfp4, {}, fill("weight_scale", 255), r"a\.b\.weight_scale holds 1"),
    (mxfp4, {}, put("weight_scale", torch.ones(8, 4)), r"a\.b\.weight_scale is float32"),
    (mxfp4, {}, say(global_quant_config={"weight": {"dtype": "int4"}}), "dtype='int4'"),
    (mxfp4, {}, say(global_quant_config={"weight": {"dtype": "fp4", "group_size": 64}}), "group_size=64; halfbyte reads 32"),
    (nvfp4, {}, modelopt_block(0x7F), r"a\.b\.weight_scale holds 1"),
    (nvfp4, {}, drop("weight_scale_2"), r"a\.b\.weight_scale_2 is missing"),
    (gptq, {"act_order": True}, put("g_idx", torch.zeros(0).int()), r"a\.b\.g_idx is int32 \[0\]; expected int32 or int64 \[128\]"),
    (gptq, {}, say(dynamic={".*": {"bits": 3}}), r"a\.b: a GPTQ checkpoint: bits=3"),
    (gptq, {}, say(dynamic={".*": 3}), r"quantization_config has '\.\*': 3; expected an object"),
    *(
        (gptq, {}, say(dynamic={f"+:{hostile}": {}}), "at most 4 repeats")
        for hostile in ("(a+)+$", "((a*)b)*", "(a|a)*b", ".*" * 5, "a" * 1001)
    ),
    *((gptq, {}, say(dynamic={f"+:{hostile}": {}}), "4,096 choices") for hostile in ("a?" * 30 + "a" * 30, "(?:a|a)" * 30 + "b")),
    (gptq, {}, say(dynamic={"+:(": {}}), r"the pattern '\('"),
    (nvfp4, {}, put("weight_scale_2", torch.tensor(torch.nan)), r"a\.b\.weight_scale_2 holds 1"),
    (nvfp4, {}, put("pre_quant_scale", torch.ones(128)), r"a\.b\.pre_quant_scale"),
    (nvfp4, {}, say(quant_algo="FP8"), "FP8"),
    (
        nvfp4,
        {"writer": "compressed-tensors"},
        put("weight_global_scale", torch.tensor([1e-45])),
        r"a\.b\.weight_global_scale holds 1",
    ),
]
