"""What a cached eager call costs the host, in Python instructions and calls: never more than before.

A CPU stands in for a GPU (relaunching.py): what is counted is the way from a public function to the launch of a kernel like an
earlier one. The limits were counted on commit fc9aa77, before the call objects and the launch cache of all ops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime.jit import JITFunction

from halfbyte import WEIGHT_FORMATS, KVCache, QuantTensor, decode_attention, linear, qkv_projection
from halfbyte.ops import _decode_on_gpu, _launch_cache, _linear_on_gpu
from halfbyte.ops import append as append_op
from halfbyte.ops import decode_attention as attention_op
from halfbyte.ops import linear as linear_op
from halfbyte.plans.linear import gluon_linear
from halfbyte.tensors import expected_parts
from relaunching import Compiled, Gpu, watch_launches

#: (Python instructions, calls of Python functions, calls of C functions) inside halfbyte's own files.
LIMITS = {
    "attention": (912, 17, 63),
    "append": (943, 19, 57),
    "append with rope and q": (1022, 19, 66),
    "linear": (760, 22, 35),
    "qkv": (1248, 24, 79),
}


def counted(call: Callable[[], object]) -> tuple[int, int, int]:
    """What one call takes, called twice: once for Python's own events, once for those of C."""
    counts = {"opcode": 0, "call": 0, "c_call": 0}

    def ours(frame: FrameType) -> bool:
        return "/halfbyte/" in frame.f_code.co_filename

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
    try:
        sys.settrace(trace)
        call()
        sys.settrace(before[0])
        sys.setprofile(profile)
        call()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return counts["opcode"], counts["call"], counts["c_call"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A GPU, as far as launches go; the caches are filled before tensors say that they are on one."""
    made = Gpu(Compiled())

    def plan(weights: Any, m: int, width: int, dtype: str, device: Any, use_pdl: bool) -> Any:
        return gluon_linear(weights, m=m, width=width, dtype=dtype, use_pdl=use_pdl, num_sms=132, capability=(9, 0))

    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **kwargs: made.kernel)
    watch_launches(monkeypatch)
    monkeypatch.setattr(_decode_on_gpu, "shared", made.shared)
    monkeypatch.setattr(_linear_on_gpu, "shared", made.shared)
    monkeypatch.setattr(append_op, "stream_of", lambda device: 7)
    monkeypatch.setattr(_launch_cache, "_compiled", {})
    monkeypatch.setattr(_linear_on_gpu, "_plan", plan)
    monkeypatch.setattr(attention_op, "level_of", lambda impl, q: impl)
    monkeypatch.setattr(linear_op, "_level", lambda op, impl, x: impl)
    monkeypatch.setattr(append_op, "level", lambda op, impl, device: "triton")
    monkeypatch.setattr(append_op, "_supports_pdl", lambda device: True)
    monkeypatch.setattr(KVCache, "_capturing", lambda self: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # which is the index of a CPU's tensors
    return made


def weight(n: int = 64, k: int = 1024) -> QuantTensor:
    parts = expected_parts(WEIGHT_FORMATS["int4_g64"], (n, k))
    return QuantTensor(WEIGHT_FORMATS["int4_g64"], (n, k), **{name: torch.zeros(*of, dtype=d) for name, (of, d) in parts.items()})


def calls() -> dict[str, Callable[[], object]]:
    cache = KVCache(2, 2, 64, 64, keys="int8", values="int4_g32")
    q, (k, v) = torch.randn(2, 8, 1, 64).bfloat16(), torch.randn(2, 2, 2, 1, 64).bfloat16()
    cache.append(k, v)
    rope, x, weights = (torch.rand(2, 1, 32), torch.rand(2, 1, 32)), torch.zeros(4, 1024).bfloat16(), (weight(), weight(), weight())
    return {
        "attention": lambda: decode_attention(q, cache),
        "append": lambda: cache.append(k, v),
        "append with rope and q": lambda: cache.append(k, v, rope=rope, q=q),
        "linear": lambda: linear(x, weights[0]),
        "qkv": lambda: qkv_projection(x, weights),
    }


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the limits are Python 3.11's instructions")
@pytest.mark.parametrize("name", LIMITS)
@torch.no_grad()
def test_a_cached_call_costs_the_host_no_more_than_before(name: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(append_op, "level", lambda op, impl, device: "reference")
        call = calls()[name]
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: t.device.type == "cpu"))
    call()
    launched = len(gpu.kernel.launched)
    found = counted(call)
    assert len(gpu.kernel.launched) == launched + 2, "not launched like an earlier call"
    assert all(n <= limit for n, limit in zip(found, LIMITS[name], strict=True)), f"{found}; at most {LIMITS[name]}"
