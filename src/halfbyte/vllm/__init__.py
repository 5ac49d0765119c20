"""halfbyte inside vLLM: the KV cache in packed pages, and quantized linear layers.

vLLM calls `register`, the entry point of its group vllm.general_plugins, in each of its processes. Then
`--attention-backend HALFBYTE_INT8__INT4_G32` names the formats of keys and values, and `--quantization halfbyte` loads folders of
`halfbyte quantize`. Without either, vLLM runs as if halfbyte were not there.
"""

from __future__ import annotations

import re

from halfbyte.engine import PAGE_FORMATS
from halfbyte.errors import Unsupported

#: Versions of vLLM whose plugin interface this is written for: from the first, up to but without the second.
VERSIONS = ((0, 32), (0, 34))


def register() -> None:
    """Make vLLM know the attention backends and the quantization method. May be called several times in one process."""
    from vllm.model_executor.layers import quantization
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from halfbyte.checkpoints.adapters import OWN
    from halfbyte.vllm import on_cpu
    from halfbyte.vllm.weights import HalfbyteConfig

    for name in backend_names():
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, f"halfbyte.vllm.backend.{name}")
    for name in on_cpu.REPLACED:
        register_backend(AttentionBackendEnum[name], f"halfbyte.vllm.on_cpu.{name}")
    if OWN not in quantization.QUANTIZATION_METHODS:
        quantization.register_quantization_config(OWN)(HalfbyteConfig)


def backend_names() -> dict[str, tuple[str, str]]:
    """Name of each attention backend -> names of the formats of keys and values."""
    return {f"HALFBYTE_{k}__{v}".upper(): (k, v) for k in PAGE_FORMATS for v in PAGE_FORMATS}


def check_version(version: str) -> None:
    """Raise `Unsupported` for a version of vLLM outside of `VERSIONS`."""
    found = re.match(r"(\d+)\.(\d+)", version)
    first, end = VERSIONS
    if found is None or not first <= (int(found[1]), int(found[2])) < end:
        raise Unsupported(
            f"this is vLLM {version}, and halfbyte's plugin is for {first[0]}.{first[1]} up to {end[0]}.{end[1] - 1}: "
            f"pip install 'vllm>={first[0]}.{first[1]},<{end[0]}.{end[1]}'"
        )
