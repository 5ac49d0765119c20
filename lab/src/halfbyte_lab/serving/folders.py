"""Folders of known sizes for vLLM to load: the configuration alone, for which vLLM makes 16-bit weights, or files of packed ones.

Packed weights have random codes, other ones in each layer: constant codes, which vLLM would make, are read faster than real ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from halfbyte import quantize
from halfbyte.errors import Unsupported
from halfbyte.formats import weight_format
from halfbyte.hf.mixtures import layout
from halfbyte.hf.weights import Target, find_lm_head, select
from halfbyte_lab.serving.modes import PLAIN, Mode

#: Deviation of weights, as models are initialized, and the group of foreign formats.
_SCALE, _GROUP = 0.02, 128
_Parts = dict[str, torch.Tensor]
#: `quantization_config` of foreign formats.
_CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"bits": 4, "group_size": _GROUP, "desc_act": False, "sym": True, "lm_head": False, "checkpoint_format": "gptq"},
    "awq": {"bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm"},
}


def write(sizes: PretrainedConfig, mode: Mode, folder: Path, layers: int) -> Path:
    """The folder, written unless it is there; `layers` in place of the model's."""
    path = folder / f"{sizes.model_type}-{sizes.hidden_size}-{mode.weights}-{mode.lm_head}-{layers}"
    if (path / "config.json").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    config = deepcopy(sizes)
    config.num_hidden_layers, kinds = layers, getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = kinds[:layers]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    if mode.weights != PLAIN:
        config.quantization_config = _write_packed(model, mode, path)
        torch.cuda.empty_cache()  # the engine has a process of its own, and counts what is free
    (path / "config.json").write_text(config.to_json_string(use_diff=False))
    return path


def _write_packed(model: nn.Module, mode: Mode, path: Path) -> dict[str, Any]:
    """Files of all parameters; returns the `quantization_config` that they go with."""
    targets = select(model, ())
    heads = find_lm_head(model, weight_format(mode.lm_head)) if mode.lm_head else {}
    formats = dict.fromkeys(targets, mode.weights) | dict.fromkeys(heads, mode.lm_head)
    where: dict[str, str] = {}
    for name, parts in _files(model, targets | heads, formats):
        file = f"{name}.safetensors"
        save_file({key: t.clone(memory_format=torch.contiguous_format) for key, t in parts.items()}, path / file, {"format": "pt"})
        where.update(dict.fromkeys(parts, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    if mode.own_weights:
        return {"quant_method": "halfbyte", "version": 1, "modules": formats}
    return {"quant_method": mode.weights, **_CONFIGS[mode.weights]}


def _files(model: nn.Module, targets: dict[str, Target], formats: dict[str, str]) -> Iterator[tuple[str, _Parts]]:
    """Name of a file and its tensors: of each weight in its format, and of the other parameters of each module."""
    rng = torch.Generator().manual_seed(0)
    matrices: dict[tuple[int, int, str], _Parts] = {}
    for n, (name, target) in enumerate(targets.items()):
        key = (target.shape[-2], target.shape[-1], formats[name])
        if key not in matrices:
            matrices[key] = _FOREIGN.get(key[2], _own_matrix)(*key, rng)
        yield name, (_foreign_parts if key[2] in _FOREIGN else _own_parts)(name, target, key[2], matrices[key], n)
    of_weights = {key for name in targets for key in (f"{name}.weight", f"{name}.bias", name, f"{name}_bias")}
    for name, module in model.named_modules():
        parameters = {key: p for key, p in module.named_parameters(name, recurse=False) if key not in of_weights}
        if parameters:
            yield f"{name} in 16 bits", {key: _in_16_bits(p, rng) for key, p in parameters.items()}


def _in_16_bits(parameter: nn.Parameter, rng: torch.Generator) -> torch.Tensor:
    """Norms of ones, and random rows of tables, an eighth of them drawn."""
    if parameter.dim() == 1:
        return torch.ones(parameter.shape, dtype=torch.bfloat16)
    rows, columns = parameter.shape[0], parameter[0].numel()
    eighth = torch.randn(-(-rows // 8), columns, generator=rng).mul_(_SCALE).to(torch.bfloat16)
    return eighth.repeat(8, 1)[:rows].view(parameter.shape)


def _own_matrix(rows: int, columns: int, fmt: str, rng: torch.Generator) -> _Parts:
    """The parts of a random weight [rows, columns]."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.randn(rows, columns, generator=rng).mul_(_SCALE).to(device, torch.bfloat16)
    return {name: t.cpu() for name, t in quantize(weight, fmt).parts().items()}


def _own_parts(name: str, target: Target, fmt: str, matrix: _Parts, n: int) -> _Parts:
    """What `halfbyte quantize` writes for the weight with number `n`: codes of each layer and expert begin with another row."""
    experts = target.shape[0] if len(target.shape) == 3 else 1
    stacks = {key: torch.stack([t.roll(n + e, 0) if key == "codes" else t for e in range(experts)]) for key, t in matrix.items()}
    parts = stacks if len(target.shape) == 3 else {key: t[0] for key, t in stacks.items()}
    bias = target.empty(weight_format(fmt)).bias
    biases = {} if bias is None else {f"{name}.bias": torch.zeros(bias.shape, dtype=torch.bfloat16)}
    return {f"{name}.weight_{key}": t for key, t in parts.items()} | biases


def _foreign_parts(name: str, target: Target, fmt: str, matrix: _Parts, n: int) -> _Parts:
    """A layer as its publishers write it; a mixture has one for every expert, gate and up apart."""
    if target.projection and layout(target.owner).is_transposed:
        raise Unsupported(f"{name}: nobody writes these experts in {fmt}; take a format of halfbyte, or bf16")
    mixture, _, projection = name.rpartition(".")
    shards = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
    bias = getattr(target.owner, "bias", None)
    parts: _Parts = {} if bias is None else {f"{name}.bias": torch.zeros(bias.shape, dtype=torch.bfloat16)}
    for expert in range(target.shape[0] if target.projection else 1):
        for i, shard in enumerate(shards):
            layer = f"{mixture}.{expert}.{shard}" if target.projection else name
            own = {key: t if t.dim() == 1 else t.chunk(len(shards), -1)[i] for key, t in matrix.items()}  # rows are last
            parts |= {f"{layer}.{key}": t.roll(n + expert, 0) if key == "qweight" else t for key, t in own.items()}
    return parts


def _codes(rows: int, columns: int, rng: torch.Generator) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (rows, columns), dtype=torch.int32, generator=rng)


def _scales(rows: int, columns: int) -> torch.Tensor:
    """Scales [groups, rows] with which random codes of 4 bits deviate as weights do."""
    return torch.full((columns // _GROUP, rows), _SCALE / 4.6, dtype=torch.float16)


def _gptq_parts(rows: int, columns: int, fmt: str, rng: torch.Generator) -> _Parts:
    """Symmetric, eight codes along K a word."""
    return {
        "qweight": _codes(columns // 8, rows, rng),
        "qzeros": torch.full((columns // _GROUP, rows // 8), 0x77777777, dtype=torch.int32),
        "scales": _scales(rows, columns),
        "g_idx": torch.arange(columns, dtype=torch.int32) // _GROUP,
    }


def _awq_parts(rows: int, columns: int, fmt: str, rng: torch.Generator) -> _Parts:
    """With zero points, eight codes along N a word."""
    return {
        "qweight": _codes(columns, rows // 8, rng),
        "qzeros": torch.full((columns // _GROUP, rows // 8), 0x77777777, dtype=torch.int32),
        "scales": _scales(rows, columns),
    }


_FOREIGN: dict[str, Callable[[int, int, str, torch.Generator], _Parts]] = {"gptq": _gptq_parts, "awq": _awq_parts}
