"""How caches are copied and pickled: as tensors, numbers and names, so that `torch.load` with `weights_only=True` restores them.

A file is untrusted: buffers must be of formats that halfbyte has, and of the shapes and types that these store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from halfbyte.errors import InvalidArgument, check
from halfbyte.formats import KV_FORMATS, Format
from halfbyte.kv_buffer import KVBuffer
from halfbyte.tensors import expected_parts

if TYPE_CHECKING:
    from halfbyte.cache import KVCache

CacheT = TypeVar("CacheT", bound="KVCache")
_PARTS = ("codes", "scales", "offsets", "tail", "saturated")
#: A buffer: the name of its format (one that halfbyte does not have: the format), sink tokens, and its tensors.
_Stored = tuple[str | Format, int, dict[str, torch.Tensor | None]]


def restorable(kind: type[CacheT]) -> type[CacheT]:
    """Class decorator: instances, and those of subclasses, are copied and pickled as this module says."""
    kind.__reduce_ex__ = _reduced  # type: ignore[method-assign, assignment]
    torch.serialization.add_safe_globals([kind, _restored])
    return kind


def _reduced(cache: KVCache, protocol: int) -> tuple[Any, ...]:
    """A copy gets a lock of its own, and lengths whose version is not tracked."""
    state = {name: value for name, value in vars(cache).items() if name not in ("_version", "_lock", "keys", "values")}
    return _restored, (type(cache), _stored(cache.keys), _stored(cache.values), state)


def _stored(buffer: KVBuffer) -> _Stored:
    fmt, parts = buffer.format, {name: getattr(buffer, name) for name in _PARTS}
    return fmt.name if KV_FORMATS.get(fmt.name) == fmt else fmt, buffer.sink_tokens, parts


def _restored(kind: type[CacheT], keys: _Stored, values: _Stored, state: dict[str, Any]) -> CacheT:
    """A cache of this class. Raises `InvalidArgument` for what no cache is."""
    lengths, table = state.get("lengths"), state.get("page_table")
    for name, t in (("lengths", lengths), ("page_table", table)):
        check(isinstance(t, torch.Tensor) or (t is None and name == "page_table"), f"a stored cache has {name}={type(t).__name__}")
    cache = kind.__new__(kind)
    vars(cache).update(state)
    cache.keys, cache.values = _buffer("keys", keys), _buffer("values", values)
    return cache


def _buffer(side: str, stored: _Stored) -> KVBuffer:
    name, sinks, parts = stored
    fmt = name if isinstance(name, Format) else KV_FORMATS.get(name)
    if fmt is None:
        raise InvalidArgument(f"a stored cache has {side} of format {name!r}; known are {', '.join(KV_FORMATS)}")
    buffer = KVBuffer(fmt, **parts, sink_tokens=sinks)  # type: ignore[arg-type]
    whole = isinstance(buffer.codes, torch.Tensor) and buffer.codes.ndim == 4
    check(whole, f"a stored cache has {side} without codes [B, H, T, D]")
    shape = (*buffer.codes.shape[:3], buffer.dim)
    buffer.format.check_shape(shape, side)
    for part, (expected, dtype) in expected_parts(buffer.format, shape).items():
        t = getattr(buffer, part)
        good = isinstance(t, torch.Tensor) and tuple(t.shape) == tuple(expected) and t.dtype is dtype
        check(good, f"a stored cache has other {side}.{part} than {name} stores for {list(shape)}; the file is damaged")
    return buffer
