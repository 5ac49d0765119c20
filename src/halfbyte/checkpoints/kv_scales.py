"""Scales of keys and values that a checkpoint stores for a cache of 8 bits with one scale a layer and side.

compressed-tensors, vLLM      self_attn.k_scale, self_attn.v_scale; older files self_attn.k_proj.output_scale
modelopt, FP8                 self_attn.k_proj.k_scale, self_attn.v_proj.v_scale
Quark                         self_attn.k_proj.output_scale, self_attn.v_proj.output_scale

x = scale * code, of an E4M3 or INT8 code. `output_scale` is a cache's only where the configuration describes one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from halfbyte.checkpoints.safetensors_files import TensorInfo, read_tensor
from halfbyte.formats import MIN_SCALE

#: A layer's number, then the side.
_OWN = re.compile(r"\.(\d+)\.(?:\w+\.)*?([kv])_scale$")
_OUTPUT = re.compile(r"\.(\d+)\.(?:\w+\.)*?([kv])_proj\.output_scale$")
#: The largest scale that a cache stores, in fp16.
_MOST = 65504.0


def cache_format(config: Mapping[str, Any]) -> str | None:
    """The KV format whose scales a quantization_config describes; None where it describes no such cache."""
    scheme = config.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        kinds = {"float": "fp8_tensor", "int": "int8_tensor"}
        whole = scheme.get("num_bits") == 8 and scheme.get("strategy", "tensor") == "tensor" and scheme.get("symmetric", True)
        return kinds.get(str(scheme.get("type"))) if whole and not scheme.get("dynamic") else None
    for name in ("kv_cache_quant_algo", "static_kv_dtype", "kv_cache_dtype"):  # modelopt, AutoRound
        kind = str(config.get(name, "")).lower()
        if kind.startswith(("fp8", "float8_e4m3", "int8")):
            return "int8_tensor" if kind.startswith("int8") else "fp8_tensor"
    return "fp8_tensor" if config.get("kv_cache_group") else None  # Quark


def cache_scales(config: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> tuple[str, dict[tuple[int, str], str]]:
    """The KV format, and by layer and side ("k", "v") the name of its scale; scales that are no single number are left out."""
    fmt = cache_format(config)
    patterns = (_OWN,) if fmt is None else (_OWN, _OUTPUT)
    names: dict[tuple[int, str], str] = {}
    for pattern in patterns:
        for name, info in infos.items():
            if (place := pattern.search(name)) and info.dtype.is_floating_point and all(size == 1 for size in info.shape):
                names.setdefault((int(place[1]), place[2]), name)
    return fmt or "fp8_tensor", names


def read_scales(names: Mapping[tuple[int, str], str], infos: Mapping[str, TensorInfo], layers: int) -> list[list[float | None]]:
    """The scale of keys and of values of each layer; None where there is none that a cache can store."""
    scales: list[list[float | None]] = [[None, None] for _ in range(layers)]
    for (layer, side), name in names.items():
        value = float(read_tensor(infos[name]).float().item())
        if layer < layers and MIN_SCALE <= value <= _MOST:
            scales[layer]["kv".index(side)] = value
    return scales
