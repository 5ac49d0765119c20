"""`gated_delta`: one token of the gated delta rule, its convolution, gates and norm, for decoding; one launch on a GPU."""

from __future__ import annotations

import torch

from halfbyte.arguments import check_tensor
from halfbyte.errors import check
from halfbyte.ops._library import level, pairs_launches
from halfbyte.ops.declare import Op
from halfbyte.ops.workspace import counters
from halfbyte.reference import gated_delta as reference
from halfbyte.reference.gated_delta import DeltaCall, DeltaWeights

#: What the kernel reads: it adds up in 32 bits.
_KNOWN = (torch.float16, torch.bfloat16, torch.float32)
#: Numbers of the largest state of a head that a program holds in registers.
_LARGEST = 32768
GATED_DELTA = Op("gated_delta", DeltaCall)


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weights: DeltaWeights,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """A token of each sequence through the gated delta rule (`halfbyte.reference.gated_delta`): [B, H Dv] in the type of q.

    q, k         [B, Hk, Dk], of one floating type and any strides, as all projections of the token
    v, z         [B, Hk, H / Hk, Dv]: value heads by key head; z gates the result
    b, a         [B, Hk, H / Hk], of the gates of each value head
    conv_state   [B, C, W], the last W tokens of the C channels of q, k and v; moves on by one, in place
    state        [B, H, Dk, Dv], updated in place. Both are contiguous
    impl         "auto", "triton" (a GPU, up to 32 bits) or "reference"

    Each sequence's results depend on it alone. Raises `InvalidArgument` naming the argument at fault.
    """
    out = torch.empty(len(q), v.shape[1:].numel(), dtype=q.dtype, device=q.device)
    call = DeltaCall(q, k, v, z, b, a, weights, conv_state, state, out, level("gated_delta", impl, q.device))
    _check(call)
    if call.impl == "triton" and (reason := _refusal(call)):
        check(impl == "auto", f"impl={impl!r}: {reason}; use impl='auto'")
        call = call._replace(impl="reference")
    if out.numel():
        GATED_DELTA(call)
    return out


def _run(call: DeltaCall) -> None:
    if call.impl != "triton":
        reference.gated_delta(call)
        return
    from halfbyte.kernels.block.gated_delta import launch

    q, k, v, z = (t if t.stride(-1) == 1 else t.contiguous() for t in call[:4])
    call, device = call._replace(q=q, k=k, v=v, z=z), call.q.device
    with torch.cuda.device_of(call.q):
        launch(call, counters(device, call.q.shape[0] * call.q.shape[1]), pairs_launches(device))


GATED_DELTA.register(_run, lambda call: None)


def _refusal(call: DeltaCall) -> str:
    """Why the kernel does not run a call; "" if it does."""
    w, padded = call.weights, [1 << (n - 1).bit_length() for n in call.state.shape[2:]]
    tensors = (call.q, call.conv_state, call.state, w.conv, w.conv_bias, w.a_log, w.dt_bias, w.norm)
    if any(t is not None and t.dtype not in _KNOWN for t in tensors):
        return "gated_delta has a kernel for float16, bfloat16 and float32"
    if padded[0] * padded[1] > _LARGEST:
        return f"a state of {' x '.join(map(str, padded))} has more than the {_LARGEST} numbers that the kernel takes"
    return ""


def _check(call: DeltaCall) -> None:
    """Check all but contents."""
    q, w = call.q, call.weights
    check_tensor("q", q, ("B", "Hk", "Dk"))
    (batch, key_heads, dk), device = q.shape, q.device
    check_tensor("v", call.v, (batch, key_heads, "H / Hk", "Dv"), device=device)
    group, dv = call.v.shape[2:]
    heads, channels = key_heads * group, 2 * key_heads * dk + key_heads * group * dv
    by_head = (batch, key_heads, group)
    for name, like in (("k", q.shape), ("z", call.v.shape), ("b", by_head), ("a", by_head)):
        check_tensor(name, getattr(call, name), like, device=device)
    for name, t in zip(call._fields[1:6], call[1:6], strict=True):
        check(t.dtype is q.dtype, f"{name} is {t.dtype} and q {q.dtype}; they must have the same type")
    check_tensor("conv_state", call.conv_state, (batch, channels, "W"), device=device)
    check_tensor("state", call.state, (batch, heads, dk, dv), device=device)
    for name, t in (("conv_state", call.conv_state), ("state", call.state)):
        check(t.is_contiguous(), f"{name} has strides {list(t.stride())}; pass a contiguous tensor, which is updated in place")
    shapes: dict[str, tuple[int, ...]] = {
        "conv": (channels, call.conv_state.shape[2]),
        "a_log": (heads,),
        "dt_bias": (heads,),
        "norm": (dv,),
    }
    shapes |= {} if w.conv_bias is None else {"conv_bias": (channels,)}
    for name, shape in shapes.items():
        check_tensor(f"weights.{name}", t := getattr(w, name), shape, device=device)
        check(t.is_contiguous(), f"weights.{name} has strides {list(t.stride())}; pass a contiguous tensor")
