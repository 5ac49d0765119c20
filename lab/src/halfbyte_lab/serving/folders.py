"""Folders of known sizes for vLLM to load: the configuration alone, for which vLLM makes 16-bit weights, or files of packed ones.

Packed weights have random codes, other ones in each layer: constant codes, which vLLM would make, are read faster than real ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from halfbyte.nn import QuantLinear
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
    rng, first, formats, where = torch.Generator().manual_seed(0), {}, {}, {}

    def save(name: str, parts: _Parts) -> None:
        file = f"{name}.safetensors"
        save_file({key: t.contiguous() for key, t in parts.items()}, path / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(parts, file))

    for n, (name, module) in enumerate(model.named_modules()):
        fmt = mode.lm_head if name == "lm_head" else mode.weights
        if isinstance(module, nn.Linear) and fmt:
            shape = (module.out_features, module.in_features, fmt)
            if shape not in first:
                first[shape] = _FOREIGN.get(fmt, _own_parts)(*shape, rng)
            save(
                name,
                {f"{name}.{part}": t.roll(n, 0) if "codes" in part or part == "qweight" else t for part, t in first[shape].items()},
            )
            formats[name] = fmt
        elif parameters := dict(module.named_parameters(name, recurse=False)):
            save(name, {key: _in_16_bits(p, rng) for key, p in parameters.items()})
    index = {"metadata": {}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    if mode.own_weights:
        return {"quant_method": "halfbyte", "version": 1, "modules": formats}
    return {"quant_method": mode.weights, **_CONFIGS[mode.weights]}


def _in_16_bits(parameter: nn.Parameter, rng: torch.Generator) -> torch.Tensor:
    """Norms of ones, and random rows of tables, an eighth of them drawn."""
    if parameter.dim() == 1:
        return torch.ones(parameter.shape, dtype=torch.bfloat16)
    rows, columns = parameter.shape
    drawn = torch.randn(-(-rows // 8), columns, generator=rng).mul_(_SCALE).to(torch.bfloat16)
    return drawn.repeat(8, 1)[:rows]


def _own_parts(rows: int, columns: int, fmt: str, rng: torch.Generator) -> _Parts:
    """What `halfbyte quantize` writes for random weights [rows, columns]."""
    layer = nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)
    layer.weight.data = torch.randn(rows, columns, generator=rng).mul_(_SCALE).to(torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {name: t.cpu() for name, t in QuantLinear.from_linear(layer.to(device), fmt).state_dict().items()}


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
