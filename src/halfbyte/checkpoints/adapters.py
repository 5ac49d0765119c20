"""Open a model folder: describe its tensors and choose the adapter that reads them.

The adapter follows from the `quantization_config` of config.json, or a file next to it: hf_quant_config.json of modelopt,
quantize_config.json of early GPTQ files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfbyte.arguments import check_sizes
from halfbyte.checkpoints.autoround import AutoRound
from halfbyte.checkpoints.awq import Awq
from halfbyte.checkpoints.bitsandbytes import BitsAndBytes
from halfbyte.checkpoints.compressed_tensors import CompressedTensors
from halfbyte.checkpoints.fp4 import GptOss, ModelOpt, Quark
from halfbyte.checkpoints.fp8 import CompressedFp8, Fp8
from halfbyte.checkpoints.gptq import Gptq
from halfbyte.checkpoints.int8 import CompressedInt8
from halfbyte.checkpoints.layer import Adapter, Expanded, StoredLayer
from halfbyte.checkpoints.safetensors_files import TensorInfo, read_overlay
from halfbyte.errors import CheckpointError, InvalidArgument, Unsupported
from halfbyte.tensors import QuantTensor

#: `quant_method`, and its `format` where that has an adapter of its own -> adapter.
ADAPTERS: dict[str, type[Adapter]] = {
    "gptq": Gptq,
    "auto-round": AutoRound,
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "compressed-tensors int-quantized": CompressedInt8,
    "modelopt": ModelOpt,
    "quark": Quark,
    "mxfp4": GptOss,
}

#: The same of files whose codes no weight format has.
EXPANDED: dict[str, type[Expanded]] = {"fp8": Fp8, "compressed-tensors float-quantized": CompressedFp8}

#: The `quant_method` of folders that halfbyte wrote, which need no adapter.
OWN = "halfbyte"

#: The shape of the empty tensors that such a folder holds under the plain names of its weights (hf/quantizer.py).
STOP = (0,)
#: The name of one more, for who opens the folder without halfbyte.
NOTICE = "written_by_halfbyte: import halfbyte.hf before you load this folder"


@dataclass(frozen=True)
class Checkpoint:
    """The files of a model folder, checked and not loaded.

    quantized  whether they say that weights are quantized
    adapter    what reads the quantized layers; None for 16-bit weights and for halfbyte's own
    overlay    whether the files hold tensors that the index does not place there; they are not in `infos`
    """

    folder: Path
    infos: dict[str, TensorInfo]
    quantized: bool
    adapter: Adapter | None
    overlay: bool = False


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the configuration and every header. Raises `CheckpointError` for damage, `Unsupported` for what no adapter reads."""
    config = read_quantization(folder)
    own = config is not None and config["quant_method"] == OWN
    adapter = None if config is None or own else (_expanded(config)[1] or make_adapter)(config)
    tensors, overlay = read_overlay(folder)
    infos = {name: info for name, info in tensors.items() if not (own and info.shape == STOP)}
    quantized = config is not None and not (own and not config.get("modules"))  # one of halfbyte may be about the cache alone
    return Checkpoint(folder, infos, quantized, adapter, overlay)


def make_adapter(config: Mapping[str, Any]) -> Adapter:
    """The adapter of a quantization_config. Raises `Unsupported` for a method, or an option of it, without support."""
    method, (name, expansion) = config["quant_method"], _expanded(config)
    if expansion is not None:
        raise Unsupported(
            f"no weight format has the codes of {name!r}; round the folder to one: halfbyte.hf.load(folder, weights='int8_g128')"
        )
    if not isinstance(method, str) or method not in ADAPTERS:
        raise Unsupported(
            f"weights quantized as {method!r}; halfbyte reads {', '.join(ADAPTERS | EXPANDED)}, 16-bit weights and its own format"
        )
    return ADAPTERS.get(f"{method} {config.get('format')}", ADAPTERS[method])(config)


def _expanded(config: Mapping[str, Any]) -> tuple[str, type[Expanded] | None]:
    """The entry of `EXPANDED` that reads a configuration, under its name; None if there is none."""
    names = (f"{config['quant_method']}", f"{config['quant_method']} {config.get('format')}")
    return next(((name, EXPANDED[name]) for name in names if name in EXPANDED), ("", None))


def weight_from_tensors(
    quantization_config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    out_features: int,
    in_features: int,
    name: str = "layer",
) -> QuantTensor:
    """The weight of one linear layer of a checkpoint that the caller has read, code for code, on the CPU.

    quantization_config  of config.json, with its `quant_method`: every kind that loads from a folder
    tensors              by their names below the layer ("qweight", "scales", ...), on any device; not kept. For a shard, with the
                         sizes of the shard
    name                 of the layer, for errors

    Raises `Unsupported` for unsupported kinds, `CheckpointError` for tensors that do not fit the sizes or the configuration.
    """
    check_sizes(out_features=out_features, in_features=in_features)
    if "quant_method" not in quantization_config:
        raise CheckpointError("quantization_config has no quant_method")
    for part, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            raise InvalidArgument(f"tensors[{part!r}] is a {type(t).__name__}; expected a tensor")
    by_name = {f"{name}.{part}": t for part, t in tensors.items()}
    return make_adapter(quantization_config).convert(StoredLayer(name, out_features, in_features, by_name))


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
        return _read_beside(folder)
    if not isinstance(quantization, dict) or not isinstance(quantization.get("quant_method"), str):
        raise CheckpointError(f"{file}: quantization_config has no quant_method")
    return quantization


def _read_beside(folder: Path) -> dict[str, Any] | None:
    """The quantization described by a file next to a config.json that does not mention it."""
    for name, method in (("hf_quant_config.json", "modelopt"), ("quantize_config.json", "gptq")):
        content = _read_json(folder / name)
        if method == "modelopt" and isinstance(content, dict):
            content = content.get("quantization")
        if isinstance(content, dict):
            return {"quant_method": method, **content}
        if content is not None or (folder / name).exists():
            raise CheckpointError(f"{folder / name}: it does not describe a quantization")
    return None


def _read_json(file: Path) -> Any:
    """What a JSON file holds; None when there is no such file."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); download it again") from error
