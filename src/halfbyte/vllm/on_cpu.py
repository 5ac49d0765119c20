"""vLLM's CPU platform, which takes its own attention backend whatever is selected: its paths lead here, and the selection decides.

vLLM caches each answer by the selection, so an engine without halfbyte in the same process gets vLLM's own backend.
"""

from __future__ import annotations

from typing import Any

#: The members of AttentionBackendEnum that the CPU platform may take.
REPLACED = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")


def __getattr__(name: str) -> Any:
    """The backend class in place of the one that vLLM calls `name`."""
    if name not in REPLACED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from halfbyte.errors import Unsupported
    from halfbyte.vllm import backend
    from halfbyte.vllm.names import backend_names

    config = get_current_vllm_config().attention_config
    by_kind = {kind: member.name for kind, member in config.backend_per_kind.items()}
    if set(by_kind.values()) & set(backend_names()):
        raise Unsupported(f"backend_per_kind={by_kind}: on vLLM's CPU platform all layers share one backend; use attention_backend")
    name_of_backend = "" if config.backend is None else config.backend.name
    if name_of_backend in backend_names():
        return getattr(backend, name_of_backend)
    return resolve_obj_by_qualname(AttentionBackendEnum[name].value)
