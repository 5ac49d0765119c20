"""The backend class of each name: `mla.py` in models whose layers cache latents, else `backend.py`.

vLLM's CPU platform takes its own backend whatever is selected: its paths lead here, too, and the selection decides. vLLM caches
each answer by the selection, so an engine without halfbyte in the same process gets vLLM's own backend.
"""

from __future__ import annotations

from typing import Any

#: The members of AttentionBackendEnum that the CPU platform may take.
REPLACED = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")


def __getattr__(name: str) -> Any:
    """The backend class that vLLM calls `name`, or in place of the CPU platform's."""
    from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from halfbyte.errors import Unsupported
    from halfbyte.vllm.names import backend_names

    names = backend_names()
    if name not in names and name not in REPLACED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in REPLACED:
        config = get_current_vllm_config()
        by_kind = {kind: member.name for kind, member in config.attention_config.backend_per_kind.items()}
        if set(by_kind.values()) & set(names):
            raise Unsupported(
                f"backend_per_kind={by_kind}: on vLLM's CPU platform all layers share one backend; use attention_backend"
            )
        choice = config.attention_config.backend
        if choice is None or choice.name not in names:
            return resolve_obj_by_qualname(AttentionBackendEnum[name].value)
        name = choice.name
    model = getattr(get_current_vllm_config_or_none(), "model_config", None)
    module = "mla" if getattr(model, "use_mla", False) else "backend"
    return resolve_obj_by_qualname(f"halfbyte.vllm.{module}.{name}")
