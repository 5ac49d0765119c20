"""Which adapter reads a folder: by the `quantization_config` of its config.json, or modelopt's hf_quant_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfbyte.checkpoints.awq import Awq
from halfbyte.checkpoints.bitsandbytes import BitsAndBytes
from halfbyte.checkpoints.compressed_tensors import CompressedTensors
from halfbyte.checkpoints.fp4 import GptOss, ModelOpt, Quark
from halfbyte.checkpoints.gptq import Gptq
from halfbyte.checkpoints.layer import Adapter
from halfbyte.errors import CheckpointError, Unsupported

#: `quant_method` -> adapter.
ADAPTERS: dict[str, type[Adapter]] = {
    "gptq": Gptq,
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "modelopt": ModelOpt,
    "quark": Quark,
    "mxfp4": GptOss,
}


def make_adapter(config: Mapping[str, Any]) -> Adapter:
    """The adapter for a quantization_config. Raises `Unsupported` for a method or an option of it that is not read."""
    method = config["quant_method"]
    if method not in ADAPTERS:
        raise Unsupported(
            f"weights quantised as {method!r}; halfbyte reads {', '.join(ADAPTERS)}, 16-bit weights and its own format"
        )
    return ADAPTERS[method](config)


def read_quantization(folder: Path) -> dict[str, Any] | None:
    """The quantization_config of a folder; None for plain weights. Raises `CheckpointError` when there is no usable config.json."""
    file = folder / "config.json"
    config = _read_json(file)
    if config is None:
        raise CheckpointError(f"{folder}: no config.json; pass a folder with a transformers model")
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{file}: it has no model_type; pass a folder with a transformers model")
    quantization = config.get("quantization_config")
    if quantization is None:
        return _read_modelopt(folder / "hf_quant_config.json")
    if not isinstance(quantization, dict) or not isinstance(quantization.get("quant_method"), str):
        raise CheckpointError(f"{file}: quantization_config has no quant_method")
    return quantization


def _read_modelopt(file: Path) -> dict[str, Any] | None:
    """What modelopt writes beside a config.json that says nothing of it."""
    found = _read_json(file)
    if found is None:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("quantization"), dict):
        raise CheckpointError(f"{file}: it has no quantization")
    return {**found["quantization"], "quant_method": "modelopt"}


def _read_json(file: Path) -> Any:
    """What a JSON file holds; None when there is no such file."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); download it again") from error
