"""Workspace of kernels: fp32 partial results that are never cleared, and counters that are zero between launches, where
owners of split tiles of GEMMs also wait for numbers.

Eager calls share one buffer per stream, which grows and is never freed. A CUDA graph may be replayed concurrently with anything
else, so each captured call gets memory of its own: partial results from the graph's pool, counters from a reserve that was cleared
before. Eager calls refill it: an engine that captures dozens of graphs warms each of them up with one.

An engine replays its graphs one after the other (`replay_in_turn`). There captured calls share the counters of eager ones, and so
do calls of code that it compiled, so that every call takes the plan that its graph has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfbyte.ops import compiling

#: Counters reserved for calls in CUDA graphs: enough for `_CALLS` of the largest call, at least `_RESERVE`, at most `_MOST`. They
#: are allocated once and never freed, because a graph's lifetime is unknown.
_RESERVE, _MOST, _CALLS = 1 << 20, 1 << 24, 192

_floats: dict[tuple[torch.device, int], torch.Tensor] = {}
_counters: dict[tuple[torch.device, int], torch.Tensor] = {}
#: The reserve of each device, and how many of its counters are allocated.
_reserves: dict[torch.device, tuple[torch.Tensor | None, int]] = {}
_UNUSED: tuple[None, int] = (None, 0)
#: Counters that no further call gets; graphs may still use them.
_used_up: list[torch.Tensor] = []
#: Devices of engines.
_in_turn: set[torch.device] = set()


def replay_in_turn(device: torch.device) -> None:
    """From now on the CUDA graphs of this device are never replayed concurrently, nor does compiled code keep a pool of memory."""
    _in_turn.add(device)


def floats(device: torch.device, size: int, own: bool = False) -> torch.Tensor:
    """At least `size` uninitialized fp32 numbers for one launch on this stream. own: not the buffer that is kept between calls."""
    if not _keeps(device, own) or torch.cuda.is_current_stream_capturing():
        return torch.empty(size, dtype=torch.float32, device=device)
    key = (device, stream_of(device))
    numbers = _floats.get(key)
    if numbers is None or numbers.numel() < size:
        numbers = _floats[key] = torch.empty(max(size, 1 << 16), dtype=torch.float32, device=device)
    return numbers


def _keeps(device: torch.device, own: bool) -> bool:
    """Whether eager calls take what is kept between them; not where an engine only compiles, while it loads weights."""
    return device.type == "cuda" and (not compiling.active() if device in _in_turn else not own)


def at_hand(device: torch.device, size: int, own: bool = False) -> bool:
    """Whether `counters` has so many without a launch that clears them."""
    if device.type != "cuda":
        return True
    if not torch.cuda.is_current_stream_capturing():
        return not own or device in _in_turn
    reserve, position = _reserves.get(device, _UNUSED)
    return _of_stream(device, size) is not None or (reserve is not None and position + size <= reserve.numel())


def counters(device: torch.device, size: int, own: bool = False) -> torch.Tensor:
    """At least `size` int32 zeros for one launch on the current stream, which must leave zeros."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _from_reserve(device, size)
    if not _keeps(device, own):
        return torch.zeros(size, dtype=torch.int32, device=device)
    key = (device, stream_of(device))
    buffer = _counters.get(key)
    if buffer is None or buffer.numel() < size:
        if buffer is not None and device in _in_turn:
            _used_up.append(buffer)
        buffer = _counters[key] = torch.zeros(max(size, 1 << 12), dtype=torch.int32, device=device)
    prepare(device)
    return buffer


def shared(device: torch.device, floats: int, counters: int) -> tuple[int, Sequence[torch.Tensor]] | None:
    """The current stream, and fp32 numbers and int32 zeros that eager calls on the stream share (neither, for no numbers).

    None during capture, when the buffers of earlier calls are too small, and when the reserve of counters is low: `counters`
    refills it.
    """
    if not floats:
        return stream_of(device), ()
    reserve, position = _reserves.get(device, _UNUSED)
    if torch.cuda.is_current_stream_capturing() or (reserve is not None and position > reserve.numel() // 2):
        return None
    stream = stream_of(device)
    part, count = _floats.get((device, stream)), _counters.get((device, stream))
    if part is None or count is None or part.numel() < floats or count.numel() < counters:
        return None
    return stream, (part, count)


def stream_of(device: torch.device) -> int:
    """The number of the current stream."""
    # What `torch.cuda.current_stream(device).cuda_stream` is, without making an object of it.
    return torch._C._cuda_getCurrentRawStream(device.index)


def prepare(device: torch.device) -> None:
    """Reserve counters for CUDA graphs that will be captured on this device, if there are not enough."""
    largest = max((c.numel() for (of, _), c in _counters.items() if of == device and device not in _in_turn), default=0)
    size = min(max(_RESERVE, _CALLS * largest), _MOST)
    reserve, position = _reserves.get(device, _UNUSED)
    if reserve is None or position > reserve.numel() // 2 or reserve.numel() < size:
        _used_up.extend([] if reserve is None else [reserve])
        _reserves[device] = torch.zeros(size, dtype=torch.int32, device=device), 0
        torch.cuda.current_stream(device).synchronize()  # once: a graph on any stream may use it from now on


def _from_reserve(device: torch.device, size: int) -> torch.Tensor:
    """Counters for one captured call; cleared in the graph itself if no eager call has filled the reserve before."""
    buffer = _of_stream(device, size)
    if buffer is not None:
        return buffer
    reserve, position = _reserves.get(device, _UNUSED)
    if reserve is None or position + size > reserve.numel():
        return torch.zeros(size, dtype=torch.int32, device=device)
    _reserves[device] = reserve, position + -(-size // 32) * 32  # aligned, or a second kernel would be compiled for the next call
    part = reserve[position : position + size]
    if device in _in_turn:
        _counters[device, stream_of(device)] = part
    return part


def _of_stream(device: torch.device, size: int) -> torch.Tensor | None:
    """The counters that calls on the current stream share, where captured ones may, too; None if there are fewer than `size`."""
    buffer = _counters.get((device, stream_of(device))) if device in _in_turn else None
    return buffer if buffer is not None and buffer.numel() >= size else None
