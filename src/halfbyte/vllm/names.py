"""Names of attention backends, and supported versions of vLLM. Does not import vLLM."""

from __future__ import annotations

import re

from halfbyte.formats import KV_FORMATS

#: Supported versions of vLLM: from the first, up to but without the second.
VERSIONS = ((0, 32), (0, 34))


#: The backend in which each layer has the formats that a cache plan gives it.
PLAN = "HALFBYTE_PLAN"


def backend_name(keys: str, values: str) -> str:
    """Name of the attention backend with these formats of keys and values."""
    return f"HALFBYTE_{keys}__{values}".upper()


def backend_names() -> dict[str, tuple[str, str] | None]:
    """Name of each attention backend -> names of the formats of keys and values; None for `PLAN`.

    Backends of formats that cannot be stored in pages exist only to be refused with the reason.
    """
    return {PLAN: None} | {backend_name(k, v): (k, v) for k in KV_FORMATS for v in KV_FORMATS}


def cache_dtype(backend: str) -> str:
    """What `--kv-cache-dtype` calls the cache of a backend, in place of `--attention-backend`: 0.33 has a registry of these."""
    return backend.lower()


def refusal(version: str) -> str:
    """Why a version of vLLM is outside of `VERSIONS`, and what to do; "" for one inside."""
    version_parts = re.match(r"(\d+)\.(\d+)", version)
    first, end = VERSIONS
    if version_parts is not None and first <= (int(version_parts[1]), int(version_parts[2])) < end:
        return ""
    return (
        f"this is vLLM {version}, and halfbyte's plugin is for {first[0]}.{first[1]} up to {end[0]}.{end[1] - 1}: "
        f"pip install 'vllm>={first[0]}.{first[1]},<{end[0]}.{end[1]}'"
    )
