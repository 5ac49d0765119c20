"""Calibrated keys of an engine: one file for the model, the transforms of each layer and of a rank's KV heads."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.platforms import current_platform

from halfbyte.cache_plan import ModelSizes
from halfbyte.calibrated_keys import digest_of_folder, read_calibration
from halfbyte.errors import InvalidArgument, Unsupported
from halfbyte.paths import local_folder
from halfbyte.tensors import KeyTransform


def check_calibration(calibration: str, model_config: Any) -> None:
    """Raise `InvalidArgument` for a file that is none, or of a model of other sizes."""
    _transforms(*_key(calibration, model_config), "")


def layer_transform(impl: Any, layer: Any, model_config: Any, index: int, dtype: torch.dtype) -> KeyTransform:
    """The transform of a layer's own KV heads, those of this rank, kept in buffers, which outlast a sleep of level 2.

    Raises `InvalidArgument` for the calibration of another model: of other norms, where its files are on this machine.
    """
    layers = _transforms(*_key(impl.options.calibration, model_config), local_folder(model_config.model))
    if index >= len(layers):
        raise Unsupported(
            f"layer {index}: calibrated keys are of {len(layers)} layers; give the draft model an attention_backend of its own"
        )
    whole = layers[index]
    if whole.shift is not None and (impl.logits_soft_cap is not None or impl.sinks is not None):
        raise Unsupported("this model has a softcap or sinks, which scores of shifted keys do not fit; calibrate this model")
    first = get_tensor_model_parallel_rank() * len(whole.keys) // get_tensor_model_parallel_world_size()
    transform = whole.of_heads(first, impl.num_kv_heads).like(torch.empty(0, dtype=dtype, device=current_platform.device_type))
    for name, t in transform._asdict().items():
        if t is not None:
            layer.register_buffer(f"halfbyte_transform_{name}", t, persistent=False)
    return transform


def _key(calibration: str, model_config: Any) -> tuple[str, int, ModelSizes]:
    from halfbyte.hf.model_support import model_sizes

    try:
        time = os.stat(calibration).st_mtime_ns
    except OSError as error:
        raise InvalidArgument(f"halfbyte option calibration={calibration!r} cannot be read ({error.strerror})") from error
    return calibration, time, model_sizes(model_config.hf_text_config)


@functools.lru_cache(2)
def _transforms(calibration: str, time: int, sizes: ModelSizes, folder: str) -> tuple[KeyTransform, ...]:
    """Those of each layer, read once for all. time: of the file"""
    return read_calibration(calibration).of_model(sizes, digest_of_folder(Path(folder)) if folder else "")
