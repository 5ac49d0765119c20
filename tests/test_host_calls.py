"""What a cached eager call costs the host, in Python instructions and calls: never more than before.

A CPU stands in for a GPU (pretended_gpu.py): what is counted is the way from a public function to the launch of a kernel like an
earlier one. The limits are what it took when `ops/declare.py` came.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import launch_cache_ops
import pretended_gpu
from halfbyte import decode_attention, linear, qkv_projection
from launch_cache_ops import APPEND, APPEND_SLOTS, ATTENTION, LINEAR, PROJECTIONS, rotation, run_append, run_append_slots
from pretended_gpu import pretend_gpu

#: What is not counted.
STAND_INS = (__file__, launch_cache_ops.__file__, pretended_gpu.__file__)
#: (Python instructions, calls of Python functions, calls of C functions), torch and the standard library included.
LIMITS = {
    "attention": (848, 22, 20),
    "attention over rotated keys": (848, 22, 20),
    "append": (871, 30, 12),
    "append with rope and q": (978, 33, 18),
    "append_slots": (740, 18, 13),
    "linear": (630, 19, 15),
    "qkv": (960, 21, 25),
}


def counted(call: Callable[[], object]) -> tuple[int, int, int]:
    """What one call takes, called twice: once for Python's own events, once for those of C."""
    counts = {"opcode": 0, "call": 0, "c_call": 0}

    def ours(frame: FrameType) -> bool:
        return frame.f_code.co_filename not in STAND_INS

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not ours(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event in counts:
            counts[event] += 1
        return trace

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and ours(frame):
            counts[event] += 1

    before = sys.gettrace(), sys.getprofile()
    gc.collect()
    gc.disable()  # what other tests have left to finalize is not of this call
    try:
        sys.settrace(trace)
        call()
        sys.settrace(before[0])
        sys.setprofile(profile)
        call()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
        gc.enable()
    return counts["opcode"], counts["call"], counts["c_call"]


CALLS: dict[str, Callable[[], Callable[[], object]]] = {
    "attention": lambda: partial(decode_attention, **ATTENTION.plain()),
    "attention over rotated keys": lambda: partial(decode_attention, **ATTENTION.plain() | ATTENTION.options["rotated"]()),
    "append": lambda: partial(run_append, **APPEND.plain()),
    "append with rope and q": lambda: partial(run_append, **APPEND.plain() | rotation()),
    "append_slots": lambda: partial(run_append_slots, **APPEND_SLOTS.plain()),
    "linear": lambda: partial(linear, **LINEAR.plain()),
    "qkv": lambda: partial(qkv_projection, **PROJECTIONS.plain()),
}


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the limits are Python 3.11's instructions")
@pytest.mark.parametrize("name", LIMITS)
@torch.no_grad()
def test_a_cached_call_costs_the_host_no_more_than_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, call = pretend_gpu(monkeypatch), CALLS[name]()
    call()
    found = counted(call)
    assert len(gpu.replayed) == 2, "not launched like an earlier call"
    assert all(n <= limit for n, limit in zip(found, LIMITS[name], strict=True)), f"{found}; at most {LIMITS[name]}"
