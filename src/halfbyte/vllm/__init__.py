"""halfbyte inside vLLM: the KV cache in packed pages, and quantized linear layers.

vLLM calls `register`, the entry point of its group vllm.general_plugins, in each of its processes. Then
`--attention-backend HALFBYTE_INT8__INT8`, or from vLLM 0.33 on `--kv-cache-dtype halfbyte_int8__int8`, names the formats of
keys and values, and `--quantization halfbyte` loads folders of `halfbyte quantize`. Without these, vLLM runs as if halfbyte were
not there.
"""

from __future__ import annotations

import copyreg
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from halfbyte.errors import warn_once


def register() -> None:
    """Register the attention backends and the quantization method with vLLM. May be called several times in one process.

    Versions of vLLM that the plugin does not support are left alone, with one warning.
    """
    import vllm

    from halfbyte.vllm.names import backend_names, cache_dtype, refusal

    if reason := refusal(vllm.__version__):
        warn_once(reason)
        return
    from vllm.config import cache
    from vllm.model_executor.layers import quantization
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from halfbyte.checkpoints.adapters import OWN
    from halfbyte.vllm.registered import Registered
    from halfbyte.vllm.selection import REPLACED

    with _quiet(logging.getLogger(register_backend.__module__)):  # a line for each pair of formats, in each process
        for name in backend_names():
            if name not in AttentionBackendEnum.__members__:
                register_backend(name, f"halfbyte.vllm.selection.{name}")
    if hasattr(cache, "register_kv_cache_dtype"):  # from 0.33 on
        for name in map(cache_dtype, backend_names()):
            if name not in cache.KV_CACHE_DTYPES:
                cache.register_kv_cache_dtype(name)(PackedPages)
    copyreg.pickle(AttentionBackendEnum, _reduced)
    for name in REPLACED:
        register_backend(AttentionBackendEnum[name], f"halfbyte.vllm.selection.{name}")
    if OWN not in quantization.QUANTIZATION_METHODS:
        quantization.register_quantization_config(OWN)(Registered)


class PackedPages:
    """What vLLM asks about a cache dtype."""

    @staticmethod
    def torch_dtype() -> Any:
        import torch

        return torch.uint8

    @staticmethod
    def quant_mode() -> Any:
        """None of vLLM's: it has no scales to load, and no say in the size of a page."""
        from vllm.v1.kv_cache_interface import KVQuantMode

        return KVQuantMode.NONE


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Warnings and errors only."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _reduced(backend: Any) -> tuple[Any, tuple[str]]:
    """How a backend is pickled: by its name, since a worker unpickles its configuration before it loads plugins."""
    return _backend, (backend.name,)


def _backend(name: str) -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()
    return AttentionBackendEnum[name]
