"""The old names of `halfbyte.kv_buffer`, for those who wrap an engine's memory (`KVCache.from_buffers`)."""

from __future__ import annotations

import warnings
from typing import Any

from halfbyte import kv_buffer

_NAMES = {"Plane": "KVBuffer", "new_plane": "new_kv_buffer", **{name: name for name in ("AttentionOptions", "Cache", "Rope")}}


def __getattr__(name: str) -> Any:
    """A name of this module as it was up to 0.1."""
    if name not in _NAMES:
        raise AttributeError(f"module `halfbyte.planes` has no attribute {name!r}")
    warnings.warn(f"`halfbyte.planes.{name}` is called halfbyte.kv_buffer.{_NAMES[name]}", DeprecationWarning, stacklevel=2)
    return getattr(kv_buffer, _NAMES[name])
