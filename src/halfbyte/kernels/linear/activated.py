"""Gated activations of mixtures of experts, on columns that alternate between a gate and its up projection."""

import triton
import triton.language as tl


@triton.jit
def activated(y, M: tl.constexpr, C: tl.constexpr):
    """[M, n] -> [M, n / 2], see `Activation`; as it is without one. C has `n` and `activation`."""
    if C.activation is not None:
        A: tl.constexpr = C.activation
        gate, up = tl.split(tl.reshape(y, (M, C.n // 2, 2)))
        if A.limit < float("inf"):
            gate = tl.minimum(gate, A.limit, propagate_nan=tl.PropagateNan.ALL)
            up = tl.clamp(up, -A.limit, A.limit, propagate_nan=tl.PropagateNan.ALL)
        if A.kind == "silu":
            gate = gate * _sigmoid(A.alpha * gate)
        elif A.kind == "gelu_tanh":
            gate = gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        else:
            gate = gate * 0.5 * (1.0 + tl.math.erf(gate * 0.7071067811865476))
        y = gate * (up + A.shift)
    return y


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))
