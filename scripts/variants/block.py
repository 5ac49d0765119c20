"""The variants of the kernels around a block's projections, of routers, of the gated delta rule, and of the greedy choice."""

from __future__ import annotations

from functools import partial

import torch

from halfbyte.kernels.block.all_reduce import Exchange
from halfbyte.kernels.block.gate import launch as launch_gated
from halfbyte.kernels.block.gated_delta import launch as launch_delta
from halfbyte.kernels.block.greedy import launch as launch_greedy
from halfbyte.kernels.block.norm import launch_add_norm, launch_norm_rows
from halfbyte.kernels.block.route import launch as launch_route
from halfbyte.kernels.compiling import Configuration, empty, recorded
from halfbyte.reference.block import GATES, KINDS, Norm
from halfbyte.reference.gated_delta import DeltaCall, DeltaWeights
from halfbyte.reference.greedy import Ends, Held
from halfbyte.reference.route import RouteCall, Routing

#: Architectures with programmatic dependent launch.
_PAIRED = (90, 100)
_HALF, _FULL = "bfloat16", "float32"
#: Routers by their models: the types of logits and gates, experts, how they choose, and whether with a bias.
_ROUTERS = {
    "qwen3-30b-a3b": (_HALF, _HALF, 128, Routing(8, "softmax", 1e-20), False),
    "gpt-oss-20b": (_HALF, _HALF, 32, Routing(4, "softmax", 1e-20), False),
    "mixtral-8x7b": (_HALF, _FULL, 8, Routing(2, "softmax", 1e-20), False),
    "qwen2-57b-a14b": (_HALF, _HALF, 64, Routing(8, "softmax"), False),
    "deepseek-v2": (_FULL, _FULL, 160, Routing(6, "softmax", None, 16.0, 8, 3, 1), False),
    "deepseek-v3": (_FULL, _FULL, 256, Routing(8, "sigmoid", 1e-20, 2.5, 8, 4, 2), True),
    "minimax-m2": (_HALF, _FULL, 256, Routing(8, "sigmoid", 1e-20), True),
    "qwen3-next-80b-a3b": (_HALF, _HALF, 512, Routing(10, "softmax", 1e-20), False),
    "longcat-flash": (_FULL, _FULL, 768, Routing(12, "softmax", None, 6.0), True),
}
#: Key heads, value heads of each, sizes of both, and types, of published layers; the last lies key head by key head.
_DELTAS = {
    "qwen3.5-2b": (16, 1, 128, 128, torch.bfloat16),
    "qwen3.5-9b": (16, 2, 128, 128, torch.bfloat16),
    "qwen3.5-27b": (16, 3, 128, 128, torch.bfloat16),
    "olmo-hybrid": (30, 1, 96, 192, torch.float16),
    "qwen3-next": (16, 2, 128, 128, torch.float16),
}


def configurations() -> list[Configuration]:
    """Sums with a norm before the next branch, behind the last, or both; norms of heads and of rows; activations."""
    found = [c for kind in KINDS for paired in (False, True) for c in _sums(kind, paired)]
    wide, norm = empty(8, 16384, dtype=torch.bfloat16), Norm(empty(16384, dtype=torch.bfloat16), 1e-6, "offset")
    found += recorded("widest", lambda: launch_add_norm(wide, wide, norm, 1.0, norm, wide, wide, False))
    found += [c for ranks in (2, 4, 8) for width in (8192, 16384) for c in _sums_over(ranks, width)]
    found += [c for activation in GATES for paired in (False, True) for c in _gates(activation, paired)]
    found += [c for name in _ROUTERS for paired in (False, True) for c in _routers(name, paired)]
    found += [c for name in _DELTAS for paired in (False, True) for c in _deltas(name, paired)]
    return found + [c for ending in ("", "ends", "refused") for c in _choices(ending)]


def _sums(kind: str, paired: bool) -> list[Configuration]:
    dtype, width = (torch.float16, 896) if kind == "exact" else (torch.bfloat16, 4096)
    norm = Norm(empty(width, dtype=dtype), 1e-6, kind)
    x, name = empty(8, width, dtype=dtype), f"{kind}{'-paired' * paired}"
    more = {"targets": _PAIRED} if paired else {}
    found = []
    for place, (after, before) in {"before": (None, norm), "both": (norm, norm), "after": (norm, None)}.items():
        out = x if before else None
        found += recorded(
            f"{name}-{place}", lambda a=after, b=before, o=out: launch_add_norm(x, x, a, 1.0, b, x, o, paired), **more
        )
    head, heads = Norm(empty(128, dtype=dtype), 1e-6, kind), empty(256, 128, dtype=dtype)
    found += recorded(f"{name}-heads", lambda: launch_norm_rows([heads, heads], [head, head], [heads, heads], paired), **more)
    return found + recorded(f"{name}-rows", lambda: launch_norm_rows([x], [norm], [x], paired), **more)


def _sums_over(ranks: int, width: int) -> list[Configuration]:
    """Of tensor-parallel ranks: rank 3's, or the last's."""
    norm, x = Norm(empty(width, dtype=torch.bfloat16), 1e-6, "rounded"), empty(8, width, dtype=torch.bfloat16)
    exchange = Exchange(empty(ranks, dtype=torch.int64), empty(18, dtype=torch.int32), min(3, ranks - 1), 18)
    spills = (ranks, width) == (2, 8192)
    name, why = f"ranks{ranks}-{width}", "8 bytes on sm_100, none on sm_90, which it was measured on" if spills else ""
    launch = partial(launch_add_norm, x, x, None, 1.0, norm, x, x, True, exchange)
    return recorded(name, launch, targets=_PAIRED, may_spill=why)


def _gates(activation: str, paired: bool) -> list[Configuration]:
    gate, out = empty(8, 2 * 14336, dtype=torch.bfloat16)[:, :14336], empty(8, 14336, dtype=torch.bfloat16)
    more = {"targets": _PAIRED} if paired else {}
    return recorded(f"{activation}{'-paired' * paired}", lambda: launch_gated(gate, gate, activation, out, paired), **more)


def _routers(name: str, paired: bool) -> list[Configuration]:
    source, dtype, experts, routing, has_bias = _ROUTERS[name]
    bias = empty(experts, dtype=torch.float32) if has_bias else None
    call = RouteCall(empty(8, experts, dtype=getattr(torch, source)), routing, bias, dtype)
    ids, gates = (empty(8, routing.top_k, dtype=kind) for kind in (torch.int64, getattr(torch, dtype)))
    more = {"targets": _PAIRED} if paired else {}
    return recorded(f"route-{name}{'-paired' * paired}", lambda: launch_route(call, ids, gates, paired), **more)


def _deltas(name: str, paired: bool) -> list[Configuration]:
    key_heads, group, dk, dv, dtype = _DELTAS[name]
    heads, widths = key_heads * group, (dk, dk, group * dv, group * dv, group, group)
    if name == "qwen3-next":
        parts = empty(8, key_heads, sum(widths), dtype=dtype).split(widths, -1)
    else:
        parts = [empty(8, key_heads * n, dtype=dtype).unflatten(-1, (key_heads, n)) for n in widths]
    q, k, *rest = parts
    v, z, b, a = (t.unflatten(-1, (group, -1)) for t in rest)
    channels, whole = 2 * key_heads * dk + heads * dv, partial(empty, dtype=dtype)
    weights = DeltaWeights(whole(channels, 4), None, *2 * (empty(heads, dtype=torch.float32),), whole(dv), 1e-6)
    states = whole(8, channels, 4), empty(8, heads, dk, dv, dtype=torch.float32)
    call = DeltaCall(q, k, v, z, b[..., 0], a[..., 0], weights, *states, whole(8, heads * dv))
    more = {"targets": _PAIRED} if paired else {}
    return recorded(f"{name}{'-paired' * paired}", lambda: launch_delta(call, empty(8 * key_heads), paired), **more)


def _choices(ending: str) -> list[Configuration]:
    """Of Llama 3's vocabulary in bf16."""
    logits, numbers, number = empty(8, 128256, dtype=torch.bfloat16), empty(8, 1, dtype=torch.int64), empty(dtype=torch.int64)
    held = Held(empty(8, 1024, dtype=torch.int64), numbers, numbers, empty(8, dtype=torch.bool))
    ends = Ends(empty(2, dtype=torch.int64), number, ending == "refused") if ending else None
    return recorded(f"greedy-{ending or 'endless'}", lambda: launch_greedy(logits, held, ends))
