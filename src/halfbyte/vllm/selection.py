"""The backend class of each name: `mla.py` in models whose layers cache latents, else `backend.py`.

vLLM takes a backend of its own, whatever is selected, on its CPU platform and for models whose values have fewer dims than keys.
For a selection by `--kv-cache-dtype`, which all others decline, a GPU takes one of two. The paths of all these lead here, and the
selection decides. vLLM caches each answer by the selection, so an engine without halfbyte in the same process gets vLLM's own
backend.
"""

from __future__ import annotations

from typing import Any

#: The members of AttentionBackendEnum that the CPU platform may take, some models, and a GPU for any cache dtype.
ON_CPU = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")
BY_MODEL = ("FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV")
BY_CACHE_DTYPE = ("FLEX_ATTENTION", "TRITON_MLA")
REPLACED = (*ON_CPU, *BY_MODEL, *BY_CACHE_DTYPE)


def __getattr__(name: str) -> Any:
    """The backend class that vLLM calls `name`, or in place of vLLM's own."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from halfbyte.vllm.names import backend_names

    names, config = backend_names(), get_current_vllm_config_or_none()
    if name not in names and name not in REPLACED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in REPLACED:
        choice = None if config is None else _choice(config, name)
        if choice is None:
            if config is not None and name in ON_CPU:
                check_used(config, name)
            return resolve_obj_by_qualname(AttentionBackendEnum[name].value)
        name = choice
    model = getattr(config, "model_config", None)
    module = "mla" if getattr(model, "use_mla", False) else "backend"
    return resolve_obj_by_qualname(f"halfbyte.vllm.{module}.{name}")


def check_used(config: Any, backend: str) -> None:
    """Raise where an engine has options for halfbyte's cache, and another attention backend for all layers and drafts."""
    from halfbyte.errors import check
    from halfbyte.vllm.names import backend_names

    if config.speculative_config is not None or config.attention_config.backend_per_kind:
        return
    check(
        backend in backend_names() or "halfbyte" not in (config.additional_config or {}),
        f"additional_config has halfbyte options, and attention backend {backend} is not halfbyte's; give --attention-backend "
        f"HALFBYTE_INT8__INT8, or another of halfbyte's, or leave the options out",
    )


def _choice(config: Any, replaced: str) -> str | None:
    """The backend of halfbyte that an engine's configuration names; in place of some, by its cache dtype alone."""
    from halfbyte.errors import Unsupported
    from halfbyte.vllm.names import backend_names, cache_dtype

    names, attention = backend_names(), config.attention_config
    by_kind = {kind: member.name for kind, member in attention.backend_per_kind.items()}
    if replaced in ON_CPU and set(by_kind.values()) & set(names):
        raise Unsupported(f"backend_per_kind={by_kind}: on vLLM's CPU platform all layers share one backend; use attention_backend")
    if replaced not in BY_CACHE_DTYPE and attention.backend is not None and attention.backend.name in names:
        return str(attention.backend.name)
    return {cache_dtype(name): name for name in names}.get(config.cache_config.cache_dtype)
